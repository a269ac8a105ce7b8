"""Compare rules for the verdict on made-up federations whose true gains are known: false alarms and power.

A federation has N clients of 12 to 250 rows with six inputs, and a number or one of two classes as the target. Its
models are ridge regressions: one per client (the reference) and five methods, of which validation rows choose one. A
rule says "yes" if the chosen method is surely better on the test rows of 1, 3, 5 or 10 random splits.

- `none`: all models are of a client's own rows, of different random parts of them: no method is better for any client.
- `some gain, some lose`: the methods share one model. Half of the clients differ from the others, by just so much that
  the mean gain over all federations is zero.
- `all lose`: the same, with clients that differ twice as much.
- `all gain`: the same with clients that differ little; `some gain`: half of the clients gain and half keep their model.

A "yes" in the first three is an error.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedattune.analysis.compare import FULL_TEST_ROWS
from fedattune.analysis.verdict import CLEAR_LEVEL
from fedattune.analysis.verdict.statistics import estimate_mean

from .options import read_count

Array = NDArray[Any]
N_INPUTS, TEST, VALIDATION, N_METHODS = 6, 0.25, 0.1, 5
CLIENTS, SPLITS = (4, 10, 20, 100), (1, 3, 5, 10)
NO_GAIN, GAIN = ("none", "some gain, some lose", "all lose"), ("all gain", "some gain")
SMALL_DISTANCE = 0.2
"""Distance of the clients' true weights, relative to their common part, at which sharing helps."""
N_RESAMPLES = 2000


@dataclass(frozen=True)
class Federation:
    """The reference (position 0) and the methods on all splits.

    Attributes:
        test, validation, truth: metric of each model, split and client (1 + methods, K, N), the larger the better.
        influence: how much each test row adds to a client's metric (1 + methods, K, N, rows), 0 elsewhere.
        weights: test rows of each client on one split (N,).
    """

    test: Array
    validation: Array
    truth: Array
    influence: Array
    n_test: Array


def simulate(random: np.random.Generator, n: int, scenario: str, distance: float, *, is_class: bool) -> Federation:
    """Make a federation of n clients, and train and test all models on all splits."""
    sizes = np.clip(np.exp(random.normal(np.log(60), 0.7, n)), 12, 250).astype(int)
    has = np.arange(sizes.max()) < sizes[:, None]
    x = random.normal(size=(*has.shape, N_INPUTS))
    common = random.normal(size=N_INPUTS)
    differs = random.random(n) < 0.5 if scenario.startswith("some") else np.ones(n, dtype=bool)
    true = common / np.linalg.norm(common) + np.where(differs, distance, 0)[:, None] * random.normal(
        size=(n, N_INPUTS)
    ) / np.sqrt(N_INPUTS)
    noise = np.exp(random.normal(0, 0.3, n))
    y = np.einsum("nif,nf->ni", x, true) + noise[:, None] * random.normal(size=has.shape)
    y = np.where(y > 0, 1.0, -1.0) if is_class else y
    order = np.where(has, random.random((max(SPLITS), *has.shape)), 2.0).argsort(-1).argsort(-1)
    n_test = np.maximum(1, np.round(TEST * sizes)).astype(int)
    stop = n_test + np.maximum(1, np.round(VALIDATION * (sizes - n_test))).astype(int)
    test = order < n_test[:, None]
    validation, train = (order < stop[:, None]) & ~test, (order >= stop[:, None]) & has
    if scenario == "none":
        parts = (train & (random.random(train.shape) < 0.6) for _ in range(1 + N_METHODS))
        models = np.stack([_solve(*_sum_up(x, y, part)) for part in parts])
    else:
        gram, product = _sum_up(x, y, train)
        own = _solve(gram, product)
        shared = []
        for _ in range(N_METHODS):  # of other clients each time, as methods and their seeds differ
            chosen = random.random(gram.shape[:2]) < 0.8
            whole = _solve((gram * chosen[..., None, None]).sum(1), (product * chosen[..., None]).sum(1))
            keeps = differs & (scenario == "some gain")
            shared.append(np.where(keeps[:, None], own, whole[:, None]))
        models = np.stack([own, *shared])
    outputs = np.einsum("nif,mknf->mkni", x, models)
    losses = ((outputs > 0) != (y > 0)).astype(float) if is_class else (outputs - y) ** 2

    def average(part: Array) -> Array:
        return np.asarray((losses * part).sum(-1) / part.sum(-1))

    errors = average(test)
    influence = (errors[..., None] - losses) * test / test.sum(-1, keepdims=True)
    if not is_class:
        influence /= 2 * np.sqrt(errors[..., None])
    return Federation(
        1 - errors if is_class else -np.sqrt(errors),
        1 - average(validation) if is_class else -np.sqrt(average(validation)),
        _measure_truth(models, true, noise, is_class=is_class),
        influence,
        n_test,
    )


