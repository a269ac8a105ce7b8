"""Table files, read with pyarrow."""

import gzip
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import TextIOBase
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import DataError, did_you_mean, list_some
from ..types import Array, Index

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
TABLE_SUFFIXES = (*CSV_SUFFIXES, ".parquet", ".pq")
MISSING_SIGNS = frozenset({"", "?", "-", "--"})
"""Cells that hold no value in any table, besides the words that pyarrow knows in CSV, such as NA and null."""
MAX_NAMED_COLUMNS = 10
"""Number of columns that one note names."""


@dataclass(frozen=True)
class TableFile:
    """The content of a table file."""

    path: Path
    content: Any  # a pyarrow table with at least one row
    rows: Index | None = None  # positions of these rows in the file (n,); None where all rows are there
    signed: tuple[str, ...] = ()  # columns where a sign such as "?" stands for a missing value

    @property
    def names(self) -> list[str]:
        return list(self.content.column_names)

    @property
    def n_rows(self) -> int:
        return int(self.content.num_rows)

    @property
    def is_csv(self) -> bool:
        return find_suffix(self.path) in CSV_SUFFIXES

    def column(self, name: str) -> Any:
        return self.content.column(name)

    def lacks(self, name: str, why: str = "", advice: str = "") -> DataError:
        """Make the error for a column that is missing."""
        hint = did_you_mean(name, self.names)
        return DataError(f"{self.path} has no column {name!r}{why}; {hint}{advice}")

    def data_row(self, row: int) -> int:
        """Return the number in the file, from 1, of the row at a position here."""
        return int(row if self.rows is None else self.rows[row]) + 1

    def select(self, is_wanted: Array) -> "TableFile":
        """Return the table of the rows that `is_wanted` (n,) marks."""
        from pyarrow import array

        rows = np.flatnonzero(is_wanted)
        content = self.content.filter(array(is_wanted))
        return replace(self, content=content, rows=rows if self.rows is None else self.rows[rows])

    def values(self, name: str) -> Array:
        """Return a column's values (n,): numbers with NaN where missing, or text with None where missing.

        A time of day is its hour, from 0 to 24.
        """
        from pyarrow import float64, types

        column = self.column(name)
        if is_categorical(column.type):
            return np.array(column.to_pylist(), dtype=object)
        if types.is_time(column.type):
            per_hour = {"s": 3600, "ms": 3600e3, "us": 3600e6, "ns": 3600e9}[column.type.unit]
            ticks = column.cast("int32" if types.is_time32(column.type) else "int64").cast(float64())
            return np.asarray(ticks.to_numpy() / per_hour)
        if types.is_decimal(column.type) or (is_numeric(column.type) and column.null_count):
            if types.is_boolean(column.type):
                column = column.cast("uint8")
            column = column.cast(float64(), safe=False)
        return np.asarray(column.to_numpy())

    def with_text(self, names: list[str], missing: Iterable[str]) -> "TableFile":
        """Read columns of a CSV file again as text, where only the words `missing` are missing values."""
        from pyarrow import array, string

        texts = _read_csv(
            self.path,
            include_columns=names,
            column_types=dict.fromkeys(names, string()),
            strings_can_be_null=True,
            null_values=sorted(missing),
        )
        if self.rows is not None:
            texts = texts.take(array(self.rows))
        content = self.content
        for name in names:
            content = content.set_column(content.column_names.index(name), name, texts.column(name))
        return replace(self, content=content)


def find_suffix(path: Path | str) -> str | None:
    """Return the suffix that makes a file a table, such as .csv.gz; None for any other file."""
    name = str(path).lower()
    return next((suffix for suffix in TABLE_SUFFIXES if name.endswith(suffix)), None)


def find_stem(path: Path) -> str:
    """Return the name of a table's file without its suffix."""
    return path.name.removesuffix(path.name[-len(find_suffix(path) or path.suffix) :]) or path.stem


