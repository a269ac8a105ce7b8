"""Measure what screening costs without attackers: accuracy, rejected uploads and processor time, against screening off.

    python -m benchmarks screening
    python -m benchmarks screening --columns digits,synthetic-mlr --algorithms fedavg,ditto --rounds 50
    python -m benchmarks screening --columns digits --permuted 5

The columns are those of FedMCSA's table 2, and digits. Image sets are looked for as in all commands; `--columns` leaves
out those that are not here. With `--permuted`, so many honest clients have labels of their own, and the table has the
accuracy of this group and of the others.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

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
WAYS = ("off", "groups", "on")
REPEATS = 3
"""Runs of each way, in turn; the fastest counts."""
GROUP_SPLITS = 3
"""Partitions, and groups, of a table with `--permuted`."""


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
    add("--permuted", type=int, default=0, metavar="N", help="honest clients with labels of their own (default: 0)")
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
        for way in WAYS:
            began = time.process_time()
            run = fedattune.fit(data, method, column["model"], rounds=rounds, screening=way, **settings)
            seconds[way].append(time.process_time() - began)
            accuracies[way] = 100 * run.metrics["acc_uniform"]
            found[way] = len(find_named(run))
    cells = [f"{accuracies['off']:.2f}"]
    for way in WAYS[1:]:
        cells += [f"{accuracies[way] - accuracies['off']:+.2f}", str(found[way])]
    return [*cells, f"{min(seconds['on']) / min(seconds['off']):.2f}"]


def find_named(run: fedattune.Result) -> set[str]:
    """Return the clients whose uploads were rejected, or that were quarantined."""
    report = run.reports.get("screening", {})
    return {*report.get("rejected", {}), *report.get("quarantined", [])}


def permute_labels(data: Federation, n: int, seed: int) -> tuple[Federation, list[int]]:
    """Give `n` clients a meaning of the classes of their own; return the data and these clients."""
    rng = np.random.default_rng(seed)
    group = sorted(rng.choice(len(data.names), n, replace=False).tolist())
    meaning, y = torch.from_numpy(rng.permutation(data.n_classes)).to(data.y.dtype), data.y.clone()
    for part in ("train", "validation", "test"):
        for client in group:
            rows = torch.as_tensor(data.part(part)[client])
            y[rows] = meaning[data.y[rows]]
    return replace(data, y=y), group


def measure_group(method: str, column: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """Measure a group with its own labels and the others, without and with rules on contradictions."""
    found: dict[str, list[list[float]]] = {"groups": [], "on": []}
    for seed in range(GROUP_SPLITS):
        data, group = permute_labels(load(column, seed), given.permuted, seed)
        for way, rows in found.items():
            run = fedattune.fit(
                data, method, column["model"], rounds=given.rounds, screening=way, **get_settings(column)
            )
            accuracy, is_group = run.measure_clients("accuracy"), np.isin(run.eval_ids, group)
            named = find_named(run)
            n_group = len(named & {data.names[client] for client in group})
            rows.append(
                [
                    100 * np.nanmean(accuracy[is_group]),
                    100 * np.nanmean(accuracy[~is_group]),
                    n_group,
                    len(named) - n_group,
                ]
            )
    groups, on = np.mean(found["groups"], axis=0), np.sum(found["on"], axis=0)
    of_on = on[:2] / GROUP_SPLITS
    named = f"{on[2]:.0f} of {given.permuted * GROUP_SPLITS}, {on[3]:.0f}"
    return [*(f"{value:.1f}" for value in (*groups[:2], *of_on)), named]


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
    cost = ("off: accuracy %", "groups: points", "found", "on: points", "found", "time x off")
    groups = ("groups: group %", "others %", "on: group %", "others %", "found: group, others")
    head = ("data", "method", *(groups if given.permuted else cost))
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    try:
        for name in chosen:
            column = COLUMNS[name]
            data = load(column)
            for method in given.algorithms.split(","):
                cells = (
                    measure_group(method, column, given)
                    if given.permuted
                    else measure_row(method, data, column, given.rounds)
                )
                print(f"| {' | '.join([name, method, *cells])} |", flush=True)
    except FedAttuneError as error:
        raise SystemExit(str(error)) from error
    return 0
