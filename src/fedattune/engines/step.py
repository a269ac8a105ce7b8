"""One local step as a flat list of tensor operations, recorded once and replayed.

Run eagerly, a step under `vmap` and `grad` spends most of its time in Python, on every step anew. `record` traces it
once, moves what does not change during a round before the first step, and lets the rest write over its inputs.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .graph import REWRITTEN, fuse, meta, reuse_memory, root, simplify
from .script import Body, Steps, looped, scripted
from .span import reuse_products

Tensors = Sequence[Tensor]
Function = Callable[[Tensors, Tensors, Tensors], list[Tensor]]
"""step(fixed, leaves, batch) -> leaves: what holds for all clients, their carries and buffers, their batch."""

KEPT = 64
"""Recorded steps that are kept; sizes of cohorts and batches that come back need not be recorded again."""


class Step(NamedTuple):
    """A step that was made ready.

    Attributes:
        before: run once for all steps of the same clients, on the fixed tensors and the leaves that stay; gives what
            `body` needs of them.
        body: body(ready, moving, batch), run on that, on the leaves that move, and on the batch; gives the leaves
            that move. It may write over those that it is given.
        many: the same for several steps; see `Steps`.
        scripted: whether these are one call, in which Python is not needed.
        moving: numbers of the leaves that a step changes.
        random: whether it draws random numbers.
        operations: how many there are in `body`; 0 if the step is run eagerly.

    """

    before: Callable[..., list[Any]]
    body: Body
    many: nn.Module
    scripted: bool
    moving: tuple[int, ...]
    random: bool
    operations: int

    def staying(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that a step leaves as they are."""
        moving = set(self.moving)
        return [leaf for i, leaf in enumerate(leaves) if i not in moving]


class Recorder:
    """Records steps, and keeps them by what they depend on."""

    def __init__(self, recording: bool = True) -> None:
        self._steps: dict[Hashable, Step] = {}
        self._recording = recording

    def step(
        self, key: Hashable, function: Function, fixed: Tensors, leaves: Tensors, batch: Tensors
    ) -> Step:
        """The step `function`, which `key` names, for tensors like these."""
        whole = key, *(_layout(group) for group in (fixed, leaves, batch))
        if whole not in self._steps:
            if len(self._steps) >= KEPT:
                del self._steps[next(iter(self._steps))]
            # What recording draws must not shift what the round draws.
            with torch.random.fork_rng(enabled=True):
                self._steps[whole] = record(function, fixed, leaves, batch, self._recording)
        return self._steps[whole]


def _layout(tensors: Tensors) -> tuple[Any, ...]:
    return tuple((t.shape, t.stride(), t.dtype) for t in tensors)


def record(
    function: Function, fixed: Tensors, leaves: Tensors, batch: Tensors, recording: bool = True
) -> Step:
    """Make `function` ready for tensors like these; as it is, where it cannot be recorded."""
    # A tensor of its own for every leaf: one that came twice would seem to stay where it takes the other's value.
    apart = [leaf.clone() for leaf in leaves]
    eager = function(fixed, apart, batch)
    moving = tuple(i for i, (old, new) in enumerate(zip(apart, eager, strict=True)) if not _same(old, new))
    if recording:
        try:
            step = _record(function, fixed, leaves, batch, moving)
            # Whatever the rules of `simplify` did, a step that computes something else is never used.
            again = function(fixed, eager, batch)
            old, new = [leaves[i] for i in moving], [again[i] for i in moving]
            for one in (_scripted(step, fixed, leaves, batch), step):
                got = _replay(one, fixed, leaves, batch)
                if one.random or _agree(got, new, old):
                    return one
        except Exception:  # noqa: S110 (a user's rule or layer may do what no trace can hold: it runs as it is)
            pass
    return _unrecorded(function, len(fixed), len(leaves), moving, batch[0].dtype)


def _same(old: Tensor, new: Tensor) -> bool:
    place = (old.data_ptr(), old.shape, old.stride()) == (new.data_ptr(), new.shape, new.stride())
    return place and old.dtype == new.dtype


def _replay(step: Step, fixed: Tensors, leaves: Tensors, batch: Tensors) -> Sequence[Tensor]:
    """Two steps: in the second, what the first wrote over would show."""
    ready, here = step.before(*fixed, *step.staying(leaves)), [dense(leaves[i]) for i in step.moving]
    x, y, *weights = batch
    index = torch.arange(y.numel(), device=y.device).view_as(y)
    twice = [torch.stack([t, t]) for t in (index, y, *weights)]
    samples = (x.flatten(0, y.dim() - 1), None, None)
    again: Sequence[Tensor] = step.many(
        0, 2, 2, ready, here, samples, *twice[:2], twice[2] if weights else None
    )
    return again


def _scripted(step: Step, fixed: Tensors, leaves: Tensors, batch: Tensors) -> Step:
    """The step as TorchScript where that can be had; on a GPU it was never tried."""
    if batch[0].device.type != "cpu":
        return step
    ready = step.before(*fixed, *step.staying(leaves))
    try:
        body = scripted(step.body, ready, [dense(leaves[i]) for i in step.moving], list(batch))
        return step._replace(body=body, many=looped(body, batch[0].dtype), scripted=True)
    except Exception:  # what it raises is not documented; the step runs without
        return step


