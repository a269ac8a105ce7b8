"""Show the progress of runs: live bars on a terminal, plain lines elsewhere, nothing when quiet."""

import sys
import time
from typing import TYPE_CHECKING, Self

from ..analysis.output.tables import make_console
from ..core.metrics import format_number
from ..core.text import make_printable
from .job import ProgressCallback

if TYPE_CHECKING:
    from ..runs.context import Progress


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
    """Format the accuracy or RMSE; empty before the first evaluation."""
    if progress.rmse is not None:
        return "RMSE " * has_label + format_number(progress.rmse)
    return "" if progress.accuracy is None else "accuracy " * has_label + f"{100 * progress.accuracy:.2f}%"


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
