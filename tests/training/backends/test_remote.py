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


NORMED: dict[str, Any] = {"module": Normed(), "bn_buffers": "average"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedrep", {"drop_out": 0.4, "rounds": 6}),
        ("fedavg", {"eval_clients": 3}),
        ("fedrep", {"eval_clients": 1, "eval_every": 2, "train": "all"}),
        ("fedavg", {"module": Normed()}),
        ("fedavg", NORMED),
        ("fedrep", NORMED | {"train": "all", "bn_affine": "local"}),
        ("fedrep", NORMED | {"train": "cohort", "cohort": 2, "eval_every": 3, "rounds": 6}),
        ("fedavg", NORMED | {"dp_client_noise": 0.01}),
        ("fedrep", NORMED | {"dp_client_noise": 0.01, "dp_client_where": "local"}),
    ],
    ids=[
        *("drop-out", "some judged", "one judged", "norms", "averaged norms", "averaged norms of all", "late"),
        *("noise of the server", "noise of clients"),
    ],
)
def test_settings_mean_the_same_everywhere(name: str, settings: dict[str, Any], ragged: Federation) -> None:
    case = BY_NAME[name]
    same_numbers(*(trained(case, ragged, make_backend, **settings) for make_backend in (None, Here)))


@pytest.mark.parametrize(
    ("name", "before", "after"), [("fedrep", Here, Here), ("fedrep", Here, None), ("fedmcsa", None, Here)]
)
def test_a_checkpoint_is_the_same_everywhere(
    name: str, before: Any, after: Any, ragged: Federation, tmp_path: Path
) -> None:
    """A run that stops with its clients here goes on with its clients elsewhere."""
    case = BY_NAME[name]
    out, rounds = tmp_path / "run", iter(range(1, 9))
    part = trained(case, ragged, before, out=out, stop=lambda: next(rounds) == 2)
    assert (part.rounds, part.is_finished) == (2, False)
    same_numbers(trained(case, ragged, None), trained(case, ragged, after, out=out))
