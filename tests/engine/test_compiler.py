"""Compiled steps: the same numbers as eager steps, whatever their tensors share."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine_rounds import EACH, NETWORKS, make_clients, train_round
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import fedattune
from fedattune.client import SGD
from fedattune.core.hardware import use_threads
from fedattune.core.params import copy_dense
from fedattune.core.task import Task
from fedattune.engine.compiler import compile as compile_module
from fedattune.engine.compiler.compile import PASSES, Compiler, compile_call, compile_step
from fedattune.engine.compiler.loops import GraphLoop, StepBatches, StepLoop
from fedattune.engine.sequential import SequentialEngine
from fedattune.engine.vectorized import VectorizedEngine

aten = torch.ops.aten

Tensors = list[Tensor]


def _replayed(function: Any, fixed: Tensors, leaves: Tensors, batches: list[Tensors]) -> Tensors:
    """The leaves after all batches, by a compiled step."""
    step = compile_step(function, fixed, leaves, batches[0])
    assert step.operations, "the step was not compiled"
    here = [copy_dense(a) if i in step.moving else a for i, a in enumerate(leaves)]
    ready = step.precompute(*fixed, *step.select_constant(here))
    for batch in batches:
        for i, new in zip(step.moving, step.body(ready, [here[i] for i in step.moving], batch), strict=True):
            here[i] = new
    return here


def _eager(function: Any, fixed: Tensors, leaves: Tensors, batches: list[Tensors]) -> Tensors:
    for batch in batches:
        leaves = function(fixed, leaves, batch)
    return leaves


AWKWARD = {
    "the same result twice": lambda a, b, x: [(new := a - 0.1 * x), new],
    "one takes the other's place": lambda a, b, x: [a * x, a],
    "they change places": lambda a, b, x: [b, a * 1.01],
    "a result that is laid out otherwise": lambda a, b, x: [(a @ x).T * 0.1, b - x],
    "a view of a result": lambda a, b, x: [(c := a - x).flip(0), c[:, :1].expand(3, 3)],
    "an input needed after its result": lambda a, b, x: [(c := a + x), b * a + c],
    "momentum": lambda a, b, x: [a - 0.1 * (v := 0.9 * b + x), v],
    "in place on a copy": lambda a, b, x: [a.clone().mul_(0.5).add_(x), b + x],
}


@pytest.mark.parametrize("name", AWKWARD)
def test_a_compiled_step_may_share_swap_and_keep_its_tensors(name: str) -> None:
    torch.manual_seed(0)
    leaves, fixed = [torch.randn(3, 3).double() for _ in range(2)], [torch.tensor(2.0).double()]
    batches = [[torch.randn(3, 3).double(), torch.zeros(3).long()] for _ in range(5)]

    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        return AWKWARD[name](*leaves, batch[0] / fixed[0])

    given_ = [a.clone() for a in leaves]
    for got, want in zip(
        _replayed(function, fixed, leaves, batches), _eager(function, fixed, leaves, batches), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert all(torch.equal(a, b) for a, b in zip(leaves, given_, strict=True)), "an input was written over"


def test_what_does_not_change_may_be_a_result_and_is_not_written_over() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(3) for _ in range(3)]
    batches = [[torch.randn(3), torch.zeros(3).long()] for _ in range(4)]
    for function in (
        lambda f, leaves, b: [leaves[0] - leaves[1] * b[0], leaves[2] * 2, leaves[2]],
        lambda f, leaves, b: [leaves[0] + leaves[1] * b[0], leaves[2].clone(), leaves[2]],
    ):
        got = _replayed(function, [], leaves, batches)
        for a, b in zip(got, _eager(function, [], leaves, batches), strict=True):
            torch.testing.assert_close(a, b)


def test_what_does_not_move_is_computed_once_before_the_first_step() -> None:
    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        w, anchor = leaves
        return [w - (anchor.exp() / fixed[0]).sin() * batch[0], anchor]

    step = compile_step(
        function, [torch.tensor(2.0)], [torch.randn(4), torch.randn(4)], [torch.randn(4), torch.zeros(4).long()]
    )
    assert step.moving == (0,)
    assert step.operations == 2  # the product and the difference


def test_a_step_that_cannot_be_compiled_runs_as_it_is() -> None:
    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        return [leaves[0] + (1.0 if batch[0].sum() > 0 else -1.0)]

    step = compile_step(function, [], [torch.zeros(2)], [torch.ones(2), torch.zeros(2).long()])
    assert not step.operations
    assert step.body([], [torch.zeros(2)], [-torch.ones(2)])[0].tolist() == [-1, -1]


class Counting(nn.Module):
    """A network with dropout, whose output also depends on Python's state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.drop, self.kind, self.t = nn.Linear(64, 3), nn.Dropout(0.5), kind, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)  # as modules do that note shapes
        draw = {"random": random.random, "numpy": np.random.random, "counter": self._count, "nothing": lambda: 1.0}
        return draw[self.kind]() * self.drop(self.layer(x.flatten(1)))

    def _count(self) -> float:
        self.t += 1.0
        return self.t


