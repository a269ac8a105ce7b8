"""Screen the uploads of a round before the server uses them: one mechanism for simulations and deployments.

Five rules reject an upload. None of them looks at one client alone: what is usual comes from the other clients.

    finite      a value is not a number, or infinite
    norm        the norm of the update is above `max_norm_ratio` times the largest median of a round so far; of a client
                that was rejected for it before, times the median of the round, or SUSPECT_FLOOR times the largest
    part        a layer keeps another share of the sent layer than the median client by MIN_PART_GAP and MAX_DEVIATIONS
                median absolute deviations; the share <theta_l, sent_l> / ||sent_l||^2 is near 1 in honest training,
                near 0 for noise, and negative for a reversed layer
    direction   from the first round for as long as the updates of a layer agree (the median cosine with the
                coordinate-wise median of the others is at least MIN_AGREEMENT), a client's updates oppose the others
                in all layers: the sum over rounds of -cosine / median cosine - TOLERATED exceeds MAX_EVIDENCE
    labels      the client's classes look like other classes of the others (module `labels`), and the server makes one
                model, or can quarantine clients

The last three need MIN_CLIENTS uploads. Near the end of training, the updates of honest clients with different data
cancel out, so directions say nothing there. Most groups with other data (inverted images, permuted labels) oppose the
others by up to 0.8 of what these agree and not from the first round on; reversed updates by 1 or more. But inverted
images reverse all of a linear model's update, and permuted labels are flipped labels. Where nobody attacks, each
rejection is an error: by default, simulations without an attack reject only what is not finite.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.errors import list_some
from ...core.faults import Fault
from ...server.products import flatten
from ...server.wrapper import ServerWrapper
from .labels import LabelCheck, find_last_layers
from .layer_measures import LayerMeasures, compare_directions, measure_layers
from .step import PastRounds, Report, RoundUploads, StepContext, UploadStep

SUSPECT_FLOOR = 0.3
"""Minimum usual norm for a client that was rejected for its norm before, in the largest median of a round so far.

Medians fall during training. Updates of honest clients with other data then stay larger than the others'; a malicious
client's updates, which shrink too, would pass again.
"""

MIN_CLIENTS = 8
"""Uploads of a round that the rules on parts and directions need."""

MIN_PART_GAP, MAX_DEVIATIONS = 0.75, 8.0
"""Gap of an outlier among the kept shares, and the same in median absolute deviations."""

MIN_AGREEMENT, TOLERATED, MAX_OPPOSITION, MAX_EVIDENCE = 0.15, 0.8, 2.0, 1.0
"""Minimum median cosine for directions to count; opposition of honest clients; maximum that one round counts; sum above
which a client is rejected. The first two are ratios to the median cosine of the others."""

MAX_CLAIMED_WEIGHT = 3.0
"""Largest ratio of a claimed sample count to the median, unless the user says another."""

MAX_OPPOSED = 0.3
"""Maximum share of clients that oppose the others; if more do, a layer's updates no longer agree."""

NOT_FINITE = Fault("not_finite", "uploaded values that are not finite")

OPPOSED = Fault(
    "direction", "uploaded updates against those of the others, round after round (screening=groups accepts them)"
)

OTHER_LABELS = Fault(
    "labels", "uploaded updates whose classes look like other classes of the others (screening=groups accepts them)"
)

MAX_LISTED = 5
"""Clients that a sentence names."""


@dataclass
class ScreenState:
    """State of screening between rounds.

    Attributes:
        usual: largest median norm of a round so far.
        suspects: clients that were rejected for the norm of an update.
        evidence: client -> sum of its opposition to the others, if it is above 0.
        label_evidence: client -> sum of its contradictions about labels.
        disagreeing: layers whose updates no longer agree.
        last_rounds: client -> round of its last upload, where the server replies to uploads.
        bounded: clients whose claimed sample count was bounded.
        quarantined: clients that are in quarantine for good.
        rejected: client -> sentence -> rounds in which its upload was rejected.
    """

    usual: float = 0.0
    suspects: set[int] = field(default_factory=set)
    evidence: dict[int, float] = field(default_factory=dict)
    label_evidence: dict[int, float] = field(default_factory=dict)
    disagreeing: set[str] = field(default_factory=set)
    last_rounds: dict[int, int] = field(default_factory=dict)
    bounded: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)
    rejected: dict[int, Counter[str]] = field(default_factory=dict)


