"""Tune methods from Python, as `--tune` does on the command line, without the runs that follow."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ..core.io import read_json
from ..core.lock import lock_folder
from ..core.metrics import METRICS, MetricName
from .compare import plan_from_python
from .config import ExperimentKeywords
from .output import OutputOptions, check_run_folder
from .progress import make_progress_display
from .session import InterruptHandler
from .tuning import LOG_FILE, TUNING_FOLDER, Tuning, tune_plan

if TYPE_CHECKING:
    from ..data import Federation


@dataclass(frozen=True)
class TunedMethod:
    """The choice for one method.

    Attributes:
        algorithm: name of the method.
        lr: the chosen learning rate.
        options: the chosen options of the method; for `fit` and `compare`.
        score: validation score of the choice in its last step, in the unit of the metric.
        metric: name of the metric.
        is_at_edge: whether the learning rate is the smallest or largest one tried; then tune again with another `lr`.
        trials: all trials, in the order of training: rounds, lr, options and score, None where training diverged.
    """

    algorithm: str
    lr: float
    options: Mapping[str, Any]
    score: float
    metric: MetricName
    is_at_edge: bool
    trials: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        """Write the choice and its score in one line."""
        options = "".join(f", {key}={value}" for key, value in self.options.items())
        edge = ", at the end of the grid" if self.is_at_edge else ""
        score = METRICS[self.metric].format(self.score)
        return f"{self.algorithm}: lr={self.lr:.3g}{options} (validation {self.metric} {score}{edge})"


def tune(
    data: "str | Path | Federation",
    algorithms: Sequence[str] | str,
    model: str = "mlr",
    *,
    budget: int = 5,
    options: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    processes: int | Literal["auto"] = "auto",
    quiet: bool = True,
    **settings: Unpack[ExperimentKeywords],
) -> dict[str, TunedMethod]:
    """Choose the learning rate and the own options of methods by validation data, each with the same budget.

    Args:
        data: name of a data set, path of a table, or a federation made in Python.
        algorithms: names of methods, or "file.py:factory" of your own, whose learning rate is tuned.
        model: name of the model, or "file.py:factory".
        budget: full runs that each method may spend.
        options: options of methods that are not tuned, and of models, data and partitions, such as
            `{"fedmcsa": {"sigma": 20}}`.
        out: folder for the log of all trials, new or empty; without it, nothing is kept.
        processes: runs to train at the same time.
        quiet: show no progress.
        settings: everything else that `compare` takes; `lr=...` is the middle of the grid of learning rates.

    Returns:
        Method -> its choice. The test rows of the data are in no part of the tuning.

    Raises:
        ConfigError, DataError, ModelError: options are wrong, or the data cannot be used.
        RunError: the folder is in use, or training diverged with every combination of a method.

    Examples:
        >>> import fedattune
        >>> chosen = fedattune.tune("digits", "local", budget=1, partition="dirichlet", clients=5, rounds=3, lr=0.1)
        >>> chosen["local"].options, len(chosen["local"].trials), 0 < chosen["local"].score <= 1
        ({}, 5, True)
    """
    settings["tune"] = budget
    plan, _ = plan_from_python(data, algorithms, model, options, settings, "tune")
    output = OutputOptions.model_validate({"processes": processes, "quiet": quiet})
    with tempfile.TemporaryDirectory(prefix="fedattune-") as scratch:
        folder = Path(out) if out is not None else Path(scratch) / "run"
        if out is not None:
            check_run_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (
            InterruptHandler() as should_stop,
            lock_folder(folder, is_new=True),
            make_progress_display(quiet=output.quiet) as display,
        ):
            tuning = tune_plan(plan, budget, folder, should_stop, display, output.processes)
        log = read_json(folder / TUNING_FOLDER / LOG_FILE)
    metric = plan.metric or "accuracy"
    return {name: _describe_choice(name, tuning, log[name], metric) for name in plan.algorithms}


def _describe_choice(name: str, tuning: Tuning, log: Sequence[Mapping[str, Any]], metric: MetricName) -> TunedMethod:
    """Put the choice of a method and its trials together."""
    chosen = tuning.choices[name]
    trials = [
        {
            "rounds": one["rounds"],
            "lr": one["lr"],
            "options": {key: value for key, value in one.items() if key not in ("rounds", "lr", "score")},
            "score": None if one["score"] is None else METRICS[metric].sign * one["score"],
        }
        for one in log
    ]
    own = [
        one["score"] for one in trials if math.isclose(one["lr"], chosen.lr) and one["options"] == dict(chosen.options)
    ]
    return TunedMethod(name, chosen.lr, dict(chosen.options), own[-1], metric, name in tuning.is_at_edge, trials)
