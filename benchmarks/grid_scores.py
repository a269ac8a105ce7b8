"""Scores of methods on the grid: how far each is from the best, and whom it harms; as tables and as a heat map."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedattune.core.io import replace_atomically, write_text

from .grid_cells import KINDS

Run = dict[str, Any]
"""One run as it is stored; see `grid.SCHEMA`."""

DIVERGED = "diverged"
"""Error of a run whose training diverged; other errors say why a method does not apply to a cell."""

NEAR_POINTS = 0.5
"""A method within so many points of the best one counts as near."""
HARM_POINTS = 1.0
"""A client who loses more points than this against training alone counts as harmed."""
CAP_POINTS = 10
"""Regret above which the heat map has one colour."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class CellScore:
    """One method on one cell, in points.

    Attributes:
        accuracy: mean over the seeds of the mean accuracy over clients; 0 for a seed at which training diverged.
        harmed: clients of all seeds who lose more than `HARM_POINTS` against `local`, and `clients` are all of them.
        clients: clients of all seeds that are compared with `local`.

    """

    accuracy: float
    harmed: int = 0
    clients: int = 0


@dataclass(frozen=True)
class MethodScore:
    """One method on many cells, in points and shares.

    Attributes:
        cells: number of cells.
        mean_regret: mean over the cells of the distance to the best method.
        worst_regret: the largest distance, and `worst_cell` has it.
        worst_cell: the cell of the worst regret.
        near: share of the cells within `NEAR_POINTS` of the best.
        harmed: share of the clients who lose more than `HARM_POINTS` against `local`; NaN if none is compared.
        shortfall: the largest distance to the better one of `local` and `fedavg_ft`; NaN without them.

    """

    cells: int
    mean_regret: float
    worst_regret: float
    worst_cell: str
    near: float
    harmed: float
    shortfall: float


Scores = dict[str, dict[str, CellScore]]
"""cell -> method -> score."""


def choose_rate(runs: Sequence[Run]) -> float | None:
    """Choose the learning rate of the runs with the best validation accuracy, and of equal ones the least loss."""
    known = [run for run in runs if run["error"] is None]
    if not known:
        return None
    # A client set without validation rows has NaN, which must not win.
    best = max(known, key=lambda run: (np.nan_to_num(run["validation_accuracy"]), -run["validation_loss"]))
    return float(best["lr"])


def select_runs(runs: Sequence[Run], seeds: Sequence[int]) -> dict[int, Run] | None:
    """Select the run of each seed at the rate that the first seed chooses.

    None if the method does not apply, or if runs are missing. If training diverged at every rate, all seeds have the
    first seed's run.
    """
    if any(run["error"] not in (None, DIVERGED) for run in runs):
        return None
    first = [run for run in runs if run["seed"] == seeds[0]]
    rate = choose_rate(first)
    if rate is None:
        return dict.fromkeys(seeds, first[0]) if first else None
    chosen = {run["seed"]: run for run in runs if run["lr"] == rate and run["seed"] in seeds}
    return chosen if len(chosen) == len(seeds) else None


def score_cells(runs: Sequence[Run], seeds: Sequence[int]) -> Scores:
    """Score every method that has all runs of a cell."""
    grouped: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[run["cell"]][run["method"]].append(run)
    scores: Scores = {}
    for cell, by_method in grouped.items():
        chosen = {method: select_runs(mine, seeds) for method, mine in by_method.items()}
        alone = chosen.get("local")
        scores[cell] = {
            method: CellScore(
                100 * float(np.mean([run["accuracy"] or 0.0 for run in mine.values()])), *_count_harmed(mine, alone)
            )
            for method, mine in chosen.items()
            if mine is not None
        }
    return {cell: methods for cell, methods in scores.items() if methods}


def _count_harmed(mine: Mapping[int, Run], alone: Mapping[int, Run] | None) -> tuple[int, int]:
    """Count the harmed clients of all seeds, and all clients; a method that diverged harms everybody."""
    harmed = total = 0
    for seed, run in mine.items():
        reference = alone[seed] if alone else None
        if reference is None or reference["error"]:
            continue
        own = dict(zip(run["clients"] or (), run["accuracies"] or (), strict=True))
        for name, value in zip(reference["clients"], reference["accuracies"], strict=True):
            harmed += value - (own.get(name) or 0.0) > HARM_POINTS / 100 + ROUNDING
            total += 1
    return harmed, total


def find_regrets(scores: Scores, rivals: Sequence[str]) -> dict[str, dict[str, float]]:
    """Find each method's distance in points to the best of the rivals: cell -> method -> regret.

    A method that is no rival, such as a variant, may be better than all of them, and its regret is negative then.
    """
    return {
        cell: {method: _best(methods, rivals)[1].accuracy - score.accuracy for method, score in methods.items()}
        for cell, methods in scores.items()
    }


def _best(methods: Mapping[str, CellScore], rivals: Sequence[str]) -> tuple[str, CellScore]:
    among = [method for method in methods if method in rivals] or list(methods)
    best = max(among, key=lambda method: methods[method].accuracy)
    return best, methods[best]


def score_methods(scores: Scores, rivals: Sequence[str]) -> dict[str, MethodScore]:
    """Score every method over all cells, the one of the least mean regret first."""
    regrets, found = find_regrets(scores, rivals), {}
    for method in dict.fromkeys(method for methods in scores.values() for method in methods):
        cells = [cell for cell, methods in scores.items() if method in methods]
        mine = {cell: regrets[cell][method] for cell in cells}
        worst = max(cells, key=lambda cell: mine[cell])
        clients = sum(scores[cell][method].clients for cell in cells)
        harmed = sum(scores[cell][method].harmed for cell in cells)
        shortfalls = [
            max(scores[cell][name].accuracy for name in ("local", "fedavg_ft")) - scores[cell][method].accuracy
            for cell in cells
            if {"local", "fedavg_ft"} <= set(scores[cell])
        ]
        found[method] = MethodScore(
            len(cells),
            float(np.mean(list(mine.values()))),
            mine[worst],
            worst,
            float(np.mean([regret <= NEAR_POINTS + ROUNDING for regret in mine.values()])),
            harmed / clients if clients else np.nan,
            max(shortfalls, default=np.nan),
        )
    return dict(sorted(found.items(), key=lambda item: item[1].mean_regret))


