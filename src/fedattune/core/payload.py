"""What passes between server, engine and clients in one round: payloads, jobs, and the types of their parts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from .params import Params, concatenate

Batch: TypeAlias = tuple[Tensor, ...]
"""(x, y) or (x, y, weight): (B, ...) inputs, (B,) labels, (B,) weights that are 0 for padding."""


class Grad(Protocol):
    """Gradient of the mean loss over a batch, weight decay included."""

    def __call__(self, w: Params, batch: Batch, /, *, statistics: bool = True) -> Params:
        """The gradient at w; `statistics=False` leaves the running statistics of BatchNorm as they are.

        A rule that trains several models beside each other says so for all but the one that the client uses.
        """


Loss: TypeAlias = Callable[[Params, Batch], Tensor]
"""Mean loss (a scalar) over a batch, in evaluation mode."""


LocalState: TypeAlias = dict[str, Params]
"""What a client keeps between rounds, by name."""


ServerState: TypeAlias = dict[str, Params | Tensor]
"""What the server keeps between rounds, by name; the names stay the same for the whole run."""


Traffic: TypeAlias = Counter[str]
"""Bytes that travel, by layer of the model, and by the names of what else a payload holds."""


def count_traffic(params: Params, times: int = 1) -> Traffic:
    """The bytes of some tensors, by layer; `times`: of so many copies."""
    count: Traffic = Counter()
    for name, tensor in params.items():
        count[name.rpartition(".")[0] or name] += tensor.numel() * tensor.element_size() * times
    return count


class Payload(NamedTuple):
    """What travels, in both directions; its bytes are what is accounted."""

    params: Params
    extra: dict[str, Params] = {}  # noqa: RUF012 (a NamedTuple has no factories; nobody writes to it)

    def rows(self, ids: Tensor | int | slice) -> "Payload":
        """The payloads of clients `ids` of a stack."""
        return Payload(self.params.rows(ids), {k: v.rows(ids) for k, v in self.extra.items()})

    def traffic(self) -> Traffic:
        """Bytes that travel."""
        return count_traffic(self.params) + Counter({k: v.nbytes() for k, v in self.extra.items()})


def concatenate_payloads(payloads: Sequence[Payload]) -> Payload:
    """The rows of several payloads after each other."""
    if len(payloads) == 1:
        return payloads[0]
    extra = {k: concatenate([payload.extra[k] for payload in payloads]) for k in payloads[0].extra}
    return Payload(concatenate([payload.params for payload in payloads]), extra)


IS_UPLOADED = torch.tensor(True)
"""The default of `RoundContext.is_uploaded`: the server receives the upload."""


class RoundContext(NamedTuple):
    """What a client knows about its round beside the payload: it is told so with the order, or counts it itself.

    Attributes:
        lr: learning rate of the local steps.
        n_steps: local steps that this client does in this round, a scalar tensor.
        round: number of the round, from 1, a scalar tensor.
        cohort: clients that are asked in this round, |S|.
        personal: names of the tensors that never leave the client.
        is_uploaded: whether the server will learn of this round from this client, a scalar bool tensor: not from those
            that train without being asked, and not from those that join after training.

    """

    lr: float
    n_steps: Tensor
    round: Tensor
    cohort: int
    personal: tuple[str, ...] = ()
    is_uploaded: Tensor = IS_UPLOADED


class MixingMatrices(NamedTuple):
    """Who learned from whom: client `rows[i]` was given `sum_k weights[l][i, k] theta_l[columns[k]]`."""

    rows: Tensor
    columns: Tensor
    weights: dict[str, Tensor]


class Broadcast(NamedTuple):
    """What a server sends to some clients, and the matrices that made it.

    Attributes:
        payload: one row for each client.
        mixing: the mixing matrices, if the payload is a mixture of client models; None otherwise.

    """

    payload: Payload
    mixing: MixingMatrices | None = None
