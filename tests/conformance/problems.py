"""Small problems on which the mechanism of a method must act and must help; each makes its clients from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fedattune
from fedattune import Federation


@dataclass(frozen=True)
class Problem:
    make: Callable[[int], Federation]
    settings: dict[str, Any] = field(default_factory=dict)  # beside those of all problems
    model: str = "mlr"


def two_heads(seed: int = 0) -> Federation:
    """Samples whose right head differs: half of a client's samples follow a rule of all, half a rule of its own.

    A sample shows its kind k of four and a mark. Without the mark its class is k, with the mark (k + shift) modulo 4,
    where the shift is the client's. A linear model with one division of features for all samples of a client cannot
    follow both rules: it reaches little more than one half. Six clients train on 100 samples each.
    """
    kinds, width, train, test = 4, 64, 100, 100
    generator = torch.Generator().manual_seed(seed)
    *directions, mark = torch.linalg.qr(torch.randn(width, kinds + 1, generator=generator))[0].T
    clients = []
    for i in range(6):
        kind = torch.randint(kinds, (train + test,), generator=generator)
        marked = torch.randint(2, (train + test,), generator=generator)
        x = 4 * (torch.stack(directions)[kind] + (2.0 * marked - 1)[:, None] * mark)
        x += 0.2 * torch.randn(x.shape, generator=generator)
        y = (kind + marked * (1 + i % (kinds - 1))) % kinds
        clients.append({"train": (x[:train], y[:train]), "test": (x[train:], y[train:])})
    return fedattune.federation_from(clients)


def two_groups(seed: int = 0) -> Federation:
    """Opposite tasks: the last four of eight clients have the inputs of the first four, and flipped labels.

    The mean of all models knows nothing. The mean of a group knows more than a client learns from 40 samples.
    """
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(10, generator=generator)
    inputs = [torch.randn(60, 10, generator=generator) for _ in range(4)]
    first = [(x, (x @ rule > 0).long()) for x in inputs]
    return fedattune.federation_from([*first, *((x, 1 - y) for x, y in first)])


def related_tasks(seed: int = 0) -> Federation:
    """Eight clients with similar linear rules, and 20 samples each: too few to train alone."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(20, generator=generator)
    clients = []
    for _ in range(8):
        own = rule + 0.5 * torch.randn(20, generator=generator)
        x = torch.randn(220, 20, generator=generator)
        clients.append(_split(x, (x @ own > 0).long(), 20))
    return fedattune.federation_from(clients)


def drift(seed: int = 0) -> Federation:
    """Ten clients with two of ten classes each: local steps lead away from the model that is good for all."""
    return _classes([(i, (i + 1) % 10) for i in range(10)], 0.6, seed)


def scaled_drift(seed: int = 0) -> Federation:
    """The same with features of very different scales, which one rate for all parameters does not suit."""
    return _classes([(i, (i + 1) % 10) for i in range(10)], 1.0, seed, torch.logspace(0, -1.5, 20))


def unequal_work(seed: int = 0) -> Federation:
    """Ten clients with two of ten classes each, and 20 to 200 samples: passes over the data are 1 to 10 times as long.

    A plain average follows those who take most steps; it is then bad for the others.
    """
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(10, 20, generator=generator)
    clients = []
    for i in range(10):
        train = 20 * (i + 1)
        y = torch.tensor((i, (i + 1) % 10))[torch.randint(2, (train + 40,), generator=generator)]
        clients.append(_split(means[y] + torch.randn(train + 40, 20, generator=generator), y, train))
    return fedattune.federation_from(clients)


def rare_pair(seed: int = 0) -> Federation:
    """Ten clients with two classes each: the same two for eight clients, two others for the last two.

    A plain average mostly follows the eight. The updates of the two stay large, because their loss does.
    """
    return _classes([(0, 1)] * 8 + [(2, 3)] * 2, 0.6, seed)


