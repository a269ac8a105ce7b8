"""The files that a study writes beside its raw results, and what it prints.

A study's results as a tidy CSV file and as lines on a terminal.
"""

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...analysis.tables import make_table, print_whole
from ...core.io import write_text
from .cells import Cell
from .figures import can_draw, draw
from .matching import summary
from .outcome import outcomes, reached
from .records import Records
from .study import Study, tidy
from .table import COLUMN_TITLES, Outcomes, agreement, by_column, to_markdown, what_is_shown

if TYPE_CHECKING:
    from rich.console import Console


def to_csv(study: Study, found: Outcomes, records: Records) -> str:
    """One line per cell and seed."""
    text = io.StringIO()
    heads = (
        "study", "column", "row", "algorithm", "point", "seed", "rounds", "mixed_precision", "value", "paper",
        "paper_std", "received", "trained", "last_pooled", "last_uniform", "last_worst10", "seconds", "local_steps",
        "bytes_up", "bytes_down", "choice", "run",
    )  # fmt: skip
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(heads)
    for cell, one in found.items():
        printed, spread = study.printed(cell)
        for run in one.runs:
            facts = records.runs[run]
            curve = records.curve(run, one.point)
            assert curve is not None
            points = [records.curve(run, point) for point in ("received", "trained")]
            lines.writerow(
                [
                    study.name, cell.column, cell.row, study.owner(cell).algorithm, one.point,
                    facts["experiment"]["seed"], one.extent.rounds,
                    one.extent.mixed_precision, f"{reached(curve, study.measure):.3f}",
                    printed, spread,
                    *(f"{reached(c, study.measure):.3f}" if c else "" for c in points),
                    *(f"{100 * curve[name][-1]:.3f}" for name in ("acc_pooled", "acc_uniform", "acc_worst10")),
                    facts["seconds"], facts["local_steps"], facts["bytes_up"], facts["bytes_down"],
                    " ".join(tidy(one.choice)), run,
                ]
            )  # fmt: skip
    return text.getvalue()


def print_outcomes(study: Study, found: Outcomes, console: "Console") -> None:
    """The tables of all columns on the screen, then the sentence on agreement."""
    heads = COLUMN_TITLES[:4] + COLUMN_TITLES[4:7] + COLUMN_TITLES[9:11] + COLUMN_TITLES[12:]
    for column, lines in by_column(study, found).items():
        console.print(f"\n{column}", style="bold")
        table = make_table(*heads, left=("method", "chosen"))
        for line in lines:
            table.add_row(*line[:7], *line[9:11], *line[12:])
        print_whole(table, console)
    console.print(f"\n{what_is_shown(study)}")
    if sentence := agreement(study, found):
        console.print(sentence)


TABLE_FILE, CSV_FILE, FIGURE_FILE = "table.md", "results.csv", "figure.svg"


def write(study: Study, records: Records) -> None:
    """Write table, tidy numbers and figure of all cells that have results."""
    found = outcomes(study, study.cells(), records)
    write_text(records.folder / TABLE_FILE, to_markdown(study, found, records))
    if can_draw():
        draw(study, found, records, records.folder / FIGURE_FILE)
    write_text(records.folder / CSV_FILE, to_csv(study, found, records))


def show(study: Study, cells: Sequence[Cell], records: Records, console: "Console") -> None:
    """Print the numbers of these cells, and say where all are."""
    found = outcomes(study, cells, records)
    console.print(study.title, style="bold")
    print_outcomes(study, found, console)
    missing = len(cells) - len(found)
    if missing:
        console.print(f"{missing} of {len(cells)} cells have not been run.")
    for line in summary(study, found, records):
        console.print("  ".join(line))
    console.print(f"Table, figure and all numbers are in {records.folder}")
    if not can_draw():
        console.print(f"{FIGURE_FILE} was not drawn: it needs Matplotlib; pip install 'fedattune[plot]'")
