"""Sequences of unequal length: padding to the longest, with a mark of what is padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .dataset import find_nonfinite_row
from .items import to_array
from .types import Array

PADDING_TOKEN = -1
"""The token that fills a sequence of token numbers."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences that are not padded yet: token numbers (len_i,), int64, or features (len_i, F), float32."""

    items: list[Array]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of sequences, and shape of the longest one."""
        return len(self), *max((item.shape for item in self.items), key=lambda shape: shape[0])


def pad_sequences(sequences: Sequence[Any]) -> Tensor:
    """Pad sequences to the longest, as `federation_from` does, so that `WithPadding` tells a model what is padding.

    Args:
        sequences: tensors or arrays of token numbers (len_i,), or of features (len_i, F); numbers with a fraction
            (len_i,) are one feature.

    Returns:
        Token numbers (n, length), int64, with -1 for padding; or features (n, length, F + 1), float32, with zeros for
        padding, whose last column is 1 for a step and 0 for padding.

    Raises:
        DataError: a sequence is empty, not finite, or of another number of features.

    Examples:
        >>> pad_sequences([torch.tensor([5, 6, 7]), torch.tensor([8])]).tolist()
        [[5, 6, 7], [8, -1, -1]]
        >>> pad_sequences([torch.tensor([0.5]), torch.tensor([1.5, 2.5])]).tolist()
        [[[0.5, 1.0], [0.0, 0.0]], [[1.5, 1.0], [2.5, 1.0]]]
    """
    return torch.from_numpy(pad([*read_sequences("the sequences", sequences).items]))


def find_sequences(where: str, values: Any) -> Sequences | None:
    """Return the sequences in a list of tensors or arrays of unequal length; None for other samples."""
    if not isinstance(values, list | tuple) or not values:
        return None
    shapes = [tuple(getattr(one, "shape", ())) for one in values]
    has_rest = all(shape and shape[1:] == shapes[0][1:] and len(shape) <= 2 for shape in shapes)
    return read_sequences(where, values) if has_rest and len(set(shapes)) > 1 else None


def read_sequences(where: str, values: Sequence[Any]) -> Sequences:
    """Read sequences of one kind; `where` names them in messages."""
    arrays = [to_array(one) for one in values]
    if wrong := [i for i, one in enumerate(arrays) if one.dtype.kind not in "buif" or one.ndim not in (1, 2)]:
        one = arrays[wrong[0]]
        raise DataError(
            f"{where}: sequence {wrong[0]} is {one.dtype} of shape {one.shape}, expected token numbers (len,) or "
            "features (len, F)"
        )
    if empty := [i for i, one in enumerate(arrays) if not one.size]:
        raise DataError(f"{where}: sequence {empty[0]} is empty; leave it out")
    is_tokens = all(one.ndim == 1 and one.dtype.kind in "ui" for one in arrays)
    if is_tokens:
        if negative := [i for i, one in enumerate(arrays) if one.min() < 0]:
            raise DataError(f"{where}: sequence {negative[0]} has a token number below 0, which marks padding")
        return Sequences([one.astype(np.int64) for one in arrays])
    with np.errstate(over="ignore"):  # reported just below
        items = [one.reshape(len(one), -1).astype(np.float32) for one in arrays]
    if wrong := [i for i, one in enumerate(items) if find_nonfinite_row(one) is not None]:
        raise DataError(f"{where}: sequence {wrong[0]} holds NaN or a value that is not finite in float32")
    return Sequences(items)


def pad(items: Sequence[Array]) -> Array:
    """Pad sequences to the longest; see `pad_sequences`."""
    kinds = {(one.dtype.str, one.shape[1:]) for one in items}
    if len(kinds) > 1:
        (_, one), (_, other), *_ = sorted(kinds)
        raise DataError(
            f"some sequences have steps of shape {one}, others of {other}; all need the same number of features, or "
            "all token numbers"
        )
    n, longest, rest = len(items), max(map(len, items)), items[0].shape[1:]
    if not rest:
        tokens = np.full((n, longest), PADDING_TOKEN, dtype=np.int64)
        for row, item in zip(tokens, items, strict=True):
            row[: len(item)] = item
        return tokens
    out = np.zeros((n, longest, rest[0] + 1), dtype=np.float32)
    for sample, item in zip(out, items, strict=True):
        sample[: len(item), :-1] = item
        sample[: len(item), -1] = 1
    return out


def join_sequences(owners: Sequence[str], xs: Sequence[Any]) -> Array:
    """Pad the sequences of all clients to the longest; arrays (n, length, ...) are sequences of one length."""
    items: list[Array] = []
    for owner, x in zip(owners, xs, strict=True):
        if not isinstance(x, Sequences | np.ndarray):
            raise DataError(f"client {owner!r} has samples in a file, others have sequences in memory; give one kind")
        items += x.items if isinstance(x, Sequences) else read_sequences(f"client {owner!r}", [*x]).items
    return pad(items)


def describe_padding(n_axes: int, sizes: Sequence[int]) -> str:
    """Say in a sentence how sequences of these lengths were padded."""
    how = "-1" if n_axes == 2 else "zeros, and a last feature marks the steps"
    return (
        f"Sequences of {min(sizes)} to {max(sizes)} steps are padded with {how}; fedattune.WithPadding(model) tells a "
        "model what is padding."
    )