def write_methods(scores: Scores, rivals: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Write the tables of the methods in Markdown: over all cells, and by the kind of the cells."""
    overall = score_methods(scores, rivals)
    head = ("method", "cells", "mean regret", "worst regret", "on", "near the best %", "harmed %", "shortfall")
    rows = [
        (
            method,
            str(score.cells),
            f"{score.mean_regret:.2f}",
            f"{score.worst_regret:.1f}",
            score.worst_cell,
            f"{100 * score.near:.0f}",
            f"{100 * score.harmed:.1f}",
            f"{score.shortfall:.1f}",
        )
        for method, score in overall.items()
    ]
    by_kind = {
        kind: score_methods({cell: scores[cell] for cell in scores if kinds[cell] == kind}, rivals) for kind in KINDS
    }
    used = [kind for kind in KINDS if by_kind[kind]]
    texts = [_write_table(head, rows)]
    for title, name, factor, digits in (
        ("Mean regret in points, by the kind of the cells", "mean_regret", 1, 2),
        ("Worst regret in points", "worst_regret", 1, 1),
        (f"Cells within {NEAR_POINTS} points of the best, in percent", "near", 100, 0),
        (f"Clients harmed by more than {HARM_POINTS:g} point, in percent", "harmed", 100, 1),
        ("Worst shortfall in points against the better one of local and fedavg_ft", "shortfall", 1, 1),
    ):
        rows_by_kind = [
            (
                method,
                *(
                    f"{factor * getattr(by_kind[kind][method], name):.{digits}f}" if method in by_kind[kind] else ""
                    for kind in used
                ),
            )
            for method in overall
        ]
        texts.append(f"{title}:\n\n{_write_table(('method', *used), rows_by_kind)}")
    return "\n\n".join(texts) + "\n"


def write_changes(scores: Scores, base: str) -> str:
    """Write in Markdown how methods and variants change the accuracy of `base`, over the cells that both have."""
    rows = []
    for method in dict.fromkeys(method for methods in scores.values() for method in methods):
        changes = {
            cell: methods[method].accuracy - methods[base].accuracy
            for cell, methods in scores.items()
            if {method, base} <= set(methods)
        }
        if method == base or not changes:
            continue
        worst = min(changes, key=lambda cell: changes[cell])
        mean = float(np.mean(list(changes.values())))
        rows.append((mean, (method, str(len(changes)), f"{mean:+.2f}", f"{changes[worst]:+.1f}", worst)))
    head = ("method", "cells", f"mean change of {base}", "worst change", "in")
    return _write_table(head, [row for _, row in sorted(rows)]) + "\n"


def write_cells(scores: Scores, rivals: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Write the table of the cells in Markdown: accuracies in percent of a few methods, and the best method."""
    named = ("local", "fedavg", "fedavg_ft", "attune")
    shown = [name for name in named if any(name in methods for methods in scores.values())]
    rows = []
    for cell, methods in scores.items():
        best, score = _best(methods, rivals)
        values = [f"{methods[name].accuracy:.1f}" if name in methods else "" for name in shown]
        rows.append((cell, kinds[cell], *values, best, f"{score.accuracy:.1f}"))
    return _write_table(("cell", "kind", *shown, "best", "its accuracy"), rows) + "\n"


def _write_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def draw_regrets(scores: Scores, rivals: Sequence[str], kinds: Mapping[str, str], file: Path) -> None:
    """Draw the heat map of regrets: a row for each method, the best on top, and a column for each cell."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    regrets, methods = find_regrets(scores, rivals), list(score_methods(scores, rivals))
    cells = sorted(scores, key=lambda cell: KINDS.index(kinds[cell]))  # the order within a kind stays
    values = np.array([[regrets[cell].get(method, np.nan) for cell in cells] for method in methods])
    figure = Figure(figsize=(4 + 0.32 * len(cells), 3 + 0.26 * len(methods)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="viridis_r", vmin=0, vmax=CAP_POINTS, aspect="auto")
    axes.set_facecolor("lightgrey")  # where a method does not apply
    axes.set_xticks(range(len(cells)), cells, rotation=90, fontsize=8)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    starts = [i for i, cell in enumerate(cells) if not i or kinds[cell] != kinds[cells[i - 1]]]
    for start, stop in zip(starts, [*starts[1:], len(cells)], strict=True):
        axes.text((start + stop - 1) / 2, -0.8, kinds[cells[start]], ha="center", va="bottom", fontsize=9)
        if start:
            axes.axvline(start - 0.5, color="white", linewidth=3)
    figure.colorbar(image, label=f"regret in points, {CAP_POINTS} or more in one colour", shrink=0.6)
    with replace_atomically(file) as new:
        figure.savefig(new, dpi=150, format="png")


def write_scores(scores: Scores, rivals: Sequence[str], kinds: Mapping[str, str], out: Path) -> tuple[str, str]:
    """Write the tables and the heat map to a folder; return the tables."""
    tables = write_methods(scores, rivals, kinds), write_cells(scores, rivals, kinds)
    for name, text in zip(("table.md", "cells.md"), tables, strict=True):
        write_text(out / name, text)
    draw_regrets(scores, rivals, kinds, out / "heatmap.png")
    return tables
