"""Client-level differential privacy of every method, on both engines."""

from typing import Any

import pytest
import torch

from conformance.table import CASES, Case
from conformance.test_conformance import distance, fit
from conformance.test_participation import held, same, start
from fedattune import Federation, OnRound, Result
from fedattune.core.algorithm import find_needed_sums

pytestmark = pytest.mark.usefixtures("unmeasured")

NOISE: dict[str, Any] = {"dp_client_noise": 0.05, "dp_client_clip": 0.5, "dp_delta": 0.01, "rounds": 2}
SOME = ("fedavg", "fedmcsa", "scaffold", "pfedla", "fedrep", "igfl", "attune", "mocha")
"""Methods of different states, with sums of uploads and without."""

BY_NAME = {case.name: case for case in CASES}
SHARING = [case for case in CASES if case.name != "local"]
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
