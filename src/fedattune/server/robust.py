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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.errors import ConfigError, did_you_mean
from ..core.own_code import check_new_name, is_reference, load_registered
from ..core.params import Params
from ..core.payload import Payload
from .products import flatten

MAX_STEPS, SMOOTHING = 100, 1e-6
"""Steps of the geometric median, and its nu as a share of the median distance."""

Rule = TypeVar("Rule", bound=Callable[..., Any])


class RobustInputs(NamedTuple):
    """Facts for a rule beside the uploads: training samples (C,), assumed malicious share, rows of trusted clients."""

    n: Tensor
    share: float
    trusted: list[int]


@dataclass(frozen=True)
class RobustRule:
    """A rule of robust aggregation.

    Attributes:
        name: its name in `--robust`.
        kind: what the function computes: the aggregate of `values`, or `weights` of updates.
        apply: maps rows (C, ...) and `RobustInputs` to their aggregate; or the dot products (C, C) of the updates and
            `RobustInputs` to the weights (C,) of their sum.
        needs_trusted: whether trusted clients must be named.
    """

    name: str
    kind: Literal["values", "weights"]
    apply: Callable[[Any, RobustInputs], Any]
    needs_trusted: bool = False


ROBUST_RULES: dict[str, RobustRule] = {}


def register_robust_rule(kind: Literal["values", "weights"], *, needs_trusted: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the robust rule of its name; see `RobustRule`.

    A rule for `values` is applied to models, extras and statistics alike. Weights that a rule finds for the updates of
    the models serve for the rest too.

    Args:
        kind: what the function computes.
        needs_trusted: whether trusted clients must be named.

    Raises:
        ConfigError: the name is that of a rule of FedAttune.
    """

    def register(function: Rule) -> Rule:
        name = function.__name__
        check_new_name("robust rule", function, ROBUST_RULES[name].apply if name in ROBUST_RULES else None)
        ROBUST_RULES[name] = RobustRule(name, kind, function, needs_trusted)
        return function

    return register


def find_robust_rule(name: str) -> RobustRule:
    """Return the rule of this name, or the custom rule that file.py:name refers to."""
    known = load_registered(name, "robust rule", ROBUST_RULES) if is_reference(name) else ROBUST_RULES.get(name)
    if known is None:
        raise ConfigError(
            f"robust: got {name!r}; {did_you_mean(name, [*ROBUST_RULES, 'off', 'rows'])}, or a custom rule as "
            "file.py:rule"
        )
    return known


def aggregate_robustly(
    rule: RobustRule, sent: Params, uploads: Payload, buffers: Params, inputs: RobustInputs
) -> tuple[Payload, Params]:
    """Return the uploads and buffers of a round, each row replaced by their robust aggregate."""
    clients = len(inputs.n)
    if rule.kind == "values":
        whole = [rule.apply(part, inputs) for part in (uploads.params, *uploads.extra.values(), buffers)]
    else:
        updates = uploads.params - sent.only(uploads.params)
        weights = rule.apply(gram(updates), inputs)
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


@register_robust_rule("values")
def median(rows: Params, inputs: RobustInputs) -> Params:
    """Return the median of every value (Yin et al.)."""
    return trim(rows, (len(inputs.n) - 1) // 2)


@register_robust_rule("values")
def trimmed_mean(rows: Params, inputs: RobustInputs) -> Params:
    """Return the mean of every value without its f largest and f smallest (Yin et al.)."""
    clients = len(inputs.n)
    return trim(rows, min(int(inputs.share * clients), (clients - 1) // 2))


@register_robust_rule("weights")
def geometric_median(products: Tensor, inputs: RobustInputs) -> Tensor:
    """Return the weights of the geometric median, by Weiszfeld's steps (Pillutla et al., algorithm 2).

    The paper starts at the mean. From there a few huge uploads would need more steps than there are.
    """
    p, squares = inputs.n.to(products) / inputs.n.sum(), products.diagonal()
    pairs = (squares[:, None] + squares - 2 * products).clamp_min(0).sqrt()
    weights = p / pairs.median(1).values.clamp_min(1e-30)
    weights = weights / weights.sum()
    for _ in range(MAX_STEPS):
        to_sum = products @ weights
        distances = (squares - 2 * to_sum + weights @ to_sum).clamp_min(0).sqrt()
        scaled = p / distances.clamp_min(SMOOTHING * float(distances.median()) + 1e-30)
        new = scaled / scaled.sum()
        if float((new - weights).abs().max()) < 1e-9:
            return new
        weights = new
    return weights


@register_robust_rule("weights")
def multi_krum(products: Tensor, inputs: RobustInputs) -> Tensor:
    """Return equal weights of the updates that are nearest to their neighbours (Blanchard et al.)."""
    squares, clients = products.diagonal(), len(products)
    distances = (squares[:, None] + squares - 2 * products).clamp_min(0)
    n_malicious = int(inputs.share * clients)
    nearest = distances.sort(1).values[:, 1 : max(2, clients - n_malicious - 1)]  # the first is the update itself
    chosen = nearest.sum(1).sort(stable=True).indices[: clients - n_malicious]
    return torch.zeros_like(squares).index_fill_(0, chosen, 1 / len(chosen))


@register_robust_rule("weights", needs_trusted=True)
def trust(products: Tensor, inputs: RobustInputs) -> Tensor:
    """Return weights by the cosine with the mean trusted update, of its norm (Cao et al.); they need not sum to 1.

    Without a trusted client in the round, all are 0.
    """
    squares, trusted = products.diagonal(), inputs.trusted
    if not trusted:
        return torch.zeros_like(squares)
    to_reference = products[:, trusted].mean(1)
    reference = to_reference[trusted].mean().clamp_min(0).sqrt()
    norms = squares.clamp_min(1e-30).sqrt()
    weights = (to_reference / (norms * reference).clamp_min(1e-30)).clamp(0, 1)
    return weights * reference / norms / weights.sum().clamp_min(1e-30)


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
