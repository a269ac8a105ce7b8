"""Clients that accept better models only: what they refuse, and what they go on with."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.table import CASES, KINDS
from conformance.test_conformance import RUN, fit
from fedattune import Federation, Result, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.pfedla import PFedLAServer
from fedattune.core.params import Params
from fedattune.core.payload import LocalState, Payload, RoundContext
from fedattune.models import make_model
from fedattune.models.files import wrap_model
from fedattune.training.backends.local import LocalBackend
from fedattune.training.clients.acceptance import (
    DECISION,
    MAX_ROWS,
    MEMORY,
    ON_TRIAL,
    OWN,
    Accepting,
    Refusals,
    find_policy,
    sample_rows,
    update_decision,
)
from fedattune.training.loop import RoundLoop
from fedattune.training.server import Server
from fedattune.training.setup import make_run_context
from fedattune.training.uploads.step import RoundUploads
from federations import make_federation
from remote_runs import Here, same_numbers, trained

pytestmark = pytest.mark.usefixtures("unmeasured")

BY_NAME = {case.name: case for case in CASES}
REMOTE = ["fedmcsa", "fedrep", "ditto", "fedala", "mocha"]
ACCEPT: dict[str, Any] = {"accept": "better", "cohort": 6}


@pytest.fixture(scope="module")
def judging() -> Federation:
    """Six clients with validation rows enough that noise is not better by chance."""
    data = make_federation([100, 110, 120, 130, 140, 150])
    assert int(data.sizes("validation").min()) >= 7
    return data


def same_models(one: Result, other: Result, tolerance: float = 0.0) -> None:
    for name, values in one.models.items():
        torch.testing.assert_close(other.models[name], values, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "vrl_sgd", "pfedla"])
def test_who_refuses_everything_trains_alone(name: str, judging: Federation) -> None:
    """Noise of a hundred times the norm is worse than anything: from round 2 on, all go on by themselves."""
    noise: dict[str, Any] = {"attack": "gaussian:100", "attackers": 2, "early_stopping": "off", "rounds": 4, "steps": 3}
    refusing = fit(judging, name, **ACCEPT, **noise)
    alone = fit(judging, "local", **noise)
    trained = [client.trained for client in refusing.clients]
    assert trained == pytest.approx([client.trained for client in alone.clients])
    for one, other in zip(refusing.history, alone.history, strict=True):
        assert one["trained"]["loss_uniform"] == pytest.approx(other["trained"]["loss_uniform"], abs=1e-9)
    refusals = refusing.facts["refusals"]
    honest = [client.id for client in refusing.clients]
    assert all(refusals["clients"][one] == 3 for one in honest)  # of four rounds; the first model is everybody's
    assert [r for r, _ in refusals["rounds"]] == [2, 3, 4]


def test_clients_without_validation_rows_accept_everything() -> None:
    data = make_federation([40, 6, 40])
    assert data.sizes("validation").tolist()[1] == 0
    result = fit(data, "fedavg", accept="better", cohort=3, attack="gaussian:100", attackers=1)
    assert "1" not in result.facts["refusals"]["clients"]
    assert "1 client has no validation rows and accepts everything (--accept better)" in result.notes


def test_notes_say_how_much_was_refused() -> None:
    """One model of a thousand is refused; clients of six rows have none for validation."""
    for sizes, who in (([40, 6], "1 client has no validation rows and accepts"), ([40, 6, 6], "2 clients have no")):
        context = make_run_context(
            ALGORITHMS["fedavg"](), make_federation(sizes), nn.Linear(5, 3), Settings(accept="better")
        )
        refusals = Refusals(context)
        refusals.add_round(1, [0], 1000)
        share, without = refusals.notes("fedavg")
        assert share == "fedavg: clients refused <1% of the models that they were sent (--accept better)"
        assert without.startswith(who)


@pytest.mark.parametrize("name", KINDS)
def test_both_engines_give_the_same(name: str, judging: Federation) -> None:
    attacked: dict[str, Any] = {"attack": "negated_model", "attackers": 2, "options": BY_NAME[name].same}
    one, other = (
        fit(judging, name, **(ACCEPT | {"cohort": 4}), **attacked, engine=engine)
        for engine in ("sequential", "vectorized")
    )
    same_models(one, other, 1e-7)  # sums in another order, in float64, through three rounds
    assert one.facts.get("refusals") == other.facts.get("refusals")


@pytest.mark.parametrize("name", REMOTE)
def test_remote_clients_refuse_the_same(name: str, judging: Federation) -> None:
    settings: dict[str, Any] = {"accept": "better", "attack": "negated_model", "attackers": 2}
    runs = [trained(BY_NAME[name], judging, backend, **settings) for backend in (None, Here)]
    same_numbers(*runs)
    assert runs[0].facts["refusals"] == runs[1].facts["refusals"]


@pytest.mark.parametrize("before", [None, Here])
@pytest.mark.parametrize("name", ["fedavg", "fedmcsa"])
def test_a_resumed_run_refuses_the_same(name: str, before: Any, judging: Federation, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accept": "better", "attack": "negated_model", "attackers": 2}
    case, out, rounds = BY_NAME[name], tmp_path / "run", iter(range(1, 9))
    part = trained(case, judging, before, out=out, stop=lambda: next(rounds) == 2, **settings)
    assert not part.is_finished
    whole, resumed = (trained(case, judging, None, **settings), trained(case, judging, None, out=out, **settings))
    same_numbers(whole, resumed)
    assert whole.facts["refusals"] == resumed.facts["refusals"]


def test_fednova_with_equal_steps_is_fedavg_also_after_refusals(judging: Federation) -> None:
    """Whoever trains from its own model sends its update per step from the model that the server sent."""
    nova, average = (fit(judging, name, **ACCEPT, rounds=5, lr=0.5) for name in ("fednova", "fedavg"))
    assert nova.facts["refusals"] == average.facts["refusals"]
    assert len(nova.facts["refusals"]["rounds"]) >= 2
    same_models(nova, average, 1e-9)


def make_refusing(name: str) -> tuple[Accepting, LocalState, Params]:
    """The client rule of a method on models of 2 features and 3 classes, its state, and a first model."""
    data = make_federation([40] * 3, features=4)
    algorithm = ALGORITHMS[name]()
    assert algorithm.network
    module = wrap_model(algorithm.network, make_model("dnn", data, options={"hidden": 2}, seed=0), torch.zeros(2, 4), 0)
    w0 = Params({k: v.detach() for k, v in module.named_parameters()})
    rule = Accepting(algorithm.client, "better")
    return rule, rule.init_local_state(w0), w0


def train_on_ones(rule: Accepting, state: LocalState, sent: Params) -> tuple[Payload, LocalState]:
    """Train two steps of 0.1 on gradients of 1: each is of four samples, of classes 0 and 1 in equal parts."""
    context = RoundContext(0.1, torch.tensor(2.0), torch.tensor(1.0), 1)

    def grad(w: Params, batch: Any, statistics: bool = True) -> Params:
        return Params({**w.map(torch.ones_like), "counts": torch.tensor([2.0, 2.0, 0.0])})

    carry = rule.begin(Payload(sent), state, torch.tensor(True), context)
    for _ in range(2):
        carry = rule.step(carry, (torch.zeros(4, 4), torch.zeros(4)), grad, context)
    return rule.finish(carry, Payload(sent), state, context)


def test_the_own_model_of_fedproto_has_the_prototypes_that_it_was_sent() -> None:
    """And not the uploaded ones, which are multiplied by the share of the class."""
    rule, state, w0 = make_refusing("fedproto")
    sent = Params({**w0, "prototypes": torch.full_like(w0["prototypes"], 5.0), "known": torch.ones(3)})
    upload, state = train_on_ones(rule, state, sent)
    assert upload.params["known"].tolist() == [0.5, 0.5, 0.0]
    own = state[OWN]
    assert own["known"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(own["prototypes"], sent["prototypes"])
    torch.testing.assert_close(own["head.bias"], w0["head.bias"] - 0.2)


def test_the_own_model_of_fedgh_has_the_trained_head_which_does_not_travel() -> None:
    rule, state, w0 = make_refusing("fedgh")
    _, state = train_on_ones(rule, state, w0)
    torch.testing.assert_close(state[OWN]["head.bias"], w0["head.bias"] - 0.2)
    state = {**state, DECISION: Params(refused=torch.tensor(1.0))}
    attacked = Params({**w0, "head.bias": w0["head.bias"] + 9.0})
    upload, state = train_on_ones(rule, state, attacked)
    assert torch.equal(upload.params["head.bias"], attacked["head.bias"])
    torch.testing.assert_close(state[OWN]["head.bias"], w0["head.bias"] - 0.4)


def test_a_refusing_client_of_ifca_stays_in_its_cluster() -> None:
    """Its own model takes the place of the one that it chose last, though this was attacked and another is nearer."""
    rule = ALGORITHMS["ifca"](clusters=3).client
    models = Params(w=torch.tensor([[0.0, 0.0], [-50.0, -50.0], [9.0, 9.0]]), b=torch.tensor([0.0, -50.0, 9.0]))
    own = Params(w=torch.tensor([5.0, 6.0]), b=torch.tensor(4.0))
    replaced = rule.substitute(Payload(models.rows(1), {"models": models}), own)
    assert replaced.params == own
    assert replaced.extra["models"]["w"].tolist() == [[0.0, 0.0], [5.0, 6.0], [9.0, 9.0]]
    assert replaced.extra["models"]["b"].tolist() == [0.0, 4.0, 9.0]


def test_z_of_feddyn_is_what_clients_keep_though_some_refuse(judging: Federation) -> None:
    """z = -h / alpha, where h is the mean of all g_k; a client that distrusts others keeps its g_k."""
    module = make_model("dnn", judging, options={"hidden": 6}, seed=0)
    settings = Settings(**(RUN | ACCEPT | {"lr": 0.5, "rounds": 5, "cohort": 4}))
    loop = RoundLoop(ALGORITHMS["feddyn"](alpha=0.5), judging, module, settings, {"algorithm": "feddyn"})
    result = loop.run()
    assert sum(result.facts["refusals"]["clients"].values()) > 0
    kept = loop.backend.client_states.local_state["g"]  # type: ignore[attr-defined]
    for name, z in loop.server.state["z"].items():
        torch.testing.assert_close(z, -kept[name].mean(0) / 0.5)
    values = sum(v[0].numel() for v in kept.values())
    assert result.bytes_up == 4 * 5 * 8 * (values + 1)  # a flag beside each model


def test_mocha_goes_on_with_a_tie_to_the_own_model() -> None:
    """The gradient of the tie, lam1 (sent + Omega_tt w), is zero at the own model."""
    rule = ALGORITHMS["mocha"]().client
    sent = Payload(Params(w=torch.tensor([4.0])), {"omega": Params(own=torch.tensor(0.5))})
    assert rule.offered_model(sent)["w"].item() == -8.0
    own = Params(w=torch.tensor([3.0]))
    replaced = rule.substitute(sent, own)
    assert (replaced.params["w"] + 0.5 * own["w"]).item() == 0.0


def decide(before: dict[str, float], offered: float, own: float = 0.0) -> dict[str, float]:
    """Decide on one client's payload; the best model is given by its loss."""
    values = dict.fromkeys(("refused", *MEMORY), 0.0) | before
    for name, loss in (("quality", "best"), ("first", "first"), ("high", "high"), ("trial", "alone")):
        values[name] = 1 / (1 + values.pop(loss)) if loss in before else 0.0
    params = Params({k: torch.tensor([v]) for k, v in values.items()})
    losses = torch.tensor([offered]), torch.tensor([own])
    new = update_decision(params, losses[0], lambda: losses[1], lambda: losses)
    return {k: v.item() for k, v in new.items()}


