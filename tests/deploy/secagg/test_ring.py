"""Fixed-point numbers, thresholds and shares: what is rounded, what cannot overflow, how many are enough."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="a real federation needs Flower, and pycryptodome comes with it")

from fedattune.deploy.secagg import ClipRangeError, count_threshold
from fedattune.deploy.secagg.ring import dequantize, find_weight_limit, quantize, quantize_loss


@given(st.lists(st.floats(-16, 16), min_size=1, max_size=20), st.integers(8, 30))
@settings(max_examples=30, deadline=None)
def test_values_are_rounded_to_half_a_unit(values: list[float], bits: int) -> None:
    array = np.array(values)
    assert np.abs(dequantize(quantize(array, bits, 16.0), bits) - array).max() <= 2.0 ** -(bits + 1)


def test_what_cannot_be_summed_is_refused() -> None:
    for bad in (16.1, -17.0, float("inf"), float("nan")):
        with pytest.raises(ClipRangeError, match="expected 16 at most"):
            quantize(np.array([0.0, bad]), 24, 16.0)


@pytest.mark.parametrize("n", [3, 5, 49])
@pytest.mark.parametrize(("bits", "clip"), [(24, 4096.0), (40, 2.0**15), (1, 1.0)])
def test_no_sum_overflows(n: int, bits: int, clip: float) -> None:
    limit = find_weight_limit(bits, clip, n)
    worst = int(quantize(np.array([clip]), bits, clip)[0])
    assert limit > 0
    assert n * limit * worst < 2**63
    assert n * quantize_loss(float("nan")) < 2**63


def test_thresholds_are_more_than_two_thirds() -> None:
    for n in range(3, 50):
        for share in (0.5, 2 / 3, 0.999):
            assert 2 * n < 3 * count_threshold(share, n) <= 3 * n
    assert [count_threshold(2 / 3, n) for n in (3, 4, 5, 6)] == [3, 3, 4, 5]
