"""Text columns whose cells are numbers as people write them become columns of numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...core.errors import DataError, list_some
from .file import MAX_NAMED_COLUMNS, TableFile, is_plain_text
from .written_numbers import (
    DecimalSign,
    WrittenNumbers,
    find_mixed_units,
    is_code,
    is_float,
    is_number_like,
    read_written,
    take_numbers,
)


def read_numbers_as_written(
    table: TableFile,
    names: Sequence[str],
    decimal: Literal["auto", ".", ","],
    notes: list[str],
    read_later: Sequence[str] = (),
) -> TableFile:
    """Turn the columns of text whose cells are all numbers into numbers; say so in `notes`.

    The decimal sign is the one that the cells show; where they do not, the one of the file's other columns, also of
    those that are `read_later`. In a file with commas between columns it is the point.
    """
    given: DecimalSign | None = None if decimal == "auto" else decimal
    found: dict[str, WrittenNumbers] = {}
    for name in (*names, *read_later):
        column = table.column(name)
        if is_plain_text(column.type) and column.null_count < len(column):
            numbers = read_written(column, given)
            wrong = numbers.wrong if numbers is not None else None
            if given is not None and wrong is not None and is_number_like(wrong) and name not in read_later:
                row = table.data_row(column.to_pylist().index(wrong))
                raise DataError(
                    f"{table.path}: column {name!r} holds {wrong!r} in data row {row}, which is no number with the "
                    f"decimal sign {given!r} of --set table.decimal; leave the option out, or correct the cell"
                )
            if numbers is not None and numbers.wrong is None and not is_code(numbers) and not find_mixed_units(numbers):
                found[name] = numbers
    shown, showing = table.shown, [name for name, one in found.items() if _shows_decimal(one)]
    features = [name for name in showing if name not in read_later]
    if shown is None:
        shown = Counter(found[name].format.decimal for name in features or showing)
        table = replace(table, shown=shown)
    found = {name: numbers for name, numbers in found.items() if name not in read_later}
    columns: dict[str, Any] = {}
    if given == "," or (given is None and shown[","] > shown["."]):
        # Pyarrow has taken the thousands of 1.234 for decimals.
        points = [name for name in names if table.csv is not None and is_float(table.column(name).type)]
        texts = table.with_text(points, ()) if points else table
        read = {name: read_written(texts.column(name), likely=",") for name in points}
        plain = {name: one for name, one in read.items() if one is not None and one.wrong is None}
        # 0.25 has no thousands: against it, what the target shows says nothing of features.
        shows_point = any(_shows_decimal(one) and one.format.decimal == "." for one in plain.values())
        for name, numbers in plain.items() if given or features or not shows_point else ():
            if numbers.format.is_guess:
                columns[name], found[name] = texts.column(name), numbers
    for name, numbers in found.items():
        column = columns.get(name, table.column(name))
        if numbers.format.is_guess:
            guessed = read_written(column, likely=given or _guess_decimal(numbers, shown, table)) or numbers
            is_guess = given is None and not any(shown.values())
            found[name] = guessed._replace(format=replace(guessed.format, is_guess=is_guess))
        columns[name] = take_numbers(column, found[name])
    formats = {name: numbers.format for name, numbers in found.items()}
    if formats:
        listed = list_some([one.describe(name) for name, one in formats.items()], MAX_NAMED_COLUMNS)
        notes.append(f"Numbers are read as people write them in {listed}.")
    unclear = [name for name, one in formats.items() if one.is_guess]
    if unclear:
        one = formats[unclear[0]]
        notes.append(
            f"In {list_some([repr(name) for name in unclear], MAX_NAMED_COLUMNS)}, {one.example} is taken for "
            f"{one.value:g}; if the decimal sign is the {'comma' if one.decimal == '.' else 'point'}, give "
            f"--set table.decimal={',' if one.decimal == '.' else '.'}"
        )
    return replace(table.with_columns(columns), written={**table.written, **formats}) if found else table


def _shows_decimal(numbers: WrittenNumbers) -> bool:
    sign = numbers.format.decimal
    return not numbers.format.is_guess and any(sign in text for text in numbers.values)


def _guess_decimal(numbers: WrittenNumbers, shown: Mapping[DecimalSign, int], table: TableFile) -> DecimalSign:
    """Guess by the file's other columns, or by what separates its columns."""
    if any(shown.values()):
        return "," if shown[","] > shown["."] else "."
    has_comma = "," in numbers.format.example
    return "," if has_comma and table.csv is not None and table.csv.delimiter != "," else "."
