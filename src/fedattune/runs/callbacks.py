"""Callbacks: objects that follow a run, log it elsewhere, or stop it.

`Callback` says when each method is called. The interface follows Keras and XGBoost: methods that do nothing by default,
and True from a round to stop. TensorBoard's callback is in `tensorboard.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, name_kind
from .context import Progress, RunContext
from .metrics import Metrics
from .store import RunStore

if TYPE_CHECKING:
    from .result import Result

Scores = Mapping[str, Metrics]
"""Part and point, such as `test_trained` -> the numbers over clients, such as `acc_uniform`."""


@dataclass(frozen=True)
class StartedRun:
    """The run that a callback follows."""

    config: Mapping[str, Any]  # all that defines the run: `algorithm`, `data`, `lr`, `seed` and so on
    folder: Path | None  # None if nothing is written
    context: RunContext  # the method, the settings, the federation and the numbers of the clients
    store: RunStore  # scores, traffic and mixing matrices of all rounds so far
    seconds: float  # wall-clock time of the rounds that an interrupted run had done before

    @property
    def title(self) -> str:
        """Method and seed, which name the run."""
        return f"{self.config['algorithm']}, seed {self.config['seed']}"


class Callback:
    """Follow a run; override the methods that you need.

    Errors in a callback end the run. Where several runs train at the same time, each process has a copy.
    """

    def on_fit_start(self, run: StartedRun) -> None:
        """Prepare, before the first round; not called for a run that is finished already."""

    def on_evaluate(self, round_: int, scores: Scores) -> None:
        """Receive the scores of an evaluated round, before `on_round_end` of this or of the next round."""

    def on_round_end(self, progress: Progress, server_state: Any) -> bool | None:
        """Receive the position of the run, and the server's state, which must not be changed.

        Returns:
            True to stop: the run is saved and returned unfinished, and can be resumed.
        """

    def on_fit_end(self, result: "Result") -> None:
        """Receive the result; `result.is_finished` is False if a callback stopped the run."""

    def close(self) -> None:
        """Close files and connections; called at last, also after an error."""


def check_callbacks(callbacks: object) -> None:
    """Check before a run that these are callbacks: their errors at its end would hide the first one."""
    wrong = [callbacks]
    if isinstance(callbacks, Sequence):
        wrong = [one for one in callbacks if not isinstance(one, Callback)]
    if wrong:
        raise ConfigError(
            f"callbacks: got {name_kind(wrong[0])}, expected a list of objects whose classes derive from "
            "fedattune.Callback; for a function, write OnRound(function)"
        )


class OnRound(Callback):
    """Call a function after every round; it may return True to stop.

    Examples:
        >>> import fedattune
        >>> data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
        >>> show = fedattune.OnRound(lambda progress: print(progress.round, "of", progress.rounds))
        >>> result = fedattune.fit(data, "fedavg", rounds=2, lr=0.1, callbacks=[show])
        1 of 2
        2 of 2
    """

    def __init__(self, function: Callable[[Progress], bool | None]) -> None:
        self.function = function

    def on_round_end(self, progress: Progress, server_state: Any) -> bool | None:
        """Call the function."""
        return self.function(progress)


class EarlyStop(Callback):
    """Stop once the mean validation loss has not decreased for some evaluations.

    The run ends early; which round's model each client keeps is the setting `early_stopping`.

    Args:
        patience: evaluations without a new minimum after which the run stops.
        min_decrease: decrease of the loss that counts.
    """

    def __init__(self, patience: int = 5, min_decrease: float = 0.0) -> None:
        if patience < 1:
            raise ConfigError(f"EarlyStop: got patience {patience}, expected at least 1")
        self.patience, self.min_decrease = patience, min_decrease

    def on_fit_start(self, run: StartedRun) -> None:
        """Forget an earlier run.

        Raises:
            ConfigError: the federation has no validation data.
        """
        if not run.context.federation.sizes("validation").sum():
            raise ConfigError("EarlyStop needs validation data; make the federation with validation=0.2")
        self._point = f"validation_{run.context.algorithm.evaluation_point}"
        self._best, self._evaluations = math.inf, 0

    def on_evaluate(self, round_: int, scores: Scores) -> None:
        """Compare the loss with the smallest one so far."""
        if self._point not in scores:
            return
        loss = scores[self._point]["loss_uniform"]
        self._evaluations += 1
        if loss < self._best - self.min_decrease:
            self._best, self._evaluations = loss, 0

    def on_round_end(self, progress: Progress, server_state: Any) -> bool:
        """Stop once the patience is over."""
        return self._evaluations >= self.patience


class MLflow(Callback):
    """Log settings, scores and the result of a run to MLflow.

    Args:
        experiment: name of the experiment in MLflow.
        options: keywords of `mlflow.start_run`, such as `run_id` of a run to be continued.

    Raises:
        ConfigError: MLflow is not installed.
    """

    def __init__(self, experiment: str = "fedattune", **options: Any) -> None:
        check_installed("mlflow", "MLflow")
        self.experiment, self.options = experiment, options
        self._is_open = False

    def on_fit_start(self, run: StartedRun) -> None:
        """Start a run of MLflow, and log what defines it."""
        mlflow = import_module("mlflow")
        mlflow.set_experiment(self.experiment)
        mlflow.start_run(**{"run_name": run.title, **self.options})
        self._is_open = True
        mlflow.log_params({key: str(value) for key, value in run.config.items()})

    def on_evaluate(self, round_: int, scores: Scores) -> None:
        """Log the scores; the step is the round."""
        import_module("mlflow").log_metrics(_flatten(scores), step=round_)

    def on_fit_end(self, result: "Result") -> None:
        """Log the final numbers, and end the run of MLflow."""
        mlflow = import_module("mlflow")
        mlflow.log_metrics({f"final/{key}": value for key, value in result.metrics.items()})
        mlflow.end_run("FINISHED" if result.is_finished else "KILLED")
        self._is_open = False

    def close(self) -> None:
        """End the run of MLflow as failed if it is still open."""
        if self._is_open:
            self._is_open = False
            import_module("mlflow").end_run("FAILED")


class WandB(Callback):
    """Log settings, scores and the result of a run to Weights & Biases.

    Args:
        project: name of the project.
        options: keywords of `wandb.init`, such as `id` and `resume` of a run to be continued.

    Raises:
        ConfigError: Weights & Biases is not installed.
    """

    def __init__(self, project: str = "fedattune", **options: Any) -> None:
        check_installed("wandb", "Weights & Biases")
        self.project, self.options = project, options
        self._run: Any = None

    def on_fit_start(self, run: StartedRun) -> None:
        """Start a run of Weights & Biases with what defines the run."""
        group = run.folder.parent.name if run.folder else None
        defaults = {"name": run.title, "group": group, "config": dict(run.config), "reinit": True}
        self._run = import_module("wandb").init(project=self.project, **{**defaults, **self.options})

    def on_evaluate(self, round_: int, scores: Scores) -> None:
        """Log the scores; the step is the round."""
        self._run.log(_flatten(scores), step=round_)

    def on_fit_end(self, result: "Result") -> None:
        """Log the final numbers."""
        self._run.summary.update(result.metrics)
        self._finish(0 if result.is_finished else 1)

    def close(self) -> None:
        """End the run of Weights & Biases as failed if it is still open."""
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)


def check_installed(module: str, name: str) -> None:
    """Check that an optional package is installed; FedAttune has an extra with the name of the module."""
    if find_spec(module) is None:
        raise ConfigError(f"{name} is not installed; pip install 'fedattune[{module}]', or log without it")


def _flatten(scores: Scores) -> dict[str, float]:
    return {f"{group}/{name}": value for group, numbers in scores.items() for name, value in numbers.items()}
