"""What every method must fulfil when clients are not asked, drop out, or join after training."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedattune
from conformance.table import CASES, KINDS, Case, some_methods
from conformance.test_conformance import RUN, distance, every_method, fit
from fedattune import Federation, Params, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.core.options import build
from fedattune.models import make_model
from fedattune.models.files import wrap_model
from fedattune.training.loop import RoundLoop
from fedattune.training.sampling import sample_cohort, sample_newcomers
from federations import make_federation

pytestmark = pytest.mark.usefixtures("unmeasured")


def start(case: Case, federation: Federation, **settings: Any) -> RoundLoop:
    """A run before its first round."""
    algorithm = build(case.name, ALGORITHMS[case.name], case.same)
    mine = Settings(**(RUN | settings))
    model = make_model("dnn", federation, options={"hidden": 6}, seed=mine.seed)
    if algorithm.network:
        model = wrap_model(algorithm.network, model, torch.zeros(2, *federation.input_shape), mine.seed)
    config = {"algorithm": case.name, **mine.to_keywords()}
    return RoundLoop(algorithm, federation, model, mine, config)


def held(run: RoundLoop, ids: list[int]) -> dict[str, Params]:
    """A copy of all that clients `ids` hold."""
    rows = torch.tensor(ids, dtype=torch.int64)
    own = {
        "personal": run.backend.client_states.personal,
        "buffers": run.backend.client_states.buffers,
        **run.backend.client_states.local_state,
    }
    return {k: v.rows(rows) for k, v in own.items()}


def same(a: dict[str, Params], b: dict[str, Params]) -> bool:
    return all(torch.equal(v, b[key][name]) for key, part in a.items() for name, v in part.items())


@every_method
def test_a_client_that_was_never_asked_holds_what_it_started_with(case: Case, ragged: Federation) -> None:
    """Where only the cohort trains; where all train, it has trained alone, and nothing of it has left."""
    run = start(case, ragged, cohort=2, rounds=2)
    first = held(run, list(range(6)))
    for r in (1, 2):
        run.run_round(r, should_evaluate=True)
    asked = {i for r in (1, 2) for i in sample_cohort(run.context.settings, 6, r).tolist()}
    never = sorted(set(range(6)) - asked)
    assert never
    if run.context.algorithm.participation.train == "cohort":
        assert same(held(run, never), {k: v.rows(torch.tensor(never)) for k, v in first.items()})
    elif first["personal"] or run.backend.client_states.local_state:
        assert not same(held(run, never), {k: v.rows(torch.tensor(never)) for k, v in first.items()})
    models, _ = run.backend.evaluated_models
    assert all(v.isfinite().all() for v in models.values())


@every_method
def test_what_a_client_did_before_it_dropped_out_is_lost(
    case: Case, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its upload never comes: the server knows nothing of it, and it holds what it held before the round."""
    run = start(case, ragged, cohort=4, drop_out=0.5, rounds=6)
    heard: list[set[int]] = []
    server = type(run.context.algorithm.server)
    aggregate = server.aggregate

    def spy(self: Any, state: Any, ids: Any, *rest: Any) -> Any:
        heard.append(set(ids.tolist()))
        return aggregate(self, state, ids, *rest)

    monkeypatch.setattr(server, "aggregate", spy)
    everybody = list(range(6))
    gone = 0
    for r in range(1, 7):
        before = held(run, everybody)
        heard.clear()
        run.run_round(r, should_evaluate=r == 6)
        away = run.record.absent
        gone += len(away)
        assert not set(away) & {i for ids in heard for i in ids}
        if away:
            rows = torch.tensor(away)
            assert same(held(run, away), {k: v.rows(rows) for k, v in before.items()})
    assert bool(gone) is run.context.has_shared_parameters  # alone, nobody is asked for anything
    monkeypatch.undo()
    if case.name not in KINDS:
        return
    results = [fit(ragged, case.name, drop_out=0.5, engine=e, options=case.same) for e in ("sequential", "vectorized")]
    assert distance(*results) < 1e-12
    assert any("dropped out" in note for note in results[0].notes) is run.context.has_shared_parameters


@every_method
def test_clients_that_join_after_training(case: Case, ragged: Federation, tmp_path: Any) -> None:
    """A newcomer gets a model that training made good, improves it, and changes nothing for the others."""
    new = make_federation([30, 44, 25], seed=0)
    settings = {"rounds": 6, "cohort": 6, "options": case.same, **case.learns}
    settings["eval_every"] = settings["rounds"]
    out = {"out": tmp_path / "run"} if case.name in KINDS else {}
    result = fit(ragged, case.name, **out, **settings)
    assert result.trained_server
    state, models = copy.deepcopy(result.trained_server.state), result.models.map(torch.clone)
    joined = fedattune.personalize(result, new, rounds=3)
    assert all(v.isfinite().all() for v in joined.models.values())
    assert [n.id for n in joined.newcomers] == list(new.names)
    initial = fit(new, case.name, rounds=1, lr=1e-12, options=case.same)
    assert joined.final["trained"]
    assert initial.final["trained"]
    assert joined.final["trained"]["loss_uniform"] < initial.final["trained"]["loss_uniform"]
    for key, value in state.items():
        kept = result.trained_server.state[key]
        if isinstance(value, Params):
            assert isinstance(kept, Params)
            assert all(torch.equal(v, kept[name]) for name, v in value.items())
        else:
            assert isinstance(kept, torch.Tensor)
            assert torch.equal(value, kept)
    assert all(torch.equal(v, result.models[k]) for k, v in models.items())
    if not out:
        return
    again = fedattune.personalize(fedattune.Result.load(tmp_path / "run"), new, rounds=3)
    assert distance(joined, again) == 0
    assert joined.newcomers == again.newcomers


