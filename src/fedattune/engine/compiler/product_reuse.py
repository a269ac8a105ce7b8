"""Replace repeated products of a dense layer with the same batch by products that are known already.

After steps on the inputs x (samples, inputs), a layer is W' = a W + b V + d x: every gradient is a product with the
same x, and W and V do not change. So W' x' = a W x' + b V x' + d (x x'). The first two products are known already, and
x x' is samples by samples. K such steps (pFedMe has five) read and write the layer once instead of K times.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .rewrites import ADD, ADDING_PRODUCTS, MUL, SUB, TRANSPOSES, find_layout, is_view, same_layout
from .tracing import TensorLayout

aten = torch.ops.aten

MAX_SAMPLES_PER_OUTPUT = 2
"""Samples per output of the layer up to which it pays, since x x' has to be computed."""

MIN_LAYER_INPUTS = 512
"""Inputs from which a layer's products take longer than the operations that replace them."""

WeightedSum = Mapping[Node, float]
"""A weighted sum of nodes."""


def reuse_products(graph: Graph) -> None:
    """Compute a layer's second and later products with a batch from the first ones."""
    sums: dict[Node, WeightedSum] = {}
    products: list[Node] = []
    batches: list[tuple[Any, Node]] = []
    for node in list(graph.nodes):
        sums[node] = _expand_terms(node, sums)
        if node.target not in ADDING_PRODUCTS:
            continue
        side = _find_moved_layer(node, sums)
        if side is None:
            products.append(node)
            continue
        with graph.inserting_before(node):
            new = _combine_products(graph, node, side, sums[_stored_factor(node, side)], products)
        node.replace_all_uses_with(new)
        x = _stored_factor(node, 1 - side)
        if not any(_is_same_view(x, other) for _, other in batches):
            batches.append((node.target, x))
    for target, x in batches:
        graph.eliminate_dead_code()
        _write_once(graph, target, x)
    graph.eliminate_dead_code()


def _expand_terms(node: Node, sums: Mapping[Node, WeightedSum]) -> WeightedSum:
    """Expand a node into a weighted sum of nodes that are no sums."""
    args: Any = node.args
    parts: list[tuple[Node, float]] = [(node, 1.0)]
    if node.target in (ADD, SUB) and same_layout(args[0], node) and same_layout(args[1], node):
        c = cast(float, node.kwargs.get("alpha", 1))
        parts = [(args[0], 1.0), (args[1], c if node.target is ADD else -c)]
    elif node.target is aten.lerp.Scalar and same_layout(args[0], node) and same_layout(args[1], node):
        parts = [(args[0], 1 - args[2]), (args[1], args[2])]
    elif node.target in MUL and same_layout(args[0], node) and isinstance(args[1], int | float):
        parts = [(args[0], args[1])]
    return _add_terms((term, c * f) for part, c in parts for term, f in sums.get(part, {part: 1.0}).items())


def _add_terms(parts: Iterable[tuple[Node, float]]) -> WeightedSum:
    total: dict[Node, float] = {}
    for node, c in parts:
        total[node] = total.get(node, 0.0) + c
    return total


def _stored_factor(product: Node, side: int) -> Node:
    factor = cast(Node, product.args[side])
    return cast(Node, factor.args[0]) if side else factor


def _find_moved_layer(node: Node, sums: Mapping[Node, WeightedSum]) -> int | None:
    """Find the factor of a product x W' or W x' that is a layer moved on the same x; None if there is none."""
    turned = node.args[1]
    if not isinstance(turned, Node) or turned.target not in TRANSPOSES:
        return None
    for side in (0, 1):
        layer, x = _stored_factor(node, side), _stored_factor(node, 1 - side)
        terms = sums.get(layer, {})
        steps = [t for t in terms if t.target in ADDING_PRODUCTS]
        moved = 0 < len(steps) < len(terms) and all(_is_step(t, node.target, x) for t in steps)
        outputs, inputs = find_layout(layer).shape[-2:]
        if moved and inputs >= MIN_LAYER_INPUTS and find_layout(x).shape[-2] <= MAX_SAMPLES_PER_OUTPUT * outputs:
            return side
    return None


