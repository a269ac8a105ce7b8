"""Make a traced step cheaper without changing its result: fewer operations, fewer passes over memory.

PyTorch traces a step under `vmap` and `grad` in a general form: views that change nothing, products with one, an
update in three passes over the parameters. Each rule below removes one such thing. Results stay the same up to the
rounding of fused multiply-adds.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from textwrap import dedent
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...core.measured import choose
from ..kernels import max_pool_with_indices
from .tracing import draws_random

aten = torch.ops.aten

Rule = Callable[[Graph, Node], Node | None]
"""rule(graph, node) -> the node to take its place, or None."""

ADD, SUB, MUL = aten.add.Tensor, aten.sub.Tensor, (aten.mul.Tensor, aten.mul.Scalar)
TRANSPOSES = (aten.transpose.int, aten.t.default)

CONSTANT_FILLS = {
    aten.ones_like.default: 1, aten.new_ones.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.zeros.default: 0,
}  # fmt: skip

ADDING_PRODUCTS = {aten.bmm.default: aten.baddbmm.default, aten.mm.default: aten.addmm.default}

IN_PLACE = {
    aten.add.Tensor: "add_", aten.sub.Tensor: "sub_", aten.mul.Tensor: "mul_", aten.mul.Scalar: "mul_",
    aten.div.Tensor: "div_", aten.neg.default: "neg_", aten.exp.default: "exp_", aten.relu.default: "relu_",
    aten.scatter_add.default: "scatter_add_", aten.baddbmm.default: "baddbmm_", aten.addmm.default: "addmm_",
    aten.sqrt.default: "sqrt_", aten.clamp.default: "clamp_", aten.sigmoid.default: "sigmoid_",
    aten.lerp.Scalar: "lerp_",
}  # fmt: skip
"""Operations that can write their result over their first argument."""


def each_node(rule: Rule) -> Callable[[Graph], None]:
    """Make a pass that replaces every operation for which `rule` gives another node, then drops unused operations."""

    def apply(graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and (new := rule(graph, node)) is not None:
                node.replace_all_uses_with(new)
        graph.eliminate_dead_code()

    return apply


def is_view(node: Node) -> bool:
    """Tell whether a node's result shares memory with its first argument."""
    if node.target is operator.getitem:
        return is_view(cast(Node, node.args[0]))
    schema = getattr(node.target, "_schema", None)
    if node.target is aten._unsafe_view.default:
        return True
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _memory_owner(node: Node) -> Node:
    while node.op == "call_function" and is_view(node):
        node = cast(Node, node.args[0])
    return node


def find_layout(node: Any) -> Any:
    """Return the `TensorLayout` of a node's result; None for other values, and for several tensors."""
    return node.meta.get("layout") if isinstance(node, Node) else None


def same_layout(a: Any, b: Any) -> bool:
    """Tell whether two nodes give tensors of the same shape, strides and type."""
    x, y = find_layout(a), find_layout(b)
    return x is not None and y is not None and (x.shape, x.stride, x.dtype) == (y.shape, y.stride, y.dtype)


def detach_constants(graph: Graph, node: Node) -> Node | None:
    """Make zeros and ones from a shape instead of another tensor, so that they are made once."""
    info = find_layout(node)
    if node.target not in CONSTANT_FILLS or info.stride != torch.empty(info.shape, device="meta").stride():
        return None
    with graph.inserting_before(node):
        args = (list(info.shape), CONSTANT_FILLS[cast(Any, node.target)])
        options = {"dtype": info.dtype, "device": info.device}
        return _insert_node(graph, node, aten.full.default, args, options)


def drop_same_views(_: Graph, node: Node) -> Node | None:
    """Drop a view that changes neither shape nor strides."""
    is_whole = is_view(node) and node.target is not operator.getitem
    return cast(Node, node.args[0]) if is_whole and same_layout(node, node.args[0]) else None


def drop_double_transposes(_: Graph, node: Node) -> Node | None:
    """Drop a transpose of the same transpose."""
    inner: Any = node.args[0] if node.args else None
    twice = node.target in TRANSPOSES and isinstance(inner, Node) and inner.target is node.target
    return cast(Node, inner.args[0]) if twice and set(inner.args[1:]) == set(node.args[1:]) else None


def fuse_scale(graph: Graph, node: Node) -> Node | None:
    """Compute a +- c b in one pass."""
    if node.target not in (ADD, SUB) or node.kwargs:
        return None
    a, b = node.args
    if node.target is ADD and _scale_factor(b) is None:
        a, b = b, a
    c = _scale_factor(b)
    if c is None or not isinstance(a, Node) or not find_layout(a):
        return None
    with graph.inserting_before(node):
        return _insert_node(graph, node, node.target, (a, cast(Node, b).args[0]), {"alpha": c})


