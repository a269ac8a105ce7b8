"""Find clients who label the same samples otherwise than the others, by the last layer of their updates.

A step on a sample with features f and label y changes row c of the last layer by lr (1[c = y] - p_c) f. So row c of a
client's update tells what the client calls c. With all rows of a round, and clients j that are not suspected:

    m          the direction that all features share: the first right singular vector of all rows
    a_ic       <row c of client i, m>, with the sign that makes a_ic > 0 for the classes that client i holds
    u_ic       the rest of the row: the prototype of class c of client i
    R_ic       sum over j != i of max(a_jc, 0) u_jc, each client scaled to length one: what the others call c
    s_i        mean over the classes c that client i holds of cos(u_ic, R_ic) - max_{d != c} cos(u_ic, R_id)

Without m, clients with different classes oppose each other, and a liar is hard to tell from them. With it, s_i is
positive if client i means by its classes what the others mean, and negative if it means other classes. Prototypes are
made without the clients whose score is far below zero, the lowest first, as liars spoil the prototypes of honest
clients. The sum of -s_i / median - TOLERATED over rounds decides.

A group of honest clients with permuted labels sends the very updates that liars send. So by default the rule is for
servers that make one model, which cannot serve both, and for labels that nobody here has seen. To look at rows of the
last layer follows LFighter (Jebreel et al., Neural Networks 2024), which clusters them; prototypes are our own way.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..core.params import Params

MIN_CLIENTS = 8
"""Uploads of a round that the rule needs."""

MAX_CLASSES, MAX_FEATURES = 100, 512
"""Classes with which the rule works, and features that it looks at."""

MIN_AGREEMENT = 0.15
"""Median score from which on scores count: below it, the clients' classes do not look alike."""

SUSPICIOUS = -0.5
"""Score, as a ratio to the median, below which a client is left out of the prototypes of its round."""

MAX_SUSPECTS = 0.4
"""Share of the clients that prototypes leave out at most."""

TOLERATED, MAX_EVIDENCE, LARGEST_CREDIT = 0.5, 2.0, 6.0
"""Contradiction of honest clients, as a ratio to the median; sum that is refused; most that honest rounds count."""

POWER_STEPS = 10
"""Steps of the power iteration for the shared direction."""


class LabelCheck:
    """Refuse clients whose classes look like other classes of the others, round after round.

    Args:
        n_classes: number of classes.

    Attributes:
        evidence: client -> sum of its contradictions; honest rounds make it negative.

    """

    def __init__(self, n_classes: int) -> None:
        self._n_classes = n_classes
        self.evidence: dict[int, float] = {}

    def __call__(self, ids: Tensor, sent: Params, uploaded: Params, excluded: Iterable[int]) -> list[int]:
        """Return the rows of uploads to refuse.

        Args:
            ids: (N,) numbers of the clients.
            sent: what they were sent (N, ...).
            uploaded: what they uploaded (N, ...).
            excluded: rows that are refused for another reason.

        """
        name = find_last_layer(sent, uploaded, self._n_classes)
        clients, out = ids.tolist(), set(excluded)
        rows = [row for row in range(len(clients)) if row not in out]
        if name is None or len(rows) < MIN_CLIENTS:
            return []
        step = -(-uploaded[name].shape[2] // MAX_FEATURES)
        updates = (uploaded[name][..., ::step] - sent[name][..., ::step])[rows]
        known = [i for i, row in enumerate(rows) if self._is_liar(clients[row])]
        scores = score_labels(updates, known)
        if scores is not None:
            lengths = updates.flatten(1).norm(dim=1)
            # A client that has learnt all that it can sends little but the samples that it cannot learn.
            shares = (lengths / lengths.median().clamp_min(1e-30)).clamp_max(1)
            found = ((-scores - TOLERATED).clamp(-1, 1) * shares).tolist()
            for row, value in zip(rows, found, strict=True):
                total = self.evidence.get(clients[row], 0.0) + value
                self.evidence[clients[row]] = max(-LARGEST_CREDIT, min(2 * MAX_EVIDENCE, total))
        return [row for row in rows if self._is_liar(clients[row])]

    def _is_liar(self, client: int) -> bool:
        return self.evidence.get(client, 0.0) >= MAX_EVIDENCE


def find_last_layer(sent: Params, uploaded: Params, n_classes: int) -> str | None:
    """Return the name of the last weight (N, classes, features) that was sent and uploaded; None if there is none."""
    if not 2 <= n_classes <= MAX_CLASSES:
        return None
    shaped = (name for name, value in uploaded.items() if value.dim() == 3 and value.shape[1] == n_classes)
    return next((name for name in reversed(list(shaped)) if name in sent), None)


def score_labels(updates: Tensor, suspects: Iterable[int] = ()) -> Tensor | None:
    """Score how well each client's classes agree with those of the others.

    Args:
        updates: (N, C, F) updates of the last layer.
        suspects: rows that make no prototypes from the start.

    Returns:
        (N,) scores s_i as ratios to the median of the clients that make prototypes; None if these do not agree.

    """
    n = len(updates)
    held, rest = split_rows(updates)
    weights = held / held.norm(dim=1, keepdim=True).clamp_min(1e-30)
    parts = rest / rest.flatten(1).norm(dim=1).clamp_min(1e-30)[:, None, None] * weights[..., None]
    makes = torch.ones(n, dtype=torch.bool, device=updates.device)
    makes[list(suspects)] = False
    while True:
        scores = _compare(held, rest, parts * makes[:, None, None])
        median = float(scores[makes].median()) if makes.any() else 0.0
        if median < MIN_AGREEMENT:
            return None
        scores = scores / median
        lowest = int(torch.where(makes, scores, torch.inf).argmin())
        if scores[lowest] >= SUSPICIOUS or int((~makes).sum()) >= MAX_SUSPECTS * n:
            return scores
        makes[lowest] = False


def split_rows(updates: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into their parts along the direction that all features share, and the rest.

    Args:
        updates: (N, C, F) updates of the last layer.

    Returns:
        How much of each class a client holds, max(a, 0) (N, C), and prototypes u (N, C, F).

    """
    rows = updates.flatten(0, 1)
    direction = rows[int(rows.norm(dim=1).argmax())]
    for _ in range(POWER_STEPS):
        direction = torch.mv(rows.T, torch.mv(rows, direction))
        direction = direction / direction.norm().clamp_min(1e-30)
    along = updates @ direction
    # A client holds few classes, whose rows grow much; all other rows shrink a little.
    if along.clamp_min(0).square().sum() < along.clamp_max(0).square().sum():
        along, direction = -along, -direction
    return along.clamp_min(0), updates - along[..., None] * direction


def _compare(held: Tensor, rest: Tensor, parts: Tensor) -> Tensor:
    """Return the scores s (N,) for prototypes `rest` and what each client adds to the others' prototypes, `parts`."""
    others = parts.sum(0) - parts
    dots = torch.einsum("icf,idf->icd", rest, others)
    lengths = rest.norm(dim=2)
    cosines = dots / (lengths[:, :, None] * others.norm(dim=2)[:, None, :]).clamp_min(1e-30)
    same = torch.diagonal(cosines, dim1=1, dim2=2)
    is_same = torch.eye(cosines.shape[1], dtype=torch.bool, device=cosines.device)
    other = cosines.masked_fill(is_same, -torch.inf).amax(2)
    weights = held * lengths
    scores: Tensor = ((same - other) * weights).sum(1) / weights.sum(1).clamp_min(1e-30)
    return scores
