"""Measure what the default defence costs without attackers: accuracy, rejected uploads and processor time.

    python -m benchmarks screening
    python -m benchmarks screening --columns digits,synthetic-mlr --algorithms fedavg,ditto --rounds 50

The columns are those of FedMCSA's table 2, and digits. Image sets are looked for as in all commands; `--columns` leaves
out those that are not here. `false-alarms` has federations of other kinds.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import fedattune
from fedattune.data import Federation

from .options import read_count

COLUMNS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "partition": "dirichlet", "clients": 20, "model": "dnn", "lr": 0.05},
    "synthetic-mlr": {"data": "synthetic", "model": "mlr"},
    "synthetic-dnn": {"data": "synthetic", "model": "dnn", "model_options": {"hidden": 20}},
    "mnist-mlr": {"data": "mnist", "partition": "two_class", "model": "mlr"},
    "mnist-dnn": {"data": "mnist", "partition": "two_class", "model": "dnn"},
    "fmnist-mlr": {"data": "fashion_mnist", "partition": "two_class", "model": "mlr"},
    "fmnist-dnn": {"data": "fashion_mnist", "partition": "two_class", "model": "dnn"},
    "cifar10-mlr": {"data": "cifar10", "partition": "two_class", "model": "mlr"},
    "cifar10-dnn": {"data": "cifar10", "partition": "two_class", "model": "dnn"},
}
METHODS = ("fedavg", "ditto", "pfedme", "fedmcsa", "heurfedamp", "pfedla")
WAYS: dict[str, dict[str, str]] = {
    "off": {"screening": "off", "accept": "always"},
    "screening": {"screening": "groups", "accept": "always"},
    "default": {"screening": "groups", "accept": "harmless"},
}
REPEATS = 3
"""Runs of each way, in turn; the fastest counts."""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks screening",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--columns", default=",".join(COLUMNS), help="data, models and partitions (default: all)")
    add("--algorithms", default=",".join(METHODS), help="methods, the rows (default: %(default)s)")
    add("--rounds", type=read_count, default=100, help="rounds of every run (default: %(default)s)")
    return parser


def get_settings(column: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a column's runs."""
    about_data = {"data", "partition", "clients", "model"}
    return {"lr": 0.02, "eval_every": 10} | {k: v for k, v in column.items() if k not in about_data}


def measure_row(method: str, data: Federation, column: dict[str, Any], rounds: int) -> list[str]:
    """Measure one method on one column; return the cells of its row. Found are clients rejected or quarantined."""
    settings = get_settings(column)
    # The first run records the steps, which takes longer.
    fedattune.fit(data, method, column["model"], rounds=2, **settings)
    accuracies, found = {}, {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(REPEATS):
        for way, defence in WAYS.items():
            began = time.process_time()
            run = fedattune.fit(data, method, column["model"], rounds=rounds, **defence, **settings)
            seconds[way].append(time.process_time() - began)
            accuracies[way] = 100 * run.metrics["acc_uniform"]
            found[way] = len(find_named(run))
    cells = [f"{accuracies['off']:.2f}"]
    for way in list(WAYS)[1:]:
        ratio = min(seconds[way]) / min(seconds["off"])
        cells += [f"{accuracies[way] - accuracies['off']:+.2f}", str(found[way]), f"{ratio:.2f}"]
    return cells


def find_named(run: fedattune.Result) -> set[str]:
    """Return the clients whose uploads were rejected, or that were quarantined."""
    report = run.reports.get("screening", {})
    return {*report.get("rejected", {}), *report.get("quarantined", [])}


def load(column: dict[str, Any], seed: int | None = None) -> Federation:
    """Load the data of a column."""
    where = {key: column[key] for key in ("partition", "clients") if key in column}
    return fedattune.load_federation(column["data"], seed=seed, **where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row."""
    given = make_parser().parse_args(arguments)
    chosen = given.columns.split(",")
    if unknown := [name for name in chosen if name not in COLUMNS]:
        raise SystemExit(f"columns: no column is called {unknown[0]!r}; expected some of: {', '.join(COLUMNS)}")
    ways = [cell for way in list(WAYS)[1:] for cell in (f"{way}: points", "found", "time x off")]
    head = ("data", "method", "off: accuracy %", *ways)
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name in chosen:
        column = COLUMNS[name]
        data = load(column)
        for method in given.algorithms.split(","):
            cells = measure_row(method, data, column, given.rounds)
            print(f"| {' | '.join([name, method, *cells])} |", flush=True)
    return 0
