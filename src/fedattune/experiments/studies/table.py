"""A study's results as Markdown: the paper's number beside ours."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .cells import Cell
from .matching import summary
from .outcome import Outcome, search
from .records import Records
from .study import Study, tidy

MAX_DIFFERENCE = 1.0
"""Points of difference from which a cell needs a reason."""


Outcomes = Mapping[Cell, Outcome]


WORDS = {
    "max": "best evaluated round",
    "last10": "mean over the last tenth of the rounds",
    "last": "last round",
}


MEANS = {"pooled": "over all test samples", "uniform": "mean over clients"}


COLUMN_TITLES = ("method", "paper", "ours", "difference", "last round", "over clients",
    "worst 10%", "received", "trained",
         "seeds", "rounds", "steps", "seconds", "chosen")  # fmt: skip


def ours(study: Study, outcome: Outcome, found: Outcomes) -> float | None:
    """What is compared with the printed number: the accuracy, or the gap to it of the row that `gap_to` names."""
    if outcome.value is None or not study.gap_to:
        return outcome.value and outcome.value.mean
    other = found.get(Cell(study.gap_to, outcome.cell.column))
    return other.value.mean - outcome.value.mean if other and other.value else None


def difference(study: Study, outcome: Outcome, found: Outcomes) -> float | None:
    """Ours minus the paper's, in points; None where one of the two is missing."""
    printed, _ = study.printed(outcome.cell)
    mine = ours(study, outcome, found)
    return None if printed is None or mine is None else mine - printed


def far_off(study: Study, found: Outcomes) -> list[Outcome]:
    """Cells that should be the paper's and are more than a point off."""
    return [one for one, off in _comparable(study, found) if abs(off) > MAX_DIFFERENCE]


def shorter(study: Study, one: Outcome) -> str:
    """How many rounds a cell has and should have; nothing where it has them all."""
    asked = study.run(one.cell, one.choice, 0).experiment.rounds
    return "" if one.extent.rounds == asked else f"{one.extent.rounds} of {asked} rounds"


def lacks(study: Study, one: Outcome) -> list[str]:
    """What the study asks of a cell and it does not have, as short phrases."""
    asked = study.run(one.cell, one.choice, 0).experiment
    parts = [rounds] if (rounds := shorter(study, one)) else []
    if one.extent.mixed_precision != asked.mixed_precision:
        parts.append(f"{one.extent.mixed_precision} products")
    if one.failed or one.n_seeds < study.seeds:
        diverged = f", {len(one.failed)} diverged" * bool(one.failed)
        parts.append(f"{one.n_seeds} of {study.seeds} seeds{diverged}")
    if one.choice and not one.searched:
        parts.append("no search")
    return parts


def _comparable(study: Study, found: Outcomes) -> list[tuple[Outcome, float]]:
    """Cells that should be the paper's and lack nothing, with the difference."""
    pairs = []
    for cell, one in found.items():
        off = difference(study, one, found)
        if off is None or not study.rows[cell.row].match:
            continue
        compared = [one, found[Cell(study.gap_to, cell.column)]] if study.gap_to else [one]
        if not any(lacks(study, each) for each in compared):
            pairs.append((one, off))
    return pairs


def agreement(study: Study, found: Outcomes) -> str | None:
    """One sentence on the mean absolute difference to the paper, over the cells that should match."""
    off = [abs(off) for _, off in _comparable(study, found)]
    if not off:
        return None
    return (
        f"Mean absolute difference to the paper over the {len(off)} cells that should match: {np.mean(off):.2f} "
        f"points; {sum(one <= MAX_DIFFERENCE for one in off)} of them are within one point, the largest difference is "
        f"{max(off):.2f}."
    )


def to_markdown(study: Study, found: Outcomes, records: Records) -> str:
    """The whole page: table, one table per column with all numbers, what was chosen, reasons, settings, versions."""
    out = [f"# {study.title}", "", f"{study.source}. {what_is_shown(study)}", ""]
    if study.about:
        out += [study.about.strip(), ""]
    out += _matrix(study, found)
    out += [f"{sentence}\n" for sentence in [agreement(study, found)] if sentence]
    out += _pictures(study, found, records)
    out += _reasons(study, found)
    out += _details(study, found)
    out += _search(study, found, records)
    out += _settings(study, found, records)
    return "\n".join(out).rstrip() + "\n"


def what_is_shown(study: Study) -> str:
    """One sentence on the number of a run."""
    m = study.measure
    return f"Measure: {m.called} = test accuracy in %, {WORDS[m.over]}, {MEANS[m.mean]}."


def _matrix(study: Study, found: Outcomes) -> list[str]:
    """Rows by columns: ours, and in brackets the paper's and the difference."""
    cells = {(cell.row, cell.column) for cell in study.cells()}
    columns = [column for column in study.columns if any(cell.column == column for cell in found)]
    lines = [["method", *columns]]
    for row in study.rows:
        line = [row if study.rows[row].match or row not in study.paper else f"{row} †"]
        for column in columns:
            outcome = found.get(Cell(row, column))
            line.append(_cell(study, outcome, found) if outcome else "–" if (row, column) in cells else "")
        lines.append(line)
    for first, second in study.differences:
        line = [f"*{first} minus {second}*"]
        for column in columns:
            line.append(_minus(study, found, first, second, column))
        lines.append(line)
    paper = f"the paper's gap {study.gap_to} minus method" if study.gap_to else "paper's"
    legend = f"Ours ± spread over seeds ({paper}, difference); differences of more than one point are bold; – not run."
    if any(not study.rows[row].match for row in study.paper):
        legend += " † another reading: its difference does not count."
    return [*_pipes(lines), "", legend, "", *_lacking(study, found)]


