"""Screen the uploads of a round before the server uses them: one mechanism for simulations and deployments.

First, influence is bounded: every layer of an update, and of an extra with the model's tensors, is clipped to CLIP
times the median norm of the round's, and to less for who counts more. So f of C uploads move an average by at most
CLIP f / C median norms, whatever they contain and claim; with local epochs, a claimed count allows a longer update.
Attackers move the median only among the honest norms, for as long as they are fewer than half. Averaged statistics are
limited value by value. Clipping to a radius that the uploads give is the idea of centered clipping (Karimireddy et al.,
ICML 2021, arXiv:2012.10333); the centre is the model that was sent. Robust aggregation bounds more, and costs 5 to 30
points where clients have unlike data (docs/robustness.md).

Second, five rules reject an upload. None of them looks at one client alone: what is usual comes from the others.

    finite      a value is not a number, or infinite
    norm        the norm of the update is above `max_norm_ratio` times the largest median of a round so far; of a client
                that was rejected for it before, times the median of the round, or SUSPECT_FLOOR times the largest
    layer       a layer keeps another share of the sent layer than the median client by MIN_PART_GAP and MAX_DEVIATIONS
                median absolute deviations; the share <theta_l, sent_l> / ||sent_l||^2 is near 1 in honest training,
                near 0 for noise, and negative for a reversed layer
    harm        most clients refuse what they are sent (module `acceptance`), and the client's last update had led
                there: blame_k = -median_i cos(u_k, v_i), u_k its update of the round before, v_i the updates of those
                who refused: they train from their own models, and so point back. The sum of blame_k - TOLERATED over
                such rounds, never below 0, exceeds MAX_EVIDENCE. It stays for good
    labels      the client's classes look like other classes of the others (module `labels`), and the server makes one
                model, or can quarantine clients

Direction alone says little: near the end of training, the updates of honest clients with unlike data cancel out, and
groups with data of their own oppose the others all along. So the clients' own rows decide whether there is harm, and
directions only who did it; without refusals by a majority, nobody is blamed. Where nobody attacks, each rejection is
an error: by default, simulations without an attack reject only what is not finite.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...core.algorithm import find_needed_sums
from ...core.errors import list_some
from ...core.faults import Fault
from ...core.params import Params
from ...core.payload import Payload
from ...server.products import flatten
from ...server.wrapper import ServerWrapper
from ..clients.acceptance import find_policy
from .labels import LabelCheck, find_last_layers
from .layer_measures import LayerMeasures, measure_layers, sample_updates
from .step import PastRounds, Report, RoundUploads, StepContext, UploadStep

SUSPECT_FLOOR = 0.3
"""Minimum usual norm for a client that was rejected for its norm before, in the largest median of a round so far.

Medians fall during training. Updates of honest clients with other data then stay larger than the others'; a malicious
client's updates, which shrink too, would pass again.
"""

CLIP, MIN_CLIPPED = 3.0, 3
"""Largest norm of a layer's update, in the median norm of the round, and uploads that a median needs. At 1.5, groups of
5 of 20 clients with data of their own lose 2 to 3 points, and no attack does less harm (docs/robustness.md)."""

MIN_CLIENTS = 8
"""Uploads of a round that the rules on parts and harm need."""

MIN_PART_GAP, MAX_DEVIATIONS = 0.5, 8.0
"""Gap of an outlier among the kept shares, and the same in median absolute deviations."""

MIN_REFUSING, TOLERATED, MAX_EVIDENCE, MAX_BLAMED = 0.5, 0.25, 0.2, 0.4
"""Share of a round's clients that must refuse for somebody to be blamed; blame of honest clients; sum above which a
client is rejected; share of clients above TOLERATED, from which on nobody stands out."""

MIN_REPEATED = 0.8
"""Share of a round's clients that were in the round before, for somebody to be blamed."""

