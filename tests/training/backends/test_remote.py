"""Every method gives the same numbers wherever its clients are."""

from pathlib import Path
from typing import Any

import pytest

from conformance.table import CASES
from fedattune import Federation
from remote_runs import Here, Normed, same_numbers, trained

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "train"),
    [*((case.name, "method") for case in CASES)]
    + [(n, "all") for n in ("fedavg", "fedmcsa", "fedrep", "scaffold", "pfedla", "attune", "mocha", "fedam", "ifca")],
)
def test_clients_at_several_workers_give_the_same_numbers(name: str, train: str, ragged: Federation) -> None:
    case = BY_NAME[name]
    same_numbers(*(trained(case, ragged, make_backend, train=train) for make_backend in (None, Here)))


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
@pytest.mark.parametrize(
    "settings",
    [
        {"drop_out": 0.4, "rounds": 6},
        {"eval_clients": 3},
        {"eval_clients": 1, "eval_every": 2, "train": "all"},
        {"module": Normed()},
        {"module": Normed(), "bn_buffers": "average"},
        {"module": Normed(), "bn_buffers": "average", "train": "all", "bn_affine": "local"},
        {"module": Normed(), "bn_buffers": "average", "train": "cohort", "cohort": 2, "eval_every": 3, "rounds": 6},
        {"module": Normed(), "bn_buffers": "average", "dp_client_noise": 0.01},
        {"module": Normed(), "bn_buffers": "average", "dp_client_noise": 0.01, "dp_client_where": "local"},
    ],
    ids=[
        *("drop-out", "some judged", "one judged", "norms", "averaged norms", "averaged norms of all", "late"),
        *("noise of the server", "noise of clients"),
    ],
)
def test_settings_mean_the_same_everywhere(name: str, settings: dict[str, Any], ragged: Federation) -> None:
    case = BY_NAME[name]
    same_numbers(*(trained(case, ragged, make_backend, **settings) for make_backend in (None, Here)))


@pytest.mark.parametrize("name", ["fedmcsa", "fedrep"])
@pytest.mark.parametrize(("before", "after"), [(Here, Here), (Here, None), (None, Here)])
def test_a_checkpoint_is_the_same_everywhere(
    name: str, before: Any, after: Any, ragged: Federation, tmp_path: Path
) -> None:
    """A run that stops with its clients here goes on with its clients elsewhere."""
    case = BY_NAME[name]
    out, rounds = tmp_path / "run", iter(range(1, 9))
    part = trained(case, ragged, before, out=out, stop=lambda: next(rounds) == 2)
    assert (part.rounds, part.is_finished) == (2, False)
    same_numbers(trained(case, ragged, None), trained(case, ragged, after, out=out))
