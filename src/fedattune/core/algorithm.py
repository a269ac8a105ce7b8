"""The nouns: ClientUpdate, ServerUpdate, Participation, Algorithm; with Payload and Job of `messages`.

A method is a client update and a server update. Neither knows how clients are run (one by one, as one batch
of models, over a network): that is the engine's part.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from .errors import ConfigError
from .network import Network
from .params import Params, choose
from .payload import (
    Batch,
    Broadcast,
    Grad,
    LocalState,
    Loss,
    MixingMatrices,
    Payload,
    RoundContext,
    ServerState,
    Traffic,
)
from .selectors import NoParameters, Selector

__all__ = [
    "Algorithm",
    "Batch",
    "Broadcast",
    "ClientUpdate",
    "FineTune",
    "Grad",
    "LocalState",
    "Loss",
    "MixingMatrices",
    "Participation",
    "Payload",
    "RoundContext",
    "ServerState",
    "ServerUpdate",
    "Traffic",
    "pick_newest",
]


@dataclass(frozen=True)
class ClientUpdate(ABC):
    """What one client does in one round; pure, and written for one client without a client axis.

    `sent` is the last payload this client was sent, `fresh` (a scalar bool tensor) says whether it arrived
    since the client last trained. `local_state` stays on the client.
    """

    @property
    def batches_per_step(self) -> int:
        """Mini-batches that one step uses; above 1, a batch has a leading axis of that length."""
        return 1

    @property
    def passes(self) -> int:
        """How many times the local work of a round (its steps or epochs) this rule does."""
        return 1

    @property
    def validation_share(self) -> float:
        """Share of the client's training samples that only `probe` sees, the same in every round."""
        return 0.0

    @property
    def probe_share(self) -> float:
        """Share of the client's training samples that `probe` sees, drawn anew in every round."""
        return 1.0

    @property
    def required_extras(self) -> dict[str, str]:
        """Extras that the server must send, each with the server rule that does."""
        return {}

    @property
    def is_ready_after_probe(self) -> bool:
        """Whether the received model is known only after `probe`: it is then what `finish` makes of no steps."""
        return False

    def init_local_state(self, w0: Params) -> LocalState:
        """What the client keeps before its first round, from the initial model."""
        return {}

    @abstractmethod
    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Any:
        """The carry (any nest of tensors) before the first local step."""

    def probe_passes(self, local_state: LocalState) -> Tensor | None:
        """Passes over the probed samples before the first step, a scalar tensor; None: this rule never probes."""
        return None

    def probe(self, carry: Any, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> Any:
        """The carry after a look at one mini-batch before the first step."""
        return carry

    @abstractmethod
    def step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> Any:
        """The carry after one local step."""

    @abstractmethod
    def finish(
        self, carry: Any, sent: Payload, local_state: LocalState, context: RoundContext
    ) -> tuple[Payload, LocalState]:
        """What is uploaded and what is kept after the last local step."""

    @abstractmethod
    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """The model this client predicts with after communication, before local training."""

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        """The model this client predicts with after local training."""
        return upload.params

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """The model a client predicts with in a round in which it did not train."""
        return self.received_model(sent, local_state, fresh)


@dataclass(frozen=True)
class ServerUpdate(ABC):
    """What the server keeps, sends, and makes of the uploads."""

    @abstractmethod
    def init(self, w0: Params, n_clients: int) -> ServerState:
        """State before the first round."""

    @abstractmethod
    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Return the payload for clients `ids` (R,), one row per client, and the mixing matrices behind it."""

    @abstractmethod
    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """New state from what clients `ids` (C,) were `sent`, what came back, and their sample counts n (C,)."""

    def warnings(self, state: ServerState, ids: Tensor) -> tuple[str, ...]:
        """Sentences a user should read about the last round, in which clients `ids` took part."""
        return ()

    def bytes_down(self, state: ServerState, ids: Tensor, sent: Payload) -> Traffic:
        """Bytes that travel when clients `ids` are `sent` this; less than its size where they have a part already."""
        return sent.traffic()

    def bytes_up(self, state: ServerState, ids: Tensor, received: Payload) -> Traffic:
        """Bytes that travelled when clients `ids` uploaded this; `state` is that after aggregation."""
        return received.traffic()

    def global_model(self, state: ServerState) -> Params | None:
        """The one model for everybody, if the method has one."""
        w = state.get("w")
        return w if isinstance(w, Params) and w else None

    should_update: ClassVar[bool] = True
    """Whether what clients upload changes what others are sent."""

    per_client: ClassVar[tuple[str, ...]] = ()
    """Names of the parts of the state that have one row per client."""

    def newcomer_model(self, state: ServerState) -> Params:
        """The model that a client starts from which joins after training; the global one unless a method differs."""
        return cast(Params, state["w"])

    def add_clients(self, state: ServerState, n: int) -> ServerState:
        """The state with `n` more clients, numbered after those that there are."""
        new = self.init(self.newcomer_model(state), n)
        return {k: _append_rows(v, new[k]) if k in self.per_client else v for k, v in state.items()}

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """New state from the uploads of clients `ids` that joined after training; leaves all others as they are."""
        return state


def _append_rows(old: Params | Tensor, new: Params | Tensor) -> Params | Tensor:
    if isinstance(old, Params):
        return old.map(lambda a, b: torch.cat([a, b.to(a)]), cast(Params, new))
    return torch.cat([old, cast(Tensor, new).to(old)])


class Participation(NamedTuple):
    """Who trains each round and who is sent something.

    `cohort` clients are drawn each round and upload. `train="all"`: the others go on training by themselves
    (FedMCSA's Algorithm 1, pFedMe). `receive`: the `cohort` or `all` at the start of the round, or, with
    `reply`, the server answers each upload with the new model right after aggregation.

    Examples:
        >>> Participation(train="all", receive="reply").override("cohort")
        Participation(train='cohort', receive='reply')

    """

    train: Literal["cohort", "all"] = "cohort"
    receive: Literal["cohort", "all", "reply"] = "cohort"

    def override(self, train: Literal["method", "cohort", "all"]) -> "Participation":
        """This participation where the user decides who trains."""
        if train == "method" or train == self.train:  # noqa: PLR1714 (narrows the type)
            return self
        return Participation(train, "reply" if self.receive == "reply" else train)


@dataclass(frozen=True)
class FineTune:
    """Local SGD from the received model before it is used: `steps` of rate `lr` (None: as in training).

    Examples:
        >>> FineTune(steps=10)
        FineTune(steps=10, lr=None, part='train')

    """

    steps: int | None = None
    lr: float | None = None
    part: Literal["train", "test"] = "train"


@dataclass(frozen=True)
class Algorithm:
    """A method: client update, server update, and which tensors never leave the client.

    Attributes:
        personal: selects the tensors that stay on the client.
        participation: who trains and who is sent what.
        network: what is trained in place of the user's model, where a method changes it.
        adapt: fine-tuning of the received model; what it gives is then evaluated as `trained`.
        headline: the point at which the paper evaluates: `received` (after communication) or `trained`.
        weight_decay: the l2 coefficient that goes before the run's.
        default_weight_decay: the l2 coefficient where neither the method nor the run gives one.
        bn_buffers: what becomes of BatchNorm statistics; goes before the run's.
        full_participation: the method is defined for rounds in which all clients take part.
        notes: sentences a user of these options should read.

    Examples:
        The client rule of FedProx, the server rule of FedMCSA, and a classifier of its own for every client:

        >>> from fedattune.client import SGD, Proximal
        >>> from fedattune.core.selectors import Head
        >>> from fedattune.algorithms.fedmcsa import Attention
        >>> mine = Algorithm(SGD((Proximal(0.1),)), Attention("layer", sigma=50.0), personal=Head())
        >>> mine.headline, mine.personal
        ('trained', Head(layers=1, module=None))

    """

    client: ClientUpdate
    server: ServerUpdate
    personal: Selector = field(default_factory=NoParameters)
    participation: Participation = field(default_factory=Participation)
    network: Network | None = None
    adapt: FineTune | None = None
    headline: Literal["received", "trained"] = "trained"
    weight_decay: float | None = None
    default_weight_decay: float = 0.0
    bn_buffers: Literal["local", "average"] | None = None
    full_participation: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("client", ClientUpdate), ("server", ServerUpdate), ("personal", Selector)):
            if not isinstance(getattr(self, name), kind):
                got = getattr(self, name)
                raise ConfigError(f"Algorithm: {name}: got {got!r}, expected a {kind.__name__}")
        if self.headline not in ("received", "trained"):
            raise ConfigError(f"Algorithm: headline: got {self.headline!r}, expected 'received' or 'trained'")


def pick_newest(sent: Params, own: Params, fresh: Tensor) -> Params:
    """What the server sent if it is new to the client, else the client's own last model."""
    return choose(fresh, sent, own)
