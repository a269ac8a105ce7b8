"""Create the folder of an experiment, train and summarize the runs in it, and resume them after an interruption."""

import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..analysis.folder import (
    BUDGET_FILE,
    COMMAND_FILE,
    EXPERIMENT_FILE,
    FROM_THE_START,
    NOTES_FILE,
    PARTITION_FILE,
    RESULT_FILE,
    list_parts,
    seal_experiment,
    verify_experiment,
)
from ..core.errors import ConfigError, RunError
from ..core.io import format_json, read_json, replace_atomically, write_json, write_text
from ..core.lock import lock_folder
from ..core.metrics import MetricName
from ..core.options import write_option
from ..core.own_code import find_file, get_short_name, is_reference
from ..core.settings import RAY_DEFAULTS
from ..runs.folder import CHECKSUM_FILE
from .config import Experiment
from .load import load_experiment
from .output import OutputOptions
from .plan import FailedRun, Plan, ShouldStop, make_jobs, make_plan
from .runner import make_progress_display, train_all

if TYPE_CHECKING:
    from ..analysis.compare import Baseline, MethodRow
    from ..analysis.verdict import Verdict
    from ..runs.callbacks import Callback
    from ..runs.result import Result
    from .budget import Outcome
    from .runner import ProgressDisplay

DISPLAY_FIELDS = {"rounds_to"}
"""Fields that change no computation, so that they may be given with --resume."""


class InterruptHandler:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the round; let the second one stop at once."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._old: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.stop_requested

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set from Python

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True


def list_input_files(experiment: Experiment, *, config: Path | None = None, out: Path | None = None) -> dict[str, Path]:
    """Return the files that no result may replace: the inputs, and the files from which a run is resumed."""
    from ..data import PARTITIONS, is_table
    from ..data.manifest import resolve_manifest_path

    files = {"the data": Path(experiment.data)} if is_table(experiment.data) else {}
    if config:
        files["the configuration"] = config
    if experiment.partition not in (None, *PARTITIONS) and not is_reference(experiment.partition or ""):
        files["the partition"] = resolve_manifest_path(experiment.partition or "")
    for name in (*experiment.algorithms, experiment.model, experiment.partition or "", experiment.metric or ""):
        if code := find_file(name):
            files[f"the code of {get_short_name(name)}"] = code
    if experiment.save_partition:
        files["the partition to be saved"] = resolve_manifest_path(experiment.save_partition)
    if out:
        files |= {f"{name} of the run": out / name for name in FROM_THE_START}
    return files


def create_run_folder(plan: Plan, out: Path, command: str) -> None:
    """Create the run folder with the command, the partition and the experiment; after an error, remove it again."""
    from ..data.manifest import save_manifest
    from .budget import Budget

    out = out.resolve()
    is_new = not out.exists()
    try:
        with lock_folder(out, is_new=True):
            try:
                write_text(out / COMMAND_FILE, command + "\n")
                with (
                    replace_atomically(out / PARTITION_FILE) as new,
                    new.open("w", encoding="utf-8", newline="\n") as file,
                ):
                    file.writelines(plan.federation.iter_manifest())
                if plan.experiment.save_partition:
                    save_manifest(plan.federation, plan.experiment.save_partition)
                text = _resolve_paths(plan.experiment).to_yaml()
                seal_experiment(out, {out / EXPERIMENT_FILE: text})
                if plan.free or plan.models:
                    Budget(0.0, out, models=list(plan.models), free=sorted(plan.free)).save()
                # The last file: with it, the run can be resumed.
                write_text(out / EXPERIMENT_FILE, text)
            except BaseException:
                for name in (*FROM_THE_START, BUDGET_FILE, CHECKSUM_FILE):
                    (out / name).unlink(missing_ok=True)
                raise
    except BaseException:
        if is_new:
            with suppress(OSError):  # another process is at work in it
                out.rmdir()
        raise


