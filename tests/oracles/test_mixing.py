"""Closed forms of the mixing matrices (specification 10 A), worked out in each test."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedattune import Params, Payload
from fedattune.algorithms.fedamp import AttentiveMixing, CosineMixing, ProximalStep
from fedattune.algorithms.fedmcsa import Attention
from fedattune.client import SGD
from fedattune.core.payload import RoundContext
from fedattune.server import Average, Mixing
from oracles.quadratic import FRESH, W0, A, M, gradient, run

N = 5


@pytest.fixture
def theta() -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4)}
    return Params({k: torch.randn(N, *s, generator=generator, dtype=torch.float64) for k, s in shapes.items()})


def mix(rule: Mixing, theta: Params, n: Tensor | None = None) -> tuple[Params, dict[str, Tensor]]:
    """What everybody is sent, and the matrices, after everybody uploaded theta."""
    clients = len(next(iter(theta.values())))
    ids = torch.arange(clients)
    state = rule.init(theta.rows(0), clients)
    counts = torch.ones(clients, dtype=torch.int64) if n is None else n
    state = rule.aggregate(state, ids, Payload(theta), Payload(theta), counts)
    return rule.broadcast(state, ids).payload.params, rule.broadcast(state, ids).mixing.weights


def near(a: Params, b: Params, tolerance: float = 1e-12) -> bool:
    return all(torch.allclose(a[k], b[k], rtol=0, atol=tolerance) for k in a)


RULES = [
    Attention("tensor", sigma=5.0),
    Attention("layer", sigma=5.0, size_weighted=True),
    AttentiveMixing(alpha=0.075, sigma=4.0, distance="absolute"),
    AttentiveMixing(alpha=25.0, sigma=4.0, distance="absolute"),
    AttentiveMixing(),
    CosineMixing(sigma=3.0, self_weight=0.25),
    CosineMixing(sigma=3.0, self_weight=None),
]
rules = pytest.mark.parametrize("rule", RULES, ids=str)


@rules
def test_a1_rows_sum_to_one_and_are_not_negative(rule: Mixing, theta: Params) -> None:
    for weights in mix(rule, theta)[1].values():
        assert weights.shape == (N, N)
        assert torch.allclose(weights.sum(1), torch.ones(N, dtype=weights.dtype), atol=1e-12)
        assert (weights >= -1e-15).all()
        if isinstance(rule, Attention):
            assert (weights > 0).all()


@rules
def test_a2_permuting_clients_permutes_what_they_get(rule: Mixing, theta: Params) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    n = torch.tensor([10, 20, 30, 40, 50])
    sent, matrices = mix(rule, theta, n)
    sent_p, matrices_p = mix(rule, theta.rows(order), n[order])
    assert near(sent.rows(order), sent_p)
    for k, weights in matrices.items():
        assert torch.allclose(weights[order][:, order], matrices_p[k], atol=1e-12)


def test_a3_sigma_zero_is_the_mean(theta: Params) -> None:
    mean = theta.map(lambda a: a.mean(0, keepdim=True).expand_as(a))
    assert near(mix(Attention("layer", sigma=0.0), theta)[0], mean)
    n = torch.tensor([1, 2, 3, 4, 10])
    weighted = theta.map(lambda a: torch.tensordot(n / 20.0, a.float(), 1).double().expand_as(a))
    assert near(mix(Attention("layer", sigma=0.0, size_weighted=True), theta, n)[0], weighted, 1e-6)


def test_a5_the_printed_equation_is_the_transpose(theta: Params) -> None:
    """With the denominator summed over column k as printed, cos being symmetric, columns sum to one instead."""
    weights = mix(Attention("model", sigma=5.0), theta)[1]["model"]
    flat = torch.cat([v.flatten(1) for v in theta.values()], 1)
    cosine = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=2)
    e = torch.exp(5.0 * cosine)
    printed = e / e.sum(1)[None, :]  # M[i, k] = e_ik / sum_h e_kh
    assert torch.allclose(printed, weights.T, atol=1e-12)
    assert torch.allclose(printed.sum(0), torch.ones(N, dtype=torch.float64))
    assert torch.allclose((printed @ flat).sum(0), flat.sum(0))


def test_a10_units_agree_where_they_must(theta: Params) -> None:
    one_each = Params({"a.weight": theta["body.weight"], "b.weight": theta["head.weight"]})
    assert near(mix(Attention("layer"), one_each)[0], mix(Attention("tensor"), one_each)[0])
    one_layer = Params({"a.weight": theta["body.weight"], "a.bias": theta["body.bias"]})
    assert near(mix(Attention("layer"), one_layer)[0], mix(Attention("model"), one_layer)[0])


def test_a12_orthonormal_layers() -> None:
    """M = (e^sigma - 1) / (e^sigma + n - 1) I + 1 / (e^sigma + n - 1) 11^T."""
    sigma, n = 1.7, 4
    weights = mix(Attention("tensor", sigma=sigma), Params({"w": torch.eye(n, dtype=torch.float64)}))[1]["w"]
    total = math.exp(sigma) + n - 1
    expected = (math.exp(sigma) - 1) / total * torch.eye(n) + 1 / total
    assert torch.allclose(weights, expected.double(), atol=1e-7)


def test_a13_heuristic_message_passing(theta: Params) -> None:
    weights = mix(CosineMixing(sigma=3.0, self_weight=0.25), theta)[1]["model"]
    assert torch.allclose(weights.diagonal(), torch.full((N,), 0.25, dtype=torch.float64))
    assert torch.allclose(weights.sum(1) - weights.diagonal(), torch.full((N,), 0.75, dtype=torch.float64))
    flat = mix(CosineMixing(sigma=0.0, self_weight=0.2), theta)[1]["model"]
    assert torch.allclose(flat, torch.full((N, N), 0.2, dtype=torch.float64))  # (1 - 0.2) / (5 - 1) = 0.2
    identity = mix(CosineMixing(self_weight=1.0), theta)[1]["model"]
    assert torch.equal(identity, torch.eye(N, dtype=torch.float64))
    same = theta.rows(0).copies(N)
    uniform = mix(CosineMixing(sigma=9.0, self_weight=1 / N), same)[1]["model"]
    assert torch.allclose(uniform, torch.full((N, N), 1 / N, dtype=torch.float64))


def test_a14_attentive_message_passing(theta: Params) -> None:
    """The paper's alpha is alpha sigma: xi = (alpha sigma) exp(-d^2 / sigma) / sigma."""
    alpha, sigma = 0.075, 4.0
    rule = AttentiveMixing(alpha=alpha, sigma=sigma, distance="absolute")
    sent, matrices = mix(rule, theta)
    weights = matrices["model"]
    off = weights - torch.diag(weights.diagonal())
    assert torch.allclose(off, off.T, atol=1e-12)
    for k, v in theta.items():
        assert torch.allclose(sent[k].sum(0), v.sum(0), atol=1e-10)  # a symmetric matrix keeps the sum
    flat = torch.cat([v.flatten(1) for v in theta.values()], 1)
    distance = ((flat[0] - flat[1]) ** 2).sum()
    paper = 0.3 * math.exp(-distance / sigma) / sigma
    assert weights[0, 1].item() == pytest.approx(paper, rel=1e-9)
    same = mix(rule, theta.rows(0).copies(N))[1]["model"]
    assert same[0, 1].item() == pytest.approx(alpha)


