"""Screen the uploads of a round before the server uses them: one mechanism for simulations and deployments.

Five rules refuse an upload. None of them looks at one client alone: what is usual comes from the other clients.

    finite      a value is not a number, or infinite
    length      the update is more than `largest_update` times as long as the longest median of a round so far; of a
                client that was refused for it before, as the median of the round, or SUSPECT_FLOOR times the longest
    part        a layer keeps another share of what was sent than the median client by MIN_PART_GAP and MAX_DEVIATIONS
                median absolute deviations; the share <theta_l, sent_l> / ||sent_l||^2 is near 1 in honest training,
                near 0 for noise, and negative for a reversed layer
    direction   from the first round for as long as the updates of a layer agree (the median cosine with the
                coordinate-wise median of the others is at least MIN_AGREEMENT), a client's updates oppose the others
                in all layers: the sum over rounds of -cosine / median cosine - TOLERATED exceeds MAX_EVIDENCE
    labels      the client's classes look like other classes of the others (module `labels`), and the server makes one
                model, or can set clients apart

The last three need MIN_CLIENTS uploads. Near the end of training, the updates of honest clients with different data
cancel out, so directions say nothing there. Most groups with other data (inverted images, permuted labels) oppose the
others by up to 0.8 of what these agree and not from the first round on; reversed updates by 1 or more. But inverted
images reverse all of a linear model's update, and permuted labels are flipped labels. Where nobody lies, each refusal
is an error: by default, simulations without an attack refuse only what is not finite.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import list_some
from ...runs.context import RunContext
from ...server.products import flatten
from ..backends.base import TrainReply
from .labels import LabelCheck, find_last_layers
from .layer_measures import LayerMeasures, compare_directions, measure_layers

SUSPECT_FLOOR = 0.3
"""Least usual length for a client that was refused for its length before, in the longest median of a round so far.

Medians fall during training. Honest clients with other data then stay longer than the others; a liar's updates, which
shrink too, would pass again.
"""

MIN_CLIENTS = 8
"""Uploads of a round that the rules on parts and directions need."""

MIN_PART_GAP, MAX_DEVIATIONS = 0.75, 8.0
"""Gap of an outlier among the kept shares, and the same in median absolute deviations."""

MIN_AGREEMENT, TOLERATED, MAX_OPPOSITION, MAX_EVIDENCE = 0.15, 0.8, 2.0, 1.0
"""Median cosine down to which directions count; opposition of honest clients; most that one round counts; sum that is
refused. The first two are ratios to the median cosine of the others."""

MAX_CLAIMED_WEIGHT = 3.0
"""Largest ratio of a claimed sample count to the median, unless the user says another."""

MAX_OPPOSED = 0.3
"""Share of clients that may oppose the others; if more do, a layer's updates agree no longer."""

UPLOADED = "uploaded "
"""The beginning of the reason for which an upload is refused."""

OPPOSED = f"{UPLOADED}updates against those of the others, round after round (screening=groups accepts them)"
"""The reason for which the rule on directions refuses an upload."""

OTHER_LABELS = (
    f"{UPLOADED}updates whose classes look like other classes of the others (screening=groups accepts them)"
)
"""The reason for which the rule on labels refuses an upload."""

MAX_LISTED = 5
"""Clients that a sentence names."""