MAX_CLAIMED_WEIGHT = 3.0
"""Largest ratio of a claimed sample count to the median, unless the user says another."""

NOT_FINITE = Fault("not_finite", "uploaded values that are not finite")

HARMFUL = Fault("harm", "uploaded updates after which most clients refused what they were sent")

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
        evidence: client -> sum of the blame for harm.
        label_evidence: client -> sum of its contradictions about labels.
        last_ids: clients of the last round.
        last_updates: (C, V) sampled values of their updates.
        sample_seed: the seed of these samples.
        last_rounds: client -> round of its last upload, where the server replies to uploads.
        bounded: clients whose claimed sample count was bounded.
        quarantined: clients that are in quarantine for good.
        rejected: client -> sentence -> rounds in which its upload was rejected.
    """

    usual: float = 0.0
    suspects: set[int] = field(default_factory=set)
    evidence: dict[int, float] = field(default_factory=dict)
    label_evidence: dict[int, float] = field(default_factory=dict)
    last_ids: list[int] = field(default_factory=list)
    last_updates: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    sample_seed: int = 0
    last_rounds: dict[int, int] = field(default_factory=dict)
    bounded: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)
    rejected: dict[int, Counter[str]] = field(default_factory=dict)


class Screening(UploadStep[ScreenState]):
    """Bound updates and claimed sample counts, and reject uploads that no honest client sends.

    The mode is `on`, `groups` or `off`; uploads that are not finite are rejected in any case. Where only sums mean
    anything, no single upload is looked at.
    """

    name = "screening"
    needs = "sums"

    def __init__(self, context: StepContext) -> None:
        run, claimed = context.run, context.counts_are_claimed
        auto = "groups" if claimed else "off"
        self._context = context
        defence = run.settings.defence
        self.mode = auto if defence.screening == "auto" else defence.screening
        max_weight = defence.max_weight or (MAX_CLAIMED_WEIGHT if claimed else math.inf)
        # Of all clients: a cohort of two has no median to speak of.
        self._max_count = max_weight * max(1.0, float(run.n_train.double().median()))
        self._is_on = self.mode != "off" and context.sees_uploads
        self._sends_models = run.algorithm.server.traits.sends_models
        self._weighs_samples = "samples" in (find_needed_sums(run.algorithm.server) or {}).values()
        # A refusal of what is merely worse than the own model is no sign of harm.
        self._blames = find_policy(run.settings) == "harmless"
        self._can_quarantine = ServerWrapper(run.algorithm.server).can_quarantine
        has_labels = self._is_on and self.mode == "on" and (context.has_one_model or self._can_quarantine)
        has_labels &= run.federation.kind == "class"
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
            layers = measure_layers(uploads.upload, uploads.sent, are_models_sent=self._sends_models)
        is_finite = find_finite(uploads, layers)
        faults = dict.fromkeys((~is_finite).nonzero().flatten().tolist(), NOT_FINITE)
        if layers:
            factors = self._allow_longer(state, uploads)
            # For clients that went on from another model, norms and parts say nothing, and clipping bounds the upload.
            is_judged = is_finite & ~torch.isin(uploads.ids, uploads.ids.new_tensor(sorted(uploads.alone)))
            # If most clients did, the others may all be attackers, who must not say what is usual.
            are_most_judged = 2 * int(is_judged.sum()) > int(is_finite.sum())
            is_usual = is_judged if are_most_judged else is_finite
            self._check_norms(state, uploads.ids, layers, is_judged, is_usual, factors, faults)
            if are_most_judged:
                check_layers(layers, is_judged, faults)
            starts_from_sent = self._sends_models and uploads.upload.params.keys() <= uploads.sent.params.keys()
            if self._blames and starts_from_sent:
                check_harm(state, uploads, layers, faults)
            if self._labels:
                uploads = self._check_labels(self._labels, state, uploads, faults)
        clients = uploads.ids.tolist()
        for row, fault in faults.items():
            state.rejected.setdefault(clients[row], Counter())[fault.detail] += 1
        if layers and starts_from_sent:
            accepted = [row for row in range(len(clients)) if row not in faults]
            weights = torch.ones_like(factors)
            if self._weighs_samples:
                weights = (uploads.n / uploads.n.median().clamp_min(1)).clamp_min(1).double()
            uploads = clip_uploads(uploads, layers, accepted, factors, weights)
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
        is_judged: Tensor,
        is_usual: Tensor,
        factors: Tensor,
        faults: dict[int, Fault],
    ) -> None:
        """Reject updates with a norm far above the usual one, for as long a training.

        What is usual comes from the uploads `is_usual`; beyond this round, only if all of them are judged.
        """
        norms = torch.stack([one.squares for one in layers.values()]).sum(0).sqrt() / factors
        known = norms[is_usual]
        median = float(known.median()) if len(known) > 2 else 0.0
        # Medians fall, as most clients have learnt all that they can; the others' norms stay as before.
        usual = torch.full_like(norms, max(state.usual, median))
        suspects = [row for row, client in enumerate(ids.tolist()) if client in state.suspects]
        if len(known) >= MIN_CLIENTS:
            usual[suspects] = max(SUSPECT_FLOOR * state.usual, median)
        max_ratio = self._context.max_norm_ratio
        is_large = is_judged & (usual > 0) & (norms > max_ratio * usual)
        for row in is_large.nonzero().flatten().tolist():
            state.suspects.add(int(ids[row]))
            faults.setdefault(
                row, Fault("norm", f"uploaded an update whose norm is more than {max_ratio:g} times the usual norm")
            )
        if torch.equal(is_usual, is_judged) and (accepted := norms[is_judged & ~is_large].tolist()):
            state.usual = max(state.usual, statistics.median_low(accepted))

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
            # A finite sum means that all values are finite; to test each value takes 50 times as long.
            if value.is_floating_point() and not value.sum().isfinite():
                is_finite &= torch.isfinite(flatten(value)).all(1)
    return is_finite


def check_harm(
    state: ScreenState, uploads: RoundUploads, layers: Mapping[str, LayerMeasures], faults: dict[int, Fault]
) -> None:
    """Blame clients for what most clients refuse, and remember the round's updates."""
    clients = uploads.ids.tolist()
    upload, sent = uploads.upload.params, uploads.sent.params
    known = [row for row in range(len(clients)) if row not in faults]
    refusing = [row for row in known if clients[row] in uploads.refused]
    # What a new cohort refuses may have come of older rounds.
    took_part = len({*clients} & {*state.last_ids}) >= MIN_REPEATED * len(clients)
    if took_part and len(known) >= MIN_CLIENTS and len(refusing) > MIN_REFUSING * len(known):
        back = sample_updates(upload, sent, state.sample_seed)[refusing]
        # Attackers may refuse too. A median of cosines: one of values is mostly theirs, as honest updates are unlike.
        blame = -(normalize(state.last_updates, dim=1) @ normalize(back, dim=1).T).median(1).values
        if float((blame > TOLERATED).double().mean()) <= MAX_BLAMED:
            for client, value in zip(state.last_ids, blame.tolist(), strict=True):
                state.evidence[client] = max(0.0, state.evidence.get(client, 0.0) + value - TOLERATED)
    faults |= {row: HARMFUL for row in known if state.evidence.get(clients[row], 0.0) > MAX_EVIDENCE}
    known = [row for row in known if row not in faults]
    # Nobody knows the sampled values before all uploads are in.
    squares = torch.stack([one.squares for one in layers.values()]).sum(0)
    state.sample_seed = hash(tuple(squares[known].tolist())) % 2**31
    state.last_ids = [clients[row] for row in known]
    state.last_updates = sample_updates(upload, sent, state.sample_seed)[known]


