"""A study: one table or figure of a paper as settings, columns (data and model), rows (methods) and printed numbers."""

import itertools
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core.errors import ConfigError, did_you_mean
from ...core.io import read_yaml
from ...core.options import look_up
from ...core.settings import Settings
from ...training.metrics import Point
from ..config import Experiment
from .cells import WHOLE, Cell, CellRun, Extent

STUDY_FOLDER = Path(__file__).parent


STUDIES = tuple(sorted(path.stem for path in STUDY_FOLDER.glob("*.yaml")))
"""The studies that come with FedAttune."""


Over = Literal["max", "last10", "last"]


Mean = Literal["pooled", "uniform"]


Grid = dict[str, Annotated[list[Any], Field(min_length=2)]]
"""Option or setting -> the values that are tried."""


PrintedValue = float | tuple[float, float] | None
"""A printed number, or that and its printed spread; None where the cell is empty in the paper."""


class _StudyPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Measure(_StudyPart):
    """How a run becomes one number, an accuracy in percent.

    Attributes:
        over: the best evaluated round (as papers report), the mean over the last tenth of them, or the last.
        mean: over all test samples together, or over clients.
        called: the paper's word for it.

    """

    over: Over
    mean: Mean
    called: str


class StudyRow(_StudyPart):
    """A line of the table: a method with its options.

    Attributes:
        point: which model is scored; None: the method's headline point.
        settings: of the experiment, before those of the column.
        grid: options or settings that are chosen on validation data; every combination is tried.
        grids: the grids of columns that have one of their own.
        like: shows the runs of that row at another point, and has no runs of its own.
        columns: where it is in the table; None: everywhere.
        match: whether its numbers should be the paper's.

    """

    algorithm: str = ""
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    grid: Grid = {}
    grids: dict[str, Grid] = {}
    point: Point | None = None
    like: str | None = None
    columns: list[str] | None = None
    match: bool = True


class Tuning(_StudyPart):
    """How a grid is searched: fewer rounds, and validation data taken from the training data.

    Attributes:
        rounds: communication rounds of each combination.
        validation: share of each client's training samples that is held out for the choice.

    """

    rounds: Annotated[int, Field(ge=1)]
    validation: Annotated[float, Field(gt=0, lt=1)]


class DifferenceReason(_StudyPart):
    """Why cells are more than a point off; patterns as for `--cells`."""

    cells: list[str]
    text: str


class FigureSpec(_StudyPart):
    """What is drawn: `curves` of accuracy over rounds, `bars` of paper and ours, or a picture of mixing matrices."""

    kind: Literal["bars", "curves", "sweep", "matching", "weights", "heat_map"] = "bars"
    caption: str = ""
    component: str | None = None
    x: str = ""


