"""Closed forms of APFL, Ditto, L2GD, MOCHA and FedALA (specification 10, E14)."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms.apfl import APFLClient
from fedattune.algorithms.ditto import DittoClient
from fedattune.algorithms.fedala import FedALAClient
from fedattune.algorithms.l2gd import L2GDClient, L2GDServer
from fedattune.algorithms.mocha import RelationshipCorrection, TaskRelationship
from fedattune.client import SGD, Proximal
from fedattune.core.payload import RoundContext
from oracles.quadratic import FRESH, W0, A, M, gradient, params, run

RUN: dict[str, Any] = {"rounds": 4, "cohort": 6, "steps": 3, "batch_size": 16, "lr": 0.1, "dtype": "float64"}
D = 5 * 3 + 3  # values of logistic regression of 5 inputs and 3 classes


def fit(name: str, federation: Federation, options: Any = None, **more: Any) -> Result:
    return fedattune.fit(federation, name, "mlr", options=options, **(RUN | more))


def gap(a: Params, b: Params) -> float:
    return max((a[k] - v).abs().max().item() for k, v in b.items())


def test_e14_ditto_on_a_quadratic() -> None:
    """The error of v to (m + lam w) / (1 + lam) shrinks by 1 - eta (1 + lam) per step, w as received."""
    lam, eta, steps = 3.0, 0.05, 6
    upload, memory = run(DittoClient(lam), gradient, steps, eta, sent=A, memory={"v": params(W0)})
    target = (M + lam * A) / (1 + lam)
    assert torch.allclose(memory["v"]["w"] - target, (1 - eta * (1 + lam)) ** steps * (W0 - target))
    assert torch.allclose(upload.params["w"] - M, (1 - eta) ** steps * (A - M))
    upload, memory = run(
        DittoClient(lam, 0.01, SGD((Proximal(2.0),))), gradient, steps, eta, sent=A, memory={"v": params(W0)}
    )
    assert torch.allclose(memory["v"]["w"] - target, (1 - 0.01 * (1 + lam)) ** steps * (W0 - target))
    near = (M + 2 * A) / 3
    assert torch.allclose(upload.params["w"] - near, (1 - eta * 3) ** steps * (A - near))


def test_e14_apfl_limits(ragged: Federation) -> None:
    """alpha=0 predicts with w at both points, alpha=1 with a v that is trained as if alone."""
    shared, average = fit("apfl", ragged, {"alpha": 0}), fit("fedavg", ragged)
    for entry, other in zip(shared.history, average.history, strict=True):
        for point in ("received", "trained"):
            assert entry[point]["loss_uniform"] == pytest.approx(other[point]["loss_uniform"], abs=1e-12)
    assert gap(fit("apfl", ragged, {"alpha": 1}).models, fit("local", ragged).models) < 1e-14


def test_e14_apfl_steps_by_hand() -> None:
    """Two steps on the quadratic, whose gradient at m = alpha v + (1 - alpha) w is m - M."""
    eta = 0.02
    for adaptive in (False, True):
        w, v, alpha = A.clone(), W0.clone(), torch.tensor(0.3, dtype=torch.float64)
        for _ in range(2):
            g = alpha * v + (1 - alpha) * w - M
            slope = ((v - w) * g).sum() if adaptive else torch.tensor(0.0)
            w, v, alpha = w - eta * (w - M), v - eta * alpha * g, (alpha - eta * slope).clamp(0, 1)
        rule = APFLClient(0.3, adaptive)
        memory = rule.init_local_state(params(W0))
        upload, memory = run(rule, gradient, 2, eta, sent=A, memory=memory)
        assert torch.allclose(upload.params["w"], w)
        assert torch.allclose(memory["v"]["w"], v)
        assert torch.allclose(memory["mix"]["alpha"], alpha)
        model = rule.trained_model(upload, memory)["w"]
        assert torch.allclose(model, alpha * v + (1 - alpha) * w)
    assert 0 < alpha < 1


def models(n: int, seed: int = 0) -> Params:
    return Params(w=torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def averaged(server: L2GDServer, x: Params) -> tuple[Any, Tensor]:
    """State after a communication, and every client's model after it."""
    n = torch.arange(1, 6)
    ids = torch.arange(5)
    state = server.init(params(W0), 5)
    while True:
        state = server.aggregate(state, ids, Payload(x), Payload(x), n)
        if state["keep"] < 1:
            break
    payload, rule = server.broadcast(state, ids).payload, L2GDClient()
    moved = []
    for i in range(5):
        memory = {**rule.init_local_state(params(W0)), "own": x.rows(i)}
        moved.append(rule.received_model(payload.rows(i), memory, FRESH)["w"])
    return state, torch.stack(moved)