def _sum_up(x: Array, y: Array, part: Array) -> tuple[Array, Array]:
    """Return the sums of squares (K, N, F, F) and products (K, N, F) of the rows of a part (K, N, rows)."""
    weighted = np.swapaxes(x * part[..., None], -1, -2)
    return weighted @ x, (weighted @ y[..., None])[..., 0]


def _solve(gram: Array, product: Array) -> Array:
    solved: Array = np.linalg.solve(gram + np.eye(N_INPUTS), product[..., None])[..., 0]
    return solved


def _measure_truth(models: Array, true: Array, noise: Array, *, is_class: bool) -> Array:
    """Compute the metric on infinitely many new rows."""
    if not is_class:
        return np.asarray(-np.sqrt(((models - true) ** 2).sum(-1) + noise**2))
    lengths = np.maximum(np.linalg.norm(models, axis=-1), 1e-12) * np.sqrt((true**2).sum(-1) + noise**2)
    return np.asarray(1 - np.arccos(np.clip((models * true).sum(-1) / lengths, -1, 1)) / np.pi)


def find_neutral_distance(n: int, *, is_class: bool, n_federations: int) -> float:
    """Find the distance of the differing clients at which one shared model gains nothing on average."""

    def measure(distance: float) -> float:
        random = np.random.default_rng(7)
        made = (
            simulate(random, n, "some gain, some lose", distance, is_class=is_class).truth for _ in range(n_federations)
        )
        return float(np.mean([(truth[1:] - truth[0]).mean() for truth in made]))

    low, high = 0.2, 1.6
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) > 0 else (low, middle)
    return high


@dataclass(frozen=True)
class Gains:
    """The gains of the chosen method (K, N), weights of the clients (N,), and the influences of rows (N, rows)."""

    by_split: Array
    weights: Array
    influence: Array

    @property
    def by_client(self) -> Array:
        return np.asarray(self.by_split.mean(0))

    @property
    def means(self) -> Array:
        return np.asarray(np.average(self.by_split, axis=1, weights=self.weights))

    @property
    def split_variance(self) -> float:
        return float(np.var(self.means, ddof=1)) * (1 / len(self.means) + TEST / (1 - TEST))


def decide_here(gains: Gains, level: float = 0.95) -> bool:
    """Decide as the verdict does."""
    low, _ = estimate_mean(gains.by_split, gains.weights, TEST).compute_interval(level) or (-np.inf, np.inf)
    return low > 0


def decide_by_clients(gains: Gains) -> bool:
    """Take the t interval over clients, however few."""
    low, _ = estimate_mean(gains.by_client[None], gains.weights, TEST).compute_interval() or (-np.inf, np.inf)
    return low > 0


def decide_by_flips(gains: Gains) -> bool:
    """Flip the signs of the clients' gains at random."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(N_RESAMPLES, len(gains.weights)))
    total = float(gains.weights @ gains.by_client)
    return total > 0 and float(np.mean(np.abs(signs @ (gains.weights * gains.by_client)) >= total - 1e-12)) <= 0.05


def decide_by_bootstrap(gains: Gains) -> bool:
    """Resample the clients."""
    picks = np.random.default_rng(0).integers(len(gains.weights), size=(N_RESAMPLES, len(gains.weights)))
    return float(np.percentile(gains.by_client[picks].mean(1), 2.5)) > 0


def decide_by_splits(gains: Gains) -> bool:
    """Take the corrected t interval over splits."""
    n = len(gains.means)
    return n > 1 and float(gains.means.mean() - stats.t.ppf(0.975, n - 1) * gains.split_variance**0.5) > 0


def decide_by_rows(gains: Gains) -> bool:
    """Take the spread of the test rows of these clients alone."""
    variance = float((gains.weights[:, None] ** 2 * gains.influence**2).sum()) / gains.weights.sum() ** 2
    return bool(gains.means.mean() - 1.96 * variance**0.5 > 0)


def decide_as_before(gains: Gains) -> bool:
    """Ask the bootstrap, Wilcoxon's test and the splits at once; test rows instead of the first two for few clients."""
    known = gains.by_client[gains.by_client != 0]
    if len(gains.weights) < 6:
        is_sure = decide_by_rows(gains)
    else:
        is_sure = (
            decide_by_bootstrap(gains)
            and bool(len(known))
            and float(stats.wilcoxon(known, method="asymptotic").pvalue) <= 0.05
        )
    return is_sure and (len(gains.means) == 1 or decide_by_splits(gains))


