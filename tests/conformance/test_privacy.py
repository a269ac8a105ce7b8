"""Client-level differential privacy of every method, on both engines."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedattune
from conformance.table import CASES, Case
from conformance.test_conformance import distance, fit
from conformance.test_participation import held, same, start
from fedattune import ConfigError, Federation, OnRound, Result, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.core.algorithm import find_needed_sums
from fedattune.core.io import flatten_tree
from fedattune.experiments.plan import find_unfit
from fedattune.server import ServerWrapper
from fedattune.training.uploads.client_privacy import ClientPrivacy
from fedattune.training.uploads.step import RoundUploads

pytestmark = pytest.mark.usefixtures("unmeasured")

NOISE: dict[str, Any] = {"dp_client_noise": 0.05, "dp_client_clip": 0.5, "dp_delta": 0.01, "rounds": 2}
SOME = ("fedavg", "fedmcsa", "scaffold", "pfedla", "fedrep", "igfl", "attune", "mocha")
"""Methods of different states, with sums of uploads and without."""

BY_NAME = {case.name: case for case in CASES}
REFUSED = {"ifca"}
SHARING = [case for case in CASES if case.name not in {"local", *REFUSED}]
ON_SUMS = {
    *("apfl", "ditto", "fedadagrad", "fedadam", "fedala", "fedam", "fedavg", "fedavg_ft"),
    *("fedavgm", "fedbabu", "fedbn", "fedcp", "feddbe", "feddyn", "fedlc", "fedmcsa_no_mcsa", "fednova"),
    *("fedper", "fedproto", "fedprox", "fedrep", "fedrod", "fedyogi", "igfl_c", "knn_per"),
    *("l2gd", "lg_fedavg", "moon", "perfedavg", "pfedme", "scaffold", "vrl_sgd"),
}
"""Methods whose server needs sums of uploads alone."""


def options_of(case: Case) -> dict[str, Any]:
    """Options without random numbers of their own; L2GD averages in most rounds."""
    return case.same | ({"p": 0.9} if case.name == "l2gd" else {})


RESULTS: dict[tuple[str, str, str], Result] = {}


def fit_private(case: Case, federation: Federation, where: str, engine: str) -> Result:
    """A run with noise, shared by the tests of this file."""
    key = (case.name, where, engine)
    if key not in RESULTS:
        RESULTS[key] = fit(
            federation, case.name, engine=engine, options=options_of(case), dp_client_where=where, **NOISE
        )
    return RESULTS[key]


@pytest.mark.parametrize(
    ("name", "where"), [(name, where) for where in ("central", "local") for name in ("local", *SOME)]
)
def test_noise_acts_and_engines_agree(name: str, where: str, ragged: Federation) -> None:
    """The noise comes from seed, round and client; it is not in training alone."""
    case = BY_NAME[name]
    one, two = (fit_private(case, ragged, where, engine) for engine in ("sequential", "vectorized"))
    assert distance(one, two) < 1e-12  # as without noise
    assert all(torch.isfinite(v).all() for v in one.models.values())
    plain = fit(ragged, case.name, engine="sequential", options=options_of(case), rounds=2)
    if case.name == "local":
        assert distance(one, plain) == 0
        assert "client_privacy" not in one.reports
    else:
        assert distance(one, plain) > 1e-6
        assert "client_privacy" in one.reports
        on_sum = where == "central" and case.name in ON_SUMS
        assert ("sum" in one.reports["client_privacy"]["mechanism"]) == on_sum
        assert ("unknown" in one.reports["client_privacy"]["sampling"]) == on_sum


def test_the_methods_on_sums_are_the_ones_that_say_so(ragged: Federation) -> None:
    runs = [start(case, ragged) for case in SHARING]
    names = {
        case.name
        for case, run in zip(SHARING, runs, strict=True)
        if find_needed_sums(run.context.algorithm.server) is not None
    }
    assert names == ON_SUMS


@pytest.mark.parametrize("case", SHARING, ids=lambda case: case.name)
def test_personal_tensors_never_see_the_noise_of_their_own_round(case: Case, ragged: Federation) -> None:
    """After one round, what stays with clients is what training alone left there: noise hits uploads only."""
    plain = start(case, ragged, rounds=1, cohort=1.0)
    private = start(case, ragged, **(NOISE | {"rounds": 1, "cohort": 1.0, "dp_client_where": "local"}))
    for run in (plain, private):
        run.run_round(1, should_evaluate=False)
    ids = list(range(6))
    assert same(held(plain, ids), held(private, ids))


@pytest.mark.parametrize("case", SHARING, ids=lambda case: case.name)
def test_one_client_moves_what_leaves_it_by_two_norms_at_most(
    case: Case, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the noise is made for: other data of client 0 change its upload by 2C at most, and no other upload."""
    mine = torch.as_tensor(ragged.part("train")[0])
    x, y = ragged.x.clone(), ragged.y.clone()
    x[mine], y[mine] = -5 * x[mine], (y[mine] + 1) % len(ragged.classes)
    sent: list[RoundUploads] = []

    def keep(self: ClientPrivacy, uploads: RoundUploads) -> RoundUploads:
        sent.append(protect(self, uploads))
        return sent[-1]

    protect = ClientPrivacy.protect
    monkeypatch.setattr(ClientPrivacy, "protect", keep)
    for data in (ragged, replace(ragged, x=x, y=y)):
        settings = NOISE | {"dp_client_noise": 1e-12, "rounds": 1, "cohort": 1.0, "steps": 5, "lr": 0.3}
        start(case, data, **settings).run_round(1, should_evaluate=False)
    one, two = (flatten_tree({"w": u.upload.params, "extra": u.upload.extra, "buffers": u.buffers}) for u in sent)
    moved = sum((one[k] - two[k]).double().reshape(len(one[k]), -1).square().sum(1) for k in one).sqrt()
    assert moved[0] <= 2 * NOISE["dp_client_clip"] * (1 + 1e-6)
    assert not moved[1:].any()


def test_methods_whose_start_follows_from_data_are_refused(ragged: Federation) -> None:
    """Noise on an update does not hide from which of several models it starts."""
    for name in REFUSED:
        algorithm = ALGORITHMS[name]()
        for one in (algorithm, replace(algorithm, server=ServerWrapper(algorithm.server))):
            with pytest.raises(ConfigError, match=r"--dp-client\) cannot go with this: clients choose"):
                fedattune.fit(ragged, one, "mlr", **NOISE)
    algorithms = {name: ALGORITHMS[name]() for name in ALGORITHMS}
    assert find_unfit(algorithms, Settings(**NOISE), ragged).keys() == REFUSED  # so `--algorithms all` leaves it out


@pytest.mark.parametrize("name", SOME)
def test_resuming_repeats_noise_and_epsilon(name: str, ragged: Federation, tmp_path: Any) -> None:
    case = BY_NAME[name]
    whole = fit_private(case, ragged, "central", "vectorized")
    rounds: list[int] = []
    settings = {"engine": "vectorized", "options": options_of(case), "dp_client_where": "central", **NOISE}
    stopped = fit(
        ragged, case.name, out=tmp_path, callbacks=[OnRound(lambda p: rounds.append(p.round) or True)], **settings
    )
    assert rounds == [1]
    assert stopped.reports["client_privacy"]["epsilon"] < whole.reports["client_privacy"]["epsilon"]
    resumed = fit(ragged, case.name, out=tmp_path, resume=True, **settings)
    assert distance(whole, resumed) == 0
    assert resumed.reports["client_privacy"] == whole.reports["client_privacy"]
