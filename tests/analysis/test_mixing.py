"""Who learns from whom: label similarity, order of clients, agreement, and matrices of cohorts and some clients."""

from pathlib import Path

import numpy as np
import pytest

import fedattune
from crafted import ALL, EARLY, LABELS, LATE, SAME, compared, craft
from fedattune import Federation, read_runs
from fedattune.analysis.compare import compute_gains, group_by_algorithm
from fedattune.analysis.relations import MixingAnalysis, compute_label_similarity, measure_agreement, seriate


def relations(folder: Path, algorithm: str = "fedmcsa") -> MixingAnalysis:
    return MixingAnalysis(read_runs([folder]).of(algorithm, None)[0][0])


def test_label_similarity_by_hand() -> None:
    """1 minus half the summed differences of shares: 3/4, 1/4 beside 1/4, 3/4 is 1 - (1/2 + 1/2) / 2."""
    found = compute_label_similarity(
        np.array([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 7.0], [30.0, 10.0, 0.0]])
    )
    assert found.tolist() == [[1, 0.5, 0, 1], [0.5, 1, 0, 0.5], [0, 0, 1, 0], [1, 0.5, 0, 1]]


def test_clients_that_are_equally_alike_tie_in_memory() -> None:
    """Shares of thirds and sevenths: both others differ by 5/21 in two classes, whichever classes these are."""
    found = compute_label_similarity(
        np.array([[1.0, 1.0, 1.0], [4.0, 1.0, 2.0], [2.0, 4.0, 1.0], [1.0, 2.0, 4.0]])
    )
    assert len({found[0, 1], found[0, 2], found[0, 3]}) == 1
    assert found[0, 1] == pytest.approx(1 - 5 / 21, abs=1e-12)


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


def test_agreement_by_hand() -> None:
    """Five clients, so one of four others is the nearest: it gave 0.3 of 0.4, where a quarter would be chance."""
    similarity = np.eye(5)
    similarity[0] = [1, 0.9, 0.5, 0.4, 0.1]
    weights = np.eye(5)
    weights[0] = [0.6, 0.3, 0.06, 0.04, 0.0]
    found = measure_agreement(weights, similarity, [0])
    assert found.correlation == pytest.approx(1)
    assert found.share == pytest.approx(0.75)
    assert found.chance == 0.25
    weights[0, 1:] = weights[0, 1:][::-1]
    assert measure_agreement(weights, similarity, [0]).correlation == pytest.approx(-1)


def test_ties_at_the_border_share_the_places_of_the_nearest() -> None:
    """Two of four others are alike and compete for one place: each counts half. (0.3 + 0.1) / 2 of 0.4 is a half."""
    similarity = np.eye(5)
    similarity[0] = [1, 0.8, 0.8, 0.4, 0.4]
    weights = np.eye(5)
    weights[0] = [0.6, 0.3, 0.1, 0.0, 0.0]
    assert measure_agreement(weights, similarity, [0]).share == pytest.approx(0.5)
    # Spearman: ranks 4, 3, 1.5, 1.5 of weights and 3.5, 3.5, 1.5, 1.5 of labels; covariance 4 of 4.5 times 4.
    assert measure_agreement(weights, similarity, [0]).correlation == pytest.approx(4 / np.sqrt(4.5 * 4))


def test_agreement_of_what_is_constant_missing_or_alone() -> None:
    flat = np.full((4, 4), 0.25)
    similarity = compute_label_similarity(np.array(LABELS, dtype=float))
    assert measure_agreement(flat, similarity).correlation is None
    assert measure_agreement(flat, similarity).share == pytest.approx(1 / 3)  # one of three others
    missing = np.array(LATE)
    missing[1:] = np.nan
    assert measure_agreement(missing, similarity).share == pytest.approx(
        0.8
    )  # the row of a alone: 0.4 of 0.5
    own = measure_agreement(np.eye(4), similarity)
    assert (own.correlation, own.share) == (None, None)
    alone = measure_agreement(np.ones((1, 1)), np.ones((1, 1)))
    assert (alone.correlation, alone.share) == (None, None)


def test_agreement_is_with_those_whose_models_there_were_and_of_those_who_were_given_some() -> None:
    """Client 0 could choose among 1, 2 and 3: 0.3 of 0.4 is of the most alike of them; 1 was given next to nothing."""
    similarity = np.eye(5)
    similarity[0] = [1, 0.5, 0.2, 0.1, 0.9]
    weights = np.eye(5)
    weights[0] = [0.6, 0.3, 0.06, 0.04, 0.0]
    weights[1] = [0.004, 0.995, 0.001, 0.0, 0.0]
    offered = np.ones((5, 5), dtype=bool)
    offered[0, 4] = False
    found = measure_agreement(weights, similarity, [0, 1], offered)
    assert found.share == pytest.approx(0.75)
    assert found.chance == pytest.approx(1 / 3)
    assert found.correlation == pytest.approx(1)
    offered[0, 2:] = False  # no choice
    found = measure_agreement(weights, similarity, [0, 1], offered)
    assert (found.correlation, found.share, found.chance) == (None, None, 1.0)