def test_e14_l2gd_averages_and_keeps_the_mean() -> None:
    """c=1 makes all models the mean; any c keeps it, and moves by the matrix (1 - c)^m I + (1 - (1 - c)^m) 11^T / n."""
    torch.manual_seed(0)
    x = models(5)
    mean = x["w"].mean(0)
    _, moved = averaged(L2GDServer(chance=0.5, c=1.0), x)
    assert torch.allclose(moved, mean.expand(5, 4), atol=1e-14)
    server = L2GDServer(chance=0.5, c=0.3)
    state, moved = averaged(server, x)
    assert torch.allclose(moved.mean(0), mean, atol=1e-14)
    steps = np.log(float(state["keep"])) / np.log(0.7)
    assert steps == pytest.approx(round(steps))
    assert round(steps) >= 1
    M = float(state["keep"]) * torch.eye(5).double() + (1 - float(state["keep"])) / 5
    assert torch.allclose(moved, M @ x["w"], atol=1e-14)
    matrices = server.broadcast(state, torch.arange(5)).mixing
    assert matrices
    assert torch.allclose(matrices.weights["model"], M)


def test_e14_l2gd_flips_the_coins_of_the_paper() -> None:
    """m averagings follow a local step with probability p^m (1 - p)."""
    torch.manual_seed(1)
    server, p = L2GDServer(chance=0.6, c=0.5), 0.6
    state = server.init(params(W0), 2)
    counts = np.zeros(60)
    for _ in range(4000):
        state = server.aggregate_newcomers(state, *(cast(Any, None),) * 4)
        counts[round(-np.log2(float(state["keep"])))] += 1
    for m in range(5):
        assert counts[m] / 4000 == pytest.approx(p**m * (1 - p), abs=0.03)


@pytest.mark.parametrize("omega", ["mean", "learned"])
def test_e14_mocha_follows_its_regulariser(omega: Any) -> None:
    """The step is down the gradient of lam1 tr(W Omega W^T) + lam2 ||W||^2, taken by automatic differentiation."""
    server, x = TaskRelationship(omega), models(5)
    state: Any = {"theta": x, "has_uploaded": torch.ones(5, dtype=torch.bool)}
    ids = torch.tensor([1, 3])
    Omega = server.matrix(state)
    assert torch.allclose(Omega, Omega.T)
    payload = server.broadcast(state, ids).payload
    W = x["w"].clone().requires_grad_()
    (0.7 * torch.trace(W.T @ Omega @ W) + 0.2 * W.square().sum()).backward()
    for row, client in enumerate(ids.tolist()):
        rule = SGD((RelationshipCorrection(0.7, 0.2),), start="own")
        sent = payload.rows(row)
        own = x["w"][client]
        upload, _ = run(
            rule,
            lambda w, batch: w.zeros(),
            1,
            0.1,
            sent=sent.params["w"],
            extra=sent.extra,
            memory={"own": params(own)},
        )
        assert torch.allclose(upload.params["w"], own - 0.1 * cast(Tensor, W.grad)[client])


def test_e14_mocha_matrices() -> None:
    """mean: I - 11^T/m; learned: Sigma = diag(2, 1) / 3 for orthogonal models of norms 2 and 1."""
    seen = torch.ones(2, dtype=torch.bool)
    x = Params(w=torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    half = torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64)
    assert torch.allclose(TaskRelationship("mean").matrix({"theta": x, "has_uploaded": seen}), half)
    learned = TaskRelationship("learned").matrix({"theta": x, "has_uploaded": seen})
    assert torch.allclose(learned, torch.diag(torch.tensor([1.5, 3.0])).double(), rtol=1e-3)
    # Equal models: W^T W has the eigenvalues 4 and 0, smoothed by 1e-4 of their mean, 2. Their roots 2 and sqrt(2e-4)
    # give Omega the eigenvalues 1 + sqrt(2) / 200 along (1, 1), and 1 + 100 sqrt(2) along the difference.
    alike = TaskRelationship("learned").matrix({"theta": Params(w=torch.ones(2, 2)), "has_uploaded": seen})
    common, difference = 1 + math.sqrt(2) / 200, 1 + 100 * math.sqrt(2)
    assert torch.allclose(alike, common * half.abs() + difference * half, rtol=1e-3)
    zero = TaskRelationship("learned").matrix({"theta": Params(w=torch.zeros(2, 2)), "has_uploaded": seen})
    assert torch.allclose(zero, 2 * torch.eye(2, dtype=torch.float64))  # the authors' start: Sigma = I / m


