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
from fedattune.core.faults import Fault
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.models import make_model
from fedattune.runs.callbacks import OnRound
from fedattune.runs.context import RunContext
from fedattune.server import Average
from fedattune.training.loop import RoundLoop
from fedattune.training.uploads.layer_measures import measure_layers
from fedattune.training.uploads.screening import CLIP, MAX_CLAIMED_WEIGHT, Screening, ScreenState, check_layers
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
    settings = {"accept": "harmless"} | settings
    algorithm = SimpleNamespace(client=SGD(), server=Average(settings.pop("weighting", "samples")))
    federation = SimpleNamespace(names=[f"c{i}" for i in range(CLIENTS)], classes=("a", "b", "c", "d"), kind="class")
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
        assert all(screened.upload.params[name] is value for name, value in reply.upload.params.items())
        assert screened.n is N
    assert not screen.state.evidence


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


def test_an_accomplice_does_not_switch_the_rule_on_layers_off() -> None:
    """Its values are finite, and the share that it keeps of a layer is not: no median of all shares is a number."""
    reply = change(make_reply(), 5, lambda w, _: 3e38 * torch.randn(w.shape).sign())
    reply = change(reply, 3, lambda w, s: -s, ("head.weight",))
    layers = measure_layers(reply.upload, reply.sent, are_models_sent=True)
    assert not layers["head"].shares[5].isfinite()
    faults: dict[int, Fault] = {}
    check_layers(layers, torch.ones(CLIENTS, dtype=torch.bool), faults)
    assert faults.keys() == {3, 5}
    assert "part head was reversed" in faults[3].detail


def test_rejected_uploads_do_not_say_which_share_of_a_layer_is_usual() -> None:
    reply = make_reply()
    for row in range(7):
        reply = change(reply, row, lambda w, s: -s, ("head.weight",))
    layers = measure_layers(reply.upload, reply.sent, are_models_sent=True)
    faults = {row: Fault("norm", "uploaded much") for row in range(6)}
    check_layers(layers, torch.ones(CLIENTS, dtype=torch.bool), faults)
    assert faults.keys() == set(range(7))


def test_every_layer_is_clipped_to_the_usual_norm() -> None:
    """No single client moves a layer by more than 3 median norms; what is smaller stays bit for bit."""
    reply = change(make_reply(), 3, lambda w, s: s + 4.5 * (w - s), ("head.weight",))
    screened = make_screen()(1, reply)
    assert not screened.rejected
    norms = {
        name: (screened.upload.params[name] - reply.sent.params[name]).flatten(1).norm(dim=1)
        for name in ("body.weight", "head.weight")
    }
    head = (reply.upload.params["head.weight"] - reply.sent.params["head.weight"]).flatten(1)
    assert norms["head.weight"][3].item() == pytest.approx(CLIP * head.norm(dim=1).median().item(), rel=1e-4)
    cosine = torch.cosine_similarity(
        (screened.upload.params["head.weight"] - reply.sent.params["head.weight"])[3].flatten(), head[3], dim=0
    )
    assert cosine.item() == pytest.approx(1, abs=1e-5)
    others = [row for row in range(CLIENTS) if row != 3]
    assert torch.equal(screened.upload.params["head.weight"][others], reply.upload.params["head.weight"][others])
    assert screened.upload.params["body.weight"] is reply.upload.params["body.weight"]


def test_a_median_of_two_clips_nobody() -> None:
    reply = change(make_reply(), 1, lambda w, s: s + 4 * (w - s))
    rows = torch.arange(2)
    two = replace(
        reply, ids=rows, sent=reply.sent.rows(rows), upload=reply.upload.rows(rows), buffers=Params(), n=N[:2]
    )
    assert make_screen()(1, two).upload is two.upload


def test_extras_and_statistics_are_limited_too() -> None:
    reply = make_reply()
    dc = (reply.upload.params - reply.sent.params).map(torch.clone)
    statistics = torch.randn(CLIENTS, 4)
    statistics[3], dc["head.weight"][3] = -1e3, 100.0
    reply = replace(
        reply,
        upload=reply.upload._replace(extra={"dc": dc, "affinity": Params(a=torch.full((CLIENTS, 2), 1e6))}),
        buffers=Params({"running_mean": statistics, "num_batches_tracked": torch.arange(CLIENTS)}),
    )
    screened = make_screen()(1, reply)
    norms = screened.upload.extra["dc"]["head.weight"].flatten(1).norm(dim=1)
    assert norms[3].item() == pytest.approx(CLIP * dc["head.weight"].flatten(1).norm(dim=1).median().item(), rel=1e-4)
    assert float(screened.buffers["running_mean"].abs().max()) < 30
    others = [row for row in range(CLIENTS) if row != 3]
    assert torch.equal(screened.buffers["running_mean"][others], statistics[others])
    assert torch.equal(screened.buffers["num_batches_tracked"], torch.arange(CLIENTS))
    assert screened.upload.extra["affinity"] is reply.upload.extra["affinity"]  # no model: only checked to be finite


