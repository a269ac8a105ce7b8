"""Scores of methods on the grid: how far each is from the best, and whom it harms; as tables and as a heat map."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
SURE = 1.645
"""Standard errors above which a client's loss is sure: one in twenty unharmed clients has more by chance."""
INTERVAL = 1.96
"""Standard errors of a mean that are taken off a shortfall."""
REFERENCES = ("local", "fedavg_ft", "local_2x", "fedavg_ft_2x")
"""Methods of which the better one is the reference of a sure shortfall; the first two must have run."""
MINORITY_METHODS = ("local", "fedavg_ft", "attune")
"""Methods in the table of minorities."""
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
        surely_harmed: harmed clients who lose more than chance explains, and `known` are all with standard errors.
        known: clients of all seeds whose standard errors are known.
        sure_shortfall: distance to the best of `REFERENCES` less what chance explains; NaN without them.
        minority: mean accuracy of the clients of a minority; NaN if there is none.

    """

    accuracy: float
    harmed: int = 0
    clients: int = 0
    surely_harmed: int = 0
    known: int = 0
    sure_shortfall: float = np.nan
    minority: float = np.nan


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
        surely_harmed: share of the clients who lose more than chance explains; NaN if no standard errors are known.
        sure_shortfall: the largest `CellScore.sure_shortfall`; NaN if there is none.

    """

    cells: int
    mean_regret: float
    worst_regret: float
    worst_cell: str
    near: float
    harmed: float
    shortfall: float
    surely_harmed: float
    sure_shortfall: float


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


def score_cells(runs: Sequence[Run], seeds: Sequence[int], minorities: Mapping[str, int] | None = None) -> Scores:
    """Score every method that has all runs of a cell; `minorities` has the number of first clients by cell."""
    grouped: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[run["cell"]][run["method"]].append(run)
    scores: Scores = {}
    for cell, by_method in grouped.items():
        found = {method: select_runs(mine, seeds) for method, mine in by_method.items()}
        chosen = {method: mine for method, mine in found.items() if mine is not None}
        reference, n = _find_reference(chosen), (minorities or {}).get(cell, 0)
        scores[cell] = {
            method: CellScore(
                _measure_accuracy(mine),
                *_count_harmed(mine, chosen.get("local")),
                _measure_sure_shortfall(mine, reference),
                _measure_minority(mine, n),
            )
            for method, mine in chosen.items()
        }
    return {cell: methods for cell, methods in scores.items() if methods}


Chosen = Mapping[int, Run]
"""Seed -> run of a method at the chosen rate."""


def _measure_accuracy(mine: Chosen) -> float:
    return 100 * float(np.mean([run["accuracy"] or 0.0 for run in mine.values()]))


def _measure_minority(mine: Chosen, n: int) -> float:
    """Measure the mean accuracy in points of the first n clients; NaN for none, and 0 where training diverged."""
    values = [value or 0.0 for run in mine.values() for value in (run["accuracies"] or [0.0] * n)[:n]]
    return 100 * float(np.mean(values)) if n else np.nan