def test_matrices_of_cohorts_and_the_last_row_of_each_client(tmp_path: Path) -> None:
    mixing = {
        1: ((0, 1), (0, 1), {"l": [[0.9, 0.1], [0.2, 0.8]]}),
        2: ((1, 3), (1, 2, 3), {"l": [[0.5, 0.3, 0.2], [0.0, 0.6, 0.4]]}),
    }
    craft(tmp_path, "m", {1: (1, 1, 1, 1), 2: (1, 1, 1, 1)}, mixing=mixing)
    found = relations(tmp_path, "m")
    nan = [np.nan] * 4
    first, second = [0.9, 0.1, 0, 0], [0, 0.5, 0.3, 0.2]
    np.testing.assert_allclose(found.at(1)["l"], [first, [0.2, 0.8, 0, 0], nan, nan], rtol=1e-6)
    np.testing.assert_allclose(found.at(2)["l"], [nan, second, nan, [0, 0, 0.6, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(found.last["l"], [first, second, nan, [0, 0, 0.6, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(found.known(1)["l"], found.at(1)["l"])
    assert found.since(2) == [1, 2, None, 2]
    assert found.since(2, back=1) == [None, 2, None, 2]
    assert np.isnan(found.known(2, back=1)["l"][0]).all()
    assert found.mixes
    offered = [[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]]
    assert found.offered.tolist() == np.array(offered, dtype=bool).tolist()
    assert found.similarity is None
    assert found.agreement() == {}


def test_matrices_among_the_evaluated_clients_of_many(tmp_path: Path) -> None:
    """Clients 3, 7 and 9 of ten are evaluated; what 5 gave is missing from the rows, and 5's own row is left out."""
    mixing = {1: ((5, 7, 9), (3, 5, 7), {"l": [[0.1, 0.8, 0.1], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]]})}
    facts = {"numbers": [3, 7, 9], "population": 10}
    craft(tmp_path, "m", {1: (1, 1, 1)}, n_test=(5, 5, 5), mixing=mixing, facts=facts)
    found = relations(tmp_path, "m")
    assert found.names == ["a", "b", "c"]
    expected = [[np.nan] * 3, [0.2, 0.5, 0.0], [0.6, 0.0, 0.0]]
    np.testing.assert_allclose(found.at(1)["l"], expected, rtol=1e-6)


def test_one_model_for_all_is_told_though_it_differs_from_round_to_round(tmp_path: Path) -> None:
    mixing = {
        1: ((0, 1), (0, 1), {"model": [[0.5, 0.5]] * 2}),
        2: ((2, 3), (2, 3), {"model": [[0.2, 0.8]] * 2}),
        3: ((1,), (1,), {"model": [[1.0]]}),
    }
    craft(tmp_path, "m", dict.fromkeys(mixing, (1, 1, 1, 1)), mixing=mixing)
    assert relations(tmp_path, "m").one_for_all
    assert not relations(tmp_path, "m").mixes


def test_fedavg_of_cohorts_is_one_model_for_all(ragged: Federation, tmp_path: Path) -> None:
    for name in ("fedavg", "fedmcsa", "local"):
        fedattune.fit(name, ragged, rounds=4, cohort=2, steps=1, out=tmp_path / name / "seed-0")
    assert relations(tmp_path, "fedavg").one_for_all
    assert relations(tmp_path, "fedmcsa").mixes
    assert not relations(tmp_path, "local").mixes


def test_gains_are_means_over_seeds_at_the_headline_point(tmp_path: Path) -> None:
    results = read_runs([compared(tmp_path)]).results
    np.testing.assert_allclose(
        compute_gains(group_by_algorithm(results), "fedmcsa"), [0.25, 0.1, 0.0, -0.025]
    )
    assert compute_gains(group_by_algorithm(results[2:]), "fedmcsa") is None
    # Over the seeds that both have: without one of local's, that of the other.
    one = group_by_algorithm([run for run in results if (run.algorithm, run.settings.seed) != ("local", 0)])
    np.testing.assert_allclose(compute_gains(one, "fedmcsa"), [0.3, 0.1, 0.0, -0.025])
    assert relations(tmp_path).mean[0].tolist() == pytest.approx([0.375, 0.325, 0.175, 0.125])
    assert np.array(EARLY).sum() == np.array(SAME).sum() == pytest.approx(len(ALL))
