"""Where clients are, as the round loop sees it: orders, reports and scores."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.params import Params
from ...core.payload import Payload
from ..client_state import Sender
from ..evaluation import PointScores
from ..storage.rows import RowStack


class TrainRequest(NamedTuple):
    """What clients are told to do in one round.

    Attributes:
        round: number of the round, from 1.
        ids: clients that are sent something or train.
        asked: clients that are asked to upload; not all of them are among `ids`, nor the reverse.
        away: those of the asked that are gone before they train.
        learns: whether the server learns from uploads.
        evaluate: whether clients are evaluated after training.

    """

    round: int
    ids: Tensor
    asked: Tensor
    away: Tensor
    learns: bool
    evaluate: bool


class TrainReply(NamedTuple):
    """What came of an order.

    Attributes:
        ids: clients that upload.
        sent: what they had been sent.
        upload: what they upload.
        buffers: their buffers, where the BatchNorm statistics are averaged.
        n_trained, steps: clients whose training went well, and the steps that all did.
        dropped: clients whose training was not finite.
        lost: clients that were reached in vain, and those whose upload was refused, with the reason.

    """

    ids: Tensor
    sent: Payload
    upload: Payload
    buffers: Params
    n_trained: int = 0
    steps: int = 0
    dropped: Sequence[int] = ()
    lost: Mapping[int, str] = {}


class Backend(ABC):
    """Where clients are: in this process, or behind a network. Clients are named by their numbers among all."""

    common: Params
    """The averaged BatchNorm statistics that clients are sent; empty where these stay local."""

    at_once: int
    """Clients that are better not exceeded in one order, unless more upload."""

    commits_every_round = False
    """Whether a checkpoint follows every round, since clients elsewhere cannot be taken back far."""

    @property
    @abstractmethod
    def personal(self) -> Params:
        """The tensors that never leave a client, of one client."""

    @property
    @abstractmethod
    def deployed(self) -> tuple[RowStack, RowStack]:
        """Models and buffers evaluated last at the headline point; empty where these stay with the clients."""

    @abstractmethod
    def arrived(self, ids: Tensor, payload: Payload) -> None:
        """Give clients `ids` what the server answers to their uploads."""

    @abstractmethod
    def train(self, order: TrainRequest, payload: Payload | None, send: Sender) -> TrainReply:
        """Train clients; `payload` is what clients `order.ids` are sent, None where they keep what they were sent."""

    @abstractmethod
    def trained(self, r: int, send: Sender) -> list[PointScores]:
        """The scores after the local training of round r."""

    @abstractmethod
    def received(self, r: int, send: Sender, w: Params | None) -> list[PointScores]:
        """The scores after the communication of round r, and those of the global model w, if there is one."""

    @abstractmethod
    def tree(self) -> dict[str, Any]:
        """What a checkpoint holds of the clients."""

    @abstractmethod
    def load(self, tree: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""

    def average_buffers(self, uploaded: Params, n: Tensor) -> None:
        """Make the weighted mean of what the cohort uploaded (C, ...) the common statistics; n (C,) samples."""
        p = n.double() / n.sum()
        self.common = Params(
            {k: torch.tensordot(p.to(v.dtype), uploaded[k], 1) for k, v in self.common.items()}
        )


def find_rows(ids: Tensor, some: Tensor, n: int) -> Tensor | None:
    """The places in `ids` of those that are among `some` of n clients; None if all are."""
    if len(some) == n:
        return None
    found = torch.isin(ids, some, assume_unique=True)
    return None if bool(found.all()) else found.nonzero().flatten()
