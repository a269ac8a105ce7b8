"""Attacks on models succeed without differential privacy of rows, and fail with it."""

import sys
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import privacy_attacks as attacks


def test_members_are_told_by_their_loss_without_privacy_and_not_with_it() -> None:
    """270 canaries of each kind: the deviation of a guesser's area is 0.025."""
    plain, _ = attacks.measure_membership("fedavg", inf)
    private, accuracy = attacks.measure_membership("fedavg", 5.0)
    assert plain > 0.75
    assert private < 0.62
    assert accuracy > 0.4  # it learned something, of ten classes


def test_a_row_is_read_from_an_upload_without_privacy_and_not_with_it() -> None:
    """An error of 1 is that of an empty image."""
    assert attacks.measure_inversion(inf, rows=4) < 0.01
    assert attacks.measure_inversion(50.0, rows=2) > 0.7
