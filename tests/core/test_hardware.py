"""Cores and memory that a process may use."""

from pathlib import Path

import pytest

from fedattune.core import hardware


def test_room_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CGROUP_PATH", tmp_path)
    most = hardware.count_available_cores()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert hardware.count_available_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware.count_available_cores() == most
    (tmp_path / "memory.max").write_text("1\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert hardware.limit_to_memory(4) == 1
    monkeypatch.setattr(hardware, "count_free_memory_bytes", lambda: None)
    assert hardware.limit_to_memory(4) == 4
    monkeypatch.setattr(hardware, "count_free_memory_bytes", lambda: 3 * hardware._peak_memory_bytes() + 1)
    assert hardware.limit_to_memory(4) == 3


def test_groups_cost_about_the_same() -> None:
    costs = [9.0, 1, 1, 1, 3, 3]
    groups = hardware.balance(costs, 2)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert {sum(costs[i] for i in group) for group in groups} == {9.0}


def test_an_error_of_one_task_is_raised_after_all_have_ended() -> None:
    ended = []

    def fails() -> None:
        raise ValueError("task 1")

    with pytest.raises(ValueError, match="task 1"):
        hardware.run_parallel([lambda: ended.append(0), fails, lambda: ended.append(2)])
    assert sorted(ended) == [0, 2]
