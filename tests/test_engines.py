"""The engines' own machinery: lanes, recorded steps, the rules that simplify them, and what a round costs."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fedattune
from fedattune import Federation, Payload
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.client import SGD, Proximal
from fedattune.core.hardware import run_parallel, use_threads
from fedattune.core.task import Task, sample_losses
from fedattune.training.engine import (
    ClientInputs,
    ClientOutputs,
    Engine,
    LocalTraining,
    SequentialEngine,
    VectorizedEngine,
)
from fedattune.training.engine.kernels import (
    FastPrediction,
    linear_in_blocks,
    max_pool_with_indices,
    multiply_narrow,
)
from fedattune.training.engine.product_reuse import reuse_products
from fedattune.training.engine.recorder import StepRecorder, copy_dense, record_step
from fedattune.training.engine.rewrites import fuse, simplify
from fedattune.training.engine.runner import BatchSequence, batch_indices, pack_lanes

aten = torch.ops.aten


# --- lanes ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), st.integers(1, 4))
def test_lanes_train_every_client_once_and_finish_with_the_longest(counts: list[int], at_once: int) -> None:
    groups = pack_lanes(counts, at_once)
    every = [lane for lanes in groups for lane in lanes.clients]
    assert sorted(i for lane in every for i in lane) == [i for i, n in enumerate(counts) if n]
    for lanes in groups:
        assert lanes.steps == max(sum(counts[i] for i in lane) for lane in lanes.clients)
        assert lanes.steps < max(counts) + sum(counts) / len(every) + 1
        assert sum(len(at) for at in lanes.changes.values()) == sum(len(lane) for lane in lanes.clients)
    assert len(groups) == min(at_once, len(every))
    assert max(len(lanes.clients) for lanes in groups) - min(len(lanes.clients) for lanes in groups) <= 1


def test_what_a_lane_does_is_its_clients_batches_one_after_the_other() -> None:
    import numpy as np

    batches = [np.full((n, 1, 2), 10 * n) + np.arange(n)[:, None, None] for n in (3, 1, 2)]
    (lanes,) = pack_lanes([3, 1, 2])
    assert lanes.clients == [[0], [2, 1]]
    index = batch_indices(lanes, batches)
    assert index[:, :, 0, 0].T.tolist() == [[30, 31, 32], [20, 21, 10]]


def test_a_short_batch_is_padded_and_a_lane_with_nothing_left_repeats_its_last_step() -> None:
    import numpy as np

    batches = [np.arange(6).reshape(3, 1, 2), np.array([[[7]], [[8]]])]
    index = batch_indices(pack_lanes([3, 2])[0], batches)
    assert index[:, 1, 0].tolist() == [[7, -1], [8, -1], [8, -1]]


# --- recorded steps -------------------------------------------------------------------------------------

Tensors = list[Tensor]


def _replayed(function: Any, fixed: Tensors, leaves: Tensors, batches: list[Tensors]) -> Tensors:
    """The leaves after all batches, by a recorded step."""
    step = record_step(function, fixed, leaves, batches[0])
    assert step.operations, "the step was not recorded"
    here = [copy_dense(a) if i in step.moving else a for i, a in enumerate(leaves)]
    ready = step.before(*fixed, *step.staying(here))
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
def test_a_recorded_step_may_share_swap_and_keep_its_tensors(name: str) -> None:
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


class LastIterate(SGD):
    """Carries the model of the step before, which at first is the same tensor as the model."""

    def begin(self, sent: Any, memory: Any, fresh: Any, job: Any) -> Any:
        return sent.params, sent.params

    def step(self, carry: Any, batch: Any, grad: Any, job: Any) -> Any:
        w, last = carry
        return w - 0.1 * grad(w, batch) + 0.5 * (w - last), w

    def finish(self, carry: Any, sent: Any, memory: Any, job: Any) -> Any:
        return Payload(carry[0], {"last": carry[1]}), {}


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("recording", [False, True])
def test_leaves_that_begin_as_one_tensor_and_part(steps: int, single: bool, recording: bool) -> None:
    task, data = Task(NETWORKS["mlp"]().double()), _federation([40, 13, 30])
    want = _train(SequentialEngine(task, data), task, 3, LastIterate(), steps=steps)
    got = _train(
        VectorizedEngine(task, data, single=single, recording=recording), task, 3, LastIterate(), steps=steps
    )
    for a, b in (
        (want.upload.params, got.upload.params),
        (want.upload.extra["last"], got.upload.extra["last"]),
    ):
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-12, atol=1e-12)


def test_what_does_not_move_is_computed_once_before_the_first_step() -> None:
    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        w, anchor = leaves
        return [w - (anchor.exp() / fixed[0]).sin() * batch[0], anchor]

    step = record_step(
        function,
        [torch.tensor(2.0)],
        [torch.randn(4), torch.randn(4)],
        [torch.randn(4), torch.zeros(4).long()],
    )
    assert step.moving == (0,)
    assert step.operations == 2  # the product and the difference


def test_a_step_that_cannot_be_recorded_runs_as_it_is() -> None:
    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        return [leaves[0] + (1.0 if batch[0].sum() > 0 else -1.0)]

    step = record_step(function, [], [torch.zeros(2)], [torch.ones(2), torch.zeros(2).long()])
    assert not step.operations
    assert step.body([], [torch.zeros(2)], [-torch.ones(2)])[0].tolist() == [-1, -1]


def test_a_recording_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is aten.sub.Tensor:
                node.target = aten.add.Tensor

    monkeypatch.setattr("fedattune.training.engine.rewrites.simplify", wrong)
    batch = [torch.ones(2), torch.zeros(2).long()]
    step = record_step(lambda f, leaves, b: [leaves[0] - b[0]], [], [torch.ones(2)], batch)
    assert not step.operations
    assert step.body([], [torch.ones(2)], [torch.ones(2)])[0].tolist() == [0, 0]


def test_recorded_steps_are_kept_by_what_they_depend_on() -> None:
    recorder, calls, labels = StepRecorder(), [], torch.zeros(2).long()

    def function(fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        calls.append(1)
        return [leaves[0] * batch[0]]

    for _ in range(3):
        recorder.step("a", function, [], [torch.ones(2)], [torch.ones(2), labels])
    once = len(calls)
    recorder.step("a", function, [], [torch.ones(3)], [torch.ones(3), labels])
    assert len(calls) == 2 * once
    recorder.step("b", function, [], [torch.ones(3)], [torch.ones(3), labels])
    assert len(calls) == 3 * once


# --- rules ----------------------------------------------------------------------------------------------


def _targets(function: Any, *given_: Tensor) -> tuple[Counter[Any], Tensor, Tensor]:
    """The operations of a simplified function, what it gives, and what the function gives."""
    traced = make_fx(function)(*given_)
    traced.graph.eliminate_dead_code()
    simplify(traced.graph)
    reuse_products(traced.graph)
    fuse(traced.graph)
    traced.recompile()
    return (
        Counter(n.target for n in traced.graph.nodes if n.op == "call_function"),
        traced(*given_),
        function(*given_),
    )


def test_an_update_is_one_product_that_adds_into_the_weights() -> None:
    a = torch.randn(3, 4, 5)
    used, got, want = _targets(
        lambda w, d, x: w - 0.1 * torch.bmm(d, x), a, torch.randn(3, 4, 2), torch.randn(3, 2, 5)
    )
    assert used == {aten.baddbmm.default: 1}
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scale", ["w - 0.3 * g", "w + g * 0.3", "0.3 * g + w"])
def test_a_scaled_sum_is_one_pass(scale: str) -> None:
    used, got, want = _targets(lambda w, g: eval(scale, {}, {"w": w, "g": g}), torch.randn(4), torch.randn(4))
    assert sum(used.values()) == 1
    torch.testing.assert_close(got, want)


def test_moving_towards_something_is_one_pass() -> None:
    used, got, want = _targets(lambda w, v: w - 0.3 * (w - v), torch.randn(4), torch.randn(4))
    assert used == {aten.lerp.Scalar: 1}
    torch.testing.assert_close(got, want)


PROXIMAL_STEPS = 4


def _layer_first(w: Tensor, x: Tensor) -> Tensor:
    return (w @ x.mT).mT


def _layer_last(w: Tensor, x: Tensor) -> Tensor:
    return x @ w.mT


def _steps_on(outputs: Any, parts: int, decay: float) -> Any:
    """Proximal steps of a layer w towards v, each on one of so many parts of the samples x in turn."""

    def steps(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        for k in range(PROXIMAL_STEPS):
            part = x.chunk(parts, -2)[k % parts]
            d = outputs(w, part).tanh()
            w = w - 0.02 * (d.mT @ part + decay * w + 0.5 * (w - v))
        return w

    return steps


def _of_inputs(inputs: int, *sizes: int) -> list[Tensor]:
    torch.manual_seed(0)
    *clients, outputs, samples = sizes
    return [torch.randn(*clients, n, inputs).double() for n in (outputs, outputs, samples)]


@pytest.mark.parametrize("outputs", [_layer_first, _layer_last])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("sizes", [(3, 5, 6), (5, 6)], ids=["three clients", "one client"])
def test_steps_on_one_batch_read_and_write_a_layer_once(
    outputs: Any, decay: float, sizes: tuple[int, ...]
) -> None:
    given_ = _of_inputs(600, *sizes)
    used, got, want = _targets(_steps_on(outputs, 1, decay), *given_)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    products = {aten.bmm.default, aten.mm.default, aten.baddbmm.default, aten.addmm.default}
    # w x' and v x' and x x', then one small product for each later step, and one that writes w
    assert sum(used[p] for p in products) == 3 + (PROXIMAL_STEPS - 1) + 1


@pytest.mark.parametrize(
    ("inputs", "sizes", "parts"),
    [(600, (3, 5, 6), 2), (600, (3, 5, 11), 1), (500, (3, 5, 6), 1)],
    ids=["other samples", "many samples", "few inputs"],
)
def test_a_layer_is_multiplied_in_every_step_where_the_first_product_does_not_help(
    inputs: int, sizes: tuple[int, ...], parts: int
) -> None:
    used, got, want = _targets(_steps_on(_layer_last, parts, 0.1), *_of_inputs(inputs, *sizes))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert used[aten.bmm.default] + used[aten.baddbmm.default] == 2 * PROXIMAL_STEPS


def test_the_gradient_of_the_loss_takes_few_operations() -> None:
    z, y = torch.randn(5, 4), torch.randint(0, 4, (5,))
    used, got, _ = _targets(grad(lambda z: sample_losses(z, y).mean()), z)
    torch.testing.assert_close(got, grad(lambda z: nn.functional.cross_entropy(z, y))(z))
    views = {aten.unsqueeze.default, aten.view.default, aten.expand.default}
    assert sum(n for target, n in used.items() if target not in views) <= 10  # three of them constants


def test_pooling_before_rectifying_gives_the_same_gradient_ties_included() -> None:
    x = torch.randint(-2, 3, (2, 3, 8, 8)).double()  # many ties, and windows without a positive value
    weight = torch.randn(2, 3, 4, 4).double()
    used, got, want = _targets(grad(lambda x: (torch.max_pool2d(x.relu(), 2) * weight).sum()), x)
    assert torch.equal(got, want)
    assert used[aten.max_pool2d_with_indices.default] == 1


@pytest.mark.parametrize(
    "how", [([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([2, 2], [2, 2], [0, 0], [1, 1], True)]
)
@pytest.mark.parametrize("channels", [1, 8])
def test_pooling_channel_by_channel_gives_the_same_values_and_places(channels: int, how: Any) -> None:
    x = torch.randint(-2, 3, (2, channels, 7, 9)).double()  # many ties
    for a, b in zip(max_pool_with_indices(x, *how), aten.max_pool2d_with_indices(x, *how), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()


def test_losses_are_cross_entropy() -> None:
    logits, y = 40 * torch.randn(50, 7).double(), torch.randint(0, 7, (50,))
    expected = nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(sample_losses(logits, y), expected, rtol=1e-12, atol=1e-12)


# --- engines --------------------------------------------------------------------------------------------

NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    ),
}
EACH = {"wide": {"single": False}, "single": {"single": True}}


def _federation(sizes: list[int]) -> Federation:
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation(
        [
            (torch.rand(n, 1, 8, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator))
            for n in sizes
        ]
    )


def _train(engine: Engine, task: Task, n: int, rule: Any, **work: Any) -> ClientOutputs:
    yes = torch.ones(n, dtype=torch.bool)
    inputs = ClientInputs(Payload(task.params.repeat(n)), {}, task.buffers.copies(n), yes, yes)
    todo = {"seed": 0, "stream": 1, "round": 1, "lr": 0.05, "batch_size": 8, "weight_decay": 0.01} | work
    return engine.train(rule, torch.arange(n), inputs, LocalTraining(**todo))


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("work", [{"steps": 6}, {"epochs": 2}], ids=["steps", "epochs"])
def test_recorded_steps_give_what_the_reference_gives(kind: str, name: str, work: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = [40, 13, 90, 25, 9]
    data, task = _federation(sizes), Task(NETWORKS[name]().double())
    work = {**work, "drop_last": task.uses_batch_statistics}
    for rule in (SGD((Proximal(0.1),)), SGD(momentum=0.9, clip=1.0)):
        reference, engine = SequentialEngine(task, data), VectorizedEngine(task, data, **EACH[kind])
        want, got = (_train(e, task, 5, rule, **work) for e in (reference, engine))
        assert all(step.operations for step in engine._recorder._steps.values())
        assert torch.equal(want.n_steps, got.n_steps)
        for a, b in ((want.upload.params, got.upload.params), (want.buffers, got.buffers)):
            for k in a:
                torch.testing.assert_close(a[k], b[k], rtol=1e-10, atol=1e-12)
        ids = torch.tensor([0, 2, 3])
        scores = [
            e.evaluate(got.upload.params.rows(ids), got.buffers.rows(ids), "test", ids)
            for e in (reference, engine)
        ]
        assert torch.equal(scores[0].correct, scores[1].correct)
        torch.testing.assert_close(scores[0].loss, scores[1].loss)


@pytest.mark.parametrize("kind", EACH)
def test_several_steps_on_one_batch_give_what_the_reference_gives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedattune.training.engine.product_reuse.MIN_LAYER_INPUTS", 64)
    data, task = _federation([40, 13, 90]), Task(NETWORKS["mlp"]().double())
    rule = PFedMeClient(0.5, 4, 0.02)
    engine = VectorizedEngine(task, data, **EACH[kind])
    want, got = (
        _train(e, task, 3, rule, steps=7, batch_size=10) for e in (SequentialEngine(task, data), engine)
    )
    assert all(step.operations for step in engine._recorder._steps.values())
    for a, b in ((want.upload.params, got.upload.params), (want.memory["theta"], got.memory["theta"])):
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", EACH)
def test_noise_repeats_with_the_seed_and_leaves_the_generator_alone(kind: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    task, data = Task(net.double()), _federation([30, 40, 50])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    engine = VectorizedEngine(task, data, **EACH[kind])
    with use_threads(2):
        first, again = (_train(engine, task, 3, SGD(), steps=4) for _ in range(2))  # recorded, then replayed
        other = _train(engine, task, 3, SGD(), steps=4, round=2)
    assert torch.equal(torch.rand(3), expected)
    for k in task.params:
        assert torch.equal(first.upload.params[k], again.upload.params[k])
    assert not torch.equal(first.upload.params["1.weight"], other.upload.params["1.weight"])


@pytest.mark.parametrize(("name", "kind"), [("conv", "single"), ("mlp", "wide")])
def test_the_number_of_threads_does_not_change_the_result(name: str, kind: str) -> None:
    task, data = Task(NETWORKS[name]()), _federation([30, 40, 50, 20, 90, 31, 8])
    results = []
    for n in (1, 3):
        with use_threads(n):
            engine = VectorizedEngine(task, data, **EACH[kind])
            results.append(_train(engine, task, 7, SGD((Proximal(0.1),), momentum=0.9), epochs=2))
            assert torch.get_num_threads() == n
        # PyTorch cannot trace the gradient of a convolution, which is large enough to be called from Python.
        assert all(step.scripted == (kind == "wide") for step in engine._recorder._steps.values())
    for k in task.params:
        torch.testing.assert_close(
            results[0].upload.params[k], results[1].upload.params[k], rtol=1e-6, atol=1e-7
        )


def test_without_torchscript_steps_are_replayed_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = Task(NETWORKS["mlp"]().double()), _federation([30, 40, 50])
    want = _train(VectorizedEngine(task, data), task, 3, SGD(), epochs=1)

    def missing(*_: Any) -> None:
        raise RuntimeError("no TorchScript")

    monkeypatch.setattr("fedattune.training.engine.recorder.script_body", missing)
    with use_threads(2):
        engine = VectorizedEngine(task, data)
        got = _train(engine, task, 3, SGD(), epochs=1)
    assert all(step.operations and not step.scripted for step in engine._recorder._steps.values())
    for k in task.params:
        torch.testing.assert_close(want.upload.params[k], got.upload.params[k], rtol=1e-12, atol=1e-12)


def test_logits_of_many_inputs_are_the_same_by_the_faster_product() -> None:
    x, w = torch.randn(3, 20, 600), torch.randn(3, 10, 600)
    assert multiply_narrow(x[:, :10], w.transpose(1, 2)) is NotImplemented  # not faster
    assert multiply_narrow(x[:, :, :10], w[:, :, :10].transpose(1, 2)) is NotImplemented
    torch.testing.assert_close(
        multiply_narrow(x, w.transpose(1, 2)), x @ w.transpose(1, 2), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("rows", [3, 24, 77])
@pytest.mark.parametrize("bias", [False, True])
def test_a_model_predicts_the_same_where_faster_calls_are_made(rows: int, bias: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(968, 10, bias=bias),
        nn.ReLU(),
        nn.Linear(10, 3),
    )
    x = torch.randn(rows, 1, 24, 24)
    with torch.no_grad(), Watch() as seen, FastPrediction():
        got = net(x)
    assert seen.operations["aten.bmm.out"] == (rows >= 24)
    assert seen.operations["aten.clone.default"] == 2  # channels beside each other, and back
    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)


def test_calls_that_are_not_made_faster_stay_as_they_are() -> None:
    x, w, image = torch.randn(30, 600), torch.randn(4, 600), torch.randn(2, 8, 6, 6)
    functional = nn.functional
    calls = (
        lambda: functional.linear(input=x, weight=w, bias=None),
        lambda: functional.linear(x, w[0]),
        lambda: functional.max_pool2d(input=image, kernel_size=2),
        lambda: functional.max_pool2d(image, 2, return_indices=True)[1],
        lambda: functional.max_pool2d(image, 2, 2, 0, 1, False, True)[1],
        lambda: torch.max_pool2d(image, 2),
    )
    for call in calls:
        with torch.no_grad(), FastPrediction():
            got = call()
        torch.testing.assert_close(got, call(), rtol=1e-5, atol=1e-4)


class Padding(SGD):
    """Carries how much weight there was in batches with padding; the others leave it as it is."""

    def begin(self, sent: Any, memory: Any, fresh: Any, job: Any) -> Any:
        return sent.params, next(iter(sent.params.values())).new_zeros(())

    def step(self, carry: Any, batch: Any, grad: Any, job: Any) -> Any:
        w, c = carry
        more = 0.001 * batch[2].sum() if len(batch) == 3 else 0.0
        return w.map(lambda a, g: a - (0.05 + c) * g, grad(w, batch)), c + more if len(batch) == 3 else c

    def finish(self, carry: Any, sent: Any, memory: Any, job: Any) -> Any:
        return Payload(carry[0]), {}


@pytest.mark.parametrize("kind", EACH)
def test_what_only_steps_with_padding_move_reaches_the_others(kind: str) -> None:
    task, data = Task(NETWORKS["mlp"]().double()), _federation([40] * 4)
    work = {"epochs": 3, "batch_size": 7}
    want = _train(VectorizedEngine(task, data, single=True, recording=False), task, 4, Padding(), **work)
    with use_threads(2):
        got = _train(VectorizedEngine(task, data, **EACH[kind]), task, 4, Padding(), **work)
    for k in task.params:
        torch.testing.assert_close(want.upload.params[k], got.upload.params[k], rtol=1e-10, atol=1e-12)


def test_linear_layers_of_other_types_stay_as_they_are() -> None:
    x, w = torch.randn(30, 600).double(), torch.randn(4, 600).double()
    assert torch.equal(linear_in_blocks(x, w), nn.functional.linear(x, w))
    assert torch.equal(linear_in_blocks(x[0], w), nn.functional.linear(x[0], w))


def test_a_fault_in_one_line_is_raised_after_all_have_ended() -> None:
    ended = []

    def fails() -> None:
        raise ValueError("line 1")

    with pytest.raises(ValueError, match="line 1"):
        run_parallel([lambda: ended.append(0), fails, lambda: ended.append(2)])
    assert sorted(ended) == [0, 2]


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_mixed_precision_trains_float32_weights_with_coarser_products(name: str) -> None:
    torch.manual_seed(0)
    data, model = _federation([40, 30]), NETWORKS[name]()
    exact, coarse = (
        _train(VectorizedEngine(t, data), t, 2, SGD(), steps=4) for t in (Task(model), Task(model, True))
    )
    for k, a in exact.upload.params.items():
        b, moved = coarse.upload.params[k], (a - Task(model).params[k]).norm()
        assert b.dtype == torch.float32
        assert 1e-6 * moved < (a - b).norm() < 0.2 * moved


def test_mixed_precision_is_refused_where_it_makes_no_sense(ragged: Federation) -> None:
    with pytest.raises(fedattune.ConfigError, match="mixed_precision: bfloat16 goes with dtype float32"):
        fedattune.fit("fedavg", ragged, dtype="float64", mixed_precision="bfloat16")


def test_mixed_precision_is_refused_where_the_processor_lacks_it(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.raises(fedattune.ConfigError, match="the cpu here has no bfloat16 arithmetic; leave it off"):
        fedattune.fit("fedavg", ragged, device="cpu", mixed_precision="bfloat16")


# --- what a round costs: no timing, but counts ------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts operations, and notes the largest tensor that one made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations[str(func)] += 1
        if isinstance(out, Tensor) and not any(r.alias_info for r in func._schema.returns):
            self.largest = max(self.largest, out.numel())
        return out


def _watched(n: int, steps: int, model: str = "mlp") -> Watch:
    """A round of n clients whose steps were recorded before."""
    data, task = _federation([400] * n), Task(NETWORKS[model]())
    engine = VectorizedEngine(task, data)
    with use_threads(1):
        _train(engine, task, n, SGD(), steps=steps)
    with use_threads(1), Watch() as seen:  # it sees this thread alone
        trained = _train(engine, task, n, SGD(), steps=steps)
        engine.evaluate(trained.upload.params, trained.buffers, "test", torch.arange(n))
    return seen


def test_operations_of_a_round_do_not_grow_with_the_clients_and_few_with_the_steps() -> None:
    few, many, longer = _watched(3, 4), _watched(9, 4), _watched(3, 8)
    assert few.operations.total() == many.operations.total()
    per_step = (longer.operations.total() - few.operations.total()) / 4
    assert 10 <= per_step <= 40, longer.operations  # 38 when this was written, views included
    # Small batches are gathered several steps ahead.
    assert longer.operations["aten.index_select.default"] == few.operations["aten.index_select.default"]


def test_all_steps_of_a_group_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    run = BatchSequence.run

    def counted(self: BatchSequence, step: Any, ready: Any, moving: Any, first: int, last: int) -> Any:
        calls.append((first, last))
        return run(self, step, ready, moving, first, last)

    monkeypatch.setattr(BatchSequence, "run", counted)
    task, data = Task(NETWORKS["mlp"]()), _federation([40] * 6)
    with use_threads(2):
        engine = VectorizedEngine(task, data)
        _train(engine, task, 6, SGD(), steps=50)
    assert calls == [(0, 50)] * 2
    assert all(step.scripted for step in engine._recorder._steps.values())


def test_a_round_never_copies_the_data_set() -> None:
    seen = _watched(6, 4)
    batch = 6 * 8 * 64
    assert seen.largest < 6 * 400 * 64 / 2  # the data set has 6 * 400 samples of 64 values
    assert seen.largest >= batch
