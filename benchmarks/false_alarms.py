"""Measure the default defence on federations without attackers, where every rejection is an error.

    python -m benchmarks false-alarms
    python -m benchmarks false-alarms --federations "permuted;inverted" --algorithms fedavg,ditto --splits 1

Each cell has the mean accuracy without a defence, the change by `--screening groups --accept harmless` (the default
under attack and in deployments), and how many clients were rejected or quarantined. Where a group of clients has data
of another kind, a second line has the accuracy of this group alone.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import fedattune
from fedattune.data import Federation
from fedattune.data.client_index import ClientIndex, RaggedIndex
from fedattune.training.uploads import screening

from .options import read_count

METHODS = ("fedavg", "ditto", "pfedla", "scaffold", "attune", "fedmcsa", "fedrep")
SETTINGS: dict[str, Any] = {"rounds": 50, "lr": 0.05, "early_stopping": "off", "eval_every": 50}
DEFENCE: dict[str, Any] = {"screening": "groups", "accept": "harmless"}
CLIENTS = 20
NOISE = 0.4
"""Share of the training rows with a label drawn at random."""
QUARTER, MANY = 5, 8
"""Clients of a group."""

Change = Callable[[Federation, Any, np.random.Generator], Federation]
"""Changes the data of a group of clients (G,), at random."""


def find_rows(data: Federation, group: Any, parts: Sequence[Any] = ("train", "validation", "test")) -> Any:
    """Return the rows of some clients."""
    return torch.as_tensor(np.concatenate([data.part(part)[client] for part in parts for client in group]))


def rotate(data: Federation, group: Any, _: np.random.Generator) -> Federation:
    """Rotate the group's images by a quarter."""
    x, rows = data.x.clone(), find_rows(data, group)
    x[rows] = x[rows].rot90(1, (-2, -1))
    return replace(data, x=x)


def invert(data: Federation, group: Any, _: np.random.Generator) -> Federation:
    """Invert the group's images."""
    x, rows = data.x.clone(), find_rows(data, group)
    x[rows] = data.x.max() - x[rows]
    return replace(data, x=x)


def permute(data: Federation, group: Any, rng: np.random.Generator) -> Federation:
    """Give the group a meaning of the classes of its own."""
    y, rows = data.y.clone(), find_rows(data, group)
    y[rows] = torch.from_numpy(rng.permutation(data.n_classes)).to(y)[y[rows]]
    return replace(data, y=y)


def add_noise(data: Federation, group: Any, rng: np.random.Generator) -> Federation:
    """Draw labels of the group's training rows at random."""
    y, rows = data.y.clone(), find_rows(data, group, ("train",))
    rows = rows[torch.from_numpy(rng.random(len(rows)) < NOISE)]
    y[rows] = torch.from_numpy(rng.integers(data.n_classes, size=len(rows))).to(y)
    return replace(data, y=y)


def skew(data: Federation, _: Any, rng: np.random.Generator) -> Federation:
    """Leave clients with 8 to 100% of their training rows, in equal ratios from one to the next."""
    train = data.part("train")
    shares = rng.permutation(np.geomspace(0.08, 1, data.n_clients))
    kept = RaggedIndex.from_lists([train[i][: max(2, round(share * len(train[i])))] for i, share in enumerate(shares)])
    return replace(data, clients=ClientIndex(kept, data.part("validation"), data.part("test"), data.names))


def keep(data: Federation, _: Any, __: np.random.Generator) -> Federation:
    """Change nothing."""
    return data


FEDERATIONS: dict[str, tuple[str, dict[str, Any], Change, int, dict[str, Any]]] = {
    "iid": ("iid", {}, keep, 0, {}),
    "dirichlet 0.1": ("dirichlet", {"beta": 0.1}, keep, 0, {}),
    "dirichlet 0.5": ("dirichlet", {"beta": 0.5}, keep, 0, {}),
    "dirichlet_clients": ("dirichlet_clients", {}, keep, 0, {}),
    "shards": ("shards", {}, keep, 0, {}),
    "rotated": ("iid", {}, rotate, QUARTER, {}),
    "rotated, 8": ("iid", {}, rotate, MANY, {}),
    "inverted": ("iid", {}, invert, QUARTER, {}),
    "inverted, 8": ("iid", {}, invert, MANY, {}),
    "permuted": ("dirichlet", {"beta": 0.5}, permute, QUARTER, {}),
    "noise": ("iid", {}, add_noise, QUARTER, {}),
    "noise, all": ("iid", {}, add_noise, CLIENTS, {}),
    "newcomers": ("dirichlet", {"beta": 0.1}, keep, 0, {"held_out": 4}),
    "skew": ("iid", {}, skew, 0, {}),
}
"""name -> partition, its options, what is changed, for how many clients, settings of the run."""


def load(name: str, seed: int) -> tuple[Federation, np.ndarray, dict[str, Any]]:
    """Return a federation of digits, its group, and settings of its runs."""
    partition, options, change, n_group, settings = FEDERATIONS[name]
    data = fedattune.load_federation(
        "digits", partition=partition, clients=CLIENTS, seed=seed, partition_options=options
    )
    rng = np.random.default_rng(seed)
    group = np.sort(rng.choice(CLIENTS, n_group, replace=False))
    return change(data, group, rng), group, settings


def measure(name: str, method: str, splits: range) -> list[tuple[float, float, float, float, int]]:
    """Return per split: all clients without and with the defence, the group the same, and how many are named."""
    found = []
    for seed in splits:
        data, group, settings = load(name, seed)
        values, named = [], 0
        for defence in ({}, DEFENCE):
            run = fedattune.fit(data, method, "dnn", **SETTINGS, **settings, **defence)
            accuracy = 100 * run.measure_clients("accuracy")
            values += [np.nanmean(accuracy), np.nanmean(accuracy[np.isin(run.eval_ids, group)]) if len(group) else 0.0]
            report = run.reports.get("screening", {})
            named = len({*report.get("rejected", {}), *report.get("quarantined", [])})
        found.append((values[0], values[2], values[1], values[3], named))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks false-alarms",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--federations", default=";".join(FEDERATIONS), help="with ; between (default: all)")
    parser.add_argument("--algorithms", default=",".join(METHODS), help="methods, the columns (default: %(default)s)")
    parser.add_argument(
        "--splits", type=read_count, default=1, help="partitions with other seeds (default: %(default)s)"
    )
    parser.add_argument("--clip", type=float, default=screening.CLIP, help="usual norms (default: %(default)s)")
    parser.add_argument(
        "--evidence", type=float, default=screening.MAX_EVIDENCE, help="blame to reject a client (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    screening.CLIP, screening.MAX_EVIDENCE = given.clip, given.evidence
    methods, names = given.algorithms.split(","), given.federations.split(";")
    if unknown := [name for name in names if name not in FEDERATIONS]:
        raise SystemExit(f"federations: none is called {unknown[0]!r}; expected some of: {'; '.join(FEDERATIONS)}")
    print(f"| federation | {' | '.join(methods)} |\n{'|---' * (len(methods) + 1)}|")
    for name in names:
        rows = {method: np.array(measure(name, method, range(given.splits))) for method in methods}
        means = {method: row.mean(0) for method, row in rows.items()}
        cells = [f"{m[0]:.1f} {m[1] - m[0]:+.1f} ({rows[method][:, 4].sum():.0f})" for method, m in means.items()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        if FEDERATIONS[name][3]:
            cells = [f"{m[2]:.1f} {m[3] - m[2]:+.1f}" for m in means.values()]
            print(f"| its group | {' | '.join(cells)} |", flush=True)
    return 0