@some_methods
def test_held_out_clients_are_reported(case: Case, ragged: Federation) -> None:
    result = fit(ragged, case.name, held_out=2, join_rounds=2, cohort=3)
    ids = {client.id for client in result.clients}
    assert len(ids) == 4
    assert {n.id for n in result.newcomers} | ids == set(ragged.names)
    assert all(0 <= value <= 1 for n in result.newcomers for value in (n.received, n.trained, n.local))


def test_every_seed_holds_out_the_same_clients(ragged: Federation) -> None:
    names = [{n.id for n in fit(ragged, "local", held_out=2, seed=s, rounds=1).newcomers} for s in range(4)]
    assert names[1:] == names[:1] * 3


@pytest.mark.parametrize("name", ["fedavg", "fedmcsa", "pfedla", "fedrod", "mocha"])
def test_one_client_alone_can_join(name: str, ragged: Federation) -> None:
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    joined = fedattune.personalize(fit(ragged, name), {"mine": (x, y)}, rounds=2)
    assert [n.id for n in joined.newcomers] == ["mine"]
    assert all(v.isfinite().all() for v in joined.model("mine").parameters())


@pytest.mark.parametrize("options", [{"omega": "mean"}, {"omega": "learned"}])
def test_newcomers_of_mocha_do_not_change_each_other(options: dict[str, Any], ragged: Federation) -> None:
    run, both = fit(ragged, "mocha", options=options), make_federation([30, 44])
    first, _ = both.clients
    one, two = (fedattune.personalize(run, data, rounds=3) for data in (replace(both, clients=[first]), both))
    assert all(torch.allclose(v[0], two.models[k][0], rtol=0, atol=1e-12) for k, v in one.models.items())


def test_clients_join_a_run_that_was_attacked(ragged: Federation, tmp_path: Any) -> None:
    """The attackers are gone: there may be fewer newcomers than the run had attackers."""
    result = fit(ragged, "fedmcsa", attack="negated_model", attackers=2, out=tmp_path / "run")
    new = make_federation([30, 44])
    joined, again = (
        fedattune.personalize(one, new, rounds=1) for one in (result, fedattune.Result.load(tmp_path / "run"))
    )
    assert len(joined.newcomers) == 2
    assert joined.newcomers == again.newcomers


def test_a_newcomers_model_is_saved_and_loaded(ragged: Federation, tmp_path: Any) -> None:
    for name in ("fedavg", "fedam"):
        joined = fedattune.personalize(fit(ragged, name, rounds=1), make_federation([30, 44]), rounds=1)
        (file, _) = joined.save_models(tmp_path / name)
        loaded, own = fedattune.load_model(file), joined.model(0)
        assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in own.state_dict().items())


def test_newcomers_that_diverge_do_not_cost_the_run(ragged: Federation, tmp_path: Any) -> None:
    (last,) = sample_newcomers(Settings(held_out=1), ragged)
    x = ragged.x.clone()
    x[ragged.clients[last].train] *= 1e300
    broken = replace(ragged, x=x.double() * 1.0)
    result = fit(broken, "fedavg", held_out=1, out=tmp_path / "run")
    assert result.is_finished
    assert result.newcomers == []
    assert "of the clients that join after training: round 1: training diverged" in result.notes[-1]
    assert fedattune.Result.load(tmp_path / "run").metrics == result.metrics


@pytest.mark.parametrize("name", ["scaffold", "vrl_sgd", "igfl"])
def test_corrections_that_need_the_group_leave_newcomers_alone(name: str, ragged: Federation) -> None:
    """The server learns nothing from them, so their control variates would never balance: they take plain steps."""
    result = fit(ragged, name, rounds=6, cohort=6)
    plain = fit(ragged, "fedavg", rounds=6, cohort=6, options={"weighting": "uniform"})
    assert result.trained_server
    assert plain.trained_server
    new = make_federation([30, 44])
    joined = fedattune.personalize(result, new, rounds=5)
    by_sgd = fedattune.personalize(
        replace(
            plain,
            trained_server=replace(
                plain.trained_server, state={**plain.trained_server.state, "w": result.trained_server.state["w"]}
            ),
        ),
        new,
        rounds=5,
    )
    assert joined.final["trained"] == pytest.approx(by_sgd.final["trained"], abs=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "vrl_sgd"])
def test_clients_that_train_unasked_keep_their_control_variates(name: str, ragged: Federation) -> None:
    case = next(case for case in CASES if case.name == name)
    run = start(case, ragged, cohort=2, rounds=3, train="all")
    key = {"scaffold": "c", "vrl_sgd": "D"}[name]
    asked: set[int] = set()
    for r in (1, 2, 3):
        run.run_round(r, should_evaluate=False)
        asked |= set(sample_cohort(run.context.settings, 6, r).tolist())
        for client in set(range(6)) - asked:
            assert all((v[client] == 0).all() for v in run.backend.client_states.local_state[key].values())
    assert asked != set(range(6))


def test_what_is_wrong_with_new_clients_is_said(ragged: Federation) -> None:
    result = fit(ragged, "fedavg")
    with pytest.raises(fedattune.DataError, match=r"do not fit the run: got inputs of shape \(7,\)"):
        fedattune.personalize(result, make_federation([20, 20], features=7))
    for rounds in (0, -1, "x", 1.5):
        with pytest.raises(fedattune.ConfigError, match="rounds"):
            fedattune.personalize(result, make_federation([20, 20]), rounds=rounds)  # type: ignore[arg-type]
    with pytest.raises(fedattune.ConfigError, match="held_out: got 6, expected fewer than the 6"):
        fit(ragged, "fedavg", held_out=6)
