"""Numbers as text, and tables that are filled from columns."""

from io import StringIO

import pytest
from rich.console import Console

from fedattune.analysis.tables import fill_table, format_bytes, format_percent, format_points, print_whole


@pytest.mark.parametrize(
    ("share", "points", "percent"),
    [(0.12345, "12.35", "12.3%"), (None, "-", "-"), (-0.5, "-50.00", "-50.0%")],
)
def test_fractions(share: float | None, points: str, percent: str) -> None:
    assert format_points(share) == points
    assert format_percent(share) == percent


def test_signs_decimals_and_bytes() -> None:
    assert format_points(0.0123, 1, "+") == "+1.2"
    assert format_percent(0.333, 0) == "33%"
    assert [format_bytes(count) for count in (0, 1, 146_400)] == ["0 B", "1 B", "146.4 kB"]


def test_a_table_has_a_line_per_row_and_numbers_to_the_right() -> None:
    table = fill_table(["a", "bb"], {"name": str, "letters": lambda row: str(len(row))}, ("name",))
    console = Console(file=StringIO(), width=5)
    print_whole(table, console)
    assert isinstance(console.file, StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if line]
    assert [line.split() for line in (lines[0], *lines[2:])] == [["name", "letters"], ["a", "1"], ["bb", "2"]]
    assert lines[2].endswith("      1")
