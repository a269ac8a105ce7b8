"""Differential privacy of whole clients: what leaves a client is clipped and noised, and epsilon is accounted.

The mechanism of McMahan et al., *Learning Differentially Private Recurrent Language Models* (ICLR 2018), with cohorts
of a fixed size: neighbours differ by one client whose data are replaced. A server rule that needs only sums of uploads
sees the noise once, on the sum. For all other rules each upload has the noise, and what the rule makes of the uploads
is post-processing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from typing import Any

import torch

from ...core.algorithm import Algorithm, Branching, find_needed_sums
from ...core.errors import ConfigError
from ...core.params import Params
from ...core.payload import Payload
from ...core.settings import ClientNoiseOptions, Settings
from ...privacy.accounting import check_accounting, epsilon_of, format_epsilon, noise_for
from ...privacy.noise import Uploaded, clip_and_noise, draw_secret, draw_seeded
from ...runs.context import RunContext
from ...server.wrapper import ServerWrapper
from ..sampling import count_cohorts
from .step import PastRounds, Report, RoundUploads, StepContext, UploadStep


def find_privacy_obstacle(algorithm: Algorithm, settings: Settings) -> str | None:
    """Say why noise on the update cannot hide what an upload tells of its client's data; None if it can."""
    rule = algorithm.server
    while isinstance(rule, ServerWrapper) and type(rule).find_start is ServerWrapper.find_start:
        rule = rule.inner
    if settings.privacy.client is None or not isinstance(rule, Branching):
        return None
    return "clients choose one of several models by their data, and noise on the update does not hide the choice"


def check_client_privacy(algorithm: Algorithm, settings: Settings) -> None:
    """Check that noise on the update hides what an upload tells of its client's data."""
    if reason := find_privacy_obstacle(algorithm, settings):
        raise ConfigError(
            f"client-level differential privacy (--dp-client) cannot go with this: {reason}; choose a method that "
            "sends one model, such as fedmcsa or ditto"
        )


@dataclass(frozen=True)
class UploadAccounting:
    """The noise multiplier and the epsilon of the uploads of a run.

    `is_sum` says that observers see the noise once, on the sum of the uploads, in place of noise on each. `is_secret`
    says that this is no simulation: clients may join, and nodes have the seed that draws cohorts.
    """

    settings: Settings
    n_clients: int
    is_sum: bool
    is_secret: bool = False

    @property
    def noise(self) -> ClientNoiseOptions:
        assert self.settings.privacy.client is not None
        return self.settings.privacy.client

    @property
    def has_hidden_cohort(self) -> bool:
        """True if observers do not know who is in a cohort: they see sums alone, and do not have the seed.

        Real nodes have the seed, by which they draw batches.
        """
        return self.is_sum and not self.is_secret and self.cohort_size < self.n_clients

    @property
    def cohort_size(self) -> int:
        return self.settings.participation.cohort_size(self.n_clients)

    @cached_property
    def multiplier(self) -> float:
        """The noise multiplier: deviation of the noise over the clipping norm."""
        given, rounds = self.noise, self.settings.rounds
        if given.epsilon is None:
            return given.noise or 0.0
        epsilon, delta = given.epsilon, self.settings.privacy.delta
        found = [noise_for(epsilon, delta, 1, self.count_uploads(rounds), sampling="none")]
        if self.has_hidden_cohort:
            found.append(noise_for(epsilon, delta, self._rate, rounds, sampling="fixed"))
        return min(found)

    def epsilon(self, rounds: int, repeats: int = 0) -> float:
        """Return the epsilon after some rounds, of which `repeats` were done again with other noise."""
        noise, delta = self.multiplier, self.settings.privacy.delta
        found = [epsilon_of(noise, 1, self.count_uploads(rounds) + repeats, delta, sampling="none")]
        if self.has_hidden_cohort:
            found.append(epsilon_of(noise, self._rate, rounds + repeats, delta, sampling="fixed"))
        return min(found)

    def count_uploads(self, rounds: int) -> int:
        """Count the uploads of the client with most; real clients may join, so each round counts there."""
        return rounds if self.is_secret else int(count_cohorts(self.settings, self.n_clients, rounds).max())

    @property
    def _rate(self) -> float:
        return self.cohort_size / self.n_clients


