"""The cells of a study's table, their training runs, and the options of `fedattune reproduce`."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ..core.options import Count, StrictSchema, check_options, list_options
from ..experiments.config import NON_IDENTITY_FIELDS, Experiment
from ..experiments.output import AllowCode, Processes
from ..runs.folder import RESUMABLE_SETTINGS

Precision = Literal["off", "bfloat16"]


class Extent(NamedTuple):
    """The part of a study to train: at most `rounds`, in one precision. None stands for the study's own value."""

    rounds: int | None = None
    mixed_precision: Precision | None = None


WHOLE = Extent()


class Cell(NamedTuple):
    """One cell of the table."""

    row: str
    column: str

    def __str__(self) -> str:
        return f"{self.column} / {self.row}"


class CellRun(NamedTuple):
    """One training run of a cell: its experiment, and the chosen values of the grid."""

    cell: Cell
    choice: dict[str, Any]
    experiment: Experiment

    @property
    def options(self) -> dict[str, Any]:
        """All options of the method; options that the study does not name have their defaults."""
        from ..algorithms import ALGORITHMS

        (name,) = self.experiment.algorithms
        option_names = {option.name for option in list_options(ALGORITHMS[name])}
        values = {
            option: value
            for owner, _, option, value in ((*k.rpartition("."), v) for k, v in self.experiment.set.items())
            if owner == name and option in option_names  # a partition can have the name of a method
        }
        return check_options(name, ALGORITHMS[name], values)

    @property
    def id(self) -> str:
        """Twelve hex digits. Runs with equal results have equal ids, in whatever study they are."""
        excluded = NON_IDENTITY_FIELDS | RESUMABLE_SETTINGS | {"early_stopping", "small_clients"}
        values = self.experiment.model_dump(mode="json", exclude_defaults=True, exclude=excluded)
        (name,) = self.experiment.algorithms
        values["set"] = self.experiment.set | {f"{name}.{key}": value for key, value in self.options.items()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


class StudyOptions(StrictSchema):
    """The options of `fedattune reproduce`."""

    cells: str = Field(
        "*",
        description='only these cells: columns, rows, or "column/row"; * matches anything; separate by commas',
    )
    rounds: Count | None = Field(None, description="maximum number of rounds (default: the paper's)")
    mixed_precision: Precision | None = Field(
        None, description="type of matrix products and convolutions in training (default: the study's)"
    )
    seeds: Count | None = Field(None, description="runs of each cell (default: the study's)")
    no_search: bool = Field(False, description="do not search the grids: take the middle value of each")
    resume: bool = Field(False, description="continue with the results in the folder")
    show: bool = Field(False, description="train nothing; print the stored results")
    out: Path = Field(Path("results"), description="folder of all studies; each study has a subfolder")
    allow_code: AllowCode = ()
    data_dir: Path | None = Field(
        None, description="folder with the files of the data sets, instead of a download"
    )
    processes: Processes = "auto"
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors live")
    quiet: bool = Field(False, description="show no progress, only the result")

    @property
    def extent(self) -> Extent:
        """The part of the study to train."""
        return Extent(self.rounds, self.mixed_precision)

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of every experiment that change no number of a paper: where data are, and which models are kept."""
        return {"device": self.device, "early_stopping": "off"} | (
            {"data_dir": self.data_dir} if self.data_dir else {}
        )
