"""Label similarity, and the agreement of mixing weights with it."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from crafted import LABELS, LATE
from fedattune.analysis.mixing import compute_label_similarity, measure_agreement


def test_label_similarity_by_hand() -> None:
    """1 minus half the summed differences of shares: 3/4, 1/4 beside 1/4, 3/4 is 1 - (1/2 + 1/2) / 2."""
    found = compute_label_similarity(np.array([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 7.0], [30.0, 10.0, 0.0]]))
    assert found.tolist() == [[1, 0.5, 0, 1], [0.5, 1, 0, 0.5], [0, 0, 1, 0], [1, 0.5, 0, 1]]


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
    assert measure_agreement(missing, similarity).share == pytest.approx(0.8)  # the row of a alone: 0.4 of 0.5
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


def test_the_correlation_is_that_of_scipy_also_with_ties() -> None:
    random = np.random.default_rng(0)
    weights, similarity = (random.integers(1, 4, (8, 8)) / 10 for _ in range(2))
    others = ~np.eye(8, dtype=bool)
    known = spearmanr(weights[others], similarity[others]).statistic
    assert measure_agreement(weights, similarity).correlation == pytest.approx(known)
