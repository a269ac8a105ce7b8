"""Give named tensors arithmetic, so that an update rule reads like the paper."""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.utils import _pytree

ADAPTER_SUFFIX = re.compile(r"\.lora_[A-Za-z_]+(\.\w+)?$")
"""The end of the name of one of the two small matrices that peft puts beside a layer."""


def find_layer(name: str) -> str:
    """Return the layer that a tensor belongs to; the two matrices of an adapter belong to the layer they adapt.

    Examples:
        >>> find_layer("0.weight"), find_layer("scale")
        ('0', 'scale')
        >>> find_layer("attention.query.lora_A.default.weight")
        'attention.query'
    """
    return ADAPTER_SUFFIX.sub("", name.rpartition(".")[0]) or name


def find_component(name: str) -> str:
    """Return the name of a tensor, or for a matrix of an adapter the layer: its two matrices make sense together only.

    Examples:
        >>> find_component("0.weight"), find_component("query.lora_B.default.weight")
        ('0.weight', 'query')
    """
    layer = name.rpartition(".")[0]
    return ADAPTER_SUFFIX.sub("", layer) if ADAPTER_SUFFIX.search(layer) else name


class Params(dict[str, Tensor]):
    """The tensors of one model; with a leading axis C on every tensor, the models of C clients.

    `+ - * /` work tensor by tensor, with a number or with another `Params` of the same names. They work for one
    model, for a stack of models, and under `torch.func.vmap`.

    Examples:
        >>> w = Params(weight=torch.tensor([1.0, 2.0]), bias=torch.tensor([3.0]))
        >>> g = Params(weight=torch.tensor([10.0, 10.0]), bias=torch.tensor([10.0]))
        >>> (w - 0.1 * g)["weight"]
        tensor([0., 1.])
        >>> clients = w.copies(3)  # a stack of three models
        >>> clients["weight"].shape, clients.rows(0)["bias"], w.numel()
        (torch.Size([3, 2]), tensor([3.]), 3)
    """

    def map(self, f: Callable[..., Tensor], *others: "Params") -> "Params":
        """Apply `f` to every tensor, together with the tensors of the same name of `others`.

        Raises:
            ValueError: the others have different names.
        """
        for other in others:
            if other.keys() != self.keys():
                raise ValueError(f"tensors that only one side has: {sorted(self.keys() ^ other.keys())}")
        return Params({k: f(v, *(o[k] for o in others)) for k, v in self.items()})

    def _apply(self, f: Callable[[Tensor, Tensor | float], Tensor], other: "Params | Tensor | float") -> "Params":
        return self.map(f, other) if isinstance(other, Params) else self.map(lambda a: f(a, other))

    def __add__(self, other: "Params | Tensor | float") -> "Params":
        return self._apply(operator.add, other)

    def __sub__(self, other: "Params | Tensor | float") -> "Params":
        return self._apply(operator.sub, other)

    def __mul__(self, other: "Params | Tensor | float") -> "Params":
        return self._apply(operator.mul, other)

    def __truediv__(self, other: "Params | Tensor | float") -> "Params":
        return self._apply(operator.truediv, other)

    __rmul__ = __mul__

    def zeros(self) -> "Params":
        """Return zeros of the same shapes."""
        return self.map(torch.zeros_like)

    def only(self, names: Iterable[str]) -> "Params":
        """Return the tensors called `names`, in this order."""
        return Params({k: self[k] for k in names})

    def without(self, names: Iterable[str]) -> "Params":
        """Return all tensors except the tensors called `names`."""
        skip = set(names)
        return Params({k: v for k, v in self.items() if k not in skip})

    def rows(self, ids: Tensor | int | slice) -> "Params":
        """Return the models of clients `ids` of a stack: a view for a number or a slice, else a copy."""
        return self.map(lambda a: take(a, ids))

    def put_rows(self, ids: Tensor, new: "Params") -> Self:
        """Overwrite rows `ids` of this stack by the models `new`."""
        rows = as_slice(ids) if ids.device.type == "cpu" else ids
        for k, v in self.items():
            values = new[k].to(v.dtype)
            if isinstance(rows, slice) and values.shape == (len(ids), *v.shape[1:]):
                v[rows] = values  # several times as fast
            else:
                v.index_copy_(0, ids, values)
        return self

    def repeat(self, n: int) -> "Params":
        """Return a stack of `n` times this model that takes no memory: all rows are views of one."""
        return self.map(lambda a: a.expand(n, *a.shape))

    def copies(self, n: int) -> "Params":
        """Return a stack of `n` copies of this model, which may be written row by row."""
        return self.map(lambda a: a.expand(n, *a.shape).clone())

    def numel(self) -> int:
        """Count the values."""
        return sum(v.numel() for v in self.values())

    def nbytes(self) -> int:
        """Count the bytes of all values."""
        return sum(v.numel() * v.element_size() for v in self.values())


def take(tensor: Tensor, ids: Tensor | int | slice) -> Tensor:
    """Return rows `ids` of a tensor: a view for a number or a slice, else a copy."""
    if isinstance(ids, Tensor) and ids.dim() == 1 and ids.dtype == torch.int64:
        return tensor.index_select(0, ids)  # several times as fast as indexing
    return tensor[ids]


def as_slice(ids: Tensor) -> Tensor | slice:
    """Return consecutive `ids` as a slice, so that rows of a stack are a view; return other ids unchanged."""
    if not len(ids) or ids.dtype != torch.int64:
        return ids
    here = ids.cpu()  # from a GPU once: each value that Python reads there has it wait
    first, last = int(here[0]), int(here[-1])
    if first < 0 or last - first != len(ids) - 1 or (here.diff() != 1).any():
        return ids
    return slice(first, last + 1)


def choose(condition: Tensor, yes: Params, no: Params) -> Params:
    """Return `yes` if the client's flag `condition` (a scalar tensor) is true, else `no`."""
    return yes.map(lambda a, b: torch.where(condition, a, b), no)


def concatenate(stacks: Sequence[Params]) -> Params:
    """Return one stack with the rows of all stacks."""
    return Params({k: torch.cat([s[k] for s in stacks]) for k in stacks[0]}) if len(stacks) > 1 else stacks[0]


def squared_norm(params: Params) -> Tensor:
    """Return the squared norm over all tensors, a scalar."""
    if not params:  # nothing is shared
        return torch.zeros(())
    return torch.stack([v.square().sum() for v in params.values()]).sum()


def clip_norm(g: Params, max_norm: float) -> Params:
    """Scale a gradient down to a norm of at most `max_norm` over all tensors."""
    return g * (max_norm / squared_norm(g).sqrt().clamp_min(1e-12)).clamp_max(1.0)


def select_prefix(params: Mapping[str, Tensor], prefix: str) -> Params:
    """Return the tensors whose names begin with `prefix`, without the prefix."""
    return Params({k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)})


def add_prefix(prefix: str, params: Params) -> Params:
    """Return the tensors with `prefix` before their names."""
    return Params({prefix + k: v for k, v in params.items()})


_pytree.register_pytree_node(
    Params, lambda p: (list(p.values()), tuple(p)), lambda values, names: Params(zip(names, values, strict=True))
)


def copy_dense(tensor: Tensor) -> Tensor:
    """Copy a tensor, also an expanded one, into memory of its own."""
    return tensor.clone(memory_format=torch.contiguous_format)
