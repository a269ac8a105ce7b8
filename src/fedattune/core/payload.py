"""Define the values that server, engine and clients exchange in one round."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from .params import Params, concatenate, find_layer

Batch: TypeAlias = tuple[Tensor, ...]
"""(x, y) or (x, y, weight): (B, ...) inputs, (B,) labels, (B,) weights that are 0 for padding."""


class Grad(Protocol):
    """Gradient of the mean loss over a batch, weight decay included."""

    def __call__(self, w: Params, batch: Batch, /, *, statistics: bool = True) -> Params:
        """Return the gradient at w; with `statistics=False`, keep the running statistics of BatchNorm unchanged.

        A rule that trains several models updates the statistics only for the model that predicts.
        """


class Loss(Protocol):
    """Mean loss over a batch, in evaluation mode."""

    def __call__(self, w: Params, batch: Batch, /) -> Tensor:
        """Return the mean loss, a scalar."""

    def predict(self, w: Params, x: Tensor, /) -> Tensor:
        """Return the outputs (B, classes) for inputs (B, ...)."""


LocalState: TypeAlias = dict[str, Params]
"""A client's state between rounds, by name."""

ServerState: TypeAlias = dict[str, Any]
"""The server's state between rounds, by name; the `TypedDict` of a rule has the types of its entries."""

Traffic: TypeAlias = Counter[str]
"""Bytes that travel: layer of the model, or name of an extra -> bytes."""


def count_traffic(params: Params, times: int = 1) -> Traffic:
    """Count the bytes of `times` copies of some tensors, by layer."""
    count: Traffic = Counter()
    for name, tensor in params.items():
        count[find_layer(name)] += tensor.numel() * tensor.element_size() * times
    return count


class Payload(NamedTuple):
    """A message's content, in both directions: a model, and named extras. Traffic is counted from its bytes."""

    params: Params
    extra: dict[str, Params] = {}  # noqa: RUF012 (a NamedTuple has no factories; nobody writes to it)

    def map(self, f: Callable[[Params], Params]) -> "Payload":
        """Apply `f` to the model and to each extra."""
        return Payload(f(self.params), {k: f(v) for k, v in self.extra.items()})

    def rows(self, ids: Tensor | int | slice) -> "Payload":
        """Return the rows of clients `ids` of a stack of payloads."""
        return self.map(lambda part: part.rows(ids))

    def traffic(self) -> Traffic:
        """Count the bytes of the payload."""
        return count_traffic(self.params) + Counter({k: v.nbytes() for k, v in self.extra.items()})


def concatenate_payloads(payloads: Sequence[Payload]) -> Payload:
    """Return one payload with the rows of all payloads, in order."""
    if len(payloads) == 1:
        return payloads[0]
    extra = {k: concatenate([payload.extra[k] for payload in payloads]) for k in payloads[0].extra}
    return Payload(concatenate([payload.params for payload in payloads]), extra)


IS_UPLOADED = torch.tensor(True)
"""The default of `RoundContext.is_uploaded`."""


class RoundContext(NamedTuple):
    """A client's view of its round, beside the payload.

    Attributes:
        lr: learning rate of the local steps; with a schedule a scalar tensor.
        n_steps: local steps of this client in this round, a scalar tensor.
        round: number of the round, from 1, a scalar tensor.
        cohort_size: clients in the cohort, |S|.
        personal_names: names of the tensors that never leave the client; for a `PartTraining` rule, those of the method
            itself, without BatchNorm layers that `bn_affine` keeps there.
        is_uploaded: whether this client's upload may change what the server sends to others, a scalar bool tensor;
            false for clients that train outside the cohort and for clients that join after training.
        lr_change: the rate over that of the round before; 1 without a schedule.
    """

    lr: float | Tensor
    n_steps: Tensor
    round: Tensor
    cohort_size: int
    personal_names: tuple[str, ...] = ()
    is_uploaded: Tensor = IS_UPLOADED
    lr_change: float | Tensor = 1.0

    @property
    def last_lr(self) -> float | Tensor:
        """The learning rate of the round before."""
        return self.lr / self.lr_change


class MixingMatrices(NamedTuple):
    """Weights of mixtures: component l of client `rows[i]` is `sum_k weights[l][i, k] theta_l[columns[k]]`.

    IGFL's `attention` is no component: these weights are behind its averaged update.
    """

    rows: Tensor
    columns: Tensor
    weights: dict[str, Tensor]

    def select(self, ids: Tensor) -> "MixingMatrices | None":
        """Return the rows of clients `ids` (R,), or None if one of them has no row.

        The columns are the clients `ids` and all others that these rows weigh.
        """
        if not torch.isin(ids, self.rows).all():
            return None
        order = self.rows.argsort()
        rows = order[torch.searchsorted(self.rows, ids, sorter=order)]
        weights = {component: matrix[rows] for component, matrix in self.weights.items()}
        is_used = torch.isin(self.columns, ids)
        for matrix in weights.values():
            is_used |= (matrix != 0).any(0)
        return MixingMatrices(ids, self.columns[is_used], {c: m[:, is_used] for c, m in weights.items()})


class Broadcast(NamedTuple):
    """The server's message to some clients, and the mixing matrices behind it.

    Attributes:
        payload: one row for each client.
        mixing: the mixing matrices if the payload is a mixture of client models, else None.
    """

    payload: Payload
    mixing: MixingMatrices | None = None
