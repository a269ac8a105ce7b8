"""Dates in tables: how they are recognised, read, and turned into inputs of a model.

A date column gives the days since 1970 as a number, then sine and cosine of the month and of the weekday, and of the
hour where there are times. Times count as written or as stored with their zone; zones are not converted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.errors import ConfigError, DataError
from ..dataset import Times
from ..schema import TIME_SUFFIX
from ..types import Array
from .file import TableFile, is_numeric, is_plain_text, list_columns

ISO = "%Y-%m-%d"
DATE_FORMATS = (
    ISO, "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%Y/%m/%d", "%m/%d/%y", "%d/%m/%y", "%d-%m-%Y", "%d-%b-%Y", "%d %b %Y",
    "%b %d, %Y", "%d %B %Y", "%B %d, %Y",
)  # fmt: skip
"""Formats of dates in text, in the order in which they are tried; month/day wins over day/month where both fit."""
OTHER_ORDER = {"%m/%d/%Y": "%d/%m/%Y", "%m/%d/%y": "%d/%m/%y"}
"""Formats of month/day, and the same with the day first."""
TIME_FORMATS = (TIME_SUFFIX, " %H:%M", " %I:%M:%S %p", " %I:%M %p", "")
MIN_DATE_SHARE = 0.95
"""Share of dates above which a text column is one of dates; other cells count as missing."""
N_SAMPLE_CELLS = 500
"""Cells that the formats are tried on before they are tried on all."""
SECONDS_PER_DAY = 86400


def _is_dated(kind: Any) -> bool:
    """Return whether a pyarrow type is one of dates or timestamps."""
    from pyarrow import types

    return bool(types.is_date(kind) or types.is_timestamp(kind))


def find_date_format(table: TableFile, name: str) -> str | None:
    """Return a format of `DATE_FORMATS`, with `TIME_SUFFIX` if a cell has a time of day; None if there are no dates."""
    from pyarrow import compute

    column = table.column(name)
    if _is_dated(column.type):
        days = _read_typed(column)
        return ISO + TIME_SUFFIX * bool((np.nan_to_num(days) % 1).any())
    if not is_plain_text(column.type):
        return None
    texts = _clean(column.drop_null())
    sample = texts.unique().slice(0, N_SAMPLE_CELLS)
    if compute.mean(compute.match_substring_regex(sample, r"\w[-/. ]+\w+[-/., ]+\d")).as_py() < MIN_DATE_SHARE - 0.05:
        return None
    formats = sorted(DATE_FORMATS, key=OTHER_ORDER.__contains__) if table.dates == "day-first" else DATE_FORMATS
    best, most = None, 0.0
    for base in formats:
        if _share(sample, base) >= MIN_DATE_SHARE - 0.05 and (share := _share(texts, base)) > most:
            best, most = base, share
    if best is None or most < MIN_DATE_SHARE:
        return None
    return best + TIME_SUFFIX * bool((np.nan_to_num(_parse(texts, best)) % 1).any())


def settle_date_order(table: TableFile, names: Sequence[str], notes: list[str]) -> TableFile:
    """Return the table with the order of day and month that its columns show; say in `notes` where it is a guess."""
    if table.dates != "auto":
        return table
    unclear, seen = [], set()
    for name in names:
        column = table.column(name)
        if column.null_count == len(column) or not is_plain_text(column.type):
            continue
        base = (find_date_format(table, name) or "").removesuffix(TIME_SUFFIX)
        texts = _clean(column.drop_null()) if base in OTHER_ORDER else None
        if texts is not None and _share(texts, OTHER_ORDER[base]) == _share(texts, base):
            unclear.append(name)
        else:
            seen.add(base)
    if not unclear or seen & set(OTHER_ORDER):
        return table
    if seen & set(OTHER_ORDER.values()):
        notes.append(f"Dates in {list_columns(unclear)} are read with the day first, as in the table's other columns.")
        return replace(table, dates="day-first")
    notes.append(
        f"Dates in {list_columns(unclear)} fit both month/day and day/month, and are read with the month first; if the "
        "day comes first, give --set table.dates=day-first"
    )
    return table


def read_dates(table: TableFile, name: str, format_: str) -> Array:
    """Read a column of dates as days since 1970, float64 (n,), NaN where missing or no date of the format."""
    column = table.column(name)
    if column.null_count == len(column):
        return np.full(len(column), np.nan)
    if _is_dated(column.type):
        return _read_typed(column)
    if not is_plain_text(column.type):
        raise DataError(
            f"{table.path}: column {name!r} has the type {column.type}, but the schema says that it holds dates; "
            f"store them as dates, or as text such as 2024-12-31"
        )
    return _parse(_clean(column), format_.removesuffix(TIME_SUFFIX))


def _find_format_of_times(table: TableFile, name: str) -> str | None:
    return find_date_format(table, name) if table.column(name).null_count < table.n_rows else None


def read_times(table: TableFile, column: str | None) -> Times:
    """Read how old the rows of a table are, by a column of dates or numbers; None stands for the only one of dates."""
    if column is None:
        dated = [name for name in table.names if _find_format_of_times(table, name)]
        if len(dated) != 1:
            found = f"several columns of dates, {list_columns(dated)}" if dated else "no column of dates"
            raise ConfigError(
                f"--split time: {table.path} has {found}; name the column of dates or numbers that says how old a row "
                "is with --time-column"
            )
        column = dated[0]
    elif column not in table.names:
        raise table.lacks(column, " of --time-column")
    kind = table.column(column).type
    if is_numeric(kind):
        return Times(column, np.asarray(table.values(column), dtype=np.float64), are_dates=False)
    format_ = _find_format_of_times(table, column)
    if format_ is None:
        raise DataError(
            f"{table.path}: column {column!r} of --time-column holds neither dates nor numbers; write dates such as "
            "2024-12-31, or name another column"
        )
    return Times(column, read_dates(table, column, format_), are_dates=True)


def make_date_inputs(days: Array, format_: str) -> Array:
    """Return sine and cosine of month, weekday and, with times, hour: (n, 4 or 6), all 0 where the date is missing."""
    is_missing = np.isnan(days)
    filled = np.where(is_missing, 0.0, days)
    dates = np.floor(filled).astype(np.int64).astype("datetime64[D]")
    month = dates.astype("datetime64[M]").astype(np.int64) % 12
    weekday = (np.floor(filled) + 3) % 7  # 1970 began on a Thursday
    turns = [month / 12, weekday / 7]
    if format_.endswith(TIME_SUFFIX):
        turns.append(filled % 1)
    angles = 2 * np.pi * np.stack(turns, axis=1)
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(len(days), -1)
    waves[is_missing] = 0.0
    return waves


def _read_typed(column: Any) -> Array:
    """Return the days since 1970 of dates or timestamps, float64 (n,), NaN where missing."""
    from pyarrow import compute, float64, int64, timestamp, types

    if types.is_timestamp(column.type) and column.type.tz is not None:
        column = compute.local_timestamp(column)
    seconds = column.cast(timestamp("s"), safe=False).cast(int64()).cast(float64())
    return np.asarray(seconds.to_numpy() / SECONDS_PER_DAY)


def _clean(texts: Any) -> Any:
    """Remove what no format has: the T of ISO, fractions of seconds, zones, and blanks at both ends."""
    from pyarrow import compute

    texts = compute.replace_substring_regex(texts, r"^(\s*\d{4}-\d\d-\d\d)T", r"\1 ")
    texts = compute.replace_substring_regex(texts, r"(:\d\d)\.\d+", r"\1")
    texts = compute.replace_substring_regex(texts, r"(:\d\d) ?(Z|UTC|[+-]\d\d:?\d\d)\s*$", r"\1")
    return compute.utf8_trim_whitespace(texts)


MIN_DAYS = float(np.datetime64("1000-01-01", "D").astype(np.int64))


def _parse(texts: Any, base: str) -> Array:
    """Return the days since 1970 of texts in one format of dates with any time or none, float64 (n,)."""
    from pyarrow import compute, float64, int64

    parsed = [compute.strptime(texts, base + time, "s", error_is_null=True) for time in TIME_FORMATS]
    seconds = compute.coalesce(*parsed).cast(int64()).cast(float64())
    days: Array = np.asarray(seconds.to_numpy(zero_copy_only=False), dtype=np.float64) / SECONDS_PER_DAY
    if "%Y" in base:  # the format takes 24 for a year, too
        days = np.where(days < MIN_DAYS, np.nan, days)
    return days


def _share(texts: Any, base: str) -> float:
    return float((~np.isnan(_parse(texts, base))).mean()) if len(texts) else 0.0
