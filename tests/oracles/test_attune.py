"""Attune: the rules of its page by hand, and the methods that it becomes at the ends of its options."""

from dataclasses import replace
from itertools import combinations
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms.attune import CANDIDATE, EXPERTS, AttuneClient, AttuneServer
from fedattune.algorithms.twins import TwinModule, TwinNetwork
from fedattune.client import RunningMean
from fedattune.core.metrics import METRICS
from fedattune.core.params import squared_norm
from fedattune.core.payload import RoundContext, ServerState
from fedattune.core.task import Task
from fedattune.engine.base import ClientInputs, TaskLoss
from fedattune.engine.batches import LocalTraining
from fedattune.engine.sequential import SequentialEngine
from fedattune.engine.vectorized import VectorizedEngine
from fedattune.runs.predictions import _divide_rows, weigh_held_out_rows
from oracles.quadratic import FRESH

RUN: dict[str, Any] = {
    "rounds": 3, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "dtype": "float64", "early_stopping": "off",
}  # fmt: skip
"""Without early stopping, which would take the models of different rounds where predictions differ."""

HIDDEN = {"hidden": 4}
E = 19
NO_LOSS = 1000.0
"""A loss at which an expert has no weight."""

SINGLE = tuple(tuple(float(i == k) for i in range(6)) for k in range(6))
OWN, HEAD, INTERCEPT, SHARED, HALF, FULL = SINGLE
"""Experts of one prediction: own model, own head, own intercept, and no, half or all of the class shares."""

Weights = tuple[float, ...]


def number_of(expert: Weights) -> int:
    return EXPERTS.index(expert)


def only_at(numbers: dict[Weights, float], other: float = 0.0) -> Tensor:
    """The numbers of some experts, and another one for the rest (E,)."""
    return torch.tensor([numbers.get(expert, other) for expert in EXPERTS], dtype=torch.float64)


def fit(name: str, federation: Federation, model: Any = "dnn", **settings: Any) -> Result:
    hidden = {"model_options": HIDDEN} if model == "dnn" else {}
    return fedattune.fit(federation, name, model, **(RUN | hidden | settings))


def models_of(result: Result) -> Params:
    assert isinstance(result.models, Params)
    return result.models


def only(result: Result, part: str) -> Params:
    """The models of all clients under one name of a `TwinModule`, but for the own head and intercept."""
    models = models_of(result)
    added = ("own.added", "own.intercept")
    return Params(
        {k.removeprefix(part): v for k, v in models.items() if k.startswith(part) and not k.startswith(added)}
    )


def find_difference(one: Params, other: Params) -> float:
    """The largest difference between models whose layers have other names."""
    return max(float((a - b).abs().max()) for a, b in zip(one.values(), other.values(), strict=True))


# ----- server


def vectors(*rows: list[float]) -> Params:
    return Params(w=torch.tensor(rows, dtype=torch.float64))


def start(n_clients: int, groups: list[int] | None = None, *models: list[float]) -> ServerState:
    """A server whose model is one vector: it finds no groups by itself."""
    state: Any = AttuneServer().init(vectors([0.0, 0.0]).rows(0), n_clients)
    for g, model in enumerate(models):
        state["w"]["w"][g] = torch.tensor(model)
        state["velocity"]["w"][g] = 10 * torch.tensor(model)
    return dict(state | ({"group": torch.tensor(groups)} if groups else {}))


def serve(state: ServerState, updates: Params, n: list[int], q: list[Weights], scales: list[float]) -> ServerState:
    """One round in which all clients upload what they were sent plus `updates`, and are sure of one expert."""
    rule, ids = AttuneServer(), torch.arange(len(n))
    sent = rule.broadcast(state, ids).payload  # type: ignore[arg-type]
    prior = sent.extra["guard"]["prior"]
    chosen = torch.stack([only_at({one: 1.0}) for one in q])
    report = Params(change=0.1 * (chosen - prior), scale=0.1 * torch.tensor(scales, dtype=torch.float64))
    uploads = Payload(sent.params + updates, {"guard": report})
    return dict(rule.aggregate(state, ids, sent, uploads, torch.tensor(n)))  # type: ignore[arg-type]


def read(state: ServerState, name: str, group: int = 0) -> list[float]:
    stack: Any = state[name]
    values: list[float] = stack["w"][group].tolist()
    return values


def test_two_rounds_of_the_server_by_hand() -> None:
    """V = (0, 1), then 0.6 (0, 1) + (1, 0). P is half of the old one and half of the mean of 1/19 and two q."""
    state = serve(start(2), vectors([3, 1], [-1, 1]), [1, 3], [OWN, FULL], [2, 4])
    assert read(state, "w") == pytest.approx([0, 1], abs=1e-15)
    prior = state["guard"]["prior"]
    assert prior.tolist() == pytest.approx(only_at({OWN: 23 / 114, FULL: 23 / 114}, 2 / 57).tolist())
    assert state["guard"]["scale"] == pytest.approx(3)
    state = serve(state, vectors([1, 0], [1, 0]), [1, 3], [OWN, OWN], [1, 1])
    assert read(state, "velocity") == pytest.approx([1, 0.6], abs=1e-15)
    assert read(state, "w") == pytest.approx([1, 1.6], abs=1e-15)
    assert state["guard"]["prior"][number_of(OWN)] == pytest.approx(23 / 228 + (2 + 1 / 19) / 6)
    assert state["guard"]["prior"].sum() == pytest.approx(1)
    assert state["guard"]["scale"] == pytest.approx(2)  # half of 3 and half of 1
    sent = AttuneServer().broadcast(state, torch.tensor([1])).payload  # type: ignore[arg-type]
    assert sent.params["w"][0].tolist() == read(state, "w")
    assert torch.equal(sent.extra["guard"]["prior"][0], state["guard"]["prior"])
    assert sent.extra.keys() == {"guard"}  # no other group's model