@pytest.mark.parametrize(
    ("before", "offered", "own", "refused"),
    [
        ({}, 2.4, 2.3, 0),
        ({}, 3.2, 2.3, 1),  # the first offer is compared with the initial model
        ({"best": 1.0}, 1.39, 0.0, 0),
        ({"best": 1.0}, 1.41, 0.0, 1),  # above 1.3 of the best and 0.1
        ({"best": 1.0}, math.nan, 0.0, 1),
        ({"best": 1.0, "first": 1.9}, 2.0, 1.89, 1),
        ({"best": 1.0, "first": 1.9}, 2.0, 1.91, 0),  # the own model is hardly better: its rows are learnt by heart
        ({"best": 1.0, "first": 2.1}, 2.0, 1.91, 1),  # not if it once learnt something: its own model may be spoilt
        ({"best": 1.0, "first": 1.9}, math.inf, math.inf, 1),
        ({"best": 1.0, "stalled": 1}, 0.99, 0.2, 0),
        ({"best": 1.0, "stalled": 2}, 0.99, 0.2, 1),  # three rounds without progress, and far above the own model
        ({"best": 1.0, "stalled": 2}, 0.94, 0.2, 0),  # 6% are progress
        ({"best": 1.0, "stalled": 2}, 0.99, 0.7, 0),  # the own model is not clearly better
    ],
)
def test_what_is_harmful(before: dict[str, float], offered: float, own: float, refused: int) -> None:
    assert decide(before, offered, own)["refused"] == refused


