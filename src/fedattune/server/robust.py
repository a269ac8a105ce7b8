"""Robust aggregation of the uploads of a round, for every server rule that needs only sums of uploads.

Sources:

    Yin et al., Byzantine-robust distributed learning, ICML 2018, arXiv:1803.01498
    Blanchard et al., Machine learning with adversaries, NeurIPS 2017, arXiv:1703.02757
    Pillutla et al., Robust aggregation for federated learning, IEEE TSP 2022, arXiv:1912.13445
    Cao et al., FLTrust, NDSS 2021, arXiv:2012.13995

With u_k = theta_k - sent_k over C uploads, of which f = floor(share C) may be malicious:

    median            the median of every value                                                (Yin)
    trimmed_mean      the mean of every value without its f largest and f smallest             (Yin)
    geometric_median  sum_k w_k u_k,  w_k ~ n_k / max(nu, ||u_k - z||), z the sum before       (Pillutla, algorithm 2)
    multi_krum        the mean of the C - f uploads with the smallest sum of squared distances
                      to their C - f - 2 nearest                                               (Blanchard)
    trust             sum_k t_k (||u_0|| / ||u_k||) u_k / sum_k t_k,  t_k = max(0, cos(u_k, u_0))   (Cao)

FLTrust's u_0 comes from a root data set at the server. Here it is the mean update of trusted clients, such as the
operator's own, who take part like any other. The result takes the place of every upload, so the rule's own average,
with any weights, returns it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..core.params import Params
from ..core.payload import Payload
from .products import flatten

RobustRule = Literal["median", "trimmed_mean", "geometric_median", "multi_krum", "trust"]

MAX_STEPS, SMOOTHING = 100, 1e-6
"""Steps of the geometric median, and its nu as a share of the mean distance."""


def aggregate_robustly(
    rule: RobustRule,
    sent: Params,
    uploads: Payload,
    buffers: Params,
    n: Tensor,
    *,
    share: float,
    trusted: Sequence[int] = (),
) -> tuple[Payload, Params]:
    """Return the uploads and buffers of a round, each row replaced by their robust aggregate.

    Args:
        rule: the rule.
        sent: what the clients were sent, one row each.
        uploads: the uploads of C clients; weights that a rule finds for the models serve for the extras too.
        buffers: the BatchNorm statistics that come with them.
        n: (C,) training samples, which only the geometric median looks at.
        share: share of the uploads that may be malicious.
        trusted: rows of the trusted clients. Without any, `trust` changes nothing in this round.

    """
    clients = len(n)
    if rule in ("median", "trimmed_mean"):
        cut = (clients - 1) // 2 if rule == "median" else min(int(share * clients), (clients - 1) // 2)
        whole = [trim(part, cut) for part in (uploads.params, *uploads.extra.values(), buffers)]
    else:
        updates = uploads.params - sent.only(uploads.params)
        weights = find_weights(rule, gram(updates), n, share=share, trusted=trusted)
        start = sent.only(uploads.params).map(lambda a: a.mean(0))
        model = start + _weigh(weights, updates)
        rest = weights / weights.sum().clamp_min(1e-30)  # statistics are no updates: their weights sum to 1
        whole = [
            model,
            *(_weigh(weights, extra) for extra in uploads.extra.values()),
            _weigh(rest if weights.any() else torch.full_like(rest, 1 / clients), buffers),
        ]
    params, *extras, statistics = (one.repeat(clients) for one in whole)
    return Payload(params, dict(zip(uploads.extra, extras, strict=True))), statistics


def trim(rows: Params, cut: int) -> Params:
    """Return the mean of every value over the rows, without its `cut` largest and `cut` smallest.

    Examples:
        >>> trim(Params(a=torch.tensor([[1.0], [9.0], [2.0], [-5.0]])), 1)["a"]
        tensor([1.5000])

    """
    return rows.map(lambda a: a.sort(0).values[cut : len(a) - cut].mean(0) if a.is_floating_point() else a[0])


def find_weights(
    rule: RobustRule, products: Tensor, n: Tensor, *, share: float, trusted: Sequence[int] = ()
) -> Tensor:
    """Return the weights (C,) of the updates in their robust sum; for `trust` they need not sum to 1.

    Args:
        rule: `geometric_median`, `multi_krum` or `trust`.
        products: (C, C) dot products of the updates.
        n: (C,) training samples.
        share: share of the updates that may be malicious.
        trusted: rows of the trusted clients.

    """
    if rule == "geometric_median":
        return _weigh_by_distance(products, n)
    squares = products.diagonal()
    if rule == "multi_krum":
        distances = (squares[:, None] + squares - 2 * products).clamp_min(0)
        n_bad = int(share * len(n))
        nearest = distances.sort(1).values[
            :, 1 : max(2, len(n) - n_bad - 1)
        ]  # the first is the update itself
        chosen = nearest.sum(1).sort(stable=True).indices[: len(n) - n_bad]
        return torch.zeros_like(squares).index_fill_(0, chosen, 1 / len(chosen))
    if not len(trusted):
        return torch.zeros_like(squares)
    to_reference = products[:, list(trusted)].mean(1)
    reference = to_reference[list(trusted)].mean().clamp_min(0).sqrt()
    norms = squares.clamp_min(1e-30).sqrt()
    trust = (to_reference / (norms * reference).clamp_min(1e-30)).clamp(0, 1)
    return trust * reference / norms / trust.sum().clamp_min(1e-30)


def _weigh_by_distance(products: Tensor, n: Tensor) -> Tensor:
    """Return the weights of the geometric median, by Weiszfeld's steps."""
    p = n.to(products) / n.sum()
    weights, squares = p, products.diagonal()
    for _ in range(MAX_STEPS):
        to_sum = products @ weights
        distances = (squares - 2 * to_sum + weights @ to_sum).clamp_min(0).sqrt()
        scaled = p / distances.clamp_min(SMOOTHING * float(distances.mean()) + 1e-30)
        new = scaled / scaled.sum()
        if float((new - weights).abs().max()) < 1e-9:
            return new
        weights = new
    return weights


def gram(updates: Params) -> Tensor:
    """Return the dot products (C, C) of updates, in float64."""
    out: Tensor | None = None
    for value in updates.values():
        rows = flatten(value).double()
        out = rows @ rows.T if out is None else out.addmm_(rows, rows.T)
    if out is None:
        raise ValueError("gram: got updates without tensors, expected one at least")
    return out


def _weigh(weights: Tensor, rows: Params) -> Params:
    return rows.map(lambda a: torch.tensordot(weights.to(a.dtype), a, 1) if a.is_floating_point() else a[0])