def test_each_group_has_its_own_model_and_momentum() -> None:
    """Clients 0 and 2 are a group: (1 x 3 + 3 x 1) / 4. A group without uploads keeps its model."""
    state = start(3, [0, 1, 0], [0.0, 0.0], [1.0, 0.0])
    rule, ids = AttuneServer(), torch.arange(3)
    sent = rule.broadcast(state, ids).payload  # type: ignore[arg-type]
    assert sent.params["w"].tolist() == [[0, 0], [1, 0], [0, 0]]
    report = Params(change=torch.zeros(3, E).double(), scale=torch.zeros(3).double())
    candidate = Params(evidence=torch.zeros(3, 2).double())
    uploads = Payload(sent.params + vectors([3, 0], [0, 1], [1, 0]), {"guard": report, CANDIDATE: candidate})
    both = rule.aggregate(state, ids, sent, uploads, torch.tensor([1, 5, 3]))  # type: ignore[arg-type]
    assert read(dict(both), "w") == pytest.approx([1.5, 0])
    assert read(dict(both), "w", 1) == pytest.approx([1 + 6, 1])  # 0.6 x 10 of its velocity
    some = torch.tensor([0, 2])
    one = rule.aggregate(state, some, sent.rows(some), uploads.rows(some), torch.tensor([1, 3]))  # type: ignore[arg-type]
    assert read(dict(one), "w", 1) == [1, 0]


def move(state: ServerState, *clients: tuple[int, int, float, float]) -> ServerState:
    """Clients, another group that they compared, and how much better their own group's model and both are."""
    ids, candidates = (torch.tensor([one[k] for one in clients]) for k in (0, 1))
    evidence = torch.tensor([one[2:] for one in clients], dtype=torch.float64)
    return dict(AttuneServer._move_clients(state, ids, candidates, evidence))  # type: ignore[arg-type]


def test_clients_move_where_the_evidence_is_clear() -> None:
    """Client 0: half of -8 is not below -4; half of that and of -5 is. Client 2 goes to the better of two groups."""
    state = move(start(3, [0, 1, 2]), (0, 1, -8, 0), (1, 2, 9, 0), (2, 0, -9, 0))
    assert state["group"].tolist() == [0, 1, 0]
    assert state["for_group"][:, :3].tolist() == [[0, -4, 0], [0, 0, 4.5], [0, 0, 0]]
    state = move(state, (0, 1, -5, 0), (1, 2, -10, 0))
    assert state["group"].tolist() == [1, 1, 0]
    assert state["for_group"][:, :3].tolist() == [[0, 0, 0], [0, 0, -2.75], [0, 0, 0]]
    state = start(2, [0, 1])
    state["for_group"][0, 1:3] = torch.tensor([-7.0, -9.0])
    assert move(state, (0, 1, -2, 0))["group"].tolist() == [2, 1]  # -4.5 for group 1, -9 for group 2


def test_evidence_for_pairs_is_that_of_both_sides() -> None:
    """Half of the old value, and the sum over the clients of the group that they have before they move."""
    state = start(3, [0, 0, 1])
    state["for_pair"][0, 1] = 4.0
    state = move(state, (0, 1, -10, -1), (1, 1, 0, -2.5), (2, 0, 0, 3))
    assert state["for_pair"][:2, :2].tolist() == [[0, -1.5], [3, 0]]
    assert state["group"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("one", "other", "joins"), [(-1.0, -1.0, False), (-1.0, -1.1, True), (-9.0, 0.0, False), (0.5, -9.0, False)]
)
def test_two_groups_become_one_if_both_sides_gain(one: float, other: float, joins: bool) -> None:
    """Group 1 has three of four clients: 1/4 (4, 0) + 3/4 (0, 4)."""
    state = start(5, [1, 0, 1, 1, 2], [4.0, 0.0], [0.0, 4.0], [9.0, 9.0])
    state["for_pair"][0, 1], state["for_pair"][1, 0], state["for_pair"][1, 2] = one, other, -1.5
    state["for_group"] += 1
    merged: Any = AttuneServer._merge_groups(state)  # type: ignore[arg-type]
    if not joins:
        assert all(torch.equal(merged[k], state[k]) for k in ("group", "for_group", "for_pair"))
        assert torch.equal(merged["w"]["w"], state["w"]["w"])
        return
    assert merged["group"].tolist() == [1, 1, 1, 1, 2]
    assert read(merged, "w", 1) == pytest.approx([1, 3])
    assert read(merged, "velocity", 1) == pytest.approx([10, 30])
    assert read(merged, "w", 2) == [9, 9]
    assert merged["for_pair"].count_nonzero() == 0
    assert (merged["for_group"][:, :2] == 0).all()  # both models are others now
    assert (merged["for_group"][:, 2:] == 1).all()


def test_a_group_without_clients_merges_with_nobody() -> None:
    state = start(2, [0, 0], [1.0, 1.0], [2.0, 2.0])
    state["for_pair"][:2, :2] = -5.0
    merged: Any = AttuneServer._merge_groups(state)  # type: ignore[arg-type]
    assert read(merged, "w") == [1, 1]


