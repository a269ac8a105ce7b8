"""The context of a run, which is settled before the first round and never changes; and the progress of a run."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.params import Params
from ..core.settings import EarlyStopping, Settings
from ..core.task import Task
from ..data import Federation
from ..data.federated import FederationInfo


class Progress(NamedTuple):
    """The position of a run.

    Attributes:
        round: number of the last finished round, from 1.
        rounds: number of rounds in all.
        accuracy: mean test accuracy over clients at the evaluation point, at the last evaluation; None before.
        seconds: wall-clock time since the run began.
        rmse: in place of the accuracy if the target is a number, in its unit.
        evaluated: round of the last evaluation; 0 before.
    """

    round: int
    rounds: int
    accuracy: float | None
    seconds: float
    rmse: float | None = None
    evaluated: int = 0


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that all its rounds share; it is handed to everything that takes part in a round."""

    algorithm: Algorithm  # with what the settings decide for all methods alike
    settings: Settings
    task: Task  # the model that is trained, and its loss
    federation: Federation | FederationInfo
    all_ids: Tensor  # (N,) numbers of all clients
    eval_ids: Tensor  # (E,) numbers of the clients that are evaluated, sorted
    n_train: Tensor  # (N,) training samples of every client
    has_shared_parameters: bool  # whether any parameter leaves the clients
    excluded: Tensor  # (A,) numbers of the clients that are never evaluated, sorted

    @property
    def n_clients(self) -> int:
        return len(self.all_ids)

    @property
    def device(self) -> torch.device:
        return self.all_ids.device

    @property
    def replies_immediately(self) -> bool:
        """True if the server answers each upload right after aggregation."""
        return self.algorithm.participation.receive == "answer"

    @property
    def early_stopping(self) -> EarlyStopping:
        """Criterion that chooses the round of each client's judged model; off without validation data."""
        how = self.settings.evaluation.early_stopping
        if how == "off" or not bool((self.federation.sizes("validation")[self.eval_ids.cpu()] > 0).any()):
            return "off"
        return how if self.federation.classes else "loss"

    @property
    def initial_statistics(self) -> Params:
        """The BatchNorm statistics that are averaged over clients, before the first round; empty if none are."""
        averages = self.has_shared_parameters and self.algorithm.bn_buffers == "average"
        return self.task.buffers.only(self.task.bn_statistics if averages else ())