def test_who_trained_alone_is_not_judged_by_the_length_of_its_update() -> None:
    reply = change(make_reply(), 3, lambda w, s: s + 10 * (w - s))
    screened = make_screen()(1, replace(reply, alone=frozenset([3])))
    assert not screened.rejected
    norms = (screened.upload.params - reply.sent.params)["body.weight"].flatten(1).norm(dim=1)
    assert norms[3].item() == pytest.approx(CLIP * norms.median().item(), rel=1e-4)


def test_nobody_is_blamed_for_who_trained_alone() -> None:
    """A client on trial went on alone, but does not say that it was harmed."""
    screen, reply = make_screen(), make_reply()
    screen(1, change(reply, 5, lambda w, s: s - (w - s)))
    assert not screen(2, replace(make_reply(), alone=frozenset(range(12)))).rejected


def test_attackers_do_not_set_what_is_usual_while_most_train_alone() -> None:
    screen, reply = make_screen(), make_reply()
    screen(1, reply)
    usual = screen.state.usual
    for row in (9, 10, 11):
        reply = change(reply, row, lambda w, s: s + 1e4 * (w - s))
    assert list(screen(2, replace(reply, alone=frozenset(range(9)))).rejected) == [9, 10, 11]
    assert screen.state.usual == usual


def test_a_new_cohort_blames_nobody() -> None:
    """What clients refuse that were away for a round may have come of older rounds."""
    screen, reply = make_screen(), make_reply()
    reply = change(change(reply, 5, lambda w, s: s - (w - s)), 6, lambda w, s: s - (w - s))
    first = torch.arange(3, 12)
    screen(1, replace(reply, ids=first, sent=reply.sent.rows(first), upload=reply.upload.rows(first), n=N[:9]))
    assert not screen(2, replace(make_reply(2), refused=frozenset(range(12)))).rejected


def harm(screen: Screen, culprits: list[int], refusing: list[int], r: int = 1) -> RoundUploads:
    """Let `culprits` send updates against the others in one round, and `refusing` clients point back in the next."""
    reply = make_reply(r)
    for row in culprits:
        reply = change(reply, row, lambda w, s: s - (w - s))
    screen(r, reply)
    return screen(r + 1, replace(make_reply(r), refused=frozenset(refusing)))


def test_who_led_to_what_most_refuse_is_rejected_and_stays_out() -> None:
    screen = make_screen()
    screened = harm(screen, [5, 6], [*range(5), 7, 8, 9])
    assert list(screened.rejected) == [5, 6]
    assert "most clients refused" in screened.rejected[5].detail
    assert list(screen(3, make_reply(3)).rejected) == [5, 6]


@pytest.mark.parametrize(
    ("culprits", "refusing"),
    [
        ([5, 6], [0, 1, 2, 3, 4, 7]),  # half is no majority
        ([], list(range(12))),  # nobody stands out
        ([1, 3, 5, 7, 9], list(range(12))),  # too many do
    ],
)
def test_nobody_is_blamed(culprits: list[int], refusing: list[int]) -> None:
    screened = harm(make_screen(), culprits, refusing)
    assert not screened.rejected


def test_attackers_who_refuse_do_not_decide_who_is_blamed() -> None:
    """Honest updates have a cosine of 0.2 with each other, and those of four attackers are all alike."""
    reply = make_reply(1, agreement=0.2)
    mean = (reply.upload.params - reply.sent.params).map(lambda v: v[:8].mean(0))
    for row in range(8, 12):
        for name in mean:
            reply = change(reply, row, lambda w, s, name=name: s - mean[name] / 0.3**0.5, (name,))
    screen = make_screen()
    for r in (1, 2):
        screened = screen(r, replace(reply, refused=frozenset(range(12))))
    assert list(screened.rejected) == [8, 9, 10, 11]


def test_false_refusals_frame_nobody() -> None:
    """Five of twelve clients that refuse all the time are no majority, whatever they upload."""
    screen = make_screen()
    for r in range(1, 20):
        reply = make_reply(r)
        for row in range(5):
            reply = change(reply, row, lambda w, s: s - (w - s))
        assert not screen(r, replace(reply, refused=frozenset(range(5)))).rejected


