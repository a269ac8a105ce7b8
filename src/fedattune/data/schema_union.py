"""One schema for several tables, each of which knows only its own categories and classes."""

from collections.abc import Sequence

from ..errors import DataError
from .schema import MISSING, Names, Schema


def union(schemas: Sequence[Schema]) -> Schema:
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
        texts[name].add(MISSING)
    lacking.update(name for schema in schemas for name in schema.flagged)
    return Schema(
        classes=_in_order({name for schema in schemas for name in schema.classes}),
        numbers=tuple(numbers),
        flagged=tuple(name for name in numbers if name in lacking),
        categories={name: tuple(sorted(categories)) for name, categories in texts.items()},
        target=targets[0],
    )


def _in_order(classes: set[str]) -> Names:
    """Classes as a table of all rows would have them: numbers by size, text by the alphabet."""
    try:
        return tuple(sorted(classes, key=int))
    except ValueError:
        return tuple(sorted(classes))
