"""Compare methods from Python, as `fedattune compare` does on the command line."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ..analysis.compare import MethodRow, build_client_table, build_run_table, to_pandas
from ..analysis.folder import seal_experiment
from ..analysis.verdict import Verdict, reach_verdict
from ..core.errors import ConfigError
from ..core.lock import lock_folder
from ..core.text import make_printable
from .config import ExperimentKeywords
from .load import load_experiment
from .output import OutputOptions, check_run_folder
from .plan import Plan, make_plan, prepare_command
from .session import InterruptHandler, create_run_folder, train_plan
from .summary import write_summary

if TYPE_CHECKING:
    import pandas as pd

    from ..analysis.compare import Baseline
    from ..data import Federation
    from ..runs.callbacks import Callback
    from ..runs.result import Result


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
    model: str = "mlr",
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
        model: name of the model, "file.py:factory", or "package.module:factory".
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
    plan, notes = plan_from_python(data, algorithms, model, options, settings, "compare")
    processes = 1 if callbacks and processes == "auto" else processes
    output = OutputOptions.model_validate({"processes": processes, "quiet": quiet})
    if out is not None:
        check_run_folder(Path(out), "compare")
        return _compare(plan, Path(out), notes, output, callbacks, is_kept=True)
    # The results still read their stores, which are open: Windows then keeps the files.
    with tempfile.TemporaryDirectory(prefix="fedattune-", ignore_cleanup_errors=True) as folder:
        return _compare(plan, Path(folder) / "run", notes, output, callbacks, is_kept=False)


DATA_OPTIONS = {
    "data", "data_dir", "client_column", "target", "drop_columns", "missing", "partition", "clients", "split",
    "time_column", "split_seed", "test", "validation", "stratify", "small_clients", "scaling", "save_partition",
}  # fmt: skip
"""Options of the experiment that make a federation."""


def plan_from_python(
    data: "str | Path | Federation",
    algorithms: Sequence[str] | str,
    model: str,
    options: Mapping[str, Any] | None,
    settings: ExperimentKeywords,
    command: str,
) -> tuple[Plan, list[str]]:
    """Plan an experiment on named data, a table, or a federation made in Python; add notes about what was changed.

    The rules of `command` on the methods hold: `compare` adds the baseline.
    """
    values = {**settings, "algorithms": algorithms, "model": model, "set": options or {}}
    federation = None if isinstance(data, str | Path) else data
    if federation is not None and values.get("splits", 1) != 1:
        raise ConfigError("splits: a federation made in Python has its parts already; give one federation per call")
    if federation is not None and (needless := sorted(DATA_OPTIONS & values.keys())):
        raise ConfigError(
            f"{', '.join(needless)}: a federation made in Python has its data and parts already; leave it out, or give "
            "it where the federation is made"
        )
    named = {} if federation is not None else {"data": str(data)}
    experiment, notes = load_experiment(None, {**values, **named}), list[str]()
    if command == "compare":
        experiment, notes = prepare_command(command, experiment)
    return make_plan(experiment, federation), notes


def _compare(
    plan: Plan,
    out: Path,
    notes: Sequence[str],
    output: OutputOptions,
    callbacks: "Sequence[Callback]",
    *,
    is_kept: bool,
) -> Comparison:
    create_run_folder(plan, out, "compare")
    with InterruptHandler() as should_stop, lock_folder(out):
        outcome = train_plan(plan, out, should_stop, output, is_comparison=True, callbacks=callbacks)
        metric = plan.metric
        summary = write_summary(
            outcome,
            files=[out / "result.json"],
            report=out / "report.html",
            rounds_to=plan.experiment.rounds_to,
            metric=metric,
        )
        seal_experiment(out, is_finished=True)
    verdict = reach_verdict(
        outcome.results, baselines=outcome.baselines, metric=metric, has_failures=bool(outcome.failed)
    )
    return Comparison(
        verdict,
        summary.rows,
        outcome.results,
        outcome.baselines,
        [*dict.fromkeys([*notes, *plan.notes, *plan.federation.notes, *summary.notes])],
        [one.error for one in outcome.failed],
        out if is_kept else None,
        plan.experiment.rounds_to,
    )
