"""Compile a client's work into flat lists of tensor operations.

An eager step under `vmap` and `grad` spends most of its time in Python. `compile_step` traces the step once, applies
PASSES, computes constants before the first step, and lets operations write over their inputs. TorchScript or a CUDA
graph then runs many steps in one call. `compile_call` does the first two for what precedes and follows the steps.
"""

import math
import random
import warnings
from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten

from ...core.params import copy_dense
from . import rewrites
from .loops import GraphLoop, StepBatches, StepBody, StepLoop, tensor_layouts
from .product_reuse import reuse_products
from .rewrites import reuse_memory, separate_outputs, split_graph
from .tracing import draws_random, trace

Tensors = Sequence[Tensor]

StepFunction = Callable[[Tensors, Tensors, Tensors], list[Tensor]]
"""step(fixed, leaves, batch) -> leaves: constants of all clients, their carries and buffers, and their batch."""

MAX_COMPILED_STEPS = 64
"""Compiled steps that stay in memory, so that a size of cohort or batch that comes back is not compiled again."""

PASSES: dict[str, Callable[[Graph], None]] = {
    "constants": rewrites.each_node(rewrites.detach_constants),
    "views": rewrites.each_node(rewrites.drop_same_views),
    "transposes": rewrites.each_node(rewrites.drop_double_transposes),
    "scaled sums": rewrites.each_node(rewrites.fuse_scale),
    "pulls": rewrites.each_node(rewrites.fuse_pull),
    "product reuse": reuse_products,
    "product order": rewrites.each_node(rewrites.turn_product),
    "adding products": rewrites.each_node(rewrites.fuse_product),
    "pooling": rewrites.each_node(rewrites.pool_by_channels),
    "masks": rewrites.each_node(rewrites.script_masked),
}
"""Passes over a traced graph, in order. Each keeps the result up to the rounding of fused multiply-adds."""


class CompiledStep(NamedTuple):
    """A step that is ready to run: compiled, or eager if it cannot be compiled.

    Attributes:
        precompute: runs once for all steps of the same clients, on the fixed tensors and the leaves that stay. It
            returns the constant inputs of `body`.
        body: body(ready, moving, batch) -> moving, for the constant inputs, the leaves that move, and the batch. It may
            write over `moving`.
        run_steps: runs several steps; see `StepLoop`.
        is_scripted: whether several steps are one call that needs no Python.
        moving: numbers of the leaves that a step changes.
        operations: number of operations in `body`; 0 for an eager step.
        code: what `body` does; None if it holds tensors, or is eager.
    """

    precompute: Callable[..., list[Any]]
    body: StepBody
    run_steps: nn.Module
    is_scripted: bool
    moving: tuple[int, ...]
    is_random: bool
    operations: int
    code: Hashable | None = None

    def select_constant(self, leaves: Sequence[Any]) -> list[Any]:
        moving = set(self.moving)
        return [leaf for i, leaf in enumerate(leaves) if i not in moving]

    def run_twice(self, fixed: Tensors, leaves: Tensors, batch: Tensors) -> Tensors:
        """Run two steps on copies: the second shows if the first wrote over an input that is still needed."""
        ready = self.precompute(*fixed, *self.select_constant(leaves))
        current = [copy_dense(leaves[i]) for i in self.moving]
        x, y, *rest = batch
        # Inputs and targets agree in the axes of samples. If they agree in more, values take the place of samples.
        shape = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(x.shape, y.shape, strict=False))]
        index = torch.arange(math.prod(shape), device=y.device).view(shape)
        index, labels, *more = (torch.stack([t, t]) for t in (index, y, *rest))
        weights, noise = (*more, None, None)[:2]
        batches = StepBatches(x.flatten(0, len(shape) - 1), None, None, index, None, labels, weights, noise)
        results: Tensors = self.run_steps(0, 2, ready, current, batches)
        return results


CompiledCall = Callable[..., tuple[list[Tensor], TreeSpec]]
"""call(*tensors) -> the tensors of a function's result, and the structure of the result."""


