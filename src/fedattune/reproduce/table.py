"""A study's results as Markdown, as lines on a terminal, and as a tidy CSV file: the paper's number beside ours."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import make_table, print_whole
from .outcome import Outcome, reached, search
from .records import Records
from .study import Cell, Study, tidy

if TYPE_CHECKING:
    from rich.console import Console

FAR = 1.0
"""Points of difference from which a cell needs a reason."""

Found = Mapping[Cell, Outcome]
WORDS = {
    "max": "best evaluated round",
    "last10": "mean over the last tenth of the rounds",
    "last": "last round",
}
MEANS = {"pooled": "over all test samples", "uniform": "mean over clients"}
HEADS = ("method", "paper", "ours", "difference", "last round", "over clients", "worst 10%", "received", "trained",
         "seeds", "rounds", "steps", "seconds", "chosen")  # fmt: skip


def difference(study: Study, outcome: Outcome) -> float | None:
    """Ours minus the paper's, in points; None where one of the two is missing."""
    printed, _ = study.printed(outcome.cell)
    return None if printed is None or outcome.value is None else outcome.value.mean - printed


def far_off(study: Study, found: Found) -> list[Outcome]:
    """Cells that should be the paper's and are more than a point off."""
    return [
        one
        for cell, one in found.items()
        if study.rows[cell.row].match and (d := difference(study, one)) is not None and abs(d) > FAR
    ]


def agreement(study: Study, found: Found) -> str | None:
    """One sentence on the mean absolute difference to the paper, over the cells that should match."""
    cells = [one for cell, one in found.items() if study.rows[cell.row].match]
    off = [abs(d) for one in cells if (d := difference(study, one)) is not None]
    if not off:
        return None
    return (
        f"Mean absolute difference to the paper over the {len(off)} cells that should match: {np.mean(off):.2f} points; "
        f"{sum(one <= FAR for one in off)} of them are within one point, the largest difference is {max(off):.2f}."
    )


def to_markdown(study: Study, found: Found, records: Records) -> str:
    """The whole page: table, one table per column with all numbers, what was chosen, reasons, settings, versions."""
    out = [f"# {study.title}", "", f"{study.source}. {_what_is_shown(study)}", ""]
    if study.about:
        out += [study.about.strip(), ""]
    if study.reduced:
        out += [f"**Reduced:** {study.reduced.strip()}", ""]
    out += _matrix(study, found)
    out += [f"{sentence}\n" for sentence in [agreement(study, found)] if sentence]
    out += _reasons(study, found)
    out += _details(study, found)
    out += _search(study, found, records)
    out += _settings(study, found, records)
    return "\n".join(out).rstrip() + "\n"


def _what_is_shown(study: Study) -> str:
    m = study.measure
    return f"Measure: {m.called} = test accuracy in %, {WORDS[m.over]}, {MEANS[m.mean]}."


def _matrix(study: Study, found: Found) -> list[str]:
    """Rows by columns: ours, and in brackets the paper's and the difference."""
    cells = {(cell.row, cell.column) for cell in study.cells()}
    columns = [column for column in study.columns if any(cell.column == column for cell in found)]
    lines = [["method", *columns]]
    for row in study.rows:
        line = [row if study.rows[row].match or row not in study.paper else f"{row} †"]
        for column in columns:
            outcome = found.get(Cell(row, column))
            line.append(_cell(study, outcome) if outcome else "–" if (row, column) in cells else "")
        lines.append(line)
    for first, second in study.differences:
        line = [f"*{first} minus {second}*"]
        for column in columns:
            line.append(_minus(study, found, first, second, column))
        lines.append(line)
    return [
        *_pipes(lines),
        "",
        "Ours ± spread over seeds (paper's, difference); differences of more than one point are bold; – not run yet.",
        "",
    ]


def _cell(study: Study, outcome: Outcome) -> str:
    if outcome.value is None:
        return "diverged"
    ours = _ours(outcome)
    printed, off = study.printed(outcome.cell)[0], difference(study, outcome)
    if printed is None or off is None:
        return ours
    strong = "**" if abs(off) > FAR and study.rows[outcome.cell.row].match else ""
    return f"{ours} ({printed:.2f}, {strong}{_signed(off)}{strong})"


def _minus(study: Study, found: Found, first: str, second: str, column: str) -> str:
    pair = [found.get(Cell(row, column)) for row in (first, second)]
    values = [one.value.mean for one in pair if one and one.value]
    printed = [p for row in (first, second) if (p := study.printed(Cell(row, column))[0]) is not None]
    if len(values) < 2:
        return "–"
    paper = f" ({_signed(printed[0] - printed[1])})" if len(printed) == 2 else ""
    return _signed(values[0] - values[1]) + paper


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _ours(outcome: Outcome) -> str:
    if outcome.value is None:
        return "diverged"
    spread = f" ±{outcome.value.std:.2f}" if outcome.n_seeds > 1 else ""
    return f"{outcome.value.mean:.2f}{spread}"


def _reasons(study: Study, found: Found) -> list[str]:
    """Every reason, with the cells that it is of."""
    said: dict[str, list[Outcome]] = {}
    for one in far_off(study, found):
        said.setdefault(study.reason(one.cell) or "No reason is known.", []).append(one)
    if not said:
        return []
    lines = ["## Cells that are more than one point off", ""]
    for text, cells in said.items():
        names = "; ".join(f"{one.cell} ({_signed(difference(study, one) or 0)})" for one in cells)
        lines += [f"- {names}: {' '.join(text.split())}"]
    return [*lines, ""]