class Screening(UploadStep[ScreenState]):
    """Reject uploads that no honest client sends, and bound the sample counts that clients claim.

    The mode is `on`, `groups` or `off`; uploads that are not finite are rejected in any case. Where only sums mean
    anything, no single upload is looked at.
    """

    name = "screening"
    needs = "sums"

    def __init__(self, context: StepContext) -> None:
        run, claimed = context.run, context.counts_are_claimed
        auto = "on" if claimed else "off"
        self._context = context
        defence = run.settings.defence
        self.mode = auto if defence.screening == "auto" else defence.screening
        max_weight = defence.max_weight or (MAX_CLAIMED_WEIGHT if claimed else math.inf)
        # Of all clients: a cohort of two has no median to speak of.
        self._max_count = max_weight * max(1.0, float(run.n_train.double().median()))
        self._is_on = self.mode != "off" and context.sees_uploads
        self._compares = self.mode == "on" and context.sees_uploads
        self._can_quarantine = ServerWrapper(run.algorithm.server).can_quarantine
        has_labels = self._compares and (context.has_one_model or self._can_quarantine)
        layers = find_last_layers(run.task, len(run.federation.classes)) if has_labels else []
        self._labels = LabelCheck(layers) if layers else None

    def init(self, context: StepContext) -> ScreenState:
        return ScreenState()

    def on_server(
        self, state: ScreenState, uploads: RoundUploads, context: StepContext
    ) -> tuple[ScreenState, RoundUploads]:
        if not len(uploads.ids):
            return state, uploads
        uploads = self._bound_counts(state, uploads)
        layers = {}
        if self._is_on:
            layers = measure_layers(
                uploads.upload,
                uploads.sent,
                uploads.round if self._compares else None,
                state.disagreeing,
                are_models_sent=self._context.run.algorithm.server.traits.sends_models,
            )
        is_finite = find_finite(uploads, layers)
        faults = dict.fromkeys((~is_finite).nonzero().flatten().tolist(), NOT_FINITE)
        if layers:
            factors = self._allow_longer(state, uploads)
            self._check_norms(state, uploads.ids, layers, is_finite, factors, faults)
            check_layers(layers, is_finite, faults)
            if self._compares:
                self._check_directions(state, uploads.ids, layers, faults)
            if self._labels:
                uploads = self._check_labels(self._labels, state, uploads, faults)
        clients = uploads.ids.tolist()
        for row, fault in faults.items():
            state.rejected.setdefault(clients[row], Counter())[fault.detail] += 1
        return state, uploads.reject(faults)

    def _check_labels(
        self, labels: LabelCheck, state: ScreenState, uploads: RoundUploads, faults: dict[int, Fault]
    ) -> RoundUploads:
        """Reject clients who mean other classes by their labels; or quarantine them for good, where the method can.

        A client in quarantine trains a model of its own, whose updates say little about labels.
        """
        clients = uploads.ids.tolist()
        excluded = {*faults, *(row for row, client in enumerate(clients) if client in state.quarantined)}
        rows = labels(state.label_evidence, uploads.ids, uploads.sent.params, uploads.upload.params, excluded)
        if not self._can_quarantine:
            faults |= dict.fromkeys(rows, OTHER_LABELS)
            return uploads
        new = frozenset(clients[row] for row in rows)
        state.quarantined |= new
        return replace(uploads, quarantined=new)

    def _bound_counts(self, state: ScreenState, uploads: RoundUploads) -> RoundUploads:
        if float(uploads.n.max()) <= self._max_count:
            return uploads
        state.bounded.update(uploads.ids[uploads.n > self._max_count].tolist())
        return replace(uploads, n=uploads.n.clamp_max(int(self._max_count)))

    def _allow_longer(self, state: ScreenState, uploads: RoundUploads) -> Tensor:
        """Return by which factor each client's norm may be above the others', because it trained for longer, (C,).

        An epoch of more samples has more steps. Where the server replies to uploads, a client outside the cohort goes
        on from its last reply.
        """
        n, run = uploads.n, self._context.run
        factors = torch.ones(len(n), dtype=torch.float64, device=n.device)
        if run.settings.training.epochs:
            factors = (n / max(1, statistics.median_low(n.tolist()))).clamp_min(1).double()
        if run.replies_immediately:
            clients, r = uploads.ids.tolist(), uploads.round
            factors *= factors.new_tensor([r - state.last_rounds.get(client, 0) for client in clients])
            state.last_rounds.update(dict.fromkeys(clients, r))
        return factors

    def _check_norms(
        self,
        state: ScreenState,
        ids: Tensor,
        layers: Mapping[str, LayerMeasures],
        is_finite: Tensor,
        factors: Tensor,
        faults: dict[int, Fault],
    ) -> None:
        """Reject updates with a norm far above the usual one, for as long a training."""
        norms = torch.stack([one.squares for one in layers.values()]).sum(0).sqrt() / factors
        known = norms[is_finite]
        median = float(known.median()) if len(known) > 2 else 0.0
        # Medians fall, as most clients have learnt all that they can; the others' norms stay as before.
        usual = torch.full_like(norms, max(state.usual, median))
        suspects = [row for row, client in enumerate(ids.tolist()) if client in state.suspects]
        if len(known) >= MIN_CLIENTS:
            usual[suspects] = max(SUSPECT_FLOOR * state.usual, median)
        max_ratio = self._context.max_norm_ratio
        is_large = (usual > 0) & (norms > max_ratio * usual)
        for row in is_large.nonzero().flatten().tolist():
            state.suspects.add(int(ids[row]))
            faults.setdefault(
                row, Fault("norm", f"uploaded an update whose norm is more than {max_ratio:g} times the usual norm")
            )
        if accepted := [norm for row, norm in enumerate(norms.tolist()) if row not in faults]:
            state.usual = max(state.usual, statistics.median_low(accepted))

    def _check_directions(
        self, state: ScreenState, ids: Tensor, layers: Mapping[str, LayerMeasures], faults: dict[int, Fault]
    ) -> None:
        """Reject clients whose updates opposed the others in many rounds; only accepted clients are the others."""
        clients = ids.tolist()
        rows = [row for row in range(len(clients)) if row not in faults]
        voters = [row for row in rows if state.evidence.get(clients[row], 0.0) <= MAX_EVIDENCE]
        opposition = []
        if len(voters) >= MIN_CLIENTS:
            for layer, one in layers.items():
                if one.sample.shape[1] and layer not in state.disagreeing:
                    cosines = compare_directions(one.sample, voters)
                    agreement = float(cosines[voters].median())
                    opposed = cosines[voters] < -TOLERATED * agreement
                    if agreement >= MIN_AGREEMENT and float(opposed.double().mean()) <= MAX_OPPOSED:
                        norms = one.squares.sqrt()
                        # A client that has learnt all that it can makes small updates in any direction.
                        share = (norms / norms[voters].median().clamp_min(1e-30)).clamp_max(1)
                        opposition.append(-cosines * share / agreement)
                    else:
                        state.disagreeing.add(layer)
        if opposition:
            # An attack opposes the others in all layers, other data only in some.
            min_opposition = torch.stack(opposition).amin(0).clamp_max(MAX_OPPOSITION).tolist()
            for row in rows:
                total = state.evidence.get(clients[row], 0.0) + min_opposition[row] - TOLERATED
                # A rejected client needs honest rounds to come back, not one that happens to agree.
                state.evidence[clients[row]] = 2 * MAX_EVIDENCE if total > MAX_EVIDENCE else total
        for row in rows:
            if state.evidence.get(clients[row], 0.0) > MAX_EVIDENCE:
                faults[row] = OPPOSED

    def report(self, state: ScreenState, past: PastRounds, context: StepContext) -> Report:
        run = self._context.run
        names = run.federation.names
        facts: dict[str, Any] = {}
        if state.rejected:
            facts["rejected"] = {
                names[i]: dict(state.rejected[i]) for i in sorted(state.rejected, key=names.__getitem__)
            }
        for name, clients in (("quarantined", state.quarantined), ("bounded_counts", state.bounded)):
            if clients:
                facts[name] = [names[i] for i in sorted(clients)]
        notes = describe_screening({**facts, "rejected": {}})  # the note on faults has the rounds of those
        is_private = run.settings.privacy.client is not None and run.has_shared_parameters
        if is_private and self.mode != "off" and not context.sees_uploads:
            notes.append(
                "uploads were not screened, because the noise protects their sum only (--dp-client-where local "
                "protects each)"
            )
        if facts:
            facts["sentences"] = describe_screening(facts)
        return Report(facts, notes)


