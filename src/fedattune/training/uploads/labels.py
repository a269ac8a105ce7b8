"""Find clients who label the same samples otherwise than the others, by the last layer of their updates.

A step on a sample with features f and label y changes row c of the last layer by lr (1[c = y] - p_c) f. So row c of a
client's update tells what the client calls c. With all rows of a round, and clients j that are not suspected:

    m          the direction that all features share: the first right singular vector of all rows
    a_ic       <row c of client i, m>, with the sign that makes a_ic > 0 for the classes that client i holds
    u_ic       the rest of the row: the prototype of class c of client i
    R_ic       sum over j != i of max(a_jc, 0) u_jc, each client scaled to norm one: what the others call c
    same_i     mean over classes c, with the weights max(a_ic, 0) ||u_ic||, of cos(u_ic, R_ic)
    other_i    the same mean of max_{d != c} cos(u_ic, R_id)

Without m, clients with different classes oppose each other, and an attacker is hard to tell from them. With it,
same_i is above other_i if client i means by its classes what the others mean. An attacker's classes look like other
classes of the others: other_i is nearly as large as same_j of honest clients j, and same_i is small. Inverted or
rotated images look like no class: other_i is not that large. Classes that the others hardly hold say nothing.

Prototypes are made without the clients with the lowest same_i - other_i, as attackers spoil the prototypes of honest
clients. The sum over rounds of (other_i - same_i) / median - TOLERATED decides, over rounds in which other_i is large.

A group of honest clients with permuted labels sends the very updates that attackers send. So by default the rule is for
labels that nobody here has seen, and for servers that make one model, which cannot serve both, or that can quarantine
clients. To look at rows of the last layer follows LFighter (Jebreel et al., Neural Networks 2024), which clusters them;
prototypes are our own way.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...core.params import Params
from ...core.selectors import Head
from ...core.task import Task
from ...server.class_groups import MAX_CLASSES, MAX_FEATURES, split_rows

MIN_CLIENTS = 8
"""Uploads of a round that the rule needs."""

MIN_AGREEMENT = 0.15
"""Minimum median of same_i - other_i for scores to count: below it, the clients' classes do not look alike."""

SUSPICIOUS = -0.5
"""Score, as a ratio to the median, below which a client is left out of the prototypes of its round."""

MIN_LIKENESS = 0.8
"""Minimum likeness to other classes that counts, as a ratio to the median likeness to the own ones."""

MAX_SUSPECTS, SUSPECTS_AT_ONCE = 0.4, 0.05
"""Share of the clients that prototypes leave out at most, and of those left out between two looks at the scores."""

MIN_HELD = 0.1
"""Minimum norm of the others' prototype of a class, as a ratio to the median over classes; smaller ones are noise."""

TOLERATED, MAX_EVIDENCE, LARGEST_CREDIT = 0.5, 2.0, 6.0
"""Contradiction of honest clients, as a ratio to the median; sum above which a client is rejected; maximum
credit of honest rounds."""

MOST_OF_A_ROUND = 1.0
"""Maximum that one round counts, for or against a client."""


