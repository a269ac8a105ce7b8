"""Several gradient steps on one batch: dense layers that saw its inputs before are not multiplied by them again.

After steps on the inputs x (samples, inputs), a layer is W' = a W + b V + d x: every gradient is a product with the
same x, and the rest was there before. So W' x' = a W x' + b V x' + d (x x'), where the first two products are known
and x x' is samples by samples. K such steps (pFedMe has five) read and write the layer once instead of K times.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from .graph import ADD, MUL, PRODUCTS, SUB, TRANSPOSES, alike, is_view, meta

aten = torch.ops.aten

MOST_SAMPLES = 2
"""It pays up to so many times as many samples as the layer has outputs, since x x' has to be computed."""

LEAST_INPUTS = 512
"""Products of smaller layers are as fast as the operations that would replace them."""

Terms = Mapping[Node, float]
"""A weighted sum of nodes."""


def reuse_products(graph: Graph) -> None:
    """Compute a layer's second and later products with a batch from the first ones."""
    sums: dict[Node, Terms] = {}
    products: list[Node] = []
    batches: list[tuple[Any, Node]] = []
    for node in list(graph.nodes):
        sums[node] = _terms(node, sums)
        if node.target not in PRODUCTS:
            continue
        place = _layer(node, sums)
        if place is None:
            products.append(node)
            continue
        with graph.inserting_before(node):
            new = _from_known(graph, node, place, sums[_factor(node, place)], products)
        node.replace_all_uses_with(new)
        x = _factor(node, 1 - place)
        if not any(_same(x, known) for _, known in batches):
            batches.append((node.target, x))
    for target, x in batches:
        graph.eliminate_dead_code()
        _write_once(graph, target, x)
    graph.eliminate_dead_code()


def _terms(node: Node, sums: Mapping[Node, Terms]) -> Terms:
    """A node as a weighted sum of others, down to those that are none."""
    args: Any = node.args
    parts: list[tuple[Node, float]] = [(node, 1.0)]
    if node.target in (ADD, SUB) and alike(args[0], node) and alike(args[1], node):
        c = cast(float, node.kwargs.get("alpha", 1))
        parts = [(args[0], 1.0), (args[1], c if node.target is ADD else -c)]
    elif node.target is aten.lerp.Scalar and alike(args[0], node) and alike(args[1], node):
        parts = [(args[0], 1 - args[2]), (args[1], args[2])]
    elif node.target in MUL and alike(args[0], node) and isinstance(args[1], int | float):
        parts = [(args[0], args[1])]
    return _added((term, c * f) for part, c in parts for term, f in sums.get(part, {part: 1.0}).items())


def _added(parts: Iterable[tuple[Node, float]]) -> Terms:
    total: dict[Node, float] = {}
    for node, c in parts:
        total[node] = total.get(node, 0.0) + c
    return total


def _factor(product: Node, place: int) -> Node:
    """A factor of a product a b', as it is stored."""
    factor = cast(Node, product.args[place])
    return cast(Node, factor.args[0]) if place else factor


def _layer(node: Node, sums: Mapping[Node, Terms]) -> int | None:
    """Which factor of a product x W' or W x' is a layer that moved on the same x; None if it is no such product."""
    turned = node.args[1]
    if not isinstance(turned, Node) or turned.target not in TRANSPOSES:
        return None
    for place in (0, 1):
        layer, x = _factor(node, place), _factor(node, 1 - place)
        terms = sums.get(layer, {})
        steps = [t for t in terms if t.target in PRODUCTS]
        moved = 0 < len(steps) < len(terms) and all(_is_step(t, node.target, x) for t in steps)
        outputs, inputs = meta(layer).shape[-2:]
        if moved and inputs >= LEAST_INPUTS and meta(x).shape[-2] <= MOST_SAMPLES * outputs:
            return place
    return None


def _is_step(term: Node, target: Any, x: Node) -> bool:
    """Whether a term of a layer is d x."""
    return term.target is target and _same(term.args[1], x)


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes are one, or the same view of one."""
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return bool(a == b)
    views = a.op == b.op == "call_function" and a.target is b.target and is_view(a)
    alike_args = len(a.args) == len(b.args) and all(map(_same, a.args, b.args))
    return views and alike_args and a.kwargs == b.kwargs


def _from_known(graph: Graph, node: Node, place: int, terms: Terms, products: list[Node]) -> Node:
    """The product of a layer that moved, from those of what it was made of."""
    x, turned = _factor(node, 1 - place), cast(Node, node.args[1])

    def transposed(n: Node) -> Node:
        return _call(graph, turned.target, n, *turned.args[1:])

    def product(a: Node, b: Node) -> Node:
        for known in products:
            if known.target is node.target and _same(known.args[0], a) and _same(_second(known), b):
                return known
        products.append(_call(graph, node.target, a, transposed(b)))
        return products[-1]

    steps = {t: c for t, c in terms.items() if _is_step(t, node.target, x)}
    rest = [(t, c) for t, c in terms.items() if t not in steps]
    before = _added((product(*((t, x) if place == 0 else (x, t))), c) for t, c in rest)
    moved, square = _sum(graph, _coefficients(steps)), product(x, x)
    pair = (moved, square) if place == 0 else (square, transposed(moved))
    return _call(graph, ADD, _sum(graph, before), _call(graph, node.target, *pair))


def _second(product: Node) -> Node | None:
    turned = cast(Node, product.args[1])
    return cast(Node, turned.args[0]) if turned.target in TRANSPOSES else None


def _coefficients(steps: Terms) -> Terms:
    """The d of terms d x."""
    return _added((cast(Node, t.args[0]), c) for t, c in steps.items())


def _write_once(graph: Graph, target: Any, x: Node) -> None:
    """W' = (a W + b V) + d x where somebody needs it, instead of after every step."""
    sums: dict[Node, Terms] = {}
    for node in list(graph.nodes):
        sums[node] = terms = _terms(node, sums)
        steps = {t: c for t, c in terms.items() if _is_step(t, target, x)}
        needed = any(len(_terms(user, {})) == 1 for user in node.users)
        if not needed or not 1 < len(steps) < len(terms):
            continue
        with graph.inserting_before(node):
            rest = _sum(graph, {t: c for t, c in terms.items() if t not in steps})
            new = _call(graph, ADD, rest, _call(graph, target, _sum(graph, _coefficients(steps)), x))
        node.replace_all_uses_with(new)


def _sum(graph: Graph, terms: Terms) -> Node:
    """A weighted sum; of two in one pass but for a factor."""
    (total, c), *others = terms.items()
    if len(others) == 1 and c > 0 and others[0][1] > 0:
        other, d = others[0]
        total, c, others = _call(graph, aten.lerp.Scalar, total, other, d / (c + d)), c + d, []
    if not math.isclose(c, 1, rel_tol=1e-14):
        total = _call(graph, aten.mul.Tensor, total, c)
    for other, d in others:
        total = _call(graph, ADD, total, other, alpha=d)
    return total


def _call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node that knows its shape."""
    node = graph.call_function(target, args, kwargs)
    node.meta["tensor_meta"] = _extract_tensor_metadata(target(*map(_shaped, args), **kwargs))
    return node


def _shaped(value: Any) -> Any:
    found = meta(value)
    if found is None:
        return value
    empty: Tensor = torch.empty_strided(found.shape, found.stride, dtype=found.dtype, device="meta")
    return empty
