"""Table files, read with pyarrow."""

import codecs
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean, list_some
from ..types import Array, Index
from .excel import EXCEL_SUFFIXES, read_excel
from .written_numbers import DecimalSign, NumberFormat, read_written

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
TABLE_SUFFIXES = (*CSV_SUFFIXES, ".parquet", ".pq", *EXCEL_SUFFIXES)
OLD_SHEETS = (".xls", ".xlsb", ".ods")
MISSING_SIGNS = frozenset({"", "?", "-", "--"})
"""Cells that hold no value in any table, besides the words that pyarrow knows in CSV, such as NA and null."""
MAX_NAMED_COLUMNS = 10
"""Number of columns that one note names."""
DateOrder = Literal["auto", "day-first", "month-first"]


@dataclass(frozen=True)
class CsvFormat:
    """Describe how to read the text of a CSV file."""

    encoding: str
    delimiter: str
    n_skipped: int = 0  # lines above the header


@dataclass(frozen=True)
class TableFile:
    """The content of a table file."""

    path: Path
    content: Any  # a pyarrow table with at least one row
    rows: Index | None = None  # positions of these rows in the file (n,); None where all rows are there
    signed: tuple[str, ...] = ()  # columns where a sign such as "?" stands for a missing value
    csv: CsvFormat | None = None  # None for other files
    dates: DateOrder = "auto"  # of dates such as 03/04/2024
    written: Mapping[str, NumberFormat] = field(default_factory=dict)  # columns whose text became numbers
    shown: Counter[DecimalSign] | None = None  # columns that show each decimal sign; None if nobody has looked
    notes: tuple[str, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        return list(self.content.column_names)

    @property
    def n_rows(self) -> int:
        return int(self.content.num_rows)

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

    def with_columns(self, columns: Mapping[str, Any]) -> "TableFile":
        """Return the table with other pyarrow columns in the place of those called so."""
        from pyarrow import table

        old = zip(self.names, self.content.columns, strict=True)
        return replace(self, content=table([columns.get(name, column) for name, column in old], names=self.names))

    def with_text(self, names: list[str], known: Collection[str] | None = None) -> "TableFile":
        """Read columns of a CSV file again as text.

        Only empty cells are missing values. With `known`, what is missing here stays so, but for these texts, such as
        a category NA.
        """
        from pyarrow import array, compute, string

        assert self.csv is not None
        texts = _read_csv(
            self.path,
            self.csv,
            include_columns=names,
            column_types=dict.fromkeys(names, string()),
            strings_can_be_null=True,
            null_values=[""],
        )
        if self.rows is not None:
            texts = texts.take(array(self.rows))
        columns = {name: texts.column(name) for name in names}
        if known is not None:
            values = array(sorted(known), string())
            for name, column in columns.items():
                is_known = compute.is_in(compute.utf8_trim_whitespace(column), value_set=values)
                is_kept = compute.or_(self.column(name).is_valid(), is_known)
                columns[name] = compute.if_else(is_kept, column, None)
        return self.with_columns(columns)


def find_suffix(path: Path | str) -> str | None:
    """Return the suffix that makes a file a table, such as .csv.gz; None for any other file."""
    name = str(path).lower()
    return next((suffix for suffix in TABLE_SUFFIXES if name.endswith(suffix)), None)


def find_stem(path: Path) -> str:
    """Return the name of a table's file without its suffix."""
    return path.name.removesuffix(path.name[-len(find_suffix(path) or path.suffix) :]) or path.stem


def read_table(
    path: Path,
    client_column: str | None,
    target: str | None,
    *,
    encoding: str = "auto",
    dates: DateOrder = "auto",
    keep_blanks: bool = False,
) -> TableFile:
    """Read a CSV, Parquet or Excel file; in CSV, the client column is text, so that the names 007 and NA stay.

    Args:
        encoding: name of a CSV file's encoding; `auto` finds Unicode and Windows-1252.
        dates: what comes first in dates such as 03/04/2024.
        keep_blanks: whether a cell of blanks is a client or a class, such as the next character of a text.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if not path.is_file():
        raise DataError(f"no such table file: {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    suffix = find_suffix(path)
    kind = "CSV" if suffix in CSV_SUFFIXES else "Parquet"
    try:
        if suffix in EXCEL_SUFFIXES or path.suffix.lower() in OLD_SHEETS:
            content, notes = read_excel(path)
            table = TableFile(path, content, notes=notes)
        elif kind == "CSV":
            table = _read_csv_table(path, encoding, client_column, target)
        else:  # parquet.read_table would take columns from folder names
            table = TableFile(path, parquet.ParquetFile(path).read())
    except (pa.ArrowException, UnicodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from error
    table = _drop_unnamed(_cast_views(table))
    repeated = sorted(name for name, n in Counter(table.names).items() if n > 1)
    if repeated:
        raise DataError(f"{path} has more than one column called {repeated[0]!r}; rename them")
    if table.n_rows == 0:
        raise DataError(f"{path} holds no rows")
    targets = find_targets(table.names, target)
    table = _find_missing_signs(table, client_column, targets)
    if not keep_blanks:
        table = _drop_blanks(table, [name for name in table.names if name == client_column or name in targets])
    return replace(table, dates=dates)


def _cast_views(table: TableFile) -> TableFile:
    """Cast text of a type for which pyarrow lacks most functions."""
    from pyarrow import large_string, types

    schema = table.content.schema
    views = [k for k, column in enumerate(schema) if types.is_string_view(column.type)]
    for k in views:
        schema = schema.set(k, schema.field(k).with_type(large_string()))
    return replace(table, content=table.content.cast(schema)) if views else table


def _drop_unnamed(table: TableFile) -> TableFile:
    """Leave out columns without a name and any value: Excel writes them where cells were used once."""
    columns = zip(table.names, table.content.columns, strict=True)
    kept = [k for k, (name, column) in enumerate(columns) if name.strip() or column.null_count < len(column)]
    return replace(table, content=table.content.select(kept))


def _read_csv_table(path: Path, encoding: str, client_column: str | None, target: str | None) -> TableFile:
    import pyarrow as pa

    notes = []
    if encoding == "auto":
        encoding = _find_encoding(path)
        if encoding != "utf-8":
            again = "" if encoding.startswith("utf") else "; if letters look wrong, give --set table.encoding=NAME"
            notes.append(f"The file is not UTF-8 and is read as {ENCODING_NAMES[encoding]}{again}.")
    else:
        try:
            encoding = codecs.lookup(encoding).name
        except LookupError as error:
            raise ConfigError(f"unknown encoding {encoding!r}; expected a name such as cp1252 or utf-16") from error
        if encoding == "utf-8" and _find_encoding(path) != encoding:
            raise DataError(f"{path} is not UTF-8; give its encoding, or leave out --set table.encoding")
    form = _find_format(path, encoding)
    texts = {} if client_column is None else {client_column: pa.string()}
    content = _read_csv(path, form, column_types=texts, strings_can_be_null=True)
    table = TableFile(path, content, csv=form, notes=tuple(notes))
    return _keep_words_for_missing(table, client_column, *find_targets(table.names, target))


def _read_csv(path: Path, form: CsvFormat, **convert: Any) -> Any:
    """Read a CSV file, packed or not, as a pyarrow table; `convert` are pyarrow's options of the columns."""
    from pyarrow import ArrowInvalid, csv

    options: dict[str, Any] = {
        "parse_options": csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
        "convert_options": csv.ConvertOptions(**convert),
    }
    if form.encoding != "utf-8":
        text = _read_utf8(path, form.encoding)
        return _read_blocks(_replace_lone_returns(text) or text, options, form.n_skipped)
    try:
        return _read_blocks(path, options, form.n_skipped)
    except ArrowInvalid:
        content = _replace_lone_returns(_read_bytes(path))
        if content is None:
            raise
        return _read_blocks(content, options, form.n_skipped)


BLOCK_BYTES = (1 << 20, 1 << 24, 1 << 28, (1 << 31) - 1)
"""Bytes of CSV text that pyarrow reads at once: its default, and more where a row takes more, up to its limit."""


def _read_blocks(source: Path | bytes, options: Mapping[str, Any], n_skipped: int) -> Any:
    """Read CSV text below some lines in the smallest blocks that hold its longest row."""
    from pyarrow import ArrowInvalid, BufferReader, csv

    for size in BLOCK_BYTES:
        read = csv.ReadOptions(block_size=size, skip_rows=n_skipped)
        try:
            return csv.read_csv(BufferReader(source) if isinstance(source, bytes) else source, read, **options)
        except ArrowInvalid as error:
            if "straddl" not in str(error):
                raise
    raise ArrowInvalid("a row takes more than 2 GiB; maybe a quotation mark is not closed")


def _read_bytes(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if _is_packed(path) else path.read_bytes()


def _read_utf8(path: Path, encoding: str) -> bytes:
    """Read a file of another encoding as UTF-8."""
    try:
        return _read_bytes(path).decode(encoding).removeprefix("\ufeff").encode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not {encoding} ({error.reason} at byte {error.start}); give the encoding of the file"
        ) from error


def _replace_lone_returns(content: bytes) -> bytes | None:
    """Return the content with a blank for every carriage return inside a cell; None if there is none.

    Pandas writes such a cell without quotes, and every reader takes it for the end of a row.
    """
    fixed = re.sub(rb"\r(?!\r?\n)", b" ", content) if b"\n" in content else content
    return None if fixed == content else fixed


def find_targets(columns: Sequence[str], target: str | None) -> list[str]:
    """Return the target columns: one whose name may hold a comma, or several with commas between; none without."""
    if target is None:
        return []
    return [target] if target in columns else [name.strip() for name in target.split(",")]


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
    return table.with_text(text_columns) if text_columns else table


def _find_missing_signs(table: TableFile, client_column: str | None, targets: Sequence[str]) -> TableFile:
    """Take signs such as "?" for missing values, and read a CSV column as numbers if only they kept it from being so.

    Client names keep such signs, and so does a target that is no number without them.
    """
    from pyarrow import array, compute

    found = {}
    for name in table.names:
        column = table.column(name)
        if name == client_column or not is_plain_text(column.type):
            continue
        signs = array(sorted(MISSING_SIGNS), type=column.type)
        is_sign = compute.is_in(compute.utf8_trim_whitespace(column), value_set=signs)
        if not compute.any(is_sign).as_py():
            continue
        others = compute.if_else(is_sign, None, column)
        numbers = _to_numbers(others) if table.csv is not None else None
        is_number = numbers is not None
        if name in targets and not is_number:
            written = read_written(others)
            is_number = written is not None and written.wrong is None
        if name not in targets or is_number:
            found[name] = others if numbers is None else numbers
    return replace(table.with_columns(found), signed=tuple(found)) if found else table


def _drop_blanks(table: TableFile, names: Sequence[str]) -> TableFile:
    """Take cells of blanks for missing values."""
    from pyarrow import compute, large_string

    found = {}
    for name in names:
        if is_categorical(table.column(name).type):
            texts = table.column(name).cast(large_string())
            is_blank = compute.equal(compute.utf8_trim_whitespace(texts), "")
            if compute.any(is_blank).as_py():
                found[name] = compute.if_else(is_blank, None, texts)
    return table.with_columns(found) if found else table


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


ENCODING_NAMES = {
    "utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "utf-32": "UTF-32", "cp1252": "Windows-1252",
    "latin-1": "Latin-1",
}  # fmt: skip
"""Encodings that are found besides UTF-8."""


def _find_encoding(path: Path) -> str:
    """Return the encoding of a CSV file by its first bytes, or whether all of it is UTF-8."""
    with gzip.open(path) if _is_packed(path) else path.open("rb") as file:
        chunk = file.read(1 << 20)
        if chunk.startswith(b"PK\x03\x04"):
            raise DataError(f"{path} is no CSV file but a zip archive, maybe an Excel file; rename it, or unpack it")
        if chunk.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            return "utf-32"
        if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        if b"\0" in chunk[:1000]:  # letters of Latin script take a zero and another byte
            return "utf-16-le" if chunk[1:2] == b"\0" else "utf-16-be"
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while chunk:
                decoder.decode(chunk)
                chunk = file.read(1 << 20)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            # Windows-1252 has no letter for these bytes.
            return "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", _read_bytes(path)) else "cp1252"
    return "utf-8"


