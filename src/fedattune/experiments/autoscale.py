"""Decide, from the pace of the rounds so far, whether to train the remaining runs in several processes."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.hardware import count_available_cores, limit_to_memory

if TYPE_CHECKING:
    from ..runs.context import Progress
    from .job import Job

ONE_THREAD_FACTOR = 1.4
"""Time of a run with one thread, relative to the time with all of two cores (measured: 50 against 35 s)."""

START_S = 5.0
"""Seconds until a new process trains; importing PyTorch takes most of them."""

MIN_TIMED_S = 1.0
"""Seconds of rounds to time before the estimate relies on their pace."""


class SpeedupEstimate:
    """Estimate of the time that several processes would save.

    P processes finish work of W seconds in `ONE_THREAD_FACTOR` W/P seconds, after `START_S` seconds to start. They pay
    if they save more than `START_S` seconds beside the start. Runs on a GPU never share it: one run often fills its
    memory.

    Attributes:
        pays: whether several processes save enough time.

    """

    def __init__(self, jobs: "Sequence[Job]") -> None:
        self._todo = [job for job in jobs if not job.is_finished]
        self._later_rounds = 0  # of the runs after the current one
        self._seconds, self._timed_rounds = 0.0, 0
        self._last: float | None = None
        self.pays = False

    def start_run(self, job: "Job") -> None:
        """Note that a run begins; its first round prepares much, so it is not timed."""
        from ..core.hardware import resolve_device

        self._last = None
        self._todo = [one for one in self._todo if one is not job and not one.is_finished]
        self._later_rounds = sum(one.settings.rounds for one in self._todo)
        self._on_gpu = resolve_device(job.settings).type == "cuda"

    def end_round(self, progress: "Progress") -> None:
        """Note that a round ended, and update the estimate."""
        now = time.monotonic()
        if self._last is not None:
            self._seconds += now - self._last
            self._timed_rounds += 1
        self._last = now
        n = min(count_available_cores(), len(self._todo) + 1)
        if self._seconds < MIN_TIMED_S or n < 2 or self._on_gpu:
            return
        rounds_left = self._later_rounds + progress.rounds - progress.round
        work_s = rounds_left * self._seconds / self._timed_rounds
        saved_s = work_s * (1 - ONE_THREAD_FACTOR / n) - START_S
        self.pays = saved_s > START_S and limit_to_memory(2) > 1
