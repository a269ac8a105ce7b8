"""Measure what screening costs if nobody lies: accuracy, refused uploads and processor time, against `--screening off`.

    python -m benchmarks screening
    python -m benchmarks screening --columns digits,synthetic-mlr --algorithms fedavg,ditto --rounds 50

The columns are those of FedMCSA's table 2, and digits. Image sets are looked for as in all commands; `--columns` leaves
out those that are not here.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import fedattune
from fedattune.core.errors import FedAttuneError
from fedattune.data import Federation

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
WAYS = ("off", "on", "labels")
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
    add("--rounds", type=int, default=100, help="rounds of every run (default: %(default)s)")
    return parser


def measure_row(method: str, data: Federation, column: dict[str, Any], rounds: int) -> list[str]:
    """Measure one method on one column; return the cells of its row."""
    keep = {"data", "partition", "clients", "model", "lr"}
    settings = {"lr": column.get("lr", 0.02), **{k: v for k, v in column.items() if k not in keep}}
    # The first run records the steps, which takes longer.
    fedattune.fit(method, data, column["model"], rounds=2, **settings)
    accuracies, refused = {}, {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(REPEATS):
        for way in WAYS:
            began = time.process_time()
            run = fedattune.fit(
                method, data, column["model"], rounds=rounds, eval_every=10, screening=way, **settings
            )
            seconds[way].append(time.process_time() - began)
            accuracies[way] = 100 * run.metrics["acc_uniform"]
            refused[way] = len(run.store.faults())
    cells = [f"{accuracies['off']:.2f}"]
    for way in WAYS[1:]:
        cells += [f"{accuracies[way] - accuracies['off']:+.2f}", str(refused[way])]
    return [*cells, f"{min(seconds['on']) / min(seconds['off']):.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row."""
    given = make_parser().parse_args(arguments)
    chosen = given.columns.split(",")
    if unknown := [name for name in chosen if name not in COLUMNS]:
        raise SystemExit(
            f"columns: no column is called {unknown[0]!r}; expected some of: {', '.join(COLUMNS)}"
        )
    head = (
        "data",
        "method",
        "off: accuracy %",
        "on: points",
        "refused",
        "labels: points",
        "refused",
        "time x off",
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    try:
        for name in chosen:
            column = COLUMNS[name]
            where = {key: column[key] for key in ("partition", "clients") if key in column}
            data = fedattune.load_federation(column["data"], **where)
            for method in given.algorithms.split(","):
                row = [name, method, *measure_row(method, data, column, given.rounds)]
                print(f"| {' | '.join(row)} |", flush=True)
    except FedAttuneError as error:
        raise SystemExit(str(error)) from error
    return 0