def read_table(path: Path, client_column: str | None, target: str | None) -> TableFile:
    """Read a CSV or Parquet file; in CSV, the client column is text, so that the names 007 and NA stay."""
    import pyarrow as pa
    from pyarrow import parquet

    if not path.is_file():
        raise DataError(f"no such table file: {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    is_csv = find_suffix(path) in CSV_SUFFIXES
    try:
        if is_csv:
            texts = {} if client_column is None else {client_column: pa.string()}
            content = _read_csv(path, column_types=texts, strings_can_be_null=True)
            if any(pa.types.is_binary(kind) for kind in content.schema.types):
                _check_encoding(path)
            table = _keep_words_for_missing(TableFile(path, content), client_column, target)
        else:  # parquet.read_table would take columns from folder names
            table = TableFile(path, parquet.ParquetFile(path).read())
    except (pa.ArrowException, UnicodeDecodeError, OSError, EOFError) as error:
        if is_csv:
            _check_encoding(path)
        kind = "CSV" if is_csv else "Parquet"
        raise DataError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from error
    repeated = sorted({name for name in table.names if table.names.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has more than one column called {repeated[0]!r}; rename them")
    if table.n_rows == 0:
        raise DataError(f"{path} holds no rows")
    return _find_missing_signs(table, client_column, target)


def _read_csv(path: Path, **convert: Any) -> Any:
    """Read a CSV file, packed or not, as a pyarrow table; `convert` are pyarrow's options of the columns."""
    from pyarrow import ArrowInvalid, BufferReader, csv

    options: dict[str, Any] = {
        "parse_options": csv.ParseOptions(delimiter=_find_delimiter(path), newlines_in_values=True),
        "convert_options": csv.ConvertOptions(**convert),
    }
    try:
        return csv.read_csv(path, **options)
    except ArrowInvalid:
        content = _replace_lone_returns(path)
        if content is None:
            raise
        return csv.read_csv(BufferReader(content), **options)


def _replace_lone_returns(path: Path) -> bytes | None:
    """Return the content with a blank for every carriage return inside a cell; None if there is none.

    Pandas writes such a cell without quotes, and every reader takes it for the end of a row.
    """
    content = gzip.decompress(path.read_bytes()) if _is_packed(path) else path.read_bytes()
    fixed = re.sub(rb"\r(?!\r?\n)", b" ", content) if b"\n" in content else content
    return None if fixed == content else fixed


def _keep_words_for_missing(table: TableFile, *names: str | None) -> TableFile:
    """Read text columns among `names` again: only an empty cell is a missing value there, NA is a word."""
    from pyarrow import types

    text_columns = [
        name
        for name in dict.fromkeys(names)
        if name is not None
        and table.names.count(name) == 1
        and table.column(name).null_count
        and (is_categorical(kind := table.column(name).type) or types.is_null(kind))
    ]
    return table.with_text(text_columns, {""}) if text_columns else table


def _find_missing_signs(table: TableFile, client_column: str | None, target: str | None) -> TableFile:
    """Take signs such as "?" for missing values, and read a CSV column as numbers if only they kept it from being so.

    Client names keep such signs, and so does a target that is no number without them.
    """
    from pyarrow import array, compute

    content, signed = table.content, []
    for i, name in enumerate(table.names):
        column = content.column(i)
        if name == client_column or not is_plain_text(column.type):
            continue
        signs = array(sorted(MISSING_SIGNS), type=column.type)
        is_sign = compute.is_in(compute.utf8_trim_whitespace(column), value_set=signs)
        if not compute.any(is_sign).as_py():
            continue
        others = compute.if_else(is_sign, None, column)
        numbers = _to_numbers(others) if table.is_csv else None
        if name != target or numbers is not None:
            content = content.set_column(i, name, others if numbers is None else numbers)
            signed.append(name)
    return replace(table, content=content, signed=tuple(signed))


def _to_numbers(column: Any) -> Any:
    """Return a column of text as whole or other numbers; None if a cell is none, or if all are missing."""
    import pyarrow as pa
    from pyarrow import compute

    if column.null_count == len(column):
        return None
    for kind in (pa.int64(), pa.float64()):
        try:
            return compute.utf8_trim_whitespace(column).cast(kind)
        except pa.ArrowInvalid:
            continue
    return None


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _open_text(path: Path, errors: str) -> TextIOBase:
    """Open a CSV file, packed or not, for reading its text; `errors` is for bytes of another encoding."""
    if _is_packed(path):
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors)
    return path.open(encoding="utf-8-sig", errors=errors)


def _check_encoding(path: Path) -> None:
    """Refuse a file of another encoding, which pyarrow would read as bytes, or as one column."""
    try:
        with _open_text(path, "strict") as file:
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); save it as CSV UTF-8") from error
    except (OSError, EOFError):
        return  # no packed file: the caller says so


def _find_delimiter(path: Path) -> str:
    """Return the sign that separates the header of a CSV file; a comma comes first, a tab in .tsv files."""
    with _open_text(path, "replace") as file:
        header = re.sub(r'"[^"]*"', "", file.readline())
    signs = "\t,;|" if ".tsv" in path.name.lower() else ",;\t|"
    return next((sign for sign in signs if sign in header), signs[0])


def is_numeric(kind: Any) -> bool:
    """Return whether a pyarrow type is one of numbers, true/false or times of day."""
    from pyarrow import types

    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_time)
    return any(test(kind) for test in tests)


def is_plain_text(kind: Any) -> bool:
    """Return whether a pyarrow type is one of text without declared categories."""
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_categorical(kind: Any) -> bool:
    """Return whether a pyarrow type is one of text, with declared categories or without."""
    from pyarrow import types

    return is_plain_text(kind.value_type if types.is_dictionary(kind) else kind)


def list_columns(names: Sequence[str]) -> str:
    """List columns in quotes, at most `MAX_NAMED_COLUMNS` of them."""
    return list_some([repr(name) for name in names], MAX_NAMED_COLUMNS)
