"""Record a client's work as flat lists of tensor operations, and replay them.

An eager step under `vmap` and `grad` spends most of its time in Python. `record_step` traces the step once, computes
constants before the first step, and lets the other operations write over their inputs. `record_call` traces what comes
before the first step and after the last.

TorchScript, where available, runs several steps in one call without Python. It spends less on every operation and does
not hold the interpreter's lock, so groups of clients run side by side in threads. PyTorch deprecates TorchScript and
offers no replacement for small operations. Without TorchScript, the same loop runs in Python, only slower. On a GPU,
the step becomes a CUDA graph instead.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten

from .loops import GraphLoop, StepBody, StepLoop, tensor_layouts
from .product_reuse import reuse_products
from .rewrites import fuse, reuse_memory, separate_outputs, simplify, split_graph
from .tracing import draws_random, trace

Tensors = Sequence[Tensor]


StepFunction = Callable[[Tensors, Tensors, Tensors], list[Tensor]]
"""step(fixed, leaves, batch) -> leaves: constants of all clients, their carries and buffers, and their batch."""


MAX_RECORDED_STEPS = 64
"""Recorded steps that stay in memory; a size of cohort or batch that comes back need not be recorded again."""


class RecordedStep(NamedTuple):
    """A step that is ready to run.

    Attributes:
        precompute: runs once for all steps of the same clients, on the fixed tensors and the leaves that stay. It
            returns the constant inputs of `body`.
        body: body(ready, moving, batch) -> moving, for the constant inputs, the leaves that move, and the batch. It may
            write over `moving`.
        run_steps: runs several steps; see `StepLoop`.
        is_scripted: whether several steps are one call that needs no Python.
        moving: numbers of the leaves that a step changes.
        is_random: whether the step draws random numbers.
        operations: number of operations in `body`; 0 for an eager step.
    """

    precompute: Callable[..., list[Any]]
    body: StepBody
    run_steps: nn.Module
    is_scripted: bool
    moving: tuple[int, ...]
    is_random: bool
    operations: int

    def select_constant(self, leaves: Sequence[Any]) -> list[Any]:
        """Select the leaves that a step does not change."""
        moving = set(self.moving)
        return [leaf for i, leaf in enumerate(leaves) if i not in moving]


RecordedCall = Callable[..., tuple[list[Tensor], TreeSpec]]
"""call(*tensors) -> the tensors of a function's result, and the structure of the result."""


class StepRecorder:
    """Record steps and calls, and keep them by everything they depend on."""

    def __init__(self, should_record: bool = True) -> None:
        self._steps: dict[Hashable, RecordedStep] = {}
        self._calls: dict[Hashable, RecordedCall] = {}
        self._should_record = should_record

    def call(
        self, key: Hashable, function: Callable[..., Any], tensors: Tensors
    ) -> tuple[list[Tensor], TreeSpec]:
        """Call a function that draws no random numbers; record it at the first call with tensors like these.

        Args:
            key: identifies the function.
            function: function(*tensors) -> a nest of tensors.
            tensors: its arguments.

        Returns:
            The tensors of the result, and the structure of the nest.
        """
        full_key = key, tensor_layouts(tensors)
        if full_key not in self._calls:
            _make_room(self._calls)
            self._calls[full_key] = record_call(function, tensors, self._should_record)
        return self._calls[full_key](*tensors)

    def step(
        self, key: Hashable, function: StepFunction, fixed: Tensors, leaves: Tensors, batch: Tensors
    ) -> RecordedStep:
        """Return a recorded step for tensors of these shapes and types; record it if there is none.

        Args:
            key: identifies the function.
            function: function(fixed, leaves, batch) -> the new leaves.
            fixed: tensors that all steps share.
            leaves: tensors that a step changes, or may change.
            batch: tensors of one mini-batch.

        """
        full_key = key, *(tensor_layouts(group) for group in (fixed, leaves, batch))
        if full_key not in self._steps:
            _make_room(self._steps)
            # Recording draws random numbers; the random numbers of the round must not shift.
            with torch.random.fork_rng(enabled=True):
                self._steps[full_key] = record_step(function, fixed, leaves, batch, self._should_record)
        return self._steps[full_key]


