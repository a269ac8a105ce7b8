"""One place in a table, and one training run of it.

What `fedattune reproduce` can be told.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ...core.options import StrictSchema, check_options, list_options
from ...core.settings import PositiveInt
from ...training.storage.folder import RESUMABLE_SETTINGS
from ..config import NON_IDENTITY_FIELDS, Experiment
from ..output import Processes


class Extent(NamedTuple):
    """How much of a study is trained: at most so many rounds, and in which precision; None: as the study says."""

    rounds: int | None = None
    mixed_precision: Literal["off", "bfloat16"] | None = None


WHOLE = Extent()


class Cell(NamedTuple):
    """One place in the table."""

    row: str
    column: str

    def __str__(self) -> str:
        return f"{self.column} / {self.row}"


class CellRun(NamedTuple):
    """One training run of a cell: a seed, and the values of the grid that were taken."""

    cell: Cell
    choice: dict[str, Any]
    experiment: Experiment

    @property
    def options(self) -> dict[str, Any]:
        """All options of the method, those that were not given at their defaults."""
        from ...algorithms import ALGORITHMS

        (name,) = self.experiment.algorithms
        given = {k.rpartition(".")[2]: v for k, v in self.experiment.set.items() if k.startswith(f"{name}.")}
        own = {
            option.name for option in list_options(ALGORITHMS[name])
        }  # a partition can have the name of a method
        return check_options(name, ALGORITHMS[name], {k: v for k, v in given.items() if k in own})

    @property
    def id(self) -> str:
        """Twelve hex digits that are equal for runs that give equal numbers, in whatever study they are."""
        exclude = NON_IDENTITY_FIELDS | RESUMABLE_SETTINGS
        given = self.experiment.model_dump(mode="json", exclude_defaults=True, exclude=exclude)
        (name,) = self.experiment.algorithms
        all_ = self.options
        given["set"] = {
            key: value
            for key, value in self.experiment.set.items()
            if not (key.startswith(f"{name}.") and key.rpartition(".")[2] in all_)
        } | {f"{name}.{key}": value for key, value in all_.items()}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:12]


class StudyOptions(StrictSchema):
    """Which cells of a study, how much of it, and where results go."""

    cells: str = Field(
        "*", description='only these cells: columns, rows, or "column/row"; * for anything, commas between'
    )
    rounds: PositiveInt | None = Field(None, description="at most so many rounds (default: the paper's)")
    mixed_precision: Literal["off", "bfloat16"] | None = Field(
        None, description="matrix products and convolutions of training in this type (default: the study's)"
    )
    seeds: PositiveInt | None = Field(None, description="runs of each cell (default: the study's)")
    no_search: bool = Field(False, description="take the middle value of every grid instead of searching it")
    resume: bool = Field(False, description="go on with what is in the folder")
    show: bool = Field(False, description="train nothing: write and print what the stored results say")
    out: Path = Field(Path("results"), description="folder of all studies; each has one of its own in it")
    data_dir: Path | None = Field(
        None, description="folder with the data sets as Parquet, instead of a download"
    )
    processes: Processes = "auto"
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors live")
    quiet: bool = Field(False, description="no progress, only the result")
