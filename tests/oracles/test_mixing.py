"""Closed forms of the mixing matrices (specification 10 A), worked out in each test."""

import math

import pytest
import torch
from torch import Tensor

from fedattune import Params, Payload
from fedattune.algorithms.fedamp import AttentiveMixing, CosineMixing
from fedattune.algorithms.fedmcsa import Attention
from fedattune.server import Average, Mixing

N = 5


@pytest.fixture
def theta() -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4)}
    return Params(
        {k: torch.randn(N, *s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
    )


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
    AttentiveMixing(alpha=0.3, sigma=4.0),
    AttentiveMixing(alpha=100.0, sigma=4.0),
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


def test_a4_large_sigma_is_identity_and_equal_directions_share(theta: Params) -> None:
    weights = mix(Attention("model", sigma=1e6), theta)[1]["model"]
    assert torch.equal(weights, torch.eye(N, dtype=torch.float64))
    twins = theta.map(lambda a: a[torch.tensor([0, 1, 1, 1, 2])])
    weights = mix(Attention("model", sigma=1e4), twins)[1]["model"]
    expected = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    assert torch.allclose(weights[1:4, 1:4], expected, atol=1e-9)


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


@rules
def test_a6_identical_clients_are_a_fixed_point(rule: Mixing, theta: Params) -> None:
    same = theta.rows(0).copies(N)
    assert near(mix(rule, same)[0], same)


@rules
def test_a7_one_client_gets_its_own_model(rule: Mixing, theta: Params) -> None:
    alone = theta.rows(slice(0, 1))
    assert near(mix(rule, alone)[0], alone)


def test_a8_scale_does_not_matter_and_sign_turns_the_cosine(theta: Params) -> None:
    base = mix(Attention("tensor", sigma=2.0), theta)[1]
    scale = torch.tensor([1.0, 2.0, 0.5, 7.0, 3.0], dtype=torch.float64)
    scaled = theta.map(lambda a: a * scale.view(-1, *[1] * (a.dim() - 1)))
    for k, weights in mix(Attention("tensor", sigma=2.0), scaled)[1].items():
        assert torch.allclose(weights, base[k], atol=1e-12)
    two = theta.rows(slice(0, 2))
    flipped = two.map(lambda a: torch.stack([a[0], -a[1]]))
    for k, weights in mix(Attention("tensor", sigma=2.0), two)[1].items():
        # M01 = 1 / (1 + exp(sigma (1 - c))), so c = 1 - log(1 / M01 - 1) / sigma
        c, d = (
            1 - math.log(1 / w[0, 1] - 1) / 2.0
            for w in (weights, mix(Attention("tensor", sigma=2.0), flipped)[1][k])
        )
        assert d == pytest.approx(-c, abs=1e-9)


def test_a9_two_clients() -> None:
    """M00 = 1 / (1 + exp(-sigma (1 - c))): 0.993307 for sigma = 50, c = 0.9."""
    c = 0.9
    theta = Params({"w": torch.tensor([[1.0, 0.0], [c, math.sqrt(1 - c * c)]], dtype=torch.float64)})
    weights = mix(Attention("tensor", sigma=50.0), theta)[1]["w"]
    assert weights[0, 0].item() == pytest.approx(0.993307, abs=1e-6)


def test_a10_units_agree_where_they_must(theta: Params) -> None:
    one_each = Params({"a.weight": theta["body.weight"], "b.weight": theta["head.weight"]})
    assert near(mix(Attention("layer"), one_each)[0], mix(Attention("tensor"), one_each)[0])
    one_layer = Params({"a.weight": theta["body.weight"], "a.bias": theta["body.bias"]})
    assert near(mix(Attention("layer"), one_layer)[0], mix(Attention("model"), one_layer)[0])


@rules
def test_a11_convex_hull_and_zero_tensors(rule: Mixing, theta: Params) -> None:
    sent = mix(rule, theta)[0]
    for k, v in theta.items():
        assert (sent[k] >= v.amin(0) - 1e-12).all()
        assert (sent[k] <= v.amax(0) + 1e-12).all()
    zeros = Params({**theta, "body.bias": torch.zeros_like(theta["body.bias"])})
    assert all(v.isfinite().all() for v in mix(rule, zeros)[0].values())


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
    alpha, sigma = 0.3, 4.0
    sent, matrices = mix(AttentiveMixing(alpha=alpha, sigma=sigma), theta)
    weights = matrices["model"]
    off = weights - torch.diag(weights.diagonal())
    assert torch.allclose(off, off.T, atol=1e-12)
    for k, v in theta.items():
        assert torch.allclose(sent[k].sum(0), v.sum(0), atol=1e-10)  # a symmetric matrix keeps the sum
    flat = torch.cat([v.flatten(1) for v in theta.values()], 1)
    distance = ((flat[0] - flat[1]) ** 2).sum()
    assert weights[0, 1].item() == pytest.approx(alpha / sigma * math.exp(-distance / sigma), rel=1e-9)
    same = mix(AttentiveMixing(alpha=alpha, sigma=sigma), theta.rows(0).copies(N))[1]["model"]
    assert same[0, 1].item() == pytest.approx(alpha / sigma)
    # With alpha / sigma = 25 the others of identical clients would weigh 100: alpha is lowered until all weigh 1/N.
    identical = theta.rows(0).copies(N)
    lowered = mix(AttentiveMixing(alpha=100.0, sigma=sigma), identical)[1]["model"]
    assert torch.allclose(lowered, torch.full((N, N), 1 / N, dtype=torch.float64), atol=1e-12)
    ids = torch.arange(N)
    for rule, said in (
        (AttentiveMixing(alpha=100.0, sigma=sigma), "the last round used 0.8 instead"),
        (AttentiveMixing(alpha=0.1, sigma=sigma), None),
    ):
        state = rule.init(theta.rows(0), N)
        state = rule.aggregate(
            state, ids, Payload(identical), Payload(identical), torch.ones(N, dtype=torch.int64)
        )
        remarks = rule.warnings(state, ids)
        assert [said in r for r in remarks] == [True] if said else remarks == ()


def test_a14_small_distances_between_many_large_models() -> None:
    """More than 25 models of large norm: distances must not be lost to cancellation."""
    generator = torch.Generator().manual_seed(0)
    w = 3 * torch.ones(40, 8000) + 0.001 * torch.randn(40, 8000, generator=generator)
    weights = mix(AttentiveMixing(alpha=0.001, sigma=0.01), Params({"w": w}))[1]["model"]
    assert torch.equal(weights, weights.T) or torch.allclose(weights, weights.T, rtol=1e-4)
    exact = ((w[0].double() - w[1].double()) ** 2).sum()
    assert weights[0, 1].item() == pytest.approx(0.1 * torch.exp(-exact / 0.01).item(), rel=1e-3)


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
    state = rule.aggregate(
        state, torch.tensor([0]), Payload(theta), Payload(theta.rows(torch.tensor([4]))), counts[:1]
    )
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
