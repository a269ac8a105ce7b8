"""Check the options that concern clients before a run, and keep the counts that they need.

The round loop, checkpoints and plans name no single option.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...core.algorithm import Algorithm
from ...core.errors import ConfigError
from ...core.losses import make_loss
from ...core.settings import Settings
from ...data import Federation
from ...data.federated import FederationInfo
from ...runs.context import RunContext
from ..backends.base import TrainReply, TrainRequest
from ..setup import check_optimizer
from ..uploads.client_privacy import check_client_privacy
from .acceptance import Refusals
from .losses import check_loss
from .record_privacy import RecordLedger, check_record_privacy


def check_clients(settings: Settings, federation: Federation | FederationInfo) -> None:
    """Check that the clients have the data that the settings need, and that the training loss suits their target."""
    make_loss(settings.loss, federation.classes, federation.kind, federation.output_shape)
    if settings.defence.accept == "better" and not bool(federation.sizes("validation").any()):
        raise ConfigError(
            "accept: better judges received models by validation rows, and no client has any; "
            "give --validation 0.1 or more"
        )


def check_method(
    algorithm: Algorithm, module: nn.Module, settings: Settings, federation: Federation | FederationInfo
) -> None:
    """Check that clients can do what the settings ask of them with this method and the module that it trains.

    A server that has no rows leaves out what needs some; each node checks that.
    """
    check_loss(algorithm, module, settings, federation)
    check_optimizer(algorithm, settings)
    check_record_privacy(algorithm, module, settings, federation)
    check_client_privacy(algorithm, settings)


class ClientLedger:
    """Counts over the clients of a run, which are in its checkpoints: spent privacy of rows, and refused models."""

    def __init__(self, context: RunContext, *, is_secret: bool = False) -> None:
        self.privacy = RecordLedger(context, is_secret=is_secret)
        self.refusals = Refusals(context)

    @property
    def spends(self) -> bool:
        """True if looking at training rows costs epsilon."""
        return self.privacy.plan is not None

    def add_round(self, request: TrainRequest, reply: TrainReply) -> None:
        self.privacy.add_round(request.ids, request.dropouts)
        self.refusals.add_round(request.round, reply.refused, reply.n_trained)

    def add_evaluation(self) -> None:
        self.privacy.add_evaluation()

    def state_tree(self) -> dict[str, Any]:
        return {**self.privacy.state_tree(), **self.refusals.state_tree()}

    def load(self, flat: Mapping[str, Tensor]) -> None:
        self.privacy.load(flat)
        self.refusals.load(flat)

    def facts(self, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return entries of the facts of the run, and of their `reports`.

        `repeats` counts the rounds that nodes may have trained twice, with other noise, after an interruption.
        """
        return self.refusals.facts(), self.privacy.facts(repeats)

    def notes(self, name: str, repeats: int) -> list[str]:
        return [*(f"{name}: {note}" for note in self.privacy.notes(repeats)), *self.refusals.notes(name)]
