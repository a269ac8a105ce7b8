"""Progress of a run: a live bar on a terminal, a plain line now and then elsewhere, nothing when quiet."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ..trainer import Progress


class Watch:
    """What is told about one run after another; this one shows nothing and remembers the last round."""

    def __init__(self) -> None:
        self.title, self.rounds, self.round = "", 0, 0

    def start(self, title: str, rounds: int) -> None:
        """A run begins."""
        self.title, self.rounds, self.round = title, rounds, 0

    def __call__(self, progress: "Progress") -> None:
        """A round ended."""
        self.round = progress.round

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Lines(Watch):
    """One plain line about every tenth of the rounds."""

    def start(self, title: str, rounds: int) -> None:
        """A run begins."""
        super().start(title, rounds)
        self._began, self._done = time.monotonic(), 0

    def __call__(self, progress: "Progress") -> None:
        """A round ended."""
        super().__call__(progress)
        self._done += 1  # not progress.round: a resumed run begins in the middle
        tenth = 10 * progress.round // progress.rounds
        if tenth > 10 * (progress.round - 1) // progress.rounds:
            print(f"{self.title}: {self._line(progress)}", file=sys.stderr, flush=True)

    def _line(self, progress: "Progress") -> str:
        accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.2f}%"
        left = (time.monotonic() - self._began) / self._done * (progress.rounds - progress.round)
        wait = f", about {left:.0f} s left" if left >= 1 else ""
        return f"round {progress.round} of {progress.rounds}{accuracy}{wait}"


class Bar(Watch):
    """A live bar for each run: round, accuracy, time left."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]:>16}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(stderr=True),
        )

    def start(self, title: str, rounds: int) -> None:
        """A run begins."""
        super().start(title, rounds)
        self._task = self._bars.add_task(title, total=rounds, accuracy="")

    def __call__(self, progress: "Progress") -> None:
        """A round ended."""
        super().__call__(progress)
        accuracy = "" if progress.accuracy is None else f"accuracy {100 * progress.accuracy:.2f}%"
        self._bars.update(self._task, completed=progress.round, accuracy=accuracy)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def watch(*, quiet: bool) -> Watch:
    """The fitting way to show progress on standard error."""
    if quiet:
        return Watch()
    return Bar() if sys.stderr.isatty() else Lines()