class Screen:
    """Refuse uploads that no honest client sends, and bound the sample counts that clients claim.

    Args:
        context: the run.
        largest_update: ratio of a length to the usual length from which on an update is refused.
        are_claims: whether clients may lie: their data are elsewhere, or they attack.
        has_one_model: whether the server makes one model for all clients, which cannot serve two meanings of a label.
        sees_uploads: whether there are single uploads to look at.

    Attributes:
        how: the rules: `on`, `groups` or `off`; uploads that are not finite are refused in any case.
        usual: longest median length of a round so far.
        suspects: clients that were refused for the length of an update.
        evidence: client -> sum of its opposition to the others, if it is above 0.
        labels: compares what clients mean by their classes; None if they may mean different things.
        apart: clients who are set apart in this round, for good.
        separated: clients who were set apart in this round or before.
        parted: layers whose updates agreed no longer in some round.
        answered: client -> round of its last upload, where the server answers uploads.
        bounded: clients whose claimed sample count was bounded.

    """

    def __init__(
        self,
        context: RunContext,
        largest_update: float,
        *,
        are_claims: bool,
        has_one_model: bool,
        sees_uploads: bool,
    ) -> None:
        self._context, self._largest_update = context, largest_update
        auto = "on" if are_claims else "off"
        self.how = auto if context.settings.screening == "auto" else context.settings.screening
        max_weight = context.settings.max_weight or (MAX_CLAIMED_WEIGHT if are_claims else math.inf)
        # Of all clients: a cohort of two has no median to speak of.
        self._max_count = max_weight * max(1.0, float(context.n_train.double().median()))
        self.usual = 0.0
        self.suspects: set[int] = set()
        self.evidence: dict[int, float] = {}
        self.parted: set[str] = set()
        self.answered: dict[int, int] = {}
        self.bounded: set[int] = set()
        self.apart: frozenset[int] = frozenset()
        self.separated: set[int] = set()
        self._is_on = self.how != "off" and sees_uploads
        self._compares = self.how == "on" and sees_uploads
        self._can_separate = context.algorithm.server.can_quarantine
        has_labels = self._compares and (has_one_model or self._can_separate)
        layers = find_last_layers(context.task, len(context.federation.classes)) if has_labels else []
        self.labels = LabelCheck(layers) if layers else None

    def __call__(self, r: int, reply: TrainReply, n: Tensor) -> tuple[TrainReply, Tensor]:
        """Screen the uploads of a round.

        Args:
            r: number of the round.
            reply: the uploads.
            n: (C,) training samples that the clients claim.

        Returns:
            The reply without the refused uploads, which are in `faults`, and the bounded sample counts.

        """
        self.apart = frozenset()
        if not len(reply.ids):
            return reply, n
        n = self._bound_counts(reply.ids, n)
        layers = {}
        if self._is_on:
            layers = measure_layers(
                reply,
                r if self._compares else None,
                self.parted,
                are_models_sent=self._context.algorithm.server.sends_models,
            )
        is_finite = find_finite(reply, layers)
        refused = dict.fromkeys(
            (~is_finite).nonzero().flatten().tolist(), f"{UPLOADED}values that are not finite"
        )
        if layers:
            self._check_lengths(reply.ids, layers, is_finite, self._allow_longer(r, reply.ids, n), refused)
            check_parts(layers, is_finite, refused)
            if self._compares:
                self._check_directions(reply.ids, layers, refused)
            if self.labels:
                self._check_labels(self.labels, reply, refused)
        return drop_uploads(reply, n, refused)

    def _check_labels(self, labels: LabelCheck, reply: TrainReply, refused: dict[int, str]) -> None:
        """Refuse clients who mean other classes by their labels; or set them apart for good, where the method can.

        Who is apart trains a model of its own, whose updates say little about labels.
        """
        clients = reply.ids.tolist()
        alone = {row for row, client in enumerate(clients) if client in self.separated}
        rows = labels(reply.ids, reply.sent.params, reply.upload.params, {*refused, *alone})
        if self._can_separate:
            self.apart = frozenset(clients[row] for row in rows)
            self.separated |= self.apart
        else:
            refused |= dict.fromkeys(rows, OTHER_LABELS)

    def _bound_counts(self, ids: Tensor, n: Tensor) -> Tensor:
        """Bound the counts by `max_weight` times the median over all clients of the run."""
        if float(n.max()) <= self._max_count:
            return n
        self.bounded.update(ids[n > self._max_count].tolist())
        return n.clamp_max(int(self._max_count))

    def _allow_longer(self, r: int, ids: Tensor, n: Tensor) -> Tensor:
        """Return how many times longer than others each client's update may be, because it trained for longer, (C,).

        An epoch of more samples has more steps. Where the server answers uploads, a client outside the cohort goes on
        from its last answer.
        """
        factors = torch.ones(len(n), dtype=torch.float64, device=n.device)
        if self._context.settings.epochs:
            factors = (n / max(1, statistics.median_low(n.tolist()))).clamp_min(1).double()
        if self._context.replies_immediately:
            clients = ids.tolist()
            factors *= factors.new_tensor([r - self.answered.get(client, 0) for client in clients])
            self.answered.update(dict.fromkeys(clients, r))
        return factors

    def _check_lengths(
        self,
        ids: Tensor,
        layers: Mapping[str, LayerMeasures],
        is_finite: Tensor,
        factors: Tensor,
        refused: dict[int, str],
    ) -> None:
        """Refuse updates that are far longer than usual, for as long a training."""
        lengths = torch.stack([one.squares for one in layers.values()]).sum(0).sqrt() / factors
        known = lengths[is_finite]
        median = float(known.median()) if len(known) > 2 else 0.0
        # Medians fall, as most clients have learnt all that they can; the others' updates stay as long as before.
        usual = torch.full_like(lengths, max(self.usual, median))
        suspects = [row for row, client in enumerate(ids.tolist()) if client in self.suspects]
        if len(known) >= MIN_CLIENTS:
            usual[suspects] = max(SUSPECT_FLOOR * self.usual, median)
        is_long = (usual > 0) & (lengths > self._largest_update * usual)
        for row in is_long.nonzero().flatten().tolist():
            self.suspects.add(int(ids[row]))
            times = f"more than {self._largest_update:g} times longer than usual"
            refused.setdefault(row, f"{UPLOADED}an update {times}")
        if accepted := [length for row, length in enumerate(lengths.tolist()) if row not in refused]:
            self.usual = max(self.usual, statistics.median_low(accepted))

    def _check_directions(
        self, ids: Tensor, layers: Mapping[str, LayerMeasures], refused: dict[int, str]
    ) -> None:
        """Refuse clients whose updates opposed the others in many rounds; only accepted clients are the others."""
        clients = ids.tolist()
        rows = [row for row in range(len(clients)) if row not in refused]
        voters = [row for row in rows if self.evidence.get(clients[row], 0.0) <= MAX_EVIDENCE]
        opposition = []
        if len(voters) >= MIN_CLIENTS:
            for layer, one in layers.items():
                if one.sample.shape[1] and layer not in self.parted:
                    cosines = compare_directions(one.sample, voters)
                    agreement = float(cosines[voters].median())
                    opposed = cosines[voters] < -TOLERATED * agreement
                    if agreement >= MIN_AGREEMENT and float(opposed.double().mean()) <= MAX_OPPOSED:
                        lengths = one.squares.sqrt()
                        # A client that has learnt all that it can makes short updates in any direction.
                        share = (lengths / lengths[voters].median().clamp_min(1e-30)).clamp_max(1)
                        opposition.append(-cosines * share / agreement)
                    else:
                        self.parted.add(layer)
        if opposition:
            # A lie opposes the others in all layers, other data only in some.
            least = torch.stack(opposition).amin(0).clamp_max(MAX_OPPOSITION).tolist()
            for row in rows:
                total = self.evidence.get(clients[row], 0.0) + least[row] - TOLERATED
                # Who is refused needs honest rounds to come back, not one that happens to agree.
                self.evidence[clients[row]] = 2 * MAX_EVIDENCE if total > MAX_EVIDENCE else total
        for row in rows:
            if self.evidence.get(clients[row], 0.0) > MAX_EVIDENCE:
                refused[row] = OPPOSED

    def dump(self) -> str:
        """Return the state as JSON, for a checkpoint."""
        return json.dumps(
            [
                self.usual,
                sorted(self.suspects),
                self.evidence,
                sorted(self.parted),
                self.answered,
                sorted(self.bounded),
                self.labels.evidence if self.labels else {},
                sorted(self.separated),
            ]
        )

    def load(self, text: str | None) -> None:
        """Take over the state of a checkpoint; checkpoints of older versions have none."""
        if text is not None:
            usual, suspects, evidence, parted, answered, bounded, *more = json.loads(text)
            self.usual, self.parted, self.bounded = usual, set(parted), set(bounded)
            self.suspects = set(suspects)
            self.evidence = {int(client): value for client, value in evidence.items()}
            self.answered = {int(client): round_ for client, round_ in answered.items()}
            if self.labels and more:
                self.labels.evidence = {int(client): value for client, value in more[0].items()}
                self.separated = set(more[1])

    def collect_facts(self, faults: Iterable[tuple[int, int, str]]) -> dict[str, Any]:
        """Return what was refused, who was set apart, and whose sample counts were bounded, by name.

        Args:
            faults: round, client and reason of each fault of the run.

        """
        names = self._context.federation.names
        refused: dict[str, Counter[str]] = {}
        for _, client, reason in faults:
            if reason.startswith(UPLOADED):
                refused.setdefault(names[client], Counter())[reason] += 1
        facts: dict[str, Any] = (
            {"refused": {name: dict(counts) for name, counts in refused.items()}} if refused else {}
        )
        for name, clients in (("separated", self.separated), ("bounded_counts", self.bounded)):
            if clients:
                facts[name] = [names[i] for i in sorted(clients)]
        return facts