def test_a14_relative_distances(theta: Params) -> None:
    """The size of models does not matter; on a triangle of sides 1, 1 and sqrt 2, d^2 / mean is 3/4, 3/4 and 3/2."""
    rule = AttentiveMixing(alpha=0.1, sigma=0.5)
    weights = mix(rule, theta)[1]["model"]
    for scale in (1e-4, 1e4):
        assert torch.allclose(mix(rule, scale * theta)[1]["model"], weights, atol=1e-9)
    corners = Params(w=7 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    weights = mix(rule, corners)[1]["model"]
    near_by, far = 0.1 * math.exp(-1.5), 0.1 * math.exp(-3)
    expected = [
        [1 - 2 * near_by, near_by, near_by],
        [near_by, 1 - near_by - far, far],
        [near_by, far, 1 - near_by - far],
    ]
    assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("distance", ["relative", "absolute"])
def test_a14_alpha_is_lowered_for_server_and_clients(distance: Any, theta: Params) -> None:
    """N equal models with alpha=100 would weigh 100 each: with alpha_k = 1/N all weigh 1/N, and clients are told so."""
    identical, ids = theta.rows(0).copies(N), torch.arange(N)
    for alpha, used in ((100.0, 1 / N), (0.01, 0.01)):
        rule = AttentiveMixing(alpha=alpha, sigma=4.0, distance=distance)
        state = rule.init(theta.rows(0), N)
        state = rule.aggregate(state, ids, Payload(identical), Payload(identical), torch.ones(N, dtype=torch.int64))
        payload, mixing = rule.broadcast(state, ids)
        assert mixing
        weights = torch.full((N, N), used, dtype=torch.float64).fill_diagonal_(1 - (N - 1) * used)
        assert torch.allclose(mixing.weights["model"], weights, atol=1e-12)
        assert torch.allclose(payload.extra["alpha"]["model"], torch.full((N,), used, dtype=torch.float64))
        said = rule.warnings(state, ids)
        assert len(said) == (alpha > used and distance == "absolute")
        assert all("the last round used 0.2 instead" in one for one in said)


def test_a14_components_have_their_own_step(theta: Params) -> None:
    """Bodies are equal, heads are not: alpha_k of the body is 1/N, of the head more; one number per layer travels."""
    mixed = Params({k: v if k == "head.weight" else v[:1].expand_as(v).clone() for k, v in theta.items()})
    ids, rule = torch.arange(N), AttentiveMixing("layer", alpha=0.7, sigma=0.1)
    state = rule.init(theta.rows(0), N)
    empty = rule.broadcast(state, ids[:2]).payload.extra["alpha"]  # before any upload, nothing lowers it
    assert {k: v.tolist() for k, v in empty.items()} == {"body": [0.7, 0.7], "head": [0.7, 0.7]}
    state = rule.aggregate(state, ids, Payload(mixed), Payload(mixed), torch.ones(N, dtype=torch.int64))
    steps = rule.broadcast(state, ids[:2]).payload.extra["alpha"]
    assert torch.allclose(steps["body"], torch.full((2,), 1 / N, dtype=torch.float64))
    assert steps["head"][0] > 2 / N


def test_a14_clients_take_proximal_steps() -> None:
    """On f = 1/2 ||w - m||^2 the error to w* = (m + c u) / (1 + c), c = lam / alpha_k, shrinks however large c is.

    w' = (w - eta (w - m) + eta c u) / (1 + eta c), so w' - w* = (1 - eta) / (1 + eta c) (w - w*).
    """
    eta, lam = 0.1, 2.0
    for alpha in (0.5, 1e-6):
        c = lam / alpha
        best = (M + c * A) / (1 + c)
        step = {"alpha": Params(model=torch.tensor(alpha, dtype=torch.float64))}
        upload, _ = run(SGD((ProximalStep(lam),)), gradient, 3, eta, sent=A, extra=step)
        expected = best + ((1 - eta) / (1 + eta * c)) ** 3 * (A - best)
        assert torch.allclose(upload.params["w"], expected, rtol=0, atol=1e-12)


def test_a14_personal_tensors_take_plain_steps() -> None:
    step = {"alpha": Params(body=torch.tensor(0.5, dtype=torch.float64))}
    sent = Payload(Params({"body.w": A, "head.w": A}), step)
    rule = SGD((ProximalStep(1.0, "layer"),))
    job = RoundContext(0.1, torch.tensor(1.0), torch.tensor(1.0), 1, ("head.w",))
    carry = rule.begin(sent, {}, FRESH, job)._replace(w=Params({"body.w": W0, "head.w": W0}))
    ones = Params({"body.w": torch.ones_like(A), "head.w": torch.ones_like(A)})
    moved = rule.step(carry, (), lambda w, batch: ones, job).w
    assert torch.allclose(moved["head.w"], W0 - 0.1)
    assert torch.allclose(moved["body.w"], (W0 - 0.1 + 0.2 * A) / 1.2)


def test_a14_small_distances_between_many_large_models() -> None:
    """More than 25 models of large norm: distances must not be lost to cancellation."""
    generator = torch.Generator().manual_seed(0)
    w = 3 * torch.ones(40, 8000) + 0.001 * torch.randn(40, 8000, generator=generator)
    exact = torch.pdist(w.double()).square()
    for rule, unit in (
        (AttentiveMixing(alpha=0.02, sigma=0.01, distance="absolute"), 1.0),
        (AttentiveMixing(alpha=0.02, sigma=1.0), exact.mean().item()),
    ):
        weights = mix(rule, Params({"w": w}))[1]["model"]
        assert torch.equal(weights, weights.T) or torch.allclose(weights, weights.T, rtol=1e-4)
        expected = 0.02 * math.exp(-exact[0].item() / (rule.sigma * unit))
        assert weights[0, 1].item() == pytest.approx(expected, rel=1e-6)


def test_a14_a_receiver_outside_the_cohort_has_no_negative_weight() -> None:
    """Eight orthogonal models of squared norm 1 are 2 apart. The zero model, which is older, is 1 from each.

    So its kernel is exp(-1 / 0.5) where theirs is exp(-1 / 0.25): its weights sum to 8 exp(-2) > 1. They become 1/9
    each, as many as its own. The rows of the eight stay.
    """
    rule = AttentiveMixing()
    models = Params(w=torch.cat([torch.eye(8), torch.zeros(1, 8)]).double())
    state = rule.init(models.rows(8), 9)
    for ids in (torch.tensor([8]), torch.arange(8)):
        uploads = Payload(models.rows(ids))
        state = rule.aggregate(state, ids, uploads, uploads, torch.ones_like(ids))
    mixing = rule.broadcast(state, torch.arange(9)).mixing
    assert mixing
    expected = torch.full((9, 9), math.exp(-4), dtype=torch.float64)
    expected[:, 8], expected[8] = 0, 1 / 9
    expected[:8, :8].fill_diagonal_(1 - 7 * math.exp(-4))
    assert torch.allclose(mixing.weights["model"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["cohort", "all"])
def test_a15_clients_that_were_not_asked_keep_what_they_had(pool: str, theta: Params) -> None:
    """Rows of others are bit-identical, and one that never uploaded is sent the initial model."""
    rule = Attention("layer", pool=pool, sigma=3.0)  # type: ignore[arg-type]
    start = theta.rows(0)
    state = rule.init(start, N)
    counts = torch.ones(2, dtype=torch.int64)
    state = rule.aggregate(
        state, torch.tensor([1, 3]), Payload(theta), Payload(theta.rows(torch.tensor([1, 3]))), counts
    )
    kept = state["theta"]
    assert isinstance(kept, Params)
    for client in (0, 2, 4):
        assert all(torch.equal(kept[k][client], start[k]) for k in start)
    sent = rule.broadcast(state, torch.tensor([0, 1, 3])).payload.params
    assert near(sent.rows(0), start)
    two = theta.rows(torch.tensor([1, 3]))
    assert near(sent.rows(slice(1, 3)), mix(Attention("layer", sigma=3.0), two)[0])
    state = rule.aggregate(state, torch.tensor([0]), Payload(theta), Payload(theta.rows(torch.tensor([4]))), counts[:1])
    columns = rule.broadcast(state, torch.tensor([1])).mixing.columns.tolist()
    assert columns == {"cohort": [0, 1], "all": [0, 1, 3]}[pool]


def test_average_weighs_by_samples_and_reports_its_weights(theta: Params) -> None:
    rule = Average()
    state = rule.init(theta.rows(0), 8)
    ids = torch.tensor([0, 2, 3, 5, 7])
    assert rule.broadcast(state, ids).mixing is None
    state = rule.aggregate(state, ids, Payload(theta), Payload(theta), torch.tensor([1, 1, 2, 4, 2]))
    p = torch.tensor([0.1, 0.1, 0.2, 0.4, 0.2], dtype=torch.float64)
    mixing = rule.broadcast(state, ids).mixing
    assert mixing is not None
    assert torch.allclose(mixing.weights["model"], p.repeat(5, 1))
    assert mixing.columns.tolist() == ids.tolist()
    sent = rule.broadcast(state, torch.tensor([6])).payload.params
    assert torch.allclose(sent["body.bias"][0], p @ theta["body.bias"])
    half = Average(beta=0.5).aggregate(
        rule.init(theta.rows(0), 8), ids, Payload(theta), Payload(theta), torch.tensor([1, 1, 2, 4, 2])
    )["w"]
    assert isinstance(half, Params)
    assert torch.allclose(half["body.bias"], 0.5 * theta["body.bias"][0] + 0.5 * p @ theta["body.bias"])
