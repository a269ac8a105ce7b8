"""Compare all methods on a grid of federations: how far is each from the best one of every cell, and whom does it harm?

    python -m benchmarks grid
    python -m benchmarks grid --cells 'digits-*' --algorithms local,fedavg,ditto --processes 4
    python -m benchmarks grid --cells heart --variant weak=ditto:lam=0.01
    python -m benchmarks grid --show
    python -m benchmarks minorities

Each method has the same search: three learning rates on the first seed, and the best one by validation accuracy on the
other seeds. A stopped command goes on where it was. Accuracies of a cell are means over its clients and seeds. The
grid `minorities` has small validation parts, as users have them, and also trains controls; see `grid_controls`. The
methods with one change in `grid_trials` train if `--algorithms` names them.
"""

import argparse
import fnmatch
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from filelock import FileLock

from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.own import build_method
from fedattune.core.errors import ConfigError, DataError, DivergedError, FedAttuneError
from fedattune.core.io import replace_atomically
from fedattune.data import Federation

from .grid_cells import CELLS, HELD_OUT, MINORITIES, Cell
from .grid_controls import CONTROLS
from .grid_measures import fit_cell, measure_result
from .grid_scores import DIVERGED, Run, choose_rate, score_cells, write_changes, write_scores
from .grid_trials import TRIALS
from .options import read_count, read_seeds

RATES = (0.02, 0.06, 0.2)
"""Learning rates that every method tries on the first seed."""
SEEDS = (0, 1, 2)
UNITS_PER_PROCESS = 10
"""Units after which a process is replaced: recorded steps of many runs would fill the memory."""

FIRST = ("local", "fedavg", "fedavg_ft")
"""Methods that run first in every cell, because others are compared with them."""
METHODS = (*FIRST, *(name for name in ALGORITHMS if name not in (*FIRST, "combined")))
EXTRAS = {**CONTROLS, **TRIALS}
KNOWN = (*METHODS, *EXTRAS)

GRIDS = {"grid": CELLS, "grid-held-out": HELD_OUT, "grid-minorities": MINORITIES}
"""Folder of the runs -> cells."""

OPTIONS: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 1}}
"""Options of methods whose defaults take many times the local steps of the others: FedRep's, eleven times."""

SCHEMA = pa.schema(
    {
        "cell": pa.string(),
        "kind": pa.string(),
        "method": pa.string(),
        "lr": pa.float64(),
        "seed": pa.int64(),
        "validation_accuracy": pa.float64(),
        "validation_loss": pa.float64(),
        "accuracy": pa.float64(),
        "accuracies": pa.list_(pa.float64()),
        "deviations": pa.list_(pa.float64()),
        "clients": pa.list_(pa.string()),
        "seconds": pa.float64(),
        "error": pa.string(),
    }
)
"""Columns of a stored run; `method` may be the name of a variant or control, and `error` is `diverged` or says what is
wrong. `deviations` are standard errors of the accuracies, and older files have none."""


class Unit(NamedTuple):
    """One method on one cell, with the runs that are stored."""

    cell: str
    name: str
    method: str
    options: Mapping[str, Any]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]


def make_parser(command: str = "grid") -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cells", default="*", help="names or patterns of cells, with commas between (default: all)")
    add(
        "--algorithms",
        help="methods, controls and trials (default: all methods; with --variant, none but the variants)",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=METHOD:OPTION=VALUE,...",
        help="also run a method with other options, under another name; may be repeated",
    )
    if command == "grid":
        add("--held-out", action="store_true", help="run the held-out grid instead, on which nobody develops")
    seeds = ",".join(map(str, SEEDS))
    add("--seeds", type=read_seeds, default=seeds, help="seeds of data and training (default: %(default)s)")
    add("--out", type=Path, help="folder of the runs (default: one of the grid in results)")
    add("--processes", type=read_count, default=os.cpu_count(), help="processes (default: one per core)")
    add(
        "--force",
        action="append",
        default=[],
        metavar="METHOD",
        help="run a method of the chosen cells again, or a variant",
    )
    add("--list", action="store_true", help="list the cells")
    add("--show", action="store_true", help="train nothing; write the tables of the stored runs")
    add("--against", metavar="METHOD", help="also print how all others change the accuracy of this method")
    return parser


def select_cells(cells: Mapping[str, Cell], patterns: str) -> list[Cell]:
    """Select the cells that match any of the patterns, which have commas between.

    Raises:
        SystemExit: a pattern matches no cell.
    """
    wanted = patterns.split(",")
    for pattern in wanted:
        if not fnmatch.filter(cells, pattern):
            raise SystemExit(f"cells: none matches {pattern!r}; expected some of: {', '.join(cells)}")
    return [cell for name, cell in cells.items() if any(fnmatch.fnmatchcase(name, p) for p in wanted)]


