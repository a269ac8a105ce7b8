"""Text of others steers no terminal and runs in no spreadsheet, and no share is read as none or all."""

import csv
import io
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from fedattune.analysis.output import formats
from fedattune.analysis.output.tables import fill_table, make_console, print_whole
from fedattune.core.text import format_percent, guard_cell, make_printable
from fedattune.models.predict import Predictions

STEERING = "\x1b[2J\x1b]0;title\x07 \x9b31m \r \x7f \u202e"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_prints_markup_and_codes_as_text(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if is_terminal else "0")
    file = io.StringIO()
    console = make_console(file)
    console.print(f"[red]{STEERING}[/red]", style="bold")
    print_whole(fill_table([1], {f"title {STEERING}": lambda _: f"[bold]cell{STEERING}[/bold]"}), console)
    said = file.getvalue()
    assert "[red]␛" in said
    assert "cell␛" in said
    own = {"\x1b[1m", "\x1b[0m", "\x1b[1;39m", "\x1b[39m"}
    for code in own:
        said = said.replace(code, "")
    assert make_printable(said) == said


@pytest.mark.parametrize("value", ["=1+1", "+a", "-a", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "-3,2", "--3"])
def test_a_formula_gets_an_apostrophe(value: str) -> None:
    assert guard_cell(value) == f"'{value}"


def test_files_for_spreadsheets_hold_no_formulas() -> None:
    classes = ("=HYPERLINK(1)", "-7")
    predictions = Predictions(classes, np.array([[0.9, 0.1], [0.2, 0.8]]), None, ())
    rows = list(csv.reader(io.StringIO(predictions.to_csv())))
    assert [row[1] for row in rows] == ["prediction", "'=HYPERLINK(1)", "-7"]
    numbers = Predictions((), np.zeros((4, 0)), None, (), np.array([-0.5, 1e-7, -np.inf, np.nan]))
    assert numbers.to_csv() == "row,prediction\n1,-0.5\n2,1e-07\n3,-inf\n4,nan\n"
    table = pa.table({"client": ["@x", "b"], "gain": [-0.5, 1.0]})
    assert formats.csv(SimpleNamespace(to_table=lambda clients: table), None) == "client,gain\n'@x,-0.5\nb,1.0\n"


@pytest.mark.parametrize(
    ("share", "decimals", "said"),
    [
        (299 / 300, 0, ">99%"), (1 / 300, 0, "<1%"), (0.005, 0, "<1%"), (0.9949, 0, "99%"),
        (0.9997, 1, ">99.9%"), (0.0003, 1, "<0.1%"), (0.123, 1, "12.3%"),
        (0.0, 0, "0%"), (1.0, 1, "100.0%"), (1 - 1e-8, 1, "100.0%"), (None, 0, "-"),
    ],
)  # fmt: skip
def test_only_none_is_0_and_only_all_is_100_percent(share: float | None, decimals: int, said: str) -> None:
    assert format_percent(share, decimals) == said
