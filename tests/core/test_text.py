"""Text of others steers no terminal, and runs in no spreadsheet."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cli_helpers import Done
from crafted import HOSTILE, craft_hostile
from fedattune.analysis.output.tables import fill_table, make_console, print_whole
from fedattune.analysis.output.tidy import write_csv
from fedattune.cli.main import print_message
from fedattune.core.text import guard_cell, make_printable
from fedattune.models.predict import Predictions

STEERING = "\x1b[2J\x1b]0;title\x07 \x9b31m \r \x7f \u202e"


def test_only_what_steers_is_replaced() -> None:
    plain = "Zürich\t[red]x[/red] \u2212 \u4f60 \U0001f600\n"
    assert make_printable(plain) == plain
    assert make_printable(STEERING) == "␛[2J␛]0;title␇ \ufffd31m ␍ ␡ \ufffd"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_prints_markup_and_codes_as_text(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_messages_and_commands_print_no_codes(
    cli: Callable[..., Done], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_message(f"error: {STEERING}")
    assert "\x1b" not in capsys.readouterr().err
    folder = craft_hostile(tmp_path / "runs")
    for words in ("table", "explain", "watch --once", "report", "explain --client 9", "export --client 9"):
        command, *more = words.split()
        done = cli(command, folder, *more)
        assert "internal error" not in done.err, words
        assert "\x1b" not in done.out + done.err, words
        assert words == "export --client 9" or HOSTILE[1:] in done.out + done.err, words


@pytest.mark.parametrize(
    "value", ["=1+1", "+a", "-a", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "-3,2", "--3"]
)
def test_a_formula_gets_an_apostrophe(value: str) -> None:
    assert guard_cell(value) == f"'{value}"


@pytest.mark.parametrize("value", ["-3.2", "+4", "-1e-05", "-.5", "3", "a=b", "", "'x", -3.2, None, True])
def test_numbers_and_plain_text_stay(value: object) -> None:
    assert guard_cell(value) is value


def test_files_for_spreadsheets_hold_no_formulas() -> None:
    classes = ("=HYPERLINK(1)", "-7")
    predictions = Predictions(classes, np.array([[0.9, 0.1], [0.2, 0.8]]), None, ())
    rows = list(csv.reader(io.StringIO(predictions.to_csv())))
    assert [row[1] for row in rows] == ["prediction", "'=HYPERLINK(1)", "-7"]
    table = pa.table({"client": ["@x", "b"], "gain": [-0.5, 1.0]})
    assert write_csv(table) == "client,gain\n'@x,-0.5\nb,1.0\n"