def test_other_groups_go_round() -> None:
    """With three groups, each client compares both others in two rounds, and gets their models."""
    state = start(6, [0, 2, 5, 0, 2, 5], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0])
    rule, ids, seen = AttuneServer(), torch.tensor([0, 1, 2, 3, 5]), []
    for n in range(4):
        state = state | {"n_rounds": torch.tensor(n)}
        sent = rule.broadcast(state, ids).payload.extra[CANDIDATE]["w"]  # type: ignore[arg-type]
        seen.append(sent[:, 0].int().tolist())
    assert [sorted(pair) for pair in zip(*seen[:2], strict=True)] == [[2, 5], [0, 5], [0, 2], [2, 5], [0, 2]]
    assert seen[2:] == seen[:2]
    assert len(set(seen[0])) == 3  # clients of a round look at different groups
    without = AttuneServer(compare=False).broadcast(state, ids).payload  # type: ignore[arg-type]
    assert CANDIDATE not in without.extra


@pytest.mark.parametrize("client_state", ["memory", "disk"])
def test_a_run_keeps_a_model_for_each_group_and_not_for_each_client(client_state: str) -> None:
    """Eight clients with other labels each are at most six groups."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(40, 8, generator=generator) for _ in range(8)]
    data = fedattune.federation_from([(x, (x.argmax(1) + i) % 8) for i, x in enumerate(rows)], validation=0.3)
    result = fit("attune", data, "mlr", cohort=8, options={"likeness": 0.5}, client_state=client_state)
    assert result.trained_server
    state: Any = result.trained_server.state
    assert {len(v) for name in ("w", "velocity") for v in state[name].values()} == {6}
    assert state["group"].max() < 6


# ----- weights of the experts


def weigh(losses: dict[Weights, float], n: float = 1.0, prior: Tensor | None = None, **options: Any) -> list[float]:
    """The weights of the six predictions; experts that are not named have no weight."""
    rule = AttuneClient(**options)
    prior = only_at({}, 1 / E) if prior is None else prior
    weights: list[float] = rule._mix(rule._weigh(prior, n * only_at(losses, NO_LOSS))).tolist()
    return weights


def test_experts_are_means_of_one_to_three_predictions() -> None:
    """At most one of them is of the shared model alone."""
    assert len(set(EXPERTS)) == len(EXPERTS) == E
    assert all(sum(one) == pytest.approx(1) and sum(w > 0 for w in one[2:]) <= 1 for one in EXPERTS)


def test_weights_of_the_experts_by_hand() -> None:
    assert weigh({OWN: 0}) == pytest.approx([1, 0, 0, 0, 0, 0])
    assert weigh({OWN: 1, SHARED: 1}) == pytest.approx([0.5, 0, 0, 0.5, 0, 0])
    # Weights 1 : 3, then with two rows 1 : 9, and with a prior of 6 : 1 it is 2 : 1.
    assert weigh({INTERCEPT: log(3), FULL: 0}) == pytest.approx([0, 0, 0.25, 0, 0, 0.75])
    assert weigh({OWN: log(3), FULL: 0}, n=2) == pytest.approx([0.1, 0, 0, 0, 0, 0.9])
    prior = only_at({OWN: 0.6, FULL: 0.1}, 0.3 / 17)
    assert weigh({OWN: log(3), FULL: 0}, prior=prior) == pytest.approx([2 / 3, 0, 0, 0, 0, 1 / 3])
    # A mean of two predictions gives half of its weight to each.
    assert weigh({(0.5, 0.5, 0, 0, 0, 0): 2, FULL: 2}) == pytest.approx([0.25, 0.25, 0, 0, 0, 0.5])


def test_other_guards_do_not_look_at_losses() -> None:
    """The own model is alone once, in five pairs and in four triples; the shared one with one c in 1, 2, 1."""
    for losses in ({OWN: 0.0}, {FULL: 0.0}):
        assert weigh(losses, guard="shared") == pytest.approx(SHARED)
        own, shared = (1 + 5 / 2 + 4 / 3) / E, (1 + 2 / 2 + 1 / 3) / E
        assert weigh(losses, guard="equal") == pytest.approx([own, own, shared, shared, shared, shared])


def finish(
    found: dict[Weights, float],
    n: float,
    *,
    prior: Tensor | None = None,
    memory: Params | None = None,
    evidence: tuple[float, float] | None = None,
    scale: float | None = None,
) -> tuple[list[float], Params, dict[str, Params]]:
    """The weights of a client that found these losses on n rows, what it remembers, and its extras.

    It predicts a number if there is a `scale`, and compares groups if there is `evidence`.
    """
    rule = AttuneClient()
    like = torch.zeros((), dtype=torch.float64)
    w = Params({"shared.w": like, "own.w": like, "guard.share": like, "guard.parts": like.expand(5)})
    local = rule.init_local_state(w) | ({"losses": memory} if memory else {})
    guard = Params(prior=only_at({}, 1 / E) if prior is None else prior, scale=like + (scale or 0))
    sent = Payload(w, {"guard": guard} | ({CANDIDATE: Params({"shared.w": like})} if evidence else {}))
    job = RoundContext(0.1, like + 1, torch.tensor(1.0), 1)
    carry = rule.begin(sent, local, FRESH, job)._replace(losses=RunningMean(only_at(found, NO_LOSS), like + n))
    carry = carry._replace(is_number=like + (scale is not None and n > 0))
    if evidence:
        carry = carry._replace(evidence=torch.tensor(evidence, dtype=torch.float64))
    upload, kept = rule.finish(carry, sent, local, job)
    share, parts = upload.params["guard.share"], upload.params["guard.parts"]
    return [float(1 - share), *(share * parts).tolist()], kept["losses"], upload.extra


def test_a_client_without_validation_rows_uses_the_weights_of_the_others() -> None:
    """The prior is 3 to 1 for the shared model, whatever its own losses say."""
    prior = only_at({OWN: 0.25, SHARED: 0.75}, 1e-13)
    weights, kept, extra = finish({OWN: 0}, 0, prior=prior)
    assert weights == pytest.approx([0.25, 0, 0, 0.75, 0, 0], abs=1e-10)
    assert extra["guard"]["change"].tolist() == pytest.approx([0.0] * E, abs=1e-12)
    assert kept["n"] == 0
    # Its rows of an earlier round still count: three of them, each three times as likely by the own model.
    before = Params(mean=only_at({SHARED: log(3)}), n=torch.tensor(3.0).double())
    weights, kept, _ = finish({OWN: 0}, 0, prior=prior, memory=before)
    assert weights == pytest.approx([0.9, 0, 0, 0.1, 0, 0], abs=1e-10)  # own : shared is 27 : 3
    assert torch.equal(kept["mean"], before["mean"])


def test_losses_are_means_of_the_old_and_the_new_value() -> None:
    weights, kept, extra = finish({OWN: 2, SHARED: 3}, 2)
    assert kept["mean"][number_of(OWN)] == 2
    assert weights == pytest.approx([1 / (1 + exp(-2)), 0, 0, 1 / (1 + exp(2)), 0, 0])
    q = only_at({OWN: weights[0], SHARED: weights[3]})
    assert extra["guard"]["change"].tolist() == pytest.approx((0.1 * (q - 1 / E)).tolist())
    assert extra["guard"]["scale"] == 0  # classes
    weights, kept, _ = finish({OWN: 4, SHARED: 2}, 2, memory=kept)
    assert kept["mean"][number_of(OWN)] == 3
    assert weights == pytest.approx([1 / (1 + exp(1)), 0, 0, 1 / (1 + exp(-1)), 0, 0])


def test_squared_errors_count_in_units_of_the_clients_mean_error() -> None:
    """n L / (2 s^2): with s^2 = 1/2 that is 6 and 2, with the least error, 1, it is 3 and 1."""
    for scale, difference in ((0.5, 4), (0.0, 2)):
        weights, _, extra = finish({OWN: 3, SHARED: 1}, 2, scale=scale)
        own = 1 / (1 + exp(difference))
        assert weights == pytest.approx([own, 0, 0, 1 - own, 0, 0])
        assert extra["guard"]["scale"] == pytest.approx(0.1 * (3 * own + 1 * (1 - own)))
    assert finish({}, 0, scale=0.5)[2]["guard"]["scale"] == pytest.approx(0.05)  # no rows: what it was sent


@pytest.mark.parametrize(("answer", "alone", "both"), [(1.0, -2.0, -1.5), (-1.0, 2.0, 2.0), (0.0, 0.0, 0.0)])
def test_evidence_for_another_group_by_hand(answer: float, alone: float, both: float) -> None:
    """w_g says 0 and w_h says `answer` where 1 is right; 2 s^2 = 1/2, and a row counts 2 at most."""
    task = Task(TwinModule(nn.Identity(), nn.Linear(1, 1), 1, 0.5).double())
    w, rule = task.params.zeros(), AttuneClient()
    other = Params({"shared.head.weight": torch.zeros(1, 1), "shared.head.bias": torch.tensor([answer])})
    guard = Params(prior=only_at({}, 1 / E), scale=torch.tensor(0.25, dtype=torch.float64))
    one = torch.ones((), dtype=torch.float64)
    job = RoundContext(0.1, one, one, 1)
    sent = Payload(w, {"guard": guard, CANDIDATE: other.map(Tensor.double)})
    carry = rule.begin(sent, rule.init_local_state(w), FRESH, job)
    grad: Any = None
    for n in (2, 1):
        x, y = torch.ones(n, 1).double(), torch.ones(n).double()
        carry = rule.probe(carry, (x, y), grad, TaskLoss(task, [task.buffers]), job)
    assert carry.evidence.tolist() == pytest.approx([3 * alone, 3 * both])
    padded = torch.ones(9, 1).double(), torch.ones(9).double(), torch.tensor([1.0] * 7 + [0.0] * 2).double()
    carry = rule.probe(carry, padded, grad, TaskLoss(task, [task.buffers]), job)
    sent_up = rule.finish(carry, sent, rule.init_local_state(w), job)[0].extra[CANDIDATE]["evidence"]
    assert sent_up.tolist() == pytest.approx([max(-10, min(10, 10 * each)) / 100 for each in (alone, both)])


def test_what_clients_report_takes_little_of_the_norm_of_their_updates() -> None:
    """q and P differ by sqrt(2) at most, and both values of evidence are 10: 0.1 sqrt(2 + 2).

    A mean squared error of 1, the variance of the target, adds little. Nothing limits that of a model that is worse.
    """
    prior = only_at({FULL: 1.0}, 1e-300)
    for scale, norm in ((None, 0.2), (1.0, 0.1 * sqrt(5))):
        _, _, extra = finish({OWN: 1.0, FULL: NO_LOSS}, 1e6, prior=prior, evidence=(-1e6, 1e6), scale=scale)
        found = sqrt(sum(float(squared_norm(one)) for one in extra.values()))
        assert found == pytest.approx(norm)
        assert found < 0.3


# ----- choice of a method


def test_rows_are_weighed_by_the_losses_that_they_may_know() -> None:
    """Row 0 knows that the own model is right, row 1 nothing of its own: it has the prior after five steps.

    Each step halves the distance to (1 + 1/19) / 2 for the only expert that another client uses, and to 1/38 for
    others.
    """
    sums = torch.stack([only_at({OWN: 0.0}, NO_LOSS), only_at({})])
    others = only_at({FULL: 0.0}, NO_LOSS)[None]
    found = AttuneClient().weigh_rows(sums, others, torch.tensor([5.0]).double(), is_number=False)
    prior = only_at({FULL: 10 / 19 - 9 / 19 / 32}, 1 / 38 + 1 / 38 / 32)
    mixed = prior @ torch.tensor(EXPERTS, dtype=torch.float64)
    assert found["guard.share"].tolist() == pytest.approx([0, float(1 - mixed[0])])
    assert (found["guard.share"][1] * found["guard.parts"][1]).tolist() == pytest.approx(mixed[1:].tolist())


def test_rows_of_a_number_are_weighed_in_units_of_the_others_error() -> None:
    """The others' least error is 8 of 4 rows, so a sum of 4 log(3) more is a third as likely."""
    sums = only_at({OWN: 4 * log(3), SHARED: 0}, NO_LOSS)[None]
    others = only_at({OWN: 8.0, SHARED: 8.0}, NO_LOSS)[None]
    found = AttuneClient().weigh_rows(sums, others, torch.tensor([4.0]).double(), is_number=True)
    assert found["guard.share"].tolist() == pytest.approx([0.75])


