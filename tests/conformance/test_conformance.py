"""What every method must fulfil, on both engines."""

import inspect
import pickle
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch

import fedattune
from conformance.problems import PROBLEMS, SETTINGS
from conformance.table import CASES, KINDS, Case, Sizes, some_methods
from fedattune import Algorithm, Broadcast, Federation, Params, Payload, Result, Settings
from fedattune import engine as engines
from fedattune.algorithms import ALGORITHMS
from fedattune.core.io import flatten_tree
from fedattune.core.options import build, list_options
from fedattune.core.selectors import Head, NoParameters
from fedattune.engine import base as engines_base
from fedattune.engine import vectorized
from fedattune.engine.compiler import compile as compiler
from fedattune.engine.compiler.compile import CompiledStep, compile_step
from fedattune.models import make_model
from fedattune.runs.rows import RowStorage
from fedattune.server.wrapper import ServerWrapper
from fedattune.training.sampling import sample_cohort
from fedattune.training.setup import build_trained_module, init_server, make_run_context

pytestmark = pytest.mark.usefixtures("unmeasured")
every_method = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
RUN: dict[str, Any] = {"rounds": 3, "cohort": 3, "steps": 2, "batch_size": 16, "lr": 0.1, "dtype": "float64"}


def fit(federation: Federation, name: str, model: str = "dnn", **settings: Any) -> Result:
    chosen = settings.pop("options", {})
    hidden = {"hidden": 6} if model == "dnn" else {}
    return fedattune.fit(federation, name, model, options=chosen, model_options=hidden, **(RUN | settings))


EPOCHS: dict[str, Any] = {"steps": None, "epochs": 2, "rounds": 2}
"""Passes over the data, whose last batch is smaller."""

RESULTS: dict[tuple[Any, ...], Result] = {}


def fit_once(federation: Federation, name: str, **settings: Any) -> Result:
    """The result of `fit`, shared by all tests of this process that change nothing in the package."""
    merged = RUN | {"engine": "vectorized", "train": "method", "options": {}} | settings
    if merged["train"] == ALGORITHMS[name](**merged["options"]).participation.train:
        merged["train"] = "method"
    key = (name, id(federation), repr(sorted(merged.items())))
    if key not in RESULTS:
        RESULTS[key] = fit(federation, name, **merged)
    return RESULTS[key]


def distance(a: Result, b: Result) -> float:
    """Largest difference between the models that two runs deploy, and between their losses."""
    alike = [k for k in a.models if a.models[k].shape[1:] == b.models[k].shape[1:]]
    weights = max((a.models[k] - b.models[k]).abs().max().item() for k in alike)
    return max(weights, *(abs(a.metrics[k] - b.metrics[k]) for k in a.metrics))


def test_every_algorithm_is_in_the_table() -> None:
    assert sorted(ALGORITHMS) == sorted(case.name for case in CASES)


@pytest.mark.parametrize(
    ("work", "train", "case"),
    [pytest.param({}, "method", case, id=f"method-{case.name}") for case in CASES]
    + [
        pytest.param(work, train, case, id=f"{name}-{case.name}")
        for name, work, train in (("cohort", {}, "cohort"), ("all", {}, "all"), ("epochs", EPOCHS, "method"))
        for case in CASES
        if case.name in KINDS
    ],
)
def test_engines_agree(case: Case, work: dict[str, Any], train: str, ragged: Federation) -> None:
    """Ragged sizes, partial cohorts, and everybody training: equal to rounding in float64."""
    reference, together = (
        fit_once(ragged, case.name, engine=e, train=train, options=case.same, **work)
        for e in ("sequential", "vectorized")
    )
    assert distance(reference, together) < 1e-12
    for point, metrics in reference.history[-1]["validation"].items():
        assert together.history[-1]["validation"][point] == pytest.approx(metrics, abs=1e-12)
    assert reference.bytes_up == together.bytes_up
    assert reference.local_steps == together.local_steps


SERIAL = ("fedavg", "fedmcsa", "pfedme", "perfedavg", "ditto", "apfl", "fedrep", "scaffold", "fedam", "mocha", "fedala")
"""A method of each kind of local step, whose steps are also recorded without a client axis."""


