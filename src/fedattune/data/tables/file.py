"""Table files, read with pyarrow."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import DataError, list_some
from ..types import Array

TABLE_SUFFIXES = (".csv", ".parquet", ".pq")
NO_COLUMN = "\0"  # no column has this name
MAX_NAMED_COLUMNS = 10
"""Number of columns that one note names."""


@dataclass(frozen=True)
class TableFile:
    """The content of a table file: a pyarrow table with at least one row, and the path for messages."""

    path: Path
    content: Any

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.content.column_names)

    @property
    def is_csv(self) -> bool:
        """True for CSV, where pyarrow guesses the types."""
        return self.path.suffix.lower() == ".csv"

    def column(self, name: str) -> Any:
        """Return a column of pyarrow values."""
        return self.content.column(name)

    def values(self, name: str) -> Array:
        """Return a column's values (n,): numbers with NaN where missing, or text with None where missing."""
        from pyarrow import float64, types

        column = self.column(name)
        if is_categorical(column.type):
            return np.array(column.to_pylist(), dtype=object)
        if types.is_decimal(column.type) or (is_numeric(column.type) and column.null_count):
            if types.is_boolean(column.type):
                column = column.cast("uint8")
            column = column.cast(float64(), safe=False)
        values: Array = column.to_numpy()
        return values

    def with_text(self, names: list[str], missing: Iterable[str]) -> "TableFile":
        """Read columns of a CSV file again as text, where only the words `missing` are missing values."""
        from pyarrow import csv, string

        convert = csv.ConvertOptions(
            include_columns=names,
            column_types=dict.fromkeys(names, string()),
            strings_can_be_null=True,
            null_values=sorted(missing),
        )
        texts = csv.read_csv(self.path, parse_options=_find_delimiter(self.path), convert_options=convert)
        content = self.content
        for name in names:
            content = content.set_column(content.column_names.index(name), name, texts.column(name))
        return TableFile(self.path, content)


def read_table(path: Path, client_column: str, target: str) -> TableFile:
    """Read a CSV or Parquet file.

    Args:
        path: the file.
        client_column: column that names each row's client. CSV has it as text, so that the names 007 and NA stay.
        target: column of the class. A target of text may hold NA, too.

    Raises:
        DataError: the file is missing, empty or unreadable, or two columns have one name.

    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if not path.is_file():
        raise DataError(f"no such table file: {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    is_csv = path.suffix.lower() == ".csv"
    try:
        if is_csv:
            convert = csv.ConvertOptions(column_types={client_column: pa.string()}, strings_can_be_null=True)
            content = csv.read_csv(path, parse_options=_find_delimiter(path), convert_options=convert)
            if any(pa.types.is_binary(kind) for kind in content.schema.types):
                _check_encoding(path)
            table = _keep_words_for_missing(TableFile(path, content), client_column, target)
        else:  # parquet.read_table would take columns from folder names
            table = TableFile(path, parquet.ParquetFile(path).read())
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if is_csv:
            _check_encoding(path)
        kind = "CSV" if is_csv else "Parquet"
        raise DataError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from error
    repeated = sorted({name for name in table.names if table.names.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has more than one column called {repeated[0]!r}; rename them")
    if table.content.num_rows == 0:
        raise DataError(f"{path} holds no rows")
    return table


def _keep_words_for_missing(table: TableFile, *names: str) -> TableFile:
    """Read text columns among `names` again: only an empty cell is a missing value there, NA is a word."""
    from pyarrow import types

    text_columns = [
        name
        for name in dict.fromkeys(names)
        if table.names.count(name) == 1
        and table.column(name).null_count
        and (is_categorical(kind := table.column(name).type) or types.is_null(kind))
    ]
    return table.with_text(text_columns, {""}) if text_columns else table


def _check_encoding(path: Path) -> None:
    """Refuse a file of another encoding, which pyarrow would read as bytes, or as one column.

    Raises:
        DataError: the file is not UTF-8.

    """
    try:
        with path.open(encoding="utf-8") as file:
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); save it as CSV UTF-8") from error


def _find_delimiter(path: Path) -> Any:
    """Return pyarrow's options with the sign that separates the header of a CSV file; a comma comes first."""
    from pyarrow import csv

    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline()
    return csv.ParseOptions(delimiter=next((sign for sign in ",;\t" if sign in header), ","))


def is_numeric(kind: Any) -> bool:
    """Return whether a pyarrow type is one of numbers or true/false."""
    from pyarrow import types

    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(kind) for test in tests)


def is_categorical(kind: Any) -> bool:
    """Return whether a pyarrow type is one of text."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def list_columns(names: list[str]) -> str:
    """List columns in quotes, at most `MAX_NAMED_COLUMNS` of them."""
    return list_some([repr(name) for name in names], MAX_NAMED_COLUMNS)
