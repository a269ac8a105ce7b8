"""The nouns: Payload, ClientUpdate, ServerUpdate, Participation, Algorithm.

A method is a client update and a server update. Neither knows how clients are run (one by one, as one batch
of models, over a network): that is the engine's part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from .params import Params, choose
from .select import Nothing, Selector

Batch: TypeAlias = tuple[Tensor, ...]
"""(x, y) or (x, y, weight): (B, ...) inputs, (B,) labels, (B,) weights that are 0 for padding."""

Grad: TypeAlias = Callable[[Params, Batch], Params]
"""Gradient of the mean loss over a batch, weight decay included."""

Memory: TypeAlias = dict[str, Params]
"""What a client keeps between rounds, by name."""

State: TypeAlias = dict[str, Params | Tensor]
"""What the server keeps between rounds, by name; the names stay the same for the whole run."""


class Payload(NamedTuple):
    """What travels, in both directions; its bytes are what is accounted."""

    params: Params
    extra: dict[str, Params] = {}  # noqa: RUF012 (a NamedTuple has no factories; nobody writes to it)

    def rows(self, ids: Tensor | int | slice) -> "Payload":
        """The payloads of clients `ids` of a stack."""
        return Payload(self.params.rows(ids), {k: v.rows(ids) for k, v in self.extra.items()})

    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.params.nbytes() + sum(v.nbytes() for v in self.extra.values())


class MixingMatrices(NamedTuple):
    """Who learned from whom: client `rows[i]` was given `sum_k weights[l][i, k] theta_l[columns[k]]`."""

    rows: Tensor
    columns: Tensor
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class ClientUpdate(ABC):
    """What one client does in one round; pure, and written for one client without a client axis.

    `sent` is the last payload this client was sent, `fresh` (a scalar bool tensor) says whether it arrived
    since the client last trained. `memory` stays on the client.
    """

    @property
    def batches_per_step(self) -> int:
        """Mini-batches that one step uses; above 1, a batch has a leading axis of that length."""
        return 1

    def memory(self, w0: Params) -> Memory:
        """What the client keeps before its first round, from the initial model."""
        return {}

    @abstractmethod
    def begin(self, sent: Payload, memory: Memory, fresh: Tensor) -> Any:
        """The carry (any nest of tensors) before the first local step."""

    @abstractmethod
    def step(self, carry: Any, batch: Batch, grad: Grad, lr: float) -> Any:
        """The carry after one local step of learning rate `lr`."""

    @abstractmethod
    def finish(
        self, carry: Any, sent: Payload, memory: Memory, n_steps: Tensor, lr: float
    ) -> tuple[Payload, Memory]:
        """What is uploaded and what is kept after `n_steps` local steps."""

    @abstractmethod
    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The model this client predicts with after communication, before local training."""

    def trained_model(self, upload: Payload, memory: Memory) -> Params:
        """The model this client predicts with after local training."""
        return upload.params

    def resting_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The model a client predicts with in a round in which it did not train."""
        return self.received_model(sent, memory, fresh)


@dataclass(frozen=True)
class ServerUpdate(ABC):
    """What the server keeps, sends, and makes of the uploads."""

    @abstractmethod
    def init(self, w0: Params, n_clients: int) -> State:
        """State before the first round."""

    @abstractmethod
    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """What is sent to clients `ids`, one row per client."""

    @abstractmethod
    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """New state from what clients `ids` (C,) were `sent`, what came back, and their sample counts n (C,)."""

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices | None:
        """The matrices behind `broadcast(state, ids)`, if what is sent is a mixture of client models."""
        return None

    def remarks(self, state: State, ids: Tensor) -> tuple[str, ...]:
        """Sentences a user should read about the last round, in which clients `ids` took part."""
        return ()


class Participation(NamedTuple):
    """Who trains each round and who is sent something.

    `cohort` clients are drawn each round and upload. `train="all"`: the others go on training by themselves
    (FedMCSA's Algorithm 1, pFedMe). `receive`: the `cohort` or `all` at the start of the round, or, with
    `reply`, the server answers each upload with the new model right after aggregation.
    """

    train: Literal["cohort", "all"] = "cohort"
    receive: Literal["cohort", "all", "reply"] = "cohort"

    def forced(self, train: Literal["method", "cohort", "all"]) -> "Participation":
        """This participation where the user decides who trains."""
        if train == "method" or train == self.train:  # noqa: PLR1714 (narrows the type)
            return self
        return Participation(train, "reply" if self.receive == "reply" else train)


@dataclass(frozen=True)
class FineTune:
    """Local SGD from the received model before it is used: `steps` of rate `lr` (None: as in training)."""

    steps: int | None = None
    lr: float | None = None
    part: Literal["train", "test"] = "train"


@dataclass(frozen=True)
class Algorithm:
    """A method: client update, server update, and which tensors never leave the client.

    Attributes:
        personal: selects the tensors that stay on the client.
        participation: who trains and who is sent what.
        adapt: fine-tuning of the received model; what it gives is then evaluated as `trained`.
        headline: the point at which the paper evaluates: `received` (after communication) or `trained`.
        weight_decay: the l2 coefficient that goes before the run's.
        default_weight_decay: the l2 coefficient where neither the method nor the run gives one.
        notes: sentences a user of these options should read.

    """

    client: ClientUpdate
    server: ServerUpdate
    personal: Selector = field(default_factory=Nothing)
    participation: Participation = field(default_factory=Participation)
    adapt: FineTune | None = None
    headline: Literal["received", "trained"] = "trained"
    weight_decay: float | None = None
    default_weight_decay: float = 0.0
    notes: tuple[str, ...] = ()


def newest(sent: Params, own: Params, fresh: Tensor) -> Params:
    """What the server sent if it is new to the client, else the client's own last model."""
    return choose(fresh, sent, own)