def _make_room(recorded: dict[Hashable, Any]) -> None:
    if len(recorded) >= MAX_RECORDED_STEPS:
        del recorded[next(iter(recorded))]


def record_call(function: Callable[..., Any], tensors: Tensors, should_record: bool = True) -> RecordedCall:
    """Record a function for tensors like the given ones; return it eager if it cannot be recorded."""

    def eager(*tensors: Tensor) -> tuple[list[Tensor], TreeSpec]:
        return tree_flatten(function(*tensors))

    if should_record:
        try:
            traced = trace(lambda *tensors: eager(*tensors)[0], [t.view_as(t) for t in tensors])
            if not any(_mutates(node) or draws_random(node) for node in traced.graph.nodes):
                traced.graph.eliminate_dead_code()
                simplify(traced.graph)
                fuse(traced.graph)
                replay = GraphModule(traced, traced.graph).forward
                # A value that the trace froze shows with other tensors only.
                others = [t * 1.01 + 0.01 if t.is_floating_point() else t for t in tensors]
                want, structure = eager(*others)
                if _agree(replay(*others), want, want):
                    return lambda *tensors: (list(replay(*tensors)), structure)
        except Exception:  # noqa: S110 (as of a step, below)
            pass
    return eager


def record_step(
    function: StepFunction, fixed: Tensors, leaves: Tensors, batch: Tensors, should_record: bool = True
) -> RecordedStep:
    """Record `function` for tensors like the given ones; return it eager if it cannot be recorded.

    Args:
        function: the step.
        fixed: constants of all clients.
        leaves: carries and buffers.
        batch: one batch.
        should_record: whether to record at all.
    """
    # Clone every leaf: a tensor that came twice would seem unchanged where it takes the value of the other leaf.
    apart = [leaf.clone() for leaf in leaves]
    eager = function(fixed, apart, batch)
    moving = tuple(
        i for i, (old, new) in enumerate(zip(apart, eager, strict=True)) if not _shares_memory(old, new)
    )
    if should_record:
        try:
            step = _trace_step(function, fixed, leaves, batch, moving)
            # A wrong rewriting rule must not change results: use the step only if it agrees with the eager one.
            again = function(fixed, eager, batch)
            old, new = [leaves[i] for i in moving], [again[i] for i in moving]
            for one in (_script(step, fixed, leaves, batch), step):
                result = replay(one, fixed, leaves, batch)
                if one.is_random or _agree(result, new, old):
                    return one
        except Exception:  # noqa: S110 (a trace cannot hold every rule or layer: run it eagerly)
            pass
    return _eager_step(function, len(fixed), len(leaves), moving, batch[0].dtype)


def _shares_memory(old: Tensor, new: Tensor) -> bool:
    is_same = (old.data_ptr(), old.shape, old.stride()) == (new.data_ptr(), new.shape, new.stride())
    return is_same and old.dtype == new.dtype


def replay(step: RecordedStep, fixed: Tensors, leaves: Tensors, batch: Tensors) -> Sequence[Tensor]:
    """Run two steps on copies: the second shows if the first wrote over an input that is still needed."""
    ready = step.precompute(*fixed, *step.select_constant(leaves))
    current = [copy_dense(leaves[i]) for i in step.moving]
    x, y, *rest = batch
    index = torch.arange(y.numel(), device=y.device).view_as(y)
    twice = [torch.stack([t, t]) for t in (index, y, *rest)]
    weights, noise = (*twice[2:], None, None)[:2]
    samples = (x.flatten(0, y.dim() - 1), None, None)
    results: Sequence[Tensor] = step.run_steps(0, 2, ready, current, samples, *twice[:2], weights, noise)
    return results


