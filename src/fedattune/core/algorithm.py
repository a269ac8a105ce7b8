"""Define a method: `Algorithm` puts together a `ClientUpdate`, a `ServerUpdate` and a `Participation`.

The two updates do not know how clients run: one by one, as one batch of models, or over a network.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from .effect import Effect, Mechanism
from .errors import ConfigError
from .network import Network
from .params import Params, choose
from .payload import Batch, Broadcast, Grad, LocalState, Loss, MixingMatrices, Payload, RoundContext, Traffic
from .selectors import NoParameters, Selector

Finished: TypeAlias = tuple[Payload, LocalState]
"""The upload and the new local state of a client."""

StepChanges: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""For each mechanism, two squared norms: of its change of a local step, and of the step without the change."""


@dataclass(frozen=True)
class Probe:
    """Rows that a client rule with a `Probing.probe` reads before its first local step.

    Attributes:
        rows: the rows that it reads: of the `train` part; `held_out` from the train part and never trained on, the same
            in every round; or of the `validation` part. An empty validation part is not probed.
        share: share of the training rows; drawn again in every round, unless they are held out.
        makes_received_model: whether the received model needs the probe. `finish` then makes it, without any step.
    """

    rows: Literal["train", "held_out", "validation"] = "train"
    share: float = 1.0
    makes_received_model: bool = False