def test_who_excuses_a_model_takes_no_more_corrections() -> None:
    excused = decide({"best": 1.0, "first": 1.9}, 2.0, 1.91)
    assert (excused["refused"], excused["distrusts"]) == (0, 1)


def test_what_a_client_remembers() -> None:
    better = decide({"best": 1.0, "stalled": 2}, 0.5)
    assert (1 / better["quality"] - 1, better["stalled"], better["distrusts"]) == (pytest.approx(0.5), 0, 0)
    worse = decide({"best": 1.0}, 2.0)
    assert (1 / worse["quality"] - 1, worse["stalled"], worse["distrusts"]) == (pytest.approx(1.0), 1, 1)
    stalled = decide({"best": 1.0, "stalled": 2}, 0.99)
    assert (stalled["refused"], stalled["stalled"], stalled["distrusts"]) == (1, 3, 1)
    kept = decide({"best": 1.0, "stalled": 2}, 0.99, own=2.0)  # nothing is better: the corrections may be why
    assert (kept["refused"], kept["distrusts"]) == (0, 1)
    again = decide({"best": 1.0, "distrusts": 1.0}, 0.5)
    assert (again["refused"], again["distrusts"]) == (0, 1)


@pytest.mark.parametrize(
    ("before", "offered", "own", "refused", "stalled", "distrusts", "high"),
    [
        ({"best": 1.9, "stalled": 2}, 1.9, 1.8, ON_TRIAL, 3, 0, 1),  # nobody learns: alone for three rounds
        ({"best": 0.9, "stalled": 2}, 0.9, 0.8, 0, 3, 1, 1),  # half of the way is enough
        ({"best": 1.9, "stalled": 4, "alone": 1.8}, 1.9, 1.8, ON_TRIAL, 5, 0, 1),
        ({"best": 1.9, "stalled": 5, "alone": 1.8}, 1.9, 1.75, 0, 0, 0, 1.5),  # alone, it learns no more either
        ({"best": 1.9, "stalled": 5, "alone": 1.8}, 1.9, 1.7, ON_TRIAL, 3, 0, 1),  # it does: three rounds more
        ({"best": 1.9, "stalled": 5, "alone": 1.2}, 1.9, 1.2, 1, 6, 1, 1),  # the own model is clearly better
        ({"best": 1.9, "stalled": 4, "alone": 1.8}, 1.8, 1.8, 0, 0, 0, 1),  # progress
    ],
)
def test_a_client_that_is_kept_from_learning_trains_alone(
    before: dict[str, float], offered: float, own: float, refused: float, stalled: int, distrusts: int, high: float
) -> None:
    after = decide({"high": 1.0, **before}, offered, own)
    assert (after["refused"], after["stalled"], after["distrusts"]) == (refused, stalled, distrusts)
    assert 1 / after["high"] - 1 == pytest.approx(high)
    if stalled == 3 and refused == ON_TRIAL:
        assert 1 / after["trial"] - 1 == pytest.approx(own)


def test_training_rows_do_not_count_in_a_trial() -> None:
    before = Params({name: torch.zeros(1) for name in ("refused", *MEMORY)})
    before = Params(
        {**before, **{k: torch.tensor([1 / (1 + v)]) for k, v in (("quality", 2), ("high", 1), ("trial", 2))}}
    )
    before["stalled"] = torch.tensor([5.0])
    for held_out, refused in ((2.0, 0), (1.0, 1)):
        losses = torch.tensor([2.0]), torch.tensor([held_out])
        new = update_decision(before, torch.tensor([2.0]), lambda: torch.tensor([0.1]), lambda losses=losses: losses)
        assert new["refused"].item() == refused


@pytest.mark.parametrize(("held_out", "refused"), [((0.8, 0.9), 0), ((0.9, 0.8), 1), ((0.0, 0.0), 1)])
def test_a_client_does_not_stay_alone_because_it_knows_its_rows_by_heart(
    held_out: tuple[float, float], refused: float
) -> None:
    before = Params({name: torch.zeros(1) for name in ("refused", *MEMORY)})
    before = Params({**before, "quality": torch.tensor([0.5]), "stalled": torch.tensor([2.0])})
    other, own = (torch.tensor([loss]) for loss in held_out)  # both are 0 without validation rows
    new = update_decision(before, torch.tensor([0.99]), lambda: torch.tensor([0.2]), lambda: (other, own))
    assert new["refused"].item() == refused