def _resolve_paths(experiment: Experiment) -> Experiment:
    """Make the paths absolute, so that the run can be resumed from another folder."""
    files = list_input_files(experiment)
    names = [name for name in ("data", "partition") if f"the {name}" in files]
    paths: dict[str, Any] = {name: str(files[f"the {name}"].resolve()) for name in names}
    if experiment.data_dir:
        paths["data_dir"] = experiment.data_dir.expanduser().resolve()
    return experiment.model_copy(update=paths)


def reopen_run(
    command: str, out: Path, overrides: Mapping[str, Any], allow_code: Sequence[str] = ()
) -> tuple[Plan, list[str]]:
    """Plan an interrupted run again; add a note about settings that changed."""
    from ..runs.folder import RESUMABLE_SETTINGS

    if refused := sorted(overrides.keys() - RESUMABLE_SETTINGS - DISPLAY_FIELDS):
        names = ", ".join("--" + key.replace("_", "-") for key in refused)
        raise ConfigError(f"{names} cannot be given with --resume: a resumed experiment keeps its options")
    path = out / EXPERIMENT_FILE
    if not path.is_file():
        raise RunError(f"--resume {out}: there is no run of fedattune here ({path} is missing); give its folder")
    # Parts that somebody removed are made again.
    parts = [file for file in list_parts(out) if file.exists()]
    verify_experiment(out, path, out / COMMAND_FILE, out / PARTITION_FILE, *parts)
    # Another engine than Ray resets the options of Ray.
    reset = RAY_DEFAULTS if overrides.get("engine", "ray") != "ray" else {}
    code = {"allow_code": tuple(allow_code)}
    before, experiment = load_experiment(path, code), load_experiment(path, {**reset, **overrides, **code})
    try:
        first_command = (out / COMMAND_FILE).read_text(encoding="utf-8").strip()
        first_hash = str(read_json(out / PARTITION_FILE)["hash"])
    except (OSError, ValueError, KeyError, TypeError, RunError) as error:
        raise RunError(
            f"--resume {out}: {COMMAND_FILE} or {PARTITION_FILE} is missing or broken; start a new run"
        ) from error
    if command != first_command:
        raise RunError(
            f"--resume {out}: this folder is of another command; use fedattune {first_command} --resume {out}"
        )
    # A folder that is older than this option trains by its default, also a pretrained network.
    plan = make_plan(experiment.replace(optimizer=experiment.get("optimizer")))
    if (now := plan.federation.digest) != first_hash:
        raise RunError(
            f"--resume {out}: the data or its partition has changed since the run was begun (hash "
            f"{now[:12]}, then {first_hash[:12]}); start a new run"
        )
    changed = [key for key in sorted(RESUMABLE_SETTINGS) if before.get(key) != experiment.get(key)]
    changes = " and ".join(f"{key} was {before.get(key)} and is {experiment.get(key)}" for key in changed)
    note = (
        f"{changes}: results stay equal up to rounding, except for models that draw random numbers while training, "
        "such as those with dropout"
    )
    return plan, [note] if changed else []


class Summary(NamedTuple):
    """The findings of an experiment; only a comparison has a verdict, and a report of its results."""

    results: "Sequence[Result]"
    failed: Sequence[FailedRun]
    baselines: "Sequence[Baseline]"
    rows: "Sequence[MethodRow]"
    notes: Sequence[str]
    verdict: "Verdict | None"
    report: Path | None
    is_stopped: bool = False


def train_plan(
    plan: Plan,
    out: Path,
    should_stop: ShouldStop,
    output: OutputOptions,
    *,
    is_comparison: bool,
    callbacks: "Sequence[Callback]" = (),
) -> Summary:
    """Train a run or a comparison, as told or within its budget; summarize it.

    What is finished in the folder is taken from there.
    """
    from .budget import parse_budget, train_within_budget

    seconds = parse_budget(plan.experiment.budget or "off") if is_comparison else None
    seal_experiment(out)  # the other files will change
    with make_progress_display(quiet=output.quiet) as display:
        if seconds:
            spent = train_within_budget(
                plan, seconds, out, should_stop, display, processes=output.processes, callbacks=callbacks
            )
        else:
            spent = _train_as_told(plan, out, should_stop, display, output, is_comparison, callbacks)
    if spent.notes:
        write_json(out / NOTES_FILE, spent.notes)
    summary = write_summary(
        spent.results,
        spent.failed,
        spent.baselines,
        spent.notes,
        files=[file for file in (out / RESULT_FILE, output.json_file) if file],
        report=out / "report.html" if is_comparison else None,
        rounds_to=plan.experiment.rounds_to,
        metric=plan.metric,
        is_tuned=bool(seconds or plan.experiment.tune),
    )
    seal_experiment(out, is_finished=True)
    return summary._replace(notes=[*plan.notes, *plan.federation.notes, *summary.notes], is_stopped=spent.is_stopped)