def test_rows_of_one_group_or_third_know_nothing_of_each_other() -> None:
    x, y = torch.randn(24, 3), torch.tensor([0, 1] * 12)
    data = fedattune.federation_from([(x, y), (x, y)], validation=0.5, seed=1)
    rows = np.asarray(data.part("validation")[0])
    folds = _divide_rows(data, rows)
    counts = [np.bincount(data.y[torch.as_tensor(rows[folds == k])].numpy(), minlength=2) for k in range(3)]
    assert np.ptp(np.array(counts), axis=0).max() <= 1  # all have about the same classes
    grouped = replace(data, groups=np.arange(len(data.y)) // 4)
    assert all(len(set(_divide_rows(grouped, rows)[rows // 4 == one])) == 1 for one in set((rows // 4).tolist()))


def test_a_client_that_diverged_spoils_no_others_choice() -> None:
    data = fedattune.federation_from(
        [(torch.randn(24, 3), torch.tensor([0, 1] * 12)) for _ in range(3)], validation=0.5
    )
    task = Task(TwinModule(nn.Identity(), nn.Linear(3, 2), 2, 0.5))
    models = Params({k: v.detach().repeat(3, *[1] * v.ndim) for k, v in task.params.items()})
    buffers = Params({k: v.repeat(3, *[1] * v.ndim) for k, v in task.buffers.items()})
    models["own.head.weight"][1] = torch.nan
    found = weigh_held_out_rows(task, data, [0, 1, 2], models, buffers, AttuneClient())
    assert found is not None
    is_known = found["guard.share"].flatten().isfinite().numpy()
    sizes = [len(data.part("validation")[i]) for i in range(3)]
    np.testing.assert_array_equal(is_known, np.repeat([True, False, True], sizes))


@pytest.mark.parametrize(("stopping", "accept"), [("off", "always"), ("loss", "always"), ("loss", "better")])
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_validation_rows_do_not_flatter_a_method_that_weighs_by_them(stopping: str, accept: str, kind: str) -> None:
    """Targets are noise, so no weights are better than others on new rows."""
    generator = torch.Generator().manual_seed(4)
    clients = [tuple(torch.randn(24, k, generator=generator) for k in (6, 1)) for _ in range(200)]
    targets = [y.flatten() if kind == "numbers" else (y.flatten() > 0).long() for _, y in clients]
    data = fedattune.federation_from([(x, y) for (x, _), y in zip(clients, targets, strict=True)], validation=0.25)
    result = fit("attune", data, "mlr", rounds=8, steps=10, cohort=1.0, early_stopping=stopping, accept=accept)
    metrics: list[Any] = ["rmse"] if kind == "numbers" else ["log_loss", "auc"]
    for metric in metrics:
        own, left_out, test = (
            float(np.nanmean(one))
            for one in (
                result.measure_clients(metric, "validation"),
                result.measure_for_choice(metric),
                result.measure_clients(metric),
            )
        )
        assert METRICS[metric].sign * (own - left_out) > 0
        assert abs(left_out - test) < abs(own - test)


# ----- predictions


def test_predictions_are_a_mixture() -> None:
    """Of probabilities for classes, and of numbers."""
    torch.manual_seed(0)
    x, log_shares, a = (
        torch.randn(4, 5),
        torch.tensor([0.5, -1.0, 0.2]),
        torch.tensor([0.3, 0.1, 0.12, 0.08, 0.15, 0.25]),
    )

    def make(n_outputs: int) -> tuple[TwinModule, list[Tensor]]:
        twin = TwinModule(nn.Linear(5, 4), nn.Linear(4, n_outputs), n_outputs, 0.5).eval()
        for parameter in twin.own.parameters():
            nn.init.normal_(parameter)
        twin.guard["share"].data.fill_(0.7)
        twin.guard["parts"].data.copy_(a[1:] / 0.7)
        features = twin.shared["body"](x)
        shared = twin.shared["head"](features)
        adapted = shared + features @ twin.own["added"].weight.T + twin.own["added"].bias
        return twin, [twin.own["head"](twin.own["body"](x)), adapted, shared + twin.own["intercept"].value, shared]

    with torch.no_grad():
        twin, (own, adapted, moved, shared) = make(3)
        twin.log_shares.copy_(log_shares)
        outputs = own, adapted, moved, shared, shared + 0.5 * log_shares, shared + log_shares
        expected = sum(weight * each.softmax(1) for weight, each in zip(a, outputs, strict=True))
        assert twin(x).exp() == pytest.approx(expected, abs=1e-6)  # single precision
        twin, (own, adapted, moved, shared) = make(1)
        assert twin(x) == pytest.approx(0.3 * own + 0.1 * adapted + 0.12 * moved + 0.48 * shared, abs=1e-6)


class Bounded(nn.Module):
    """A model whose outputs no linear layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        bounded: Tensor = 4 * self.linear(x).tanh()
        return bounded


def test_a_model_without_a_linear_layer_at_its_end_has_no_own_head(ragged: Federation) -> None:
    """a_head then weighs the shared model."""
    torch.manual_seed(0)
    model = Bounded()
    result, other = (fit("attune", ragged, model, cohort=6, engine=engine) for engine in ENGINES)
    assert find_difference(models_of(result), models_of(other)) < 1e-12
    assert not any("added" in k for k in models_of(result))
    mine = models_of(result).rows(1)
    rows = torch.as_tensor(ragged.clients[1].test)
    x = ragged.features(rows, torch.float64)
    own, shared = (
        4 * (x @ mine[f"{part}.body.linear.weight"].T + mine[f"{part}.body.linear.bias"]).tanh()
        for part in ("own", "shared")
    )
    assert (own - shared).abs().max() > 1e-3
    counts = ragged.y[torch.as_tensor(ragged.clients[1].train)].bincount(minlength=3) + 0.5
    outputs = [shared + c * (counts / counts.sum()).log() for c in (0, 0, 0.5, 1)]
    outputs.insert(1, shared + mine["own.intercept.value"])
    share, parts = mine["guard.share"], mine["guard.parts"]
    expected = (1 - share) * own.softmax(1)
    expected += sum(share * part * each.softmax(1) for part, each in zip(parts, outputs, strict=True))
    with torch.no_grad():
        assert (result.model(1)(x).exp() - expected).abs().max() < 1e-6  # class shares are in single precision


# ----- one round from the page's equations alone

ENGINES = ["sequential", "vectorized"]
Layers = list[Tensor]
"""Weights and biases of a network with one hidden layer."""


def get_features(w: Layers, x: Tensor) -> Tensor:
    return (x @ w[0].T + w[1]).tanh()


def predict_each(w: Layers, v: Layers, h: Layers, x: Tensor, log_pi: Tensor | None) -> list[Tensor]:
    """Probabilities (n, C) of v, of w with own head, own intercept and class shares; or numbers (n,).

    h are the weights and the bias of the own head, and the own intercept.
    """
    features = get_features(w, x)
    shared, own = features @ w[2].T + w[3], get_features(v, x) @ v[2].T + v[3]
    adapted = shared + features @ h[0].T + h[1]
    moved = shared + h[2]
    if log_pi is None:
        return [one[:, 0] for one in (own, adapted, moved, shared, shared, shared)]
    return [one.softmax(1) for one in (own, adapted, moved, shared, shared + 0.5 * log_pi, shared + log_pi)]


def lose(prediction: Tensor, y: Tensor) -> Tensor:
    """The loss of each row, by probabilities (n, C) or numbers (n,)."""
    if y.is_floating_point():
        return (prediction - y) ** 2
    return -prediction[torch.arange(len(y)), y].clamp_min(1e-4).log()


def descend(w: Layers, v: Layers, h: Layers, x: Tensor, y: Tensor, lr: float, n_steps: int) -> tuple[Layers, ...]:
    """SGD of w, v and h on all rows; h sees w as it is at the step, and w sees nothing of h."""
    for _ in range(n_steps):
        w, v, h = ([one.detach().requires_grad_() for one in each] for each in (w, v, h))
        shared, own = (get_features(each, x) @ each[2].T + each[3] for each in (w, v))
        adapted = shared.detach() + get_features(w, x).detach() @ h[0].T + h[1]
        moved = shared.detach() + h[2]
        steps = []
        for each, output in ((w, shared), (v, own), (h[:2], adapted), (h[2:], moved)):
            prediction = output[:, 0] if y.is_floating_point() else output.softmax(1)
            gradient = torch.autograd.grad(lose(prediction, y).mean(), each, retain_graph=True)
            steps.append([(one - lr * g).detach() for one, g in zip(each, gradient, strict=True)])
        w, v, h = steps[0], steps[1], steps[2] + steps[3]
    return w, v, h


SETS = {chosen for c in (2, 3, 4, 5) for n in (1, 2, 3) for chosen in combinations((0, 1, c), n)}
"""Predictions whose mean is an expert."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_rounds_are_those_of_the_page(kind: str, engine: str) -> None:
    """Two rounds of three clients, of which the second is alone in its group and has two batches to probe."""
    is_number, beta, lr, groups, n_steps = kind == "numbers", 0.6, 0.3, [0, 1, 0], 2
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def draw_rows(n: int) -> tuple[Tensor, Tensor]:
        x = draw(n, 4)
        return x, x[:, 0] + 0.5 * draw(n) if is_number else (x[:, :3] + draw(n, 3)).argmax(1)

    clients = [
        {"train": draw_rows(n), "validation": draw_rows(held_out), "test": draw_rows(2)}
        for n, held_out in ((5, 7), (9, 140), (6, 4))
    ]
    data = fedattune.federation_from(clients, classes=None if is_number else ["a", "b", "c"], validation=0.0)
    data = replace(data, y=data.y.double() if is_number else data.y)
    train, validation = (
        [(data.x[rows].double(), data.y[rows]) for rows in map(torch.as_tensor, data.part(part))]
        for part in ("train", "validation")
    )
    n_outputs = 1 if is_number else 3
    counts = torch.stack([y.long().clamp_min(0).bincount(minlength=n_outputs)[:n_outputs] for _, y in train]).double()

    # What the package has before the rounds: models, groups and weights of the experts that differ.
    network = TwinNetwork()
    task = Task(network.wrap(nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, n_outputs)), data.x[:4]).double())
    shared = task.params.only(k for k in task.params if k.startswith("shared."))
    rule, client = AttuneServer(beta=beta, likeness=-1.0), AttuneClient()
    state: Any = rule.init(shared, 3)
    state["w"] = state["w"].map(lambda one: draw(*one.shape).double())
    state["velocity"] = state["velocity"].map(lambda one: 0.1 * draw(*one.shape).double())
    state["group"] = torch.tensor(groups)
    state["guard"]["prior"] = (0.3 * draw(E)).double().softmax(0)
    state["guard"]["scale"] = torch.tensor(1.5 if is_number else 0.0, dtype=torch.float64)
    state["for_group"][[0, 1, 2], [1, 0, 1]] = 16.0  # nobody has to move
    state["for_pair"][[0, 1], [1, 0]] = 100.0  # nor to merge
    personal = task.params.without(shared).copies(3)
    for k in personal:
        if k.startswith("own."):
            personal[k] = draw(*personal[k].shape).double()
    local = {k: v.copies(3) for k, v in client.init_local_state(task.params).items()}
    buffers = Params({**task.buffers.copies(3), **(Params() if is_number else network.client_buffers(counts))})

    # The same for the page.
    models = [[v[g].clone() for v in state["w"].values()] for g in (0, 1)]
    velocity = [[v[g].clone() for v in state["velocity"].values()] for g in (0, 1)]
    added = [k for k in personal if k.startswith(("own.added", "own.intercept"))]
    own = [[v[i].clone() for k, v in personal.items() if k.startswith("own.") and k not in added] for i in range(3)]
    heads = [[personal[k][i].clone() for k in added] for i in range(3)]
    weights_of = {one: tuple((i in one) / len(one) for i in range(6)) for one in SETS}
    prior = {one: float(state["guard"]["prior"][number_of(weights_of[one])]) for one in SETS}
    scale, evidence, pairs = float(state["guard"]["scale"]), [16.0] * 3, [100.0, 100.0]
    remembered: list[dict[tuple[int, ...], float]] = [{}, {}, {}]

    runner = (SequentialEngine if engine == "sequential" else VectorizedEngine)(task, data)
    ids = torch.arange(3)
    for number in (1, 2):
        sent = rule.broadcast(state, ids).payload
        params = Params({k: ({**sent.params, **personal})[k] for k in task.params})
        yes = torch.ones(3, dtype=torch.bool)
        inputs = ClientInputs(Payload(params, sent.extra), local, buffers, yes, yes)
        work = LocalTraining(seed=0, stream=2, round=number, lr=lr, batch_size=16, steps=n_steps)
        done = runner.train(client, ids, inputs, work)
        local, personal = done.local_state, done.upload.params.without(shared)
        uploads = Payload(done.upload.params.only(shared), done.upload.extra)
        state = rule.aggregate(state, ids, sent, uploads, data.sizes("train"))

        trained, chosen, errors, gained = [], [], [], [0.0, 0.0]
        for i, g in enumerate(groups):
            (x, y), n = validation[i], len(validation[i][1])
            log_pi = None if is_number else ((counts[i] + 0.5) / (counts[i] + 0.5).sum()).log()
            each = predict_each(models[g], own[i], heads[i], x, log_pi)
            other = predict_each(models[1 - g], own[i], heads[i], x, log_pi)[5]
            found = {one: float(lose(sum(each[k] for k in one) / len(one), y).mean()) for one in SETS}  # type: ignore[arg-type]
            found = {one: (v + remembered[i][one]) / 2 if remembered[i] else v for one, v in found.items()}
            remembered[i] = found
            unit = 2 * scale if is_number else 1.0
            q = {one: prior[one] * exp(-n * v / unit) for one, v in found.items()}
            q = {one: v / sum(q.values()) for one, v in q.items()}
            chosen.append(q)
            errors.append(sum(q[one] * found[one] for one in SETS))
            mine = lose(each[5], y)
            d, m = (
                float(((lose(one, y) - mine) / unit).clamp(-2, 2).sum().clamp(-10, 10))
                for one in (other, (other + each[5]) / 2)
            )
            evidence[i] = (evidence[i] + d) / 2
            gained[g] += m
            a = [sum(q[one] / len(one) for one in SETS if k in one) for k in range(6)]
            assert 1 - personal["guard.share"][i].item() == pytest.approx(a[0], abs=1e-12)
            share = personal["guard.share"][i]
            assert (share * personal["guard.parts"][i]).tolist() == pytest.approx(a[1:], abs=1e-12)
            w, own[i], heads[i] = descend(models[g], own[i], heads[i], *train[i], lr, n_steps)
            trained.append(w)
        pairs = [old / 2 + new for old, new in zip(pairs, gained, strict=True)]
        for g in (0, 1):
            members = [i for i in range(3) if groups[i] == g]
            total = sum(len(train[i][1]) for i in members)
            for layer, old in enumerate(models[g]):
                update = sum(len(train[i][1]) / total * (trained[i][layer] - old) for i in members)
                velocity[g][layer] = beta * velocity[g][layer] + update
            models[g] = [old + step for old, step in zip(models[g], velocity[g], strict=True)]
        prior = {one: prior[one] / 2 + (1 / 19 + sum(q[one] for q in chosen)) / (2 * (3 + 1)) for one in SETS}
        scale = (scale + sum(errors) / 3) / 2 if is_number else 0.0

        for g in (0, 1):
            for name, expected in (("w", models), ("velocity", velocity)):
                for a, b in zip(state[name].values(), expected[g], strict=True):
                    assert (a[g] - b).abs().max() < 1e-12
        for i in range(3):
            found_layers = [v[i] for k, v in personal.items() if k.startswith("own.")]
            for one, right in zip(found_layers, own[i] + heads[i], strict=True):
                assert (one - right).abs().max() < 1e-12
        expected_prior = [prior[one] for one in SETS]
        assert [state["guard"]["prior"][number_of(weights_of[one])].item() for one in SETS] == pytest.approx(
            expected_prior, abs=1e-12
        )
        assert state["guard"]["scale"].item() == pytest.approx(scale, abs=1e-12)
        assert state["for_group"][[0, 1, 2], [1, 0, 1]].tolist() == pytest.approx(evidence, abs=1e-10)
        assert state["for_pair"][[0, 1], [1, 0]].tolist() == pytest.approx(pairs, abs=1e-10)
        assert state["group"].tolist() == groups


# ----- the methods that it becomes, and what probing sees


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_group_without_momentum_is_fedavg(engine: str, weighting: str, ragged: Federation) -> None:
    options = {"likeness": -1.0, "server_momentum": 0.0, "weighting": weighting}
    shared = only(fit("attune", ragged, options=options, engine=engine), "shared.")
    average = models_of(fit("fedavg", ragged, options={"weighting": weighting}, engine=engine))
    # w + sum p (theta - w) and sum p theta differ by rounding.
    assert find_difference(shared, average) < 1e-14


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"likeness": -1.0, "guard": "equal"}, {"own_head": False}])
def test_the_own_model_is_that_of_training_alone(options: dict[str, Any], engine: str, ragged: Federation) -> None:
    own = only(fit("attune", ragged, cohort=6, options=options, engine=engine), "own.")
    alone = models_of(fit("local", ragged, cohort=6, engine=engine))
    # Products of another shape round otherwise.
    assert find_difference(own, alone) <= (0 if engine == "sequential" else 1e-14)


