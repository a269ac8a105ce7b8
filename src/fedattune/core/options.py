"""Turn the keyword-only parameters of a factory into options of the user.

Algorithms, models, partitions and data sources share this mechanism. `fedattune list` lists the keywords,
`--set name.option=value` sets them, their annotations check the values, and a run stores them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator

from .errors import ConfigError, did_you_mean

MAX_SHOWN_CHARS = 60
"""Characters of a wrong value that a message repeats."""


def _is_number(annotation: Any) -> bool:
    kinds = get_args(annotation)
    return bool not in kinds and (annotation in (int, float) or any(_is_number(kind) for kind in kinds))


class StrictSchema(BaseModel):
    """Options that refuse true and false as numbers; Python and Pydantic take them for 1 and 0."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("input should be a number, not true or false")
        return value


def describe_errors(
    error: ValidationError,
    where: Callable[[str], str] = str,
    unknown: Callable[[str], str] = "unknown option {!r}".format,
) -> list[str]:
    """Describe each wrong key in one phrase."""
    phrases: dict[str, str] = {}
    for one in error.errors():
        key = str(one["loc"][0])
        reason = one["msg"].removeprefix("Value error, ")
        if isinstance(limit := one.get("ctx", {}).get("le"), float) and limit >= 1e6:
            reason = f"input should be at most {limit:g}"  # Pydantic writes all its digits
        phrases.setdefault(
            key,
            unknown(key)
            if one["type"] == "extra_forbidden"
            else f"{where(key)}: it has no default; give a value"
            if one["type"] == "missing"
            else f"{where(key)}: {reason[:1].lower()}{reason[1:]}, got {format_value(one['input'])}",
        )
    return list(phrases.values())


def format_value(value: object) -> str:
    """Return a wrong value as Python writes it, shortened, for a message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


T = TypeVar("T")

Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
"""An option that is a number above 0."""

NonNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""An option that is a number of at least 0."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""An option that is a fraction, from 0 to 1."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""An option that is a whole number of at least 1."""


def option(description: str, default: Any = None, **limits: Any) -> Any:
    """Make the field of an option of a command from its text in `--help`, its default, and keywords of `Field`."""
    return Field(default, description=description, **limits)


class Option(NamedTuple):
    """One keyword option of a factory."""

    name: str
    default: Any


def summarize(factory: Callable[..., Any]) -> str:
    """Return the first paragraph of the factory's docstring as one line."""
    paragraph = inspect.cleandoc(factory.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def list_options(factory: Callable[..., Any]) -> list[Option]:
    """List the factory's keyword-only parameters and their defaults."""
    return [
        Option(p.name, p.default)
        for p in inspect.signature(factory).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def list_keywords(function: Callable[..., Any]) -> list[str]:
    """List the parameters that can be given by keyword, without those that `**` collects."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]


_keywords: ContextVar[Mapping[str, str] | None] = ContextVar("keywords", default=None)
"""In a Python function, the options that it calls by another name; None on the command line."""


@contextmanager
def name_keywords(renamed: Mapping[str, str]) -> Iterator[None]:
    """Let messages name options as keywords of Python, `renamed` ones by their other name."""
    token = _keywords.set(renamed)
    try:
        yield
    finally:
        _keywords.reset(token)


def write_option(name: str) -> str:
    """Write an option as its user does: `--time-column` on the command line, `time_column` in Python."""
    renamed = _keywords.get()
    return "--" + name.replace("_", "-") if renamed is None else renamed.get(name, name)


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return an entry of a table; an error suggests the nearest name."""
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}; {did_you_mean(name, table)}")
    return table[name]


def check_options(name: str, factory: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options of `factory`: those given, else the defaults. An error names all faults."""
    schema = _schema(name, factory)
    fields = schema.model_fields
    errors = [f"{name} has no option {key!r}; {did_you_mean(key, fields)}" for key in values if key not in fields]
    options: dict[str, Any] = {}
    try:
        model = schema(**{k: v for k, v in values.items() if k in fields})
        options = {key: getattr(model, key) for key in fields}
    except ValidationError as error:
        errors += describe_errors(error, where=lambda key: f"{name}.{key}")
    if errors:
        raise ConfigError("; ".join(dict.fromkeys(errors)))
    return options


@lru_cache(maxsize=256)
def _schema(name: str, factory: Callable[..., Any]) -> type[StrictSchema]:
    """Make the schema of the factory's options, which takes a hundred times as long as to use it."""
    hints = inspect.get_annotations(factory, eval_str=True)
    fields: dict[str, Any] = {
        o.name: (hints.get(o.name, Any), ... if o.default is inspect.Parameter.empty else o.default)
        for o in list_options(factory)
    }
    return create_model(name, __base__=StrictSchema, **fields)


def build(name: str, factory: Callable[..., T], values: Mapping[str, Any], *fixed: Any) -> T:
    """Call `factory(*fixed, **options)` with checked options."""
    options = check_options(name, factory, values)
    try:
        return factory(*fixed, **options)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
