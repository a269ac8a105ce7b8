"""The adversary of a simulation: it poisons the rows that attackers train on, and corrupts what they upload.

A method may upload extras beside the model. An extra that has a value for each value of the model (the variates of
SCAFFOLD) is attacked in the same way, as a change of zero. All other extras (scores, counters), and the statistics of
BatchNorm layers, stay honest.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.params import Params, find_layer
from ...core.payload import Payload
from ...core.selectors import Head
from ...core.settings import Settings
from ...core.streams import Stream
from ...data import Federation
from ...data.federated import FederationInfo
from ...runs.context import RunContext
from ...runs.rows import RowStack
from ..backends.base import TrainReply
from ..sampling import sample_attackers
from .attacks import NEEDS_CLASSES, ModelAttack, View, parse_attack
from .poisoning import TARGET_CLASS, measure_backdoor, plant_trigger, poison_rows


def check_attack(settings: Settings, federation: Federation | FederationInfo | None = None) -> None:
    """Check the attack of the settings, and whether it suits the data if they are known; do nothing without one.

    Raises:
        ConfigError: there is no such attack, it needs classes, or no honest client would be left.

    """
    if settings.attack is None:
        return
    chosen = parse_attack(settings.attack)
    if federation is None:
        return
    sample_attackers(settings, federation)
    if not federation.classes and chosen.name in NEEDS_CLASSES:
        raise ConfigError(
            f"attack: {chosen.name} needs classes, and the target is a number; "
            "label_flip negates the standardized target"
        )


def poison_federation(context: RunContext) -> Federation:
    """Return the data that clients train on: the attackers' rows are changed if the attack is one on data."""
    federation, settings = context.federation, context.settings
    assert isinstance(federation, Federation)  # facts about a federation have no data to train on
    if settings.attack is None:
        return federation
    chosen = parse_attack(settings.attack)
    if chosen.attack.poison is None:
        return federation
    return poison_rows(federation, context.attackers.tolist(), chosen.attack.poison, chosen.strength)


class Adversary:
    """Corrupt the attackers' uploads of each round.

    Args:
        context: the run, with its attackers.

    """

    def __init__(self, context: RunContext) -> None:
        assert context.settings.attack is not None
        self._context, self._chosen = context, parse_attack(context.settings.attack)

    def add_measures(self, facts: dict[str, Any], name: str, models: RowStack, buffers: RowStack) -> None:
        """Add to the facts of a finished run what the attack did to honest clients: the success of a trigger.

        Args:
            facts: the facts; their entries `attack` and `notes` change.
            name: name of the method.
            models: the judged models (E, ...) of the evaluated clients.
            buffers: their buffers (E, ...).

        """
        if self._chosen.attack.poison is not plant_trigger:
            return
        success = measure_backdoor(self._context, models, buffers)
        facts["attack"] = {**facts["attack"], "success": success}
        if success is not None:
            facts["notes"].append(
                f"{name}: with the trigger, honest clients' models take {100 * success:.1f}% of the test rows of other "
                f"classes for class {facts['classes'][TARGET_CLASS]}"
            )

    def corrupt(self, r: int, reply: TrainReply, n: Tensor) -> tuple[TrainReply, Tensor]:
        """Return the reply with the attackers' lies, and the samples that clients claim.

        Args:
            r: number of the round.
            reply: honest uploads of all clients.
            n: (C,) training samples of each.

        """
        is_attacker = torch.isin(reply.ids, self._context.attackers)
        liars = is_attacker.nonzero().flatten()
        if not len(liars):
            return reply, n
        attack, strength = self._chosen.attack, self._chosen.strength
        if attack.claims_samples:
            n = torch.where(is_attacker, torch.full_like(n, int(strength)), n)
        if attack.corrupt is not None and reply.upload.params:
            reply = reply._replace(upload=self._corrupt_upload(attack.corrupt, r, reply, is_attacker))
        return reply, n

    def _corrupt_upload(
        self, corrupt: ModelAttack, r: int, reply: TrainReply, is_attacker: Tensor
    ) -> Payload:
        liars = is_attacker.nonzero().flatten()
        others = (~is_attacker).nonzero().flatten()
        others = others if len(others) else liars
        rng = np.random.default_rng([self._context.settings.seed, Stream.ATTACK, r])
        victim = int(rng.integers(len(others)))
        head = self._find_head(reply.upload.params)

        def change(received: Params, uploads: Params) -> Params:
            view = View(
                received.rows(liars),
                uploads.rows(liars),
                uploads.rows(others),
                received.rows(others),
                head,
                victim,
                self._chosen.strength,
                rng,
            )
            stack = uploads.map(torch.clone)
            return stack.put_rows(liars, corrupt(view))

        params, extra = reply.upload
        received = Params({k: reply.sent.params.get(k, torch.zeros_like(v)) for k, v in params.items()})
        changed = {k: change(v.zeros(), v) if v.keys() == params.keys() else v for k, v in extra.items()}
        return Payload(change(received, params), changed)

    def _find_head(self, uploads: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the shared tensors of the classifier; of the last shared layer if the classifier stays home."""
        head = {name for name in Head().names(self._context.task.model) if name in uploads}
        last = find_layer(list(uploads)[-1])
        return frozenset(head or {name for name in uploads if find_layer(name) == last})