def split(sizes: list[tuple[int, int]], *, flip: bool = False) -> Federation:
    """Clients with these numbers of training and validation rows; `flip` changes the labels of validation rows."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for n_train, n_validation in sizes:
        parts: dict[str, Any] = {}
        for part, n in (("train", n_train), ("validation", n_validation), ("test", 4)):
            x = torch.randn(n, 5, generator=generator)
            y = (x[:, :3].argmax(1) + (flip and part == "validation")) % 3
            if n:
                parts[part] = (x, y)
        clients.append(parts)
    return fedattune.federation_from(clients, classes=["a", "b", "c"], validation=0.0)


SIZES = [(20, 11), (33, 130), (9, 3), (16, 0)]  # 128 rows are probed at once


@pytest.mark.parametrize("engine", ENGINES)
def test_probing_sees_the_validation_rows_before_training(engine: str) -> None:
    """What the server hears after a round comes from losses of the initial model, on all validation rows."""
    federation = split(SIZES)
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    result = fit("attune", federation, model, rounds=1, cohort=4, engine=engine, device="cpu")
    assert result.trained_server
    found: Any = result.trained_server.state["guard"]
    total = only_at({}, 1 / E)
    train, validation = federation.part("train"), federation.part("validation")
    for client in range(len(SIZES)):
        rows, held_out = torch.as_tensor(train[client]), torch.as_tensor(validation[client])
        counts = federation.y[rows].bincount(minlength=3).double() + 0.5
        with torch.no_grad():
            outputs = model.double()(federation.x[held_out].double())
        by_shares = [outputs + c * (counts / counts.sum()).log() for c in (0, 0, 0, 0, 0.5, 1)]
        each = torch.stack([one.softmax(1) for one in by_shares])  # all models are equal
        right = each[:, torch.arange(len(held_out)), federation.y[held_out]]
        losses = -(torch.tensor(EXPERTS, dtype=torch.float64) @ right).log().sum(1)
        total += (-losses).softmax(0)  # equal for the client without rows
    assert torch.allclose(found["prior"], 1 / E / 2 + total / (2 * (4 + 1)), rtol=0, atol=1e-12)