@every_method
def test_recorded_steps_agree(case: Case, ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps recorded and run without Python, with a client axis and without, give what the reference gives."""
    steps: list[CompiledStep] = []

    def compile_recorded(*arguments: Any) -> CompiledStep:
        step = compile_step(*arguments)
        if arguments[-1]:  # probes of some models are never compiled
            steps.append(step)
        return step

    work: dict[str, Any] = {"rounds": 2, "options": case.same}
    whole = work | EPOCHS
    references = [fit_once(ragged, case.name, engine="sequential", **one) for one in (work, whole)]
    monkeypatch.setattr(engines, "MIN_COMPILED_STEPS", 0)
    monkeypatch.setattr(compiler, "compile_step", compile_recorded)
    assert distance(references[1], fit(ragged, case.name, engine="vectorized", **whole)) < 1e-12
    assert steps
    assert all(step.is_scripted for step in steps)
    if case.name not in SERIAL:
        return
    monkeypatch.setattr(engines.Task, "find_vectorization_error", lambda *_: "made")
    assert distance(references[0], fit(ragged, case.name, engine="auto", **work)) < 1e-12


@some_methods
def test_chunks_of_clients_do_not_change_the_result(
    case: Case, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit_once(ragged, case.name, engine="vectorized", options=case.same)
    monkeypatch.setattr(vectorized, "ENGINE_CHUNK_BYTES", 2000)
    monkeypatch.setattr(engines_base, "INPUT_CACHE_BYTES", 0)
    assert distance(whole, fit(ragged, case.name, engine="vectorized", options=case.same)) < 1e-12


@every_method
def test_no_dead_knobs(case: Case, ragged: Federation) -> None:
    """Every option changes the result, under the options that it needs."""
    assert set(case.knobs) == {o.name for o in list_options(ALGORITHMS[case.name])}
    for knob, value in case.knobs.items():
        under = case.under.get(knob, {})
        if knob in case.on:
            problem = PROBLEMS[case.on[knob]]
            before, after = (
                fit(problem.make(0), case.name, problem.model, options=o, **SETTINGS | problem.settings)
                for o in (under, under | {knob: value})
            )
        else:
            before = fit_once(ragged, case.name, options=under, **case.acts)
            after = fit_once(ragged, case.name, options=under | {knob: value}, **case.acts)
        assert distance(before, after) > 1e-8, f"{case.name}: {knob} has no effect"


@every_method
def test_no_test_label_reaches_validation(case: Case, ragged: Federation) -> None:
    """What values are chosen by, accuracy on validation data, does not depend on the labels of the test part."""
    other = ragged.y.clone()
    for client in ragged.clients:
        index = torch.as_tensor(client.test)
        other[index] = (other[index] + 1) % ragged.n_classes
    without = replace(ragged, y=other)
    words = [
        case.under.get(knob, {}) | {knob: value}
        for knob, value in case.knobs.items()
        if isinstance(value, str) and knob != "weighting"
    ]
    short = {"rounds": 2} if case.acts else {}  # without it, the runs are those of `test_no_dead_knobs`
    for chosen in ({}, *words):
        one = fit_once(ragged, case.name, options=chosen, **short)
        two = fit(without, case.name, options=chosen, engine="vectorized", **short)
        assert one.metrics != two.metrics
        assert [entry["validation"] for entry in one.history] == [entry["validation"] for entry in two.history]


@every_method
def test_deployed_models_are_those_evaluated(case: Case, ragged: Federation) -> None:
    """The model that a client gets reaches exactly the accuracy that is reported for it, and is not the first."""
    result = fit_once(ragged, case.name)
    start = fit(ragged, case.name, rounds=1, lr=1e-12)
    settings = Settings(**RUN)
    asked = {i for r in range(1, RUN["rounds"] + 1) for i in sample_cohort(settings, 6, r).tolist()}
    for number, client in enumerate(ragged.clients):
        model = result.model(number)
        index = torch.as_tensor(client.test)
        with torch.no_grad():
            right = model(ragged.features(index, torch.float64)).argmax(1) == ragged.y[index]
        assert right.double().mean().item() == result.measure_clients("accuracy")[number]
        changed = start.model(number).state_dict()
        if number in asked:  # one that never trained may still hold the model that it started with
            assert any((v - changed[k]).abs().max() > 1e-6 for k, v in model.state_dict().items())


@every_method
def test_training_trains(case: Case, equal: Federation) -> None:
    settings = {"rounds": 10, "steps": 3, "cohort": 4} | case.learns
    short = fit(equal, case.name, **settings | {"rounds": 1})
    long = fit(equal, case.name, eval_every=settings["rounds"], **settings)
    assert long.metrics["loss_uniform"] < short.metrics["loss_uniform"]


SEEDS = {"fedprox": 2, "fedproto": 2}
"""Methods whose gain is seen in the mean of several seeds only."""


@pytest.mark.parametrize("case", [case for case in CASES if case.helps], ids=lambda case: case.name)
def test_the_mechanism_acts_and_helps_at_its_default(case: Case) -> None:
    """On a small problem, the method is no other method in disguise, and is better than without its mechanism."""
    assert case.helps
    problem, off, options = PROBLEMS[case.helps[0]], case.helps[1], case.helps[2]
    accuracy: dict[str, list[float]] = {"on": [], "off": []}
    for seed in range(SEEDS.get(case.name, 1)):
        federation = problem.make(seed)
        runs = {
            key: fedattune.fit(federation, name, problem.model, options=given, seed=seed, **SETTINGS | problem.settings)
            for key, name, given in (("on", case.name, {}), ("off", off, options))
        }
        for key, run in runs.items():
            accuracy[key].append((run.final[run.evaluation_point] or {})["acc_uniform"])
        assert runs["on"].effects
        assert not [effect for effect in runs["on"].effects if effect.is_idle]
        assert not [note for note in runs["on"].notes if "this run is" in note]
    assert mean(accuracy["on"]) > mean(accuracy["off"]) + 0.02


def test_every_method_with_a_mechanism_has_a_problem(ragged: Federation) -> None:
    """A method that measures a mechanism is in the test above; the ablation's only term is inert in the public code."""
    measured = {case.name for case in CASES if fit(ragged, case.name, rounds=1).effects}
    assert measured == {case.name for case in CASES if case.helps}


@every_method
def test_bytes_are_those_of_the_payloads(case: Case, ragged: Federation) -> None:
    """On the network of 5 inputs, 6 hidden units and 3 classes, whose classifier has 6 x 3 + 3 values."""
    result = fit_once(ragged, case.name)
    sizes = Sizes(d=5 * 6 + 6 + 6 * 3 + 3, head=6 * 3 + 3)
    receivers = ragged.n_clients if case.to_all else RUN["cohort"]
    if case.up:
        assert result.bytes_up == 8 * case.up(sizes) * RUN["cohort"] * RUN["rounds"]
    if case.down:
        assert result.bytes_down == 8 * case.down(sizes) * receivers * RUN["rounds"]


@every_method
def test_definition_prints_compares_and_pickles(case: Case) -> None:
    algorithm = build(case.name, ALGORITHMS[case.name], {})
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm == ALGORITHMS[case.name]()
    assert type(algorithm.server).__name__ in str(algorithm)
    assert "0x" not in str(algorithm)
    assert inspect.getdoc(ALGORITHMS[case.name])


@every_method
def test_stopped_anywhere_it_goes_on_to_the_same_end(case: Case, ragged: Federation, tmp_path: Any) -> None:
    """The same seed repeats a run, also in parts; another one does not."""
    whole = fit_once(ragged, case.name)
    out = tmp_path / "run"
    # One run for all stops: what one of them loses is missing at the end.
    for stop_after in (1, 2):
        part = fit(ragged, case.name, out=out, resume=stop_after > 1, callbacks=[fedattune.OnRound(lambda _: True)])
        assert not part.is_finished
        assert part.rounds == stop_after
    rest = fit(ragged, case.name, out=out, resume=True)
    assert distance(whole, rest) == 0
    same = ("final", "best_test", "best_validation", "mean_last_10pct", "clients", "bytes", "rounds")
    assert {k: whole.to_json()[k] for k in same} == {k: rest.to_json()[k] for k in same}
    assert list(whole.mixing) == list(rest.mixing)
    one, other = fit_once(ragged, case.name, rounds=1), fit(ragged, case.name, rounds=1, engine="vectorized", seed=4)
    assert distance(one, other) > 1e-6


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "local"])
def test_personal_tensors_never_leave_the_client(
    name: str, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the method, or else a personal head, are carried in neither direction, and differ in the end."""
    algorithm = build(name, ALGORITHMS[name], next(case.same for case in CASES if case.name == name))
    if algorithm.personal == NoParameters() or name == "fedbn":  # the model of this suite has no BatchNorm
        algorithm = replace(algorithm, personal=Head())
    seen: set[str] = set()
    server = type(algorithm.server)
    aggregate, broadcast = server.aggregate, server.broadcast

    def spy_up(self: Any, state: Any, ids: Any, sent: Payload, uploads: Payload, n: Any) -> Any:
        seen.update(uploads.params, sent.params, *uploads.extra.values())
        return aggregate(self, state, ids, sent, uploads, n)

    def spy_down(self: Any, state: Any, ids: Any) -> Broadcast:
        sent = broadcast(self, state, ids)
        seen.update(sent.payload.params, *sent.payload.extra.values())
        return sent

    monkeypatch.setattr(server, "aggregate", spy_up)
    monkeypatch.setattr(server, "broadcast", spy_down)
    results = [
        fedattune.fit(ragged, algorithm, "dnn", model_options={"hidden": 6}, engine=e, **RUN)
        for e in ("sequential", "vectorized")
    ]
    assert results[0].trained_server
    personal = algorithm.personal.names(results[0].trained_server.trained_module)
    assert personal
    assert not seen & set(personal)
    assert seen >= results[0].models.keys() - set(personal)
    assert distance(*results) < 1e-12
    # A personal body may start from the global one in every round.
    learned = [k for k in personal if k.endswith("weight") and not k.startswith("body.")]
    assert all((results[0].models[k][0] - results[0].models[k][1]).abs().max() > 1e-4 for k in learned)


def test_local_sends_nothing(ragged: Federation) -> None:
    result = fit(ragged, "local")
    assert (result.bytes_up, result.bytes_down, len(result.mixing)) == (0, 0, 0)


def test_cohorts_and_batches_are_the_same_for_every_algorithm(ragged: Federation) -> None:
    """FedProx without its term and FedMCSA without collaboration follow FedAvg and Local to the bit."""
    same = [
        (("fedprox", {"mu": 0}), ("fedavg", {})),
        (("heurfedamp", {"self_weight": 1.0, "lam": 0}), ("local", {})),
        (("fedmcsa", PROFILE | {"lam": 0}), ("fedavg_mcsa", PROFILE)),
        (("fedmcsa", {"anchor": "moving", "lam": 3}), ("fedmcsa", {"anchor": "moving", "lam": 30})),
        (("heurfedamp", {"self_weight": "attention", "sigma": 5.0, "lam": 0}), ("fedavg_mcsa", MODEL_WISE)),
    ]
    for (a, given_a), (b, given_b) in same:
        assert distance(fit(ragged, a, options=given_a), fit(ragged, b, options=given_b)) < 1e-14


PROFILE = {"profile": "paper"}
MODEL_WISE = {"profile": "paper", "unit": "model", "sigma": 5.0}


def test_full_cohort_limits(equal: Federation) -> None:
    """sigma=0 mixes uniformly: with everybody in the cohort and equal sizes, that is FedAvg."""
    fedavg = fit(equal, "fedavg", cohort=4)
    mixed = fit(equal, "fedavg_mcsa", cohort=4, options=PROFILE | {"sigma": 0.0})
    for metric, value in fedavg.final["received"].items():
        assert mixed.final["received"][metric] == pytest.approx(value, abs=1e-12)
    no_mcsa = fit(equal, "fedmcsa_no_mcsa", cohort=4, options={"weight_decay": 0.0})
    assert distance(fedavg, no_mcsa) < 1e-14


def test_weight_decay_of_the_run_and_of_the_method(ragged: Federation) -> None:
    """An option of the method goes before the run's value, and that before the method's default."""
    own = fit(ragged, "fedmcsa", options={"weight_decay": 0.05})
    assert distance(own, fit(ragged, "fedmcsa", options={"weight_decay": 0.05}, weight_decay=0.3)) == 0
    assert distance(own, fit(ragged, "fedmcsa", weight_decay=0.05)) == 0
    default = fit(ragged, "fedmcsa")
    assert distance(default, fit(ragged, "fedmcsa", weight_decay=0.001)) == 0
    assert distance(default, fit(ragged, "fedmcsa", weight_decay=0.0)) > 0
    assert default.facts["weight_decay"] == 0.001
    assert distance(fit(ragged, "fedavg"), fit(ragged, "fedavg", weight_decay=0.3)) > 1e-6


def test_a_method_of_the_users_own_is_held_to_the_same(ragged: Federation) -> None:
    """A server rule written outside the package runs on both engines."""
    from fedattune import ServerUpdate

    class Median(ServerUpdate):
        def init(self, w0: Params, n_clients: int) -> Any:
            return {"w": w0}

        def broadcast(self, state: Any, ids: Any) -> Broadcast:
            return Broadcast(Payload(state["w"].repeat(len(ids))))

        def aggregate(self, state: Any, ids: Any, sent: Any, uploads: Payload, n: Any) -> Any:
            return {"w": uploads.params.map(lambda a: a.median(0).values)}

    algorithm = Algorithm(ALGORITHMS["fedavg"]().client, Median(), evaluation_point="received")
    results = [fedattune.fit(ragged, algorithm, "mlr", engine=e, **RUN) for e in ("sequential", "vectorized")]
    assert distance(*results) < 1e-12
    assert results[0].config["algorithm"] == "custom"


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_who_has_nothing_to_adapt_on_keeps_what_it_received(engine: str, ragged: Federation) -> None:
    """Adapted on the part that is scored, a client without samples there takes no step."""
    clients = list(ragged.clients)
    clients[1] = replace(clients[1], validation=clients[1].validation[:0])
    clients[2] = replace(clients[2], test=clients[2].test[:0])
    some = replace(ragged, clients=tuple(clients))
    plain, adapted = (
        fit(some, "perfedavg", engine=engine, options={"adapt_on": "test", "adapt_steps": n, "alpha": 0.3})
        for n in (1, 3)
    )
    assert all(torch.equal(plain.models[k][2], adapted.models[k][2]) for k in plain.models)
    assert distance(plain, adapted) > 1e-6
    none = replace(some, clients=tuple(replace(c, validation=c.validation[:0]) for c in clients))
    assert fit(none, "perfedavg", options={"adapt_on": "test"}).history[-1]["validation"] is None


def test_models_that_saw_test_rows_choose_nothing(ragged: Federation) -> None:
    """Scores of validation rows are those of models that adapted to these, and not what the judged models predict."""
    options = {"adapt_on": "test", "adapt_steps": 9, "alpha": 0.3}
    result = fit(ragged, "perfedavg", options=options, early_stopping="off")
    assert result.predictions.keys() == {"test"}
    ((n, correct, _),) = (s for _, point, s in result.store.scores("validation", result.rounds) if point == "trained")
    for values in (result.measure_clients("accuracy", "validation"), result.measure_for_choice("accuracy")):
        assert values.tolist() == (correct / n).tolist()


JOINED = [(case.name, {}) for case in CASES] + [("igfl", {"time_form": "T1"}), ("igfl_s", {"attention": "self"})]


@pytest.mark.parametrize(("before", "after"), [(4, 8), (20, 24)])
@pytest.mark.parametrize(("name", "options"), JOINED)
def test_the_state_after_clients_joined_is_like_that_of_as_many_from_the_start(
    name: str, options: dict[str, Any], before: int, after: int, ragged: Federation
) -> None:
    """So a run that was joined can be resumed from its checkpoint."""
    algorithm, model = ALGORITHMS[name](**options), make_model("dnn", ragged, options={"hidden": 6}, seed=0)
    module = build_trained_module(algorithm, model, ragged, 0)
    context = make_run_context(algorithm, ragged, module, Settings(accept="harmless"))
    rule, task = context.algorithm.server, context.task
    few, many = (RowStorage(n).allocate_server(init_server(context.algorithm, task, n, 0)) for n in (before, after))
    joined = ServerWrapper(rule).add_clients(few, after - before)
    shapes = [{k: v.shape for k, v in flatten_tree(state).items()} for state in (joined, many)]
    assert shapes[0] == shapes[1]