def _is_step(term: Node, target: Any, x: Node) -> bool:
    return term.target is target and _is_same_view(term.args[1], x)


def _is_same_view(a: Any, b: Any) -> bool:
    """Tell whether two nodes are one, or the same view of one."""
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return bool(a == b)
    views = a.op == b.op == "call_function" and a.target is b.target and is_view(a)
    alike_args = len(a.args) == len(b.args) and all(map(_is_same_view, a.args, b.args))
    return views and alike_args and a.kwargs == b.kwargs


def _combine_products(graph: Graph, node: Node, side: int, terms: WeightedSum, products: list[Node]) -> Node:
    """Compute the product of a moved layer from the products of its terms."""
    x, turned = _stored_factor(node, 1 - side), cast(Node, node.args[1])

    def transposed(n: Node) -> Node:
        return _emit_call(graph, turned.target, n, *turned.args[1:])

    def product(a: Node, b: Node) -> Node:
        for earlier in products:
            if (
                earlier.target is node.target
                and _is_same_view(earlier.args[0], a)
                and _is_same_view(_second_factor(earlier), b)
            ):
                return earlier
        products.append(_emit_call(graph, node.target, a, transposed(b)))
        return products[-1]

    steps = {t: c for t, c in terms.items() if _is_step(t, node.target, x)}
    rest = [(t, c) for t, c in terms.items() if t not in steps]
    before = _add_terms((product(*((t, x) if side == 0 else (x, t))), c) for t, c in rest)
    moved, square = _emit_sum(graph, _step_coefficients(steps)), product(x, x)
    pair = (moved, square) if side == 0 else (square, transposed(moved))
    return _emit_call(graph, ADD, _emit_sum(graph, before), _emit_call(graph, node.target, *pair))


def _second_factor(product: Node) -> Node | None:
    turned = cast(Node, product.args[1])
    return cast(Node, turned.args[0]) if turned.target in TRANSPOSES else None


def _step_coefficients(steps: WeightedSum) -> WeightedSum:
    """Sum the d of terms d x."""
    return _add_terms((cast(Node, t.args[0]), c) for t, c in steps.items())


def _write_once(graph: Graph, target: Any, x: Node) -> None:
    """Compute W' = (a W + b V) + d x where it is needed, instead of after every step."""
    sums: dict[Node, WeightedSum] = {}
    for node in list(graph.nodes):
        sums[node] = terms = _expand_terms(node, sums)
        steps = {t: c for t, c in terms.items() if _is_step(t, target, x)}
        is_needed = any(len(_expand_terms(user, {})) == 1 for user in node.users)
        if not is_needed or not 1 < len(steps) < len(terms):
            continue
        with graph.inserting_before(node):
            rest = _emit_sum(graph, {t: c for t, c in terms.items() if t not in steps})
            new = _emit_call(
                graph, ADD, rest, _emit_call(graph, target, _emit_sum(graph, _step_coefficients(steps)), x)
            )
        node.replace_all_uses_with(new)


def _emit_sum(graph: Graph, terms: WeightedSum) -> Node:
    """Emit a weighted sum; two terms take one pass and a factor."""
    (total, c), *others = terms.items()
    if len(others) == 1 and c > 0 and others[0][1] > 0:
        other, d = others[0]
        total, c, others = _emit_call(graph, aten.lerp.Scalar, total, other, d / (c + d)), c + d, []
    if not math.isclose(c, 1, rel_tol=1e-14):
        total = _emit_call(graph, aten.mul.Tensor, total, c)
    for other, d in others:
        total = _emit_call(graph, ADD, total, other, alpha=d)
    return total


def _emit_call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    layouts = [find_layout(value) for value in args]
    device = next(layout.device for layout in layouts if layout)
    shapes = [layout.empty("meta") if layout else value for layout, value in zip(layouts, args, strict=True)]
    node.meta["layout"] = TensorLayout.of(target(*shapes, **kwargs))._replace(device=device)
    return node