@pytest.mark.parametrize("kind", ["random", "numpy", "counter", "nothing"])
def test_a_step_that_changes_the_state_of_python_is_not_compiled(kind: str) -> None:
    """The random numbers of dropout keep such a step from being compared with the eager one."""
    task, data = Task(Counting(kind)), make_clients([30, 40])
    engine = VectorizedEngine(task, data)
    train_round(engine, task, 2, SGD(), steps=3)
    assert [step.operations > 0 for step in engine._compiler._steps.values()] == [kind == "nothing"]


def test_a_recording_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is aten.sub.Tensor:
                node.target = aten.add.Tensor

    monkeypatch.setitem(PASSES, "wrong", wrong)
    batch = [torch.ones(2), torch.zeros(2).long()]
    step = compile_step(lambda f, leaves, b: [leaves[0] - b[0]], [], [torch.ones(2)], batch)
    assert not step.operations
    assert step.body([], [torch.ones(2)], [torch.ones(2)])[0].tolist() == [0, 0]


def test_a_bias_before_batchnorm_moves_by_rounding_alone() -> None:
    """Its gradient is zero. What rounding leaves of it differs in a compiled step of pFedMe, which is used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    with torch.no_grad():
        model[0].bias.zero_()
    task = Task(model)
    state, spec = tree_flatten((task.params, task.params, task.buffers))

    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        w, theta, buffers = tree_unflatten(leaves, spec)
        for _ in range(5):
            g, buffers = task.gradient(theta, buffers, (batch[0], batch[1]))
            theta = theta - 0.05 * (g + 15.0 * (theta - w))
        return tree_flatten((w - 0.3 * (w - theta), theta, buffers))[0]

    batch = [torch.randn(10, 1, 8, 8), torch.arange(10)]
    old = state[[*task.params].index("0.bias")]
    new = function([], state, batch)[[*task.params].index("0.bias")]
    assert 0 < float((new - old).abs().max()) < 1e-4
    with torch.no_grad():
        assert compile_step(function, [], state, batch).operations


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("target", ["labels", "as many labels as inputs", "numbers", "positions"])
def test_steps_on_targets_with_several_parts_are_compiled(target: str, kind: str) -> None:
    """The rows of a batch are found in inputs and targets, however many axes they share."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 30, 5, generator=generator)
    model: nn.Module = nn.Linear(5, 4)
    if target == "positions":
        model, y = nn.Conv1d(1, 3, 3, padding=1), torch.randint(0, 3, (3, 30, 5), generator=generator)
        x = x[:, :, None]
    elif target == "numbers":
        y = torch.randn(3, 30, 4, generator=generator)
    else:
        n = 5 if target == "as many labels as inputs" else 4
        model, y = nn.Linear(5, n), torch.rand(3, 30, n, generator=generator) < 0.5
    data, task = fedattune.federation_from(list(zip(x, y, strict=True))), Task(model)
    engine, reference = VectorizedEngine(task, data, **EACH[kind]), SequentialEngine(task, data)
    got, want = (train_round(one, task, 3, SGD(), steps=4).upload.params for one in (engine, reference))
    assert all(step.operations for step in engine._compiler._steps.values())
    for k in want:
        torch.testing.assert_close(got[k], want[k], rtol=1e-4, atol=1e-5)


MASKED = {
    "convolutions": lambda: [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3, padding=2, bias=False)],
    "batch norm": lambda: [nn.BatchNorm2d(1)],
    "group norm": lambda: [nn.GroupNorm(1, 1)],
    "layer norm": lambda: [nn.LayerNorm(8)],
    "attention": lambda: [nn.Flatten(1, 2), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)],
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention under vmap
@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", MASKED)
def test_layers_whose_gradients_have_a_mask_run_without_python(name: str, kind: str) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(*MASKED[name](), nn.Flatten(), nn.Linear(64, 3)).double())
    data = make_clients([30, 40, 50])
    engine, reference = VectorizedEngine(task, data, **EACH[kind]), SequentialEngine(task, data)
    got, want = (train_round(one, task, 3, SGD(), steps=6).upload.params for one in (engine, reference))
    assert all(step.is_scripted for step in engine._compiler._steps.values())
    for k in want:
        torch.testing.assert_close(got[k], want[k], rtol=1e-9, atol=1e-9)