class Study(_StudyPart):
    """One table or figure of a paper.

    Attributes:
        about: what a reader should know of the protocol, and where this differs from the paper.
        settings: of all experiments; those of a row go before them, those of a column before both.
        seeds: runs of every cell; with `populations`, each has its own split of the data as well.
        paper: row -> column -> printed number.
        gap_to: where given, printed numbers are not accuracies, but that row's accuracy minus the row's own.
        differences: pairs of rows; the first minus the second is shown too, as in the paper.

    """

    name: str
    title: str
    source: str
    about: str = ""
    measure: Measure
    settings: dict[str, Any] = {}
    seeds: Annotated[int, Field(ge=1)] = 3
    populations: bool = False
    columns: dict[str, dict[str, Any]]
    rows: dict[str, StudyRow]
    tuning: Tuning | None = None
    paper: dict[str, dict[str, PrintedValue]] = {}
    gap_to: str | None = None
    differences: list[tuple[str, str]] = []
    reasons: list[DifferenceReason] = []
    figure: FigureSpec = FigureSpec()
    mixing: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "Study":
        """Rows, columns and printed numbers name each other, and every experiment can be."""
        for name, row in self.rows.items():
            if bool(row.like) == bool(row.algorithm):
                raise ValueError(f"row {name!r}: expected either algorithm or like")
            if row.like and (row.like not in self.rows or self.rows[row.like].like):
                raise ValueError(f"row {name!r}: like: {row.like!r} should be a row with an algorithm")
            if row.like and (row.point is None or row.options or row.settings or row.grid or row.grids):
                raise ValueError(
                    f"row {name!r}: a row that is like another one has a point, and nothing of its own"
                )
            if row.algorithm:
                from ...algorithms import ALGORITHMS

                look_up("algorithm", row.algorithm, ALGORITHMS)
            if (row.grid or row.grids) and not self.tuning:
                raise ValueError(
                    f"row {name!r} has a grid, so the study should say how it is searched: tuning"
                )
            _check_names(f"row {name!r}: columns", row.columns or (), self.columns)
            _check_names(f"row {name!r}: grids", row.grids, self.columns)
        _check_names("paper", self.paper, self.rows)
        for name, printed in self.paper.items():
            _check_names(f"paper, {name}", printed, self.columns)
        for pattern in itertools.chain(*(reason.cells for reason in self.reasons)):
            if not any(_matches(pattern, cell) for cell in self.cells()):
                raise ValueError(f"reasons: {pattern!r} names no cell")
        if self.figure.kind == "sweep" and not all(_is_number(column) for column in self.columns):
            raise ValueError("figure: a sweep needs columns whose names are numbers")
        if self.figure.kind in ("matching", "weights", "heat_map") and not self.mixing:
            raise ValueError(f"figure: {self.figure.kind} needs mixing matrices: mixing: true")
        _check_names("gap_to", [self.gap_to] if self.gap_to else [], self.rows)
        _check_names("differences", itertools.chain(*self.differences), self.rows)
        for cell in self.cells():
            try:
                self.run(cell, self.middle(cell), 0).options  # noqa: B018 (it is checked)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self

    def cells(self, wanted: str = "*") -> list[Cell]:
        """The cells, column by column, that one of the comma-separated patterns names; see `--cells`.

        Raises:
            ConfigError: no cell fits a pattern.

        """
        cells = [
            Cell(name, column)
            for column in self.columns
            for name, row in self.rows.items()
            if row.columns is None or column in row.columns
        ]
        patterns = [one.strip() for one in wanted.split(",") if one.strip()]
        if not patterns:
            raise ConfigError("--cells names no cell; leave it out for all of them")
        for pattern in patterns:
            if not any(_matches(pattern, cell) for cell in cells):
                names = did_you_mean(pattern, [*self.columns, *self.rows])
                raise ConfigError(f"--cells {pattern}: {self.name} has no such cell; {names}")
        return [cell for cell in cells if any(_matches(pattern, cell) for pattern in patterns)]

    def choices(self, cell: Cell) -> list[dict[str, Any]]:
        """The combinations of the cell's grid; one empty one where nothing is searched."""
        grid = self._grid(cell)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def middle(self, cell: Cell) -> dict[str, Any]:
        """The middle value of each list of the cell's grid, for runs without a search."""
        return {key: values[len(values) // 2] for key, values in self._grid(cell).items()}

    def _grid(self, cell: Cell) -> Grid:
        row = self.owner(cell)
        return row.grids.get(cell.column, row.grid)

    def owner(self, cell: Cell) -> StudyRow:
        """The row whose runs the cell shows."""
        row = self.rows[cell.row]
        return self.rows[row.like] if row.like else row

    def run(
        self,
        cell: Cell,
        choice: Mapping[str, Any],
        seed: int,
        extent: Extent = WHOLE,
        *,
        tuning: bool = False,
    ) -> CellRun:
        """One run of a cell, with a combination of its grid; one of its search, if `tuning`.

        Raises:
            ConfigError: an impossible setting.

        """
        row = self.owner(cell)
        values = {**self.settings, **row.settings, **self.columns[cell.column]}
        if own := values.keys() & {"algorithms", "seed", "seeds"}:
            raise ConfigError(f"{self.name}, {cell}: {', '.join(sorted(own))} cannot be among the settings")
        given = {
            **_flatten_options(self.settings),
            **_flatten_options(row.settings),
            **_flatten_options(self.columns[cell.column]),
        }
        values["set"] = {
            **{key: value for key, value in given.items() if not _is_of_another(key, row.algorithm)},
            **{f"{row.algorithm}.{key}": value for key, value in row.options.items()},
        }
        for key, value in choice.items():
            if key in Settings.model_fields:
                values[key] = value
            else:
                values["set"][f"{row.algorithm}.{key}"] = value
        most = self._whole_number(cell, values, "rounds", Settings.model_fields["rounds"].default)
        values["rounds"] = min(extent.rounds or most, most)
        if extent.mixed_precision:
            values["mixed_precision"] = extent.mixed_precision
        if tuning:
            assert self.tuning is not None
            values["rounds"] = min(self.tuning.rounds, values["rounds"])
            values["validation"] = self.tuning.validation
        if self.populations:
            values["split_seed"] = seed
        values["eval_every"] = min(self._whole_number(cell, values, "eval_every", 1), values["rounds"])
        try:
            experiment = Experiment(**values, algorithms=(row.algorithm,), seed=seed)
        except ValidationError as error:
            raise ConfigError(f"{self.name}, {cell}: {_format_errors(error)}") from error
        return CellRun(cell, dict(choice), experiment)

    def _whole_number(self, cell: Cell, values: Mapping[str, Any], key: str, default: int) -> int:
        value = values.get(key, default)
        if not isinstance(value, int):
            raise ConfigError(f"{self.name}, {cell}: {key}: expected a whole number, got {value!r}")
        return value

    def printed(self, cell: Cell) -> tuple[float | None, float | None]:
        """The paper's number and its spread, in percent."""
        value = self.paper.get(cell.row, {}).get(cell.column)
        return value if isinstance(value, tuple) else (value, None)

    def reason(self, cell: Cell) -> str | None:
        """Why the cell is off, where that is known."""
        found = (one.text for one in self.reasons if any(_matches(pattern, cell) for pattern in one.cells))
        return next(found, None)


def load_study(name: str) -> Study:
    """A study that comes with FedAttune, or one in a YAML file of your own.

    Raises:
        ConfigError: there is none of that name, or the file is wrong.

    """
    path = STUDY_FOLDER / f"{name}.yaml" if name in STUDIES else Path(name)
    if path.stem == "runs":
        raise ConfigError(f"{name}: a study cannot be called runs, which is the folder of unfinished runs")
    if name not in STUDIES and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"unknown study {name!r}; {did_you_mean(name, STUDIES)}")
    try:
        return Study(**{**read_yaml(path), "name": path.stem})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_format_errors(error)}") from error