def test_the_default_is_for_where_a_client_may_be_malicious() -> None:
    assert find_policy(Settings()) is None
    assert find_policy(Settings(attack="ipm")) == "harmless"
    assert find_policy(Settings(attack="ipm", accept="always")) is None
    private: dict[str, Any] = {"dp_client_noise": 1.0, "dp_client_clip": 1.0}
    assert find_policy(Settings(attack="ipm", **private)) is None


def test_rows_on_which_models_are_compared() -> None:
    data = make_federation([40, 300, 6])
    rows = sample_rows(data, takes_training=True)
    assert rows.sizes("validation").tolist() == [
        40 - len(data.part("test")[0]),
        MAX_ROWS,
        6 - len(data.part("test")[2]),
    ]
    assert set(data.part("validation")[1]) <= set(rows.part("validation")[1])
    assert not set(rows.part("validation")[1]) & set(data.part("test")[1])
    assert torch.equal(sample_rows(data, takes_training=False).sizes("validation"), data.sizes("validation"))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedala", "pfedla", "scaffold"])
def test_engines_refuse_harm_alike(name: str, judging: Federation) -> None:
    attacked: dict[str, Any] = {"attack": "gaussian:100@2", "attackers": 2, "rounds": 5}
    more = {"accept": "harmless", "screening": "off", "options": BY_NAME[name].same}
    one, other = (fit(judging, name, **more, **attacked, engine=engine) for engine in ("sequential", "vectorized"))
    same_models(one, other, 1e-7)
    assert one.facts["refusals"] == other.facts["refusals"]
    assert {r for r, _ in one.facts["refusals"]["rounds"]} >= {4}  # what came of the attack in round 3


def test_pfedla_learns_from_where_clients_started(judging: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who refused in round 4 what came of the attack in round 3 started from its own last upload; nobody before."""
    starts, learn = [], PFedLAServer.learn

    def remember(self: Any, state: Any, ids: Tensor, sent: Params, uploads: Params) -> None:
        stored = state["theta"].rows(ids)
        starts.append([all(torch.equal(v[row], stored[k][row]) for k, v in sent.items()) for row in range(len(ids))])
        learn(self, state, ids, sent, uploads)

    monkeypatch.setattr(PFedLAServer, "learn", remember)
    attacked: dict[str, Any] = {"attack": "gaussian:100@2", "attackers": 2, "rounds": 4, "cohort": 6}
    result = fit(judging, "pfedla", accept="harmless", screening="off", **attacked)
    refusing = dict(result.facts["refusals"]["rounds"])
    assert [sum(flags) for flags in starts[:2]] == [0, 0]
    assert sum(starts[3]) == refusing[4] == 6


def test_claims_to_have_refused_count_only_where_clients_may_refuse(
    judging: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked: dict[str, Any] = {"attack": "scaled_update:100", "attackers": 2, "accept": "always", "cohort": 6}
    honest = fit(judging, "fedavg", screening="groups", **attacked)
    monkeypatch.setattr(LocalBackend, "_find_refusals", lambda self, ids, *_: (ids.tolist(), ids.tolist()))
    claimed = fit(judging, "fedavg", screening="groups", **attacked)
    assert len(honest.reports["screening"]["rejected"]) == 2
    assert claimed.reports == honest.reports


def test_the_server_replaces_the_starts_of_those_who_trained_alone(judging: Federation) -> None:
    server = Server(make_run_context(ALGORITHMS["pfedla"](), judging, nn.Linear(4, 3), Settings()), None)
    ids = torch.tensor([0, 2, 5])
    rows = Params(weight=torch.ones(3, 3, 4), bias=torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 3))
    server.state["theta"].put_rows(ids, rows)
    sent = rows.map(torch.zeros_like)
    uploads = RoundUploads(1, ids, Payload(sent), Payload(sent), Params(), ids + 1, alone=frozenset([1, 2]))
    replaced = server._replace_starts(uploads).params
    assert replaced["bias"][:, 0].tolist() == [0.0, 2.0, 0.0]
    assert replaced["weight"].sum((1, 2)).tolist() == [0.0, 12.0, 0.0]


@pytest.mark.parametrize("name", ["scaffold", "fedmcsa", "pfedla"])
def test_remote_clients_refuse_harm_alike(name: str, judging: Federation) -> None:
    settings: dict[str, Any] = {"attack": "gaussian:100@1", "attackers": 2}
    runs = [trained(BY_NAME[name], judging, backend, **settings) for backend in (None, Here)]
    same_numbers(*runs)
    assert runs[0].facts["refusals"] == runs[1].facts["refusals"]
    assert runs[0].reports == runs[1].reports