def rare_classes(seed: int = 0) -> Federation:
    """Ten clients with 56 samples of one class and one sample of each of four others, tested on all classes alike.

    Plain training learns little more than the common class.
    """
    generator = torch.Generator().manual_seed(seed)
    means = 0.6 * torch.randn(5, 20, generator=generator)
    y = torch.cat([torch.zeros(56, dtype=torch.int64), torch.arange(1, 5), torch.arange(5).repeat(20)])
    return fedattune.federation_from(
        [_split(means[y] + torch.randn(len(y), 20, generator=generator), y, 60) for _ in range(10)]
    )


def permuted_labels(seed: int = 0) -> Federation:
    """Twelve clients whose labels have one of two meanings, with 8 noisy samples each: the first groups are wrong.

    They also have 12 samples to compare the groups' models on.
    """
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(4, 10, generator=generator)
    clients = []
    for i in range(12):
        kind = torch.randint(4, (40,), generator=generator)
        x = means[kind] + torch.randn(40, 10, generator=generator)
        y = (kind + i % 2) % 4
        clients.append({"validation": (x[8:20], y[8:20]), "train": (x[:8], y[:8]), "test": (x[20:], y[20:])})
    return fedattune.federation_from(clients)


def few_digits(seed: int = 0) -> Federation:
    """Sixty clients with about 20 handwritten digits of all ten classes each: too few to train alone."""
    return fedattune.load_federation("digits", partition="iid", clients=60, seed=seed)


def _classes(pairs: list[tuple[int, int]], spread: float, seed: int, scale: Tensor | float = 1.0) -> Federation:
    """Make clients with two Gaussian classes each, and 40 samples of training."""
    generator = torch.Generator().manual_seed(seed)
    means = spread * torch.randn(1 + max(max(pair) for pair in pairs), 20, generator=generator)
    clients = []
    for pair in pairs:
        y = torch.tensor(pair)[torch.randint(2, (80,), generator=generator)]
        clients.append(_split((means[y] + torch.randn(80, 20, generator=generator)) * scale, y, 40))
    return fedattune.federation_from(clients)


def _split(x: Tensor, y: Tensor, train: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {"train": (x[:train], y[:train]), "test": (x[train:], y[train:])}


SETTINGS: dict[str, Any] = {"rounds": 20, "steps": 20, "batch_size": 20, "lr": 0.1, "cohort": 1.0, "eval_every": 5}

NETWORK = {"rounds": 50, "steps": 10, "lr": 0.5, "model_options": {"hidden": 20}}

PROBLEMS = {
    "heads": Problem(two_heads, {"rounds": 30}),
    "groups": Problem(two_groups, {"steps": 5}),
    "groups, two layers": Problem(two_groups, NETWORK, "dnn"),
    "related tasks": Problem(related_tasks, {"rounds": 10}),
    "related tasks, two layers": Problem(related_tasks, {"rounds": 10}, "dnn"),
    "drift": Problem(drift, {"rounds": 3, "eval_every": 3}),
    "drift, few clients": Problem(drift, {"cohort": 2, "steps": 100, "batch_size": 10, "lr": 0.5}),
    "drift, two layers": Problem(drift, {"rounds": 50, "lr": 0.3}, "dnn"),
    "drift, scales": Problem(scaled_drift),
    "rare classes": Problem(rare_classes, {"rounds": 10}),
    "drift, scales, two layers": Problem(scaled_drift, {"steps": 50, "model_options": {"hidden": 50}}, "dnn"),
    "few digits": Problem(few_digits, {"steps": 10, "eval_every": 20}, "dnn"),
    "unequal work": Problem(unequal_work, {"steps": None, "epochs": 10, "rounds": 5}),
    "permuted labels": Problem(permuted_labels, {"rounds": 8}),
    "rare pair": Problem(rare_pair, {"rounds": 3, "eval_every": 3}),
}