def _script(step: RecordedStep, fixed: Tensors, leaves: Tensors, batch: Tensors) -> RecordedStep:
    """Turn the step into TorchScript where possible, and on a GPU into a CUDA graph.

    A graph would repeat its random numbers.
    """
    if batch[0].device.type == "cuda" and not step.is_random:
        return step._replace(run_steps=GraphLoop(step.body, batch[0].dtype))
    if batch[0].device.type != "cpu":
        return step
    ready = step.precompute(*fixed, *step.select_constant(leaves))
    moving = [copy_dense(leaves[i]) for i in step.moving]
    compile_body: Callable[..., StepBody] = torch.jit.trace
    try:
        # It warns that TorchScript is deprecated, and that a trace holds for similar tensors only.
        with warnings.catch_warnings(action="ignore"):
            body = compile_body(step.body, (ready, moving, list(batch)), check_trace=False, strict=False)
            run_steps: nn.Module = torch.jit.script(StepLoop(body, batch[0].dtype))
        return step._replace(body=body, run_steps=run_steps, is_scripted=True)
    except Exception:  # undocumented exceptions; the step runs without TorchScript
        return step


def copy_dense(leaf: Tensor) -> Tensor:
    """Copy a leaf into memory of its own that can be written."""
    return leaf.clone(memory_format=torch.contiguous_format)


def _agree(result: Sequence[Tensor], reference: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Check that two results of a step from `before` are equal up to rounding and a few flipped values."""
    for a, b, old in zip(result, reference, before, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if b.dtype == torch.bool:
            if not torch.equal(a, b):
                return False
            continue
        moved = _magnitude(b - old) if b.shape == old.shape else _magnitude(b)
        rounding = 16 * torch.finfo(b.dtype).eps * _magnitude(b) if b.is_floating_point() else 0.0
        if not torch.allclose(a.double(), b.double(), 0, 0.05 * moved + rounding, equal_nan=True):
            return False
    return True


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0, 0, 0).amax()) if tensor.numel() else 0.0


def _eager_step(
    function: StepFunction, n_fixed: int, n_leaves: int, moving: tuple[int, ...], dtype: torch.dtype
) -> RecordedStep:
    stay = [i for i in range(n_leaves) if i not in set(moving)]

    def body(ready: list[Tensor], current: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        leaves: list[Any] = [None] * n_leaves
        for i, leaf in zip([*stay, *moving], [*ready[n_fixed:], *current], strict=True):
            leaves[i] = leaf
        new = function(ready[:n_fixed], leaves, batch)
        return [copy_dense(new[i]) for i in moving]  # a rule's results may share memory

    return RecordedStep(lambda *tensors: list(tensors), body, StepLoop(body, dtype), False, moving, True, 0)


def _trace_step(
    function: StepFunction, fixed: Tensors, leaves: Tensors, batch: Tensors, moving: tuple[int, ...]
) -> RecordedStep:
    # Every argument needs its own tensor: tracing cannot tell two uses of one tensor from each other.
    arguments = [t.view_as(t) for t in (*fixed, *leaves, *batch)]
    n, m = len(fixed), len(leaves)
    for i in moving:
        arguments[n + i] = copy_dense(leaves[i])

    def flat(*tensors: Tensor) -> list[Tensor]:
        new = function(tensors[:n], tensors[n : n + m], tensors[n + m :])
        return [new[i] for i in moving]

    traced = trace(flat, arguments)
    if any(_mutates(node) for node in traced.graph.nodes):
        traced = trace(functionalize(flat), arguments)
    graph = traced.graph
    graph.eliminate_dead_code()
    simplify(graph)
    reuse_products(graph)
    fuse(graph)
    is_random = any(draws_random(node) for node in graph.nodes)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    carried = [inputs[n + i] for i in moving]
    separate_outputs(graph, carried)
    late = set(carried) | set(inputs[n + m :])
    before, body = split_graph(traced, late)
    first = len([x for x in body.nodes if x.op == "placeholder"]) - len(late)
    late_inputs = [node for node in body.nodes if node.op == "placeholder"][first:]
    reuse_memory(body, late_inputs[: len(moving)])
    operations = sum(node.op in ("call_function", "call_method") for node in body.nodes)
    first_of_all, replay = (GraphModule(traced, one).forward for one in (before, body))

    nothing = batch[0].new_zeros(())

    def once(*tensors: Tensor) -> list[Tensor]:
        return [*first_of_all(*tensors), nothing]  # no list may be empty

    def each(ready: list[Tensor], current: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        return list(replay(*ready[:-1], *current, *batch))

    return RecordedStep(once, each, StepLoop(each, batch[0].dtype), False, moving, is_random, operations)


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