@dataclass(frozen=True)
class LocalPlan:
    """Needs of a client rule for a round.

    Attributes:
        batches_per_step: mini-batches per step; above 1, a batch has a leading axis of this length.
        passes: times that the rule repeats the local work of a round (its steps or epochs).
        probe: the rows that it reads before its first step; None without a probe.
        extras: extras of the payload that it needs: name of the extra -> server rule that sends it.
    """

    batches_per_step: int = 1
    passes: int = 1
    probe: Probe | None = None
    extras: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate(ABC):
    """One client's part of a round: pure functions, written for one client without a client axis.

    Rare abilities are separate base classes: `Probing`, `Resting`, `Substituting`, `StepMeasuring`, `RowWeighing`. The
    methods share their arguments:

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
    def plan(self) -> LocalPlan:
        """Needs of the rule for a round."""
        return LocalPlan()

    def init_local_state(self, w0: Params) -> LocalState:
        """Return the client's state before its first round, from the initial model."""
        return {}

    @abstractmethod
    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Any:
        """Return the carry before the first local step."""

    @abstractmethod
    def step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> Any:
        """Return the carry after one local step."""

    @abstractmethod
    def finish(self, carry: Any, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        """Return the upload and the new local state after the last step."""

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """Return the model for predictions after communication and before local training."""
        return sent.params

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        """Return the model for predictions after local training."""
        return upload.params


class Probing(ABC):
    """A client rule that looks at data before its first step; its plan has a `Probe`."""

    def probe_passes(self, local_state: LocalState) -> Tensor:
        """Return the number of passes over the probed rows, a scalar tensor."""
        return torch.ones(())

    @abstractmethod
    def probe(self, carry: Any, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> Any:
        """Return the carry after one probed mini-batch."""


class RowWeighing(ABC):
    """A client rule that sets some parameters by the losses of its validation rows, such as weights of two models.

    Its predictions of these rows flatter it. So, for the choice of a method, they leave out losses of the same rows.
    """

    @abstractmethod
    def score_rows(self, w: Params, x: Tensor, y: Tensor, predict: Callable[[Params, Tensor], Tensor]) -> Tensor:
        """Return the losses (E, B) of B rows for each of E alternatives."""

    @abstractmethod
    def weigh_rows(self, sums: Tensor, others: Tensor, n: Tensor, *, is_number: bool) -> Params:
        """Return the parameters that predict each of R rows (R, ...).

        Args:
            sums: (R, E) the losses of the client's rows that may be known for each row, summed.
            others: (K, E) the summed losses of the rows of each other client.
            n: (K,) numbers of these rows.
            is_number: whether a number is predicted.
        """


class Resting(ABC):
    """A client rule that predicts with another model than the received one in rounds in which it does not train."""

    @abstractmethod
    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """Return the model for predictions in a round in which the client did not train."""


class Substituting(ABC):
    """A client rule that reads more of a payload than its model."""

    def offered_model(self, sent: Payload) -> Params:
        """Return the model that a payload offers."""
        return sent.params

    @abstractmethod
    def substitute(self, sent: Payload, own: Params) -> Payload:
        """Return the payload as if it had offered the client's own last upload."""


class Encoding(ClientUpdate):
    """A client rule that uploads something else than the model that it trained."""

    def own_model(self, upload: Payload, local_state: LocalState) -> Params:
        """Return the model with which the client goes on if it refuses the next one; by default the trained one."""
        return self.trained_model(upload, local_state)

    def find_base(self, sent: Payload, accepted: Payload) -> Payload:
        """Return the payload for `finish`, if the client `accepted` another one than the server sent.

        By default it is the accepted one. It is the sent one where the server compares the upload with that.
        """
        return accepted

    def report_distrust(self, upload: Payload, distrusts: Tensor) -> Payload:
        """Return the upload of a client that `distrusts` others or not, a scalar bool tensor: it took plain steps."""
        return upload


class StepMeasuring(ABC):
    """A client rule that measures the effect of its mechanisms on the local steps."""

    @property
    @abstractmethod
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms that `measure_step` measures."""

    @abstractmethod
    def measure_step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        """Measure the mechanisms in the local step that follows; an effect is the root of the ratio of their sums."""


SumWeighting = Literal["samples", "uniform", "sum"]
"""Weights of a sum of uploads: a mean by training samples, a mean of equal weights, or a plain sum."""

StateT = TypeVar("StateT", bound=Mapping[str, Any])
"""State of a server rule between rounds: a `TypedDict` of `Params` and tensors, whose names stay the same in a run."""

_Entry = TypeVar("_Entry")

PER_CLIENT = "one row per client"
"""Mark of entries of a state; see `PerClient`."""

PerClient = Annotated[_Entry, PER_CLIENT]
"""An entry of a server rule's state that has one row per client."""


@dataclass(frozen=True)
class ServerTraits:
    """Declarations of a server rule.

    Attributes:
        state: the `TypedDict` of its state, which marks entries by `PerClient`; needed if there are any.
        sends_models: whether the model in a payload is one to train from; differential privacy clips the distance
            from it.
        should_update: whether uploads change what the server sends to other clients.
        more_per_client: entries with one row per client that a wrapper adds to the state.
    """

    state: type = dict
    sends_models: bool = True
    should_update: bool = True
    more_per_client: tuple[str, ...] = ()

    @property
    def per_client(self) -> tuple[str, ...]:
        """Names of the entries of the state that have one row per client."""
        hints = get_type_hints(self.state, include_extras=True)
        marked = (k for k, hint in hints.items() if PER_CLIENT in getattr(hint, "__metadata__", ()))
        return (*marked, *self.more_per_client)


@dataclass(frozen=True)
class ServerUpdate(ABC, Generic[StateT]):
    """The server's part of a round: its state, its broadcast, and the aggregation of uploads.

    Rare abilities are separate base classes: `SumsOnly`, `Measurable`, `Joinable`, `Branching`, `Storing`,
    `Discardable`, `Skippable`, `Quarantining`, `TrafficCounting`, `Advisory`. `ServerWrapper` has them all, with a
    neutral default.
    """

    @property
    def traits(self) -> ServerTraits:
        """Declarations of the rule."""
        return ServerTraits()

    @abstractmethod
    def init(self, w0: Params, n_clients: int) -> StateT:
        """Return the state before the first round, for clients 0 to `n_clients` - 1."""

    def broadcast(self, state: StateT, ids: Tensor) -> Broadcast:
        """Return the payload for clients `ids` (R,), one row per client, and the mixing matrices behind it.

        It depends on the state and the clients alone: an evaluation and the next round may share one broadcast. By
        default, all are sent the entry `w`.
        """
        return Broadcast(Payload(state["w"].repeat(len(ids))))

    @abstractmethod
    def aggregate(self, state: StateT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StateT:
        """Return the state after a round.

        Args:
            state: the state before the round; the rule may write into it.
            ids: (C,) the clients that uploaded, sorted.
            sent: the payload that these clients received, one row per client.
            uploads: the content of their uploads, one row per client.
            n: (C,) training samples of each client.
        """

    def global_model(self, state: StateT) -> Params | None:
        """Return the model that all clients share, or None; by default the entry `w`."""
        w = state.get("w")
        return w if isinstance(w, Params) and w else None


class SumsOnly(ABC):
    """A server rule that needs only sums of uploads, so that the server need not see single ones."""

    @property
    @abstractmethod
    def needed_sums(self) -> Mapping[str, SumWeighting] | None:
        """The sums of uploads that `aggregate` needs: `params` or extra -> weighting; None for single uploads.

        Such a rule gives the same state, up to rounding, if each upload is replaced by the mean (or, for `sum`, by the
        sum over their number). State it in the class that defines `aggregate`: a subclass with an `aggregate` of its
        own states it anew.
        """


class Measurable(ABC):
    """A server rule that measures the effect of its mechanisms at the end of a run."""

    @abstractmethod
    def measure_effects(self, state: Any, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the mechanisms from the state and the last mixing matrices, if any."""


class Joinable(ServerUpdate[StateT]):
    """A server rule with special treatment of clients that join after training."""

    def newcomer_model(self, state: StateT) -> Params:
        """Return the first model of a client that joins; by default the global model."""
        return find_shared_model(state)

    def add_clients(self, state: StateT, n_new: int) -> StateT:
        """Return the state with `n_new` more clients, numbered after the present clients."""
        return append_clients(self, state, self.newcomer_model(state), n_new)

    def aggregate_newcomers(self, state: StateT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StateT:
        """Return the state after a round of clients `ids` that joined; nothing changes for others."""
        return state


class Branching(ABC):
    """A server rule that sends several models, of which a client trains one."""

    @abstractmethod
    def find_start(self, sent: Payload, uploads: Payload) -> Params:
        """Return the models (C, ...) from which clients started, by their payloads and their uploads.

        Updates are measured, clipped and compressed from there.
        """


class Storing(ABC):
    """A server rule that stores uploads, and learns from the difference between a client's start and its upload."""

    @abstractmethod
    def find_stored(self, state: Any, ids: Tensor) -> Params:
        """Return the stored uploads (C, ...) of clients `ids`, which trained from there and not from what was sent."""


class Discardable(ABC):
    """A server rule that keeps uploads after their round."""

    def prepare_discards(self) -> Self:
        """Return the rule that runs where clients may be malicious, if it keeps more there."""
        return self

    @abstractmethod
    def discard_uploads(self, state: Any, ids: Tensor) -> Any:
        """Return the state in which the last uploads of clients `ids` (E,) no longer act on what others receive.

        The server calls it when it rejects uploads of these clients. The next accepted upload of a client acts again.
        """


class Skippable(ABC):
    """A server rule whose state changes in a round in which no upload arrived."""

    @abstractmethod
    def skip_round(self, state: Any) -> Any:
        """Return the state after such a round."""


class Quarantining(ABC):
    """A server rule that can give clients their own models, and nobody else theirs."""

    @abstractmethod
    def quarantine(self, state: Any, ids: Tensor) -> Any:
        """Return the state in which clients `ids` (S,) are in quarantine from now on.

        The server calls it after `aggregate`, for clients whose labels contradict the others'.
        """


class TrafficCounting:
    """A server rule whose payloads or uploads have parts that need not travel."""

    def bytes_down(self, state: Any, ids: Tensor, sent: Payload) -> Traffic:
        """Count the bytes of the payload `sent` to clients `ids`, without the parts that clients already have."""
        return sent.traffic()

    def bytes_up(self, state: Any, ids: Tensor, uploads: Payload) -> Traffic:
        """Count the bytes of the uploads of clients `ids`; `state` is the state after aggregation."""
        return uploads.traffic()


class Advisory(ABC):
    """A server rule that has something to say about a round."""

    @abstractmethod
    def warnings(self, state: Any, ids: Tensor) -> tuple[str, ...]:
        """Return sentences for the user about the last round, in which clients `ids` took part."""


def change(state: StateT, **entries: Params | Tensor) -> StateT:
    """Return a state with new values of some entries."""
    return cast(StateT, {**state, **entries})


def find_needed_sums(rule: ServerUpdate[Any]) -> Mapping[str, SumWeighting] | None:
    """Return the sums that a server rule needs, if the class that states them has no subclass with other arithmetic."""
    for cls in type(rule).__mro__:
        if "needed_sums" in vars(cls) and isinstance(rule, SumsOnly):
            return rule.needed_sums
        if "aggregate" in vars(cls):
            return None
    return None


def find_shared_model(state: Mapping[str, Any]) -> Params:
    """Return the entry `w` of the state of a rule with one model for all."""
    w: Params = state["w"]
    return w


def append_clients(rule: ServerUpdate[StateT], state: StateT, model: Params, n_new: int) -> StateT:
    """Return the state with the rows of `n_new` more clients, as they are before the first round of `model`."""
    new = rule.init(model, n_new)
    return change(state, **{k: _append_rows(state[k], new[k]) for k in rule.traits.per_client if k in state})


def _append_rows(old: Params | Tensor, new: Any) -> Params | Tensor:
    if isinstance(old, Params):
        return old.map(lambda a, b: torch.cat([a, b.to(a)]), new)
    return torch.cat([old, new.to(old)])


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

    `tensors` limits it to those that are `personal`; all others then stay as received. `share` multiplies the run's
    rate where `lr` is None.

    Examples:
        >>> FineTune(steps=10)
        FineTune(steps=10, lr=None, part='train', tensors='all', share=1.0)
    """

    steps: int | None = None
    lr: float | None = None
    part: Literal["train", "test"] = "train"
    tensors: Literal["all", "personal"] = "all"
    share: float = 1.0


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
    server: ServerUpdate[Any]
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
