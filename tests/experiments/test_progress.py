"""Bars of many runs in terminals of any size: those that train are always to be seen."""

import pytest

from fedattune.experiments.runner import PlainProgress, ProgressBars
from fedattune.runs.context import Progress


@pytest.mark.parametrize(("height", "seen"), [(10, 9), (5, 4), (2, 2), (50, 22)])
def test_bars_of_finished_runs_go_when_the_terminal_is_full(
    height: int, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setenv("COLUMNS", "100")
    bar = ProgressBars()
    for i in range(20):
        bar.add_run(f"done {i}", 3)(Progress(3, 3, 0.5, 1.0))
    train = [bar.add_run(f"trains {i}", 3) for i in range(2)]
    for tell in train:
        tell(Progress(1, 3, 0.5, 1.0))
    shown = [str(task.description) for task in bar._bars.tasks if task.visible]
    assert shown[-2:] == ["trains 0", "trains 1"]
    assert len(shown) == seen


def test_the_score_of_an_earlier_evaluation_names_its_round(capsys: pytest.CaptureFixture[str]) -> None:
    tell = PlainProgress().add_run("local", 20)
    tell(Progress(6, 20, 0.5, 1.0, evaluated=6))
    tell(Progress(8, 20, 0.5, 1.0, evaluated=6))
    first, second = capsys.readouterr().err.splitlines()
    assert "round 6 of 20, accuracy 50.00%" in first
    assert "at round" not in first
    assert "round 8 of 20, accuracy 50.00% at round 6" in second