class LabelCheck:
    """Find clients whose classes look like other classes of the others, round after round.

    `layers` names the weights that may be the last layer, with one row per class.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers

    def __call__(
        self, evidence: dict[int, float], ids: Tensor, sent: Params, uploaded: Params, excluded: Iterable[int]
    ) -> list[int]:
        """Return the rows of uploads (N, ...) of clients `ids` (N,) to reject.

        `evidence` has each client's sum of contradictions, which honest rounds make negative; this round is added.
        """
        clients, out = ids.tolist(), set(excluded)
        rows = [row for row in range(len(clients)) if row not in out]
        name = next((name for name in self._layers if name in uploaded and name in sent), None)
        if name is not None and len(rows) >= MIN_CLIENTS:
            step = -(-uploaded[name].shape[2] // MAX_FEATURES)
            updates = (uploaded[name][..., ::step] - sent[name][..., ::step])[rows]
            _add_round(evidence, [clients[row] for row in rows], updates)
        return [row for row in rows if _is_suspect(evidence, clients[row])]


def _add_round(evidence: dict[int, float], clients: Sequence[int], updates: Tensor) -> None:
    suspects = [row for row, client in enumerate(clients) if _is_suspect(evidence, client)]
    scores = score_labels(updates, suspects)
    if scores is None:
        return
    norms = updates.flatten(1).norm(dim=1)
    # A client that has learnt all that it can sends little but the samples that it cannot learn.
    shares = (norms / norms.median().clamp_min(1e-30)).clamp_max(1)
    found = ((-scores - TOLERATED).clamp(-MOST_OF_A_ROUND, MOST_OF_A_ROUND) * shares).tolist()
    for client, value in zip(clients, found, strict=True):
        total = evidence.get(client, 0.0) + value
        evidence[client] = max(-LARGEST_CREDIT, min(2 * MAX_EVIDENCE, total))


def _is_suspect(evidence: Mapping[int, float], client: int) -> bool:
    return evidence.get(client, 0.0) >= MAX_EVIDENCE


def find_last_layers(task: Task, n_classes: int) -> list[str]:
    """Return the names of weights (classes, features) that may be the last layer of a model: its heads, if any."""
    if not 2 <= n_classes <= MAX_CLASSES:
        return []
    heads = [name for name in task.params if name.endswith("head.weight")] or Head().names(task.model)[:1]
    return [name for name in heads if task.params[name].dim() == 2 and len(task.params[name]) == n_classes]


def score_labels(updates: Tensor, suspects: Iterable[int] = ()) -> Tensor | None:
    """Score how well each client's classes agree with those of the others, from the updates (N, C, F) of a round.

    Return scores (N,) same_i - other_i as ratios to the median of the clients that make prototypes, not below
    -TOLERATED where other_i is small; None if these clients do not agree.
    """
    n = len(updates)
    updates = updates / updates.flatten(1).norm(dim=1).amax().clamp_min(1e-30)  # products must not overflow
    held, rest = split_rows(updates)
    weights = held / held.norm(dim=1, keepdim=True).clamp_min(1e-30)
    parts = rest / rest.flatten(1).norm(dim=1).clamp_min(1e-30)[:, None, None] * weights[..., None]
    own = torch.einsum("icf,idf->icd", rest, parts)
    makes = torch.ones(n, dtype=torch.bool, device=updates.device)
    makes[list(suspects)] = False
    while True:
        same, other = _compare(held, rest, parts, own, makes)
        scores = same - other
        median = float(scores[makes].median()) if makes.any() else 0.0
        if not median >= MIN_AGREEMENT:  # also if it is no number
            return None
        scores = scores / median
        left = int(MAX_SUSPECTS * n) - int((~makes).sum())
        found = (makes & (scores < SUSPICIOUS)).nonzero().flatten()
        if not len(found) or left < 1:
            is_like = other >= MIN_LIKENESS * same[makes].median()
            return torch.where(is_like, scores, scores.clamp_min(-TOLERATED))
        lowest = found[scores[found].argsort()][: max(1, min(left, int(SUSPECTS_AT_ONCE * n)))]
        makes[lowest] = False


def _compare(held: Tensor, rest: Tensor, parts: Tensor, own: Tensor, makes: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much the clients' classes look like the same classes of the others (N,), and like others (N,).

    Args:
        held: (N, C) how much of each class a client holds.
        rest: (N, C, F) its prototypes.
        parts: (N, C, F) what it adds to the prototypes of others.
        own: (N, C, C) products of `rest` and `parts` of the same client.
        makes: (N,) the clients that make prototypes.
    """
    count = makes[:, None].to(rest.dtype)
    total = (parts * count[..., None]).sum(0)
    dots = rest @ total.T - own * count[..., None]
    shared = torch.einsum("cf,icf->ic", total, parts)
    squares = total.square().sum(1) - count * (2 * shared - parts.square().sum(2))
    mass, norms = squares.clamp_min(0).sqrt(), rest.norm(dim=2)
    cosines = dots / (norms[:, :, None] * mass[:, None, :]).clamp_min(1e-30)
    same = torch.diagonal(cosines, dim1=1, dim2=2)
    is_same = torch.eye(cosines.shape[1], dtype=torch.bool, device=cosines.device)
    other = cosines.masked_fill(is_same, -torch.inf).amax(2)
    weights = held * norms
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-30)
    weights = weights * (mass >= MIN_HELD * mass.median(1, keepdim=True).values)
    return (same * weights).sum(1), (other * weights).sum(1)
