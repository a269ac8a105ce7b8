"""Clipping and noise of uploads: lengths, deviations, sums, and the generators."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedattune.core.errors import ConfigError
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.privacy.noise import MIN_VARIANCE, Uploaded, clip_and_noise, draw_secret, draw_seeded, limit_variances


def make_uploads(n: int = 5, size: int = 4000, scale: float = 3.0) -> tuple[Uploaded, Uploaded]:
    """Uploads with an extra and statistics, and their anchor."""
    torch.manual_seed(0)
    anchor = Uploaded(
        Payload(Params(w=torch.randn(n, size, dtype=torch.float64))), Params(mean=torch.randn(7).double())
    )
    upload = Payload(
        Params(w=anchor.upload.params["w"] + scale * torch.randn(n, size)), {"dc": Params(w=torch.randn(n, 3).double())}
    )
    return Uploaded(upload, Params(mean=anchor.statistics["mean"] + torch.randn(n, 7))), anchor


def change(new: Uploaded, anchor: Uploaded) -> torch.Tensor:
    """The changes (C, P) of all parts of uploads."""
    return torch.cat(
        [
            new.upload.params["w"] - anchor.upload.params["w"],
            new.upload.extra["dc"]["w"],
            new.statistics["mean"] - anchor.statistics["mean"],
        ],
        1,
    )


def test_all_parts_of_an_update_are_clipped_as_one_vector() -> None:
    uploaded, anchor = make_uploads()
    new = clip_and_noise(uploaded, anchor, torch.arange(5), 0.5, 0.0, draw_secret)
    before, after = change(uploaded, anchor), change(new, anchor)
    assert torch.allclose(after.norm(dim=1), torch.full((5,), 0.5, dtype=torch.float64))
    assert torch.allclose(torch.cosine_similarity(before, after), torch.ones(5, dtype=torch.float64))


def test_one_upload_moves_the_release_by_twice_the_length_at_most() -> None:
    """The sensitivity that the accountant counts on: the same noise, and one client's data replaced."""
    uploaded, anchor = make_uploads()
    other = Uploaded(
        Payload(Params(w=-uploaded.upload.params["w"] * 1e6), {"dc": uploaded.upload.extra["dc"]}), uploaded.statistics
    )
    one, two = (
        clip_and_noise(each, anchor, torch.arange(5), 0.5, 1.0, draw_seeded(0, 1)) for each in (uploaded, other)
    )
    moved = (change(one, anchor) - change(two, anchor)).norm(dim=1)
    assert (moved <= 1.0 + 1e-9).all()
    assert (moved > 0.5).all()


@pytest.mark.parametrize("draw", [draw_secret, draw_seeded(3, 7)], ids=["secret", "seeded"])
def test_the_noise_is_gaussian_of_the_deviation(draw) -> None:
    uploaded, anchor = make_uploads()
    clipped = clip_and_noise(uploaded, anchor, torch.arange(5), 0.5, 0.0, draw)
    noised = clip_and_noise(uploaded, anchor, torch.arange(5), 0.5, 0.3, draw)
    noise = (change(noised, anchor) - change(clipped, anchor)).flatten().numpy()
    # 20,050 draws: a right generator is below 1e-4 in one of 10,000 runs.
    assert stats.kstest(noise, "norm", args=(0, 0.3)).pvalue > 1e-4
    assert np.abs(np.corrcoef(noise.reshape(5, -1))[np.triu_indices(5, 1)]).max() < 0.1  # 6 deviations


def test_seeded_noise_depends_on_seed_round_and_client_alone() -> None:
    assert np.array_equal(draw_seeded(1, 2)(3)(10), draw_seeded(1, 2)(3)(10))
    others = [draw_seeded(0, 2)(3)(10), draw_seeded(1, 1)(3)(10), draw_seeded(1, 2)(2)(10)]
    assert all(np.abs(draw_seeded(1, 2)(3)(10) - other).min() > 0 for other in others)
    assert not np.array_equal(draw_secret(3)(10), draw_secret(3)(10))


def test_uploads_that_are_no_real_numbers_are_refused() -> None:
    counts = Uploaded(Payload(Params(n=torch.ones(2, 3, dtype=torch.int64))), Params())
    with pytest.raises(ConfigError, match="clients upload n, which are no real numbers"):
        clip_and_noise(counts, counts, torch.arange(2), 1.0, 1.0, draw_secret)


def test_variances_stay_positive() -> None:
    statistics = Params({"1.running_var": torch.tensor([-1.0, 2.0]), "1.running_mean": torch.tensor([-1.0, 2.0])})
    assert limit_variances(statistics)["1.running_var"].tolist() == [pytest.approx(MIN_VARIANCE), 2.0]
    assert limit_variances(statistics)["1.running_mean"].tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e200])
def test_a_change_that_is_not_finite_counts_as_zero_and_is_noised(value: float) -> None:
    """A row without its noise would take a share of the noise on the sum away."""
    ids, n = torch.arange(10), 20_000
    rows = torch.zeros(10, n, dtype=torch.float64)
    rows[:, 0], rows[6:, 1] = 3.0, value
    uploaded = Uploaded(Payload(Params(w=rows)), Params(m=torch.zeros(10, 1, dtype=torch.float64)))
    anchor = Uploaded(Payload(Params(w=torch.full((n,), 5.0, dtype=torch.float64))), Params(m=torch.zeros(1)))
    clipped = clip_and_noise(uploaded, anchor, ids, 0.5, 0.0, draw_secret).upload.params["w"]
    assert torch.equal(clipped[6:], torch.full((4, n), 5.0, dtype=torch.float64))
    torch.testing.assert_close((clipped[:6] - 5).norm(dim=1), torch.full((6,), 0.5, dtype=torch.float64))
    noised = clip_and_noise(uploaded, anchor, ids, 0.5, 2.0 / 10**0.5, draw_secret)
    assert noised.statistics["m"].isfinite().all()
    assert (noised.upload.params["w"] - clipped).sum(0).std().item() == pytest.approx(2.0, rel=0.03)
