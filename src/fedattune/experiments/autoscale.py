"""How many processes runs are spread over: what the machine has, and whether it pays."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.hardware import available_cores, processes_in_memory

if TYPE_CHECKING:
    from ..training.context import Progress
    from .job import Job

ONE_THREAD_FACTOR = 1.4
"""How much longer a run takes with one thread than with all of two cores (measured: 50 against 35 s)."""


START_S = 5.0
"""Seconds until a new process trains, of which PyTorch's import takes most."""


MIN_TIMED_S = 1.0
"""Seconds of rounds to look at before their pace is believed."""


class SpeedupEstimate:
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
        self._alone = _uses_gpu(job)

    def round(self, progress: "Progress") -> None:
        """A round ended."""
        now = time.monotonic()
        if self._last is not None:
            self._seconds += now - self._last
            self._counted += 1
        self._last = now
        n = min(available_cores(), len(self._todo) + 1)
        if self._seconds < MIN_TIMED_S or n < 2 or self._alone:
            return
        left = self._rounds + progress.rounds - progress.round
        saved = left * self._seconds / self._counted * (1 - ONE_THREAD_FACTOR / n) - START_S
        self.pays = saved > START_S and processes_in_memory(2) > 1


def _uses_gpu(job: "Job") -> bool:
    from ..core.hardware import resolve_device

    return resolve_device(job.settings).type == "cuda"