def describe_screening(facts: Mapping[str, Any]) -> list[str]:
    """Return sentences on refused uploads and bounded counts in the facts of a run."""
    sentences = []
    for name, reasons in facts.get("refused", {}).items():
        why = "; ".join(
            f"{reason.removeprefix(UPLOADED)} ({rounds} round{'s' * (rounds > 1)})"
            for reason, rounds in reasons.items()
        )
        sentences.append(f"the server refused uploads of {name}: {why}")
    if separated := facts.get("separated"):
        sentences.append(
            f"the server set {list_some(separated, MAX_LISTED)} apart, who share with nobody: their classes look like "
            "other classes of the others (screening=groups lets them share)"
        )
    if bounded := facts.get("bounded_counts"):
        sentences.append(
            f"the server cut the claimed sample counts of {list_some(bounded, MAX_LISTED)}; --max-weight sets the limit"
        )
    return sentences


def find_finite(reply: TrainReply, layers: Mapping[str, LayerMeasures]) -> Tensor:
    """Return which uploads are finite, with all that comes with them, (C,).

    Args:
        reply: the uploads.
        layers: their measures. If all are finite, so are the measured values.

    """
    is_finite = torch.ones(len(reply.ids), dtype=torch.bool, device=reply.ids.device)
    are_measured = bool(layers) and bool(
        torch.isfinite(torch.stack([one.squares for one in layers.values()])).all()
    )
    models = () if are_measured else (reply.upload.params,)
    for part in (*models, *reply.upload.extra.values(), reply.buffers):
        for value in part.values():
            if value.is_floating_point():
                is_finite &= torch.isfinite(flatten(value)).all(1)
    return is_finite