def describe_screening(facts: Mapping[str, Any]) -> list[str]:
    """Return sentences on rejected uploads, quarantine and bounded counts in a report."""
    sentences = []
    for name, reasons in facts.get("rejected", {}).items():
        why = "; ".join(f"{reason} ({rounds} round{'s' * (rounds > 1)})" for reason, rounds in reasons.items())
        sentences.append(f"the server rejected uploads of {name}, which {why}")
    if quarantined := facts.get("quarantined"):
        sentences.append(
            f"the server quarantined {list_some(quarantined, MAX_LISTED)}: their classes look "
            "like other classes of the others (screening=groups lets them share)"
        )
    if bounded := facts.get("bounded_counts"):
        sentences.append(
            f"the server cut the claimed sample counts of {list_some(bounded, MAX_LISTED)}; --max-weight sets the limit"
        )
    return sentences


def find_finite(uploads: RoundUploads, layers: Mapping[str, LayerMeasures]) -> Tensor:
    """Return which uploads are finite, with all that comes with them, (C,); finite measures tell it of the models."""
    is_finite = torch.ones(len(uploads.ids), dtype=torch.bool, device=uploads.ids.device)
    are_measured = bool(layers) and bool(torch.isfinite(torch.stack([one.squares for one in layers.values()])).all())
    models = () if are_measured else (uploads.upload.params,)
    for part in (*models, *uploads.upload.extra.values(), uploads.buffers):
        for value in part.values():
            if value.is_floating_point():
                is_finite &= torch.isfinite(flatten(value)).all(1)
    return is_finite


def check_layers(layers: Mapping[str, LayerMeasures], is_finite: Tensor, faults: dict[int, Fault]) -> None:
    """Reject uploads with a layer that was reversed, erased or blown up, by the share that it keeps of the sent one."""
    if int(is_finite.sum()) < MIN_CLIENTS:
        return
    for layer, one in layers.items():
        # A layer whose norm is below its update's says nothing: no part of it need remain.
        if bool(one.squares[is_finite].median() <= one.sent_squares[is_finite].median()):
            known = one.shares[is_finite]
            median = known.median()
            gaps = (one.shares - median).abs()
            max_gap = max(MIN_PART_GAP, MAX_DEVIATIONS * 1.4826 * float(gaps[is_finite].median()))
            for row in (gaps > max_gap).nonzero().flatten().tolist():
                faults.setdefault(
                    row, Fault("layer", f"uploaded a model whose part {layer} was reversed, erased or blown up")
                )
