"""Numbers of the figures of mixing matrices, such as IGFL's matching rate: how often attention finds equal labels."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core.errors import ConfigError, did_you_mean
from .outcome import Outcome, StudyResults
from .study import Cell

Matrix = np.ndarray[Any, Any]
WEIGHT_GROUPS = ("target itself", "same labels", "all but one label", "others, mean")
"""Clients 0, 1, 2 and the others of pFedLA's figure 5."""


def find_label_pairs(labels: Matrix) -> Matrix:
    """Find the ordered pairs of different clients with a label in common, (N, N), from label counts (N, K)."""
    pairs = count_common_labels(labels) > 0
    np.fill_diagonal(pairs, False)
    return pairs


def count_common_labels(labels: Matrix) -> Matrix:
    """Count the labels that each pair of clients has in common, (N, N), from label counts (N, K)."""
    has = np.asarray(labels) > 0
    return np.asarray((has[:, None] & has[None]).sum(2))


def compute_matching_rate(attention: Matrix, labels: Matrix) -> float | None:
    """Compute the share of pairs with a label in common among the darkest cells of attention (N, N), or None.

    The paper does not say how dark a cell must be. With as many cells as pairs, 1 means that attention puts exactly
    these pairs first, and chance gives their share of all pairs.

    Source: IGFL (Huang et al., 2021), figure 2 and its text.
    """
    pairs = find_label_pairs(labels)
    n = int(pairs.sum())
    if not n:
        return None
    scores = np.where(np.eye(len(pairs), dtype=bool), -np.inf, attention)
    darkest = np.argsort(-scores, axis=None, kind="stable")[:n]
    return float(pairs.ravel()[darkest].mean())


def compute_chance_rate(labels: Matrix) -> float:
    """Compute the matching rate of random attention: the share of pairs with a label in common."""
    n = len(labels)
    return float(find_label_pairs(labels).sum() / (n * (n - 1)))


def matching_rates(results: StudyResults, one: Outcome) -> dict[str, float]:
    """Compute the matching rate of each run of a cell, from attention averaged over the rounds."""
    component = results.study.figure.component or "attention"
    rates = {}
    for run in one.runs:
        matrix = results.records.mixing(run).get(("all", component))
        if matrix is not None:
            rates[run] = compute_matching_rate(matrix, label_counts(results, run))
    return {run: rate for run, rate in rates.items() if rate is not None}


def label_counts(results: StudyResults, run: str) -> Matrix:
    """Return the label counts of the clients of a run, (N, K)."""
    return np.array(results.records.runs[run]["labels"])


def average_mixing(results: StudyResults, one: Outcome) -> dict[tuple[str, str], Matrix]:
    """Average the mixing matrices of a cell over its seeds, by rounds and component."""
    mixings = [results.records.mixing(run) for run in one.runs]
    return {key: np.mean([each[key] for each in mixings], axis=0) for key in mixings[0]}


def summarize_mixing(results: StudyResults) -> list[list[str]]:
    """Make a table of the numbers behind a figure of mixing matrices; empty for studies without such a figure."""
    if results.study.figure.kind not in SUMMARIES:
        return []
    head, summarize = SUMMARIES[results.study.figure.kind]
    lines = [list(head)]
    for cell, one in results.outcomes.items():
        if one.runs and not one.not_run and results.records.mixing(one.runs[0]):
            _check(results, cell, one)
            lines += [[cell.column, cell.row, *line] for line in summarize(results, one)]
    return lines


def _check(results: StudyResults, cell: Cell, one: Outcome) -> None:
    study, mixing = results.study, results.records.mixing(one.runs[0])
    where, kind = f"{study.name}, {cell}: figure", study.figure.kind
    components = {key for _, key in mixing}
    component = study.figure.component or ("attention" if kind == "matching" else None)
    if component and component not in components:
        raise ConfigError(f"{where}: there is no component {component!r}; {did_you_mean(component, components)}")
    n = len(next(iter(mixing.values())))
    if kind == "weights" and n < 4:
        raise ConfigError(f"{where}: weights needs four clients or more, got {n}")


def _summarize_matching(results: StudyResults, one: Outcome) -> Iterator[list[str]]:
    rates = matching_rates(results, one)
    values = [100 * rate for rate in rates.values()]
    chance = np.mean([compute_chance_rate(label_counts(results, run)) for run in rates])
    yield [f"{np.mean(values):.1f}", f"{np.std(values):.1f}", f"{100 * chance:.1f}", str(len(values))]


def _summarize_common_labels(results: StudyResults, one: Outcome) -> Iterator[list[str]]:
    common = count_common_labels(label_counts(results, one.runs[0]))
    np.fill_diagonal(common, -1)
    for layer, mixing in _last_third(results, one).items():
        groups = [mixing[common == n] for n in (-1, 3, 2, 1, 0)]
        yield [layer, *(f"{group.mean():.4f}" if len(group) else "–" for group in groups)]


def _summarize_weights(results: StudyResults, one: Outcome) -> Iterator[list[str]]:
    for layer, mixing in _last_third(results, one).items():
        row = mixing[0]  # of client 0, the target
        yield [layer, *(f"{weight:.4f}" for weight in (*row[:3], row[3:].mean()))]


def _last_third(results: StudyResults, one: Outcome) -> dict[str, Matrix]:
    mixing = average_mixing(results, one)
    return {component: matrix for (rounds, component), matrix in mixing.items() if rounds == "last"}


SUMMARIES: dict[str, tuple[tuple[str, ...], Callable[[StudyResults, Outcome], Iterator[list[str]]]]] = {
    "matching": (
        ("populations", "method", "matching rate in %", "spread", "by chance", "number of populations"),
        _summarize_matching,
    ),
    "heat_map": (("data", "method", "layer", "own", "3 labels in common", "2", "1", "none"), _summarize_common_labels),
    "weights": (("data", "method", "layer", *WEIGHT_GROUPS), _summarize_weights),
}
"""Kind of figure -> head of its table, and the function that makes the lines of a cell."""
