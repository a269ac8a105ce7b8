"""The order of clients, and clusters that are more than noise."""

import numpy as np
import pytest
from sklearn.metrics import silhouette_score

from fedattune.analysis.mixing import arrange_clients, measure_silhouette, seriate


def test_seriation_puts_groups_together() -> None:
    """Clients 0, 2, 4 and 1, 3, 5 learn from each other; what they keep of their own changes nothing."""
    similarity = np.full((6, 6), 0.01)
    for group in ([0, 2, 4], [1, 3, 5]):
        similarity[np.ix_(group, group)] = 0.2
    for own in (0.0, 0.5, 1.0):
        np.fill_diagonal(similarity, own)
        order, clusters = seriate(similarity)
        assert {frozenset(order[:3]), frozenset(order[3:])} == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}
        assert clusters[0] == clusters[2] == clusters[4] != clusters[1] == clusters[3] == clusters[5]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_seriation_of_few_or_of_clients_that_are_all_alike(n: int) -> None:
    assert seriate(np.ones((n, n))) == (list(range(n)), [0] * n)
    order, clusters = seriate(np.full((n, n), np.nan))
    assert (sorted(order), clusters) == (list(range(n)), [0] * n)


def test_no_clusters_are_seen_in_noise() -> None:
    everyone = np.ones((12, 12), dtype=bool)
    draws = [np.random.default_rng(k).dirichlet(np.ones(12), 12) for k in range(30)]
    assert sum(arrange_clients(one, everyone).share is not None for one in draws) <= 4
    # Cohorts of six, everybody in them given the same: nobody chose.
    weights, offered = np.zeros((12, 12)), np.zeros((12, 12), dtype=bool)
    for cohort in (range(6), range(6, 12)):
        weights[np.ix_(cohort, cohort)] = 1 / 6
        offered[np.ix_(cohort, cohort)] = True
    assert arrange_clients(weights, offered).share is None


@pytest.mark.parametrize("clusters", [[1, 1, 2, 2, 2], [3, 1, 1, 2, 3], [1, 2, 2, 2, 2]])
def test_the_silhouette_is_that_of_scikit_learn(clusters: list[int]) -> None:
    distance = np.abs(np.subtract.outer([0.0, 1, 5, 5, 9], [0.0, 1, 5, 5, 9]))
    known = silhouette_score(distance, clusters, metric="precomputed")
    assert measure_silhouette(distance, np.array(clusters)) == pytest.approx(known)
    assert measure_silhouette(0 * distance, np.array(clusters)) == 0