def clip_uploads(
    uploads: RoundUploads, layers: Mapping[str, LayerMeasures], rows: list[int], factors: Tensor, weights: Tensor
) -> RoundUploads:
    """Clip the uploads of `rows`, and keep what is small as it is.

    Layers of updates, and of extras with the model's tensors, are clipped to CLIP median norms of the `rows`, times a
    client's `factors`, and divided by its `weights` in the average, both (C,) and at least 1. Averaged statistics are
    clipped value by value to MAX_DEVIATIONS median absolute deviations.
    """
    if len(rows) < MIN_CLIPPED:
        return uploads
    (params, extra), sent = uploads.upload, uploads.sent.params
    names = {layer: one.names for layer, one in layers.items()}
    updates = {layer: one.squares.sqrt() / factors for layer, one in layers.items()}
    new = {"": _clip_layers(params, sent, names, updates, rows, weights)}
    for key, part in extra.items():
        if part.keys() == params.keys():
            squares = {layer: _sum_squares(part.only(some)) for layer, some in names.items()}
            norms = {layer: one.sqrt() for layer, one in squares.items()}
            new[key] = _clip_layers(part, Params(), names, norms, rows, torch.ones_like(weights))
    clipped = Payload(new.pop(""), {**extra, **new})
    return replace(uploads, upload=clipped, buffers=uploads.buffers.map(lambda v: _limit_values(v, rows)))


