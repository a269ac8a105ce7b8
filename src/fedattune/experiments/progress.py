"""Progress of runs: live bars on a terminal, a plain line now and then elsewhere, nothing when quiet."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .job import ProgressCallback

if TYPE_CHECKING:
    from ..training.context import Progress


class ProgressDisplay:
    """What is told about several runs, after or beside each other; this one shows nothing."""

    def start(self, title: str, rounds: int) -> ProgressCallback:
        """A run begins; what is returned is to be told of its rounds."""
        return lambda _: None

    def say(self, sentence: str) -> None:
        """Show a sentence on how the runs go."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainProgress(ProgressDisplay):
    """One plain line about every tenth of the rounds."""

    def start(self, title: str, rounds: int) -> ProgressCallback:
        """A run begins."""
        began, done = time.monotonic(), 0

        def tell(progress: "Progress") -> None:
            nonlocal done
            done += 1  # not progress.round: a resumed run begins in the middle
            tenth = 10 * progress.round // progress.rounds
            if tenth > 10 * (progress.round - 1) // progress.rounds:
                left = (time.monotonic() - began) / done * (progress.rounds - progress.round)
                self.say(f"{title}: {_format_round(progress, left)}")

        return tell

    def say(self, sentence: str) -> None:
        """One line on standard error."""
        print(sentence, file=sys.stderr, flush=True)


def _format_round(progress: "Progress", left: float) -> str:
    accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.2f}%"
    wait = f", about {left:.0f} s left" if left >= 1 else ""
    return f"round {progress.round} of {progress.rounds}{accuracy}{wait}"


MIN_COLUMNS_BARS, MIN_COLUMNS_LABEL = 76, 60
"""Characters of a terminal from which there are bars, and from which accuracy is called by its name."""


class ProgressBars(ProgressDisplay):
    """A live bar for each run: round, accuracy, time left; those of finished runs go when the terminal is full."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._fair = console.width >= MIN_COLUMNS_LABEL
        self._bars = Progress(
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=24)] if console.width >= MIN_COLUMNS_BARS else []),
            MofNCompleteColumn(),
            TextColumn(f"{{task.fields[accuracy]:>{16 if self._fair else 7}}}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )

    def start(self, title: str, rounds: int) -> ProgressCallback:
        """A run begins."""
        self._make_room()
        task = self._bars.add_task(title, total=rounds, accuracy="")
        name = "accuracy " * self._fair

        def tell(progress: "Progress") -> None:
            accuracy = "" if progress.accuracy is None else f"{name}{100 * progress.accuracy:.2f}%"
            self._bars.update(task, completed=progress.round, accuracy=accuracy)

        return tell

    def _make_room(self) -> None:
        """Let bars of finished runs go, the first ones first, until one more fits."""
        shown = [task for task in self._bars.tasks if task.visible]
        full = len(shown) + 2 - self._bars.console.height  # the last line stays free
        for task in [task for task in shown if task.finished][: max(full, 0)]:
            self._bars.update(task.id, visible=False)

    def say(self, sentence: str) -> None:
        """One line above the bars."""
        self._bars.console.print(sentence, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def make_progress_display(*, quiet: bool) -> ProgressDisplay:
    """The fitting way to show progress on standard error."""
    if quiet:
        return ProgressDisplay()
    return ProgressBars() if sys.stderr.isatty() else PlainProgress()
