"""Train independent runs, one after another or in several processes, as their pace suggests; show their progress."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from ..analysis.output.tables import make_console
from ..core.errors import ConfigError, DivergedError, RunError
from ..core.hardware import count_available_cores, limit_to_memory
from ..core.metrics import format_number
from ..core.text import make_printable
from .plan import FailedRun, Job, ProgressCallback, ShouldStop, StoppedError

if TYPE_CHECKING:
    from ..runs.context import Progress
    from ..runs.result import Result

ONE_THREAD_FACTOR = 1.4
"""Time of a run with one thread, relative to the time with all of two cores (measured: 50 against 35 s)."""
START_S = 5.0
"""Seconds until a new process trains; importing PyTorch takes most of them."""
MIN_TIMED_S = 1.0
"""Seconds of rounds to time before the estimate relies on their pace."""
MIN_COLUMNS_BARS = 76
"""Width of a terminal from which runs have bars."""
MIN_COLUMNS_LABEL = 60
"""Width of a terminal from which the accuracy has a label."""


class ProgressDisplay:
    """Show the progress of several runs. This base class shows nothing."""

    def add_run(self, title: str, rounds: int) -> ProgressCallback:
        """Add a run, and return the callback that receives the progress of its rounds."""
        return lambda _: None

    def print_line(self, line: str) -> None:
        """Print one line about the runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class PlainProgress(ProgressDisplay):
    """Print a plain line after every tenth of the rounds."""

    def add_run(self, title: str, rounds: int) -> ProgressCallback:
        start, n_rounds = time.monotonic(), 0

        def show(progress: "Progress") -> None:
            nonlocal n_rounds
            n_rounds += 1  # not progress.round: a resumed run begins in the middle
            tenth = 10 * progress.round // progress.rounds
            if tenth > 10 * (progress.round - 1) // progress.rounds:
                seconds_left = (time.monotonic() - start) / n_rounds * (progress.rounds - progress.round)
                score = _format_score(progress)
                wait = f", about {seconds_left:.0f} s left" if seconds_left >= 1 else ""
                done = f"round {progress.round} of {progress.rounds}{', ' * bool(score)}{score}"
                self.print_line(f"{title}: {done}{wait}")

        return show

    def print_line(self, line: str) -> None:
        print(make_printable(line), file=sys.stderr, flush=True)


def _format_score(progress: "Progress", *, has_label: bool = True) -> str:
    place = f" at round {progress.evaluated}" if 0 < progress.evaluated < progress.round else ""
    if progress.rmse is not None:
        return "RMSE " * has_label + format_number(progress.rmse) + place
    return "" if progress.accuracy is None else "accuracy " * has_label + f"{100 * progress.accuracy:.2f}%{place}"


class ProgressBars(ProgressDisplay):
    """Show a live bar for each run: round, accuracy, time left. Hide the oldest finished runs where room lacks."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = make_console(stderr=True)
        self._has_label = console.width >= MIN_COLUMNS_LABEL
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(bar_width=24)] if console.width >= MIN_COLUMNS_BARS else []),
            MofNCompleteColumn(),
            TextColumn(f"{{task.fields[score]:>{16 if self._has_label else 7}}}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )

    def add_run(self, title: str, rounds: int) -> ProgressCallback:
        visible_tasks = [task for task in self._bars.tasks if task.visible]
        excess = len(visible_tasks) + 2 - self._bars.console.height  # the last line stays free
        for finished in [task for task in visible_tasks if task.finished][: max(excess, 0)]:
            self._bars.update(finished.id, visible=False)
        task = self._bars.add_task(title, total=rounds, score="")

        def show(progress: "Progress") -> None:
            score = _format_score(progress, has_label=self._has_label)
            self._bars.update(task, completed=progress.round, score=score)

        return show

    def print_line(self, line: str) -> None:
        self._bars.console.print(line)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def make_progress_display(*, quiet: bool) -> ProgressDisplay:
    """Return the display that fits standard error: bars, plain lines, or nothing."""
    if quiet:
        return ProgressDisplay()
    return ProgressBars() if sys.stderr.isatty() else PlainProgress()


class SpeedupEstimate:
    """Estimate of the time that several processes would save.

    P processes finish work of W seconds in `ONE_THREAD_FACTOR` W/P seconds, after `START_S` seconds to start. They pay
    if they save more than `START_S` seconds beside the start. Runs on a GPU never share it: one run often fills its
    memory.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._todo = [job for job in jobs if not job.is_finished]
        self._later_rounds = 0  # of the runs after the current one
        self._seconds, self._timed_rounds = 0.0, 0
        self._last: float | None = None
        self.pays = False

    def start_run(self, job: Job) -> None:
        """Note that a run begins; its first round prepares much, so it is not timed."""
        from ..core.hardware import resolve_device

        self._last = None
        self._todo = [one for one in self._todo if one is not job and not one.is_finished]
        self._later_rounds = sum(one.settings.rounds for one in self._todo)
        self._on_gpu = resolve_device(job.settings).type == "cuda"

    def end_round(self, progress: "Progress") -> None:
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


