"""Reading table files with pyarrow."""

from pathlib import Path
from typing import Any

from ...core.errors import DataError

TABLE_SUFFIXES = (".csv", ".parquet", ".pq")


def read_table(path: Path, client_column: str, target: str) -> Any:
    """The content of a CSV or Parquet file as a pyarrow table with at least one row.

    In CSV the client column is read as text, so that clients called 007 and NA keep their names; a target
    of text may hold NA, too.

    Raises:
        DataError: no such file, empty, unreadable, or two columns with one name.

    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if not path.is_file():
        raise DataError(f"no such table file: {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    try:
        if path.suffix.lower() == ".csv":
            as_text = {client_column: pa.string()}
            convert = csv.ConvertOptions(column_types=as_text, strings_can_be_null=True)
            content = csv.read_csv(path, parse_options=_find_delimiter(path), convert_options=convert)
            if any(pa.types.is_binary(kind) for kind in content.schema.types):
                _check_encoding(path)
            content = _reread_text_columns(path, content, client_column, target)
        else:
            content = parquet.ParquetFile(path).read()  # read_table would take columns from folder names
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        kind = "CSV" if path.suffix.lower() == ".csv" else "Parquet"
        if kind == "CSV":
            _check_encoding(path)
        raise DataError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from error
    names = content.column_names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has more than one column called {repeated[0]!r}; rename them")
    if content.num_rows == 0:
        raise DataError(f"{path} holds no rows")
    return content


def _reread_text_columns(path: Path, content: Any, *columns: str) -> Any:
    """The table of a CSV file with those of the columns that are text read again: only "" is missing there."""
    from pyarrow import types

    names = content.column_names
    again = [
        name
        for name in dict.fromkeys(columns)
        if names.count(name) == 1
        and content.column(name).null_count
        and (is_categorical(kind := content.column(name).type) or types.is_null(kind))
    ]
    if not again:
        return content
    for name, column in read_text_columns(path, again, {""}).items():
        content = content.set_column(names.index(name), name, column)
    return content


def read_text_columns(path: Path, columns: list[str], missing: set[str]) -> dict[str, Any]:
    """Columns of a CSV file as text; cells with one of the words `missing` are."""
    from pyarrow import csv, string

    convert = csv.ConvertOptions(
        include_columns=columns,
        column_types=dict.fromkeys(columns, string()),
        strings_can_be_null=True,
        null_values=sorted(missing),
    )
    found = csv.read_csv(path, parse_options=_find_delimiter(path), convert_options=convert)
    return {name: found.column(name) for name in columns}


def _check_encoding(path: Path) -> None:
    """Refuse a file of another encoding, which pyarrow would read as bytes, or as one column.

    Raises:
        DataError: it is not UTF-8.

    """
    try:
        with path.open(encoding="utf-8") as file:
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); save it as CSV UTF-8") from error


def _find_delimiter(path: Path) -> Any:
    """How the columns of a CSV file are separated: by what the header has, commas first."""
    from pyarrow import csv

    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline()
    return csv.ParseOptions(delimiter=next((sign for sign in ",;\t" if sign in header), ","))


def is_numeric(kind: Any) -> bool:
    """Whether values of this pyarrow type are numbers or true/false."""
    from pyarrow import types

    return any(
        test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    )


def is_categorical(kind: Any) -> bool:
    """Whether values of this pyarrow type are text."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def column_to_numpy(column: Any) -> Any:
    """The values as a NumPy array: numbers with NaN where missing, or text with None where missing."""
    import numpy as np
    from pyarrow import float64, types

    if is_categorical(column.type):
        return np.array(column.to_pylist(), dtype=object)
    if types.is_decimal(column.type) or (is_numeric(column.type) and column.null_count):
        if types.is_boolean(column.type):
            column = column.cast("uint8")
        column = column.cast(float64(), safe=False)
    return column.to_numpy()


NO_COLUMN = "\0"  # no column is called so
