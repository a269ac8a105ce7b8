"""Job: one run of an experiment, and how it can fail."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import RunError

if TYPE_CHECKING:
    from ..core.settings import Settings
    from ..data import Federation
    from ..training.context import Progress
    from ..training.result import Result

ProgressCallback = Callable[["Progress"], None]
"""Is told of every round of one run."""


ShouldStop = Callable[[], bool]


class StoppedError(Exception):
    """The user asked to stop; what was done so far is kept."""


class WorkerKilledError(RunError):
    """The process that trained a run is gone."""


class FailedRun(NamedTuple):
    """A run that came to no result."""

    algorithm: str
    seed: int
    error: str
    folder: Path
    diverged: bool  # otherwise its process was killed, and the run can be resumed


@dataclass(frozen=True)
class Job:
    """One run: what `fit` takes, and what it is called on the screen.

    Attributes:
        title: what it is called; methods of one seed need not say which.
        folder: where it is kept; what is there already goes on, and a finished run is not trained again.
        tensorboard: whether event files are written into the folder too.

    """

    title: str
    algorithm: str
    federation: "Federation"
    model: str
    settings: "Settings"
    folder: Path
    options: Mapping[str, Any]
    model_options: Mapping[str, Any]
    tensorboard: bool = False

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        return (self.folder / "result.json").exists()

    def train(self, tell: ProgressCallback, stop: ShouldStop) -> "Result":
        """Train it, in this process; the result is unfinished where `stop` said yes."""
        from ..training.fit import fit

        if self.folder.is_dir() and not (self.folder / "config.json").exists():
            shutil.rmtree(self.folder)  # killed while it was being made: there is nothing in it to go on with
        return fit(
            self.algorithm,
            self.federation,
            self.model,
            options=self.options,
            model_options=self.model_options,
            out=self.folder,
            resume=self.folder.is_dir(),
            watch=tell,
            stop=stop,
            tensorboard=self.folder if self.tensorboard else None,
            settings=self.settings,
        )
