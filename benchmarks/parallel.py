"""Measure independent runs in one process and in several, and their shared memory: `python -m benchmarks parallel`.

Fresh commands train the same runs one after another, with one thread and with all, and side by side with one thread
each. The time includes start-up. Memory is the sum over all processes: PSS counts a shared page once, RSS once per
process.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from .measure import Case, Figures, Setting, Target

METHODS = "local,fedavg,fedmcsa,pfedme"
EXPERIMENTS = {
    "digits": ("--data", "digits", "--model", "dnn", "--clients", "20", "--rounds", "150", "--seeds", "3"),
    "synthetic": ("--data", "synthetic", "--set", "synthetic.clients=30", "--model", "mlr", "--rounds", "60"),
    "cnn": ("--data", "digits", "--model", "mcmahan_cnn", "--clients", "10", "--steps", "5", "--rounds", "20"),
}
QUICK = ("--data", "digits", "--clients", "2", "--rounds", "1", "--steps", "1")


def _ways() -> dict[str, tuple[str, int]]:
    """Map each way to its processes and its threads of PyTorch."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "1 process, 1 thread": ("1", 1),
        "1 process, all threads": ("1", n),
        "all processes": (str(max(2, n)), n),
        "auto": ("auto", n),
    }


def _run(line: Sequence[str], processes: str, threads: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a fresh command, and the peak memory of the command and its children."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        command = ["compare", "--algorithms", METHODS, *line, "--processes", processes, "--quiet"]
        start = time.perf_counter()
        running = subprocess.Popen(
            [sys.executable, "-m", "fedattune", *command, "--out", f"{folder}/o"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        memory = _Memory(running.pid)
        code = running.wait()
        took = time.perf_counter() - start
        memory.end()
        if code:
            raise RuntimeError(f"fedattune {' '.join(command)} ended with {code}")
    return took, memory.most


class _Memory:
    """Sample the memory of a process and all its descendants a few times per second, if /proc has it."""

    def __init__(self, pid: int) -> None:
        self.most: dict[str, float] = defaultdict(float)
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            total: dict[str, float] = defaultdict(float)
            for pid in _family(self._pid):
                try:
                    text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
                except OSError:  # it has ended
                    continue
                for name, kilobytes in re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE):
                    total[f"{name.upper()} MB"] += int(kilobytes) / 1024
            for name, megabytes in total.items():
                self.most[name] = max(self.most[name], megabytes)


def _family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text("ascii")
        except OSError:
            continue
        found += [int(child) for child in children.split()]
    return found


def compare(name: str, setting: Setting) -> Figures:
    """Measure one comparison in all ways."""
    line = QUICK if setting.quick else EXPERIMENTS[name]
    ways = _ways()
    if setting.quick:
        ways = {"1 process, 1 thread": ("1", 1), "all processes": ("2", 1)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    values: dict[str, dict[str, float]] = {way: {} for way in ways}
    for _ in range(setting.repeats or (1 if setting.quick else 3)):
        for way, (processes, threads) in ways.items():
            took, memory = _run(line, processes, threads)
            seconds[way].append(took)
            for key, value in memory.items():
                values[way][key] = max(values[way].get(key, 0.0), value)
    floor = "1 process, 1 thread"
    targets = (Target("all processes", floor, 1.0), Target("auto", floor, 1.0))
    about = next(case.about for case in CASES if case.name == f"parallel-{name}")
    return Figures(f"parallel-{name}", about, seconds, floor, targets, values=values, paired=True)


CASES = tuple(
    Case(f"parallel-{name}", f"compare {METHODS} {' '.join(line)}", lambda setting, name=name: compare(name, setting))  # type: ignore[misc]
    for name, line in EXPERIMENTS.items()
)
