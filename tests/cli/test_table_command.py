"""`fedattune table`: the table of runs in all formats."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done, refused

Cli = Callable[..., Done]


def test_all_formats_go_to_standard_output_and_to_files(cli: Cli, work: Path, comparison: Path) -> None:
    start = {"text": " method", "latex": "% needs", "markdown": "| method", "csv": "method,kind"}
    endings = {"text": ".txt", "latex": ".tex", "markdown": ".md", "csv": ".csv"}
    for format_, first in start.items():
        done = cli("table", comparison, "--format", format_)
        assert done.code == 0, done.err
        assert done.out.lstrip("\n").startswith(first), format_
        file = work / f"table{endings[format_]}"
        assert cli("table", comparison, "-o", file).out == ""  # the ending names the format
        assert file.read_text().strip() == done.out.strip()
    rows = list(csv.DictReader(io.StringIO((work / "table.csv").read_text())))
    assert {row["method"] for row in rows} == {"local", "fedavg", "fedmcsa"}
    assert all(0 < float(row["mean"]) < 1 for row in rows)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--format parquet", "--format parquet writes a file; name it by -o"),
        ("--format latex --clients", "--clients is an option of formats for programs such as csv"),
        ("--format latex --columns nope", "--columns nope: no such column"),
        ("--format csv --columns nope", "--columns nope: no such column"),
        ("--format word", "--format word: no such format"),
        ("-o no/t.csv", "there is no folder no"),
    ],
)
def test_what_cannot_be_is_one_sentence(argv: str, said: str, cli: Cli, comparison: Path) -> None:
    refused(cli("table", comparison, *argv.split()), said)