def _format_errors(error: ValidationError) -> str:
    """All mistakes in one line, each with its place."""
    said = []
    for one in error.errors():
        where = ".".join(str(part) for part in one["loc"])
        said.append(f"{where}: " * bool(where) + one["msg"].removeprefix("Value error, "))
    return "; ".join(said)


def _flatten_options(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        flat = Experiment._flat(values.get("set", {}))
    except ValueError as error:
        raise ConfigError(f"set: {error}") from error
    assert isinstance(flat, dict)
    return flat


def _is_of_another(key: str, algorithm: str) -> bool:
    """Whether an option is of another algorithm: a column may set one, which then is of no concern to other rows."""
    from ...algorithms import ALGORITHMS
    from ...data import PARTITIONS

    owner = key.rpartition(".")[0]  # pfedla is an algorithm and a partition
    return owner in ALGORITHMS and owner not in PARTITIONS and owner != algorithm


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _matches(pattern: str, cell: Cell) -> bool:
    """Whether a pattern, "column/row" or one of the two, names a cell; * stands for anything, case does not count."""
    column, row = cell.column.lower(), cell.row.lower()
    # Only * stands for something else.
    left, slash, right = (
        part.strip().replace("[", "[[]").replace("?", "[?]") for part in pattern.lower().partition("/")
    )
    if slash:
        return fnmatchcase(column, left) and fnmatchcase(row, right)
    return fnmatchcase(column, left) or fnmatchcase(row, left)


def _check_names(where: str, names: Any, known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not there; {did_you_mean(name, known)}")


def tidy(values: Mapping[str, Any]) -> Iterator[str]:
    """Options as short words: lr=0.02."""
    return (
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )
