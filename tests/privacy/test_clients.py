"""Client-level privacy of whole runs: where the noise is, how much, and what it costs."""

from typing import Any

import pytest
import torch

import fedattune
from conformance.table import Case
from conformance.test_participation import start
from fedattune import Federation, Params, Settings
from fedattune.core.errors import ConfigError
from fedattune.core.payload import Payload
from fedattune.privacy.accounting import epsilon_of
from fedattune.server.average import weighted_sum
from fedattune.training.sampling import sample_cohort
from fedattune.training.uploads.client_privacy import ClientPrivacy, UploadAccounting
from fedattune.training.uploads.step import RoundUploads

pytestmark = pytest.mark.usefixtures("unmeasured")

DP: dict[str, Any] = {"dp_client": 5.0, "dp_delta": 0.01}


def accounting(is_sum: bool = True, is_secret: bool = False, **settings: Any) -> UploadAccounting:
    return UploadAccounting(Settings(**(DP | settings)), 50, is_sum, is_secret)


def test_a_budget_is_kept_and_spent_at_the_end() -> None:
    for each in (accounting(rounds=30), accounting(rounds=30, cohort=5), accounting(is_sum=False, rounds=30, cohort=5)):
        assert 4.9 < each.epsilon(30) <= 5.0
        assert 0 < each.epsilon(10) < each.epsilon(20) < each.epsilon(30) < each.epsilon(30, repeats=1)


def test_participations_are_those_of_the_cohorts() -> None:
    settings = Settings(rounds=12, cohort=5, seed=3)
    cohorts = torch.cat([sample_cohort(settings, 50, r) for r in range(1, 13)])
    assert UploadAccounting(settings, 50, True).count_uploads(12) == int(cohorts.bincount().max())
    assert UploadAccounting(Settings(rounds=12), 50, True).count_uploads(12) == 12


def test_hidden_cohorts_help_sums_alone() -> None:
    hidden = accounting(rounds=200, cohort=5)
    seen = accounting(is_sum=False, rounds=200, cohort=5)
    real = accounting(is_secret=True, rounds=200, cohort=5)
    assert hidden.has_hidden_cohort
    assert not seen.has_hidden_cohort
    assert not real.has_hidden_cohort
    assert hidden.multiplier < seen.multiplier < real.multiplier
    assert real.epsilon(200) == epsilon_of(real.multiplier, 1, 200, 0.01, sampling="none")


def test_the_noise_on_a_sum_is_that_on_one_upload(ragged: Federation) -> None:
    """The mean of C uploads has noise of C_clip multiplier / C: independent noise on each has 1/sqrt(C) of that."""
    settings = {"dp_client_noise": 2.0, "dp_client_clip": 0.5, "cohort": 1.0}
    noises = []
    for name in ("fedavg", "fedmcsa"):
        run = start(Case(name), ragged, **settings)
        privacy = ClientPrivacy.make(run.context)
        assert privacy is not None
        zeros = Params(w=torch.zeros(6, 20_000, dtype=torch.float64))
        context_params = run.context.task.params
        object.__setattr__(run.context.task, "params", Params(w=zeros["w"][0]))
        ids = torch.arange(6)
        upload = privacy.protect(RoundUploads(1, ids, Payload(zeros), Payload(zeros), Params(), ids)).upload
        object.__setattr__(run.context.task, "params", context_params)
        noises.append(weighted_sum(torch.full((6,), 1 / 6), upload.params)["w"].std().item())
    assert noises[0] == pytest.approx(2.0 * 0.5 / 6, rel=0.02)  # 20,000 draws: 4 deviations
    assert noises[1] == pytest.approx(2.0 * 0.5 / 6**0.5, rel=0.02)


def test_sample_counts_do_not_weigh(ragged: Federation) -> None:
    """With noise, weights by samples are uniform weights."""
    kwargs: dict[str, Any] = {"rounds": 2, "steps": 2, "dp_client_noise": 0.01, "dp_delta": 0.01}
    one, two = (
        fedattune.fit(ragged, "fedavg", "mlr", options={"weighting": w}, **kwargs) for w in ("samples", "uniform")
    )
    assert all(torch.equal(one.models[k], two.models[k]) for k in one.models)


@pytest.mark.parametrize("name", ["fedavg", "fedfomo"])
def test_newcomers_upload_with_noise(name: str, ragged: Federation) -> None:
    run = fedattune.fit(
        ragged, name, "mlr", rounds=2, steps=2, held_out=1, join_rounds=2, dp_client_noise=0.1, dp_delta=0.01
    )
    assert len(run.newcomers) == 1


def test_facts_notes_and_table(ragged: Federation, tmp_path) -> None:
    run = fedattune.fit(ragged, "fedavg", "mlr", rounds=3, steps=2, cohort=3, out=tmp_path, **DP)
    read = fedattune.Result.load(tmp_path)
    for one in (run, read):
        privacy = one.reports["client_privacy"]
        assert privacy is not None
        assert privacy["target"] == 5.0
        assert 0 < privacy["epsilon"] <= 5.0
        assert privacy["generator"] == "the seed of this simulation"
        assert one.epsilon == privacy["epsilon"]
    (note,) = [note for note in run.notes if "differential privacy" in note]
    assert "epsilon" in note
    assert "not protected" in note


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp_client": 1.0, "dp_client_noise": 1.0}, "give dp_client"),
        ({"dp_client_clip": 2.0}, "dp_client_clip: it needs dp_client"),
        ({"dp_client_where": "local"}, "dp_client_where: it needs dp_client"),
        ({"dp_client": 0.0}, "dp_client"),
        ({"dp_client": 1.0, "dp_delta": 1.0}, "dp_delta"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings.from_keywords(**settings)


def test_uploads_that_are_not_finite_do_not_take_noise_away(ragged: Federation) -> None:
    """The noise of the sum is spread over all rows; none of them is rejected with its share."""
    run = start(Case("fedavg"), ragged, dp_client_noise=2.0, dp_client_clip=0.5, cohort=1.0)
    sent = run.context.task.params.repeat(6)
    upload = sent.map(lambda v: v.clone().index_fill_(0, torch.tensor([1, 4]), torch.nan))
    ids = torch.arange(6)
    uploads = RoundUploads(1, ids, Payload(sent), Payload(upload), Params(), run.context.n_train)
    received = run.uploads.receive(uploads)
    assert received.ids.tolist() == ids.tolist()
    changes = received.upload.params - sent
    noise = torch.cat([v.sum(0).flatten() for v in changes.values()])
    expected = 2.0 * 0.5
    assert noise.std().item() == pytest.approx(expected, rel=5 / (2 * len(noise)) ** 0.5)