def decide_by_both(gains: Gains) -> bool:
    """Add the variances over clients and over splits, with Welch's degrees of freedom."""
    one = estimate_mean(gains.by_client[None], gains.weights, TEST)
    if len(gains.means) == 1 or not one.error:
        return decide_by_clients(gains)
    variances = np.array([one.error**2, gains.split_variance])
    df = variances.sum() ** 2 / (variances**2 / [one.df, len(gains.means) - 1]).sum()
    return float(one.mean - stats.t.ppf(0.975, df) * variances.sum() ** 0.5) > 0


RULES: dict[str, Callable[[Gains], bool]] = {
    "clients; splits if there are under 6 clients": decide_here,
    "clients, t": decide_by_clients,
    "clients, sign flips": decide_by_flips,
    "clients, bootstrap": decide_by_bootstrap,
    "splits, Nadeau and Bengio": decide_by_splits,
    "variances of clients and splits added": decide_by_both,
    "test rows": decide_by_rows,
    "before: bootstrap, Wilcoxon and splits at once": decide_as_before,
}
LOOKED = "the first, looked at after 3, 5 and 10 splits"


def answer(federation: Federation) -> Iterator[tuple[str, int]]:
    """Yield each rule and number of splits that says yes."""
    is_stopped = False
    for n_splits in SPLITS:
        scores = federation.validation[:, :n_splits].mean((1, 2))
        method = 1 + int(scores[1:].argmax())
        gains = Gains(
            (federation.test[method] - federation.test[0])[:n_splits],
            np.minimum(federation.n_test * n_splits, FULL_TEST_ROWS) / FULL_TEST_ROWS,
            (federation.influence[method] - federation.influence[0])[:n_splits].mean(0),
        )
        yield from ((name, n_splits) for name, decide in RULES.items() if decide(gains))
        level = 0.95 if n_splits == max(SPLITS) else CLEAR_LEVEL
        is_stopped = is_stopped or (n_splits > 1 and decide_here(gains, level))
    if is_stopped:
        yield LOOKED, max(SPLITS)


def study(n: int, scenario: str, *, is_class: bool, n_federations: int, neutral: float) -> dict[tuple[str, int], float]:
    """Return the share of federations with a yes, by rule and number of splits."""
    distance = {"all gain": SMALL_DISTANCE, "some gain": 2 * SMALL_DISTANCE, "all lose": 2 * neutral}.get(
        scenario, neutral
    )
    random = np.random.default_rng(1)
    counts: dict[tuple[str, int], int] = {}
    for _ in range(n_federations):
        for key in answer(simulate(random, n, scenario, distance, is_class=is_class)):
            counts[key] = counts.get(key, 0) + 1
    return {key: count / n_federations for key, count in counts.items()}


def main(arguments: Sequence[str]) -> int:
    """Print, for each number of clients, the false alarms and the power of every rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks verdict", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--clients", type=read_count, nargs="+", default=CLIENTS, metavar="N", help="numbers of clients")
    add("--federations", type=read_count, default=400, metavar="N", help="federations of each kind")
    add("--quick", action="store_true", help="do next to nothing, to test that it runs")
    given = parser.parse_args(arguments)
    n_federations = 2 if given.quick else given.federations
    for n in given.clients[:1] if given.quick else given.clients:
        found: dict[str, list[dict[tuple[str, int], float]]] = {}
        for is_class in (False, True):
            neutral = find_neutral_distance(n, is_class=is_class, n_federations=max(2, n_federations // 10))
            for scenario in (*NO_GAIN, *GAIN):
                shares = study(n, scenario, is_class=is_class, n_federations=n_federations, neutral=neutral)
                found.setdefault(scenario, []).append(shares)
        _print_table(n, found)
    return 0


def _print_table(n: int, found: dict[str, list[dict[tuple[str, int], float]]]) -> None:
    """Print the largest share of false alarms, and the mean power, in percent by splits."""
    print(f"\n{n} clients | false yes, {', '.join(map(str, SPLITS))} splits | yes: {' | yes: '.join(GAIN)}")
    for rule in (*RULES, LOOKED):
        splits = SPLITS if rule in RULES else SPLITS[-1:]
        wrong = [max(one.get((rule, k), 0) for name in NO_GAIN for one in found[name]) for k in splits]
        right = [[float(np.mean([one.get((rule, k), 0) for one in found[name]])) for k in splits] for name in GAIN]
        columns: list[list[float]] = [wrong, *right]
        cells = [" ".join(f"{100 * value:.1f}" for value in values) for values in columns]
        print(" | ".join([rule, *cells]), flush=True)
