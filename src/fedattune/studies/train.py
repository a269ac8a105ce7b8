"""Training of a study: the runs that are missing, column by column."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, FedAttuneError, RunError
from ..core.settings import Settings
from ..core.targets import NUMBER_KINDS
from ..experiments.config import Experiment
from ..runs.folder import RunFolder
from ..runs.result import Result
from .outcome import StudyResults, choose_options
from .records import Records
from .study import Cell, CellRun, Study, StudyOptions
from .table import write_results

if TYPE_CHECKING:
    from ..data import Federation
    from ..experiments.plan import FailedRun, Job, ShouldStop
    from ..experiments.runner import ProgressDisplay

SPLITS_AT_ONCE = 8
"""Maximum number of splits of the data in memory."""


@dataclass(frozen=True)
class StudyTrainer:
    """Train the missing runs of a study, and write its table and figure whenever new results are saved."""

    study: Study
    records: Records
    options: StudyOptions
    should_stop: "ShouldStop"
    display: "ProgressDisplay"

    def train_cells(self, cells: Sequence[Cell]) -> list[str]:
        """Train the missing runs of some cells, column by column.

        Return a sentence per column that failed, for instance because its data are missing; the others are trained
        all the same. After a `StoppedError`, finished runs are saved, and others can be resumed.
        """
        problems: list[str] = []
        for column in dict.fromkeys(cell.column for cell in cells):
            try:
                self._train_column([cell for cell in cells if cell.column == column])
            except FedAttuneError as error:
                problems.append(f"{column}: {error}")
        return problems

    def _train_column(self, cells: Sequence[Cell]) -> None:
        study, extent = self.study, self.options.extent
        grids = [(cell, study.choices(cell)) for cell in cells if not self.options.no_search]
        pairs = [(cell, choice) for cell, grid in grids for choice in grid if len(grid) > 1]
        self._train([study.make_run(cell, choice, 0, extent, tuning=True) for cell, choice in pairs])
        trained: dict[Cell, Any] | None = None
        while (choices := self._choose(cells)) != trained:  # a choice that diverges makes room for another
            seeds = range(self.options.seeds or study.seeds)
            self._train([study.make_run(*each, seed, extent) for seed in seeds for each in choices.items()])
            trained = choices

    def _choose(self, cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
        if self.options.no_search:
            return {cell: self.study.middle_choice(cell) for cell in cells}
        choices = {cell: choose_options(self.study, cell, self.records, self.options.extent) for cell in cells}
        return {cell: choice for cell, choice in choices.items() if choice is not None}

    def _train(self, runs: Sequence[CellRun]) -> None:
        from ..experiments.runner import train_all

        others = [path for path in sorted(self.options.out.iterdir()) if path != self.records.folder]
        if self.records.adopt(others, runs, mixing=self.study.mixing):
            self._write()
        groups: dict[str, dict[str, CellRun]] = {}
        for run in runs:
            if run not in self.records:
                groups.setdefault(_data_key(run.experiment), {})[run.id] = run
        waiting = [list(group.values()) for group in groups.values()]
        while waiting:
            some, waiting = waiting[:SPLITS_AT_ONCE], waiting[SPLITS_AT_ONCE:]
            pairs = [pair for group in some for pair in self._make_jobs(group)]
            self._check_data(pairs)
            failed: list[FailedRun] = []
            try:
                train_all(
                    [job for _, job in pairs],
                    self.should_stop,
                    self.display,
                    scratch=self.options.out / "runs",
                    processes=self.options.processes,
                    on_failure=failed.append,
                )
            finally:
                self._collect(pairs, {one.folder: one.error for one in failed if one.diverged})
            if killed := [one for one in failed if not one.diverged]:
                raise RunError(f"{killed[0].error}; go on by --resume")

    def _make_jobs(self, runs: Sequence[CellRun]) -> "list[tuple[CellRun, Job]]":
        from ..experiments.plan import make_plan, prepare_data

        federation: Federation | None = None
        pairs = []
        for run in runs:
            experiment = run.experiment.replace(**self.options.overrides)
            federation = federation or prepare_data(experiment)
            if federation.kind in NUMBER_KINDS:
                raise ConfigError(
                    f"{run.cell}: a study compares accuracies, and the target of {experiment.data} is a number"
                )
            plan = make_plan(experiment, federation)
            (name,) = experiment.algorithms
            words = [str(run.cell), *(f"{key}={value}" for key, value in run.choice.items())]
            title = ", ".join([*words, f"seed {experiment.seed}"])
            folder = self.options.out / "runs" / run.id
            pairs.append((run, plan.make_job(name, experiment.seed, title, folder)))
        return pairs

    def _check_data(self, pairs: "Sequence[tuple[CellRun, Job]]") -> None:
        digests = {_data_key(run.experiment): job.federation.digest for run, job in pairs}
        for run, facts in self.records.runs.items():
            then = facts.get("split")
            now = digests.get(_data_key(Experiment(**facts["experiment"])), then) if then else None
            if now != then:
                raise RunError(
                    f"the data differ from the data of run {run} in {self.records.folder}: their split is {now}, the "
                    f"split of the run {then}; use the old data, or another --out"
                )

    def _collect(self, pairs: "Sequence[tuple[CellRun, Job]]", diverged: Mapping[Path, str]) -> None:
        for run, job in pairs:
            if job.folder in diverged:
                self.records.add_failure(run, diverged[job.folder])
            elif job.is_finished and run not in self.records:
                about = RunFolder(job.folder).read_environment()
                environment = {name: about[name] for name in ("fedattune", "git", "python", "cpus")}
                environment |= {name: about["packages"][name] for name in ("torch", "numpy")}
                labels = job.federation.label_counts().tolist() if self.study.mixing else None
                self.records.add(run, Result.load(job.folder), environment, labels)
        self._write()
        for run, job in pairs:
            if run in self.records:
                shutil.rmtree(job.folder, ignore_errors=True)

    def _write(self) -> None:
        self.records.save()
        write_results(StudyResults(self.study, self.records))


def _data_key(experiment: Experiment) -> str:
    from ..algorithms import ALGORITHMS
    from ..data import PARTITIONS, SOURCES
    from ..models import MODELS

    names = Experiment.flat_fields().keys() - Settings.flat_fields().keys() - {"model", "algorithms", "set", "seeds"}
    others = {*ALGORITHMS, *MODELS} - {*PARTITIONS, *SOURCES}
    options = {k: v for k, v in experiment.set.items() if k.rpartition(".")[0] not in others}
    return json.dumps([[str(experiment.get(name)) for name in sorted(names)], options], sort_keys=True)