@dataclass(frozen=True)
class ClientPrivacy(UploadStep[None]):
    """Clip and noise what leaves clients, and account the epsilon that this costs.

    `is_sum` says that only the sum of the uploads is protected, which must be all that later steps look at. `is_secret`
    says that this is no simulation: the noise comes from the operating system.
    """

    name = "client_privacy"
    needs = "sums"
    adds_noise = True

    context: RunContext
    noise: ClientNoiseOptions
    is_sum: bool = False
    is_secret: bool = False

    @classmethod
    def make(
        cls, context: RunContext, *, needs_uploads: bool = False, is_secret: bool = False
    ) -> "ClientPrivacy | None":
        """Return the noise of a run; if a later step looks at single uploads, each upload is protected."""
        noise = context.settings.privacy.client
        if noise is None:
            return None
        check_accounting()
        is_average = find_needed_sums(context.algorithm.server) is not None and not needs_uploads
        return cls(context, noise, noise.where == "central" and is_average, is_secret)

    @property
    def is_central(self) -> bool:
        return self.noise.where == "central"

    @cached_property
    def accounting(self) -> UploadAccounting:
        return UploadAccounting(self.context.settings, self.context.n_clients, self.is_sum, self.is_secret)

    def on_client(self, uploads: RoundUploads, memory: Params, context: StepContext) -> tuple[RoundUploads, Params]:
        return uploads if self.is_central else self.protect(uploads), memory

    def on_server(self, state: None, uploads: RoundUploads, context: StepContext) -> tuple[None, RoundUploads]:
        """Clip and noise uploads at the trusted server, and replace the sample counts by 1.

        A count is a number about one client's data. With weights by counts, a client could have all of the weight.
        """
        uploads = self.protect(uploads) if self.is_central else uploads
        return state, replace(uploads, n=torch.ones_like(uploads.n))

    def protect(self, uploads: RoundUploads) -> RoundUploads:
        context, settings = self.context, self.context.settings
        start = context.task.params.only(uploads.upload.params)
        if context.algorithm.server.traits.sends_models:
            start = Params({k: uploads.sent.params.get(k, v) for k, v in start.items()})
        # Independent noise on C uploads, each with 1/sqrt(C) of the deviation, is the noise on their sum.
        share = sqrt(len(uploads.ids)) if self.is_sum else 1.0
        deviation = self.accounting.multiplier * self.noise.clip / share
        new = clip_and_noise(
            Uploaded(uploads.upload, uploads.buffers),
            Uploaded(Payload(start), uploads.statistics),
            uploads.ids,
            self.noise.clip,
            deviation,
            draw_secret if self.is_secret else draw_seeded(settings.seed, uploads.round),
        )
        return replace(uploads, upload=new.upload, buffers=new.statistics)

    def report(self, state: None, past: PastRounds, context: StepContext) -> Report:
        if not self.context.has_shared_parameters:
            return Report()
        facts = self.facts(past.rounds, past.repeats)
        return Report(facts, self._describe(facts))

    def facts(self, rounds: int, repeats: int = 0) -> dict[str, Any]:
        accounting, n = self.accounting, self.context.n_clients
        size, epsilon = accounting.cohort_size, accounting.epsilon(rounds, repeats)
        cohort = "all clients in every round"
        if size < n:
            cohort = f"{size} of {n} clients, without replacement, " + (
                "unknown to observers" if accounting.has_hidden_cohort else "known to observers"
            )
        return {
            "level": "client",
            "where": self.noise.where,
            "mechanism": "Gaussian noise on the sum of the uploads"
            if accounting.is_sum
            else "Gaussian noise on each upload",
            "neighbours": "one client replaced",
            "epsilon": None if epsilon == inf else epsilon,
            "target": self.noise.epsilon,
            "delta": self.context.settings.privacy.delta,
            "noise_multiplier": accounting.multiplier,
            "clip": self.noise.clip,
            "sampling": cohort,
            "rounds": rounds,
            "repeated_rounds": repeats,
            "generator": "the operating system" if self.is_secret else "the seed of this simulation",
        }

    def _describe(self, facts: Mapping[str, Any]) -> list[str]:
        delta = self.context.settings.privacy.delta
        spent = "no finite epsilon" if facts["epsilon"] is None else f"epsilon {format_epsilon(facts['epsilon'])}"
        against = "clients, while the server is trusted" if self.is_central else "the server and other clients"
        found = [
            f"client-level differential privacy against {against}: {spent} at delta {delta:g} "
            f"({facts['mechanism']}, noise multiplier {facts['noise_multiplier']:.3g}, updates clipped to "
            f"{self.noise.clip:g}; cohorts: {facts['sampling']}); scores, names and sample counts are not "
            "protected"
        ]
        if delta * self.context.n_clients >= 1:
            found.append(
                f"delta {delta:g} is no promise for {self.context.n_clients:,} clients: choose one well "
                f"below {1 / self.context.n_clients:.1g} (--dp-delta)"
            )
        return found