def _clip_layers(
    stack: Params,
    sent: Params,
    layers: Mapping[str, list[str]],
    norms: Mapping[str, Tensor],
    rows: list[int],
    weights: Tensor,
) -> Params:
    """Clip each layer of a stack (C, ...) around what was `sent`, or around zero; who has a weight, to less."""
    changed = dict(stack)
    for layer, names in layers.items():
        shrink = (CLIP * norms[layer][rows].median() / (weights * norms[layer]).clamp_min(1e-30)).clamp_max(1)
        large = [row for row in rows if shrink[row] < 1]
        for name in names if large else ():
            value = stack[name].clone()
            before = sent[name][large] if name in sent else torch.zeros_like(value[large])
            factor = shrink[large].to(value.dtype).view(-1, *[1] * (value.dim() - 1))
            value[large] = before + factor * (value[large] - before)
            changed[name] = value
    return Params(changed)


def _sum_squares(rows: Params) -> Tensor:
    return torch.stack([flatten(v).double().square().sum(1) for v in rows.values()]).sum(0)


def _limit_values(value: Tensor, rows: list[int]) -> Tensor:
    """Limit statistics (C, ...) to MAX_DEVIATIONS median absolute deviations around the median of `rows`."""
    if not value.is_floating_point():
        return value
    median = value[rows].median(0).values
    width = MAX_DEVIATIONS * 1.4826 * (value[rows] - median).abs().median(0).values
    return value.clamp(median - width, median + width)


def check_layers(layers: Mapping[str, LayerMeasures], is_judged: Tensor, faults: dict[int, Fault]) -> None:
    """Reject uploads with a layer that was reversed, erased or blown up, by the share that it keeps of the sent one."""
    if int(is_judged.sum()) < MIN_CLIENTS:
        return
    is_usual = is_judged.clone()
    is_usual[list(faults)] = False
    for layer, one in layers.items():
        # A median with a share that is no number is none, and would accept everybody.
        known = is_usual & one.shares.isfinite()
        # A layer whose norm is below its update's says nothing: no part of it need remain.
        if bool(known.any()) and bool(one.squares[known].median() <= one.sent_squares[known].median()):
            gaps = (one.shares - one.shares[known].median()).abs()
            max_gap = max(MIN_PART_GAP, MAX_DEVIATIONS * 1.4826 * float(gaps[known].median()))
            for row in (is_judged & ~(gaps <= max_gap)).nonzero().flatten().tolist():
                faults.setdefault(
                    row, Fault("layer", f"uploaded a model whose part {layer} was reversed, erased or blown up")
                )
