"""When several processes pay."""

from pathlib import Path

import pytest

import fedattune
from fedattune import Settings
from fedattune.algorithms import local
from fedattune.experiments import runner
from fedattune.experiments.plan import Job
from fedattune.runs.context import Progress


def job(tmp_path: Path, federation: fedattune.Federation, rounds: int) -> Job:
    settings = Settings(rounds=rounds)
    return Job("", "local", local(), federation, "mlr", settings, tmp_path / str(rounds), {}, {})


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.now = 0.0
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(runner, "count_available_cores", lambda: cores)
        monkeypatch.setattr(runner, "limit_to_memory", lambda n: n)


@pytest.mark.parametrize(
    ("cores", "jobs", "seconds", "pays"),
    [
        (1, 5, 1.0, False),  # one core
        (2, 1, 1.0, False),  # one run
        (2, 2, 0.3, True),  # 59.4 s are left, 30% of which is more than twice 5
        (2, 2, 0.1, False),  # 19.8 s
        (2, 9, 0.05, True),  # 44.5 s
        (2, 9, 0.03, False),  # 26.7 s
        (64, 9, 0.03, True),
    ],
)
def test_when_it_pays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ragged: fedattune.Federation,
    cores: int,
    jobs: int,
    seconds: float,
    pays: bool,
) -> None:
    clock = Clock(monkeypatch, cores)
    todo = [job(tmp_path / str(i), ragged, 100) for i in range(jobs)]
    estimate = runner.SpeedupEstimate(todo)
    estimate.start_run(todo[0])
    clock.now += 100  # much is made ready in the first round
    estimate.end_round(Progress(1, 100, None, 0.0))
    assert not estimate.pays
    said = []
    for r in range(2, 101):
        clock.now += seconds
        estimate.end_round(Progress(r, 100, None, 0.0))
        said.append(estimate.pays)
    assert any(said) == pays
    assert not pays or said.index(True) <= runner.MIN_TIMED_S / seconds + 1