def dense(leaf: Tensor) -> Tensor:
    """A copy that can be written over."""
    return leaf.clone(memory_format=torch.contiguous_format)


def _agree(got: Sequence[Tensor], expected: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether two results of a step from `before` are equal up to rounding and what little it may flip."""
    for a, b, old in zip(got, expected, before, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        moved = _size(b - old) if b.shape == old.shape else _size(b)
        rounding = 16 * torch.finfo(b.dtype).eps * _size(b) if b.is_floating_point() else 0.0
        if not torch.allclose(a.double(), b.double(), 0, 0.05 * moved + rounding, equal_nan=True):
            return False
    return True


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0, 0, 0).amax()) if tensor.numel() else 0.0


def _unrecorded(
    function: Function, n_fixed: int, n_leaves: int, moving: tuple[int, ...], dtype: torch.dtype
) -> Step:
    stay = [i for i in range(n_leaves) if i not in set(moving)]

    def body(ready: list[Tensor], here: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        leaves: list[Any] = [None] * n_leaves
        for i, leaf in zip([*stay, *moving], [*ready[n_fixed:], *here], strict=True):
            leaves[i] = leaf
        new = function(ready[:n_fixed], leaves, batch)
        return [dense(new[i]) for i in moving]  # of its own: nobody knows what a rule's results share

    return Step(lambda *tensors: list(tensors), body, Steps(body, dtype), False, moving, True, 0)


def _record(
    function: Function, fixed: Tensors, leaves: Tensors, batch: Tensors, moving: tuple[int, ...]
) -> Step:
    # A tensor of its own for every argument: one that came twice would be taken for the last.
    given = [t.view_as(t) for t in (*fixed, *leaves, *batch)]
    n, m = len(fixed), len(leaves)
    for i in moving:
        given[n + i] = dense(leaves[i])

    def flat(*tensors: Tensor) -> list[Tensor]:
        new = function(tensors[:n], tensors[n : n + m], tensors[n + m :])
        return [new[i] for i in moving]

    traced = make_fx(flat, REWRITTEN)(*given)
    if any(_mutates(node) for node in traced.graph.nodes):
        traced = make_fx(functionalize(flat), REWRITTEN)(*given)
    graph = traced.graph
    graph.eliminate_dead_code()
    simplify(graph)
    reuse_products(graph)
    fuse(graph)
    random = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    carried = [inputs[n + i] for i in moving]
    _own_outputs(graph, carried)
    late = set(carried) | set(inputs[n + m :])
    before, body = _split(traced, late)
    first = len([x for x in body.nodes if x.op == "placeholder"]) - len(late)
    places = [node for node in body.nodes if node.op == "placeholder"][first:]
    reuse_memory(body, places[: len(moving)])
    operations = sum(node.op in ("call_function", "call_method") for node in body.nodes)
    first_of_all, replay = (GraphModule(traced, one).forward for one in (before, body))

    nothing = batch[0].new_zeros(())

    def once(*tensors: Tensor) -> list[Tensor]:
        return [*first_of_all(*tensors), nothing]  # no list may be empty

    def each(ready: list[Tensor], here: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        return list(replay(*ready[:-1], *here, *batch))

    return Step(once, each, Steps(each, batch[0].dtype), False, moving, random, operations)


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _own_outputs(graph: Graph, carried: list[Node]) -> None:
    """Give every output memory of its own, laid out as its input, so that the next step may write over it.

    An output that is an input, or shares memory with another output, would otherwise be written over with it.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    results, used = list(cast(Sequence[Node], output.args[0])), set()
    for i, (old, new) in enumerate(zip(carried, results, strict=True)):
        owner = root(new)
        shared = owner in used or owner.op != "call_function" or owner is not new
        if shared or meta(new).stride != meta(old).stride:
            with graph.inserting_before(output):
                copy = graph.call_function(
                    torch.ops.aten.clone.default, (new,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = dict(old.meta)
            results[i] = copy
        used.add(root(results[i]))
    output.args = (results,)


def _split(traced: GraphModule, late: set[Node]) -> tuple[Graph, Graph]:
    """Two graphs: what needs none of the `late` inputs, and the rest, which is given what it needs of the first."""
    moving = set(late)
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    moving.update(output.all_input_nodes)  # made anew in every step, as the next one may write over it
    for node in traced.graph.nodes:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if seeded or node.op == "output" or any(used in moving for used in node.all_input_nodes):
            moving.add(node)
    before, body = Graph(traced), Graph(traced)
    early: dict[Node, Node] = {}
    for node in traced.graph.nodes:
        if node not in moving:
            early[node] = before.node_copy(node, lambda x: early[x])
    needed = [node for node in early if moving.intersection(node.users)]
    before.output([early[node] for node in needed])
    late_copies = {node: body.placeholder(f"ready_{i}") for i, node in enumerate(needed)}
    for node, copy in late_copies.items():
        copy.meta = dict(node.meta)
    for node in traced.graph.nodes:
        if node in moving:
            late_copies[node] = body.node_copy(node, lambda x: late_copies[x])
    body.eliminate_dead_code()
    before.eliminate_dead_code()
    return before, body
