"""Job: one run of an experiment, and how it can fail."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import RunError

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..core.settings import Settings
    from ..data import Federation
    from ..runs.callbacks import Callback
    from ..runs.context import Progress
    from ..runs.result import Result

ProgressCallback = Callable[["Progress"], None]
"""Receives the progress of one run after every round."""
ShouldStop = Callable[[], bool]
"""Returns True once the user asks to stop."""


class StoppedError(Exception):
    """The user asked to stop; finished runs and checkpoints are kept."""


class WorkerKilledError(RunError):
    """The process that trained a run is gone."""


class FailedRun(NamedTuple):
    """A run without a result: training diverged, or its process was killed and the run can be resumed."""

    algorithm: str
    seed: int
    error: str
    folder: Path
    diverged: bool
    split: int = 0


class Combination(NamedTuple):
    """A learning rate and the tuned options of a method."""

    lr: float
    options: Mapping[str, Any]

    def describe(self) -> str:
        """Write the combination as on the command line."""
        return ", ".join([f"lr={self.lr:.3g}", *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True)
class Job:
    """One run of a plan: the arguments of `fit`, and a title for the terminal.

    An interrupted run in `folder` is resumed. `source` refers to the factory of a custom method.
    """

    title: str
    name: str
    algorithm: "Algorithm"
    federation: "Federation"
    model: str
    settings: "Settings"
    folder: Path
    options: Mapping[str, Any]
    model_options: Mapping[str, Any]
    callbacks: "tuple[Callback, ...]" = ()
    source: str | None = None

    @property
    def is_finished(self) -> bool:
        """True if the run folder holds the result."""
        return (self.folder / "result.json").exists()

    def train(self, on_progress: ProgressCallback, should_stop: ShouldStop) -> "Result":
        """Train the run in this process; the result is unfinished if `should_stop` returned True."""
        from ..runs.callbacks import OnRound
        from ..training.fit import prepare_run, train_run

        def on_round(progress: "Progress") -> bool:
            on_progress(progress)
            return should_stop()

        run = prepare_run(
            self.algorithm,
            self.federation,
            self.model,
            name=self.name,
            source=self.source,
            options=self.options,
            model_options=self.model_options,
            settings=self.settings,
            check=False,  # the plan has done that
        )
        return train_run(
            run,
            out=self.folder,
            resume=(self.folder / "config.json").exists(),  # a kill may have left the folder alone
            callbacks=(*self.callbacks, OnRound(on_round)),
        )
