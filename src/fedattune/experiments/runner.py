"""Independent runs: what each one is, and how all are trained, one after another or beside each other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import DivergedError, RunError
from ..core.hardware import available_cores, processes_in_memory
from .autoscale import SpeedupEstimate
from .job import FailedRun, Job, ProgressCallback, ShouldStop, StoppedError
from .progress import ProgressDisplay

if TYPE_CHECKING:
    from ..training.context import Progress
    from ..training.result import Result


def train_all(
    jobs: Sequence[Job],
    stop: ShouldStop,
    shown: ProgressDisplay,
    *,
    scratch: Path,
    go_on: bool = True,
    processes: int | Literal["auto"] = "auto",
    on_failure: Callable[[FailedRun], None] = lambda _: None,
) -> "tuple[list[Result], list[FailedRun]]":
    """Train all runs, with the same numbers in any number of processes; results and failures in the runs' order.

    `auto` begins in this process, and spreads over more once it is clear that this saves time; runs whose clients
    are on Ray come one after another. `scratch` is a folder in which data can lie for the processes to share. Where
    `go_on`, a run that diverged, or whose process was killed, leaves the others alone; `on_failure` is told of it
    at once.

    Raises:
        StoppedError: a stop was asked for; checkpoints are kept.
        DivergedError, KilledError: a run failed, and the others are not to go on.

    """
    runs = _JobRunner(jobs, stop, shown, go_on, scratch, on_failure)
    if spread_elsewhere := [one for one in jobs if one.settings.engine == "ray" and not one.finished]:
        from ..training.backends.ray import connect_ray

        with connect_ray(spread_elsewhere[0].settings):  # once for all, whose actors take the cores already
            runs.one_after_another(spread=False)
        return runs.outcome()
    if processes == "auto" or min(processes, runs.n_left) < 2:
        runs.one_after_another(spread=processes == "auto")
    if runs.left:
        most = processes_in_memory(available_cores()) if processes == "auto" else processes
        runs.beside_each_other(min(most, runs.n_left))
    return runs.outcome()


class _JobRunner:
    """The runs, and what became of those that are done."""

    def __init__(
        self,
        jobs: Sequence[Job],
        stop: ShouldStop,
        shown: ProgressDisplay,
        go_on: bool,
        scratch: Path,
        on_failure: Callable[[FailedRun], None],
    ) -> None:
        self.jobs, self.stop, self.shown, self.go_on, self.scratch = jobs, stop, shown, go_on, scratch
        self.on_failure = on_failure
        self.left = list(range(len(jobs)))
        self.done: dict[int, Result | FailedRun] = {}
        self.tells: dict[int, ProgressCallback] = {}

    @property
    def n_left(self) -> int:
        """How many are still to be trained."""
        return sum(not self.jobs[i].finished for i in self.left)

    def tell(self, i: int) -> ProgressCallback:
        """What is to be told of the rounds of run i."""
        if i not in self.tells:
            self.tells[i] = self.shown.start(self.jobs[i].title, self.jobs[i].settings.rounds)
        return self.tells[i]

    def failed(self, i: int, error: RunError) -> None:
        """Note that run i came to no result."""
        if not self.go_on:
            raise error
        job, diverged = self.jobs[i], isinstance(error, DivergedError)
        failure = FailedRun(job.algorithm, job.settings.seed, str(error), job.folder, diverged)
        self.done[i] = failure
        self.left.remove(i)
        self.on_failure(failure)

    def finish(self, i: int, result: "Result") -> None:
        """Note the result of run i."""
        # A comparison lets nobody join, and server states of many methods can be large.
        self.done[i] = replace(result, remains=None)
        self.left.remove(i)

    def one_after_another(self, *, spread: bool) -> None:
        """Train all in this process; or, where `spread`, as long as no more processes are called for."""
        estimate = SpeedupEstimate([self.jobs[i] for i in self.left]) if spread else None
        for i in tuple(self.left):
            if self.stop():
                raise StoppedError(f"stopped before {self.jobs[i].algorithm}")
            last: list[Progress] = []
            tell, job = self.tell(i), self.jobs[i]
            if estimate:
                estimate.start(job)

            def watch(
                progress: "Progress", tell: ProgressCallback = tell, last: "list[Progress]" = last
            ) -> None:
                last[:] = [progress]
                tell(progress)
                if estimate:
                    estimate.round(progress)

            try:
                result = job.train(watch, lambda: self.stop() or bool(estimate and estimate.pays))
            except DivergedError as error:
                self.failed(i, error)
                continue
            if result.finished:
                self.finish(i, result)
            elif self.stop():
                raise StoppedError(f"stopped after round {last[0].round} of {last[0].rounds}")
            else:
                return

    def beside_each_other(self, n: int) -> None:
        """Train what is left in `n` processes."""
        import torch

        from ..training.result import Result
        from .pool import run_in_processes

        threads = max(1, min(torch.get_num_threads(), available_cores() // n))
        each = f"{threads} thread{'s' * (threads > 1)} each"
        self.shown.say(f"training {self.n_left} runs in {n} processes, {each}")

        def ended(i: int, error: RunError | None) -> None:
            if error:
                self.failed(i, error)
            else:
                self.finish(i, Result.load(self.jobs[i].folder))

        todo = {i: self.jobs[i] for i in self.left}
        run_in_processes(todo, n, threads, self.stop, self.tell, ended, self.scratch)
        if self.left:
            raise StoppedError(
                f"stopped with {len(self.jobs) - len(self.left)} of {len(self.jobs)} runs done"
            )

    def outcome(self) -> "tuple[list[Result], list[FailedRun]]":
        """Results and failures in the order of the runs."""
        found = [self.done[i] for i in range(len(self.jobs))]
        failed = [one for one in found if isinstance(one, FailedRun)]
        return [one for one in found if not isinstance(one, FailedRun)], failed
