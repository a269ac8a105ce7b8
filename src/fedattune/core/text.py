"""Make text safe to show: what others wrote in a terminal or a spreadsheet, and shares close to 0% or 100%.

Names of clients, classes, columns and methods, and the text of errors, may come from a file that a stranger sent.

Refused: rich's own `Text`, which drops five control characters and passes the escape character on; and `bleach`, which
is about HTML.
"""

import csv
import io
import re
from collections.abc import Iterable

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # the escape character among them; not the tab and the new line
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # which turn the direction of what follows
)

FORMULA_STARTS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""First characters for which a spreadsheet takes a cell as a formula, by OWASP's list on CSV injection."""

NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf)")

SHARE_NOISE = 1e-6
"""Distance from 0 and 1 up to which a share counts as none or all: rounding errors leave that much."""


def format_percent(share: float | None, decimals: int = 1) -> str:
    """Format a fraction in percent; 0% and 100% are kept for exactly none and all; a dash for None.

    Examples:
        >>> [format_percent(one, 0) for one in (0.123, 0.0, 0.003, 0.997, 1.0, None)]
        ['12%', '0%', '<1%', '>99%', '100%', '-']
    """
    if share is None:
        return "-"
    text, step = f"{100 * share:.{decimals}f}", 10.0**-decimals
    if SHARE_NOISE < share < 1 - SHARE_NOISE:
        if float(text) == 0:
            return f"<{step:g}%"
        if float(text) == 100:
            return f">{100 - step:g}%"
    return f"{text}%"


def make_printable(text: str) -> str:
    r"""Replace the characters by which text could steer a terminal by visible ones.

    Examples:
        >>> make_printable("a\x1b[31mb")
        'a\u241b[31mb'
    """
    return CONTROLS.sub(_show_control, text)


def _show_control(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def guard_cell(value: object) -> object:
    """Guard a cell of a CSV file against spreadsheets, which run text as a formula; numbers stay as they are.

    As OWASP advises, such a text gets a leading apostrophe. The csv module quotes cells with commas and quotes.

    Examples:
        >>> [guard_cell(one) for one in ("=1+1", "-3.2", "-3 or less", "mild", -3.2, None)]
        ["'=1+1", '-3.2', "'-3 or less", 'mild', -3.2, None]
    """
    if not isinstance(value, str) or not value.startswith(FORMULA_STARTS) or NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def format_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return the text of a CSV file, with every cell guarded."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(guard_cell, row) for row in rows)
    return text.getvalue()
