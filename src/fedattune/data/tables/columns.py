"""The columns of a table that become features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import list_some
from ..schema import MISSING_CATEGORY, OTHER_CATEGORY, Names, Schema, describe_groups
from ..several_targets import Encoded
from ..types import Array
from .checks import find_missing, number_values
from .dates import make_date_inputs
from .file import MAX_NAMED_COLUMNS, list_columns
from .texts import encode_texts, hash_texts
from .written_numbers import NumberFormat


@dataclass
class FeatureColumns:
    """The features of a table's n rows by column, in the order in which the model gets them."""

    numbers: dict[str, Array] = field(default_factory=dict)  # (n,), NaN where missing
    flagged: list[str] = field(default_factory=list)  # numbers with a further column that marks the missing
    texts: dict[str, Array] = field(default_factory=dict)  # (n,), the category of each row
    categories: dict[str, Names] = field(default_factory=dict)
    grouped: Names = ()  # columns whose rare categories became one
    dates: dict[str, str] = field(default_factory=dict)  # formats of the numbers that are days
    free_texts: dict[str, Array] = field(default_factory=dict)  # (n,), None where missing
    hashed: dict[str, int] = field(default_factory=dict)  # number of inputs of each free text
    tokens: dict[str, Array] = field(default_factory=dict)  # (n,), None where missing
    tokenizer: str = ""
    max_tokens: int | None = None
    gaps: dict[str, int] = field(default_factory=dict)  # number of missing values, where there are any
    notes: list[str] = field(default_factory=list)

    def add_numbers(self, name: str, values: Array, is_flagged: bool, date_format: str | None = None) -> None:
        """Add a column of numbers, or of dates as days."""
        self.numbers[name] = values
        if date_format is not None:
            self.dates[name] = date_format
        if is_flagged:
            self.flagged.append(name)
        self._count_gaps(name, np.isnan(values))

    def add_free_text(self, name: str, values: Array, n_features: int) -> None:
        """Add a column of free text (n,), None where missing, that is hashed to some inputs."""
        self.free_texts[name], self.hashed[name] = values, n_features

    def add_tokens(self, name: str, values: Array, tokenizer: str, length: int) -> None:
        """Add a column whose text (n,), None where missing, is read as token numbers."""
        self.tokens[name], self.tokenizer, self.max_tokens = values, tokenizer, length

    def group_rare(self, name: str, max_categories: int) -> None:
        """Group the rare categories of a column into one, so that at most `max_categories` are left."""
        values, counts = np.unique(self.texts[name], return_counts=True)
        kept = set(values[np.argsort(-counts, kind="stable")][: max_categories - 1].tolist()) - {OTHER_CATEGORY}
        is_rare = np.array([value not in kept for value in self.texts[name].tolist()])
        self.texts[name] = np.where(is_rare, OTHER_CATEGORY, self.texts[name])
        self.categories[name] = (*sorted(kept), OTHER_CATEGORY)
        self.grouped = (*self.grouped, name)
        self.notes.append(
            f"Column {name!r} has {len(values)} categories; the {len(values) - len(kept)} rarest, "
            f"{is_rare.sum()} rows, are one category {OTHER_CATEGORY!r}."
        )

    def add_text(self, name: str, values: Array, categories: Names = ()) -> None:
        """Add a column of text (n,), None where missing; its categories are by default the values that occur."""
        is_missing = find_missing(values)
        self.texts[name] = np.where(is_missing, MISSING_CATEGORY, values)
        self.categories[name] = categories or tuple(sorted(set(self.texts[name].tolist())))
        self._count_gaps(name, is_missing)

    def _count_gaps(self, name: str, is_missing: Array) -> None:
        if is_missing.any():
            self.gaps[name] = int(is_missing.sum())

    def describe_gaps(self) -> list[str]:
        """Say which columns lack values, and what they become."""
        numbers, texts = (
            [f"{name!r} ({count})" for name, count in self.gaps.items() if (name in self.numbers) == is_number]
            for is_number in (True, False)
        )
        notes = []
        if numbers:
            notes.append(
                "Missing numbers become the median (the mean, with federated scaling) of the rows that scale them, and "
                f"a further column of 0 and 1 marks them: {list_some(numbers, MAX_NAMED_COLUMNS)}."
            )
        if texts:
            notes.append(f"Missing texts are a category of their own: {list_some(texts, MAX_NAMED_COLUMNS)}.")
        return notes

    def describe(self) -> list[str]:
        """Say what became of text and dates."""
        notes = []
        if self.texts:
            notes += [
                f"Text became categories in {list_columns(list(self.texts))}.",
                "The categories of all rows form one shared list, which every client would have to know.",
            ]
        if self.dates:
            notes.append(
                f"Dates became days, month, weekday and, with times, the hour: {list_columns(list(self.dates))}."
            )
        for name, n in self.hashed.items():
            notes.append(f"The words of column {name!r} are hashed to {n} inputs; nothing of them is shared.")
        for name in self.tokens:
            notes.append(f"The text of column {name!r} is read as at most {self.max_tokens} tokens ({self.tokenizer}).")
        return notes

    def matrix(self) -> Array:
        """Return all features, float64 (n, F)."""
        flags = [np.isnan(self.numbers[name]) for name in self.flagged]
        one_hot = [
            # An unknown category has the number -1, and the last row holds only 0.
            np.eye(len(names) + 1, len(names), dtype=np.float32)[number_values(self.texts[name], names)]
            for name, names in self.categories.items()
        ]
        waves = [make_date_inputs(self.numbers[name], format_) for name, format_ in self.dates.items()]
        hashed = [hash_texts(values, self.hashed[name]) for name, values in self.free_texts.items()]
        tokens = [encode_texts(values, self.tokenizer, self.max_tokens or 1) for values in self.tokens.values()]
        parts = [*self.numbers.values(), *flags, *one_hot, *waves, *hashed, *tokens]
        return np.column_stack(parts).astype(np.float64, copy=False)

    def schema(self, encoded: Encoded, targets: Sequence[str], written: Mapping[str, NumberFormat]) -> Schema:
        """Return the schema with which other tables get the same features; `written` are numbers that were text."""
        formats = {name: one for name, one in written.items() if name in self.numbers or name in targets}
        return Schema(
            classes=encoded.classes,
            labels=encoded.labels,
            outputs=encoded.outputs,
            numbers=tuple(self.numbers),
            units={name: one.unit for name, one in formats.items() if one.unit},
            decimals={name: one.decimal for name, one in formats.items() if one.decimal != "."},
            flagged=tuple(self.flagged),
            categories=self.categories,
            grouped=describe_groups(self.categories, self.grouped),
            dates=self.dates,
            texts=self.hashed,
            tokens=dict.fromkeys(self.tokens, self.tokenizer),
            max_tokens=self.max_tokens,
            target=",".join(targets),
        )
