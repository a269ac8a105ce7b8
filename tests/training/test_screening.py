"""Screening: what is refused, what is not, and what becomes of refused clients."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import fedattune
from fedattune import ConfigError, Federation, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.client import SGD
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.runs.context import RunContext
from fedattune.server import Average
from fedattune.training.uploads.screening import MAX_CLAIMED_WEIGHT, Screening, ScreenState
from fedattune.training.uploads.step import PastRounds, RoundUploads, StepContext, dump_state, load_state

pytestmark = pytest.mark.usefixtures("unmeasured")

CLIENTS = 12
N = torch.full((CLIENTS,), 50)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return fedattune.load_federation("digits", partition="dirichlet", clients=20)


class Screen:
    """A screening step with its state."""

    def __init__(self, step: Screening) -> None:
        self.step, self.state = step, step.init(CONTEXT)

    def __call__(self, r: int, uploads: RoundUploads, n: torch.Tensor | None = None) -> RoundUploads:
        uploads = replace(uploads, round=r, n=uploads.n if n is None else n)
        self.state, screened = self.step.on_server(self.state, uploads, CONTEXT)
        return screened


CONTEXT = cast(StepContext, None)


def make_screen(**settings: Any) -> Screen:
    are_claims = settings.pop("are_claims", True)
    algorithm = SimpleNamespace(client=SGD(), server=Average())
    federation = SimpleNamespace(names=[f"c{i}" for i in range(CLIENTS)], classes=("a", "b", "c", "d"))
    task = SimpleNamespace(params={"body.weight": torch.zeros(30, 20), "head.weight": torch.zeros(4, 30)})
    run = SimpleNamespace(
        task=task,
        settings=Settings(**settings),
        algorithm=algorithm,
        federation=federation,
        replies_immediately=False,
        n_train=torch.full((CLIENTS,), 50),
    )
    context = StepContext(cast(RunContext, run), counts_are_claimed=are_claims, has_one_model=True)
    return Screen(Screening(context))


def make_reply(seed: int = 0, agreement: float = 0.5) -> RoundUploads:
    """Make updates of equal norms that agree by about the same cosine."""
    torch.manual_seed(seed)
    sent = Params({"body.weight": torch.randn(30, 20), "head.weight": torch.randn(4, 30)}).repeat(CLIENTS)
    common = sent.map(lambda a: torch.randn(a.shape[1:]))
    upload = sent.map(
        lambda a, b: a + 0.1 * (agreement**0.5 * b + (1 - agreement) ** 0.5 * torch.randn(a.shape)), common
    )
    return RoundUploads(1, torch.arange(CLIENTS), Payload(sent), Payload(upload), Params(), N)


def change(
    reply: RoundUploads, row: int, f: Any, names: tuple[str, ...] = ("body.weight", "head.weight")
) -> RoundUploads:
    params = reply.upload.params.map(torch.clone)
    for name in names:
        params[name][row] = f(params[name][row], reply.sent.params[name][row])
    return replace(reply, upload=Payload(params))


def test_honest_uploads_pass_unchanged() -> None:
    screen, reply = make_screen(), make_reply()
    for r in range(1, 20):
        screened = screen(r, reply)
        assert screened.upload is reply.upload
        assert screened.n is N
    assert max(screen.state.evidence.values()) < 0


LIES = {
    "negated model": (lambda w, s: -w, "the usual norm"),
    "noise": (lambda w, s: torch.randn_like(w), "the usual norm"),
    "scaled update": (lambda w, s: s + 10 * (w - s), "the usual norm"),
    "not finite": (lambda w, s: w * float("nan"), "not finite"),
    "overflow": (lambda w, s: w * 1e30, "the usual norm"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_the_first_round(lie: str) -> None:
    f, reason = LIES[lie]
    reply = make_screen()(1, change(make_reply(), 3, f))
    assert reply.ids.tolist() == [i for i in range(CLIENTS) if i != 3]
    assert list(reply.rejected) == [3]
    assert reason in reply.rejected[3].detail
    assert len(reply.n) == len(reply.upload.params["head.weight"]) == CLIENTS - 1


def test_one_opposite_round_is_forgiven_and_several_are_not() -> None:
    lie = change(make_reply(), 5, lambda w, s: s - (w - s))
    screen = make_screen()
    assert not screen(1, lie).rejected
    assert screen.state.evidence[5] > 0
    screen(2, make_reply(2))
    assert screen.state.evidence[5] < 0  # honest rounds count for the client
    screen = make_screen()
    faults = [screen(r, lie).rejected for r in range(1, 13)]
    assert not faults[0]
    assert list(faults[-1]) == [5]
    assert "round after round" in faults[-1][5].detail


def test_the_state_goes_through_a_checkpoint() -> None:
    screen, lie = make_screen(), change(make_reply(), 5, lambda w, s: s - (w - s))
    for r in range(1, 3):
        screen(r, lie)
    screen.state.rejected[5] = Counter({"uploaded nonsense": 2})
    values, tensors = dump_state(screen, screen.state)
    assert not tensors
    assert load_state(ScreenState(), json.loads(json.dumps(values)), Params()) == screen.state
    assert screen.state.evidence


def test_claimed_counts_are_cut_and_known_counts_are_not() -> None:
    n = N.clone()
    n[4] = 10**6
    known, claimed, given = make_screen(are_claims=False), make_screen(), make_screen(max_weight=2)
    assert torch.equal(known(1, make_reply(), n).n, n)
    assert claimed(1, make_reply(), n).n.tolist() == [50] * 4 + [int(50 * MAX_CLAIMED_WEIGHT)] + [50] * 7
    claimed(2, change(make_reply(), 2, lambda w, s: w * torch.nan), n)
    facts = dict(claimed.step.report(claimed.state, PastRounds(2), CONTEXT).facts)
    sentences = facts.pop("sentences")
    assert facts == {"bounded_counts": ["c4"], "rejected": {"c2": {"uploaded values that are not finite": 1}}}
    assert sentences == [
        "the server rejected uploads of c2, which uploaded values that are not finite (1 round)",
        "the server cut the claimed sample counts of c4; --max-weight sets the limit",
    ]
    assert int(given(1, make_reply(), n).n.max()) == 100


@pytest.mark.parametrize(
    ("name", "cohort"),
    [
        ("fedavg", 1.0),
        ("fedmcsa", 1.0),
        ("fedmcsa", 3),  # the others go on from their last answers, and come back with long updates
        ("fedfomo", 1.0),
        ("scaffold", 0.5),
    ],
)
def test_no_honest_upload_is_refused(name: str, cohort: float, digits: Federation) -> None:
    runs = [
        fedattune.fit(digits, name, "dnn", rounds=12, lr=0.05, eval_every=12, screening=screening, cohort=cohort)
        for screening in ("on", "off")
    ]
    assert not runs[0].store.faults()
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("fedavg", "negated_model"),
        ("ditto", "gaussian"),
        ("fedmcsa", "negated_update"),
        ("fedfomo", "victim_head"),
        ("mocha", "negated_model"),  # which sends no model to compare uploads with
    ],
)
def test_liars_cost_honest_clients_little(name: str, attack: str, digits: Federation) -> None:
    """The target is 2 points after 50 rounds; 15 rounds are noisier, and without screening 10 to 80 are lost."""
    more: dict[str, Any] = {"rounds": 15, "lr": 0.05, "eval_every": 5}
    attacked = fedattune.fit(digits, name, "dnn", attack=attack, attackers=4, **more)
    honest = fedattune.fit(digits, name, "dnn", **more)
    ids = {client.id for client in attacked.clients}
    values = [getattr(c, honest.evaluation_point) for c in honest.clients if c.id in ids]
    assert len(ids) == 16
    assert attacked.metrics["acc_uniform"] > np.mean(values) - 0.06
    refused = {client for _, client, _ in attacked.store.faults()}
    assert {digits.names[i] for i in refused}.isdisjoint(ids)
    assert any("without" in note for note in attacked.notes)


def test_a_resumed_run_refuses_as_the_whole_run_does(digits: Federation, tmp_path: Path) -> None:
    more: dict[str, Any] = {"rounds": 8, "lr": 0.05, "attack": "negated_update", "attackers": 4}
    whole = fedattune.fit(digits, "pfedla", "dnn", **more)
    seen = iter([False, False, True])
    fedattune.fit(
        digits, "pfedla", "dnn", out=tmp_path / "run", callbacks=[fedattune.OnRound(lambda _: next(seen))], **more
    )
    resumed = fedattune.fit(digits, "pfedla", "dnn", out=tmp_path / "run", resume=True, **more)
    assert resumed.store.faults() == whole.store.faults() != []
    assert resumed.metrics == whole.metrics


def test_a_refused_model_leaves_the_bank() -> None:
    w0 = Params(a=torch.zeros(3))
    for name in ("pfedla", "mocha", "fedfomo"):
        rule = ALGORITHMS[name]().server
        state = rule.init(w0, 4)
        ids = torch.arange(4)
        sent = rule.broadcast(state, ids).payload
        uploads = Payload(Params(a=torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3, [1e6] * 3])))
        if name == "fedfomo":
            uploads = uploads._replace(extra={"affinity": Params(a=torch.zeros(4, 3))})
        state = rule.aggregate(state, ids, sent, uploads, torch.ones(4, dtype=torch.int64))
        assert float(torch.cat([v.flatten() for v in _models(rule, state)]).abs().max()) > 1e5
        state = rule.discard_uploads(state, torch.tensor([3]))
        assert float(torch.cat([v[:3].flatten() for v in _models(rule, state)]).abs().max()) < 100


def _models(rule: Any, state: Any) -> list[torch.Tensor]:
    payload = rule.broadcast(state, torch.arange(3)).payload
    peers = payload.extra.get("peers", Params())
    return [*payload.params.values(), *peers.values()]


def test_rules_say_if_they_do_nothing(digits: Federation) -> None:
    mixed = fedattune.fit(digits, "fedmcsa", "mlr", rounds=1, robust="median")
    assert any("robust=median has no effect" in note and "rows works" in note for note in mixed.notes)
    average = fedattune.fit(digits, "fedavg", "mlr", rounds=1, robust="rows", max_share=0.1)
    assert any("robust=rows has no effect" in note for note in average.notes)
    assert any("max_share has no effect" in note for note in average.notes)
    with pytest.raises(ConfigError, match="needs the names of trusted clients"):
        fedattune.fit(digits, "fedavg", "mlr", rounds=1, robust="trust")
    with pytest.raises(ConfigError, match="needs robust trust"):
        Settings.from_keywords(robust="median", trusted="0")
    with pytest.raises(ConfigError, match="no client is called nobody"):
        fedattune.fit(digits, "fedavg", "mlr", rounds=1, robust="trust", trusted="nobody")
