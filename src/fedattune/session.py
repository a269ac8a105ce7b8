"""Run the methods of an experiment one after another into a folder, so that it can be stopped and resumed."""

import json
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from .compare import ALONE
from .errors import ConfigError, RunError
from .experiment import Experiment, load_experiment
from .plan import Plan, prepare
from .progress import watch

if TYPE_CHECKING:
    from .result import Result

RESUMABLE = {"engine", "device"}  # what may be given beside --resume: it does not change the numbers


class StoppedError(Exception):
    """The user asked to stop; what was done so far is kept."""


class Interrupt:
    """Turn the first Ctrl-C into a request to stop after the round; the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Whether a stop is asked for."""
        return self.asked

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_old"):
            signal.signal(signal.SIGINT, self._old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def check_file(option: str, path: Path | None) -> None:
    """Refuse early a file that could not be written at the end.

    Raises:
        ConfigError: its folder is missing or not writable, or it is a folder itself.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: the folder {path.parent} cannot be written to")


def check_out(out: Path, command: str) -> None:
    """Refuse a run folder that holds something.

    Raises:
        RunError: it does, or it is a file.
    """
    if out.exists() and not out.is_dir():
        raise RunError(f"--out {out}: this is a file; give a new or empty folder")
    if out.is_dir() and any(out.iterdir()):
        raise RunError(
            f"--out {out}: the folder is not empty, and nothing is written over; give a new one, or go on "
            f"with the run in it by fedattune {command} --resume {shlex.quote(str(out))}"
        )


def default_out(command: str, experiment: Experiment) -> Path:
    """A new folder under runs/ named after the command, the data and the time."""
    stem = f"{command}-{Path(experiment.data).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{again}" for again in range(2, 100))]
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def begin(plan: Plan, out: Path) -> None:
    """Make the run folder with the experiment and the partition in it."""
    from .data import PARTITIONS
    from .data.manifest import manifest_path, save_manifest

    if plan.experiment.save_partition:
        save_manifest(plan.federation, plan.experiment.save_partition)
    where: dict[str, Any] = {}  # paths that also hold when resumed from another folder
    if Path(plan.experiment.data).is_file():
        where["data"] = str(Path(plan.experiment.data).resolve())
    partition = manifest_path(plan.experiment.partition or "")
    if plan.experiment.partition not in (None, *PARTITIONS) and partition.is_file():
        where["partition"] = str(partition.resolve())
    if plan.experiment.data_dir:
        where["data_dir"] = plan.experiment.data_dir.resolve()
    out = out.resolve()
    new = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    new.mkdir(parents=True)
    (new / "partition.json").write_text(json.dumps(plan.federation.manifest()), encoding="utf-8")
    (new / "experiment.yaml").write_text(plan.experiment.model_copy(update=where).to_yaml(), encoding="utf-8")
    if out.is_dir():
        out.rmdir()
    new.rename(out)  # at once: a folder that exists can be resumed


def reopen(command: str, out: Path, given: Mapping[str, Any]) -> Plan:
    """The plan of the interrupted run in `out`.

    Raises:
        ConfigError: options that would change it were given.
        RunError: there is no such run, it is of another command, or the data has changed.
    """
    other = sorted(given.keys() - RESUMABLE)
    if other:
        names = ", ".join("--" + key.replace("_", "-") for key in other)
        raise ConfigError(
            f"{names} cannot be given with --resume, which goes on with the experiment as it was begun"
        )
    path = out / "experiment.yaml"
    if not path.is_file():
        raise RunError(f"--resume {out}: there is no run of fedattune here ({path} is missing)")
    experiment = load_experiment(path, given)
    if (command == "run") == (ALONE in experiment.algorithms and len(experiment.algorithms) > 1):
        right = "compare" if command == "run" else "run"
        raise RunError(
            f"--resume {out}: this folder is of another command; use fedattune {right} --resume {out}"
        )
    try:
        saved = json.loads((out / "partition.json").read_text(encoding="utf-8"))["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"--resume {out}: partition.json is missing or broken; start a new run") from error
    plan = prepare(experiment)
    now = plan.federation.manifest()["hash"]
    if now != saved:
        raise RunError(
            f"--resume {out}: the data or its partition has changed since the run was begun (hash "
            f"{now[:12]}, then {saved[:12]}); start a new run"
        )
    return plan


def execute(plan: Plan, out: Path, stop: Interrupt, *, quiet: bool) -> list["Result"]:
    """Train every method with every seed, those already finished excepted.

    Raises:
        StoppedError: a stop was asked for; a checkpoint is kept.
    """
    from .trainer import fit

    experiment = plan.experiment
    seeds = range(experiment.seed, experiment.seed + experiment.seeds)
    results = []
    with watch(quiet=quiet) as shown:
        for name in plan.algorithms:
            for seed in seeds:
                if stop():
                    raise StoppedError(f"stopped before {name}")
                folder = out / name / f"seed-{seed}"
                if folder.is_dir() and not (folder / "config.json").exists():
                    shutil.rmtree(
                        folder
                    )  # killed while it was being made: there is nothing in it to go on with
                shown.start(name if len(seeds) == 1 else f"{name} (seed {seed})", experiment.rounds)
                result = fit(
                    name,
                    plan.federation,
                    experiment.model,
                    options=plan.options[name],
                    model_options=plan.model_options,
                    out=folder,
                    resume=folder.is_dir(),
                    watch=shown,
                    stop=stop,
                    settings=experiment.settings(seed),
                )
                if not result.finished:
                    raise StoppedError(f"stopped after round {shown.round} of {experiment.rounds}")
                results.append(result)
    return results
