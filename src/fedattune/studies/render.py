"""The files that a study writes beside its raw results, and its tables on a terminal."""

import csv
import io
from typing import TYPE_CHECKING

from ..analysis.output.tables import make_table, print_whole
from ..core.io import write_text
from .claims import answer_claims, describe_marks, format_answers
from .claims import to_csv as claims_to_csv
from .figures import can_draw, draw
from .matching import summarize_mixing
from .outcome import StudyResults, reduce_curve
from .study import format_options
from .table import COLUMN_TITLES, describe_agreement, describe_measure, format_columns, to_markdown

if TYPE_CHECKING:
    from rich.console import Console

TABLE_FILE, CSV_FILE, CLAIMS_FILE, FIGURE_FILE = "table.md", "results.csv", "claims.csv", "figure.svg"
CSV_COLUMNS = (
    "study", "column", "row", "algorithm", "point", "seed", "rounds", "mixed_precision", "value", "paper",
    "paper_std", "received", "trained", "last_pooled", "last_uniform", "last_worst10", "seconds", "local_steps",
    "bytes_up", "bytes_down", "choice", "run", "note",
)  # fmt: skip
WIDE_COLUMNS = {"late change", "received", "trained", "steps"}
SCREEN_COLUMNS = [i for i, title in enumerate(COLUMN_TITLES) if title not in WIDE_COLUMNS]


def write_results(results: StudyResults) -> None:
    """Write the table, the tidy numbers and the figure into the folder of the study."""
    folder = results.records.folder
    write_text(folder / TABLE_FILE, to_markdown(results))
    if can_draw():
        draw(results, folder / FIGURE_FILE)
    write_text(folder / CSV_FILE, to_csv(results))
    if answers := answer_claims(results):
        write_text(folder / CLAIMS_FILE, claims_to_csv(results.study.name, answers))
    else:
        (folder / CLAIMS_FILE).unlink(missing_ok=True)


def to_csv(results: StudyResults) -> str:
    """Render one CSV line per cell and seed; cells that count as not run have a note in place of accuracies."""
    study, records = results.study, results.records
    text = io.StringIO()
    lines = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    lines.writeheader()
    for cell, one in results.outcomes.items():
        paper, paper_std = study.paper_value(cell)
        for run in one.runs:
            facts = records.runs[run]
            curve = records.curve(run, one.point)
            assert curve is not None
            numbers = {"value": reduce_curve(curve, study.measure)}
            for point in ("received", "trained"):
                if point_curve := records.curve(run, point):
                    numbers[point] = reduce_curve(point_curve, study.measure)
            numbers |= {f"last_{k}": 100 * curve[f"acc_{k}"][-1] for k in ("pooled", "uniform", "worst10")}
            numbers = {} if one.not_run else numbers
            lines.writerow(
                {
                    "study": study.name,
                    "column": cell.column,
                    "row": cell.row,
                    "algorithm": study.source_row(cell).algorithm,
                    "point": one.point,
                    "seed": facts["experiment"]["seed"],
                    "rounds": one.extent.rounds,
                    "mixed_precision": one.extent.mixed_precision,
                    "paper": paper,
                    "paper_std": paper_std,
                    **{name: f"{number:.3f}" for name, number in numbers.items()},
                    **{name: facts[name] for name in ("seconds", "local_steps", "bytes_up", "bytes_down")},
                    "choice": format_options(one.choice, " "),
                    "run": run,
                    "note": one.not_run,
                }
            )
    return text.getvalue()


def print_results(results: StudyResults, n_cells: int, console: "Console") -> None:
    """Print the numbers of some cells, and where all numbers are.

    Args:
        results: the results of these cells.
        n_cells: number of these cells, with or without results.
        console: the console to print on.

    """
    console.print(results.study.title, style="bold")
    _print_claims(StudyResults(results.study, results.records), console)
    for column, lines in format_columns(results).items():
        console.print(f"\n{column}", style="bold")
        table = make_table(*(COLUMN_TITLES[i] for i in SCREEN_COLUMNS), text_columns=("method", "chosen"))
        for line in lines:
            table.add_row(*(line[i] for i in SCREEN_COLUMNS))
        print_whole(table, console)
    console.print(f"\n{describe_measure(results.study)}")
    if sentence := describe_agreement(results):
        console.print(sentence)
    if missing := n_cells - len(results.outcomes):
        console.print(f"{missing} of {n_cells} cells have not been run.")
    for line in summarize_mixing(results):
        console.print("  ".join(line))
    console.print(f"Table, figure and all numbers are in {results.records.folder}")
    if not can_draw():
        console.print(f"{FIGURE_FILE} was not drawn: it needs Matplotlib; pip install 'fedattune[plot]'")


def _print_claims(results: StudyResults, console: "Console") -> None:
    """Print the answer to every claim of the study, and the differences behind them."""
    if not (answers := answer_claims(results)):
        return
    console.print()
    for number, answer in enumerate(answers, 1):
        console.print(f"Claim {number}. {answer.claim.text}")
        console.print(f"  {answer.text}", style="bold")
    head, *lines = format_answers(answers, list(results.study.columns))
    table = make_table("claim", *head[2:], text_columns=("claim", "difference"))
    number = 0
    for text, _, *line in lines:
        number += bool(text)
        table.add_row(str(number), *line)
    print_whole(table, console)
    console.print(describe_marks(results.study, answers))
