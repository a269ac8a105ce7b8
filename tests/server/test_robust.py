"""Robust rules against hand oracles from the papers' formulas."""

import numpy as np
import pytest
import torch

from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.server.mixing import CLIP, MixtureLimits
from fedattune.server.robust import ROBUST_RULES, RobustInputs, aggregate_robustly

SENT = Params(a=torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), b=torch.zeros(1, dtype=torch.float64))


def make_uploads(clients: int = 7, seed: int = 0) -> Params:
    torch.manual_seed(seed)
    return SENT.map(lambda a: a + torch.randn(clients, *a.shape, dtype=a.dtype))


def flatten(params: Params) -> np.ndarray:
    return torch.cat(list(params.values()), -1).numpy()


def run(rule: str, uploads: Params, share: float = 0.3, trusted: tuple[int, ...] = ()) -> np.ndarray:
    clients = len(uploads["a"])
    n = torch.arange(1, clients + 1)
    payload, buffers = aggregate_robustly(
        ROBUST_RULES[rule],
        SENT.repeat(clients),
        Payload(uploads, {"dc": uploads}),
        Params(),
        RobustInputs(n, share, list(trusted)),
    )
    rows = flatten(payload.params)
    assert (rows == rows[0]).all()
    assert not buffers
    return rows[0]


def test_median_and_trimmed_mean_are_those_of_every_value() -> None:
    uploads = make_uploads()
    x = flatten(uploads)
    np.testing.assert_allclose(run("median", uploads), np.median(x, 0), rtol=1e-12)
    ordered = np.sort(x, 0)
    np.testing.assert_allclose(run("trimmed_mean", uploads), ordered[2:-2].mean(0), rtol=1e-12)
    np.testing.assert_allclose(run("trimmed_mean", uploads, share=0.0), x.mean(0), rtol=1e-12)
    even = make_uploads(6)
    np.testing.assert_allclose(run("median", even), np.median(flatten(even), 0), rtol=1e-12)


def test_multi_krum_averages_the_updates_with_the_nearest_neighbours() -> None:
    uploads = make_uploads()
    x = flatten(uploads)
    x[3] += 50
    uploads = uploads.map(lambda a: a.index_add(0, torch.tensor([3]), torch.full_like(a[:1], 50.0)))
    n_bad = int(0.3 * 7)
    scores = []
    for i in range(7):
        distances = sorted(((x[i] - x[j]) ** 2).sum() for j in range(7) if j != i)
        scores.append(sum(distances[: 7 - n_bad - 2]))
    chosen = np.argsort(scores)[: 7 - n_bad]
    assert 3 not in chosen
    np.testing.assert_allclose(run("multi_krum", uploads), x[chosen].mean(0), rtol=1e-12)


def test_geometric_median_minimises_the_weighted_sum_of_distances() -> None:
    x, p = flatten(uploads := make_uploads()), np.arange(1, 8) / 28

    def cost(z: np.ndarray) -> float:
        return float((p * np.linalg.norm(x - z, axis=1)).sum())

    z = run("geometric_median", uploads)
    rng = np.random.default_rng(0)
    # Convex: no near point is better. The steps stop at weights that change by less than 1e-9.
    assert all(cost(z) <= cost(z + 1e-3 * rng.normal(size=z.shape)) for _ in range(50))
    assert cost(z) < cost(x.mean(0))


def test_trust_weighs_by_cosine_with_the_trusted_update_and_takes_its_length() -> None:
    uploads = make_uploads()
    u = flatten(uploads) - flatten(SENT)
    u0 = u[[1, 4]].mean(0)
    trust = np.maximum(0, u @ u0 / np.linalg.norm(u, axis=1) / np.linalg.norm(u0))
    assert (trust == 0).any()  # else the clipping is not tested
    expected = (trust / np.linalg.norm(u, axis=1)) @ u * np.linalg.norm(u0) / trust.sum()
    np.testing.assert_allclose(
        run("trust", uploads, trusted=(1, 4)), flatten(SENT) + expected, rtol=1e-10
    )  # products of updates in another order
    np.testing.assert_allclose(run("trust", uploads), flatten(SENT), rtol=1e-12)  # nobody trusted is here


def test_a_row_caps_others_and_clips_far_and_opposite_models() -> None:
    models = torch.tensor([[1.0, 0.0], [1.1, 0.1], [0.9, -0.1], [1.0, 0.2], [40.0, 0.0], [-1.0, 0.0]])
    products, squares, own = models[:1] @ models.T, models.square().sum(1), torch.tensor([0])
    weights = torch.full((1, 6), 1 / 6)
    capped = MixtureLimits(max_share=0.1).apply(weights, own, None, None)
    torch.testing.assert_close(capped, torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]]))
    clipped = MixtureLimits(clip=True).apply(weights, own, products, squares)
    distances = (models - models[0]).norm(dim=1)
    expected = weights[0] * (CLIP * distances[1:].median() / distances.clamp_min(1e-9)).clamp_max(1)
    expected[5], expected[0] = 0.0, 0.0
    expected[0] = 1 - expected.sum()
    torch.testing.assert_close(clipped[0], expected)
    assert clipped[0, 4] < 0.01


@pytest.mark.parametrize("bad", [1, 3, 4])
@pytest.mark.parametrize("size", [1e3, 1e12, 1e30])
def test_the_geometric_median_stays_among_the_honest_uploads_whatever_others_send(bad: int, size: float) -> None:
    updates = 0.1 * np.random.default_rng(0).normal(size=(10, 5))
    updates[:bad] = size
    x = torch.from_numpy(updates)
    weights = ROBUST_RULES["geometric_median"].apply(x @ x.T, RobustInputs(torch.ones(10), 0.4, []))
    assert float((weights @ x).norm()) < 0.5  # the honest ones have norms of about 0.2
