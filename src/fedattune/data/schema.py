"""The agreement of a federation's nodes about their data, since no node sees the data of another."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import yaml
from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.io import read_yaml
from ..core.options import MAX_SHOWN_CHARS, StrictSchema, describe_errors, format_value
from ..core.targets import KIND_WORDS, NUMBER_KINDS, TargetKind, find_info_kind
from .types import Array, Shape, TargetScale

Names = tuple[str, ...]
NestedNumbers = float | list[Any]
"""Numbers in nested lists, as in JSON."""
TIME_SUFFIX = " %H:%M:%S"
"""The end of the format of a date column that holds times."""
MISSING_CATEGORY = "missing"
"""The category of cells without a value."""
OTHER_CATEGORY = "other"
"""The category of rare values where a column has too many, and of values that are new."""
ALWAYS_COMPARED = ("classes", "labels", "outputs", "positions", "input_shape", "input_type")
"""Fields in which two schemas must agree, also if one does not describe a table."""


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Schema(StrictSchema):
    """The agreement that lets all clients train one model: the model's input, the classes, the columns of a table.

    `infer_schema` makes a schema from data. `Schema.read` reads one written by hand, as JSON or YAML with the keys
    below. A schema holds no rows, but it does hold names of columns, categories and classes.

        classes: names of the classes, in the order of the model's outputs; empty for labels and numbers
        labels: names of the labels, in the order of the model's outputs, if several are each true or false
        outputs: names of the numbers to predict, if there are several
        positions: sizes of the positions of a sample that each have a class, such as [64, 64]
        target_mean, target_deviation: constants of a number to predict: models learn (value - mean) / deviation; lists
            of several numbers
        input_shape: shape of one sample; may be left out for a table, where it follows from the columns

    Of a table, whose features are its numbers, the marks of missing numbers, and one column per category:

        numbers: number columns; each client standardises its own
        units: units of the numbers that have one, such as kg or %; the target may be among them
        decimals: decimal sign of the numbers that are not written with a point, as far as cells do not show it
        flagged: columns of numbers that may lack values; a further column of 0 and 1 marks each missing value
        categories: text columns, each with all categories that a client may have; cells without a value
            have the category "missing"
        grouped: text columns whose category "other" stands for all rare values, and for new ones; if left out, all
            columns that have it
        dates: columns of dates, among the numbers as days since 1970, with their formats; sine and cosine of month,
            weekday and hour follow
        texts: columns of free text, each with the number of hashed inputs
        tokens: the one column whose text is read as token numbers, with its tokenizer; it has no other column beside it
        max_tokens: token numbers of a row of that column
        target: column of the class, or the number to predict; of several, the columns with commas between

    Of other samples, whose model input is (x - shift) * scale where they have such constants:

        shift, scale: nested lists that fit the input shape, such as [[[0.0625]]]
        input_type: type of the model's input: "float", or "int64" for whole numbers such as those of tokens

    Raises:
        pydantic.ValidationError: values that are no schema. The functions that read schemas raise `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    # Pydantic checks a field after the fields above it.
    classes: Names
    labels: Names = ()
    outputs: Names = ()
    positions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    numbers: Names = ()
    units: dict[str, str] = Field(default_factory=dict)
    decimals: dict[str, Literal[".", ","]] = Field(default_factory=dict)
    flagged: Names = ()
    categories: dict[str, Names] = Field(default_factory=dict)
    grouped: Names | None = None
    dates: dict[str, str] = Field(default_factory=dict)
    texts: dict[str, Annotated[int, Field(ge=1, le=1_000_000)]] = Field(default_factory=dict)
    tokens: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(default=None, validate_default=True)
    target: str | None = Field(default=None, validate_default=True)
    input_shape: tuple[int, ...] = Field(default=(), validate_default=True)
    input_type: Literal["float", "int64"] = "float"
    shift: NestedNumbers | None = None
    scale: NestedNumbers | None = None
    target_mean: _Finite | tuple[_Finite, ...] | None = None
    target_deviation: _Positive | tuple[_Positive, ...] | None = None

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read the schema that `to_json` wrote.

        Raises:
            ConfigError: the text is no schema; the message names every mistake.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the schema is not JSON: {error}; write it with Schema.to_json") from error
        if not isinstance(values, dict):
            raise ConfigError(f"the schema must be an object with classes and so on, got {text[:MAX_SHOWN_CHARS]}")
        return make_schema(values, "the schema")

    @classmethod
    def read(cls, path: Path | str) -> "Schema":
        """Read the schema in a file of JSON or YAML.

        Raises:
            ConfigError: the file cannot be read, or holds no schema.
        """
        return make_schema(read_yaml(Path(path)), str(path))

    def to_json(self) -> str:
        """Return the schema in one line, without the keys that have their default."""
        return self.model_dump_json(exclude_defaults=True)

    def to_yaml(self) -> str:
        """Return the schema as the text of a file for people to read and edit."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    @property
    def target_scale(self) -> TargetScale | None:
        """The constants of a target that is a number or several; None for others, or if they are not known."""
        if self.kind not in NUMBER_KINDS or self.target_mean is None or self.target_deviation is None:
            return None
        return TargetScale(self.target_mean, self.target_deviation)

    @property
    def kind(self) -> TargetKind:
        """Kind of the target; see `core.targets`."""
        return "positions" if self.positions else find_info_kind(self.classes, self.labels, self.outputs)

    @property
    def has_parts(self) -> bool:
        """True if a target has several labels, numbers or positions."""
        return bool(self.labels or self.outputs or self.positions)

    @property
    def target_columns(self) -> Names:
        """Columns of a table that hold the target."""
        return self.labels or self.outputs or (() if self.target is None else (self.target,))

    @property
    def columns(self) -> Names:
        """Columns of a table that become features; none for other data."""
        return (*self.numbers, *self.categories, *self.texts, *self.tokens)

    def has_group(self, column: str) -> bool:
        """Tell whether a text column has a category for all values that it does not list."""
        return OTHER_CATEGORY in self.categories[column] and (self.grouped is None or column in self.grouped)

    def scaling(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return shift and scale as float32 tensors, None where the schema has none."""
        one, other = (None if k is None else torch.tensor(k, dtype=torch.float32) for k in (self.shift, self.scale))
        return one, other

    def check(self, other: "Schema", where: str) -> None:
        """Compare the `other` schema of data, called `where` in messages, with this one.

        Constants that the data lack are no difference, nor are columns that only one schema names.

        Raises:
            DataError: the schemas differ.
        """
        for field in type(self).model_fields:
            value, other_value = getattr(self, field), getattr(other, field)
            if field in ("target_mean", "target_deviation", "decimals", "grouped"):
                # Every node takes the constants and groups of the common schema, and may write numbers in its own way.
                continue
            if field in ("shift", "scale"):
                is_same = (other.shift is None and other.scale is None) or self._is_equal(value, other_value)
            else:
                is_table = self.columns and other.columns
                is_same = value == other_value or not (is_table or field in ALWAYS_COMPARED)
            if not is_same:
                raise DataError(
                    f"{where} does not fit the schema: expected {field} {format_value(value)}, got "
                    f"{format_value(other_value)}; all nodes need data of one schema"
                )

    def _is_equal(self, one: NestedNumbers | None, other: NestedNumbers | None) -> bool:
        if one is None or other is None:
            return one is other
        a, b = (np.broadcast_to(np.array(values), self.input_shape) for values in (one, other))
        return np.array_equal(a, b)

    @field_validator("classes", "labels", "outputs", "numbers", "flagged")
    @classmethod
    def _check_distinct(cls, names: Names) -> Names:
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{repeated!r} is named twice")
        return names

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, names: Names) -> Names:
        if len(names) == 1:
            raise ValueError("expected two classes or more, or none if the target is a number")
        return names

    @field_validator("labels", "outputs")
    @classmethod
    def _check_several(cls, names: Names, info: ValidationInfo) -> Names:
        others = [key for key in ("classes", "labels") if key != info.field_name and info.data.get(key)]
        if names and others:
            raise ValueError(f"a target has {others[0]} or these, not both")
        if len(names) == 1:
            raise ValueError("expected two names or more, or none")
        return names

    @field_validator("flagged", "dates")
    @classmethod
    def _check_numbers(cls, names: Names | dict[str, str], info: ValidationInfo) -> Names | dict[str, str]:
        numbers = set(info.data.get("numbers", names))
        strange = [name for name in names if name not in numbers]
        if strange:
            raise ValueError(f"{strange[0]!r} is none of the numbers")
        return names

    @field_validator("categories")
    @classmethod
    def _check_categories(cls, categories: dict[str, Names], info: ValidationInfo) -> dict[str, Names]:
        numbers = set(info.data.get("numbers", ()))
        for name, values in categories.items():
            if name in numbers:
                raise ValueError(f"{name!r} is one of the numbers, too")
            if not values:
                raise ValueError(f"{name!r} has no categories")
            cls._check_distinct(values)
        return categories

    @field_validator("grouped")
    @classmethod
    def _check_grouped(cls, names: Names | None, info: ValidationInfo) -> Names | None:
        categories = info.data.get("categories")
        if categories is None:
            return names  # an earlier validator has found the mistake
        if strange := [name for name in names or () if OTHER_CATEGORY not in categories.get(name, ())]:
            raise ValueError(f"{strange[0]!r} has no category {OTHER_CATEGORY!r}")
        return names

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, tokens: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        others = [name for key in ("numbers", "categories", "texts") for name in info.data.get(key, ())]
        if len(tokens) > 1 or (tokens and others):
            raise ValueError("one column is read as tokens, and there is no other feature beside it")
        return tokens

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, length: int | None, info: ValidationInfo) -> int | None:
        if (length is not None) != bool(info.data.get("tokens")) and "tokens" in info.data:
            raise ValueError("a column of tokens and the number of tokens go together")
        return length

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: str | None, info: ValidationInfo) -> str | None:
        columns = [name for key in ("numbers", "categories", "texts", "tokens") for name in info.data.get(key, ())]
        several = info.data.get("labels") or info.data.get("outputs") or (target,)
        if set(several) & set(columns):
            raise ValueError("it is one of the features, too")
        if (target is not None) != bool(columns) and {"numbers", "categories"} <= set(info.data):
            raise ValueError("a table has both a target and features, in numbers or categories")
        return target

    @field_validator("input_shape")
    @classmethod
    def _check_shape(cls, shape: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        values = info.data
        if not {"numbers", "flagged", "categories"} <= set(values):
            return shape  # an earlier validator has found the mistake
        n = len(values["numbers"]) + len(values["flagged"]) + sum(map(len, values["categories"].values()))
        n += sum(map(count_date_inputs, values.get("dates", {}).values())) + sum(values.get("texts", {}).values())
        n += values.get("max_tokens") or 0
        if n and shape not in ((), (n,)):
            raise ValueError(f"the columns of the table make ({n},); leave it out")
        if not n and (not shape or min(shape) < 1):
            raise ValueError("expected the sizes of one sample, such as [1, 28, 28]")
        return (n,) if n else shape

    @field_validator("shift", "scale")
    @classmethod
    def _check_scaling(cls, values: NestedNumbers | None, info: ValidationInfo) -> NestedNumbers | None:
        if values is None or "input_shape" not in info.data:
            return values
        if info.data.get("tokens"):
            raise ValueError("token numbers are not scaled; leave it out")
        if info.data.get("numbers") or info.data.get("categories"):
            raise ValueError("each client standardises its own numbers of a table; leave it out")
        shape = info.data["input_shape"]
        with suppress(ValueError, TypeError):  # no numbers, or lists of different lengths
            array = np.array(values, dtype=np.float32)
            if fits(array, shape) and np.isfinite(array).all():
                shortest = [float(str(value)) for value in array.ravel()]  # decimals that give the same float32
                return cast(NestedNumbers, np.array(shortest).reshape(array.shape).tolist())
        raise ValueError(f"expected numbers in lists that fit the input shape {shape}")


def fits(constants: Array, shape: Shape) -> bool:
    """Tell whether constants can be broadcast to a sample of this shape."""
    try:
        return np.broadcast_shapes(constants.shape, shape) == shape
    except ValueError:
        return False


def count_date_inputs(format_: str) -> int:
    """Return the number of inputs of a date column besides its days: month and weekday, and the hour with times."""
    return 4 + 2 * format_.endswith(TIME_SUFFIX)


def describe_target(scale: TargetScale | None) -> dict[str, float | tuple[float, ...]]:
    """Return the constants of a target as the keys of a schema."""
    return {} if scale is None else {"target_mean": scale.mean, "target_deviation": scale.deviation}


def describe_groups(categories: Mapping[str, Collection[str]], grouped: Collection[str]) -> Names | None:
    """Return the field `grouped` of a schema: None if the columns with the category `other` are all grouped."""
    is_all = all(OTHER_CATEGORY not in names or column in grouped for column, names in categories.items())
    return None if is_all else tuple(grouped)


def make_schema(values: Mapping[str, Any], where: str) -> Schema:
    """Check the values of a schema; `where` says in messages where the values are from."""
    try:
        return Schema.model_validate(values)
    except ValidationError as error:
        fields = list(Schema.model_fields)
        phrases = describe_errors(error, unknown=lambda key: f"unknown key {key!r}; {did_you_mean(key, fields)}")
        raise ConfigError(f"{where}: {'; '.join(phrases)}") from error


def merge_schemas(schemas: Sequence[Schema]) -> Schema:
    """Return the schema that several tables can share: all their columns, categories and classes.

    A column that one table lacks holds no value there, so the merged column may lack values.
    """
    if len(kinds := {schema.kind for schema in schemas}) > 1:
        words = " and ".join(sorted(KIND_WORDS[kind] for kind in kinds))
        raise DataError(f"tables must have one kind of target, got {words}; give --set table.target_type=...")
    targets = sorted({str(schema.target) for schema in schemas})
    if len(targets) > 1:
        raise DataError(f"tables must have one target, got {', '.join(targets)}; rename these columns")
    numbers = dict.fromkeys(name for schema in schemas for name in schema.numbers)
    texts: dict[str, set[str]] = {}
    for schema in schemas:
        for name, categories in schema.categories.items():
            texts.setdefault(name, set()).update(categories)
    for name in texts:
        if name in numbers:
            raise DataError(
                f"column {name!r} holds numbers in one table and text in another; correct its cells, or write a "
                "schema by hand that lists its categories"
            )
    if len({(*schema.tokens.items(), schema.max_tokens) for schema in schemas}) > 1:
        raise DataError("tables must read their text alike: one column of tokens, one tokenizer, one max_tokens")
    lacking = {name for schema in schemas for name in {*numbers, *texts} - set(schema.columns)}
    for name in lacking & set(texts):
        texts[name].add(MISSING_CATEGORY)
    lacking.update(name for schema in schemas for name in schema.flagged)
    grouped = [name for name in texts if any(name in one.categories and one.has_group(name) for one in schemas)]
    return Schema(
        classes=_sort_classes({name for schema in schemas for name in schema.classes}),
        labels=schemas[0].labels,
        outputs=schemas[0].outputs,
        numbers=tuple(numbers),
        flagged=tuple(name for name in numbers if name in lacking),
        categories={name: tuple(sorted(categories)) for name, categories in texts.items()},
        grouped=describe_groups(texts, grouped),
        units=_merge_units(schemas),
        decimals={name: one for schema in schemas for name, one in schema.decimals.items()},
        dates={name: one for schema in schemas for name, one in schema.dates.items()},
        texts={name: n for schema in schemas for name, n in schema.texts.items()},
        tokens=schemas[0].tokens,
        max_tokens=schemas[0].max_tokens,
        target=targets[0],
    )


def _merge_units(schemas: Sequence[Schema]) -> dict[str, str]:
    """Return the units of all columns; two units of one column are refused."""
    units: dict[str, str] = {}
    for name, unit in (item for schema in schemas for item in schema.units.items()):
        if units.setdefault(name, unit) != unit:
            raise DataError(
                f"column {name!r} is in {units[name]!r} in one table and in {unit!r} in another; convert one of them"
            )
    return units


def _sort_classes(classes: set[str]) -> Names:
    """Sort classes as one table of all rows would: numbers by size, text by the alphabet."""
    try:
        return tuple(sorted(classes, key=int))
    except ValueError:
        return tuple(sorted(classes))