def train_all(
    jobs: Sequence[Job],
    should_stop: ShouldStop,
    display: ProgressDisplay,
    *,
    scratch: Path,
    keep_going: bool = True,
    processes: int | Literal["auto"] = "auto",
    on_failure: Callable[[FailedRun], None] = lambda _: None,
) -> "tuple[list[Result], list[FailedRun]]":
    """Train all runs, or read finished ones; return results and failures, each in the order of the jobs.

    The numbers do not depend on the number of processes. `auto` begins in this process and starts more once that saves
    time. Runs on Ray follow one another, because the actors take the cores. `scratch` is for data that processes share.
    With `keep_going`, the other runs are trained after one diverged or its process was killed. Checkpoints stay after a
    `StoppedError`.
    """
    runs = _JobRunner(jobs, should_stop, display, keep_going, on_failure)
    if on_ray := [job for job in jobs if job.settings.execution.ray and not job.is_finished]:
        from ..training.backends.ray import connect_ray

        with connect_ray(on_ray[0].settings):  # once for all runs
            runs.train_in_sequence(may_leave=False)
        return runs.collect()
    if processes == "auto" or min(processes, runs.n_unfinished) < 2:
        runs.train_in_sequence(may_leave=processes == "auto")
    if runs.remaining:
        maximum = limit_to_memory(count_available_cores()) if processes == "auto" else processes
        runs.train_in_parallel(min(maximum, runs.n_unfinished), scratch)
    return runs.collect()


@dataclass
class _JobRunner:
    """The jobs, and the outcome of each job that is done."""

    jobs: Sequence[Job]
    should_stop: ShouldStop
    display: ProgressDisplay
    keep_going: bool
    on_failure: Callable[[FailedRun], None]

    def __post_init__(self) -> None:
        self.remaining = list(range(len(self.jobs)))
        self._outcomes: dict[int, Result | FailedRun] = {}
        self._callbacks: dict[int, ProgressCallback] = {}

    @property
    def n_unfinished(self) -> int:
        return sum(not self.jobs[i].is_finished for i in self.remaining)

    def get_callback(self, i: int) -> ProgressCallback:
        if i not in self._callbacks:
            self._callbacks[i] = self.display.add_run(self.jobs[i].title, self.jobs[i].settings.rounds)
        return self._callbacks[i]

    def _record_failure(self, i: int, error: RunError) -> None:
        if not self.keep_going:
            raise error
        job, is_diverged = self.jobs[i], isinstance(error, DivergedError)
        split = int(job.federation.partition.get("split", 0))
        failure = FailedRun(job.name, job.settings.seed, str(error), job.folder, is_diverged, split)
        self._outcomes[i] = failure
        self.remaining.remove(i)
        self.on_failure(failure)

    def _record_result(self, i: int, result: "Result") -> None:
        # A comparison adds no clients afterwards, and server states of many methods can be large.
        self._outcomes[i] = replace(result, trained_server=None)
        self.remaining.remove(i)

    def train_in_sequence(self, *, may_leave: bool) -> None:
        """Train all jobs in this process; if `may_leave`, return once several processes would save time."""
        estimate = SpeedupEstimate([self.jobs[i] for i in self.remaining]) if may_leave else None
        for i in tuple(self.remaining):
            job = self.jobs[i]
            if self.should_stop():
                raise StoppedError(f"stopped before {job.name}")
            show = self.get_callback(i)
            if estimate:
                estimate.start_run(job)

            def on_progress(progress: "Progress", show: ProgressCallback = show) -> None:
                show(progress)
                if estimate:
                    estimate.end_round(progress)

            try:
                result = job.train(on_progress, lambda: self.should_stop() or bool(estimate and estimate.pays))
            except DivergedError as error:
                self._record_failure(i, error)
                continue
            if result.is_finished:
                self._record_result(i, result)
            elif self.should_stop():
                raise StoppedError(f"stopped after round {result.rounds} of {job.settings.rounds}")
            elif estimate and estimate.pays:
                return
            else:
                raise _describe_stop(job)

    def train_in_parallel(self, n_processes: int, scratch: Path) -> None:
        """Train the remaining jobs in worker processes, which share their data by the folder `scratch`."""
        import torch

        from ..runs.result import Result
        from .pool import run_in_processes

        threads = max(1, min(torch.get_num_threads(), count_available_cores() // n_processes))
        each = f"{threads} thread{'s' * (threads > 1)} each"
        self.display.print_line(f"training {self.n_unfinished} runs in {n_processes} processes, {each}")

        def on_end(i: int, error: RunError | None) -> None:
            if error:
                self._record_failure(i, error)
            else:
                self._record_result(i, Result.load(self.jobs[i].folder))

        jobs = {i: self.jobs[i] for i in self.remaining}
        run_in_processes(jobs, n_processes, threads, self.should_stop, self.get_callback, on_end, scratch)
        if self.remaining and not self.should_stop():
            raise _describe_stop(self.jobs[self.remaining[0]])
        if self.remaining:
            raise StoppedError(f"stopped with {len(self.jobs) - len(self.remaining)} of {len(self.jobs)} runs done")

    def collect(self) -> "tuple[list[Result], list[FailedRun]]":
        outcomes = [self._outcomes[i] for i in range(len(self.jobs))]
        failed = [one for one in outcomes if isinstance(one, FailedRun)]
        return [one for one in outcomes if not isinstance(one, FailedRun)], failed


def _describe_stop(job: Job) -> ConfigError:
    return ConfigError(
        f"{job.name}: a callback stopped the run; a comparison trains every run to its last round, so leave the "
        "callback out, and give fewer rounds, or early_stopping, which chooses each client's round"
    )
