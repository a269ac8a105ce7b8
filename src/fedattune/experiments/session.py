"""The folder of an experiment, in which it can be stopped and resumed, and the runs in it."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from ..core.errors import ConfigError, RunError
from ..core.settings import RAY_DEFAULTS
from .config import Experiment
from .job import FailedRun, Job
from .load import load_experiment
from .output import OutputOptions
from .plan import Plan, make_plan
from .progress import make_progress_display
from .runner import train_all

if TYPE_CHECKING:
    from ..training.result import Result

EXPERIMENT_FILE, PARTITION_FILE, COMMAND_FILE = "experiment.yaml", "partition.json", "command.txt"


DISPLAY_FIELDS = {"rounds_to"}  # changes nothing that is computed, so a resumed run may be asked for it


class InterruptHandler:
    """Turn the first Ctrl-C into a request to stop after the round; the second one stops at once."""

    def __init__(self) -> None:
        self.stop_requested = False

    def __call__(self) -> bool:
        """Tell whether the user asked to stop."""
        return self.stop_requested

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_old"):
            signal.signal(signal.SIGINT, self._old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True


def input_files(
    experiment: Experiment, *, config: Path | None = None, out: Path | None = None
) -> dict[str, Path]:
    """Files that no result may be written over: what is read, and what is kept to go on with."""
    from ..data import PARTITIONS, is_table
    from ..data.manifest import resolve_manifest_path

    found = {"the data": Path(experiment.data)} if is_table(experiment.data) else {}
    if config:
        found["the configuration"] = config
    if experiment.partition not in (None, *PARTITIONS):
        found["the partition"] = resolve_manifest_path(experiment.partition or "")
    if experiment.save_partition:
        found["the partition to be saved"] = resolve_manifest_path(experiment.save_partition)
    if out:
        found |= {
            f"{name} of the run": out / name for name in (EXPERIMENT_FILE, PARTITION_FILE, COMMAND_FILE)
        }
    return found


def create_run_folder(plan: Plan, out: Path, command: str) -> None:
    """Make the run folder with the command, the experiment and the partition in it, or leave nothing behind."""
    from ..data.manifest import save_manifest

    out = out.resolve()
    into = out.is_dir()  # an empty folder stays the one it is: someone may be in it
    new = out / f".{os.getpid()}.tmp" if into else out.with_name(f".{out.name}.{os.getpid()}.tmp")
    content: dict[str, Iterable[str]] = {
        COMMAND_FILE: [command + "\n"],
        PARTITION_FILE: plan.federation.iter_manifest(),
        EXPERIMENT_FILE: [
            _with_absolute_paths(plan.experiment).to_yaml()
        ],  # the last one: with it, a run can be resumed
    }
    try:
        new.mkdir(parents=True)
        for name, pieces in content.items():
            with (new / name).open("w", encoding="utf-8") as file:
                file.writelines(pieces)
        if plan.experiment.save_partition:
            save_manifest(plan.federation, plan.experiment.save_partition)
        if into:
            for name in content:
                (new / name).rename(out / name)
            new.rmdir()
        else:
            new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if into:
            for name in content:
                (out / name).unlink(missing_ok=True)
        raise


def _with_absolute_paths(experiment: Experiment) -> Experiment:
    """The experiment with paths that also hold when it is resumed from another folder."""
    where: dict[str, Any] = {}
    files = input_files(experiment)
    if "the data" in files:
        where["data"] = str(files["the data"].resolve())
    if "the partition" in files:
        where["partition"] = str(files["the partition"].resolve())
    if experiment.data_dir:
        where["data_dir"] = experiment.data_dir.expanduser().resolve()
    return experiment.model_copy(update=where)


def reopen_run(command: str, out: Path, given: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    """The plan of the interrupted run in `out`, and what to note about going on with it.

    Raises:
        ConfigError: options that would change it were given.
        RunError: there is no such run, it is of another command, or the data has changed.
    """
    from ..training.storage.folder import RESUMABLE_SETTINGS

    other = sorted(given.keys() - RESUMABLE_SETTINGS - DISPLAY_FIELDS)
    if other:
        names = ", ".join("--" + key.replace("_", "-") for key in other)
        raise ConfigError(
            f"{names} cannot be given with --resume, which goes on with the experiment as it was begun"
        )
    path = out / EXPERIMENT_FILE
    if not path.is_file():
        raise RunError(f"--resume {out}: there is no run of fedattune here ({path} is missing)")
    before, experiment = load_experiment(path, {}), load_experiment(path, _reset_ray_options(given))
    try:
        right = (out / COMMAND_FILE).read_text(encoding="utf-8").strip()
        saved = json.loads((out / PARTITION_FILE).read_text(encoding="utf-8"))["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--resume {out}: {COMMAND_FILE} or {PARTITION_FILE} is missing or broken; start a new run"
        ) from error
    if command != right:
        raise RunError(
            f"--resume {out}: this folder is of another command; use fedattune {right} --resume {out}"
        )
    plan = make_plan(experiment)
    now = plan.federation.digest
    if now != saved:
        raise RunError(
            f"--resume {out}: the data or its partition has changed since the run was begun (hash "
            f"{now[:12]}, then {saved[:12]}); start a new run"
        )
    changed = [
        f"{key} was {old} and is {new}"
        for key in sorted(RESUMABLE_SETTINGS)
        if (old := getattr(before, key)) != (new := getattr(experiment, key))
    ]
    note = (
        f"{' and '.join(changed)}: results stay equal up to rounding, except for models that draw random "
        "numbers while training, such as those with dropout"
    )
    return plan, [note] if changed else []


def _reset_ray_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was given, and where that is another engine than Ray, what goes with Ray alone back at its default."""
    if given.get("engine", "ray") == "ray":
        return given
    return {**RAY_DEFAULTS, **given}


def make_jobs(plan: Plan, out: Path) -> list[Job]:
    """The runs of an experiment, every method with every seed, and where each is kept."""
    experiment = plan.experiment
    return [
        Job(
            title=name if experiment.seeds == 1 else f"{name} (seed {seed})",
            algorithm=name,
            federation=plan.federation,
            model=experiment.model,
            settings=experiment.settings(seed),
            folder=out / name / f"seed-{seed}",
            options=plan.options[name],
            model_options=plan.model_options,
        )
        for name in plan.experiment.algorithms
        for seed in range(experiment.seed, experiment.seed + experiment.seeds)
    ]


def train_plan(
    plan: Plan, out: Path, should_stop: InterruptHandler, output: OutputOptions, *, keep_going: bool
) -> tuple[list["Result"], list[FailedRun]]:
    """Train every method with every seed, except finished runs.

    Args:
        plan: the experiment.
        out: the run folder.
        should_stop: tells whether the user asked to stop.
        output: the number of processes and the ways to show progress.
        keep_going: train the other runs after one failed.

    Returns:
        The results and the failed runs.

    Raises:
        StoppedError: the user asked to stop; checkpoints are kept.
        DivergedError, WorkerKilledError: a run failed, and `keep_going` is off.

    """
    jobs = [replace(job, tensorboard=output.tensorboard) for job in make_jobs(plan, out)]
    with make_progress_display(quiet=output.quiet) as display:
        return train_all(
            jobs, should_stop, display, scratch=out, keep_going=keep_going, processes=output.processes
        )