def check_parts(layers: Mapping[str, LayerMeasures], is_finite: Tensor, refused: dict[int, str]) -> None:
    """Refuse uploads with a layer that was reversed, erased or blown up, by the share that it keeps of what was sent.

    Args:
        layers: the measures.
        is_finite: (C,) the uploads to compare.
        refused: reason by row; new ones are added.

    """
    if int(is_finite.sum()) < MIN_CLIENTS:
        return
    for layer, one in layers.items():
        # A layer that is shorter than its update says nothing: no part of it need remain.
        if bool(one.squares[is_finite].median() <= one.sent_squares[is_finite].median()):
            known = one.shares[is_finite]
            median = known.median()
            gaps = (one.shares - median).abs()
            most = max(MIN_PART_GAP, MAX_DEVIATIONS * 1.4826 * float(gaps[is_finite].median()))
            for row in (gaps > most).nonzero().flatten().tolist():
                refused.setdefault(
                    row, f"{UPLOADED}a model whose part {layer} was reversed, erased or blown up"
                )


def drop_uploads(reply: TrainReply, n: Tensor, refused: Mapping[int, str]) -> tuple[TrainReply, Tensor]:
    """Return the reply and sample counts without the refused rows, whose reasons become faults of their clients."""
    if not refused:
        return reply, n
    ids = reply.ids.tolist()
    rows = torch.tensor([row for row in range(len(ids)) if row not in refused], dtype=torch.int64)
    rows = rows.to(reply.ids.device)
    faults = {**reply.faults, **{ids[row]: reason for row, reason in sorted(refused.items())}}
    return reply._replace(
        ids=reply.ids[rows],
        sent=reply.sent.rows(rows),
        upload=reply.upload.rows(rows),
        buffers=reply.buffers.rows(rows),
        faults=faults,
    ), n[rows]
