"""The results of a study as Markdown, as files, and on a terminal: our numbers beside the paper's."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.output.tables import make_table, print_whole
from ..core.io import write_text
from ..core.text import format_csv
from .claims import answer_claims, describe_marks, describe_ranks, format_answers
from .claims import to_csv as claims_to_csv
from .figures import can_draw, draw, summarize_mixing
from .outcome import MAX_DIFFERENCE, Outcome, StudyResults, name_cells, reduce_curve, score_choices
from .study import Cell, Study, format_options

if TYPE_CHECKING:
    from rich.console import Console

OVER_WORDS = {"max": "best evaluated round", "last10": "mean over the last tenth of the rounds", "last": "last round"}
MEAN_WORDS = {"pooled": "over all test samples", "uniform": "mean over clients"}
COLUMN_TITLES = ("method", "paper", "ours", "difference", "last round", "late change", "over clients", "worst 10%",
                 "received", "trained", "seeds", "rounds", "steps", "seconds", "chosen")  # fmt: skip
LATE_CHANGE = (
    "Late change: the mean over the last tenth of the rounds minus the mean over as many evaluated rounds before, in "
    "points. It is near zero where the curve is flat."
)


def to_markdown(results: StudyResults) -> str:
    """Render the whole page: claims, protocol, table, reasons, all numbers by column, choices, settings, versions."""
    study = results.study
    out = [f"# {study.title}", "", f"{study.source}. {describe_measure(study)}", ""]
    if answers := answer_claims(results):
        lines = format_answers(answers, list(study.columns))
        notes = filter(None, (describe_marks(study, answers), describe_ranks(answers)))
        out += ["## Claims", "", *render_lines(lines), "", *(f"{note}\n" for note in notes)]
    if study.about:
        out += ["## Protocol", "", study.about.strip(), ""]
    out += ["## Accuracies", "", *_render_matrix(results)]
    out += [f"{sentence}\n" for sentence in [describe_agreement(results)] if sentence]
    if lines := summarize_mixing(results):
        out += ["## The figure in numbers", "", *render_lines(lines), ""]
    out += _render_reasons(results)
    out += ["## All numbers", "", LATE_CHANGE, ""]
    for column, lines in format_columns(results).items():
        out += [f"### {column}", "", *render_lines([list(COLUMN_TITLES), *lines]), ""]
    out += _render_search(results)
    out += _render_settings(results)
    return "\n".join(out).rstrip() + "\n"


def describe_measure(study: Study) -> str:
    """Describe in one sentence how a run becomes one number."""
    m = study.measure
    return f"Measure: {m.called} = test accuracy in %, {OVER_WORDS[m.over]}, {MEAN_WORDS[m.mean]}."


def describe_agreement(results: StudyResults) -> str | None:
    """Describe the mean absolute difference to the paper, over complete cells that should match."""
    off = [abs(off) for _, off in results.list_comparable()]
    if not off:
        return None
    return (
        f"Mean absolute difference to the paper over the {len(off)} cells that should match: {np.mean(off):.2f} "
        f"points; {sum(one <= MAX_DIFFERENCE for one in off)} of them are within one point, the largest difference is "
        f"{max(off):.2f}."
    )


def format_columns(results: StudyResults) -> dict[str, list[list[str]]]:
    """Format the numbers of all cells: column -> a line under `COLUMN_TITLES` for each of its cells."""
    columns: dict[str, list[list[str]]] = {}
    for cell, one in results.outcomes.items():
        columns.setdefault(cell.column, []).append(_format_line(results, one))
    return columns


def _format_line(results: StudyResults, one: Outcome) -> list[str]:
    paper, paper_std = results.study.paper_value(one.cell)
    off = results.compute_difference(one)

    def show(name: str, form: str = ".2f") -> str:
        return f"{one.measures[name].mean:{form}}" if name in one.measures else "–"

    return [
        one.cell.row,
        "–" if paper is None else f"{paper:.2f}" + (f" ±{paper_std:.2f}" if paper_std is not None else ""),
        format_value(one),
        "–" if off is None else _format_signed(off),
        show("last"),
        _format_signed(one.measures["late_change"].mean) if "late_change" in one.measures else "–",
        *(show(name) for name in ("last_uniform", "worst10", "received", "trained")),
        f"{one.n_seeds}" + (f" ({len(one.failures)} diverged)" if one.failures else ""),
        str(one.extent.rounds),
        show("local_steps", ",.0f"),
        show("seconds", ".0f"),
        format_options(one.choice) + " (not searched)" * (not one.is_searched) if one.choice else "–",
    ]


def format_value(outcome: Outcome) -> str:
    """Format the number of a cell with its spread over the seeds, or the words that stand for it."""
    if outcome.value is None:
        return outcome.not_run or "diverged"
    std = f" ±{outcome.value.std:.2f}" if outcome.n_seeds > 1 else ""
    return f"{outcome.value.mean:.2f}{std}"


def _format_signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _render_matrix(results: StudyResults) -> list[str]:
    study, outcomes = results.study, results.outcomes
    cells = set(study.cells())
    columns = [column for column in study.columns if any(cell.column == column for cell in outcomes)]
    lines = [["method", *columns]]
    for row in study.rows:
        line = [row if study.rows[row].match or row not in study.paper else f"{row} †"]
        for cell in (Cell(row, column) for column in columns):
            outcome = outcomes.get(cell)
            line.append(_format_cell(results, outcome) if outcome else "–" if cell in cells else "")
        lines.append(line)
    for first, second in study.differences:
        differences = (_format_minus(results, first, second, column) for column in columns)
        lines.append([f"*{first} minus {second}*", *differences])
    paper = f"the paper's gap {study.gap_to} minus method" if study.gap_to else "paper's"
    legend = f"Ours ± spread over seeds ({paper}, difference); differences of more than one point are bold; – not run."
    if any(not study.rows[row].match for row in study.paper):
        legend += " † another reading: its difference does not count."
    return [*render_lines(lines), "", legend, "", *_render_shortfalls(results)]


def _format_cell(results: StudyResults, one: Outcome) -> str:
    study, ours = results.study, format_value(one)
    paper, off = study.paper_value(one.cell)[0], results.compute_difference(one)
    if one.value is None or paper is None or off is None:
        return ours
    gap = f", gap {results.compute_compared_value(one):.2f}" if study.gap_to else ""
    strong = "**" if abs(off) > MAX_DIFFERENCE and study.rows[one.cell.row].match else ""
    return f"{ours}{gap} ({paper:.2f}, {strong}{_format_signed(off)}{strong})"


def _format_minus(results: StudyResults, first: str, second: str, column: str) -> str:
    study, cells = results.study, [Cell(row, column) for row in (first, second)]
    values = [one.value.mean for cell in cells if (one := results.outcomes.get(cell)) and one.value]
    papers = [paper for cell in cells if (paper := study.paper_value(cell)[0]) is not None]
    if len(values) < 2:
        return "–"
    sign = -1 if study.gap_to else 1  # a printed gap says how much less a row has
    suffix = f" ({_format_signed(sign * (papers[0] - papers[1]))})" if len(papers) == 2 else ""
    return _format_signed(values[0] - values[1]) + suffix


def _render_shortfalls(results: StudyResults) -> list[str]:
    groups: dict[str, list[Cell]] = {}
    for cell, one in results.outcomes.items():
        for lack in results.list_shortfalls(one):
            groups.setdefault(lack, []).append(cell)
    lines = [f"- {lack}: {name_cells(cells, results)}" for lack, cells in groups.items()]
    return ["Fewer than the study asks for:", "", *lines, ""] if lines else []


def _render_reasons(results: StudyResults) -> list[str]:
    groups: dict[str, list[Outcome]] = {}
    for one in results.list_distant():
        reason = results.study.find_reason(one.cell) or "No reason is known."
        groups.setdefault(reason, []).append(one)
    lines = []
    for reason, outcomes in groups.items():
        names = (f"{one.cell} ({_format_signed(results.compute_difference(one) or 0)})" for one in outcomes)
        lines.append(f"- {'; '.join(names)}: {' '.join(reason.split())}")
    return ["## Cells that are more than one point off", "", *lines, ""] if lines else []


def _render_search(results: StudyResults) -> list[str]:
    study = results.study
    lines = [["cell", "chosen", "validation accuracy in % of every combination"]]
    for cell, one in results.outcomes.items():
        if not one.choice or not one.is_searched or one.not_run or study.rows[cell.row].like:
            continue
        scores = "; ".join(
            f"{format_options(choice)}: {'not run' if score is None else f'{score:.2f}'}"
            for choice, score in score_choices(study, cell, results.records, one.extent)
        )
        lines.append([str(cell), format_options(one.choice), scores])
    if len(lines) == 1 or study.tuning is None:
        return []
    return [
        "## How hyper-parameters were chosen",
        "",
        f"Every combination was trained for {study.tuning.rounds} rounds with seed 0 (fewer where the runs themselves "
        f"have fewer), with {100 * study.tuning.validation:g}% of each client's training samples held out; the one "
        "with the best validation accuracy in the last tenth of the rounds was taken. Test data were not looked at.",
        "",
        *render_lines(lines),
        "",
    ]


def _render_settings(results: StudyResults) -> list[str]:
    study, records = results.study, results.records
    out = ["## Settings, versions, time", ""]
    out += [f"- all cells: {format_options(study.settings | {'seeds': study.seeds})}"]
    out += [f"- {name}: {format_options(values) or '–'}" for name, values in study.columns.items()]
    for name, row in study.rows.items():
        if row.like:
            out += [f"- {name}: the runs of {row.like}, the model that is {row.point}"]
            continue
        grids = [("", row.grid), *((f"{column}: ", grid) for column, grid in row.grids.items())]
        choices = " | ".join(
            prefix + "; ".join(f"{key} from {', '.join(map(str, values))}" for key, values in grid.items())
            for prefix, grid in grids
        )
        parts = (f"- {name}: `{row.algorithm}`", format_options({**row.settings, **row.options}), choices)
        out += [", ".join(filter(None, parts))]
    if runs := [records.runs[run] for one in results.outcomes.values() for run in one.runs]:
        dates = sorted({run["date"] for run in runs})
        days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        versions = set()
        for about in (run["environment"] for run in runs):
            git = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}", r"\1", about.get("git") or "no git")
            versions.add(f"FedAttune {about['fedattune']} ({git}), PyTorch {about['torch']}")
        hours = sum(facts.get("seconds", 0) for facts in records.runs.values()) / 3600
        out += [
            f"- run on {days} with {'; '.join(sorted(versions))}",
            f"- {hours:.1f} hours of runs, including the search",
        ]
    return [*out, ""]


def render_lines(lines: Sequence[Sequence[str]]) -> list[str]:
    """Render a Markdown table; the first line is its head."""
    head, *rest = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
    return [head, "|" + "---|" * len(lines[0]), *rest]


TABLE_FILE, CSV_FILE, CLAIMS_FILE, FIGURE_FILE = "table.md", "results.csv", "claims.csv", "figure.svg"
CSV_COLUMNS = (
    "study", "column", "row", "algorithm", "point", "seed", "rounds", "mixed_precision", "value", "paper",
    "paper_std", "received", "trained", "last_pooled", "last_uniform", "last_worst10", "seconds", "local_steps",
    "bytes_up", "bytes_down", "choice", "run", "note",
)  # fmt: skip
WIDE_COLUMNS = {"late change", "received", "trained", "steps"}
NARROW_COLUMNS = [i for i, title in enumerate(COLUMN_TITLES) if title not in WIDE_COLUMNS]


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
    lines: list[Sequence[object]] = [CSV_COLUMNS]
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
            line = {
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
            lines.append([line.get(name, "") for name in CSV_COLUMNS])
    return format_csv(lines)


def print_results(results: StudyResults, n_cells: int, console: "Console") -> None:
    """Print the numbers of some cells, and where all numbers are."""
    console.print(results.study.title, style="bold")
    _print_claims(StudyResults(results.study, results.records), console)
    for column, lines in format_columns(results).items():
        console.print(f"\n{column}", style="bold")
        table = make_table(*(COLUMN_TITLES[i] for i in NARROW_COLUMNS), text_columns=("method", "chosen"))
        for line in lines:
            table.add_row(*(line[i] for i in NARROW_COLUMNS))
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
    if not (answers := answer_claims(results)):
        return
    console.print()
    for number, answer in enumerate(answers, 1):
        console.print(f"Claim {number}. {answer.claim.text}")
        console.print(f"  {answer.text}", style="bold")
        if answer.corrected != answer.text:
            console.print(f"  After Holm: {answer.corrected}")
    head, *lines = format_answers(answers, list(results.study.columns))
    table = make_table("claim", *head[3:], text_columns=("claim", "difference"))
    number = 0
    for text, _, _, *line in lines:
        number += bool(text)
        table.add_row(str(number), *line)
    print_whole(table, console)
    console.print(describe_marks(results.study, answers))