def test_the_state_goes_through_a_checkpoint() -> None:
    screen = make_screen()
    harm(screen, [5], list(range(10)))
    screen.state.rejected[4] = Counter({"uploaded nonsense": 2})
    stored = dump_state(screen.step, screen.state)
    tensors = Params({k: v for k, v in stored.tensors.items() if isinstance(v, torch.Tensor)})
    loaded = load_state(ScreenState(), json.loads(json.dumps(stored.values)), tensors)
    assert torch.equal(loaded.last_updates, screen.state.last_updates)
    rest = {"last_updates": torch.zeros(0)}
    assert replace(loaded, **rest).__dict__.keys() == screen.state.__dict__.keys()
    for name in screen.state.__dict__.keys() - rest.keys():
        assert getattr(loaded, name) == getattr(screen.state, name)
    assert loaded.evidence[5] > 0


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
    """The default of deployments costs nobody: clipping and refusals change little, and nobody is blamed."""
    more: dict[str, Any] = {"rounds": 12, "lr": 0.05, "eval_every": 12, "cohort": cohort}
    runs = [
        fedattune.fit(digits, name, "dnn", screening=screening, accept=accept, **more)
        for screening, accept in (("on", "harmless"), ("off", "always"))
    ]
    assert not runs[0].store.faults()
    assert runs[0].metrics["acc_uniform"] > runs[1].metrics["acc_uniform"] - 0.02


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("fedavg", "negated_model"),
        ("ditto", "gaussian"),
        ("fedmcsa", "negated_model"),
        ("pfedla", "against_mean"),
        ("ditto", "against_mean@/2"),
        ("fedfomo", "victim_head"),
        ("mocha", "negated_model"),  # which sends no model to compare uploads with
    ],
)
def test_attackers_cost_honest_clients_little(name: str, attack: str, digits: Federation) -> None:
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


@pytest.mark.parametrize("name", ["fedavg", "pfedla"])
def test_attackers_cannot_keep_others_from_learning(name: str, digits: Federation) -> None:
    """In slow training, everything is bad and nothing is worse than the best: without trials alone, 56 points go."""
    more: dict[str, Any] = {"rounds": 50, "lr": 0.05, "eval_every": 50, "steps": 3}
    attacked = fedattune.fit(digits, name, "dnn", attack="dead_units", attackers=4, **more)
    assert attacked.metrics["acc_uniform"] > 0.75


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_who_counts_more_is_clipped_to_less(weighting: Any) -> None:
    """Where samples weigh, three times the norm is allowed to the median client, and one norm to one of 150 samples."""
    reply = change(change(make_reply(), 4, lambda w, s: s + 4 * (w - s)), 5, lambda w, s: s + 4 * (w - s))
    n = N.clone()
    n[5] = 150
    screened = make_screen(weighting=weighting)(1, reply, n)
    norms = (screened.upload.params - reply.sent.params)["body.weight"].flatten(1).norm(dim=1)
    usual = norms[[0, 1, 2, 3]].median()
    assert norms[4] / usual == pytest.approx(3.0, rel=0.1)
    assert norms[5] / usual == pytest.approx(1.0 if weighting == "samples" else 3.0, rel=0.1)


@pytest.mark.parametrize(("name", "attack"), [("scaffold", "false_refusal"), ("vrl_sgd", "steer:3")])
def test_corrections_do_not_spoil_the_own_models(name: str, attack: str, digits: Federation) -> None:
    """Clients that make no progress take plain steps; with corrections, these lose 22 and 12 points."""
    more: dict[str, Any] = {"rounds": 30, "lr": 0.05, "eval_every": 30}
    attacked = fedattune.fit(digits, name, "dnn", attack=attack, attackers=4, **more)
    honest = fedattune.fit(digits, name, "dnn", **more)
    assert attacked.metrics["acc_uniform"] > honest.metrics["acc_uniform"] - 0.05


def test_a_resumed_run_refuses_as_the_whole_run_does(digits: Federation, tmp_path: Path) -> None:
    more: dict[str, Any] = {"rounds": 8, "lr": 0.05, "attack": "against_mean@2", "attackers": 4}
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


@pytest.mark.parametrize(("name", "own", "mean", "factor"), [("feddyn", "g", "z", -10.0), ("scaffold", "c", "c", 1.0)])
def test_who_is_rejected_forgets_its_corrections_as_the_server_does(
    name: str, own: str, mean: str, factor: float, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 is rejected in rounds 1 and 3: the server's variate stays the mean of those that clients keep."""
    kept: list[Params] = []

    def reject(self: Screening, state: Any, uploads: RoundUploads, context: StepContext) -> tuple[Any, RoundUploads]:
        faults = {1: Fault("rejected", "was made up")} if uploads.round != 2 else {}
        return state, uploads.reject(faults)

    monkeypatch.setattr(Screening, "on_server", reject)
    module = make_model("dnn", ragged, options={"hidden": 6}, seed=0)
    settings = Settings(rounds=3, steps=2, batch_size=16, cohort=6, dtype="float64")
    loop = RoundLoop(ALGORITHMS[name](), ragged, module, settings, {"algorithm": name})
    states = loop.backend.client_states  # type: ignore[attr-defined]
    loop.run([OnRound(lambda _: kept.append(states.local_state[own].rows(torch.tensor([1]))))])
    first, second, third = (one["1.weight"] for one in kept)
    assert not first.any()
    assert second.any()
    assert torch.equal(second, third)
    for key, value in loop.server.state[mean].items():
        torch.testing.assert_close(value, factor * states.local_state[own][key].mean(0))
