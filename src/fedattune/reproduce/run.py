"""One place in a table, and one training run of it."""

import hashlib
import json
from typing import Any, Literal, NamedTuple

from ..experiment import NOT_IDENTITY, Experiment
from ..registry import check_options, options
from ..runs.folder import FREE_TO_CHANGE


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


class Run(NamedTuple):
    """One training run of a cell: a seed, and the values of the grid that were taken."""

    cell: Cell
    choice: dict[str, Any]
    experiment: Experiment

    @property
    def options(self) -> dict[str, Any]:
        """All options of the method, those that were not given at their defaults."""
        from ..algorithms import ALGORITHMS

        (name,) = self.experiment.algorithms
        given = {k.rpartition(".")[2]: v for k, v in self.experiment.set.items() if k.startswith(f"{name}.")}
        own = {
            option.name for option in options(ALGORITHMS[name])
        }  # a partition can have the name of a method
        return check_options(name, ALGORITHMS[name], {k: v for k, v in given.items() if k in own})

    @property
    def id(self) -> str:
        """Twelve hex digits that are equal for runs that give equal numbers, in whatever study they are."""
        exclude = NOT_IDENTITY | FREE_TO_CHANGE
        given = self.experiment.model_dump(mode="json", exclude_defaults=True, exclude=exclude)
        (name,) = self.experiment.algorithms
        all_ = self.options
        given["set"] = {
            key: value
            for key, value in self.experiment.set.items()
            if not (key.startswith(f"{name}.") and key.rpartition(".")[2] in all_)
        } | {f"{name}.{key}": value for key, value in all_.items()}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:12]