_SEPARATOR_LINE = re.compile(r'\ufeff?"?sep=([^\w\s"]|\t)"?[,;|\t]*\r?\n', re.IGNORECASE)
"""A first line that tells Excel what separates the columns."""
_QUOTED = re.compile(r'(?<![^,;|\t\r\n])"[^"]*(?:""[^"]*)*"')
"""A cell in quotes, which may hold newlines; quotes within a cell are signs like any other."""


def _find_format(path: Path, encoding: str) -> CsvFormat:
    """Find what separates the columns: what a first line sep=; says, or the sign in the header.

    A comma comes first, a tab in .tsv files.
    """
    with gzip.open(path, "rb") if _is_packed(path) else path.open("rb") as file:
        text = file.read(1 << 20).decode("utf-8-sig" if encoding == "utf-8" else encoding, errors="replace")
    if said := _SEPARATOR_LINE.match(text):
        return CsvFormat(encoding, said[1], n_skipped=1)
    header = _QUOTED.sub("", text).partition("\n")[0]
    signs = "\t,;|" if ".tsv" in path.name.lower() else ",;\t|"
    # Without all that is in quotes, also after a blank, but for a header that would then have no sign.
    outside = re.sub(r'"[^"]*"', "", header)
    found = (sign for part in (outside, header) for sign in signs if sign in part)
    return CsvFormat(encoding, next(found, signs[0]))


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
