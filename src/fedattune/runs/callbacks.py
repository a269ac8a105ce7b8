"""Callbacks: objects that follow a run, log it elsewhere, or stop it.

`Callback` says when each method is called. The interface follows Keras and XGBoost: methods that do nothing by default,
and True from a round to stop. TensorBoard's callback is in `tensorboard.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.errors import ConfigError, name_kind, summarize_error
from ..core.io import flatten_tree, write_text
from ..core.own_code import CODE_KEYS, make_portable
from ..models.files import SOURCE_KEY
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
        """Method, seed, and the split if it is not the first, which name the run."""
        split = self.config["partition"].get("split", 0)
        return f"{self.config['algorithm']}, seed {self.config['seed']}" + f", split {split}" * bool(split)


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


class _Tracker(Callback, ABC):
    """Log to a tracker. A resumed run continues its run there, whose id is in the run folder."""

    _name: ClassVar[str]
    _module: ClassVar[str]
    _id_option: ClassVar[str]
    _advice: ClassVar[str]
    options: Mapping[str, Any]

    def on_fit_start(self, run: StartedRun) -> None:
        """Start a run of the tracker with what defines the run, or continue the tracker's run of a resumed one.

        Raises:
            ConfigError: the tracker cannot be reached, or refuses the run.
        """
        file = run.folder / f"{self._module}-run.txt" if run.folder else None
        known = None
        if file and file.is_file() and self._id_option not in self.options:
            known = file.read_text("utf-8", errors="replace")
        try:
            id_ = self._open(run, known)
        except Exception as error:
            raise ConfigError(
                f"{self._name}: {summarize_error(error)}; {self._advice}, or leave --{self._module} out"
            ) from error
        if file and id_:
            write_text(file, id_)

    @abstractmethod
    def _open(self, run: StartedRun, known: str | None) -> str | None:
        """Continue the run with a known id, or start one if there is none; return the id if it can be continued."""


class MLflow(_Tracker):
    """Log settings, scores and the result of a run to MLflow.

    Args:
        experiment: name of the experiment in MLflow.
        options: keywords of `mlflow.start_run`, such as `run_id` of a run to be continued.

    Raises:
        ConfigError: MLflow is not installed.
    """

    _name, _module, _id_option = "MLflow", "mlflow", "run_id"
    _advice = "check MLFLOW_TRACKING_URI"

    def __init__(self, experiment: str = "fedattune", **options: Any) -> None:
        check_installed(self._module, self._name)
        self.experiment, self.options = experiment, options
        self._is_open = False

    def _open(self, run: StartedRun, known: str | None) -> str:
        mlflow = import_module("mlflow")
        mlflow.set_experiment(self.experiment)
        if known:
            with suppress(Exception):  # the server does not know the run: the folder or the server is another one
                mlflow.start_run(**{"run_id": known, **self.options})
                self._is_open = True
                return known  # with its parameters, which MLflow lets nobody change
        started = mlflow.start_run(**{"run_name": run.title, **self.options})
        self._is_open = True
        mlflow.log_params({key: str(value) for key, value in _hide_folders(run.config).items()})
        return str(started.info.run_id)

    def on_evaluate(self, round_: int, scores: Scores) -> None:
        """Log the scores; the step is the round."""
        import_module("mlflow").log_metrics(flatten_tree(scores), step=round_)

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


class WandB(_Tracker):
    """Log settings, scores and the result of a run to Weights & Biases.

    Args:
        project: name of the project.
        options: keywords of `wandb.init`, such as `id` and `resume` of a run to be continued.

    Raises:
        ConfigError: Weights & Biases is not installed.
    """

    _name, _module, _id_option = "Weights & Biases", "wandb", "id"
    _advice = "check the connection and wandb login"

    def __init__(self, project: str = "fedattune", **options: Any) -> None:
        check_installed(self._module, self._name)
        self.project, self.options = project, options
        self._run: Any = None

    def _open(self, run: StartedRun, known: str | None) -> str | None:
        wandb = import_module("wandb")
        group = run.folder.parent.name if run.folder else None
        defaults = {"name": run.title, "group": group, "config": _hide_folders(run.config)}
        # A run that the user has open stays open; otherwise this one is `wandb.run`, for other callbacks.
        given = {**defaults, "reinit": True if wandb.run is None else "create_new", **self.options}
        if known:
            with suppress(Exception):  # the id of a run that was deleted cannot be used again
                self._run = wandb.init(project=self.project, **{"id": known, "resume": "allow", **given})
                return known
        self._run = wandb.init(project=self.project, **given)
        # Of two offline parts with one id, the later one could replace the first when they are uploaded.
        return None if self._run.offline else str(self._run.id)

    def on_evaluate(self, round_: int, scores: Scores) -> None:
        """Log the scores; the step is the round."""
        self._run.log(flatten_tree(scores), step=round_)

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


def _hide_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the settings of a run, with files of custom code named without their folders."""
    shown = dict(config)
    for key in {SOURCE_KEY, *CODE_KEYS} & shown.keys():
        if isinstance(shown[key], str):
            shown[key] = ",".join(make_portable(name.strip()) for name in shown[key].split(","))
    return shown
