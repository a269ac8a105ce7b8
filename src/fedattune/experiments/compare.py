"""Compare methods, or tune them, from Python, as `fedattune compare` and `--tune` do on the command line."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ..analysis.compare import MethodRow
from ..analysis.rows import build_client_table, build_run_table, to_pandas
from ..analysis.verdict import Verdict
from ..core.errors import ConfigError, did_you_mean, name_kind
from ..core.io import read_json
from ..core.lock import lock_folder
from ..core.metrics import METRICS, MetricName
from ..core.options import list_keywords, name_keywords
from ..core.text import make_printable
from .budget import settle_budget
from .config import DATA_FIELDS, ExperimentKeywords
from .load import load_options
from .output import OutputOptions, check_run_folder
from .plan import Plan, make_plan, prepare_command
from .runner import make_progress_display
from .session import InterruptHandler, create_run_folder, train_plan
from .tuning import LOG_FILE, TUNING_FOLDER, tune_plan

if TYPE_CHECKING:
    import pandas as pd

    from ..analysis.compare import Baseline
    from ..data import Federation
    from ..runs.callbacks import Callback
    from ..runs.result import Result

RENAMED = {"options": "set", "runs": "tune"}
"""Keyword of a function -> the option that it is, if that has another name."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        verdict: whether collaborating helps, with which method, and who loses.
        rows: the table, one row per method and baseline.
        results: the runs.
        baselines: the baselines.
        notes: what a reader of the numbers should know.
        failed: a sentence for each run without a result.
        folder: the run folder; None if nothing was kept.
        rounds_to: the mean test accuracy to reach, if one was given.
    """

    verdict: Verdict
    rows: Sequence[MethodRow]
    results: "Sequence[Result]"
    baselines: "Sequence[Baseline]"
    notes: Sequence[str]
    failed: Sequence[str]
    folder: Path | None
    rounds_to: float | None = None

    def to_pandas(self, *, clients: bool = False) -> "pd.DataFrame":
        """Return a tidy data frame: one row per method, seed and split, or per client of each.

        Raises:
            ConfigError: pandas is not installed.
        """
        metric = self.rows[0].metric if self.rows else None
        if clients:
            return to_pandas(build_client_table(self.results, self.baselines, metric=metric))
        return to_pandas(build_run_table(self.results, self.baselines, metric=metric, rounds_to=self.rounds_to))

    def __str__(self) -> str:
        """Return the table, the notes and the verdict as the command prints them."""
        import io

        from ..analysis.output.tables import make_console, print_methods

        file = io.StringIO()
        if self.rows:
            print_methods(self.rows, make_console(file), self.rounds_to)
        lines = [file.getvalue().rstrip(), *(f"note: {note}" for note in self.notes), self.verdict.text]
        return make_printable("\n".join(lines))


def compare(
    data: "str | Path | Federation" = "digits",
    algorithms: Sequence[str] | str = ("local", "fedavg", "fedavg_ft", "fedmcsa", "attune"),
    model: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    callbacks: "Sequence[Callback]" = (),
    processes: int | Literal["auto"] = "auto",
    quiet: bool = True,
    **settings: Unpack[ExperimentKeywords],
) -> Comparison:
    """Train several methods on the same split, and say whether collaborating helps, and whom.

    Args:
        data: name of a data set, path of a table, or a federation made in Python.
        algorithms: names of methods, or "file.py:factory" of your own; `local` is added where it is missing.
        model: name of the model, "file.py:factory", or "package.module:factory"; by default `mlr`, or, within a
            `budget`, what validation data choose.
        options: options of methods, models, data and partitions, such as `{"fedmcsa": {"sigma": 20}}`.
        out: run folder, new or empty, which commands such as `fedattune report` read; without it, nothing is kept.
        callbacks: objects that follow each run, as for `fit`.
        processes: runs to train at the same time, each process with a copy of the callbacks; with callbacks, `auto`
            trains one after another.
        quiet: show no progress.
        settings: everything else that the command takes, with underscores: `metric="auc"`, `splits=5`, `seeds=3`,
            `tune=5`, `baseline="sklearn"`, `client_column=...`, `target=...`, `rounds=...`, `lr=...`.

    Returns:
        Verdict, table, runs and notes.

    Raises:
        ConfigError, DataError, ModelError: options are wrong, or the data cannot be used.
        RunError: the folder is in use.

    Examples:
        >>> import fedattune
        >>> found = fedattune.compare("digits", ["fedavg"], partition="dirichlet", clients=6, rounds=3, lr=0.1)
        >>> found.verdict.answer in ("yes", "no", "undecided"), [row.algorithm for row in found.rows]
        (True, ['local', 'fedavg', 'majority'])
    """
    from ..runs.callbacks import check_callbacks

    check_callbacks(callbacks)
    processes = 1 if callbacks and processes == "auto" else processes
    given = {"algorithms": algorithms, "options": options or {}, "out": out, "processes": processes}
    given |= {} if model is None else {"model": model}
    plan, output, notes = plan_from_python(compare, data, settings, **given, quiet=quiet)
    # The results still read their stores, which are open: Windows then keeps the files.
    with tempfile.TemporaryDirectory(prefix="fedattune-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run" if out is None else Path(out)
        create_run_folder(plan, folder, "compare")
        with InterruptHandler() as should_stop, lock_folder(folder):
            summary = train_plan(plan, folder, should_stop, output, is_comparison=True, callbacks=callbacks)
    assert summary.verdict
    return Comparison(
        summary.verdict,
        summary.rows,
        summary.results,
        summary.baselines,
        [*dict.fromkeys([*notes, *summary.notes])],
        [one.error for one in summary.failed],
        None if out is None else folder,
        plan.experiment.rounds_to,
    )


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
    runs: int = 5,
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
        runs: full runs that each method may spend.
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
        >>> chosen = fedattune.tune("digits", "local", runs=1, partition="dirichlet", clients=5, rounds=3, lr=0.1)
        >>> chosen["local"].options, len(chosen["local"].trials), 0 < chosen["local"].score <= 1
        ({}, 3, True)
    """
    given = {"algorithms": algorithms, "model": model, "options": options or {}, "out": out, "processes": processes}
    plan, output, _ = plan_from_python(tune, data, settings, **given, runs=runs, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="fedattune-") as scratch:
        folder = Path(scratch) / "run" if out is None else Path(out)
        with (
            InterruptHandler() as should_stop,
            lock_folder(folder, is_new=True),
            make_progress_display(quiet=output.quiet) as display,
        ):
            tuning = tune_plan(plan, runs, folder, should_stop, display, output.processes)
        log = read_json(folder / TUNING_FOLDER / LOG_FILE)
    metric = plan.metric or "accuracy"
    found = {}
    for name, (lr, tuned) in tuning.choices.items():
        trials = [
            {
                "rounds": one["rounds"],
                "lr": one["lr"],
                "options": {key: value for key, value in one.items() if key not in ("rounds", "lr", "score")},
                "score": None if one["score"] is None else METRICS[metric].sign * one["score"],
            }
            for one in log[name]
        ]
        own = [one["score"] for one in trials if math.isclose(one["lr"], lr) and one["options"] == dict(tuned)]
        found[name] = TunedMethod(name, lr, dict(tuned), own[-1], metric, name in tuning.is_at_edge, trials)
    return found


