"""The way of uploads from the clients to the server rule: one order for simulations and deployments.

    lies         with `--attack`, the attackers of a simulation corrupt what they upload
    noise        with `--dp-client` and a trusted server, updates are clipped and noised
    screening    uploads that no honest client sends are refused, and claimed sample counts are bounded
    robust rule  with `--robust`, the robust aggregate takes the place of every upload of an average

The noise comes before screening and robust rules, so that both are post-processing of what is private already. Noise
that is made for the sum of all uploads protects this sum only: nothing may then depend on single uploads, so these are
not screened. Under secure aggregation there are none to look at.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ...runs.context import RunContext
from ..backends.base import Backend, TrainReply
from .adversary import Adversary
from .client_privacy import ClientPrivacy, uniform_counts
from .robust import find_trusted, replace_by_robust
from .screening import Screen, describe_screening


class ScreenedUploads(NamedTuple):
    """The uploads of a round on their way to the server rule.

    Attributes:
        reply: the uploads that were not refused; its faults name the refused clients.
        n: (C,) their sample counts, as the rule may see them.
        refused: client -> why its upload was refused in this round.
        apart: clients who are set apart from this round on.

    """

    reply: TrainReply
    n: Tensor
    refused: dict[int, str]
    apart: frozenset[int]


class UploadPipeline:
    """Corrupt, protect and screen the uploads of each round.

    Args:
        context: the run.
        backend: the clients.
        has_one_model: whether the server makes one model for all clients.

    Attributes:
        adversary: the attackers of a simulation; None without an attack.
        privacy: differential privacy of whole clients; None without it.
        screen: refuses uploads that no honest client sends.

    """

    def __init__(self, context: RunContext, backend: Backend, *, has_one_model: bool) -> None:
        self._context, self._backend = context, backend
        self.adversary = Adversary(context) if context.settings.attack else None
        self.privacy = ClientPrivacy.make(context, is_secret=backend.traits.is_deployed)
        self._sees_sums_only = backend.traits.merges_clients or bool(
            self.privacy and self.privacy.accounting.is_sum
        )
        self.screen = Screen(
            context,
            backend.traits.largest_update,
            are_claims=backend.traits.is_deployed or self.adversary is not None,
            has_one_model=has_one_model,
            sees_uploads=not self._sees_sums_only,
        )
        self._trusted = find_trusted(context)

    def receive(self, r: int, reply: TrainReply) -> ScreenedUploads:
        """Take the uploads of round r through all steps but the last.

        Args:
            r: number of the round.
            reply: what the backend returned.

        """
        before, n = reply.faults, self._context.n_train[reply.ids]
        if self.adversary:
            reply, n = self.adversary.corrupt(r, reply, n)
        if self.privacy and self.privacy.is_central and len(reply.ids):
            upload, buffers = self.privacy.protect(
                r, reply.ids, reply.sent, reply.upload, reply.buffers, self._backend.statistics
            )
            reply = reply._replace(upload=upload, buffers=buffers)
        reply, n = self.screen(r, reply, uniform_counts(n) if self.privacy else n)
        refused = {i: reason for i, reason in reply.faults.items() if i not in before}
        return ScreenedUploads(reply, n, refused, self.screen.apart)

    def aggregate_robustly(self, reply: TrainReply, n: Tensor) -> TrainReply:
        """Return the reply, each upload replaced by the robust aggregate if the user wants one and the method can."""
        return replace_by_robust(self._context, self._trusted, reply, n)

    def collect(
        self, rounds: int, repeats: int, faults: Iterable[tuple[int, int, str]]
    ) -> tuple[dict[str, Any], list[str]]:
        """Collect the reports of the steps (name -> facts), and sentences about a run.

        Args:
            rounds: number of finished rounds.
            repeats: rounds that may have been done twice with other noise.
            faults: round, client and reason of every lost or refused upload.

        """
        screened = self.screen.collect_facts(faults)
        reports: dict[str, Any] = {}
        if screened:
            reports["screening"] = {**screened, "sentences": describe_screening(screened)}
        notes = describe_screening({**screened, "refused": {}})  # the store's note on faults has their rounds
        if self.privacy and self._context.has_shared_parameters:
            reports["client_privacy"] = self.privacy.facts(rounds, repeats)
            notes = [*self.privacy.notes(rounds, repeats), *notes]
            if self.screen.how != "off" and self._sees_sums_only:
                notes.append(
                    "uploads were not screened, because the noise protects their sum only (--dp-client-where local "
                    "protects each)"
                )
        return reports, notes
