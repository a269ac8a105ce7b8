"""Train the runs of a study that are not there yet, and keep what they reach."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...core.errors import FedAttuneError, RunError
from ...core.io import read_json
from ...core.settings import Settings
from ...training.result import Result
from ...training.storage.folder import RunFolder
from ..config import Experiment
from .cells import Cell, CellRun, Extent
from .outcome import choose
from .records import Records
from .study import Study

if TYPE_CHECKING:
    from ...data import Federation
    from ..job import FailedRun, Job, ShouldStop
    from ..progress import ProgressDisplay

SPLITS_AT_ONCE = 8
"""Splits of the data that are in memory at a time."""


class TrainOptions(NamedTuple):
    """How runs are to be trained, beside what the study says.

    Attributes:
        extent: how much of each run.
        seeds: in place of the study's, where given.
        search: whether grids are searched; else the middle value of each is taken.
        more: settings that change no number: device, data_dir.

    """

    out: Path
    extent: Extent
    seeds: int | None
    processes: int | Literal["auto"]
    search: bool
    more: dict[str, Any]


def train_study(
    study: Study,
    cells: Sequence[Cell],
    records: Records,
    order: TrainOptions,
    stop: "ShouldStop",
    shown: "ProgressDisplay",
    done: Callable[[], None],
) -> list[str]:
    """Train what is missing, column by column; `done` is called whenever there are new results.

    Returns what could not be done, such as data that are not there; the other columns are trained all the same.

    Raises:
        StoppedError: a stop was asked for; finished runs are kept, others can be resumed.

    """
    problems: list[str] = []
    work = _StudyTrainer(study, records, order, stop, shown, done)
    for column in dict.fromkeys(cell.column for cell in cells):
        mine = [cell for cell in cells if cell.column == column]
        try:
            if order.search:
                work.train(
                    [
                        study.run(cell, choice, 0, order.extent, tuning=True)
                        for cell in mine
                        for choice in study.choices(cell)
                        if len(study.choices(cell)) > 1
                    ]
                )
            chosen = [
                (cell, choose(study, cell, records, order.extent) if order.search else study.middle(cell))
                for cell in mine
            ]
            work.train(
                [
                    study.run(cell, choice, seed, order.extent)
                    for seed in range(order.seeds or study.seeds)
                    for cell, choice in chosen
                    if choice is not None
                ]
            )
        except FedAttuneError as error:
            problems.append(f"{column}: {error}")
    return problems


class _StudyTrainer:
    def __init__(
        self,
        study: Study,
        records: Records,
        order: TrainOptions,
        stop: "ShouldStop",
        shown: "ProgressDisplay",
        done: Callable[[], None],
    ) -> None:
        self.study, self.records, self.order = study, records, order
        self.stop, self.shown, self.done = stop, shown, done
        self.scratch = order.out / "runs"

    def train(self, runs: Sequence[CellRun]) -> None:
        """Train those that nobody has, in groups of the same data."""
        from ..runner import train_all

        siblings = [path for path in sorted(self.order.out.iterdir()) if path != self.records.folder]
        if self.records.adopt(siblings, runs, mixing=self.study.mixing):
            self._keep()
        todo = list({run.id: run for run in runs if run not in self.records}.values())
        groups: dict[str, list[CellRun]] = {}
        for run in todo:
            groups.setdefault(_data_key(run.experiment), []).append(run)
        waiting = list(groups.values())
        while waiting:
            some, waiting = waiting[:SPLITS_AT_ONCE], waiting[SPLITS_AT_ONCE:]
            order = [run for group in some for run in group]
            jobs = [job for group in some for job in self._jobs(group)]
            self._same_data(order, jobs)
            failed: list[FailedRun] = []
            try:
                train_all(
                    jobs,
                    self.stop,
                    self.shown,
                    scratch=self.scratch,
                    processes=self.order.processes,
                    on_failure=failed.append,
                )
            finally:
                self._collect(order, jobs, {one.folder: one.error for one in failed if one.diverged})
            if killed := [one for one in failed if not one.diverged]:
                raise RunError(f"{killed[0].error}; go on by --resume")

    def _same_data(self, runs: Sequence[CellRun], jobs: "Sequence[Job]") -> None:
        """Check that what is recorded was trained on the same samples of the same clients.

        Raises:
            RunError: it was not; then numbers beside each other could not be compared.

        """
        now = {_data_key(run.experiment): job.federation.digest for run, job in zip(runs, jobs, strict=True)}
        for id_, facts in self.records.runs.items():
            then = facts.get("split")
            digest = now.get(_data_key(Experiment(**facts["experiment"])), then) if then else None
            if digest != then:
                raise RunError(
                    f"the data are not those of run {id_} in {self.records.folder}: their split is {digest}, that "
                    f"of the run {then}; take the data of then, or another --out"
                )

    def _collect(self, runs: Sequence[CellRun], jobs: "Sequence[Job]", diverged: Mapping[Path, str]) -> None:
        """Take over what the runs reached; the folders of those that ended are not needed any more."""
        for run, job in zip(runs, jobs, strict=True):
            if job.folder in diverged:
                self.records.fail(run, diverged[job.folder])
            elif job.is_finished and run not in self.records:
                environment = _select_versions(read_json(RunFolder(job.folder).environment))
                labels = job.federation.label_counts().tolist() if self.study.mixing else None
                self.records.add(run, Result.load(job.folder), environment, labels)
        self._keep()
        for run, job in zip(runs, jobs, strict=True):
            if run in self.records:
                shutil.rmtree(job.folder, ignore_errors=True)

    def _keep(self) -> None:
        self.records.save()
        self.done()

    def _jobs(self, runs: Sequence[CellRun]) -> "list[Job]":
        from ..job import Job
        from ..plan import make_plan, prepare_data

        federation: Federation | None = None
        jobs = []
        for run in runs:
            experiment = run.experiment.model_copy(update=self.order.more)
            if federation is None:
                federation = prepare_data(experiment)
            plan = make_plan(experiment, federation)
            (name,) = experiment.algorithms
            words = [str(run.cell), *(f"{key}={value}" for key, value in run.choice.items())]
            jobs.append(
                Job(
                    title=", ".join([*words, f"seed {experiment.seed}"]),
                    algorithm=name,
                    federation=federation,
                    model=experiment.model,
                    settings=experiment.settings(experiment.seed),
                    folder=self.scratch / run.id,
                    options=plan.options[name],
                    model_options=plan.model_options,
                )
            )
        return jobs


def _data_key(experiment: Experiment) -> str:
    """What is equal for experiments on the same data with the same split."""
    from ...algorithms import ALGORITHMS
    from ...data import PARTITIONS, SOURCES
    from ...models import MODELS

    names = (
        Experiment.model_fields.keys()
        - Settings.model_fields.keys()
        - {"model", "algorithms", "set", "seeds"}
    )
    own = {*ALGORITHMS, *MODELS} - {*PARTITIONS, *SOURCES}
    options = {k: v for k, v in experiment.set.items() if k.rpartition(".")[0] not in own}
    return json.dumps([[str(getattr(experiment, name)) for name in sorted(names)], options], sort_keys=True)


def _select_versions(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment["packages"]
    kept = {name: environment[name] for name in ("fedattune", "git", "python", "cpus")}
    return {**kept, "torch": packages["torch"], "numpy": packages["numpy"]}