def _pair_clients(mine: Chosen, reference: Chosen) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yield each client's accuracy and standard error in a reference, and those of a method.

    Unknown errors are NaN. A method that diverged has accuracies of 0, without error, and a reference has no clients.
    """
    for seed, run in mine.items():
        if reference[seed]["error"]:
            continue
        own, base = _read_clients(run), _read_clients(reference[seed])
        yield from ((values, own.get(name, (0.0, 0.0))) for name, values in base.items())


def _read_clients(run: Run) -> dict[str, tuple[float, float]]:
    """Read the accuracy and its standard error of each client; the error is NaN if it is unknown."""
    names, accuracies = run["clients"] or (), run["accuracies"] or ()
    errors = [np.nan if error is None else error for error in run.get("deviations") or [None] * len(names)]
    values = zip((value or 0.0 for value in accuracies), errors, strict=True)
    return dict(zip(names, values, strict=True))


def _count_harmed(mine: Chosen, alone: Chosen | None) -> tuple[int, int, int, int]:
    """Count harmed clients of all seeds, all clients, surely harmed ones, and all with standard errors.

    A method that diverged harms everybody.
    """
    harmed = total = sure = known = 0
    for (base, base_error), (value, error) in _pair_clients(mine, alone) if alone else ():
        loss, chance = base - value, SURE * np.hypot(base_error, error)
        is_harmed = loss > HARM_POINTS / 100 + ROUNDING
        harmed, total = harmed + is_harmed, total + 1
        sure, known = sure + (is_harmed and loss > chance), known + (not np.isnan(chance))
    return harmed, total, sure, known


def _find_reference(chosen: Mapping[str, Chosen]) -> Chosen | None:
    """Find the runs of the best of the `REFERENCES`; None unless the first two have run."""
    if not set(REFERENCES[:2]) <= set(chosen):
        return None
    return max((chosen[name] for name in REFERENCES if name in chosen), key=_measure_accuracy)


def _measure_sure_shortfall(mine: Chosen, reference: Chosen | None) -> float:
    """Measure the mean distance of clients to a reference in points, less `INTERVAL` standard errors; 0 at least."""
    pairs = list(_pair_clients(mine, reference)) if reference else []
    if len(pairs) < 2:
        return np.nan
    losses = np.array([base - value for (base, _), (value, _) in pairs])
    return 100 * max(0.0, float(losses.mean() - INTERVAL * losses.std(ddof=1) / np.sqrt(len(losses))))


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
        mine_scores = [scores[cell][method] for cell in cells]
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
            _divide(sum(s.harmed for s in mine_scores), sum(s.clients for s in mine_scores)),
            max(shortfalls, default=np.nan),
            _divide(sum(s.surely_harmed for s in mine_scores), sum(s.known for s in mine_scores)),
            max((s.sure_shortfall for s in mine_scores if not np.isnan(s.sure_shortfall)), default=np.nan),
        )
    return dict(sorted(found.items(), key=lambda item: item[1].mean_regret))


def _divide(count: int, total: int) -> float:
    return count / total if total else np.nan


def write_methods(scores: Scores, rivals: Sequence[str], kinds: Mapping[str, str], controls: Sequence[str] = ()) -> str:
    """Write the tables of the methods in Markdown: over all cells, and by the kind of the cells.

    Controls are rivals, too. If there are any, a column has the mean regret without them.
    """
    plain, rivals = score_methods(scores, rivals), (*rivals, *controls)
    overall = score_methods(scores, rivals)
    with_controls = not set(controls).isdisjoint(overall)
    head = ("method", "cells", "mean regret", *(["without controls"] if with_controls else []), "worst regret", "on")
    head += ("near the best %", "harmed %", "shortfall", "surely harmed %", "sure shortfall")
    rows = [
        (
            method,
            str(score.cells),
            f"{score.mean_regret:.2f}",
            *([f"{plain[method].mean_regret:.2f}"] if with_controls else []),
            f"{score.worst_regret:.1f}",
            score.worst_cell,
            f"{100 * score.near:.0f}",
            f"{100 * score.harmed:.1f}",
            f"{score.shortfall:.1f}",
            "" if np.isnan(score.surely_harmed) else f"{100 * score.surely_harmed:.1f}",
            f"{score.sure_shortfall:.1f}",
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
        better = 100 * float(np.mean([change > ROUNDING for change in changes.values()]))
        row = (method, str(len(changes)), f"{mean:+.2f}", f"{better:.0f}", f"{changes[worst]:+.1f}", worst)
        rows.append((mean, row))
    head = ("method", "cells", f"mean change of {base}", "better in %", "worst change", "in")
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


def write_minorities(scores: Scores, controls: Sequence[str]) -> str:
    """Write the mean accuracy in percent of each cell's minority in Markdown, also of the control that is best for it.

    The text is empty if no cell has a minority.
    """
    rows = []
    for cell, methods in scores.items():
        found = {method: score.minority for method, score in methods.items() if not np.isnan(score.minority)}
        if found:
            best = max((name for name in controls if name in found), key=lambda name: found[name], default="")
            shown = [f"{found[name]:.1f}" if name in found else "" for name in (*MINORITY_METHODS, best)]
            rows.append((cell, *shown[:-1], best, shown[-1]))
    table = _write_table(("cell", *MINORITY_METHODS, "best control", "its accuracy"), rows)
    return f"Mean accuracy of the minority's clients alone, in percent:\n\n{table}\n" if rows else ""


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


def write_scores(
    scores: Scores, rivals: Sequence[str], kinds: Mapping[str, str], out: Path, controls: Sequence[str] = ()
) -> list[str]:
    """Write the tables and the heat map to a folder; return the tables."""
    everyone = (*rivals, *controls)
    tables = {
        "table.md": write_methods(scores, rivals, kinds, controls),
        "cells.md": write_cells(scores, everyone, kinds),
        "minorities.md": write_minorities(scores, controls),
    }
    tables = {name: text for name, text in tables.items() if text}
    for name, text in tables.items():
        write_text(out / name, text)
    draw_regrets(scores, everyone, kinds, out / "heatmap.png")
    return list(tables.values())
