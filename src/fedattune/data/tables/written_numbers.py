"""Numbers as people write them: 6,811.50, 1 234,5, 22.1 kg, 54%, $1,200, and (12) for -12."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from ...core.errors import DataError
from ...core.options import format_value
from ..types import Array

DecimalSign = Literal[".", ","]
MIN_NUMBER_SHARE = 0.9
"""Share of numbers above which text is taken for misspelt numbers."""
N_SAMPLE_TEXTS = 200
"""Different texts that are looked at before all are."""

_CURRENCY = (
    r"[A-Z]{0,3}[$€£¥₹₽₩₺₪฿₫₴₦₱¢]|(?:USD|EUR|GBP|CHF|JPY|CNY|INR|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|BRL|ZAR|SGD|HKD)\b"
    r"|Rs\b\.?|Fr\b\.?|kr\b\.?"
)
_BLANKS = " \u00a0\u202f\u2009"
_UNIT = r"(?!(?:st|nd|rd|th|x)\b)(?:[%‰$€£¥₹]|°[^\W\d_]?|[^\W\d_][^\s\d()+,:;_-]*[\d²³]?)(?: [^\W\d_]+)?"
_CELL = re.compile(
    rf"(?P<open>\()?(?P<sign>[+\-−–])?[{_BLANKS}]?(?P<before>{_CURRENCY})?[{_BLANKS}]?(?P<inner>[+\-−–])?"
    rf"(?P<digits>\d+(?:[.,'’{_BLANKS}]\d+)*[.,]?|[.,]\d+)(?P<exponent>[eE][+-]?\d+)?"
    rf"(?:[{_BLANKS}]*(?P<after>{_UNIT}))?(?P<close>\))?(?P<trailing>-)?"
)
_THOUSANDS = r"[1-9]\d{{0,2}}(?P<g>[{}'’ \u00a0\u202f\u2009])\d{{3}}(?:(?P=g)\d{{3}})*"
_LAKHS = r"[1-9]\d?(?:,\d\d)+,\d{3}"
_DIGITS: dict[DecimalSign, re.Pattern[str]] = {
    ".": re.compile(rf"(?:\d+|{_THOUSANDS.format(',')}|{_LAKHS})?(?:\.\d*)?"),
    ",": re.compile(rf"(?:\d+|{_THOUSANDS.format('.')})?(?:,\d*)?"),
}
"""Digits of a number by its decimal sign."""
_ALIASES = {"usd": "$", "us$": "$", "eur": "€", "gbp": "£"}
_MEASURES = frozenset({
    "kg", "g", "mg", "µg", "t", "lb", "lbs", "oz", "km", "m", "cm", "mm", "ft", "in", "mi", "l", "dl", "cl", "ml",
    "gal", "c", "f", "°c", "°f", "%", "‰", "$", "€", "£", "¥", "₹", "chf", "kb", "mb", "gb", "tb", "h", "min", "s",
    "ms", "hour", "hours", "minute", "minutes", "second", "seconds", "day", "days", "week", "weeks", "month",
    "months", "year", "years", "w", "kw", "mw", "kwh", "mwh", "wh", "hz", "khz", "mhz", "mmol/l", "mg/dl", "mg/l",
    "g/l", "g/dl", "ml/min", "km/h", "mph", "k", "bn",
})  # fmt: skip
"""Units between which a column must not change; other words after numbers, such as the A of 12A, make names."""


@dataclass(frozen=True)
class NumberFormat:
    """Describe how the numbers of a column are written."""

    unit: str  # as in most of the cells; empty if there is none
    decimal: DecimalSign
    example: str  # a cell
    value: float  # and its number
    is_guess: bool = False  # whether a comma or point could be the decimal sign or separate thousands
    n_bare: int = 0  # cells without the unit of the others

    def describe(self, name: str) -> str:
        """Say what became of a cell."""
        unit = f", in {self.unit}" if self.unit else ""
        bare = f"; {self.n_bare} cells without a unit count as such" if self.n_bare else ""
        return f"{name!r} ({self.example} is {self.value:g}{unit}{bare})"


class WrittenNumbers(NamedTuple):
    """The numbers of a column of text."""

    values: Mapping[str, float]  # by the text of a cell
    wrong: str | None  # the text of a cell that is no number like the others
    share: float  # of the cells that are numbers and have the unit of most, or none
    units: Mapping[str, int]  # cells of each unit
    format: NumberFormat


class _Cell(NamedTuple):
    sign: int
    digits: str
    exponent: str
    unit: str


@lru_cache(maxsize=1 << 16)
def _read_cell(text: str) -> _Cell | None:
    """Take a cell to pieces; None if it is no number."""
    match = _CELL.fullmatch(text.strip())
    if match is None or bool(match["open"]) != bool(match["close"]):
        return None
    if match["before"] and match["after"]:
        return None
    signs = [one for one in (match["sign"], match["inner"], match["trailing"]) if one]
    if len(signs) + bool(match["open"]) > 1:
        return None
    is_negative = bool(match["open"]) or bool(signs and signs[0] != "+")
    unit = (match["before"] or match["after"] or "").strip()
    return _Cell(-1 if is_negative else 1, match["digits"], match["exponent"] or "", unit)


def _unify_unit(unit: str) -> str:
    """Return the one spelling of a unit: `Kg.` is kg, and `years` year; mW and MW stay two units."""
    small = unit.rstrip(".").casefold()
    if small in _ALIASES:
        return _ALIASES[small]
    if len(small) > 3 and small.isalpha():
        return small.removesuffix("s")
    return small if not small.startswith("m") or len(small) < 2 else unit.rstrip(".")


def _find_decimal(cells: Iterable[_Cell]) -> tuple[DecimalSign | None, str]:
    """Return the decimal sign that the cells show, if any, and the sign that could separate thousands, if any."""
    fits: Counter[DecimalSign] = Counter()
    unclear, has_long = "", False
    for cell in cells:
        can = [sign for sign, pattern in _DIGITS.items() if pattern.fullmatch(cell.digits)]
        if len(can) == 1:
            fits[can[0]] += 1
        elif len(can) == 2:
            unclear = next((sign for sign in ".," if sign in cell.digits), unclear)
            has_long |= len(cell.digits) > 3 and cell.digits.isdigit()
    if fits:
        return max(fits, key=lambda sign: fits[sign]), ""
    if unclear and has_long:  # 1500 beside 1,234: thousands are not separated
        return ("." if unclear == "." else ","), ""
    return None, unclear


def read_written(
    column: Any, decimal: DecimalSign | None = None, *, likely: DecimalSign = ".", unit: str | None = None
) -> WrittenNumbers | None:
    """Read a column of text as numbers; None if most of its cells are none.

    Args:
        column: pyarrow column of text.
        decimal: the decimal sign; by default what the cells show.
        likely: the decimal sign where they do not show it.
        unit: the unit that the numbers must have; by default the most frequent one.
    """
    from pyarrow import compute

    sample = column.slice(0, 50 * N_SAMPLE_TEXTS).drop_null().unique().slice(0, N_SAMPLE_TEXTS).to_pylist()
    if not sample or sum(_read_cell(text) is not None for text in sample) < (MIN_NUMBER_SHARE - 0.2) * len(sample):
        return None
    counts = {one["values"]: one["counts"] for one in compute.value_counts(column.drop_null()).to_pylist()}
    read = {text: _read_cell(text) for text in counts}
    cells = {text: cell for text, cell in read.items() if cell is not None}
    n_cells = sum(counts.values())
    if sum(counts[text] for text in cells) < MIN_NUMBER_SHARE * n_cells:
        return None
    spellings: Counter[str] = Counter()
    units: Counter[str] = Counter()
    for text, cell in cells.items():
        spellings[cell.unit] += counts[text]
        units[_unify_unit(cell.unit)] += counts[text]
    if unit is None:
        # A unit in a few cells only is a slip; else cells without one are meant to have it.
        named = max((one for one in units if one), key=lambda one: units[one], default="")
        main = named if units[named] >= n_cells / 2 else ""
    else:
        main = _unify_unit(unit)
    fitting = {text: cell for text, cell in cells.items() if _unify_unit(cell.unit) in (main, "")}
    shown, unclear = _find_decimal(fitting.values())
    sign = decimal or shown or likely
    values = {text: value for text, cell in fitting.items() if (value := _to_number(cell, sign)) is not None}
    if unclear:
        example = next(text for text in values or fitting if unclear in fitting[text].digits)
    else:
        example = next((text for text in values if not _is_plain(text)), next(iter(values), ""))
    spelling = max((one for one in spellings if _unify_unit(one) == main), key=lambda one: spellings[one], default=main)
    wrong = next((text for text in counts if text not in values), None)
    return WrittenNumbers(
        values,
        wrong,
        sum(counts[text] for text in fitting) / n_cells,
        {one: units[_unify_unit(one)] for one in _list_spellings(spellings)},
        NumberFormat(
            unit=(unit if unit is not None else spelling) if main else "",
            decimal=sign,
            example=example.strip(),
            value=values.get(example, np.nan),
            is_guess=bool(unclear) and decimal is None,
            n_bare=units[""] if main else 0,
        ),
    )


def _list_spellings(spellings: Mapping[str, int]) -> list[str]:
    """Return the most frequent spelling of each unit, frequent units first."""
    found: dict[str, str] = {}
    for one in sorted(spellings, key=lambda one: -spellings[one]):
        found.setdefault(_unify_unit(one), one)
    return list(found.values())


def _is_plain(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _to_number(cell: _Cell, decimal: DecimalSign) -> float | None:
    if not _DIGITS[decimal].fullmatch(cell.digits):
        return None
    kept = "".join(one for one in cell.digits if one.isdigit() or one == decimal)
    return cell.sign * float(kept.replace(",", ".") + cell.exponent)


def take_numbers(column: Any, numbers: WrittenNumbers) -> Any:
    """Return the pyarrow column of float64 that has the numbers in the place of the texts."""
    from pyarrow import array, chunked_array, float64

    texts = column.to_pylist()
    return chunked_array([array([None if text is None else numbers.values.get(text) for text in texts], float64())])


def find_mixed_units(numbers: WrittenNumbers) -> list[str]:
    """List the units of measure, with their cells, if a column has several; 54% and 0.54 are two, too."""
    known = {one: n for one, n in numbers.units.items() if one.rstrip(".").casefold() in _MEASURES}
    shown = [f"{one!r} ({n} cells)" for one, n in known.items()]
    if len(known) == 1 and "%" in known and any(numbers.values[t] and _has_no_unit(t) for t in numbers.values):
        return [*shown, f"no unit ({numbers.units.get('', 0)} cells)"]
    return shown if len(known) > 1 else []


def _has_no_unit(text: str) -> bool:
    cell = _read_cell(text)
    return cell is not None and not cell.unit


def is_number_like(text: str) -> bool:
    """Tell whether a text is a number in some way of writing."""
    return _read_cell(text) is not None


def has_other_unit(text: str, numbers: WrittenNumbers) -> bool:
    """Tell whether a text is a number with a unit that most cells of its column do not have, such as 12A."""
    cell = _read_cell(text)
    return cell is not None and _unify_unit(cell.unit) not in (_unify_unit(numbers.format.unit), "")


def is_code(numbers: WrittenNumbers) -> bool:
    """Tell whether texts are codes such as 01, where a leading zero counts."""
    return any(re.fullmatch(r"\s*0\d+\s*", text) for text in numbers.values)


def is_float(kind: Any) -> bool:
    """Return whether a pyarrow type is one of fractions."""
    from pyarrow import types

    return bool(types.is_floating(kind))


def to_numbers(
    where: str,
    texts: Array,
    decimal: DecimalSign | None,
    unit: str | None,
    advice: str,
    why: str = "which is no number",
    *,
    data_row: Callable[[int], int],
) -> Array:
    """Turn texts (n,), None where missing, into numbers, float64 (n,), NaN where missing.

    `data_row` gives the number in the file of the row at a position.

    Raises:
        DataError: a cell is no number, or has another unit; `where` names the column, `why` says what is wrong with it,
            and `advice` what to do.
    """
    from pyarrow import array, string

    cells = texts.tolist()
    numbers = read_written(array(cells, string()), likely=decimal or ".", unit=unit)
    if numbers is None:
        wrong = next((text for text in cells if text is not None and _read_cell(text) is None), None)
    else:
        wrong = numbers.wrong
    if wrong is not None:
        cell = _read_cell(wrong)
        if cell is not None and unit is not None and _unify_unit(cell.unit) not in (_unify_unit(unit), ""):
            why = f"which has the unit {cell.unit!r}, while {f'{unit!r} is' if unit else 'none is'} expected"
        raise DataError(
            f"{where} is text with {format_value(wrong)} in data row {data_row(cells.index(wrong))}, {why}; {advice}"
        )
    values = numbers.values if numbers is not None else {}
    return np.array([np.nan if text is None else values[text] for text in cells], dtype=np.float64)
