"""What the nodes of a federation must agree on, since none of them sees the data of the others.

One schema for several tables, each of which knows only its own categories and classes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.io import read_yaml
from ..core.options import MAX_SHOWN_CHARS, StrictSchema, describe_errors
from .types import Array

Names = tuple[str, ...]


NestedNumbers = float | list[Any]  # nested lists


MISSING_CATEGORY = "missing"
"""The category of cells without a value."""


class Schema(StrictSchema):
    """What all clients must agree on to train one model: its input, the classes, and the columns of a table.

    It is made from data by `infer_schema`, or written by hand, as JSON or YAML with the keys below, and read by
    `Schema.read`. It holds no rows, but names of columns, categories and classes.

        classes: the classes' names, in the order of the model's outputs
        input_shape: the shape of one sample; that of a table follows from its columns and may be left out

    Of a table, whose features are its numbers, the marks of what is missing, and one column per category:

        numbers: the columns that hold numbers; each client standardises its own
        flagged: those of them that may lack values, which a further column of 0 and 1 marks
        categories: the columns that hold text, each with all categories that a client may have; the category
            "missing" is that of cells without a value
        target: the column that holds the class

    Of other samples, the model's input being (x - shift) * scale, where they have such constants:

        shift, scale: nested lists that fit the input shape, such as [[[0.0625]]]

    Raises:
        pydantic.ValidationError: a schema that cannot be; those that are read raise `ConfigError`.

    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    # A field is checked against those above it.
    classes: Names = Field(min_length=2)
    numbers: Names = ()
    flagged: Names = ()
    categories: dict[str, Names] = Field(default_factory=dict)
    target: str | None = Field(default=None, validate_default=True)
    input_shape: tuple[int, ...] = Field(default=(), validate_default=True)
    shift: NestedNumbers | None = None
    scale: NestedNumbers | None = None

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """The schema that `to_json` wrote.

        Raises:
            ConfigError: it is no schema; the message names what is wrong.

        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the schema is not JSON: {error}; write it with Schema.to_json") from error
        if not isinstance(found, dict):
            raise ConfigError(
                f"the schema must be an object with classes and so on, got {text[:MAX_SHOWN_CHARS]}"
            )
        return make_schema(found, "the schema")

    @classmethod
    def read(cls, path: Path | str) -> "Schema":
        """The schema in a file of JSON or YAML.

        Raises:
            ConfigError: it cannot be read, or is no schema.

        """
        return make_schema(read_yaml(Path(path)), str(path))

    def to_json(self) -> str:
        """The schema in one line, without what it does not have."""
        return self.model_dump_json(exclude_defaults=True)

    def to_yaml(self) -> str:
        """The schema as a file to be read and edited."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    @property
    def columns(self) -> Names:
        """The columns of a table that become features; none of other data."""
        return (*self.numbers, *self.categories)

    def check(self, found: "Schema", where: str) -> None:
        """Compare the schema of data, called `where` in messages, with this one.

        Constants that the data lack are no difference, nor are columns that only one of both names.

        Raises:
            DataError: they differ.

        """
        for field in type(self).model_fields:
            wanted, got = getattr(self, field), getattr(found, field)
            if field in ("shift", "scale"):
                bare = found.shift is None and found.scale is None
                same = bare or self._equal(wanted, got)
            elif field in ("classes", "input_shape"):
                same = wanted == got
            else:
                same = wanted == got or not (self.columns and found.columns)
            if not same:
                raise DataError(
                    f"{where} does not fit the schema: expected {field} {_abbreviate(wanted)}, got {_abbreviate(got)}; "
                    "all "
                    "nodes need data of one schema"
                )

    def _equal(self, one: NestedNumbers | None, other: NestedNumbers | None) -> bool:
        if one is None or other is None:
            return one is other
        a, b = (np.broadcast_to(np.array(values), self.input_shape) for values in (one, other))
        return np.array_equal(a, b)

    @field_validator("classes", "numbers", "flagged")
    @classmethod
    def _distinct(cls, names: Names) -> Names:
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{repeated!r} is named twice")
        return names

    @field_validator("flagged")
    @classmethod
    def _among_numbers(cls, names: Names, info: ValidationInfo) -> Names:
        strange = [name for name in names if name not in info.data.get("numbers", names)]
        if strange:
            raise ValueError(f"{strange[0]!r} is none of the numbers")
        return names

    @field_validator("categories")
    @classmethod
    def _own_columns(cls, categories: dict[str, Names], info: ValidationInfo) -> dict[str, Names]:
        for name, values in categories.items():
            if name in info.data.get("numbers", ()):
                raise ValueError(f"{name!r} is one of the numbers, too")
            if not values:
                raise ValueError(f"{name!r} has no categories")
            cls._distinct(values)
        return categories

    @field_validator("target")
    @classmethod
    def _besides_features(cls, target: str | None, info: ValidationInfo) -> str | None:
        columns = (*info.data.get("numbers", ()), *info.data.get("categories", ()))
        if target in columns:
            raise ValueError("it is one of the features, too")
        if (target is not None) != bool(columns) and {"numbers", "categories"} <= set(info.data):
            raise ValueError("a table has both a target and features, in numbers or categories")
        return target

    @field_validator("input_shape")
    @classmethod
    def _of_features(cls, shape: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if not {"numbers", "flagged", "categories"} <= set(info.data):
            return shape  # the mistake has been found above
        given = info.data
        n = len(given["numbers"]) + len(given["flagged"]) + sum(map(len, given["categories"].values()))
        if n and shape not in ((), (n,)):
            raise ValueError(f"the columns of the table make ({n},); leave it out")
        if not n and (not shape or min(shape) < 1):
            raise ValueError("expected the sizes of one sample, such as [1, 28, 28]")
        return (n,) if n else shape

    @field_validator("shift", "scale")
    @classmethod
    def _fits(cls, values: NestedNumbers | None, info: ValidationInfo) -> NestedNumbers | None:
        if values is None or "input_shape" not in info.data:
            return values
        if info.data.get("numbers") or info.data.get("categories"):
            raise ValueError("each client standardises its own numbers of a table; leave it out")
        shape = info.data["input_shape"]
        try:
            array = np.array(values, dtype=np.float32)
            fits = np.broadcast_shapes(array.shape, shape) == shape and bool(np.isfinite(array).all())
        except (ValueError, TypeError):  # no numbers, or lists of different lengths
            fits = False
        if not fits:
            raise ValueError(f"expected numbers in lists that fit the input shape {shape}")
        return _nested(array)


def _nested(array: Array) -> NestedNumbers:
    """Float32 as nested lists of the shortest decimals that give the same float32."""
    shortest = np.array([float(str(value)) for value in array.ravel()])
    return cast(NestedNumbers, shortest.reshape(array.shape).tolist())


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def make_schema(given: Mapping[str, Any], where: str) -> Schema:
    """Check the values of a schema; `where` says in messages where the values are from.

    Raises:
        ConfigError: the values are no schema; the message names every mistake.

    """
    try:
        return Schema.model_validate(given)
    except ValidationError as error:
        fields = list(Schema.model_fields)
        phrases = describe_errors(
            error, unknown=lambda key: f"unknown key {key!r}; {did_you_mean(key, fields)}"
        )
        raise ConfigError(f"{where}: {'; '.join(phrases)}") from error


def merge_schemas(schemas: Sequence[Schema]) -> Schema:
    """The schema that tables with these schemas can share: all their columns, categories and classes.

    A column that some do not have is one that holds no value there, and so one that may lack values.

    Raises:
        DataError: they differ in their target, or in whether a column holds numbers or text.

    """
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
                f"column {name!r} holds numbers in one table and text in another; mend its cells, or write a "
                "schema by hand that lists its categories"
            )
    lacking = {name for schema in schemas for name in (*numbers, *texts) if name not in schema.columns}
    for name in lacking & set(texts):
        texts[name].add(MISSING_CATEGORY)
    lacking.update(name for schema in schemas for name in schema.flagged)
    return Schema(
        classes=_sort_classes({name for schema in schemas for name in schema.classes}),
        numbers=tuple(numbers),
        flagged=tuple(name for name in numbers if name in lacking),
        categories={name: tuple(sorted(categories)) for name, categories in texts.items()},
        target=targets[0],
    )


def _sort_classes(classes: set[str]) -> Names:
    """Classes as a table of all rows would have them: numbers by size, text by the alphabet."""
    try:
        return tuple(sorted(classes, key=int))
    except ValueError:
        return tuple(sorted(classes))