def plan_from_python(
    function: Callable[..., Any], data: "str | Path | Federation", settings: ExperimentKeywords, **given: Any
) -> tuple[Plan, OutputOptions, list[str]]:
    """Plan an experiment on named data, a table, or a federation made in Python; add notes about what was changed.

    `settings` are the keywords that `function`, which is `compare` or `tune`, collects, and `given` its own ones. Its
    rules on the methods hold: `compare` adds the baseline.
    """
    _check_names("algorithms", given["algorithms"], "names such as 'fedavg' or 'file.py:factory'")
    _check_names("model", given.get("model", ""), "a name such as 'mlr' or 'file.py:factory'")
    federation = None if isinstance(data, str | Path) else data
    if federation is not None and settings.get("splits", 1) != 1:
        raise ConfigError("splits: a federation made in Python has its parts already; give one federation per call")
    if federation is not None and (needless := sorted(settings.keys() & DATA_FIELDS)):
        raise ConfigError(
            f"{', '.join(needless)}: a federation made in Python has its data and parts already; leave it out, or give "
            "it where the federation is made"
        )
    renamed = {RENAMED[keyword]: keyword for keyword in RENAMED if keyword in given}
    known = {*list_keywords(function), *ExperimentKeywords.__optional_keys__} - renamed.keys()
    unknown = [f"unknown keyword {key!r}; {did_you_mean(key, known)}" for key in settings if key not in known]
    given |= {key: value for key, value in settings.items() if key in known}
    given |= {} if federation is not None else {"data": str(data)}
    with name_keywords(renamed):
        experiment, output = load_options(
            None, {RENAMED.get(key, key): value for key, value in given.items()}, errors=unknown
        )
        notes = list[str]()
        if function is not compare and experiment.budget is not None:
            raise ConfigError("budget: only compare has one; give runs")
        if function is compare:
            experiment, notes = prepare_command("compare", experiment)
        plan = make_plan(experiment, federation)
        if function is compare:
            plan = settle_budget(plan, experiment.given)
        if output.out is not None:
            check_run_folder(output.out, "compare" if function is compare else None)
    return plan, output, notes


def _check_names(keyword: str, given: object, expected: str) -> None:
    """Refuse objects: other processes, and runs that are resumed, build methods and models again by their names."""
    for one in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(one, str):
            raise ConfigError(
                f"{keyword}: got {name_kind(one)}, expected {expected}, by which each run builds its own; only "
                "fedattune.fit takes objects"
            )
