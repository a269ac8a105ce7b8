"""FedBN, FedRep, FedPer and FedFomo (specification 10 C11 to C13), worked out in each test."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms.fedfomo import FedFomoClient, FedFomoServer, compute_affinity, normalize_affinity
from fedattune.algorithms.fedrep import FedRepClient
from fedattune.core.payload import RoundContext
from oracles.quadratic import FRESH

RUN: dict[str, Any] = {"rounds": 3, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "dtype": "float64"}
BN = ("1.weight", "1.bias")


def fit(name: str, federation: Federation, model: Any = "dnn", **settings: Any) -> Result:
    hidden = {"model_options": {"hidden": 4}} if model == "dnn" else {}
    return fedattune.fit(federation, name, model, **(RUN | hidden | settings))


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def test_c11_norms_stay_on_the_client_on_both_engines(ragged: Federation) -> None:
    reference, together = (fit("fedbn", ragged, with_norm(), engine=e) for e in ("sequential", "vectorized"))
    assert max((reference.models[k] - together.models[k]).abs().max().item() for k in reference.models) < 1e-12
    for k, w in reference.models.items():
        alike = (w - w[:1]).abs().amax() == 0
        assert alike == (k not in BN)
    # all but the 8 values of the norm travel: 5 x 4 + 4 + 4 x 3 + 3 = 39
    assert reference.bytes_up == reference.bytes_down == 8 * 39 * 3 * 3
    state = reference.trained_server.state["w"]  # type: ignore[union-attr]
    assert not set(BN) & state.keys()  # type: ignore[union-attr]
    statistics = [reference.model(i).state_dict()["1.running_mean"] for i in range(6)]
    assert all((a - statistics[0]).abs().max() > 1e-3 for a in statistics[1:])


def test_c11_the_server_step_and_rounds_of_others_leave_a_clients_norm_alone(ragged: Federation) -> None:
    """After one round: what a client trained is what it holds after aggregation, and others hold the initial norm."""
    result = fit("fedbn", ragged, with_norm(), rounds=1, cohort=2, bn_buffers="average")
    ones, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    rest = [i for i in range(6) if torch.equal(result.models["1.weight"][i], ones)]
    assert len(rest) == 4
    for i in rest:
        kept = result.model(i).state_dict()
        assert torch.equal(kept["1.bias"], zeros)
        assert torch.equal(kept["1.running_mean"], zeros)
    (one, _) = (i for i in range(6) if i not in rest)
    alone = fit("local", ragged, with_norm(), rounds=1)
    for k in (*BN, "1.running_mean", "1.running_var"):
        mine, trained = result.model(one).state_dict()[k], alone.model(one).state_dict()[k]
        assert torch.allclose(mine, trained, rtol=0, atol=1e-14)


M = {"base": torch.tensor([1.0, -2.0], dtype=torch.float64), "head": torch.tensor([3.0], dtype=torch.float64)}
W0 = Params({"base": torch.tensor([0.5, 0.5], dtype=torch.float64), "head": torch.tensor([-1.0], dtype=torch.float64)})


def alternate(rule: FedRepClient, steps: int, lr: float) -> list[Params]:
    """The models after every step on 1/2 ||w - m||^2, beginning with the first."""
    job = RoundContext(lr, torch.tensor(float(steps)), torch.tensor(1.0), 1, ("head",))
    carry = rule.begin(Payload(W0), {}, FRESH, job)
    path = [carry.w]
    for _ in range(steps):
        carry = rule.step(carry, (), lambda w, _: Params({k: w[k] - M[k] for k in w}), job)
        path.append(carry.w)
    upload, _ = rule.finish(carry, Payload(W0), {}, job)
    assert all(torch.equal(upload.params[k], carry.w[k]) for k in M)
    return path


def test_c12_first_the_head_then_the_base_each_frozen_in_turn() -> None:
    """3 and 1 times 2 steps: errors shrink by (1 - lr)^6 and (1 - lr)^2."""
    path = alternate(FedRepClient(3, 1), 8, 0.1)
    for t, w in enumerate(path):
        for name, done in (("head", min(t, 6)), ("base", max(t - 6, 0))):
            expected = M[name] + (W0[name] - M[name]) * 0.9**done
            assert torch.equal(w[name], W0[name]) if done == 0 else torch.allclose(w[name], expected, atol=1e-14)
    assert torch.equal(path[6]["head"], path[8]["head"])


def test_c12_momentum_does_not_carry_a_frozen_part_on() -> None:
    """v1 = e, v2 = 0.5 v1 + e2: e1 = 0.9 e, e2 = 0.9 e - 0.1 (0.5 e + 0.9 e) = 0.76 e; then the head rests."""
    path = alternate(FedRepClient(1, 1, 0.5), 4, 0.1)
    e = W0["head"] - M["head"]
    assert torch.allclose(path[2]["head"] - M["head"], 0.76 * e, atol=1e-14)
    assert torch.equal(path[2]["head"], path[4]["head"])
    assert torch.allclose(path[4]["base"] - M["base"], 0.76 * (W0["base"] - M["base"]), atol=1e-14)


@pytest.mark.parametrize("name", ["fedrep", "fedbabu"])
def test_c12_norms_that_stay_on_the_client_train_with_the_base(name: str, ragged: Federation) -> None:
    """After one round of all, the shared norm is the mean of what the clients trained; all else is the same.

    The fine-tuned head of FedBABU depends on the norm, which fine-tuning leaves alone.
    """
    own, shared = (fit(name, ragged, with_norm(), rounds=1, cohort=6, bn_affine=how) for how in ("local", "average"))
    n = ragged.sizes("train").double()
    for k, w in shared.models.items():
        if name == "fedbabu" and k.startswith("3."):
            continue
        mean = (n[:, None] * own.models[k]).sum(0) / n.sum() if k in BN else own.models[k]
        assert torch.allclose(mean.expand_as(w), w, rtol=0, atol=1e-14)
        assert k not in BN or (own.models[k] - w).abs().max() > 1e-3


def two_weights(*values: float) -> Params:
    return Params({"w": torch.tensor(values, dtype=torch.float64)[:, None]})


def test_c13_helpfulness_by_hand() -> None:
    """theta = 0 with loss 2; candidates at 1, -2, 4, 0 with losses 1, 3, 0, 2: a = 1/1, -1/2, 2/4, 0."""
    models, losses = (two_weights(0, 1, -2, 4, 0), torch.tensor([2.0, 1.0, 3.0, 0.0, 2.0 - 1e-9], dtype=torch.float64))
    a = compute_affinity(models, losses)
    assert torch.allclose(a, torch.tensor([1, -0.5, 0.5, 0], dtype=torch.float64), atol=1e-4)
    assert a[3] == 0  # the same model, whatever rounding makes of its loss
    w = normalize_affinity(a)
    assert torch.allclose(w, torch.tensor([2 / 3, 0, 1 / 3, 0], dtype=torch.float64), atol=1e-4)
    assert w.sum().item() == pytest.approx(1)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(normalize_affinity(a[order]), w[order])
    assert torch.equal(normalize_affinity(-a.abs()), torch.zeros(4, dtype=torch.float64))


def choosing(
    rule: FedFomoClient, previous: float, own: float, peers: list[float], target: float, toward: float | None = None
) -> tuple[Payload, Any]:
    """One client with the held-out loss (w - target)^2, in two batches of unlike size; no local step, or one."""
    memory = {"previous": two_weights(previous).rows(0), "own": two_weights(own).rows(0)}
    numbers = Params(peer=torch.arange(len(peers)))
    sent = Payload(memory["own"], {"peers": two_weights(*peers), "numbers": numbers})
    job = RoundContext(0.1, torch.zeros((), dtype=torch.float64), torch.tensor(1.0), 1)
    carry = rule.begin(sent, memory, FRESH, job)
    for size, shift in ((1, 0.3), (3, -0.1)):  # the mean over four samples has no shift

        def loss(w: Params, batch: Any, shift: float = shift) -> Tensor:
            return (w["w"][0] - target) ** 2 + shift

        carry = rule.probe(carry, (torch.zeros(size, 1), torch.zeros(size)), None, loss, job)  # type: ignore[arg-type]
    if toward is not None:
        carry = rule.step(carry, (), lambda w, _: Params(w=w["w"] - toward), job)
    return rule.finish(carry, sent, memory, job)


def test_c13_a_client_moves_by_what_helps() -> None:
    """From 0, target 3, L = 9; own 1: L = 4, a = 5; peers 2: L = 1, a = 4; -1: L = 16, a = -7. 0 + 5/9 + 4/9 2."""
    upload, memory = choosing(FedFomoClient(), 0, 1, [2, -1], 3)
    assert upload.params["w"].item() == pytest.approx(13 / 9, abs=1e-4)
    assert upload.extra["affinity"]["a"].tolist() == pytest.approx([4, -7], abs=1e-3)
    assert memory["own"]["w"].item() == memory["previous"]["w"].item() == upload.params["w"].item()
    # One step of rate 0.1 on 1/2 (w - 23/9)^2 takes it from 13/9 to 14/9; 13/9 is the next round's theta.
    upload, memory = choosing(FedFomoClient(), 0, 1, [2, -1], 3, toward=23 / 9)
    found = [part["w"].item() for part in (upload.params, memory["own"], memory["previous"])]
    assert found == pytest.approx([14 / 9, 14 / 9, 13 / 9], abs=1e-4)
    upload, _ = choosing(FedFomoClient(affinity="normalised"), 0, 1, [2, -1], 3)
    assert upload.extra["affinity"]["a"].tolist() == pytest.approx([4 / 2, -7 / 2], abs=1e-3)  # |5 + 4 - 7| = 2


N = 5


def affinities(*rows: list[float], t: int = 0) -> Any:
    torch.manual_seed(0)
    state = FedFomoServer().init(two_weights(0).rows(0), N)
    P = torch.zeros(N, N, dtype=torch.float64)
    for i, row in enumerate(rows):
        P[i] = torch.tensor(row)
    theta = two_weights(*range(N))
    return {**state, "theta": theta, "P": P, "round": torch.tensor(t)}


def test_c13_the_most_helpful_are_sent_and_the_own_model_does_not_travel() -> None:
    rule, ids = FedFomoServer(models=3, epsilon=0), torch.tensor([0, 1])
    sent = rule.broadcast(affinities([9, 1, 4, 3, 2], [5, 9, 0, 7, 6]), ids).payload
    assert sent.extra["numbers"]["peer"].tolist() == [[2, 3], [3, 4]]
    assert sent.extra["peers"]["w"][:, :, 0].tolist() == [[2, 3], [3, 4]]
    assert sent.params["w"][:, 0].tolist() == [0, 1]
    assert rule.bytes_down({}, ids, sent).total() == 2 * 2 * (8 + 8)  # two models of one value, with their numbers
    assert FedFomoServer(models=99, epsilon=0).broadcast(affinities(), ids).payload.extra["numbers"]["peer"].shape == (
        2,
        4,
    )


def test_c13_exploration_falls_and_does_not_depend_on_who_else_is_asked() -> None:
    rule, everybody = FedFomoServer(models=2, epsilon=1.0, epsilon_decay=0.25), torch.arange(N)
    best = [[1.0 if n == (i + 1) % N else 0.0 for n in range(N)] for i in range(N)]
    found = []
    for t in range(6):
        state = affinities(*best, t=t)
        peers = rule.broadcast(state, everybody).payload.extra["numbers"]["peer"][:, 0]
        assert (peers != everybody).all()
        assert torch.equal(rule.broadcast(state, torch.tensor([3])).payload.extra["numbers"]["peer"][0], peers[3:4])
        found.append((peers == (everybody + 1) % N).sum().item())
    assert found[0] < N
    assert found[4] == found[5] == N  # 1 - 4 x 0.25 = 0
    ties = [FedFomoServer(models=2, epsilon=0).broadcast(affinities(t=t), everybody).payload for t in range(4)]
    assert len({tuple(sent.extra["numbers"]["peer"].flatten().tolist()) for sent in ties}) > 1


def test_c13_what_clients_report_adds_up() -> None:
    rule, ids = FedFomoServer(models=3, epsilon=0), torch.tensor([0, 1])
    state = affinities([9, 1, 4, 3, 2], [5, 9, 0, 7, 6])
    sent = rule.broadcast(state, ids).payload
    found = Params(a=torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.float64))
    received = Payload(two_weights(7, 8), {"affinity": found})
    after = rule.aggregate(state, ids, sent, received, torch.ones(2, dtype=torch.int64))
    assert after["P"][:2].tolist() == [[9, 1, 5, 1, 2], [5, 9, 0, 7.5, 6]]
    assert not after["P"][2:].any()
    assert after["theta"]["w"][:, 0].tolist() == [7, 8, 2, 3, 4]  # type: ignore[call-overload]
    assert after["round"] == 1


METHODS = ["pfedla", "heurpfedla", "pfedhn", "fedbn", "fedrep", "fedper", "fedfomo"]
