"""Excel files, read with openpyxl."""

import datetime as dt
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DataError, list_some, summarize_error

EXCEL_SUFFIXES = (".xlsx", ".xlsm")


def read_excel(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Read the first sheet of an Excel file as a pyarrow table, whose first row names the columns; and notes."""
    if path.suffix.lower() not in EXCEL_SUFFIXES:
        raise DataError(f"{path}: FedAttune reads no {path.suffix} files; save it as .xlsx or CSV UTF-8")
    if find_spec("openpyxl") is None:
        raise ConfigError(f"{path}: Excel files need openpyxl: pip install 'fedattune[excel]', or save it as CSV UTF-8")
    from openpyxl import load_workbook
    from pyarrow import table

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and other things that are no cells
            book = load_workbook(path, read_only=True, data_only=True)
            names = book.sheetnames
            sheet = book[names[0]]
            sheet.reset_dimensions()  # some programs write wrong ones
            rows = [[None if cell.data_type == "e" else cell.value for cell in row] for row in sheet.iter_rows()]
            book.close()
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"{path} cannot be read as Excel ({summarize_error(error)}); open it and save it as .xlsx or CSV UTF-8"
        ) from error
    filled = [row for row in rows if any(value not in (None, "") for value in row)]
    width = max(map(len, filled), default=0)
    header, *cells = [[*row, *[None] * (width - len(row))] for row in filled] or [[]]
    columns = {}
    for k, name in enumerate(header):
        values = [row[k] for row in cells]
        if name in (None, "") and all(value is None for value in values):
            continue
        label = f"Unnamed: {k}" if name in (None, "") else str(name).strip()
        if label in columns:
            raise DataError(f"{path} has more than one column called {label!r}; rename them")
        columns[label] = _make_column(values)
    notes = []
    if len(names) > 1:
        others = list_some([repr(name) for name in names[1:]], 3)
        notes.append(f"The sheet {names[0]!r} is read; not read: {others}.")
    return table(columns), tuple(notes)


def _make_column(values: Sequence[Any]) -> Any:
    """Return cells as a pyarrow column of one type; text if they have several."""
    from pyarrow import array, string

    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if kinds <= {int, float} or kinds <= {dt.datetime, dt.date} or len(kinds) == 1:
        if kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        if kinds == {dt.datetime, dt.date}:
            values = [None if v is None else dt.datetime(*v.timetuple()[:6]) for v in values]
        if not kinds or kinds & {int, float, bool, str, dt.datetime, dt.date, dt.time}:
            return array(values)
    return array([None if value is None else _to_text(value) for value in values], string())


def _to_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
