"""Mixing matrices of cohorts and of some clients, and one model for all."""

from pathlib import Path

import numpy as np
import pytest

from crafted import ALL, EARLY, SAME, compared, craft
from fedattune import read_runs
from fedattune.analysis.compare import compute_gains_over_local, group_by_algorithm
from fedattune.analysis.mixing import MixingAnalysis


def analyse(folder: Path, algorithm: str = "fedmcsa") -> MixingAnalysis:
    return MixingAnalysis(read_runs([folder]).select(algorithm, None)[0][0])


def test_matrices_of_cohorts_and_the_last_row_of_each_client(tmp_path: Path) -> None:
    mixing = {
        1: ((0, 1), (0, 1), {"l": [[0.9, 0.1], [0.2, 0.8]]}),
        2: ((1, 3), (1, 2, 3), {"l": [[0.5, 0.3, 0.2], [0.0, 0.6, 0.4]]}),
    }
    craft(tmp_path, "m", {1: (1, 1, 1, 1), 2: (1, 1, 1, 1)}, mixing=mixing)
    found = analyse(tmp_path, "m")
    nan = [np.nan] * 4
    first, second = [0.9, 0.1, 0, 0], [0, 0.5, 0.3, 0.2]
    np.testing.assert_allclose(
        found.read_last_rows(1, back=1).weights["l"], [first, [0.2, 0.8, 0, 0], nan, nan], rtol=1e-6
    )
    np.testing.assert_allclose(
        found.read_last_rows(2, back=1).weights["l"], [nan, second, nan, [0, 0, 0.6, 0.4]], rtol=1e-6
    )
    np.testing.assert_allclose(found.last.weights["l"], [first, second, nan, [0, 0, 0.6, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(found.read_last_rows(1).weights["l"], [first, [0.2, 0.8, 0, 0], nan, nan], rtol=1e-6)
    assert found.last.rounds == [1, 2, None, 2]
    assert found.read_last_rows(2, back=1).rounds == [None, 2, None, 2]
    assert np.isnan(found.read_last_rows(2, back=1).weights["l"][0]).all()
    assert found.has_mixtures
    offered = [[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]]
    assert found.last.offered.tolist() == np.array(offered, dtype=bool).tolist()
    assert found.similarity is None
    assert found.compare_with_labels(found.mean) is None


def test_matrices_among_the_evaluated_clients_of_many(tmp_path: Path) -> None:
    """Clients 3, 7 and 9 of ten are evaluated; what 5 gave is missing from the rows, and 5's own row is left out."""
    mixing = {1: ((5, 7, 9), (3, 5, 7), {"l": [[0.1, 0.8, 0.1], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]]})}
    facts = {"numbers": [3, 7, 9], "population": 10}
    craft(tmp_path, "m", {1: (1, 1, 1)}, n_test=(5, 5, 5), mixing=mixing, facts=facts)
    found = analyse(tmp_path, "m")
    assert found.names == ["a", "b", "c"]
    expected = [[np.nan] * 3, [0.2, 0.5, 0.0], [0.6, 0.0, 0.0]]
    np.testing.assert_allclose(found.last.weights["l"], expected, rtol=1e-6)


def test_no_evaluated_client_was_sent_a_mixture(tmp_path: Path) -> None:
    """Clients 3, 7 and 9 of ten are evaluated, and the only mixture went to client 5."""
    facts = {"numbers": [3, 7, 9], "population": 10}
    craft(tmp_path, "m", {1: (1, 1, 1)}, n_test=(5, 5, 5), mixing={1: ((5,), (3, 5), {"l": [[0.1, 0.9]]})}, facts=facts)
    found = analyse(tmp_path, "m")
    assert not found.has_mixtures
    assert found.components == []


def test_one_model_for_all_is_told_though_it_differs_from_round_to_round(tmp_path: Path) -> None:
    mixing = {
        1: ((0, 1), (0, 1), {"model": [[0.5, 0.5]] * 2}),
        2: ((2, 3), (2, 3), {"model": [[0.2, 0.8]] * 2}),
        3: ((1,), (1,), {"model": [[1.0]]}),
    }
    craft(tmp_path, "m", dict.fromkeys(mixing, (1, 1, 1, 1)), mixing=mixing)
    assert analyse(tmp_path, "m").is_one_for_all
    assert not analyse(tmp_path, "m").has_mixtures


def test_gains_are_means_over_seeds_at_the_evaluation_point(tmp_path: Path) -> None:
    results = read_runs([compared(tmp_path)]).results
    np.testing.assert_allclose(
        compute_gains_over_local(group_by_algorithm(results), "fedmcsa"), [0.25, 0.1, 0.0, -0.025]
    )
    assert compute_gains_over_local(group_by_algorithm(results[2:]), "fedmcsa") is None
    # Over the seeds that both have: without one of local's, that of the other.
    one = group_by_algorithm([run for run in results if (run.algorithm, run.settings.seed) != ("local", 0)])
    np.testing.assert_allclose(compute_gains_over_local(one, "fedmcsa"), [0.3, 0.1, 0.0, -0.025])
    assert analyse(tmp_path).mean[0].tolist() == pytest.approx([0.375, 0.325, 0.175, 0.125])
    assert np.array(EARLY).sum() == np.array(SAME).sum() == pytest.approx(len(ALL))
