"""The folder of an experiment, in which it can be stopped and resumed, and the runs in it."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from ..config import OF_RAY
from ..errors import ConfigError, RunError
from ..experiment import Experiment, load_experiment
from ..output import Output
from .jobs import Failure, Job, train_all
from .plan import Plan, prepare
from .progress import watch

if TYPE_CHECKING:
    from ..data import Federation
    from ..result import Result

EXPERIMENT, PARTITION, COMMAND = "experiment.yaml", "partition.json", "command.txt"
ONLY_SAID = {"rounds_to"}  # changes nothing that is computed, so a resumed run may be asked for it


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


def inputs(experiment: Experiment, *, config: Path | None = None, out: Path | None = None) -> dict[str, Path]:
    """Files that no result may be written over: what is read, and what is kept to go on with."""
    from ..data import PARTITIONS, is_table
    from ..data.manifest import manifest_path

    found = {"the data": Path(experiment.data)} if is_table(experiment.data) else {}
    if config:
        found["the configuration"] = config
    if experiment.partition not in (None, *PARTITIONS):
        found["the partition"] = manifest_path(experiment.partition or "")
    if experiment.save_partition:
        found["the partition to be saved"] = manifest_path(experiment.save_partition)
    if out:
        found |= {f"{name} of the run": out / name for name in (EXPERIMENT, PARTITION, COMMAND)}
    return found


def begin(plan: Plan, out: Path, command: str) -> None:
    """Make the run folder with the command, the experiment and the partition in it, or leave nothing behind."""
    from ..data.manifest import save_manifest

    out = out.resolve()
    into = out.is_dir()  # an empty folder stays the one it is: someone may be in it
    new = out / f".{os.getpid()}.tmp" if into else out.with_name(f".{out.name}.{os.getpid()}.tmp")
    content: dict[str, Iterable[str]] = {
        COMMAND: [command + "\n"],
        PARTITION: _manifest(plan.federation),
        EXPERIMENT: [
            _from_anywhere(plan.experiment).to_yaml()
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


def _manifest(federation: "Federation") -> Iterator[str]:
    """The JSON of the federation's manifest, piece by piece: that of many clients is larger than their data."""
    from ..data.digest import manifest_pieces
    from ..data.members import Clients

    head = replace(federation, clients=federation.clients[:1]).manifest() | {"hash": federation.digest}
    del head["clients"]
    return manifest_pieces(head, Clients.of(federation.clients))


def _from_anywhere(experiment: Experiment) -> Experiment:
    """The experiment with paths that also hold when it is resumed from another folder."""
    where: dict[str, Any] = {}
    files = inputs(experiment)
    if "the data" in files:
        where["data"] = str(files["the data"].resolve())
    if "the partition" in files:
        where["partition"] = str(files["the partition"].resolve())
    if experiment.data_dir:
        where["data_dir"] = experiment.data_dir.expanduser().resolve()
    return experiment.model_copy(update=where)


def reopen(command: str, out: Path, given: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    """The plan of the interrupted run in `out`, and what to note about going on with it.

    Raises:
        ConfigError: options that would change it were given.
        RunError: there is no such run, it is of another command, or the data has changed.
    """
    from ..runs.folder import FREE_TO_CHANGE

    other = sorted(given.keys() - FREE_TO_CHANGE - ONLY_SAID)
    if other:
        names = ", ".join("--" + key.replace("_", "-") for key in other)
        raise ConfigError(
            f"{names} cannot be given with --resume, which goes on with the experiment as it was begun"
        )
    path = out / EXPERIMENT
    if not path.is_file():
        raise RunError(f"--resume {out}: there is no run of fedattune here ({path} is missing)")
    before, experiment = load_experiment(path, {}), load_experiment(path, _leaving_ray(given))
    try:
        right = (out / COMMAND).read_text(encoding="utf-8").strip()
        saved = json.loads((out / PARTITION).read_text(encoding="utf-8"))["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--resume {out}: {COMMAND} or {PARTITION} is missing or broken; start a new run"
        ) from error
    if command != right:
        raise RunError(
            f"--resume {out}: this folder is of another command; use fedattune {right} --resume {out}"
        )
    plan = prepare(experiment)
    now = plan.federation.digest
    if now != saved:
        raise RunError(
            f"--resume {out}: the data or its partition has changed since the run was begun (hash "
            f"{now[:12]}, then {saved[:12]}); start a new run"
        )
    changed = [
        f"{key} was {old} and is {new}"
        for key in sorted(FREE_TO_CHANGE)
        if (old := getattr(before, key)) != (new := getattr(experiment, key))
    ]
    note = (
        f"{' and '.join(changed)}: results stay equal up to rounding, except for models that draw random "
        "numbers while training, such as those with dropout"
    )
    return plan, [note] if changed else []


def _leaving_ray(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was given, and where that is another engine than Ray, what goes with Ray alone back at its default."""
    if given.get("engine", "ray") == "ray":
        return given
    return {**OF_RAY, **given}


def jobs_of(plan: Plan, out: Path) -> list[Job]:
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
        for name in plan.algorithms
        for seed in range(experiment.seed, experiment.seed + experiment.seeds)
    ]


def execute(
    plan: Plan, out: Path, stop: Interrupt, output: Output, *, go_on: bool
) -> tuple[list["Result"], list[Failure]]:
    """Train every method with every seed, those already finished excepted; where asked, go on after a failure.

    Raises:
        StoppedError: a stop was asked for; checkpoints are kept.
        DivergedError, KilledError: a run failed, and the others are not to go on.
    """
    jobs = [replace(job, tensorboard=output.tensorboard) for job in jobs_of(plan, out)]
    with watch(quiet=output.quiet) as shown:
        return train_all(jobs, stop, shown, scratch=out, go_on=go_on, processes=output.processes)