@pytest.mark.parametrize("omega", ["mean", "learned"])
def test_e14_mocha_relates_a_newcomer_to_the_trained_clients_alone(omega: Any) -> None:
    """Clients 3 and 4 join three that trained: each is sent what it would be sent as their only newcomer."""
    server, x = TaskRelationship(omega), models(5)

    def send(rows: list[int], ids: list[int]) -> Payload:
        seen = torch.ones(len(rows), dtype=torch.bool)
        state: Any = {"theta": x.rows(torch.tensor(rows)), "has_uploaded": seen, "n_trained": torch.tensor(3)}
        return server.broadcast(state, torch.tensor(ids)).payload

    both = send([0, 1, 2, 3, 4], [3, 4])
    for row, alone in enumerate((send([0, 1, 2, 3], [3]), send([0, 1, 2, 4], [3]))):
        assert torch.allclose(both.params["w"][row], alone.params["w"][0])
        assert torch.allclose(both.extra["omega"]["own"][row], alone.extra["omega"]["own"][0])
    assert omega == "learned" or torch.allclose(both.params["w"][0], -x["w"][:3].sum(0) / 4)


def test_e14_mocha_leaves_personal_tensors_out_of_the_relation() -> None:
    w = Params(head=W0, body=W0)
    sent = Payload(Params(head=W0, body=A), {"omega": Params(own=torch.tensor(0.5).double())})
    rule = SGD((RelationshipCorrection(1.0, 0.0),), start="own")
    job = RoundContext(0.1, torch.tensor(1.0), torch.tensor(1.0), 1, ("head",))
    carry = rule.begin(sent, {"own": w}, FRESH, job)
    moved = rule.step(carry, (), lambda w, batch: w.zeros(), job).w
    assert torch.equal(moved["head"], W0)
    assert torch.allclose(moved["body"], W0 - 0.2 * (A + 0.5 * W0))


def test_e14_fedala_with_zeros_keeps_the_old_upper_layers() -> None:
    rule = FedALAClient(layers=1)
    lower, upper = Params({"0.w": W0, "1.w": W0}), Params({"0.w": A, "1.w": A})
    memory = rule.init_local_state(lower)
    assert list(memory["U"]) == ["1.w"]
    first = rule.received_model(Payload(upper), memory, FRESH)
    assert torch.equal(first["1.w"], A)  # in its first round, the client takes everything
    memory |= {"U": memory["U"].zeros(), "trained": memory["trained"] + 1}
    mixed = rule.received_model(Payload(upper), memory, FRESH)
    assert torch.equal(mixed["0.w"], A)
    assert torch.equal(mixed["1.w"], W0)


def test_e14_fedala_learns_by_hand() -> None:
    """U <- clip(U - eta (theta - M) * (w - old), 0, 1) with theta = old + (w - old) U, on the quadratic."""
    rule = FedALAClient(eta=0.4, first_passes=3)
    memory = rule.init_local_state(params(W0))
    assert int(rule.probe_passes(memory)) == 0
    assert int(FedALAClient().probe_passes({**memory, "trained": memory["trained"] + 1})) == 11
    assert int(rule.probe_passes({**memory, "trained": memory["trained"] + 2})) == 1
    memory["trained"] = memory["trained"] + 1
    U = torch.ones_like(W0)
    for _ in range(3):
        theta = W0 + (A - W0) * U
        U = (U - 0.4 * (theta - M) * (A - W0)).clamp(0, 1)
    assert 0 < U.min() < 1 or (U == 0).any()
    upload, kept = run(rule, gradient, 2, 0.1, sent=A, memory=memory)
    assert torch.allclose(kept["U"]["w"], U)
    assert torch.allclose(upload.params["w"] - M, 0.9**2 * (W0 + (A - W0) * U - M))
    assert int(rule.probe_passes(kept)) == 1