def _lacking(study: Study, found: Outcomes) -> list[str]:
    """Say which cells have fewer rounds, seeds or digits than the study asks for, or values that nobody searched."""
    few: dict[str, list[Cell]] = {}
    for cell, one in found.items():
        for lack in lacks(study, one):
            few.setdefault(lack, []).append(cell)
    lines = [f"- {how}: {_together(which, found)}" for how, which in few.items()]
    return ["Fewer than the study asks for:", "", *lines, ""] if lines else []


def _together(cells: Sequence[Cell], found: Outcomes) -> str:
    """Cells by name; columns of which all are there, by theirs."""
    if len(cells) == len(found):
        return "all cells"
    whole = {c.column for c in cells} - {c.column for c in found if c not in cells}
    names = [c.column if c.column in whole else str(c) for c in cells]
    return "; ".join(dict.fromkeys(names))


def _pictures(study: Study, found: Outcomes, records: Records) -> list[str]:
    lines = summary(study, found, records)
    return ["## The figure in numbers", "", *_pipes(lines), ""] if lines else []


def _cell(study: Study, outcome: Outcome, found: Outcomes) -> str:
    if outcome.value is None:
        return "diverged"
    mean = _ours(outcome)
    printed, off = study.printed(outcome.cell)[0], difference(study, outcome, found)
    if printed is None or off is None:
        return mean
    gap = f", gap {ours(study, outcome, found):.2f}" if study.gap_to else ""
    strong = "**" if abs(off) > MAX_DIFFERENCE and study.rows[outcome.cell.row].match else ""
    return f"{mean}{gap} ({printed:.2f}, {strong}{_signed(off)}{strong})"


def _minus(study: Study, found: Outcomes, first: str, second: str, column: str) -> str:
    pair = [found.get(Cell(row, column)) for row in (first, second)]
    values = [one.value.mean for one in pair if one and one.value]
    printed = [p for row in (first, second) if (p := study.printed(Cell(row, column))[0]) is not None]
    if len(values) < 2:
        return "–"
    sign = -1 if study.gap_to else 1  # what is printed then is how much less a row has
    paper = f" ({_signed(sign * (printed[0] - printed[1]))})" if len(printed) == 2 else ""
    return _signed(values[0] - values[1]) + paper


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _ours(outcome: Outcome) -> str:
    if outcome.value is None:
        return "diverged"
    spread = f" ±{outcome.value.std:.2f}" if outcome.n_seeds > 1 else ""
    return f"{outcome.value.mean:.2f}{spread}"


def _reasons(study: Study, found: Outcomes) -> list[str]:
    """Every reason, with the cells that it is of."""
    said: dict[str, list[Outcome]] = {}
    for one in far_off(study, found):
        said.setdefault(study.reason(one.cell) or "No reason is known.", []).append(one)
    if not said:
        return []
    lines = ["## Cells that are more than one point off", ""]
    for text, cells in said.items():
        names = "; ".join(f"{one.cell} ({_signed(difference(study, one, found) or 0)})" for one in cells)
        lines += [f"- {names}: {' '.join(text.split())}"]
    return [*lines, ""]


def _details(study: Study, found: Outcomes) -> list[str]:
    out = ["## All numbers", ""]
    for column, lines in by_column(study, found).items():
        out += [f"### {column}", "", *_pipes([list(COLUMN_TITLES), *lines]), ""]
    return out


def by_column(study: Study, found: Outcomes) -> dict[str, list[list[str]]]:
    """Column -> a line under `COLUMN_TITLES` for each of its cells."""
    columns: dict[str, list[list[str]]] = {}
    for cell, one in found.items():
        columns.setdefault(cell.column, []).append(_line(study, one, found))
    return columns


def _line(study: Study, one: Outcome, found: Outcomes) -> list[str]:
    printed, spread = study.printed(one.cell)
    off = difference(study, one, found)
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
        str(one.extent.rounds),
        steps,
        seconds,
        ", ".join(tidy(one.choice)) + " (not searched)" * (not one.searched) if one.choice else "–",
    ]


def _search(study: Study, found: Outcomes, records: Records) -> list[str]:
    tuned = [
        cell for cell, one in found.items() if one.choice and one.searched and not study.rows[cell.row].like
    ]
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
        scores = search(study, cell, records, found[cell].extent)
        said = "; ".join(
            f"{', '.join(tidy(choice))}: {'not run' if score is None else f'{score:.2f}'}"
            for choice, score in scores
        )
        lines.append([str(cell), ", ".join(tidy(found[cell].choice)), said])
    return [*out, *_pipes(lines), ""]


def _values(grid: Mapping[str, list[Any]]) -> str:
    return "; ".join(f"{key} from {', '.join(map(str, values))}" for key, values in grid.items())


def _settings(study: Study, found: Outcomes, records: Records) -> list[str]:
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
            grids = [_values(row.grid), *(f"{one}: {_values(grid)}" for one, grid in row.grids.items())]
            out += [
                ", ".join(text for text in (f"- {name}: `{row.algorithm}`", said, " | ".join(grids)) if text)
            ]
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
    git = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}", r"\1", environment.get("git") or "no git")
    return f"FedAttune {environment['fedattune']} ({git}), PyTorch {environment['torch']}"


def _pipes(lines: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
    return [head, "|" + "---|" * len(lines[0]), *rest]
