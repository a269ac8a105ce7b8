"""The files that a study writes beside its raw results, and what it prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..files import write_text
from .figures import can_draw, draw
from .matching import summary
from .outcome import outcomes
from .printed import print_outcomes, to_csv
from .records import Records
from .run import Cell
from .study import Study
from .table import to_markdown

if TYPE_CHECKING:
    from rich.console import Console

TABLE, TIDY, FIGURE = "table.md", "results.csv", "figure.svg"


def write(study: Study, records: Records) -> None:
    """Write table, tidy numbers and figure of all cells that have results."""
    found = outcomes(study, study.cells(), records)
    write_text(records.folder / TABLE, to_markdown(study, found, records))
    if can_draw():
        draw(study, found, records, records.folder / FIGURE)
    write_text(records.folder / TIDY, to_csv(study, found, records))


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
        console.print(f"{FIGURE} was not drawn: it needs Matplotlib; pip install 'fedattune[plot]'")
