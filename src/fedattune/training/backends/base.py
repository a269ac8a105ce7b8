"""A backend trains and evaluates clients, wherever they are; the round loop talks to it in requests and replies."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.effect import Effect
from ...core.errors import RunError
from ...core.faults import Fault
from ...core.params import Params, concatenate
from ...core.payload import Payload, concatenate_payloads
from ...core.settings import LARGEST_UPDATE
from ...runs.context import RunContext
from ...runs.rows import RowStack
from ..clients.evaluation import PointScores
from ..clients.state import PayloadFactory
from ..sampling import sample_cohort, sample_dropouts

CHOICE_KEY = "kept_for_choice"
"""Key of the models for the choice between methods in the state of a backend; not every backend has them."""


class TrainRequest(NamedTuple):
    """A request to train clients in one round.

    Attributes:
        round: number of the round, from 1.
        ids: clients that train or are sent something.
        cohort: clients that are asked to upload; not all of them need be among `ids`, nor the reverse.
        dropouts: clients of the cohort that are gone before they train.
        update_server: whether uploads change what the server sends to other clients.
        should_evaluate: whether clients are evaluated after training.
    """

    round: int
    ids: Tensor
    cohort: Tensor
    dropouts: Tensor
    update_server: bool
    should_evaluate: bool

    @classmethod
    def draw(cls, context: RunContext, r: int, *, update_server: bool, should_evaluate: bool) -> "TrainRequest":
        """Draw the cohort of round r, and the clients of it that drop out, from the seed alone."""
        cohort = sample_cohort(context.settings, context.n_clients, r).to(context.device)
        absent = sample_dropouts(context.settings, context.n_clients, r).to(context.device)
        # Without shared parameters, nobody is asked for an upload that could fail to come.
        dropouts = cohort[absent[cohort] & context.has_shared_parameters]
        ids = cohort if context.algorithm.participation.train == "cohort" else context.all_ids
        return cls(r, ids, cohort, dropouts, update_server, should_evaluate)


class TrainReply(NamedTuple):
    """The outcome of a request to train.

    Attributes:
        ids: (C,) clients that upload.
        sent: the payloads that these clients had been sent.
        upload: their uploads.
        buffers: their BatchNorm statistics, if these are averaged.
        n_trained: clients whose training went well.
        steps: local steps of all clients.
        diverged: clients whose training was not finite.
        faults: why the uploads of clients are missing: they could not be reached, or were rejected.
        refused: clients that refused their payload in this round.
        alone: clients that trained from their own models, as they refused, or are on trial.
    """

    ids: Tensor
    sent: Payload
    upload: Payload
    buffers: Params
    n_trained: int = 0
    steps: int = 0
    diverged: Sequence[int] = ()
    faults: Mapping[int, Fault] = {}
    refused: Sequence[int] = ()
    alone: Sequence[int] = ()

    @classmethod
    def merge(cls, replies: Sequence["TrainReply"]) -> "TrainReply":
        if len(replies) == 1:
            return replies[0]
        uploaded = [reply for reply in replies if len(reply.ids)] or replies[:1]
        return cls(
            torch.cat([reply.ids for reply in uploaded]),
            concatenate_payloads([reply.sent for reply in uploaded]),
            concatenate_payloads([reply.upload for reply in uploaded]),
            concatenate([reply.buffers for reply in uploaded]),
            sum(reply.n_trained for reply in replies),
            sum(reply.steps for reply in replies),
            [i for reply in replies for i in reply.diverged],
            {i: fault for reply in replies for i, fault in reply.faults.items()},
            [i for reply in replies for i in reply.refused],
            [i for reply in replies for i in reply.alone],
        )


@dataclass(frozen=True)
class BackendTraits:
    """Facts about a backend that the round loop needs.

    Attributes:
        max_clients: number of clients to train per request; ignored if the cohort is larger.
        is_deployed: whether clients are elsewhere. Then a checkpoint follows every round, because clients cannot be
            taken back far; sample counts are claims; and noise comes from the operating system, not from the seed.
        merges_clients: whether scores are of all clients together, as one client with the number after the last.
        largest_update: ratio of an update's norm to the usual norm above which it is rejected.
    """

    max_clients: int
    is_deployed: bool = False
    merges_clients: bool = False
    largest_update: float = LARGEST_UPDATE


class Backend(ABC):
    """Clients in this process or behind a network, named by their numbers among all clients.

    Attributes:
        traits: what the round loop must know about the backend.
        statistics: the averaged BatchNorm statistics that clients are sent; empty if these stay local.
        can_save: whether a checkpoint is possible now; not while clients are ahead of the server's round.
        notes: sentences about the run that only the backend knows.
    """

    traits: BackendTraits
    statistics: Params
    can_save = True
    notes: list[str]

    @property
    @abstractmethod
    def personal_example(self) -> Params:
        """The tensors that never leave a client, of one client."""

    @property
    @abstractmethod
    def evaluated_models(self) -> tuple[RowStack, RowStack]:
        """Models and buffers (E, ...) that were kept, or else evaluated last; empty if they stay with the clients."""

    @abstractmethod
    def receive(self, ids: Tensor, payload: Payload) -> None:
        """Give clients `ids` the server's answers to their uploads, one row each."""

    @abstractmethod
    def train(self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory) -> TrainReply:
        """Train clients; return the uploads, and the clients that failed.

        The payload has one row for each of the clients `request.ids`; None if they keep their last payload. The factory
        is for other clients, which are evaluated without training.
        """

    def reject(self, r: int, faults: Mapping[int, Fault]) -> None:
        """Take note that uploads of round r were rejected: client -> why."""
        return

    def quarantine(self, r: int, clients: Iterable[int]) -> None:
        """Take note that these clients are quarantined from round r on."""
        return

    @abstractmethod
    def evaluate_trained(self, make_payload: PayloadFactory) -> list[PointScores]:
        """Return the scores after the local training of this round."""

    @abstractmethod
    def evaluate_received(self, r: int, make_payload: PayloadFactory, w: Params | None) -> list[PointScores]:
        """Return the scores after the communication of round r, and of the global model `w`, if there is one."""

    def load_fewer(self, flat: Mapping[str, Tensor], n_before: int, make_payload: PayloadFactory) -> None:
        """Load the state of a checkpoint with fewer clients; the others join now."""
        raise RunError("the checkpoint has fewer clients than the data; clients can join deployed runs only")

    def defer_evaluation(self, r: int, make_payload: PayloadFactory, w: Params | None) -> bool:
        """Evaluate as `evaluate_received` does, but with the training of the next round; return whether this is done.

        `take_late_scores` has the scores then. It pays where each message to a client has a price.
        """
        return False

    def take_late_scores(self) -> tuple[int, list[PointScores]]:
        """Return the scores that came with the last training, and their round; no scores if none were deferred."""
        return 0, []

    @abstractmethod
    def keep_models(self, ids: Tensor) -> None:
        """Keep the models of clients `ids` that were evaluated last at the evaluation point, in place of older ones."""

    @property
    def models_for_choice(self) -> tuple[RowStack, RowStack]:
        """Models and buffers (E, ...) kept by `keep_for_choice`; empty if there are none."""
        return Params(), Params()

    def keep_for_choice(self, ids: Tensor) -> None:
        """Keep a second copy of the models of clients `ids`, for the choice between methods; see `keep_models`."""
        return

    @abstractmethod
    def measure_clients(self, r: int, ids: Tensor, make_payload: PayloadFactory) -> list[list[Effect]]:
        """Measure the mechanisms of clients `ids` after round r, each by itself; the clients do not change."""

    @abstractmethod
    def state_tree(self) -> dict[str, Any]:
        """Return the state of the clients as a nest of dicts, for a checkpoint."""

    @abstractmethod
    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""


def find_rows(ids: Tensor, cohort: Tensor, n_clients: int) -> Tensor | None:
    """Return the positions in `ids` of the clients in the cohort; None if it holds them all."""
    if torch.equal(cohort, torch.arange(n_clients, device=cohort.device)):
        return None
    is_member = torch.isin(ids, cohort, assume_unique=True)
    return None if bool(is_member.all()) else is_member.nonzero().flatten()
