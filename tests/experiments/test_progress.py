"""Bars of many runs in terminals of any size: those that train are always to be seen."""

import pytest

from fedattune.experiments.runner import ProgressBars
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