def fuse_pull(graph: Graph, node: Node) -> Node | None:
    """Rewrite x - c (g + m (x - w)) and x - c (g + m x): move or shrink x, then subtract c g, which a product can do.

    Without g, only x moves.
    """
    x, bent = node.args[:2] if node.target is SUB else (None, None)
    c = cast(float, node.kwargs.get("alpha", 1))
    if _is_difference(bent, x, node) and c != 1:
        with graph.inserting_before(node):
            return _insert_node(graph, node, aten.lerp.Scalar, (x, cast(Node, bent).args[1], c), {})
    if not _is_single_use(bent, ADD):
        return None
    g, pull = cast(Any, bent).args
    m = cast(float, cast(Node, bent).kwargs.get("alpha", 1))
    same = all(same_layout(one, node) for one in (x, g, pull)) and find_layout(node).dtype.is_floating_point
    if not same or c * m == 1:  # a factor of 0 would hide that x is not finite
        return None
    towards = _is_difference(pull, x, node)
    if pull is not x and not towards:
        return None
    with graph.inserting_before(node):
        if towards:
            moved = _insert_node(graph, node, aten.lerp.Scalar, (x, pull.args[1], c * m), {})
        else:
            moved = _insert_node(graph, node, aten.mul.Tensor, (x, 1 - c * m), {})
        return _insert_node(graph, node, SUB, (moved, g), {"alpha": c})


def _is_difference(way: Any, x: Any, like: Node) -> bool:
    """Tell whether a node with a single use is x - w."""
    alone = _is_single_use(way, SUB) and not way.kwargs and way.args[0] is x
    same = alone and same_layout(x, like) and same_layout(way.args[1], like)
    return same and bool(find_layout(like).dtype.is_floating_point)


