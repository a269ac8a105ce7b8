"""Attacks on models succeed without differential privacy of rows, and fail with it."""

import sys
from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

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


def test_the_upload_of_one_row_is_one_step_from_the_model() -> None:
    """The attacked upload is the engine's: the received model minus the rate times the row's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    x, y = torch.rand(1, 64), torch.tensor([3])
    upload = attacks.upload_one_row(model, x, y, inf)
    nn.functional.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        want = parameter.detach() - attacks.LR * parameter.grad
        torch.testing.assert_close(upload[name], want, rtol=1e-5, atol=1e-7)


def test_canaries_are_drawn_for_both_parts_alike() -> None:
    canaries = attacks.Canaries.make()
    shares = [
        canaries.is_canary[torch.as_tensor(rows)].double().mean().item()
        for part in ("train", "test")
        for rows in canaries.federation.part(part)  # type: ignore[arg-type]
    ]
    assert shares == pytest.approx([attacks.CANARY_SHARE] * len(shares), abs=0.12)
