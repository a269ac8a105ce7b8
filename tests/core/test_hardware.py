"""Cores and memory that a process may use."""

from pathlib import Path
from typing import NamedTuple

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


def test_processors_of_one_name_are_told_by_family_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "CPUINFO_PATH", file)
    monkeypatch.setattr(hardware.torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    core = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"
    file.write_text(2 * core)
    assert hardware.find_processor_name() == "AMD EPYC (family 25, model 17, AVX512)"
    file.write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")  # as of an ARM processor
    monkeypatch.setattr(hardware.platform, "processor", lambda: "aarch64")
    assert hardware.find_processor_name() == "aarch64 (AVX512)"
    file.unlink()
    assert hardware.find_processor_name() == "aarch64 (AVX512)"


def test_an_error_of_one_task_is_raised_after_all_have_ended() -> None:
    ended = []

    def fails() -> None:
        raise ValueError("task 1")

    with pytest.raises(ValueError, match="task 1"):
        hardware.run_parallel([lambda: ended.append(0), fails, lambda: ended.append(2)])
    assert sorted(ended) == [0, 2]


class Times(NamedTuple):
    """Seconds of all cores since the start of the machine, as psutil tells them."""

    user: float
    system: float
    idle: float
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


def test_the_load_of_others_is_all_work_but_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"cpu": Times(100, 20, 500, 7), "own": 3.0, "wall": 50.0}
    monkeypatch.setattr(hardware.psutil, "cpu_times", lambda: now["cpu"])
    monkeypatch.setattr(hardware.time, "process_time", lambda: now["own"])
    monkeypatch.setattr(hardware.time, "monotonic", lambda: now["wall"])
    meter = hardware.LoadMeter()
    # Two cores for one second: 0.9 s of our own, 0.3 s of another process, 0.2 s of another machine on this processor.
    now |= {"cpu": Times(101.1, 20.1, 500.4, 7.2, 0.2, 0.4), "own": 3.9, "wall": 51.0}
    assert meter.count_busy_cores() == pytest.approx(0.5)
    # A moment later little can be said: ticks of a hundredth of a second count as part of a fifth.
    now |= {"cpu": Times(101.11, 20.1, 500.4, 7.2, 0.2), "wall": 51.01}
    assert meter.count_busy_cores() == pytest.approx(0.01 / 0.2)
    now |= {"own": 4.3, "wall": 51.4, "cpu": Times(101.5, 20.1, 500.8, 7.2, 0.2)}
    assert meter.count_busy_cores() == pytest.approx(0)
