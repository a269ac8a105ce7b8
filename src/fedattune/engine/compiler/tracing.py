"""Trace a function of tensors as a flat graph of ATen operations.

PyTorch's own `make_fx` does the same and more: symbolic shapes, decompositions, fake tensors. It imports PyTorch's
compiler, which takes most of a second in every new process, and is several times slower. A step has one shape.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose Python result, or whose result's shape, depends on values: a trace would freeze it."""


class TensorLayout(NamedTuple):
    """Shape, strides, type and device of a node's result, kept as `node.meta["layout"]`."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Make a tensor of this layout with any values, on its own device unless another is given."""
        device = self.device if device is None else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def trace(function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]) -> GraphModule:
    """Run function(*arguments) -> tensors once, and return its operations as a graph; it may draw random numbers.

    Raises:
        TypeError: an operation reads values, as `item()` and `nonzero()` do: the graph would hold for them alone. Or it
            would write over an argument.
    """
    mode = _GraphMode(arguments)
    with mode:
        outputs = function(*arguments)
    mode.graph.output([mode.find_node(tensor) for tensor in outputs])
    return GraphModule(mode.root, mode.graph)


def draws_random(node: Node) -> bool:
    """Tell whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _GraphMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Write down every operation that reaches PyTorch's kernels, below `vmap` and gradients."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from wrapping the method below for its compiler, which it would import for this."""
        return False

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.root, self.graph = nn.Module(), Graph()
        self._nodes: dict[int, Node] = {}
        # Alive until the end: the next tensor would get the number of a dead one.
        self._tensors: list[Tensor] = []
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in arguments if tensor.numel()}
        for i, tensor in enumerate(arguments):
            self._keep(tensor, self.graph.placeholder(f"argument_{i}"))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if DATA_DEPENDENT.intersection(func.tags):
            raise TypeError(f"{func} reads values of a tensor")
        if any(t.untyped_storage().data_ptr() in self._memory for t in _find_written(func, args, kwargs)):
            raise TypeError(f"{func} writes over an argument")
        inputs = tree_map_only(Tensor, self.find_node, (tuple(args), kwargs))
        results = func(*args, **kwargs)
        node = self.graph.call_function(func, *inputs)
        if isinstance(results, Tensor):
            self._keep(results, node)
        elif isinstance(results, list | tuple):
            for i, result in enumerate(results):
                if isinstance(result, Tensor):
                    self._keep(result, self.graph.call_function(operator.getitem, (node, i)))
        return results

    def find_node(self, tensor: Tensor) -> Node:
        """Return the node that made the tensor; a tensor from elsewhere is a constant."""
        if id(tensor) not in self._nodes:
            name = f"constant_{len(list(self.root.buffers()))}"
            self.root.register_buffer(name, tensor.detach())
            self._keep(tensor, self.graph.get_attr(name))
        return self._nodes[id(tensor)]

    def _keep(self, tensor: Tensor, node: Node) -> None:
        node.meta["layout"] = TensorLayout.of(tensor)
        self._nodes[id(tensor)] = node
        self._tensors.append(tensor)


def _find_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    written = (named.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
    return [tensor for tensor in tree_leaves(list(written)) if isinstance(tensor, Tensor)]