def _train_as_told(
    plan: Plan,
    out: Path,
    should_stop: ShouldStop,
    display: "ProgressDisplay",
    output: OutputOptions,
    is_comparison: bool,
    callbacks: "Sequence[Callback]",
) -> "Outcome":
    """Tune if asked for, then train every method with every seed on every split."""
    from .baselines import train_baselines
    from .budget import Outcome
    from .tuning import tune_plan

    experiment, notes = plan.experiment, list[str]()
    if experiment.tune:
        tuning = tune_plan(plan, experiment.tune, out, should_stop, display, output.processes)
        plan, notes = replace(plan, tuned=tuning.choices), tuning.write_notes()
    elif is_comparison:
        notes = [
            f"not tuned: every method trains with lr {experiment.training.lr:g} and its default options; "
            f"{write_option('tune')} 5 tunes each with the budget of 5 runs, local too"
        ]
    if notes:
        write_json(out / NOTES_FILE, notes)
    baselines = train_baselines(plan, out, should_stop, display.print_line) if is_comparison else []
    seal_experiment(out)  # with what was tuned, and the baselines
    jobs = [replace(job, callbacks=tuple(callbacks)) for job in make_jobs(plan, out)]
    results, failed = train_all(
        jobs, should_stop, display, scratch=out, keep_going=is_comparison, processes=output.processes
    )
    return Outcome(results, failed, baselines, notes)


def write_summary(
    results: "Sequence[Result]",
    failed: Sequence[FailedRun] = (),
    baselines: "Sequence[Baseline]" = (),
    notes: Sequence[str] = (),
    *,
    files: Sequence[Path],
    report: Path | None,
    rounds_to: float | None = None,
    metric: MetricName | None = None,
    is_tuned: bool = False,
) -> Summary:
    """Write the result files, and the report of a comparison beside the folders of the runs."""
    from ..analysis.compare import describe_failure
    from ..analysis.rows import build_rows, rows_to_json
    from ..analysis.verdict import reach_verdict
    from ..analysis.verdict.notes import merge_notes

    rows = build_rows(results, rounds_to, metric=metric, baselines=baselines)
    content: dict[str, Any] = {"runs": [result.to_json() for result in results]}
    if rounds_to is not None:
        for result, run in zip(results, content["runs"], strict=True):
            run["rounds_to"] = {"accuracy": rounds_to, "round": result.rounds_to(rounds_to)}
    verdict = None
    if report:
        verdict = reach_verdict(
            results, baselines=baselines, metric=metric, failed=[one.algorithm for one in failed], is_tuned=is_tuned
        )
        content |= {
            "verdict": verdict.text,
            "decision": verdict.to_json(),
            "table": rows_to_json(rows),
            "failed": [{"algorithm": o.algorithm, "seed": o.seed, "split": o.split, "error": o.error} for o in failed],
        }
    elif len(results) == 1:
        content = content["runs"][0]
    text = format_json(content)
    for file in files:
        write_text(file, text)
    if report and results:
        from ..analysis.load import read_runs
        from ..analysis.output.report import write_report

        known = {one.folder.resolve(): one for one in results if one.folder}
        # No split is added any more, though the result is not yet among the checksums.
        write_report(report, replace(read_runs([report.parent], known=known), is_growing=False))
    failures = [describe_failure(one.algorithm, one.seed, one.error) for one in failed]
    notes = [*merge_notes(results, baselines, metric), *notes, *failures]
    return Summary(results, failed, baselines, rows, notes, verdict, report if results else None)
