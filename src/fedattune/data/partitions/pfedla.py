"""The two label distributions of pFedLA, and its two studies of similar clients."""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ...core.citing import cite
from ...core.errors import DataError
from ...core.options import Count
from ..splits import group_rows
from ..types import Array, Index
from .shards import make_distinct

DEFAULT_SIZE = 600  # samples of a client: 100 clients then use all of CIFAR-10 and CIFAR-100
MANY_CLASSES = 100  # from here on clients have three times as many classes
Share = Annotated[float, Field(gt=0, lt=1)]


@cite("ma2022layer")
def pfedla(
    labels: Array,
    n_clients: int,
    seed: int,
    *,
    setting: Literal[1, 2] = 1,
    classes: Count | None = None,
    size: Count | None = None,
    dominant_share: Share = 0.5,
) -> list[Index]:
    """Equal clients with a few classes (setting 1), or with all classes and a few dominant ones (setting 2).

    All classes are chosen equally often, as nearly as possible. All classes of a client (all dominant ones, all others)
    are equally large, so its size is rounded down to a multiple.

    Args:
        setting: 1 for a few classes, 2 for all classes with a few dominant ones.
        classes: number of classes of a client (setting 1), or of dominant classes (setting 2). The default is 4 or 2,
            and 12 or 6 for data of 100 classes or more.
        size: number of samples per client, by default 600 or as many as the data allow.
        dominant_share: share of the dominant classes in a client's samples.

    Source: Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022, section 4.
    """
    by_class = group_rows(labels)
    n_classes = len(by_class)
    k = (4 if setting == 1 else 2) * (3 if n_classes >= MANY_CLASSES else 1) if classes is None else classes
    if k > n_classes - (setting == 2):
        raise DataError(
            f"pfedla cannot give each client {k} of {n_classes} classes{' and others' * (setting == 2)}; take a "
            "smaller pfedla.classes"
        )
    random = np.random.default_rng(seed)
    has_class = _choose_classes(n_clients, n_classes, k, random)  # (N, K), whether client u has class c

    def counts(n: int) -> Array:
        """Return how many samples of each class a client of size n has, (N, K)."""
        if setting == 1:
            return has_class * (n // k)
        dominant = int(n * dominant_share + 1e-9)
        return np.where(has_class, dominant // k, (n - dominant) // (n_classes - k))

    dealt = _fit_counts("pfedla", by_class, counts, size)
    if setting == 2 and not 0 < dealt[~has_class].max() < dealt[has_class].min():
        raise DataError(
            f"pfedla: of {dealt[0].sum()} samples per client the {k} dominant classes get {dealt[has_class].min()} "
            f"each and the other {n_classes - k} get {dealt[~has_class].max()}; all need some and the dominant ones "
            "more: change pfedla.size, pfedla.classes, pfedla.dominant_share or the number of clients"
        )
    return _deal(by_class, dealt, random)


@cite("ma2022layer")
def pfedla_similarity(
    labels: Array,
    n_clients: int,
    seed: int,
    *,
    study: Literal["heat_map", "weights"] = "heat_map",
    classes: Count = 4,
    size: Count | None = None,
) -> list[Index]:
    """Clients of known similarity, to see whether a method finds it: 8 clients with 4 classes each.

    Args:
        study: "heat_map" gives client u the classes u, u+1, u+2, u+3, counted round, so neighbours share three.
            "weights" makes client 0 the target with random classes. Client 1 has the same classes, client 2 all but
            one of them, and every other client random classes that the target lacks.

    Source: Ma et al., pFedLA, CVPR 2022, section 4.3, figures 6 (heat map) and 5 (weights).
    """
    by_class = group_rows(labels)
    n_classes = len(by_class)
    minimum = classes + 1 if study == "heat_map" else 2 * classes
    if n_classes < minimum:
        raise DataError(
            f"pfedla_similarity with {classes} classes per client needs data of {minimum} classes or more, got "
            f"{n_classes}; take a smaller pfedla_similarity.classes"
        )
    if study == "weights" and n_clients < 4:
        raise DataError(
            f"the weights study needs a target, an equal client, a similar client and others, got {n_clients} clients; "
            "take 4 or more"
        )
    random = np.random.default_rng(seed)
    has_class = np.zeros((n_clients, n_classes), dtype=bool)
    if study == "heat_map":
        for u in range(n_clients):
            has_class[u, (u + np.arange(classes)) % n_classes] = True
    else:
        order = random.permutation(n_classes)
        target, others = order[:classes], order[classes:]
        has_class[:2, target] = True
        has_class[2, [*target[1:], others[0]]] = True
        for u in range(3, n_clients):
            has_class[u, random.choice(others, classes, replace=False)] = True
    dealt = _fit_counts("pfedla_similarity", by_class, lambda n: has_class * (n // classes), size)
    return _deal(by_class, dealt, random)


def _choose_classes(n_clients: int, n_classes: int, k: int, random: np.random.Generator) -> Array:
    """Choose k different classes for each client, (N, K), all classes equally often or once more."""
    if 2 * k > n_classes:  # choose the few classes that a client lacks: that is faster
        return ~_choose_classes(n_clients, n_classes, n_classes - k, random)
    if k == 0:
        return np.zeros((n_clients, n_classes), dtype=bool)
    whole, rest = divmod(n_clients * k, n_classes)
    own = np.concatenate([np.repeat(np.arange(n_classes), whole), random.permutation(n_classes)[:rest]])
    dealt = make_distinct(random.permutation(len(own)).reshape(n_clients, k), own, random)
    has_class = np.zeros((n_clients, n_classes), dtype=bool)
    has_class[np.arange(n_clients)[:, None], own[dealt]] = True
    return has_class


def _fit_counts(name: str, by_class: list[Index], counts: Callable[[int], Array], size: int | None) -> Array:
    """Return how many samples of each class each client gets, (N, K): for `size`, or the most up to `DEFAULT_SIZE`.

    `counts(n)` returns the same for clients of size n.
    """
    available = np.array([len(rows) for rows in by_class])

    def fits(n: int) -> bool:
        return bool((counts(n).sum(axis=0) <= available).all())

    target = DEFAULT_SIZE if size is None else size
    if fits(target):
        largest = target
    else:  # clients hold at least n - K samples, for they lose less than one per class in rounding
        bound = int(available.sum()) // len(counts(1)) + len(available)
        largest = next(n for n in range(min(target, bound), -1, -1) if fits(n))
    dealt = counts(largest if size is None else size)
    if size is not None and largest < size:
        most = counts(largest)  # several sizes round to these counts: name the smallest
        largest = next(n for n in range(largest + 1) if (counts(n) == most).all())
        scarce = int((dealt.sum(axis=0) - available).argmax())
        smaller = f"{name}.size={largest} or less, or " * (largest > 0)
        raise DataError(
            f"{name}: {len(dealt)} clients of {size} samples need {dealt[:, scarce].sum()} of class {scarce}, but "
            f"there are {available[scarce]}; take {smaller}fewer clients"
        )
    if dealt.sum() == 0:
        raise DataError(
            f"{name}: no sample is left for {len(dealt)} clients when each has as many of every class; take fewer "
            f"clients or classes, or a larger {name}.size"
        )
    return dealt


def _deal(by_class: list[Index], counts: Array, random: np.random.Generator) -> list[Index]:
    """Deal the samples of every class at random to the clients, `counts` (N, K) of them."""
    ends = counts.cumsum(axis=0)
    mixed = [random.permutation(rows) for rows in by_class]
    return [
        np.concatenate([rows[end - n : end] for rows, end, n in zip(mixed, ends[u], counts[u], strict=True)])
        for u in range(len(counts))
    ]
