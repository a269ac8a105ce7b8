"""Fill the tables of the pages on the grids from the committed runs: `python -m docs.make.grids`.

A part begins with `<!-- grid FOLDER: TABLE -->`, ends with `<!-- end -->`, and FOLDER is one in results:

- `methods`: regret, harm and shortfall of every method.
- `kinds`: mean regret of every method, by the way in which clients differ.
- `best`: the methods of the lowest mean regret by the way in which clients differ, and a few well-known ones.
- `trials`: what one change does to a method, over the cells that have both.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from benchmarks.grid import GRIDS, METHODS, SEEDS, read_runs
from benchmarks.grid_scores import ROUNDING, MethodScore, Scores, find_regrets, score_cells, score_methods
from benchmarks.grid_trials import TRIALS

from fedattune.studies.table import render_lines

from . import links

PAGES = (links.ROOT / "docs" / "grid.md", links.ROOT / "docs" / "concepts" / "methods.md")
PART = re.compile(r"^(<!-- grid (\S+): (\w+) -->)\n.*?^(?=<!-- end -->$)", re.S | re.M)

NAMED = ("attune", "fedavg", "fedadam", "fedavg_ft", "fedrep", "ditto", "fedmcsa", "local")
"""Methods with a column of their own in the table of the best."""

WAYS = {
    "iid": "in nothing",
    "labels": "in classes",
    "features": "in inputs",
    "groups": "by groups with opposite tasks",
    "tasks": "by tasks with nothing in common",
    "tables": "as real parties do",
}
"""Kind of cells -> how their clients differ."""


def fill_page(page: str) -> str:
    """Return the page with its generated tables made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{_make_table(part[2], part[3])}\n", page)


@cache
def _read_scores(folder: str) -> Scores:
    runs = [run for cell in GRIDS[folder] for run in read_runs(links.ROOT / "results" / folder, cell)]
    return score_cells(runs, SEEDS)


def _score_kinds(folder: str) -> dict[str, dict[str, MethodScore]]:
    """Score the methods by the kind of the cells."""
    scores, cells = _select_methods(_read_scores(folder)), GRIDS[folder]
    by_kind = {kind: {cell: found for cell, found in scores.items() if cells[cell].kind == kind} for kind in WAYS}
    return {kind: score_methods(some, METHODS) for kind, some in by_kind.items() if some}


def _score_methods(folder: str) -> dict[str, MethodScore]:
    return score_methods(_select_methods(_read_scores(folder)), METHODS)


def _select_methods(scores: Scores) -> Scores:
    """Select the scores of methods: the folder may also hold trials and variants."""
    return {cell: {name: found[name] for name in found if name in METHODS} for cell, found in scores.items()}


def _list_methods(folder: str) -> list[list[str]]:
    head = ["method", "cells", "mean regret", "worst regret", "on", "near the best %", "harmed %", "shortfall"]
    return [head, *([name, *_describe(score)] for name, score in _score_methods(folder).items())]


def _describe(s: MethodScore) -> list[str]:
    return [
        str(s.cells),
        f"{s.mean_regret:.2f}",
        f"{s.worst_regret:.1f}",
        s.worst_cell,
        f"{100 * s.near:.0f}",
        f"{100 * s.harmed:.1f}",
        f"{s.shortfall:.1f}",
    ]


def _list_kinds(folder: str) -> list[list[str]]:
    kinds = _score_kinds(folder)
    return [
        ["method", *kinds],
        *(
            [name, *(f"{kinds[kind][name].mean_regret:.2f}" if name in kinds[kind] else "" for kind in kinds)]
            for name in _score_methods(folder)
        ),
    ]


def _list_best(folder: str) -> list[list[str]]:
    lines = [["the clients differ", "lowest mean regret", *(f"`{name}`" for name in NAMED)]]
    for kind, found in _score_kinds(folder).items():
        n = max(score.cells for score in found.values())
        cells = f"{n} {'cell' if n == 1 else 'cells'}"
        best = ", ".join(f"`{name}` {score.mean_regret:.1f}" for name, score in list(found.items())[:3])
        lines.append([f"{WAYS[kind]} ({cells})", best, *(f"{found[name].mean_regret:.1f}" for name in NAMED)])
    return lines


def _list_trials(folder: str) -> list[list[str]]:
    scores = _read_scores(folder)
    regrets = find_regrets(scores, METHODS)
    lines = [["trial", "cells", "mean regret of the method", "of the trial", "better in %", "worst change", "in"]]
    for trial in TRIALS:
        method = trial.partition("@")[0]
        changes = {
            cell: found[trial].accuracy - found[method].accuracy
            for cell, found in scores.items()
            if {trial, method} <= set(found)
        }
        if not changes:
            continue
        worst = min(changes, key=lambda cell: changes[cell])
        means = [f"{np.mean([regrets[cell][name] for cell in changes]):.1f}" for name in (method, trial)]
        better = 100 * np.mean([change > ROUNDING for change in changes.values()])
        lines.append([f"`{trial}`", str(len(changes)), *means, f"{better:.0f}", f"{changes[worst]:+.1f}", worst])
    return lines


TABLES: dict[str, Callable[[str], list[list[str]]]] = {
    "methods": _list_methods,
    "kinds": _list_kinds,
    "best": _list_best,
    "trials": _list_trials,
}


def _make_table(folder: str, table: str) -> str:
    return "\n".join(render_lines(TABLES[table](folder)))


def _fill(file: Path) -> None:
    file.write_text(fill_page(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for page in PAGES:
        _fill(page)
