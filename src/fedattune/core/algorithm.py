"""Define a method: `Algorithm` puts together a `ClientUpdate`, a `ServerUpdate` and a `Participation`.

The two updates do not know how clients run: one by one, as one batch of models, or over a network.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from .effect import Effect, Mechanism
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


@dataclass(frozen=True)
class ClientUpdate(ABC):
    """One client's part of a round: pure functions, written for one client without a client axis.

    The methods share their arguments:

        sent: the last payload that the server sent to this client
        fresh: a scalar bool tensor, true if `sent` arrived after the client's last training
        local_state: the state that stays on the client between rounds
        context: learning rate, number of steps and more; see `RoundContext`
        carry: any nest of tensors, from `begin` through every `probe` and `step` to `finish`
        batch: inputs (B, ...) and labels (B,) of a mini-batch
        grad: gives the gradient of the mean loss of a model over a batch
        loss: gives the mean loss of a model over a batch, in evaluation mode
        upload: the payload that `finish` returned
    """

    @property
    def batches_per_step(self) -> int:
        """Number of mini-batches per step; above 1, a batch has a leading axis of this length."""
        return 1

    @property
    def passes(self) -> int:
        """Number of times that the rule repeats the local work of a round (its steps or epochs)."""
        return 1

    @property
    def validation_share(self) -> float:
        """Share of the client's training samples that only `probe` sees; the same samples in every round."""
        return 0.0

    @property
    def probe_share(self) -> float:
        """Share of the client's training samples that `probe` sees; drawn again in every round."""
        return 1.0

    @property
    def probe_part(self) -> Literal["train", "validation"]:
        """Part of the client's data that `probe` sees; an empty validation part is not probed at all."""
        return "train"

    @property
    def required_extras(self) -> dict[str, str]:
        """Extras of the payload that the rule needs: name of the extra -> server rule that sends it."""
        return {}

    @property
    def is_ready_after_probe(self) -> bool:
        """True if the received model needs `probe`; `finish` then makes it, without any step."""
        return False

    def init_local_state(self, w0: Params) -> LocalState:
        """Return the client's state before its first round, from the initial model."""
        return {}

    @abstractmethod
    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Any:
        """Return the carry before the first local step."""

    def probe_passes(self, local_state: LocalState) -> Tensor | None:
        """Return the passes over the probed samples before the first step: a scalar tensor, or None for no probe."""
        return None

    def probe(self, carry: Any, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> Any:
        """Return the carry after one probed mini-batch, before the first step."""
        return carry

    @abstractmethod
    def step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> Any:
        """Return the carry after one local step."""

    @abstractmethod
    def finish(
        self, carry: Any, sent: Payload, local_state: LocalState, context: RoundContext
    ) -> tuple[Payload, LocalState]:
        """Return the upload and the new local state after the last step."""

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """Return the model for predictions after communication and before local training."""
        return sent.params

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        """Return the model for predictions after local training."""
        return upload.params

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """Return the model for predictions in a round in which the client did not train."""
        return self.received_model(sent, local_state, fresh)

    def offered_model(self, sent: Payload) -> Params:
        """Return the model by which a client judges a payload, if it accepts better ones only (`--accept`)."""
        return sent.params

    def decline(self, sent: Payload, own: Params) -> Payload:
        """Return the payload that takes the place of a refused one: as if the client were sent its own last upload.

        Override this for a rule that reads more than the model.
        """
        return sent._replace(params=own)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms whose effect on a local step `measure_step` measures."""
        return ()

    def measure_step(
        self, carry: Any, batch: Batch, grad: Grad, context: RoundContext
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Measure the mechanisms in the local step that follows.

        Returns:
            For each of `mechanisms`, two squared norms (scalars): of the change that it makes to the step, and of the
            step without the change. The effect is the root of the ratio of their sums over steps.

        """
        return ()


SumWeighting = Literal["samples", "uniform", "sum"]
"""Weights of a sum of uploads: a mean by training samples, a mean of equal weights, or a plain sum."""


@dataclass(frozen=True)
class ServerUpdate(ABC):
    """The server's part of a round: its state, its broadcast, and the aggregation of uploads."""

    @abstractmethod
    def init(self, w0: Params, n_clients: int) -> ServerState:
        """Return the state before the first round, for clients 0 to `n_clients` - 1."""

    @abstractmethod
    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Return the payload for clients `ids` (R,), one row per client, and the mixing matrices behind it.

        It depends on the state and the clients alone: an evaluation and the next round may share one broadcast.
        """

    @abstractmethod
    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Return the state after a round.

        Args:
            state: the state before the round; the rule may write into it.
            ids: (C,) the clients that uploaded, sorted.
            sent: the payload that these clients received, one row per client.
            uploads: the content of their uploads, one row per client.
            n: (C,) training samples of each client.

        """

    def skip_round(self, state: ServerState) -> ServerState:
        """Return the state after a round in which no upload arrived; by default the same state.

        Override this for a rule that sends what the last round changed.
        """
        return state

    def discard_uploads(self, state: ServerState, ids: Tensor) -> ServerState:
        """Return the state in which the last uploads of clients `ids` (E,) no longer act on what others receive.

        The server calls it when it refuses uploads of these clients. By default nothing changes: a rule that only
        averages the uploads of a round keeps none. The next accepted upload of a client acts again.
        """
        return state

    @property
    def can_quarantine(self) -> bool:
        """True if `quarantine` does something."""
        return False

    def quarantine(self, state: ServerState, ids: Tensor) -> ServerState:
        """Return the state in which clients `ids` (S,) receive their own models from now on, and nobody else theirs.

        The server calls it after `aggregate`, for clients whose labels contradict the others'.
        """
        return state

    def warnings(self, state: ServerState, ids: Tensor) -> tuple[str, ...]:
        """Return sentences for the user about the last round, in which clients `ids` took part."""
        return ()

    def measure_effects(self, state: ServerState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the rule's mechanisms at the end of a run, from its state and the last mixing matrices, if any."""
        return ()

    def bytes_down(self, state: ServerState, ids: Tensor, sent: Payload) -> Traffic:
        """Count the bytes of the payload `sent` to clients `ids`, without the parts that clients already have."""
        return sent.traffic()

    def bytes_up(self, state: ServerState, ids: Tensor, uploads: Payload) -> Traffic:
        """Count the bytes of the uploads of clients `ids`; `state` is the state after aggregation."""
        return uploads.traffic()

    def global_model(self, state: ServerState) -> Params | None:
        """Return the model that all clients share, or None."""
        w = state.get("w")
        return w if isinstance(w, Params) and w else None

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting] | None:
        """The sums of uploads that `aggregate` needs: `params` or extra -> weighting; None for single uploads.

        A rule with sums gives the same state, up to rounding, if each upload is replaced by the mean (or, for `sum`, by
        the sum over their number). Then it can work under secure aggregation. State it in the class that defines
        `aggregate`: a subclass with an `aggregate` of its own states it anew.
        """
        return None

    @property
    def sends_models(self) -> bool:
        """True if the model in a payload is one to train from; differential privacy clips the distance from it."""
        return True

    should_update: ClassVar[bool] = True
    """True if uploads change what the server sends to other clients."""

    per_client: ClassVar[tuple[str, ...]] = ()
    """Names of the entries of the state that have one row per client."""

    def newcomer_model(self, state: ServerState) -> Params:
        """Return the first model of a client that joins after training; by default the global model."""
        return cast(Params, state["w"])

    def add_clients(self, state: ServerState, n_new: int) -> ServerState:
        """Return the state with `n_new` more clients, numbered after the present clients."""
        new = self.init(self.newcomer_model(state), n_new)
        return {k: _append_rows(v, new[k]) if k in self.per_client else v for k, v in state.items()}

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Return the state after a round of clients `ids` that joined after training; nothing changes for others."""
        return state


def find_needed_sums(rule: ServerUpdate) -> Mapping[str, SumWeighting] | None:
    """Return the sums that a server rule needs, if the class that states them has no subclass with other arithmetic."""
    for cls in type(rule).__mro__:
        if "needed_sums" in vars(cls):
            return rule.needed_sums
        if "aggregate" in vars(cls):
            return None
    return None


def _append_rows(old: Params | Tensor, new: Params | Tensor) -> Params | Tensor:
    if isinstance(old, Params):
        return old.map(lambda a, b: torch.cat([a, b.to(a)]), cast(Params, new))
    return torch.cat([old, cast(Tensor, new).to(old)])


class Participation(NamedTuple):
    """The clients that train and receive in a round.

    The cohort is drawn in every round; only the cohort uploads.

    Attributes:
        train: `cohort`, or `all`: the other clients train too, without uploading (FedMCSA's Algorithm 1, pFedMe).
        receive: the clients that train receive a payload before training; its bytes count for the `cohort` or for
            `all` of them. With `answer`, the server answers the uploads right after aggregation instead.

    Examples:
        >>> Participation(train="all", receive="answer").override("cohort")
        Participation(train='cohort', receive='answer')

    """

    train: Literal["cohort", "all"] = "cohort"
    receive: Literal["cohort", "all", "answer"] = "cohort"

    def override(self, train: Literal["method", "cohort", "all"]) -> "Participation":
        """Return this participation after the user's setting `train`."""
        if train == "method" or train == self.train:  # noqa: PLR1714 (narrows the type)
            return self
        return Participation(train, "answer" if self.receive == "answer" else train)


ANSWERED_UPLOADS = Participation(train="all", receive="answer")
"""All clients train, and the server answers the cohort's uploads (FedMCSA's Algorithm 1, FedAMP)."""


@dataclass(frozen=True)
class FineTune:
    """Fine-tuning of the received model by local SGD: `steps` steps of rate `lr` on one part; None: the run's value.

    Examples:
        >>> FineTune(steps=10)
        FineTune(steps=10, lr=None, part='train')

    """

    steps: int | None = None
    lr: float | None = None
    part: Literal["train", "test"] = "train"


@dataclass(frozen=True)
class Algorithm:
    """A method: a client update, a server update, and the tensors that never leave the client.

    Attributes:
        client: the clients' part of a round.
        server: the server's part of a round.
        personal: selects the tensors that stay on the client.
        participation: the clients that train and receive in a round.
        network: builds the module to train, if the method changes the user's model.
        fine_tune: fine-tunes the received model; the result is evaluated as `trained`.
        evaluation_point: the model that the paper scores: `received` (after communication) or `trained`.
        weight_decay: l2 coefficient that overrides the run's.
        default_weight_decay: l2 coefficient if neither the method nor the run sets one.
        bn_buffers: treatment of BatchNorm statistics that overrides the run's.
        full_participation: whether the method needs all clients in every round.
        notes: sentences for the user about the chosen options.

    Examples:
        The client rule of FedProx, the server rule of FedMCSA, and a personal classifier for every client:

        >>> from fedattune.client import SGD, Proximal
        >>> from fedattune.core.selectors import Head
        >>> from fedattune.algorithms.fedmcsa import Attention
        >>> mine = Algorithm(SGD((Proximal(0.1),)), Attention("layer", sigma=50.0), personal=Head())
        >>> mine.evaluation_point, mine.personal
        ('trained', Head(layers=1, module=None))

    """

    client: ClientUpdate
    server: ServerUpdate
    personal: Selector = field(default_factory=NoParameters)
    participation: Participation = field(default_factory=Participation)
    network: Network | None = None
    fine_tune: FineTune | None = None
    evaluation_point: Literal["received", "trained"] = "trained"
    weight_decay: float | None = None
    default_weight_decay: float = 0.0
    bn_buffers: Literal["local", "average"] | None = None
    full_participation: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("client", ClientUpdate), ("server", ServerUpdate), ("personal", Selector)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"Algorithm: {name}: got {value!r}, expected a {kind.__name__}")
        if self.evaluation_point not in ("received", "trained"):
            raise ConfigError(
                f"Algorithm: evaluation_point: got {self.evaluation_point!r}, expected 'received' or 'trained'"
            )


def pick_newest(sent: Params, own: Params, fresh: Tensor) -> Params:
    """Return the model `sent` if it is new to the client (`fresh`), else the client's `own` last model."""
    return choose(fresh, sent, own)
