"""Attune: the equations of its docstring by hand, and the methods that it becomes at the ends of its options."""

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms.attune import EXPERTS, AttuneClient, AttuneServer
from fedattune.algorithms.twins import PRIOR_ROWS, TwinModule
from fedattune.client import RunningMean
from fedattune.core.metrics import METRICS
from fedattune.core.payload import RoundContext, ServerState
from fedattune.core.task import Task
from fedattune.runs.predictions import _divide_rows, weigh_held_out_rows
from oracles.quadratic import FRESH

RUN: dict[str, Any] = {
    "rounds": 3, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "dtype": "float64", "early_stopping": "off",
}  # fmt: skip
"""Without early stopping, which would take the models of different rounds where predictions differ."""

HIDDEN = {"hidden": 4}
E = len(EXPERTS)
NO_LOSS = 1000.0
"""A loss at which an expert has no weight."""


def fit(name: str, federation: Federation, model: Any = "dnn", **settings: Any) -> Result:
    hidden = {"model_options": HIDDEN} if model == "dnn" else {}
    return fedattune.fit(federation, name, model, **(RUN | hidden | settings))


def models_of(result: Result) -> Params:
    assert isinstance(result.models, Params)
    return result.models


def only(result: Result, part: str) -> Params:
    """The models of all clients under one name of a `TwinModule`."""
    return Params({k.removeprefix(part): v for k, v in models_of(result).items() if k.startswith(part)})


# ----- server


def vectors(*rows: list[float]) -> Params:
    return Params(w=torch.tensor(rows, dtype=torch.float64))


def serve(
    rule: AttuneServer, state: ServerState, updates: Params, n: list[int], losses: list[float], rows: list[float]
) -> ServerState:
    """One round in which all clients upload what they were sent plus `updates`; the same loss for all experts."""
    ids = torch.arange(len(n))
    sent = rule.broadcast(state, ids).payload
    mean = torch.tensor(losses, dtype=torch.float64)[:, None].repeat(1, E)
    report = Params(mean=mean, n=torch.tensor(rows, dtype=torch.float64))
    uploads = Payload(sent.params + updates, {"losses": report})
    return rule.aggregate(state, ids, sent, uploads, torch.tensor(n))


def read(state: ServerState, name: str, group: int = 0) -> list[float]:
    stack: Any = state[name]
    values: list[float] = stack["w"][group].tolist()
    return values


def loss_of(state: ServerState) -> float:
    losses: Any = state["losses"]
    assert (losses["mean"] == losses["mean"][0]).all()
    return float(losses["mean"][0])


def test_two_rounds_of_the_server_by_hand() -> None:
    """D = (0, 1), a = (1/4 10 + 3/4 2) / 2 = 2, V = 2 D; then D = (1, 0), a = 1/2 < 1, V = 0.6 (0, 2) + (1, 0)."""
    rule = AttuneServer()
    state = rule.init(vectors([0, 0]).rows(0), 2)
    state = serve(rule, state, vectors([3, 1], [-1, 1]), [1, 3], [1, 4], [2, 1])
    assert read(state, "w") == pytest.approx([0, 2], abs=1e-15)
    assert loss_of(state) == pytest.approx(2)  # (2 x 1 + 1 x 4) / 3: a mean over rows
    state = serve(rule, state, vectors([1, 0], [1, 0]), [1, 3], [6, 6], [1, 1])
    assert read(state, "velocity") == pytest.approx([1, 1.2], abs=1e-15)
    assert read(state, "w") == pytest.approx([1, 3.2], abs=1e-15)
    assert loss_of(state) == pytest.approx(4)  # half of 2 and half of 6
    sent = rule.broadcast(state, torch.tensor([1])).payload
    assert sent.params["w"][0].tolist() == read(state, "w")
    assert sent.extra["losses"]["mean"][0].tolist() == pytest.approx([4] * E)


@pytest.mark.parametrize(("stretch", "expected"), [(1.0, 1.0), (4.0, 4.0), (10.0, 8.5)])
def test_the_mean_update_is_stretched_where_updates_differ(stretch: float, expected: float) -> None:
    """D = (0, 1) and updates of squared norm 17: a = 17/2."""
    rule = AttuneServer(stretch=stretch)
    state = serve(rule, rule.init(vectors([0, 0]).rows(0), 2), vectors([4, 1], [-4, 1]), [5, 5], [1, 1], [1, 1])
    assert read(state, "w") == pytest.approx([0, expected], abs=1e-15)


# ----- weights of the experts


def weigh(losses: dict[tuple[float, float], float], n: float = 1.0, **options: Any) -> list[float]:
    """Return s and c; experts that are not named have no weight."""
    mean = torch.tensor([losses.get(expert, NO_LOSS) for expert in EXPERTS], dtype=torch.float64)
    rule = AttuneClient(**({"rows": 0.0} | options))
    n_rows, others = torch.tensor(n, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    return [float(value) for value in rule._weigh(mean, n_rows, others)]


def test_weights_of_the_experts_by_hand() -> None:
    assert weigh({(0, 0): 0}) == pytest.approx([0, 0])
    assert weigh({(0, 0): 1, (1, 0): 1}) == pytest.approx([0.5, 0])
    # Weights 1 : 3, then with two rows 1 : 9.
    assert weigh({(0, 0): log(3), (1, 1): 0}) == pytest.approx([0.75, 1])
    assert weigh({(0, 0): log(3), (1, 1): 0}, n=2) == pytest.approx([0.9, 1])
    # s = (1/2 + 1) / 2; s c = (1/2 x 1/2 + 0) / 2, so c = 1/8 / (3/4).
    assert weigh({(0.5, 0.5): 2, (1, 0): 2}) == pytest.approx([0.75, 1 / 6])


def test_other_guards_do_not_look_at_losses() -> None:
    """Mean of s over the experts: 4.5 / 7; of s c: (1/4 + 1/2 + 1/2 + 1) / 7."""
    for losses in ({(0.0, 0.0): 0.0}, {(1.0, 1.0): 0.0}):
        assert weigh(losses, guard="shared") == pytest.approx([1, 0])
        assert weigh(losses, guard="equal") == pytest.approx([4.5 / 7, 0.5])


def finish(
    rule: AttuneClient, found: Params, others: Tensor, memory: Params | None = None
) -> tuple[list[float], Params, Params]:
    """The weights s and c of a client that found these losses, what it remembers, and what it uploads."""
    like = torch.zeros((), dtype=torch.float64)
    w = Params({"shared.w": like, "own.w": like, "guard.share": like, "guard.classes": like})
    local = rule.init_local_state(w) | ({"losses": memory} if memory else {})
    sent = Payload(w, {"losses": Params(mean=others)})
    job = RoundContext(0.1, like + 1, torch.tensor(1.0), 1)
    carry = rule.begin(sent, local, FRESH, job)._replace(losses=RunningMean(found["mean"], found["n"]))
    upload, kept = rule.finish(carry, sent, local, job)
    guard = [float(upload.params[k]) for k in ("guard.share", "guard.classes")]
    return guard, kept["losses"], upload.extra["losses"]


def losses(n: float, **first: float) -> Params:
    """Losses of the own model alone and of the shared one alone; other experts have no weight."""
    mean = torch.full((E,), NO_LOSS, dtype=torch.float64)
    mean[EXPERTS.index((0, 0))], mean[EXPERTS.index((1, 0))] = first["own"], first["shared"]
    return Params(mean=mean, n=torch.tensor(n, dtype=torch.float64))


def test_rows_are_weighed_by_the_losses_that_they_may_know() -> None:
    """Row 0 knows that the own model is right, row 1 nothing of its own."""
    own, shared = EXPERTS.index((0.0, 0.0)), EXPERTS.index((1.0, 1.0))
    sums = torch.zeros(2, E, dtype=torch.float64)
    sums[0, shared] = NO_LOSS
    others = torch.full((E,), NO_LOSS, dtype=torch.float64)
    others[own], others[shared] = log(3), 0.0
    found = AttuneClient(rows=1.0).weigh_rows(sums, others)
    assert found["guard.share"].tolist() == [[0], [pytest.approx(3 / 4)]]
    assert found["guard.classes"].tolist() == [[0], [pytest.approx(1)]]


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
    task = Task(TwinModule(nn.Linear(3, 2), 2, 0.5))
    models = Params({k: v.detach().repeat(3, *[1] * v.ndim) for k, v in task.params.items()})
    buffers = Params({k: v.repeat(3, *[1] * v.ndim) for k, v in task.buffers.items()})
    models["own.weight"][1] = torch.nan
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


def test_a_client_without_validation_rows_uses_the_losses_of_the_others() -> None:
    """Two prior rows of loss log(3) / 2 against 0: 3 to 1 for the shared model, whatever its own losses say."""
    rule, others = AttuneClient(rows=2.0), losses(0, own=log(3) / 2, shared=0)["mean"]
    guard, kept, report = finish(rule, losses(0, own=0, shared=9), others)
    assert guard == pytest.approx([0.75, 0])
    assert report["n"] == kept["n"] == 0
    # Its rows of an earlier round still count: three of them, each three times as likely by the own model.
    before = losses(3, own=0, shared=log(3))
    guard, kept, _ = finish(rule, losses(0, own=0, shared=9), others, before)
    assert guard == pytest.approx([0.1, 0])  # own : shared is 3^3 : 3
    assert torch.equal(kept["mean"], before["mean"])


def test_predictions_are_a_mixture_of_probabilities() -> None:
    """p = s softmax(w(x) + c log pi) + (1 - s) softmax(v(x)) for classes, and s w(x) + (1 - s) v(x) for numbers."""
    torch.manual_seed(0)
    x, log_shares = torch.randn(4, 5), torch.tensor([0.5, -1.0, 0.2])
    twin = TwinModule(nn.Linear(5, 3), 3, 0.3).eval()
    nn.init.normal_(twin.own.weight)  # type: ignore[arg-type]
    twin.log_shares.copy_(log_shares)
    twin.guard["classes"].data.fill_(0.5)
    with torch.no_grad():
        expected = 0.3 * (twin.shared(x) + 0.5 * log_shares).softmax(1) + 0.7 * twin.own(x).softmax(1)
        assert twin(x).exp() == pytest.approx(expected, abs=1e-6)  # single precision
        numbers = TwinModule(nn.Linear(5, 1), 1, 0.3).eval()
        nn.init.normal_(numbers.own.weight)  # type: ignore[arg-type]
        mixed = 0.3 * numbers.shared(x) + 0.7 * numbers.own(x)
        assert numbers(x) == pytest.approx(mixed, abs=1e-6)


# ----- the methods that it becomes, and what probing sees

ENGINES = ["sequential", "vectorized"]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_group_without_momentum_and_stretching_is_fedavg(engine: str, weighting: str, ragged: Federation) -> None:
    options = {"likeness": -1.0, "server_momentum": 0.0, "stretch": 1.0, "weighting": weighting}
    shared = only(fit("attune", ragged, options=options, engine=engine), "shared.")
    average = models_of(fit("fedavg", ragged, options={"weighting": weighting}, engine=engine))
    assert shared.keys() == average.keys()
    # w + sum p (theta - w) and sum p theta differ by rounding.
    assert max((shared[k] - average[k]).abs().max().item() for k in average) < 1e-14


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"likeness": -1.0, "guard": "equal"}])
def test_the_own_model_in_training_is_that_of_training_alone(
    options: dict[str, Any], engine: str, ragged: Federation
) -> None:
    options = options | {"average_own": False}  # then it is in use, too
    own = only(fit("attune", ragged, cohort=6, options=options, engine=engine), "own.")
    alone = models_of(fit("local", ragged, cohort=6, engine=engine))
    assert own.keys() == alone.keys()
    for k in alone:
        if engine == "sequential":
            assert torch.equal(own[k], alone[k])
        else:  # products of another shape round otherwise
            assert torch.allclose(own[k], alone[k], rtol=0, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_own_model_in_use_is_the_mean_of_the_last_rounds_steps(engine: str, ragged: Federation) -> None:
    """It is the mean of training alone for one step and for two. The next round starts from the last step."""
    given: dict[str, Any] = {"cohort": 6, "engine": engine}
    one, two = (models_of(fit("local", ragged, rounds=1, steps=n, **given)) for n in (1, 2))
    used = only(fit("attune", ragged, rounds=1, steps=2, **given), "own.")
    for k in used:
        assert torch.allclose(used[k], (one[k] + two[k]) / 2, rtol=0, atol=1e-14)
    steps = [models_of(fit("local", ragged, rounds=n, steps=1, **given)) for n in (1, 2)]
    used = only(fit("attune", ragged, rounds=2, steps=1, **given), "own.")
    for k in used:
        assert torch.allclose(used[k], steps[1][k], rtol=0, atol=1e-14)


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


SIZES = [(20, 11), (33, 7), (9, 3), (16, 0)]  # batches of 8: full, incomplete and none


@pytest.mark.parametrize("engine", ENGINES)
def test_probing_sees_the_validation_rows_before_training(engine: str) -> None:
    """The server's losses after a round are those of the initial model, on all validation rows."""
    federation = split(SIZES)
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    result = fit("attune", federation, model, rounds=1, cohort=4, engine=engine, device="cpu")
    assert result.trained_server
    found: Any = result.trained_server.state["losses"]
    expected = []
    train, validation = federation.part("train"), federation.part("validation")
    for client in range(len(SIZES)):
        rows, held_out = torch.as_tensor(train[client]), torch.as_tensor(validation[client])
        counts = federation.y[rows].bincount(minlength=3).double() + PRIOR_ROWS
        with torch.no_grad():
            outputs = model.double()(federation.x[held_out].double())
        plain = outputs.softmax(1)
        for row, y in enumerate(federation.y[held_out].tolist()):
            each = []
            for s, c in EXPERTS:
                by_shared = (outputs[row] + c * (counts / counts.sum()).log()).softmax(0)
                each.append(-(s * by_shared + (1 - s) * plain[row])[y].log())
            expected.append(torch.stack(each))
    assert len(expected) == 21
    assert torch.allclose(found["mean"], torch.stack(expected).mean(0), rtol=0, atol=1e-12)  # sums in another order