def read_variants(texts: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read variants such as `weak=ditto:lam=0.01`: name -> method and options.

    Raises:
        SystemExit: a text has another form, or names no method, an unknown option, or a method as its name.
    """
    variants = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        method, _, given = rest.partition(":")
        pairs = [pair.partition("=") for pair in given.split(",") if pair]
        if not (name and equals and all(value for _, _, value in pairs)):
            raise SystemExit(f"variant: expected NAME=METHOD:OPTION=VALUE,..., got {text}")
        if name in KNOWN or method not in METHODS:
            raise SystemExit(f"variant: expected a new name and a known method, got {text}")
        options = {key: yaml.safe_load(value) for key, _, value in pairs}
        try:
            build_method(method, options)
        except ConfigError as error:
            raise SystemExit(f"variant {name}: {error}") from error
        variants[name] = method, options
    return variants


def find_next(runs: Sequence[Run], seeds: Sequence[int]) -> tuple[float, int] | None:
    """Find the next learning rate and seed that a method needs on a cell; None if it needs no more runs."""
    if any(run["error"] not in (None, DIVERGED) for run in runs):
        return None
    done = {(run["lr"], run["seed"]) for run in runs}
    for rate in RATES:
        if (rate, seeds[0]) not in done:
            return rate, seeds[0]
    best = choose_rate([run for run in runs if run["seed"] == seeds[0]])
    missing = [seed for seed in seeds if (best, seed) not in done]
    return (best, missing[0]) if best is not None and missing else None


@lru_cache(maxsize=len(SEEDS))
def load(cell: str, seed: int) -> Federation:
    """Load the federation of a cell; a process keeps the last ones."""
    return find_cell(cell).load(seed)


def find_cell(name: str) -> Cell:
    """Find a cell of any grid."""
    return {**CELLS, **HELD_OUT, **MINORITIES}[name]


def train_unit(unit: Unit) -> list[Run]:
    """Train all missing runs of a method on a cell.

    Raises:
        DataError: the data of the cell cannot be loaded.
    """
    torch.set_num_threads(1)
    new: list[Run] = []
    while (step := find_next([*unit.runs, *new], unit.seeds)) is not None:
        new.append(train(unit, *step))
    return new


def train(unit: Unit, lr: float, seed: int) -> Run:
    """Train a method once; an error of the method becomes part of the run."""
    cell, data = find_cell(unit.cell), load(unit.cell, seed)
    run: Run = dict.fromkeys(SCHEMA.names)
    run |= {"cell": cell.name, "kind": cell.kind, "method": unit.name, "lr": lr, "seed": seed}
    started = time.perf_counter()
    try:
        if unit.method in EXTRAS:
            run |= EXTRAS[unit.method](cell, data, lr, seed)
        else:
            run |= measure_result(data, fit_cell(cell, data, unit.method, lr, seed, unit.options))
    except DivergedError:
        run["error"] = DIVERGED
    except FedAttuneError as error:
        run["error"] = str(error)
    run["seconds"] = time.perf_counter() - started
    return run


def read_runs(out: Path, cell: str) -> list[Run]:
    """Read the stored runs of a cell."""
    file = out / f"{cell}.parquet"
    runs: list[Run] = pq.read_table(file, schema=SCHEMA).to_pylist() if file.exists() else []
    return runs


def store_runs(out: Path, cell: str, new: Sequence[Run], forget: Sequence[str] = ()) -> None:
    """Add runs to those of a cell, and forget those of some methods; another command may add runs meanwhile."""
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".grid.lock"):
        runs = [run for run in read_runs(out, cell) if run["method"] not in forget]
        known = {(run["method"], run["lr"], run["seed"]) for run in runs}
        runs += [run for run in new if (run["method"], run["lr"], run["seed"]) not in known]
        with replace_atomically(out / f"{cell}.parquet") as file:
            pq.write_table(pa.Table.from_pylist(runs, schema=SCHEMA), file)


def plan(
    cells: Sequence[Cell], methods: Mapping[str, tuple[str, dict[str, Any]]], seeds: Sequence[int], out: Path
) -> list[Unit]:
    """Plan the methods that lack runs, cell by cell."""
    units = []
    for cell in cells:
        stored = read_runs(out, cell.name)
        for name, (method, options) in methods.items():
            mine = tuple(run for run in stored if run["method"] == name)
            if find_next(mine, seeds) is not None:
                units.append(Unit(cell.name, name, method, options, tuple(seeds), mine))
    return units


def run_units(units: Sequence[Unit], out: Path, processes: int) -> int:
    """Train all units in processes and store their runs; return the number of units that failed."""
    started, skipped, failed = time.perf_counter(), set[str](), 0
    context = multiprocessing.get_context("spawn")
    # An executor with `max_tasks_per_child` can wait for ever in Python 3.11; a pool does not.
    with context.Pool(max(1, min(processes, len(units))), maxtasksperchild=UNITS_PER_PROCESS) as pool:
        for done, (unit, runs) in enumerate(pool.imap_unordered(_try_unit, units), start=1):
            if isinstance(runs, DataError):
                if unit.cell not in skipped:
                    print(f"{unit.cell}: skipped: {runs}", flush=True)
                skipped.add(unit.cell)
                continue
            if isinstance(runs, Exception):  # a fault of one method must not stop the others
                failed += 1
                print(f"{unit.cell} {unit.name}: failed: {type(runs).__name__}: {runs}", flush=True)
                continue
            store_runs(out, unit.cell, runs)
            minutes = (time.perf_counter() - started) / done * (len(units) - done) / 60
            print(f"{done}/{len(units)} {unit.cell} {describe(runs)}; {minutes:.0f} min left", flush=True)
    return failed


def _try_unit(unit: Unit) -> tuple[Unit, list[Run] | Exception]:
    try:
        return unit, train_unit(unit)
    except Exception as error:
        return unit, error


def describe(runs: Sequence[Run]) -> str:
    """Describe the new runs of a method in a few words."""
    last, seconds = runs[-1], sum(run["seconds"] for run in runs)
    said = last["error"] or f"{100 * last['accuracy']:.1f}% at {last['lr']:g}"
    return f"{last['method']}: {said}, {len(runs)} runs in {seconds:.1f} s"


def show(
    cells: Sequence[Cell], seeds: Sequence[int], methods: Sequence[str] | None, out: Path, against: str | None = None
) -> None:
    """Print the tables of the stored runs, and write them and the heat map."""
    runs = [run for cell in cells for run in read_runs(out, cell.name)]
    if methods is not None:
        runs = [run for run in runs if run["method"] in methods]
    scores = score_cells(runs, seeds, {cell.name: cell.minority for cell in cells})
    if not scores:
        raise SystemExit(f"{out} holds no method with all runs of a cell; run the command without --show")
    kinds = {cell.name: cell.kind for cell in cells}
    print("\n" + "\n".join(write_scores(scores, METHODS, kinds, out, tuple(CONTROLS))))
    if against is not None:
        if not any(against in methods for methods in scores.values()):
            raise SystemExit(f"against: {out} holds no cell with all runs of {against!r}")
        print(write_changes(scores, against))
    reasons = {(run["cell"], run["method"]): run["error"] for run in runs if run["error"]}
    for (cell, method), why in reasons.items():
        if why != DIVERGED:
            print(f"{cell}: {method} does not apply: {why}")


def main(arguments: Sequence[str] | None = None, command: str = "grid") -> int:
    """Train what is missing, and print the tables."""
    given = make_parser(command).parse_args(arguments)
    folder = "grid-minorities" if command == "minorities" else "grid-held-out" if given.held_out else "grid"
    cells = select_cells(GRIDS[folder], given.cells)
    out = given.out or Path("results") / folder
    default = (*METHODS, *CONTROLS) if command == "minorities" else METHODS
    if given.list:
        for cell in cells:
            print(f"{cell.name:<32} {cell.kind:<10} {cell.model.partition(':')[2] or cell.model}")
        return 0
    variants = read_variants(given.variant)
    chosen = given.algorithms.split(",") if given.algorithms else [] if variants else default
    if (unknown := [name for name in chosen if name not in KNOWN]) and not given.show:
        raise SystemExit(f"algorithms: {unknown[0]!r} is unknown; expected some of: {', '.join(KNOWN)}")
    if given.show:
        show(cells, given.seeds, chosen if given.algorithms else None, out, given.against)
        return 0
    methods = {name: (name, OPTIONS.get(name, {})) for name in KNOWN if name in chosen} | variants
    present = []
    for cell in cells:
        if cell.package is not None and find_spec(cell.package) is None:
            print(f"{cell.name}: skipped: the package {cell.package} is not installed")
            continue
        present.append(cell)
        if given.force:
            store_runs(out, cell.name, [], forget=given.force)
    units = plan(present, methods, given.seeds, out)
    failed = run_units(units, out, given.processes) if units else 0
    show(cells, given.seeds, None, out, given.against)
    return 1 if failed else 0


run_minorities = partial(main, command="minorities")