class Compiler:
    """Compile the steps and calls of a run, and keep them by everything they depend on.

    With `should_compile=False`, everything runs eagerly. What changes numbers of Python's that the modules of `model`
    keep runs eagerly, too.
    """

    def __init__(self, should_compile: bool = True, model: nn.Module | None = None) -> None:
        self._steps: dict[Hashable, CompiledStep] = {}
        self._calls: dict[Hashable, CompiledCall] = {}
        self.should_compile, self._model = should_compile, model

    def call(self, key: Hashable, function: Callable[..., Any], tensors: Tensors) -> tuple[list[Tensor], TreeSpec]:
        """Call a function that draws no random numbers; compile it at the first call with tensors like these.

        Return the tensors of the result, and the structure of the nest.
        """
        full_key = key, tensor_layouts(tensors)
        if full_key not in self._calls:
            _make_room(self._calls)
            self._calls[full_key] = compile_call(function, tensors, self.should_compile, self._model)
        return self._calls[full_key](*tensors)

    def step(
        self, key: Hashable, function: StepFunction, fixed: Tensors, leaves: Tensors, batch: Tensors
    ) -> CompiledStep:
        """Return a compiled step for tensors of these shapes and types; all steps share the `fixed` ones."""
        full_key = key, *(tensor_layouts(group) for group in (fixed, leaves, batch))
        if full_key not in self._steps:
            _make_room(self._steps)
            # Compiling draws random numbers; the random numbers of the round must not shift.
            with torch.random.fork_rng(enabled=True):
                self._steps[full_key] = compile_step(function, fixed, leaves, batch, self.should_compile, self._model)
        return self._steps[full_key]


def _make_room(compiled: dict[Hashable, Any]) -> None:
    if len(compiled) >= MAX_COMPILED_STEPS:
        del compiled[next(iter(compiled))]


def _read_python_state(model: nn.Module | None) -> Hashable:
    """Return what a trace would freeze without a sign of it: Python's random numbers, and the numbers in modules."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = (
        (module, key, value)
        for module in (() if model is None else model.modules())
        for key, value in vars(module).items()
        if isinstance(value, int | float) and key != "training"
    )
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest, *numbers


def compile_call(
    function: Callable[..., Any], tensors: Tensors, should_compile: bool = True, model: nn.Module | None = None
) -> CompiledCall:
    """Compile a function for tensors like the given ones; return it eager if it cannot be compiled."""

    def eager(*tensors: Tensor) -> tuple[list[Tensor], TreeSpec]:
        return tree_flatten(function(*tensors))

    if should_compile:
        try:
            traced = trace(lambda *tensors: eager(*tensors)[0], [t.view_as(t) for t in tensors])
            if not any(_mutates(node) or draws_random(node) for node in traced.graph.nodes):
                apply_passes(traced.graph)
                replay = GraphModule(traced, traced.graph).forward
                # A value that the trace froze shows with other tensors only.
                others = [t * 1.01 + 0.01 if t.is_floating_point() else t for t in tensors]
                before = _read_python_state(model)
                want, structure = eager(*others)
                if _read_python_state(model) == before and _agree(replay(*others), want, want):
                    return lambda *tensors: (list(replay(*tensors)), structure)
        except Exception:  # noqa: S110 (as of a step, below)
            pass
    return eager


def compile_step(
    function: StepFunction,
    fixed: Tensors,
    leaves: Tensors,
    batch: Tensors,
    should_compile: bool = True,
    model: nn.Module | None = None,
) -> CompiledStep:
    """Compile `function` for tensors like the given ones; return it eager if it cannot be compiled."""
    # Clone every leaf: a tensor that came twice would seem unchanged where it takes the value of the other leaf.
    apart = [leaf.clone() for leaf in leaves]
    eager = function(fixed, apart, batch)
    moving = tuple(i for i, (old, new) in enumerate(zip(apart, eager, strict=True)) if not _shares_memory(old, new))
    if should_compile:
        try:
            step = _trace_step(function, fixed, leaves, batch, moving)
            # A wrong rewriting rule must not change results: use the step only if it agrees with the eager one.
            before = _read_python_state(model)  # after the first call, at which a module may note shapes
            again = function(fixed, eager, batch)
            if _read_python_state(model) != before:
                return _eager_step(function, len(fixed), len(leaves), moving, batch[0].dtype)
            old, new = [leaves[i] for i in moving], [again[i] for i in moving]
            for one in (_script(step, fixed, leaves, batch), step):
                result = one.run_twice(fixed, leaves, batch)
                if one.is_random or _agree(result, new, old):
                    return one
        except Exception:  # noqa: S110 (a trace cannot hold every rule or layer: run it eagerly)
            pass
    return _eager_step(function, len(fixed), len(leaves), moving, batch[0].dtype)


def _shares_memory(old: Tensor, new: Tensor) -> bool:
    is_same = (old.data_ptr(), old.shape, old.stride()) == (new.data_ptr(), new.shape, new.stride())
    return is_same and old.dtype == new.dtype


def _script(step: CompiledStep, fixed: Tensors, leaves: Tensors, batch: Tensors) -> CompiledStep:
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
    key = step.code, *(tensor_layouts(group) for group in (ready, moving, batch))
    if key in _scripts:
        body, run_steps = _scripts[key]
        return step._replace(body=body, run_steps=run_steps, is_scripted=True)
    try:
        # It warns that TorchScript is deprecated, and that a trace holds for similar tensors only.
        with warnings.catch_warnings(action="ignore"):
            body = compile_body(step.body, (ready, moving, list(batch)), check_trace=False, strict=False)
            run_steps = torch.jit.script(StepLoop(body, batch[0].dtype))
        if step.code is not None:
            _make_room(_scripts)
            _scripts[key] = body, run_steps
        return step._replace(body=body, run_steps=run_steps, is_scripted=True)
    except Exception:  # undocumented exceptions; the step runs without TorchScript
        return step


_scripts: dict[Hashable, tuple[StepBody, nn.Module]] = {}
"""Scripts of all runs of this process, by what they do and their inputs.

