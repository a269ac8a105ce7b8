"""The adversary of a simulation: it poisons the rows that attackers train on, and corrupts what they upload.

A method may upload extras beside the model. An extra that has a value for each value of the model (the variates of
SCAFFOLD) is attacked in the same way, as a change of zero. All other extras (scores, counters), and the statistics of
BatchNorm layers, stay honest.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, list_some
from ...core.params import Params, find_layer
from ...core.payload import Payload
from ...core.selectors import Head
from ...core.settings import Settings
from ...core.streams import Stream
from ...core.targets import KIND_WORDS
from ...data import Federation
from ...data.federated import FederationInfo
from ...runs.context import RunContext
from ...runs.rows import RowStack
from ..sampling import get_split_seed
from .attacks import NEEDS_CLASSES, ModelAttack, View, parse_attack
from .poisoning import TARGET_CLASS, measure_backdoor, plant_trigger, poison_rows
from .step import PastRounds, Report, RoundUploads, StepContext, UploadStep

DEFAULT_ATTACKERS = 0.2
"""Share of the clients that attack, if an attack is given without their number."""

MAX_LISTED = 5
"""Names that a sentence lists."""


def check_attack(settings: Settings, federation: Federation | FederationInfo | None = None) -> None:
    """Check the attack of the settings, and whether it suits the data if they are known; do nothing without one."""
    if settings.attack is None:
        return
    chosen = parse_attack(settings.attack.name)
    if federation is None:
        return
    sample_attackers(settings, federation)
    if federation.kind != "class" and chosen.name in NEEDS_CLASSES:
        raise ConfigError(
            f"attack: {chosen.name} needs classes, and the target is {KIND_WORDS[federation.kind]}; label_flip "
            "negates the standardized target or the labels"
        )


def sample_attackers(settings: Settings, federation: Federation | FederationInfo) -> list[int]:
    """Draw the clients that attack, sorted; none without an attack.

    The seed of the split draws them, so that all methods and seeds of a comparison have the same honest clients.
    """
    if settings.attack is None:
        return []
    n, given = federation.n_clients, settings.attack.attackers
    share = DEFAULT_ATTACKERS if given is None else given
    n_attackers = share if isinstance(share, int) else max(1, round(share * n))
    if n_attackers >= n:
        raise ConfigError(
            f"attackers: got {n_attackers}, expected fewer than the {n} clients that there are, as honest clients are "
            "judged"
        )
    rng = np.random.default_rng([get_split_seed(federation), Stream.ATTACKERS])
    return sorted(int(i) for i in rng.choice(n, n_attackers, replace=False))


class Attack(UploadStep[None]):
    """Poison the attackers' training rows, and corrupt their uploads; attackers are excluded from all scores."""

    name = "attack"
    needs = "sums"

    def __init__(self, context: RunContext) -> None:
        assert context.settings.attack is not None
        self._context, self._name = context, context.settings.attack.name
        self._chosen = parse_attack(self._name)

    def prepare_data(self, federation: Federation, context: RunContext) -> Federation:
        attack, attackers = self._chosen.attack, context.excluded.tolist()
        if attack.poison is None:
            return federation
        return poison_rows(federation, attackers, attack.poison, self._chosen.strength)

    def collect_facts(self) -> dict[str, Any]:
        context, federation = self._context, self._context.federation
        names = {str(i): federation.names[i] for i in context.excluded.tolist()}
        marked: dict[str, Any] = {"mark": "attacks", "group": "attackers", "clients": names}
        if isinstance(federation, Federation) and federation.classes:
            attackers = federation.index.take(context.excluded.cpu().numpy())
            marked["labels"] = replace(federation, clients=attackers).label_counts().tolist()
        return {"attack": {"name": self._name, "attackers": names}, "marked": marked}

    def report(self, state: None, past: PastRounds, context: StepContext) -> Report:
        run = self._context
        names = list_some([run.federation.names[i] for i in run.excluded.tolist()], MAX_LISTED)
        note = (
            f"{len(run.excluded)} of the {run.n_clients:,} clients attack (--attack {self._name}: they "
            f"{self._chosen.attack.summary}): {names}; all numbers are of honest clients"
        )
        return Report(common_notes=[note])

    def measure(self, models: RowStack, buffers: RowStack, context: StepContext) -> Report:
        if self._chosen.attack.poison is not plant_trigger:
            return Report()
        success = measure_backdoor(self._context, models, buffers)
        classes = self._context.federation.classes
        return Report(
            {"success": success},
            []
            if success is None
            else [
                f"with the trigger, honest clients' models take {100 * success:.1f}% of the test rows of other "
                f"classes for class {classes[TARGET_CLASS]}"
            ],
        )

    def on_server(self, state: None, uploads: RoundUploads, context: StepContext) -> tuple[None, RoundUploads]:
        is_attacker = torch.isin(uploads.ids, self._context.excluded)
        if not is_attacker.any() or not self._chosen.acts_in(uploads.round, self._context.settings.rounds):
            return state, uploads
        attack, strength, n = self._chosen.attack, self._chosen.strength, uploads.n
        if attack.claims_samples:
            n = torch.where(is_attacker, torch.full_like(n, int(strength)), n)
        if attack.claims_refusal:
            attackers = uploads.ids[is_attacker].tolist()
            uploads = replace(uploads, refused=uploads.refused.union(attackers), alone=uploads.alone.union(attackers))
        if attack.corrupt is not None and uploads.upload.params:
            uploads = self._corrupt_upload(attack.corrupt, uploads, is_attacker)
        return state, replace(uploads, n=n)

    def _corrupt_upload(self, corrupt: ModelAttack, reply: RoundUploads, is_attacker: Tensor) -> RoundUploads:
        attackers = is_attacker.nonzero().flatten()
        others = (~is_attacker).nonzero().flatten()
        others = others if len(others) else attackers
        seed = self._context.settings.seed
        rng = np.random.default_rng([seed, Stream.ATTACK, reply.round])
        victim = int(rng.integers(len(others)))
        head = self._find_head(reply.upload.params)

        def change(received: Params, uploads: Params) -> Params:
            stacks = (received.rows(attackers), uploads.rows(attackers), uploads.rows(others), received.rows(others))
            # Round 0 is none: a stream that is the same in all rounds.
            run_rng = np.random.default_rng([seed, Stream.ATTACK, 0])
            view = View(*stacks, head, victim, self._chosen.strength, rng, run_rng)
            return uploads.map(torch.clone).put_rows(attackers, corrupt(view))

        params, extra = reply.upload
        if (target := self._chosen.attack.target) == "statistics":
            buffers = Params({k: v for k, v in reply.buffers.items() if v.is_floating_point()})
            return replace(
                reply, buffers=Params({**reply.buffers, **change(buffers.zeros(), buffers)}) if buffers else Params()
            )
        received = Params({k: reply.sent.params.get(k, torch.zeros_like(v)) for k, v in params.items()})
        changed = {k: change(v.zeros(), v) if v.keys() == params.keys() else v for k, v in extra.items()}
        return replace(reply, upload=Payload(params if target == "extras" else change(received, params), changed))

    def _find_head(self, uploads: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the shared tensors of the classifier; of the last shared layer if the classifier stays home."""
        head = {name for name in Head().names(self._context.task.model) if name in uploads}
        last = find_layer(list(uploads)[-1])
        return frozenset(head or {name for name in uploads if find_layer(name) == last})
