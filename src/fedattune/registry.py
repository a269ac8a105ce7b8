"""Tables of named factories whose keyword-only parameters are the user's options.

One mechanism serves algorithms, models, partitions and data sources: what a factory takes by keyword is
listed by `fedattune list`, set with `--set name.option=value`, checked against its annotation, and stored.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError, create_model

from .checked import Checked, explain
from .errors import ConfigError, did_you_mean

T = TypeVar("T")

Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
"""An option that is a number above 0."""

NonNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""An option that is a number of at least 0."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""An option that is a share, from 0 to 1."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""An option that is a whole number of at least 1."""


class Option(NamedTuple):
    """One keyword option of a factory."""

    name: str
    default: Any


def summary(factory: Callable[..., Any]) -> str:
    """First sentence of the factory's docstring, on one line."""
    paragraph = inspect.cleandoc(factory.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def options(factory: Callable[..., Any]) -> list[Option]:
    """The factory's keyword-only parameters, each with its default.

    Examples:
        >>> from fedattune.algorithms import fedprox
        >>> options(fedprox)
        [Option(name='mu', default=0.01), Option(name='weighting', default='samples')]

    """
    return [
        Option(p.name, p.default)
        for p in inspect.signature(factory).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry called `name`.

    Raises:
        ConfigError: no such entry; the message names the nearest one.

    """
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}; {did_you_mean(name, table)}")
    return table[name]


def check_options(name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of `factory`, those `given` converted to the annotated types, the others at their default.

    Raises:
        ConfigError: unknown options or impossible values, all of them in one message.

    """
    schema = _schema(name, factory)
    fields = schema.model_fields
    errors = [
        f"{name} has no option {key!r}; {did_you_mean(key, fields)}" for key in given if key not in fields
    ]
    checked: dict[str, Any] = {}
    try:
        model = schema(**{k: v for k, v in given.items() if k in fields})
        checked = {key: getattr(model, key) for key in fields}
    except ValidationError as error:
        errors += explain(error, where=lambda key: f"{name}.{key}")
    if errors:
        raise ConfigError("; ".join(dict.fromkeys(errors)))
    return checked


@lru_cache(maxsize=256)
def _schema(name: str, factory: Callable[..., Any]) -> type[Checked]:
    """What checks the factory's options; making it takes a hundred times as long as using it."""
    hints = inspect.get_annotations(factory, eval_str=True)
    fields: dict[str, Any] = {o.name: (hints[o.name], o.default) for o in options(factory)}
    return create_model(name, __base__=Checked, **fields)


def build(name: str, factory: Callable[..., T], given: Mapping[str, Any], *fixed: Any) -> T:
    """Call `factory(*fixed, **options)` with checked options.

    Raises:
        ConfigError: unknown options, impossible values, or a combination that the factory refuses.

    """
    checked = check_options(name, factory, given)
    try:
        return factory(*fixed, **checked)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