def _is_single_use(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target and len(node.users) == 1


def _scale_factor(node: Any) -> float | None:
    """Return c if a node with a single use is c b for a number c."""
    if not isinstance(node, Node) or node.target not in MUL or len(node.users) > 1:
        return None
    c: Any = node.args[1]
    fits = isinstance(c, int | float) and not isinstance(c, bool) and _result_dtype(node) == _result_dtype(node.args[0])
    return c if fits else None


def _result_dtype(node: Any) -> Any:
    info = find_layout(node)
    return info and info.dtype


def fuse_product(graph: Graph, node: Node) -> Node | None:
    """Rewrite a +- c (matrix product): let the product add into a."""
    if node.target not in (ADD, SUB):
        return None
    a, b = node.args
    c = cast(float, node.kwargs.get("alpha", 1))
    if node.target is ADD and c == 1 and getattr(b, "target", None) not in ADDING_PRODUCTS:
        a, b = b, a
    fits = isinstance(a, Node) and isinstance(b, Node) and b.target in ADDING_PRODUCTS and len(b.users) == 1
    if (
        not fits
        or not find_layout(a)
        or not find_layout(b)
        or find_layout(node).shape != find_layout(b).shape
        or _result_dtype(a) != _result_dtype(b)
    ):
        return None
    options = {"alpha": c if node.target is ADD else -c}
    if (scale := _scale_factor(a)) and same_layout(a, node):
        a, options["beta"] = cast(Node, a).args[0], scale
    with graph.inserting_before(node):
        target = ADDING_PRODUCTS[cast(Any, b).target]
        return _insert_node(graph, node, target, (a, *cast(Node, b).args), options)


def turn_product(graph: Graph, node: Node) -> Node | None:
    """Compute a b (C, m, n) as (b' a')' where that is faster on this machine: with MKL, for few columns in b."""
    if node.target is not aten.bmm.default:
        return None
    a, b = (find_layout(factor) for factor in node.args)
    if a.dtype != torch.float32 or a.device.type != "cpu":
        return None
    x, y = (one.empty().fill_(1) for one in (a, b))
    turned = {"plain": lambda: torch.bmm(x, y), "turned": lambda: _multiply_turned(x, y)}
    if choose("bmm", (*a.shape, b.shape[2]), turned) == "plain":
        return None
    with graph.inserting_before(node):
        return _insert_node(graph, node, _multiply_turned, node.args, {})


def _multiply_turned(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2).contiguous()


def pool_by_channels(graph: Graph, node: Node) -> Node | None:
    """Pool maxima with adjacent channels."""
    if node.target is not aten.max_pool2d_with_indices.default:
        return None
    with graph.inserting_before(node):
        return _insert_node(graph, node, max_pool_with_indices, node.args, node.kwargs)


def script_masked(graph: Graph, node: Node) -> Node | None:
    """Let TorchScript trace operations with a mask of wanted results, as the gradients of convolutions and norms."""
    arguments: Any = getattr(getattr(node.target, "_schema", None), "arguments", ())
    has_mask = bool(arguments) and arguments[-1].name == "output_mask"
    if not has_mask or find_layout(node.args[0]).device.type != "cpu" or not hasattr(torch.jit, "CompilationUnit"):
        return None
    with graph.inserting_before(node):
        return _insert_node(graph, node, _make_traceable(node.target), node.args, node.kwargs)


@cache
def _make_traceable(operation: Any) -> Callable[..., list[Tensor | None]]:
    """Write an operation in TorchScript: its tracer refuses masks, and results that are not wanted."""
    schema, name = operation._schema, operation.overloadpacket.__name__
    typed = ", ".join(f"{a.name}: {a.type.annotation_str}" for a in schema.arguments)
    given = ", ".join(a.name for a in schema.arguments)
    results = ", ".join(f"result_{i}" for i in range(len(schema.returns)))
    code = f"""
    def masked({typed}) -> List[Tensor]:
        {results} = torch.ops.aten.{name}({given})
        wanted: List[Tensor] = []
        for result, is_wanted in zip([{results}], output_mask):
            if is_wanted:
                wanted.append(result)
        return wanted
    """
    script = torch.jit.CompilationUnit(dedent(code)).masked

    def masked(*args: Any) -> list[Tensor | None]:
        wanted = iter(script(*args))
        return [next(wanted) if is_wanted else None for is_wanted in args[-1]]

    return masked


def _insert_node(graph: Graph, like: Node, target: Any, args: Any, kwargs: Any) -> Node:
    new = graph.call_function(target, args, dict(kwargs))
    new.meta = dict(like.meta)
    return new


def reuse_memory(graph: Graph, inputs: Iterable[Node]) -> None:
    """Let operations write over their first argument if no later operation reads it.

    `inputs` are the tensors that may be overwritten: the previous step left them.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    last = {node: position[node] for node in nodes}
    for node in nodes:
        for argument in node.all_input_nodes:
            owner = _memory_owner(argument)
            last[owner] = max(last[owner], position[node])
    free = set(inputs)
    for node in nodes:
        if node.op != "call_function" or node.target not in IN_PLACE:
            continue
        if node.target in (aten.add.Tensor, *MUL) and not node.kwargs:
            a, b = node.args
            if not _writable(a, node, free, last, position) and _writable(b, node, free, last, position):
                node.args = (b, a)
        a = node.args[0]
        if _writable(a, node, free, last, position):
            node.op, node.target = "call_method", IN_PLACE[cast(Any, node.target)]
            last[node] = max(last[node], last[cast(Node, a)])


def _writable(a: Any, node: Node, free: set[Node], last: dict[Node, int], position: dict[Node, int]) -> bool:
    """Tell whether `node` may write its result over `a`: `a` owns its memory, fits, and has no later use."""
    if not isinstance(a, Node) or not same_layout(a, node) or 0 in find_layout(a).stride:
        return False
    fresh = a in free or a.op == "call_method" or (a.op == "call_function" and not is_view(a))
    others = [n for n in node.all_input_nodes if n is not a]
    twice = sum(arg is a for arg in node.args) > 1 or any(_memory_owner(n) is a for n in others)
    return fresh and not twice and last[a] == position[node]


def separate_outputs(graph: Graph, carried: list[Node]) -> None:
    """Give every output its own memory, laid out as its input, so that the next step may write over it.

    Otherwise an output that is an input, or shares memory with another output, would be overwritten with it.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    results, owners = list(cast(Sequence[Node], output.args[0])), set()
    for i, (old, new) in enumerate(zip(carried, results, strict=True)):
        owner = _memory_owner(new)
        shared = owner in owners or owner.op != "call_function" or owner is not new
        if shared or find_layout(new).stride != find_layout(old).stride:
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
            copy.meta = dict(old.meta)
            results[i] = copy
        owners.add(_memory_owner(results[i]))
    output.args = (results,)


def split_graph(traced: GraphModule, late: set[Node]) -> tuple[Graph, Graph]:
    """Split the graph in two: operations that need none of the `late` inputs, and the rest, with their results."""
    moving = set(late)
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    # Every step makes its outputs anew, since the next step may write over them.
    moving.update(output.all_input_nodes)
    for node in traced.graph.nodes:
        if draws_random(node) or node.op == "output" or any(argument in moving for argument in node.all_input_nodes):
            moving.add(node)
    before, body = Graph(traced), Graph(traced)
    early: dict[Node, Node] = {}
    for node in traced.graph.nodes:
        if node not in moving:
            early[node] = before.node_copy(node, lambda x: early[x])
    ready_nodes = [node for node in early if moving.intersection(node.users)]
    before.output([early[node] for node in ready_nodes])
    late_copies = {node: body.placeholder(f"ready_{i}") for i, node in enumerate(ready_nodes)}
    for node, copy in late_copies.items():
        copy.meta = dict(node.meta)
    for node in traced.graph.nodes:
        if node in moving:
            late_copies[node] = body.node_copy(node, lambda x: late_copies[x])
    body.eliminate_dead_code()
    before.eliminate_dead_code()
    return before, body
