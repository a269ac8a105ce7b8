"""Closed forms of SCAFFOLD, VRL-SGD, FedAvgM, FedAdam, FedYogi and FedAdagrad (specification 10 E10 to E13)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedattune import Algorithm
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fedavgm import HeavyBall
from fedattune.algorithms.fedopt import AdaptiveOptimizer
from fedattune.client import SGD
from fedattune.core.params import Params
from fedattune.core.payload import Payload, RoundContext
from oracles.clients import Clients, pull, push
from oracles.quadratic import W0, A, M, params

TARGETS = [(1.0, W0), (3.0, A), (0.5, M)]
OPTIMUM = sum(h * m for h, m in TARGETS) / sum(h for h, _ in TARGETS)
ZERO = torch.zeros_like(W0)


def clients(name: str, **options: Any) -> Clients:
    """Three clients whose minima lie apart and whose curvatures differ."""
    return Clients(ALGORITHMS[name](**options), [pull(h, m) for h, m in TARGETS], ZERO)


def fixed(server: Any, updates: list[Tensor]) -> Clients:
    """A server that sees these mean updates, one per round."""
    made = Clients(Algorithm(SGD(), server), [push(ZERO)] * 2, W0)
    for update in updates:
        made.gradients = [push(-update - A), push(-update + A)]  # one step of rate 1 each
        made.play(1.0, 1)
    return made


def part(made: Clients, name: str) -> Tensor:
    state: Any = made.state[name]
    return state["w"]


def test_e10_controls_by_hand() -> None:
    """Option II after one round from c = c_i = 0: c_i = (w - y_i) / (K lr); option I: the gradient at w."""
    made = clients("scaffold")
    made.play(0.1, 5)
    assert torch.allclose(made.kept("c"), -made.updates["w"] / 0.5, atol=1e-14)
    made = clients("scaffold", option="I")
    made.play(0.1, 5)
    assert torch.allclose(made.kept("c"), torch.stack([-h * m for h, m in TARGETS]), atol=1e-14)
    w = made.w
    made.play(0.1, 5)
    assert torch.allclose(made.kept("c"), torch.stack([h * (w - m) for h, m in TARGETS]), atol=1e-14)


def test_e10_a_control_is_the_mean_gradient_of_the_last_round() -> None:
    """Where gradients do not change, c_i is the gradient after every round, whoever took part before."""
    made = Clients(ALGORITHMS["scaffold"](), [push(v) for v in (W0, A, M)], ZERO)
    for ids in ([0, 1], [1, 2], [0, 1, 2], [0]):
        made.play(0.1, 5, ids)
    assert torch.allclose(made.kept("c"), torch.stack([W0, A, M]), atol=1e-13)
    assert torch.allclose(part(made, "c"), (W0 + A + M) / 3, atol=1e-13)


@pytest.mark.parametrize("option", ["I", "II"])
def test_e10_the_server_keeps_the_mean_of_the_controls(option: str) -> None:
    """With everybody there; with only some, c moves by their sum over all N, and the others' c_i stay."""
    made = clients("scaffold", option=option)
    for _ in range(4):
        made.play(0.1, 5)
        assert torch.allclose(part(made, "c"), made.kept("c").mean(0), atol=1e-14)
    before, c = made.kept("c"), part(made, "c")
    made.play(0.1, 5, [0, 2])
    assert torch.equal(made.kept("c")[1], before[1])
    assert (made.kept("c")[0] - before[0]).abs().max() > 1e-4
    assert torch.allclose(part(made, "c") - c, (made.kept("c") - before).sum(0) / 3, atol=1e-14)


@pytest.mark.parametrize("name", ["scaffold", "vrl_sgd"])
def test_e10_e11_drift_is_gone(name: str) -> None:
    """Where curvatures differ, FedAvg with several local steps ends beside the minimum of the mean loss."""
    ends = {}
    for method in (name, "fedavg"):
        made = clients(method, weighting="uniform")
        for _ in range(300):
            made.play(0.1, 5)
        ends[method] = (made.w - OPTIMUM).abs().max().item()
    assert ends[name] < 1e-9
    assert ends["fedavg"] > 0.05


def test_scaffold_server_step() -> None:
    whole, half = (clients("scaffold", server_lr=rate).play(0.1, 5) for rate in (1.0, 0.5))
    assert torch.allclose(half, whole / 2, atol=1e-15)  # w starts at 0


def test_e11_the_corrections_sum_to_zero() -> None:
    """D_i = (mean of x - x_i) / (k lr) after the first round, and always zero in the sum."""
    made = clients("vrl_sgd")
    made.play(0.1, 5)
    apart = made.updates["w"].mean(0) - made.updates["w"]
    assert (made.kept("D") == 0).all()
    made.play(0.1, 5)
    assert torch.allclose(made.kept("D"), apart / 0.5, atol=1e-13)
    for _ in range(3):
        made.play(0.1, 5)
        assert made.kept("D").abs().max() > 0.1
        assert made.kept("D").sum(0).abs().max() < 1e-13


def test_vrl_sgd_is_scaffold_under_full_participation() -> None:
    """D_i = c_i - c: the same global models, round by round."""
    one, other = clients("vrl_sgd"), clients("scaffold")
    for _ in range(8):
        assert torch.allclose(one.play(0.1, 5), other.play(0.1, 5), atol=1e-13)


