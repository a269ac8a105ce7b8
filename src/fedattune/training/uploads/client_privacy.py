"""Differential privacy of whole clients: what leaves a client is clipped and noised, and epsilon is accounted.

The mechanism of McMahan et al., *Learning Differentially Private Recurrent Language Models* (ICLR 2018), with cohorts
of a fixed size: neighbours differ by one client whose data are replaced. A server rule that needs only sums of uploads
sees the noise once, on the sum. For all other rules each upload has the noise, and what the rule makes of the uploads
is post-processing.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import find_needed_sums
from ...core.params import Params
from ...core.payload import Payload
from ...core.settings import Settings
from ...privacy.accounting import check_accounting, epsilon_of, noise_for
from ...privacy.noise import Uploaded, clip_and_noise, draw_secret, draw_seeded
from ...runs.context import RunContext
from ..sampling import sample_cohort

Where = Literal["central", "local"]


def count_participations(settings: Settings, n_clients: int, rounds: int) -> int:
    """Return the largest number of cohorts, in the first rounds, that a client is part of; the seed draws them."""
    if settings.cohort_size(n_clients) == n_clients or not rounds:
        return rounds
    counts = np.zeros(n_clients, dtype=np.int64)
    for r in range(1, rounds + 1):
        counts[sample_cohort(settings, n_clients, r).numpy()] += 1
    return int(counts.max())


@dataclass(frozen=True)
class UploadAccounting:
    """The noise multiplier and the epsilon of the uploads of a run.

    Attributes:
        settings: settings of the run.
        n_clients: number of clients.
        is_sum: whether observers see the noise once, on the sum of the uploads, in place of noise on each.
        is_secret: whether this is no simulation: clients may join, and nodes have the seed that draws cohorts.

    """

    settings: Settings
    n_clients: int
    is_sum: bool
    is_secret: bool = False

    @property
    def has_hidden_cohort(self) -> bool:
        """True if observers do not know who is in a cohort: they see sums alone, and do not have the seed.

        Real nodes have the seed, by which they draw batches.
        """
        return self.is_sum and not self.is_secret and self.cohort_size < self.n_clients

    @property
    def cohort_size(self) -> int:
        """Clients in a cohort."""
        return self.settings.cohort_size(self.n_clients)

    @cached_property
    def multiplier(self) -> float:
        """The noise multiplier: deviation of the noise over the clipping length."""
        settings, rounds = self.settings, self.settings.rounds
        if settings.dp_client is None:
            return settings.dp_client_noise or 0.0
        epsilon, delta = settings.dp_client, settings.dp_delta
        found = [noise_for(epsilon, delta, 1, self.count_uploads(rounds), sampling="none")]
        if self.has_hidden_cohort:
            found.append(noise_for(epsilon, delta, self._rate, rounds, sampling="fixed"))
        return min(found)

    def epsilon(self, rounds: int, repeats: int = 0) -> float:
        """Return the epsilon after some rounds.

        Args:
            rounds: number of rounds.
            repeats: rounds that were done again with other noise, after an interruption.

        """
        noise, delta = self.multiplier, self.settings.dp_delta
        found = [epsilon_of(noise, 1, self.count_uploads(rounds) + repeats, delta, sampling="none")]
        if self.has_hidden_cohort:
            found.append(epsilon_of(noise, self._rate, rounds + repeats, delta, sampling="fixed"))
        return min(found)

    def count_uploads(self, rounds: int) -> int:
        """Count the uploads of the client with most; real clients may join, so each round counts there."""
        return rounds if self.is_secret else count_participations(self.settings, self.n_clients, rounds)

    @property
    def _rate(self) -> float:
        return self.cohort_size / self.n_clients


@dataclass(frozen=True)
class ClientPrivacy:
    """The noise on what leaves clients, and the epsilon that it costs.

    Attributes:
        context: the run.
        is_secret: whether this is no simulation: the noise comes from the operating system.

    """

    context: RunContext
    is_secret: bool = False

    @classmethod
    def make(
        cls, context: RunContext, where: Where | None = None, *, is_secret: bool = False
    ) -> "ClientPrivacy | None":
        """Return the noise of a run; None if it has none, or none at this place."""
        settings = context.settings
        if not settings.is_client_private or (where and settings.dp_client_where != where):
            return None
        check_accounting()
        return cls(context, is_secret)

    @property
    def is_central(self) -> bool:
        """True if the server adds the noise."""
        return self.context.settings.dp_client_where == "central"

    @cached_property
    def accounting(self) -> UploadAccounting:
        """The noise multiplier and the epsilon."""
        context = self.context
        # A robust rule looks at single uploads, so noise on their sum would not protect what it returns.
        is_average = (
            find_needed_sums(context.algorithm.server) is not None and context.settings.robust == "off"
        )
        is_sum = self.is_central and is_average
        return UploadAccounting(context.settings, context.n_clients, is_sum, self.is_secret)

    def protect(
        self, r: int, ids: Tensor, sent: Payload, upload: Payload, buffers: Params, statistics: Params
    ) -> tuple[Payload, Params]:
        """Clip and noise what clients `ids` (C,) upload in round r.

        Args:
            r: number of the round.
            ids: numbers of the clients.
            sent: what they were sent, one row each.
            upload: what they upload, one row each.
            buffers: their BatchNorm statistics (C, ...), if these are averaged.
            statistics: the averaged statistics of the round before.

        """
        context = self.context
        start = context.task.params.only(upload.params)
        if context.algorithm.server.sends_models:
            start = Params({k: sent.params.get(k, v) for k, v in start.items()})
        settings = context.settings
        # Independent noise on C uploads, each with 1/sqrt(C) of the deviation, is the noise on their sum.
        share = sqrt(len(ids)) if self.accounting.is_sum else 1.0
        deviation = self.accounting.multiplier * settings.dp_client_clip / share
        new = clip_and_noise(
            Uploaded(upload, buffers),
            Uploaded(Payload(start), statistics),
            ids,
            settings.dp_client_clip,
            deviation,
            draw_secret if self.is_secret else draw_seeded(settings.seed, r),
        )
        return new.upload, new.statistics

    def facts(self, rounds: int, repeats: int = 0) -> dict[str, Any]:
        """Return the facts about the privacy of a run after some rounds."""
        settings, accounting, n = self.context.settings, self.accounting, self.context.n_clients
        size, epsilon = accounting.cohort_size, accounting.epsilon(rounds, repeats)
        cohort = "all clients in every round"
        if size < n:
            cohort = f"{size} of {n} clients, without replacement, " + (
                "unknown to observers" if accounting.has_hidden_cohort else "known to observers"
            )
        return {
            "level": "client",
            "where": settings.dp_client_where,
            "mechanism": "Gaussian noise on the sum of the uploads"
            if accounting.is_sum
            else "Gaussian noise on each upload",
            "neighbours": "one client replaced",
            "epsilon": None if epsilon == inf else epsilon,
            "target": settings.dp_client,
            "delta": settings.dp_delta,
            "noise_multiplier": accounting.multiplier,
            "clip": settings.dp_client_clip,
            "sampling": cohort,
            "rounds": rounds,
            "repeated_rounds": repeats,
            "generator": "the operating system" if self.is_secret else "the seed of this simulation",
        }

    def notes(self, rounds: int, repeats: int = 0) -> list[str]:
        """Return the sentences about it for the table."""
        settings, facts = self.context.settings, self.facts(rounds, repeats)
        spent = "no finite epsilon" if facts["epsilon"] is None else f"epsilon {facts['epsilon']:.3g}"
        against = (
            "clients, while the server is trusted" if self.is_central else "the server and other clients"
        )
        found = [
            f"client-level differential privacy against {against}: {spent} at delta {settings.dp_delta:g} "
            f"({facts['mechanism']}, noise multiplier {facts['noise_multiplier']:.3g}, updates clipped to "
            f"{settings.dp_client_clip:g}; cohorts: {facts['sampling']}); scores, names and sample counts are not "
            "protected"
        ]
        if settings.dp_delta * self.context.n_clients >= 1:
            found.append(
                f"delta {settings.dp_delta:g} is no promise for {self.context.n_clients:,} clients: choose one well "
                f"below {1 / self.context.n_clients:.1g} (--dp-delta)"
            )
        return found


def uniform_counts(n: Tensor) -> Tensor:
    """Return the sample counts that a server rule sees under client-level privacy: 1 for every client.

    A count is a number about one client's data. With weights by counts, a client could have all of the weight.
    """
    return torch.ones_like(n)
