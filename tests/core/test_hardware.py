"""Cores and memory that a process may use."""

from pathlib import Path

import pytest

from fedattune.core import hardware


def test_room_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CGROUP_PATH", tmp_path)
    most = hardware.available_cores()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert hardware.available_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware.available_cores() == most
    (tmp_path / "memory.max").write_text("1\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert hardware.processes_in_memory(4) == 1
    monkeypatch.setattr(hardware, "_free_memory_bytes", lambda: None)
    assert hardware.processes_in_memory(4) == 4
    monkeypatch.setattr(hardware, "_free_memory_bytes", lambda: 3 * hardware._peak_memory_bytes() + 1)
    assert hardware.processes_in_memory(4) == 3