TorchScript keeps the types of every script to the end of the process, a megabyte each, also if nobody has the script.
"""


def _describe_code(graph: Graph) -> Hashable | None:
    """Return a key that is equal for graphs that do the same with their inputs; None for graphs that hold tensors."""
    if any(node.op in ("get_attr", "call_module") for node in graph.nodes):
        return None
    # The text has the arguments, but names functions of any origin alike.
    return graph.python_code("self").src, *(node.target for node in graph.nodes if node.op == "call_function")


def _agree(result: Sequence[Tensor], reference: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Check that two results of a step from `before` are equal up to rounding and a few flipped values.

    The gradient of a bias before BatchNorm is a sum that cancels out: rounding of the size of other changes remains.
    """
    changes = [_magnitude(b - old) for b, old in zip(reference, before, strict=True) if _is_change(b, old)]
    usual_change = median(changes) if changes else 0.0
    for a, b, old in zip(result, reference, before, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if b.dtype == torch.bool:
            if not torch.equal(a, b):
                return False
            continue
        moved = _magnitude(b - old) if b.shape == old.shape else _magnitude(b)
        is_number = b.is_floating_point()
        rounding = 16 * torch.finfo(b.dtype).eps * max(_magnitude(b), usual_change) if is_number else 0.0
        if not torch.allclose(a.double(), b.double(), 0, 0.05 * moved + rounding, equal_nan=True):
            return False
    return True


def _is_change(new: Tensor, old: Tensor) -> bool:
    return new.is_floating_point() and new.shape == old.shape


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0, 0, 0).amax()) if tensor.numel() else 0.0


def _eager_step(
    function: StepFunction, n_fixed: int, n_leaves: int, moving: tuple[int, ...], dtype: torch.dtype
) -> CompiledStep:
    stay = [i for i in range(n_leaves) if i not in set(moving)]

    def body(ready: list[Tensor], current: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        leaves: list[Any] = [None] * n_leaves
        for i, leaf in zip([*stay, *moving], [*ready[n_fixed:], *current], strict=True):
            leaves[i] = leaf
        new = function(ready[:n_fixed], leaves, batch)
        return [copy_dense(new[i]) for i in moving]  # a rule's results may share memory

    return CompiledStep(lambda *tensors: list(tensors), body, StepLoop(body, dtype), False, moving, True, 0)


def _trace_step(
    function: StepFunction, fixed: Tensors, leaves: Tensors, batch: Tensors, moving: tuple[int, ...]
) -> CompiledStep:
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
    apply_passes(graph)
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

    loop, code = StepLoop(each, batch[0].dtype), _describe_code(body)
    return CompiledStep(once, each, loop, False, moving, is_random, operations, code)


def apply_passes(graph: Graph) -> None:
    """Apply PASSES to a traced graph."""
    graph.eliminate_dead_code()
    for apply in PASSES.values():
        apply(graph)


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
