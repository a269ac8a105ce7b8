"""Closed forms of IGFL (specification 10 E1 to E9): attention over updates, and the group's part of a local step."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fedattune import Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.igfl import GlobalUpdateWrapper, UpdateAttention
from fedattune.algorithms.scaffold import ControlVariateWrapper
from fedattune.client import SGD
from fedattune.core.payload import ServerState
from fedattune.server import Average
from oracles.clients import Clients, pull, push
from oracles.quadratic import DIM, W0, A, M, curved, gradient, params, run, zero

N = 5
RULES = [
    UpdateAttention(attention="self"),
    UpdateAttention(attention="global"),
    *(UpdateAttention(attention="time", form=form) for form in ("T1", "T2", "T3")),
]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.attention} {rule.form}")


@pytest.fixture
def updates() -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4)}
    return Params({k: torch.randn(N, *s, generator=generator, dtype=torch.float64) for k, s in shapes.items()})


def aggregate(
    rule: Any, delta: Params, state: ServerState | None = None, ids: list[int] | None = None, n: Any = None
) -> ServerState:
    """The state after clients `ids` uploaded w + delta; at first w = 0."""
    clients = len(next(iter(delta.values())))
    who = torch.arange(clients) if ids is None else torch.tensor(ids)
    if state is None:
        state = rule.init(delta.rows(0).zeros(), clients)
    sent = rule.broadcast(state, who).payload
    counts = torch.ones(len(who), dtype=torch.int64) if n is None else torch.tensor(n)
    return rule.aggregate(state, who, sent, Payload(sent.params + delta), counts)


def one(*values: float) -> Params:
    """Updates of a model with a single value."""
    return Params(w=torch.tensor(values, dtype=torch.float64)[:, None])


def near(a: Params, b: Params, tolerance: float = 1e-13) -> bool:
    return all(torch.allclose(a[k], b[k], rtol=0, atol=tolerance) for k in a)


@rules
def test_e1_equal_scores_are_an_average(rule: UpdateAttention, updates: Params) -> None:
    """No update at all leaves w where it is; equal updates move it by that update; a single one is taken whole."""
    nothing = aggregate(rule, updates.zeros())
    assert near(nothing["w"], updates.rows(0).zeros(), 0)
    assert torch.allclose(nothing["p"], torch.full((N,), 1 / N, dtype=torch.float64), atol=1e-15)
    twice = aggregate(rule, one(3.0, 3.0, 3.0), aggregate(rule, one(3.0, 3.0, 3.0)))
    assert twice["w"]["w"].item() == pytest.approx(6.0, abs=1e-12)
    alone = updates.rows(slice(2, 3))
    state = aggregate(rule, alone, aggregate(rule, alone))
    assert near(state["w"], 2 * alone.rows(0))


@rules
def test_e2_weights_are_not_negative_and_sum_to_one_but_those_of_t2(rule: UpdateAttention, updates: Params) -> None:
    state = aggregate(rule, 0.5 * updates, aggregate(rule, updates))
    b = state["p"]
    assert (b >= 0).all()
    matrices = rule.broadcast(state, torch.tensor([0, 3])).mixing
    assert matrices is not None
    if rule.form == "T2" and rule.attention == "time":
        assert 0 < b.sum() < N
        assert b.sum() > 1.5  # the trace of A; a softmax's diagonal wins here
        assert list(matrices.weights) == ["attention"]
    else:
        assert b.sum().item() == pytest.approx(1, abs=1e-14)
        assert torch.equal(matrices.weights["model"], b.repeat(2, 1))


@rules
def test_a_client_that_joins_weighs_as_from_the_start(rule: UpdateAttention, updates: Params) -> None:
    """Two rounds of five clients, of whom the last two join before the first, or are there from the start."""
    w0 = updates.rows(0).zeros()
    from_start, joined = rule.init(w0, N), rule.add_clients(rule.init(w0, N - 2), 2)
    for _ in range(2):
        from_start, joined = (aggregate(rule, updates, state) for state in (from_start, joined))
    assert near(from_start["w"], joined["w"])
    mixing = [rule.broadcast(state, torch.arange(N)).mixing for state in (from_start, joined)]
    assert (mixing[0] is None) == (mixing[1] is None)
    if mixing[0]:
        assert mixing[0].weights.keys() == mixing[1].weights.keys()


def test_e2_by_hand_for_two_clients_with_one_value_each() -> None:
    """Updates (1, 2) after (3, -1); psi is the product."""
    e = math.exp

    def two(rule: UpdateAttention) -> list[float]:
        state = aggregate(rule, one(1.0, 2.0), aggregate(rule, one(3.0, -1.0)))
        return state["p"].tolist()

    rows = [e(1) / (e(1) + e(2)), e(2) / (e(2) + e(4))]  # weight of the first for q = 1 and q = 2
    first = sum(rows) / 2
    assert two(UpdateAttention(attention="self")) == pytest.approx([first, 1 - first], abs=1e-14)
    rule = UpdateAttention(attention="self")
    shown = rule.broadcast(aggregate(rule, one(1.0, 2.0)), torch.tensor([1, 0])).mixing
    assert shown is not None
    assert shown.weights["attention"].flatten().tolist() == pytest.approx(
        [rows[1], 1 - rows[1], rows[0], 1 - rows[0]], abs=1e-14
    )
    first = e(1.5) / (e(1.5) + e(3))  # q = 1.5, the mean
    assert two(UpdateAttention(attention="global")) == pytest.approx([first, 1 - first], abs=1e-14)
    rows = [e(3) / (e(3) + e(6)), e(-1) / (e(-1) + e(-2))]  # q = 3 and q = -1
    first = sum(rows) / 2
    assert two(UpdateAttention(attention="time", form="T1")) == pytest.approx([first, 1 - first], abs=1e-14)
    assert two(UpdateAttention(attention="time", form="T2")) == pytest.approx([rows[0], 1 - rows[1]], abs=1e-14)
    first = e(3) / (e(3) + e(-2))  # scores 3 x 1 and -1 x 2
    assert two(UpdateAttention(attention="time", form="T3")) == pytest.approx([first, 1 - first], abs=1e-14)


def test_e3_orthogonal_updates() -> None:
    """Row i of A: exp(s_i^2) on the diagonal, 1 elsewhere, over exp(s_i^2) + n - 1."""
    s = [0.5, 1.0, 1.5]
    b = aggregate(UpdateAttention(attention="self"), Params(w=torch.diag(torch.tensor(s, dtype=torch.float64))))
    for j in range(3):
        column = [(math.exp(s[i] ** 2) if i == j else 1.0) / (math.exp(s[i] ** 2) + 2) for i in range(3)]
        assert b["p"][j].item() == pytest.approx(sum(column) / 3, abs=1e-14)


@pytest.mark.parametrize("form", ["T1", "T2", "T3"])
def test_e5_time_attention_starts_as_an_average(form: Any, updates: Params) -> None:
    """All earlier updates are zero in the first round, and one that comes for the first time has score 0 (T3)."""
    rule = UpdateAttention(attention="time", form=form)
    average = aggregate(Average("uniform"), updates)
    assert near(aggregate(rule, updates)["w"], average["w"])
    if form == "T3":
        first = rule.init(one(0.0).rows(0), 3)
        state = aggregate(rule, one(2.0), first, [0])
        state = aggregate(rule, one(-1.0), state, [1])  # client 0 is not there: its update stays
        state = aggregate(rule, one(1.0, 1.0, 1.0), state, [0, 1, 2])
        e = [math.exp(2.0), math.exp(-1.0), 1.0]
        assert state["p"].tolist() == pytest.approx([v / sum(e) for v in e], abs=1e-14)


def test_the_displacement_is_what_the_global_model_moved_attention_included(updates: Params) -> None:
    rule = GlobalUpdateWrapper(UpdateAttention(attention="self"))
    first = aggregate(rule, updates)
    assert near(first["D"], first["w"], 0)
    second = aggregate(rule, 0.5 * updates, first)
    assert near(second["D"], second["w"] - first["w"], 0)
    sent = rule.broadcast(second, torch.tensor([1, 4])).payload
    assert near(sent.extra["D"], second["D"].repeat(2), 0)
    no_global = aggregate(GlobalUpdateWrapper(Attention()), updates)
    assert near(no_global["D"], updates.map(lambda a: a.mean(0)))


def test_after_a_round_without_uploads_the_displacement_is_zero(updates: Params) -> None:
    """The model stayed, so D = 0; without gradients, Delta_new = D - Delta_last / |S| is then -Delta_last / 3."""
    rule = GlobalUpdateWrapper(ControlVariateWrapper(UpdateAttention(attention="time")))
    before = rule.init(updates.rows(0), N) | {"D": updates.rows(1)}
    after = rule.skip_round(before)
    assert after.keys() == before.keys()
    assert near(after["D"], updates.rows(0).zeros(), 0)
    assert near(after["w"], before["w"], 0)
    clients = Clients(igfl_c(), [push(v) for v in (W0, A, M)], W0)
    clients.play(0.1, 3)
    last = clients.updates["w"]
    clients.state, clients.round = clients.algorithm.server.skip_round(clients.state), 2
    clients.gradients = [zero] * 3
    clients.play(0.1, 3)
    assert torch.allclose(clients.updates["w"], -last / 3, atol=1e-14)


def igfl_c(**options: Any) -> Any:
    return ALGORITHMS["igfl_c"](**options)


def local(d: Tensor, delta: Tensor, grad: Any, steps: int, lr: float, cohort: int, **more: Any) -> Tensor:
    """The update of one IGFL client, that took part in the round before unless `round_` says otherwise."""
    memory = {"delta": params(delta), "delta_round": Params(round=torch.tensor(1.0, dtype=torch.float64))}
    rule = igfl_c(stale_decay=more.pop("stale_decay", 1.0)).client
    round_ = more.pop("round_", 2)
    upload, kept = run(rule, grad, steps, lr, extra={"D": params(d)}, memory=memory, cohort=cohort, round_=round_)
    assert torch.equal(kept["delta"]["w"], upload.params["w"] - W0)
    assert kept["delta_round"]["round"] == round_
    return upload.params["w"] - W0


def test_algorithm_2_step_by_step() -> None:
    eta, steps, cohort = 0.05, 4, 3
    w = W0
    for _ in range(steps):
        d_i = -eta * curved(params(w), None)["w"]
        d_g = (d_i - A / steps) / cohort + M / steps
        w = w + d_i + d_g
    assert torch.allclose(local(M, A, curved, steps, eta, cohort), w - W0, atol=1e-14)


def test_e6_limits_of_the_local_step() -> None:
    """Without history it is SGD with lr (1 + 1 / |S|); as |S| grows, without displacement, plain SGD."""
    nothing, eta = torch.zeros(DIM, dtype=torch.float64), 0.1
    sgd = run(SGD(), gradient, 5, eta * (1 + 1 / 4))[0].params["w"] - W0
    assert torch.allclose(local(nothing, nothing, gradient, 5, eta, 4), sgd, atol=1e-14)
    plain = run(SGD(), gradient, 5, eta)[0].params["w"] - W0
    assert torch.allclose(local(nothing, A, gradient, 5, eta, 10**15), plain, atol=1e-13)
    targets = [pull(1.0, W0), pull(2.0, A), pull(0.5, M)]
    first = Clients(igfl_c(), targets, torch.zeros(DIM, dtype=torch.float64)).play(0.1, 5)
    fedavg = Clients(ALGORITHMS["fedavg"](), targets, torch.zeros(DIM, dtype=torch.float64))
    assert torch.allclose(first, fedavg.play(0.1 * (1 + 1 / 3), 5), atol=1e-14)


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_e7_e9_without_gradients_the_history_alone_moves(steps: int) -> None:
    """Delta_new = D - Delta_last / |S|, in however many steps."""
    assert torch.allclose(local(M, A, zero, steps, 0.1, 4), M - A / 4, atol=1e-14)


def test_e8_a_constant_gradient_is_amplified() -> None:
    """Dbar -> -(P + 1) lr T g: for P = 10, lr = 0.1, T = 5, g = 1, -5.5."""
    g = torch.ones(1, dtype=torch.float64)
    clients = Clients(igfl_c(), [push(g)] * 10, torch.zeros(1, dtype=torch.float64))
    moves = [clients.play(0.1, 5).item() for _ in range(300)]
    assert moves[0] == pytest.approx(-0.55, abs=1e-14)
    assert moves[-1] - moves[-2] == pytest.approx(-5.5, abs=1e-9)
    assert all(later < sooner for sooner, later in pairwise(moves))


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_old_updates_count_as_stale_decay_says(decay: float) -> None:
    """Missed rounds: none (round 2), three (round 5)."""
    assert torch.allclose(local(M, A, zero, 2, 0.1, 4, stale_decay=decay), M - A / 4, atol=1e-14)
    missed = local(M, A, zero, 2, 0.1, 4, stale_decay=decay, round_=5)
    assert torch.allclose(missed, M - decay**3 * A / 4, atol=1e-14)
