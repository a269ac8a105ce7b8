"""A study's results as a tidy CSV file and as lines on a terminal."""

import csv
import io
from typing import TYPE_CHECKING

from ..text import make_table, print_whole
from .outcome import reached
from .records import Records
from .study import Study, tidy
from .table import HEADS, Found, agreement, by_column, what_is_shown

if TYPE_CHECKING:
    from rich.console import Console


def to_csv(study: Study, found: Found, records: Records) -> str:
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


def print_outcomes(study: Study, found: Found, console: "Console") -> None:
    """The tables of all columns on the screen, then the sentence on agreement."""
    heads = HEADS[:4] + HEADS[4:7] + HEADS[9:11] + HEADS[12:]
    for column, lines in by_column(study, found).items():
        console.print(f"\n{column}", style="bold")
        table = make_table(*heads, left=("method", "chosen"))
        for line in lines:
            table.add_row(*line[:7], *line[9:11], *line[12:])
        print_whole(table, console)
    console.print(f"\n{what_is_shown(study)}")
    if sentence := agreement(study, found):
        console.print(sentence)
