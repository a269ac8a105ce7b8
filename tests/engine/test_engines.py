"""Engines: the same results one client at a time and as one batch, and the cost of a round in operations."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rounds import EACH, NETWORKS, Watch, make_clients, train_round
from torch import nn

import fedattune
from fedattune import Federation
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.client import SGD, Proximal
from fedattune.core.algorithm import LocalPlan, Probe
from fedattune.core.hardware import use_threads
from fedattune.core.optimizers import GradientDescent
from fedattune.core.task import Task
from fedattune.engine.base import score_samples
from fedattune.engine.sequential import SequentialEngine
from fedattune.engine.vectorized import VectorizedEngine

pytestmark = pytest.mark.usefixtures("unmeasured")

aten = torch.ops.aten


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("work", [{"steps": 6}, {"epochs": 2}], ids=["steps", "epochs"])
def test_recorded_steps_give_what_the_reference_gives(kind: str, name: str, work: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = [40, 13, 90, 25, 9]
    data, task = make_clients(sizes), Task(NETWORKS[name]().double())
    work = {**work, "drop_last": task.has_batch_statistics}
    for rule in (SGD((Proximal(0.1),)), SGD(clip=1.0, optimizer=GradientDescent(momentum=0.9))):
        reference, engine = SequentialEngine(task, data), VectorizedEngine(task, data, **EACH[kind])
        want, got = (train_round(e, task, 5, rule, **work) for e in (reference, engine))
        assert all(step.operations for step in engine._compiler._steps.values())
        assert torch.equal(want.n_steps, got.n_steps)
        for a, b in ((want.upload.params, got.upload.params), (want.buffers, got.buffers)):
            for k in a:
                torch.testing.assert_close(a[k], b[k], rtol=1e-10, atol=1e-12)
        ids = torch.tensor([0, 2, 3])
        scores = [
            e.evaluate(got.upload.params.rows(ids), got.buffers.rows(ids), ("test",), ids)[0]
            for e in (reference, engine)
        ]
        assert torch.equal(scores[0].correct, scores[1].correct)
        torch.testing.assert_close(scores[0].loss, scores[1].loss)


@pytest.mark.parametrize("kind", EACH)
def test_several_steps_on_one_batch_give_what_the_reference_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedattune.engine.compiler.product_reuse.MIN_LAYER_INPUTS", 64)
    data, task = make_clients([40, 13, 90]), Task(NETWORKS["mlp"]().double())
    rule = PFedMeClient(0.5, 4, 0.02)
    engine = VectorizedEngine(task, data, **EACH[kind])
    want, got = (train_round(e, task, 3, rule, steps=7, batch_size=10) for e in (SequentialEngine(task, data), engine))
    assert all(step.operations for step in engine._compiler._steps.values())
    for a, b in ((want.upload.params, got.upload.params), (want.local_state["theta"], got.local_state["theta"])):
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", EACH)
def test_noise_repeats_with_the_seed_and_leaves_the_generator_alone(kind: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    task, data = Task(net.double()), make_clients([30, 40, 50])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    engine = VectorizedEngine(task, data, **EACH[kind])
    with use_threads(2):
        first, again = (train_round(engine, task, 3, SGD(), steps=4) for _ in range(2))  # recorded, then replayed
        other = train_round(engine, task, 3, SGD(), steps=4, round=2)
    assert torch.equal(torch.rand(3), expected)
    for k in task.params:
        assert torch.equal(first.upload.params[k], again.upload.params[k])
    assert not torch.equal(first.upload.params["1.weight"], other.upload.params["1.weight"])


@pytest.mark.parametrize(("name", "kind"), [("conv", "serial"), ("mlp", "wide")])
def test_the_number_of_threads_does_not_change_the_result(name: str, kind: str) -> None:
    task, data = Task(NETWORKS[name]()), make_clients([30, 40, 50, 20, 90, 31, 8])
    results = []
    for n in (1, 3):
        with use_threads(n):
            engine = VectorizedEngine(task, data, **EACH[kind])
            results.append(
                train_round(engine, task, 7, SGD((Proximal(0.1),), optimizer=GradientDescent(momentum=0.9)), epochs=2)
            )
            assert torch.get_num_threads() == n
        assert all(step.is_scripted for step in engine._compiler._steps.values())
    for k in task.params:
        torch.testing.assert_close(results[0].upload.params[k], results[1].upload.params[k], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_mixed_precision_trains_float32_weights_with_coarser_products(name: str) -> None:
    torch.manual_seed(0)
    data, model = make_clients([40, 30]), NETWORKS[name]()
    exact, coarse = (
        train_round(VectorizedEngine(t, data), t, 2, SGD(), steps=4) for t in (Task(model), Task(model, True))
    )
    for k, a in exact.upload.params.items():
        b, moved = coarse.upload.params[k], (a - Task(model).params[k]).norm()
        assert b.dtype == torch.float32
        assert 1e-6 * moved < (a - b).norm() < 0.2 * moved


def test_mixed_precision_is_refused_where_it_makes_no_sense(ragged: Federation) -> None:
    with pytest.raises(fedattune.ConfigError, match="mixed_precision: bfloat16 goes with dtype float32"):
        fedattune.fit(ragged, "fedavg", dtype="float64", mixed_precision="bfloat16")


def test_mixed_precision_is_refused_where_the_processor_lacks_it(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.raises(fedattune.ConfigError, match="the cpu here has no bfloat16 arithmetic; leave it off"):
        fedattune.fit(ragged, "fedavg", device="cpu", mixed_precision="bfloat16")


def _watched(n: int, steps: int, model: str = "mlp") -> Watch:
    """A round of n clients whose steps were recorded before."""
    data, task = make_clients([400] * n), Task(NETWORKS[model]())
    engine = VectorizedEngine(task, data)
    with use_threads(1):
        train_round(engine, task, n, SGD(), steps=steps)
    with use_threads(1), Watch() as seen:  # it sees this thread alone
        trained = train_round(engine, task, n, SGD(), steps=steps)
        engine.evaluate(trained.upload.params, trained.buffers, ("test",), torch.arange(n))
    return seen


def test_operations_of_a_round_do_not_grow_with_the_clients_and_few_with_the_steps() -> None:
    few, many, longer = _watched(3, 4), _watched(9, 4), _watched(3, 8)
    assert few.operations.total() == many.operations.total()
    per_step = (longer.operations.total() - few.operations.total()) / 4
    assert 10 <= per_step <= 40, longer.operations  # 38 when this was written, views included


@pytest.mark.parametrize("classes_first", [False, True])
def test_among_equal_logits_the_first_class_is_predicted(classes_first: bool) -> None:
    logits = torch.tensor([[2.0, 2.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 3.0, 2.0]]).expand(2, 4, 3)
    if classes_first:
        logits = logits.mT.contiguous().mT
    y = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 0]])
    right, losses = score_samples(logits, y)
    assert right.tolist() == [[True] * 4, [False] * 4]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)


def test_logits_that_are_no_numbers_are_right_nowhere() -> None:
    """The first NaN is the largest for PyTorch, also where others tie."""
    logits = torch.tensor([[torch.nan, 1.0], [torch.inf, torch.inf], [2.0, 2.0], [torch.nan, torch.nan], [0.0, 3.0]])
    right, _ = score_samples(logits, torch.tensor([0, 0, 0, 0, 1]))
    assert right.tolist() == [False, False, True, False, True]


def test_training_does_not_import_the_compiler_of_pytorch() -> None:
    """A node of a network starts a process for each message: the import would take longer than a short message."""
    code = """
import sys
from engine_rounds import NETWORKS, make_clients, train_round
from fedattune.client import SGD
from fedattune.core.task import Task
from fedattune.engine import make_engine
task, data = Task(NETWORKS["mlp"]()), make_clients([40, 30])
for steps in (3, 2000):
    engine = make_engine("auto", task, data, steps=steps)
    train_round(engine, task, 2, SGD(), steps=3)
    recorded = [step.operations > 0 for step in engine._compiler._steps.values()]
    print(recorded, {"torch._dynamo", "sympy"} & {*sys.modules})
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))},
    )
    assert found.stdout.splitlines() == ["[False] set()", "[True] set()"]


@dataclass(frozen=True)
class Reordering(SGD):
    """A rule whose probe returns its carry in another order of names."""

    def begin(self, *given: Any) -> Any:
        return {"inner": super().begin(*given), "count": given[2] * 0.0}

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(probe=Probe())

    def probe(self, carry: Any, *_: Any) -> Any:
        return {"count": carry["count"] + 1, "inner": carry["inner"]}

    def step(self, carry: Any, *given: Any) -> Any:
        return {**carry, "inner": super().step(carry["inner"], *given)}

    def finish(self, carry: Any, *given: Any) -> Any:
        upload, local_state = super().finish(carry["inner"], *given)
        return upload._replace(params=(1 + carry["count"]) * upload.params), local_state


def test_a_probe_may_return_its_carry_in_another_order() -> None:
    task, data = Task(NETWORKS["mlp"]().double()), make_clients([30, 40, 50])
    results = [
        train_round(make(task, data), task, 3, Reordering(), steps=2) for make in (SequentialEngine, VectorizedEngine)
    ]
    for k, v in results[0].upload.params.items():
        torch.testing.assert_close(results[1].upload.params[k], v)


@pytest.mark.parametrize("name", ["mlp", "batch norm"])
def test_probed_rows_of_other_numbers_are_not_compiled_anew(name: str) -> None:
    """Clients have other numbers of rows: an mlp probes padded batches, and batch statistics are not compiled."""
    task, data = Task(NETWORKS[name]().double()), make_clients(list(range(10, 40, 3)))
    engine = VectorizedEngine(task, data)
    counts = []
    for _ in range(3):
        train_round(engine, task, len(data.clients), Reordering(), steps=2, batch_size=40, drop_last=name != "mlp")
        counts.append(len(engine._compiler._steps))
    assert counts[0] == counts[2]
    kinds = [key[0][-1] for key in engine._compiler._steps]
    assert ("probe_client" in kinds) == (name == "mlp")
    assert kinds.count("probe_client") <= 1


@dataclass(frozen=True)
class Probed(Reordering):
    """The same on validation rows."""

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(probe=Probe("validation"))


def test_only_clients_with_rows_to_probe_are_probed() -> None:
    """Rows 0, 1 and 3 of the carries change; they are no slice."""
    data, task = make_clients([40, 40, 3, 40]), Task(NETWORKS["mlp"]().double())
    assert [len(rows) > 0 for rows in data.part("validation")] == [True, True, False, True]
    results = [
        train_round(make(task, data), task, 4, Probed(), steps=2, batch_size=8)
        for make in (SequentialEngine, VectorizedEngine)
    ]
    for k, v in results[0].upload.params.items():
        torch.testing.assert_close(results[1].upload.params[k], v)