def _details(study: Study, found: Found) -> list[str]:
    out = ["## All numbers", ""]
    for column, lines in _by_column(study, found).items():
        out += [f"### {column}", "", *_pipes([list(HEADS), *lines]), ""]
    return out


def _by_column(study: Study, found: Found) -> dict[str, list[list[str]]]:
    columns: dict[str, list[list[str]]] = {}
    for cell, one in found.items():
        columns.setdefault(cell.column, []).append(_line(study, one))
    return columns


def _line(study: Study, one: Outcome) -> list[str]:
    printed, spread = study.printed(one.cell)
    off = difference(study, one)
    paper = "–" if printed is None else f"{printed:.2f}" + (f" ±{spread:.2f}" if spread is not None else "")

    def shown(name: str) -> str:
        return f"{one.measures[name].mean:.2f}" if name in one.measures else "–"

    failed = f" ({len(one.failed)} diverged)" if one.failed else ""
    seconds = f"{one.measures['seconds'].mean:.0f}" if one.runs else "–"
    steps = f"{one.measures['local_steps'].mean:,.0f}" if one.runs else "–"
    return [
        one.cell.row,
        paper,
        _ours(one),
        "–" if off is None else _signed(off),
        *(shown(name) for name in ("last", "last_uniform", "worst10", "received", "trained")),
        f"{one.n_seeds}{failed}",
        str(one.rounds),
        steps,
        seconds,
        ", ".join(tidy(one.choice)) or "–",
    ]


def _search(study: Study, found: Found, records: Records) -> list[str]:
    tuned = [cell for cell in found if len(study.choices(cell)) > 1 and not study.rows[cell.row].like]
    if not tuned or study.tuning is None:
        return []
    out = [
        "## How hyper-parameters were chosen",
        "",
        f"Every combination was trained for {study.tuning.rounds} rounds with seed 0 (fewer where the runs themselves "
        f"have fewer), with {100 * study.tuning.validation:g}% of each client's training samples held out; the one "
        "with the best validation accuracy in the last tenth of the rounds was taken. Test data were not looked at.",
        "",
    ]
    lines = [["cell", "chosen", "validation accuracy in % of every combination"]]
    for cell in tuned:
        scores = search(study, cell, records, found[cell].rounds)
        said = "; ".join(
            f"{', '.join(tidy(choice))}: {'not run' if score is None else f'{score:.2f}'}"
            for choice, score in scores
        )
        lines.append([str(cell), ", ".join(tidy(found[cell].choice)), said])
    return [*out, *_pipes(lines), ""]


def _settings(study: Study, found: Found, records: Records) -> list[str]:
    runs = [records.runs[run] for one in found.values() for run in one.runs]
    out = ["## Settings, versions, time", ""]
    common = study.settings | {"seeds": study.seeds}
    out += [f"- all cells: {', '.join(tidy(common))}"]
    out += [f"- {name}: {', '.join(tidy(values)) or '–'}" for name, values in study.columns.items()]
    for name, row in study.rows.items():
        if row.like:
            out += [f"- {name}: the runs of {row.like}, the model that is {row.point}"]
        else:
            said = ", ".join(tidy({**row.settings, **row.options}))
            grid = "; ".join(f"{key} from {', '.join(map(str, values))}" for key, values in row.grid.items())
            out += [f"- {name}: `{row.algorithm}`" + "".join(f", {text}" for text in (said, grid) if text)]
    if runs:
        dates = sorted({one["date"] for one in runs})
        days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        made = sorted({_versions(one["environment"]) for one in runs})
        hours = sum(facts.get("seconds", 0) for facts in records.runs.values()) / 3600
        out += [
            f"- run on {days} with {'; '.join(made)}",
            f"- {hours:.1f} hours of runs, those of the search included",
        ]
    return [*out, ""]


def _versions(environment: Mapping[str, Any]) -> str:
    git = (environment.get("git") or "no git")[:12]
    return f"FedAttune {environment['fedattune']} ({git}), PyTorch {environment['torch']}"


def _pipes(lines: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
    return [head, "|" + "---|" * len(lines[0]), *rest]


def to_csv(study: Study, found: Found, records: Records) -> str:
    """One line per cell and seed."""
    text = io.StringIO()
    heads = ("study", "column", "row", "algorithm", "point", "seed", "rounds", "value", "paper", "paper_std", "received",
             "trained", "last_pooled", "last_uniform", "last_worst10", "seconds", "local_steps", "bytes_up", "bytes_down",
             "choice", "run")  # fmt: skip
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
                    facts["experiment"].get("seed", 0), one.rounds, f"{reached(curve, study.measure):.3f}", printed, spread,
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
    for column, lines in _by_column(study, found).items():
        console.print(f"\n{column}", style="bold")
        table = make_table(*heads, left=("method", "chosen"))
        for line in lines:
            table.add_row(*line[:7], *line[9:11], *line[12:])
        print_whole(table, console)
    console.print(f"\n{_what_is_shown(study)}")
    if sentence := agreement(study, found):
        console.print(sentence)
