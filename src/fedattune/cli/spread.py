"""How many processes runs are spread over: what the machine has, and whether it pays."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trainer import Progress
    from .jobs import Job

ONE_THREAD = 1.4
"""How much longer a run takes with one thread than with all of two cores (measured: 50 against 35 s)."""

START = 5.0
"""Seconds until a new process trains, of which PyTorch's import takes most."""

SURE = 1.0
"""Seconds of rounds to look at before their pace is believed."""

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may take."""


def cores() -> int:
    """Cores that this process may use."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text(encoding="ascii").split()  # "max" is no number
        n = min(n, max(1, int(quota) // int(period)))
    return n


def room_for(n: int) -> int:
    """As many of n processes as memory has room for, if each comes to take as much as this one has."""
    free = _free_memory()
    return n if free is None else max(1, min(n, free // _most_memory()))


def _free_memory() -> int | None:
    """Bytes that can be had, of the machine and of a container on it; None where the system does not say."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        found.append(1024 * int(text.split("MemAvailable:")[1].split()[0]))
    with suppress(OSError, ValueError):
        most, used = (
            int((CGROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current")
        )
        found.append(most - used)
    return min(found, default=None)


def _most_memory() -> int:
    """The most bytes that were resident in this process."""
    from resource import RUSAGE_SELF, getrusage

    return 1024 * getrusage(RUSAGE_SELF).ru_maxrss


class Estimate:
    """Whether the runs that are left should be spread over processes, from the pace of the rounds so far.

    With P processes, work of W seconds takes W/P, after the seconds that it takes to start them. That is worth while
    where it saves more than twice those seconds. A GPU is not shared: its memory is often full with one run.
    """

    def __init__(self, jobs: "Sequence[Job]") -> None:
        self._todo = [job for job in jobs if not job.finished]
        self._rounds = 0  # of the runs that come after the present one
        self._seconds, self._counted = 0.0, 0
        self._last: float | None = None
        self.pays = False

    def start(self, job: "Job") -> None:
        """A run begins; its first round is not counted, for much is made ready in it."""
        self._last = None
        self._todo = [one for one in self._todo if one is not job and not one.finished]
        self._rounds = sum(one.settings.rounds for one in self._todo)
        self._alone = _on_gpu(job)

    def round(self, progress: "Progress") -> None:
        """A round ended."""
        now = time.monotonic()
        if self._last is not None:
            self._seconds += now - self._last
            self._counted += 1
        self._last = now
        n = min(cores(), len(self._todo) + 1)
        if self._seconds < SURE or n < 2 or self._alone:
            return
        left = self._rounds + progress.rounds - progress.round
        saved = left * self._seconds / self._counted * (1 - ONE_THREAD / n) - START
        self.pays = saved > START and room_for(2) > 1


def _on_gpu(job: "Job") -> bool:
    from ..cohorts import device

    return device(job.settings).type == "cuda"
