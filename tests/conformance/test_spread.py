"""Every method gives the same numbers wherever its clients are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from conformance.table import Case
from conformance.test_conformance import RUN, every_method
from fedattune import Federation, Result, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.data.share import share
from fedattune.models import make_model
from fedattune.personal_models import wrapped
from fedattune.registry import build
from fedattune.rounds import Run
from fedattune.serving import open_site, serve
from fedattune.spread import Spread
from fedattune.wire import Parcel

SITES = ([0, 3], [1, 2, 4], [5])


class Here(Spread):
    """Sites in this process, each with its own data, which see nothing but parcels."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, [torch.tensor(site) for site in SITES])
        self.places = [
            open_site(
                run.algorithm, share(run.federation, np.array(site)), run.task.model, run.settings, site
            )
            for site in SITES
        ]

    def ask(self, parcels: Mapping[int, Parcel]) -> dict[int, Parcel | str]:
        return {site: serve(self.places[site], parcel) for site, parcel in parcels.items()}


def trained(case: Case, federation: Federation, spread: Any, model: str = "dnn", **settings: Any) -> Result:
    algorithm = build(case.name, ALGORITHMS[case.name], case.same)
    mine = Settings(**(RUN | settings))
    module = make_model(model, federation, options={"hidden": 6} if model == "dnn" else {}, seed=mine.seed)
    if algorithm.network:
        module = wrapped(algorithm.network, module, torch.zeros(2, *federation.input_shape), mine.seed)
    config = {"algorithm": case.name, **mine.model_dump()}
    run = Run(algorithm, federation, module, mine, config, None, spread)
    return run.go(lambda _: None, lambda: False)


def same_numbers(
    one: Result, other: Result, points: tuple[str, ...] = ("received", "trained", "global")
) -> None:
    for a, b in zip(one.history, other.history, strict=True):
        for point in points:
            assert (a.get(point) is None) == (b.get(point) is None), point
            if a.get(point):
                assert b[point] == pytest.approx(a[point], abs=1e-12)
        for point, metrics in a["validation"].items():
            assert b["validation"][point] == pytest.approx(metrics, abs=1e-12)
        assert a["bytes"] == b["bytes"]
    assert list(one.mixing) == list(other.mixing)
    for r in one.mixing:
        for component, matrix in one.mixing[r].items():
            np.testing.assert_allclose(other.mixing[r][component], matrix, atol=1e-6)
    assert one.local_steps == other.local_steps
    assert one.notes == other.notes


@every_method
@pytest.mark.parametrize("train", ["method", "cohort", "all"])
def test_clients_at_several_sites_give_the_same_numbers(case: Case, train: str, ragged: Federation) -> None:
    same_numbers(*(trained(case, ragged, spread, train=train) for spread in (None, Here)))