@pytest.mark.parametrize("is_uploaded", [True, False])
@pytest.mark.parametrize("name", ["scaffold", "vrl_sgd", "igfl_c", "feddyn"])
def test_who_is_in_no_mean_takes_plain_steps(name: str, is_uploaded: bool) -> None:
    """A plain step of rate 0.5 on gradients of 1 goes from 3 to 2.5; what the corrections look at is not zero."""
    rule = ALGORITHMS[name]().client
    one = torch.ones((), dtype=torch.float64)
    context = RoundContext(0.5, one, 2 * one, 1, is_uploaded=torch.tensor(is_uploaded))
    start = Params(w=torch.full((1,), 3.0, dtype=torch.float64))
    sent = Payload(start, {"c": start, "D": start})
    state = {k: v.map(torch.ones_like) for k, v in rule.init_local_state(start).items()}
    batch = (torch.zeros(3, 2),) * 2
    carry = rule.begin(sent, state, torch.tensor(True), context)
    carry = rule.step(carry, batch, lambda w, batch: w.map(torch.ones_like), context)
    upload, _ = rule.finish(carry, sent, state, context)
    assert (upload.params["w"].item() == 2.5) is not is_uploaded


def test_vrl_sgd_uses_only_a_mean_that_the_client_was_in() -> None:
    """Client 1 is away in round 2: what it is sent in round 3 says nothing about its x_1 of round 1."""
    made = clients("vrl_sgd")
    made.play(0.1, 5)
    made.play(0.1, 5, [0, 2])
    made.play(0.1, 5)
    assert (made.kept("D")[1] == 0).all()
    assert (made.kept("D")[0] != 0).any()
    made.play(0.1, 5)
    assert (made.kept("D")[1] != 0).any()
    assert ALGORITHMS["vrl_sgd"]().full_participation


def test_e12_without_momentum_fedavgm_is_fedavg() -> None:
    made, fedavg = clients("fedavgm", beta=0.0), clients("fedavg")
    for _ in range(3):
        assert torch.allclose(made.play(0.1, 5), fedavg.play(0.1, 5), atol=1e-14)


def test_e12_heavy_ball_by_hand() -> None:
    """w_2 = w_0 + s (D_1 + beta D_1 + D_2); Nesterov's form would add beta (beta D_1 + D_2) more."""
    made = fixed(HeavyBall(server_lr=0.5, beta=0.9), [M, A])
    assert torch.allclose(made.w, W0 + 0.5 * (1.9 * M + A), atol=1e-14)
    steady = fixed(HeavyBall(beta=0.8), [M] * 90)
    assert torch.allclose(part(steady, "v"), (1 - 0.8**90) / (1 - 0.8) * M, atol=1e-12)


def test_e13_a_large_tau_leaves_the_first_moment() -> None:
    """With server_lr = tau: m, an average of updates, for Adam without second memory; half of it for Adagrad,
    whose v stays tau^2.
    """
    m1, tau = 0.1 * M, 1e7
    m2 = 0.9 * m1 + 0.1 * A
    adam = fixed(AdaptiveOptimizer(server_lr=tau, beta2=0.0, tau=tau), [M, A])
    assert torch.allclose(adam.w, W0 + m1 + m2, atol=1e-6)
    adagrad = fixed(AdaptiveOptimizer(server_lr=tau, second="adagrad", tau=tau), [M, A])
    assert torch.allclose(adagrad.w, W0 + (m1 + m2) / 2, atol=1e-6)


def test_e13_second_moments_by_hand() -> None:
    """From v = tau^2 = 0.25 with D^2 = 1 (above v) and 0.04 (below); beta2 = 0.9."""
    d = torch.tensor([1.0, 0.2], dtype=torch.float64)
    expected = {"adam": [0.325, 0.229], "yogi": [0.35, 0.246], "adagrad": [1.25, 0.29]}
    for second, v in expected.items():
        rule: Any = AdaptiveOptimizer(second=second, beta1=0.0, beta2=0.9, tau=0.5)  # type: ignore[arg-type]
        step, moments = rule.direction(params(d), rule.init_moments(params(d)))
        assert moments["v"]["w"].tolist() == pytest.approx(v, abs=1e-15)
        assert step["w"].tolist() == pytest.approx([1 / (v[0] ** 0.5 + 0.5), 0.2 / (v[1] ** 0.5 + 0.5)])


def test_e13_second_moments_move_as_they_may() -> None:
    """Adagrad's never falls; Yogi's moves by (1 - beta2) D^2 at most."""
    for second in ("adagrad", "yogi"):
        rule: Any = AdaptiveOptimizer(second=second, beta2=0.9, tau=0.5)  # type: ignore[arg-type]
        moments = rule.init_moments(params(W0))
        for update in (M, 0.1 * A, 2 * W0, 0.01 * M):
            before = moments["v"]["w"]
            _, moments = rule.direction(params(update), moments)
            change = moments["v"]["w"] - before
            if second == "adagrad":
                assert torch.allclose(change, update**2, atol=1e-15)
            else:
                assert (change.abs() <= 0.1 * update**2 + 1e-15).all()