def test_compiled_steps_are_kept_by_what_they_depend_on() -> None:
    compiler, calls, labels = Compiler(), [], torch.zeros(2).long()

    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        calls.append(1)
        return [leaves[0] * batch[0]]

    for _ in range(3):
        compiler.step("a", function, [], [torch.ones(2)], [torch.ones(2), labels])
    once = len(calls)
    compiler.step("a", function, [], [torch.ones(3)], [torch.ones(3), labels])
    assert len(calls) == 2 * once
    compiler.step("b", function, [], [torch.ones(3)], [torch.ones(3), labels])
    assert len(calls) == 3 * once


def test_a_compiled_call_runs_without_its_function() -> None:
    compiler, made = Compiler(), []

    def function(a: Tensor, b: Tensor) -> dict[str, Any]:
        made.append(1)
        return {"sum": torch.vmap(lambda x, y: x + y.sum())(a, b), "same": (a,)}

    for seed in range(4):
        torch.manual_seed(seed)
        a, b = torch.randn(3), torch.randn(3, 2)
        tensors, structure = compiler.call("a", function, [a, b])
        found = tree_unflatten(tensors, structure)
        torch.testing.assert_close(found["sum"], a + b.sum(1))
        assert torch.equal(found["same"][0], a)
    once = len(made)
    assert once <= 2  # one result, one trace
    compiler.call("a", function, [torch.ones(4), torch.ones(4, 2)])
    assert len(made) == 2 * once
    compiler.call("b", function, [torch.ones(4), torch.ones(4, 2)])
    assert len(made) == 3 * once


@pytest.mark.parametrize(
    "function",
    [
        lambda a: [a * a.sum().item()],
        lambda a: [a.add_(1) - 1],
        lambda a: [a + torch.rand(2)],
        lambda a: [a * torch.tensor(a.tolist())],
    ],
    ids=["reads values", "writes over its input", "draws random numbers", "takes values out as a list"],
)
def test_a_call_that_cannot_be_compiled_runs_each_time(function: Any) -> None:
    given = torch.ones(2)
    call = compile_call(function, [given])
    assert given.tolist() == [1, 1]
    torch.manual_seed(3)
    want = function(torch.tensor([1.0, 2.0]))[0]
    torch.manual_seed(3)
    assert torch.equal(call(torch.tensor([1.0, 2.0]))[0][0], want)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_without_torchscript_steps_are_replayed_by_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = Task(NETWORKS[name]().double()), make_clients([30, 40, 50])
    want = train_round(VectorizedEngine(task, data), task, 3, SGD(), epochs=1)

    def missing(*_: Any) -> None:
        raise RuntimeError("no TorchScript")

    monkeypatch.setattr(torch.jit, "trace", missing)
    monkeypatch.delattr(torch.jit, "CompilationUnit")
    monkeypatch.setattr(compile_module, "_scripts", {})
    with use_threads(2):
        engine = VectorizedEngine(task, data)
        got = train_round(engine, task, 3, SGD(), epochs=1)
    assert all(step.operations and not step.is_scripted for step in engine._compiler._steps.values())
    for k in task.params:
        torch.testing.assert_close(want.upload.params[k], got.upload.params[k], rtol=1e-12, atol=1e-12)


def test_steps_run_without_a_graph_where_none_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        failed.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    def body(ready: list[Tensor], moving: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        return [moving[0] + ready[0] * batch[0].sum() + batch[1].sum()]

    failed: list[int] = []
    monkeypatch.setattr(GraphLoop, "_capture", fail)
    index, labels = torch.tensor([[0], [2], [1]]), torch.tensor([[1], [0], [1]])
    batches = StepBatches(torch.arange(6.0).view(3, 2), None, None, index, None, labels, None, None)
    plain, graph = StepLoop(body, torch.float32), GraphLoop(body, torch.float32)
    results = [loop(0, 3, [torch.tensor(2.0)], [torch.tensor(0.0)], batches) for loop in (plain, graph, graph)]
    assert [float(result[0]) for result in results] == [32, 32, 32]  # 2 x (0 + 1 + ... + 5) + 2
    assert failed == [1]


def test_later_runs_of_a_process_use_the_scripts_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchScript never frees a script, so a loop of runs would need more memory with each."""
    monkeypatch.setattr(compile_module, "_scripts", {})
    federation, results, scripts = make_clients([40, 60]), [], []
    for lr in (0.1, 0.1, 0.1, 0.2):
        torch.manual_seed(0)
        task = Task(NETWORKS["mlp"]())
        with use_threads(1):
            engine = VectorizedEngine(task, federation)
            results.append(train_round(engine, task, 2, SGD(), steps=3, lr=lr))
        (step,) = engine._compiler._steps.values()
        scripts.append(step.run_steps)
    assert scripts[0] is scripts[1] is scripts[2] is not scripts[3]  # the rate is a constant of the step
    assert len(compile_module._scripts) == 2
    for name, value in results[0].upload.params.items():
        assert torch.equal(value, results[1].upload.params[name])
        assert not torch.equal(value, results[3].upload.params[name])
