"""Study: one table or figure of a paper, as settings, columns (data and model), rows (methods) and printed numbers."""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from ..core.errors import ConfigError, did_you_mean
from ..core.io import read_yaml
from ..core.options import Count, StrictSchema, check_options, describe_errors, list_options, look_up, option
from ..core.own_code import confirm_references, list_references
from ..core.settings import Settings
from ..experiments.config import NON_IDENTITY_FIELDS, Experiment, flatten_options
from ..experiments.output import AllowCode, Processes
from ..runs.folder import RESUMABLE_SETTINGS
from ..runs.metrics import Point

Over = Literal["max", "last10", "last"]
Mean = Literal["pooled", "uniform"]
Grid = dict[str, Annotated[list[Any], Field(min_length=2)]]
"""Option or setting -> values to try."""
RowNames = Annotated[
    list[str], Field(min_length=1), BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]
"""A row, or a list of rows."""
PrintedValue = float | tuple[float, float] | None
"""A number of the paper, or the number and its spread; None where the paper's cell is empty."""


class StudyPart(BaseModel):
    """Base of the parts of a study: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Measure(StudyPart):
    """Rule that reduces a run to one number, an accuracy in percent, which the paper has `called` so.

    `over` is max (the best evaluated round, as papers report), last10 (mean over the last tenth) or last; `mean` is
    pooled (over all test samples) or uniform (over clients).
    """

    over: Over
    mean: Mean
    called: str


class StudyRow(StudyPart):
    """A line of the table: a method with its options."""

    algorithm: str = ""
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}  # of the experiment; settings of the column go before them
    grid: Grid = {}  # options or settings to choose on validation data; every combination is tried
    grids: dict[str, Grid] = {}  # column -> a grid of its own
    point: Point | None = None  # the model to score; None for the method's evaluation point
    like: str | None = None  # name of a row whose runs this row shows at another point
    columns: list[str] | None = None  # columns that have this row; None for all columns
    match: bool = True  # whether its numbers should match the paper's


class Tuning(StudyPart):
    """Search of a grid, with fewer rounds and a share of each client's training samples held out for validation."""

    rounds: Annotated[int, Field(ge=1)]
    validation: Annotated[float, Field(gt=0, lt=1)]


class DifferenceReason(StudyPart):
    """Reason why cells differ by more than a point; patterns as for `--cells`."""

    cells: list[str]
    text: str


class Claim(StudyPart):
    """A sentence of the paper that compares methods. Runs answer it, so no answer stands in the study.

    Rows in `better` should be `by` points ahead of those in `than`, in some columns (None for every one that has both),
    by the measure of the study or another one. A negative `by` allows a loss.
    """

    text: Annotated[str, Field(min_length=1)]
    better: RowNames
    than: RowNames
    columns: Annotated[list[str], Field(min_length=1)] | None = None
    by: float = 0.0
    measure: Measure | None = None


class FigureSpec(StudyPart):
    """Kind of figure: curves of accuracy over rounds, bars of our and the paper's numbers, or mixing matrices."""

    kind: Literal["bars", "curves", "sweep", "matching", "weights", "heat_map"] = "bars"
    caption: str = ""
    component: str | None = None
    x: str = ""


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


@dataclass(frozen=True)
class CellRun:
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
        own = {k.removeprefix(f"{name}."): v for k, v in self.experiment.set.items() if k.startswith(f"{name}.")}
        values = {k: v for k, v in own.items() if k in option_names}  # a partition can have the name of a method
        return check_options(name, ALGORITHMS[name], values)

    @cached_property
    def id(self) -> str:
        """Twelve hex digits. Runs with equal results have equal ids in all studies."""
        excluded = NON_IDENTITY_FIELDS | RESUMABLE_SETTINGS | {"early_stopping", "small_clients"}
        values = self.experiment.to_keywords(mode="json", exclude_defaults=True, exclude=excluded)
        if (every := self.experiment.eval_every) > 1:  # 1 was the default when the first runs were stored
            values["eval_every"] = every
        else:
            values.pop("eval_every", None)
        (name,) = self.experiment.algorithms
        values["set"] = self.experiment.set | {f"{name}.{key}": value for key, value in self.options.items()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


class StudyOptions(StrictSchema):
    """The options of `fedattune reproduce`."""

    cells: str = option('only these cells: columns, rows, or "column/row"; * matches anything; separate by commas', "*")
    rounds: Count | None = option("maximum number of rounds (default: the paper's)")
    mixed_precision: Precision | None = option(
        "type of matrix products and convolutions in training (default: the study's)"
    )
    seeds: Count | None = option("runs of each cell (default: the study's)")
    no_search: bool = option("do not search the grids: take the middle value of each", False)
    resume: bool = option("continue with the results in the folder", False)
    show: bool = option("train nothing; print the stored results", False)
    out: Path = option("folder of all studies; each study has a subfolder", Path("results"))
    allow_code: AllowCode = ()
    data_dir: Path | None = option("folder with the files of the data sets, instead of a download")
    processes: Processes = "auto"
    device: Literal["auto", "cpu", "cuda"] = option("where tensors live", "auto")
    quiet: bool = option("show no progress, only the result", False)

    @property
    def extent(self) -> Extent:
        return Extent(self.rounds, self.mixed_precision)

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of all experiments that change no number of a paper: places of data, and the judged models."""
        return {"device": self.device, "early_stopping": "off"} | ({"data_dir": self.data_dir} if self.data_dir else {})


STUDY_FOLDER = Path(__file__).parent
STUDIES = tuple(sorted(path.stem for path in STUDY_FOLDER.glob("*.yaml")))
"""Names of the studies that come with FedAttune."""


class Study(StudyPart):
    """One table or figure of a paper."""

    name: str
    title: str
    source: str
    about: str = ""  # the protocol, and its deviations from the paper
    measure: Measure
    settings: dict[str, Any] = {}  # of all experiments; those of a row go before them, those of a column before both
    seeds: Annotated[int, Field(ge=1)] = 3  # runs of every cell
    populations: bool = False  # whether each seed has its own split of the data
    columns: dict[str, dict[str, Any]]
    rows: dict[str, StudyRow]
    tuning: Tuning | None = None
    paper: dict[str, dict[str, PrintedValue]] = {}  # row -> column -> printed number
    gap_to: str | None = None  # a row, if the paper prints its accuracy minus the own accuracy of each row
    differences: list[tuple[str, str]] = []  # pairs of rows, to show the first minus the second
    claims: list[Claim] = []  # sentences of the paper to answer from the runs
    answers_claims: bool = False  # demands claims, local and fedavg_ft in all columns, and searches of one size in each
    reasons: list[DifferenceReason] = []
    figure: FigureSpec = FigureSpec()
    mixing: bool = False  # whether to keep the mixing matrices
    _runs: dict[str, CellRun] = PrivateAttr(default_factory=dict)  # tables ask for the same ones again and again

    @model_validator(mode="after")
    def _check_consistency(self) -> "Study":
        from ..algorithms import ALGORITHMS

        for name, row in self.rows.items():
            if bool(row.like) == bool(row.algorithm):
                raise ValueError(f"row {name!r}: expected either algorithm or like")
            if row.like and (row.like not in self.rows or self.rows[row.like].like):
                raise ValueError(f"row {name!r}: like: {row.like!r} should be a row with an algorithm")
            if row.like and (row.point is None or row.options or row.settings or row.grid or row.grids):
                raise ValueError(f"row {name!r}: a row that is like another one has a point, and nothing of its own")
            if row.algorithm:
                look_up("algorithm", row.algorithm, ALGORITHMS)
            if (row.grid or row.grids) and not self.tuning:
                raise ValueError(f"row {name!r} has a grid, so the study should say how it is searched: tuning")
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
        for number, claim in enumerate(self.claims, 1):
            self._check_claim(f"claim {number}", claim)
        if self.answers_claims:
            self._check_fairness()
        for cell in self.cells():
            try:
                self.make_run(cell, self.middle_choice(cell), 0).options  # noqa: B018 (it is checked)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self

    def _check_claim(self, where: str, claim: Claim) -> None:
        """Check that a claim compares different cells of the table, at least one pair for each pair of rows."""
        _check_names(where, [*claim.better, *claim.than], self.rows)
        _check_names(f"{where}: columns", claim.columns or (), self.columns)
        pairs = self.list_comparisons(claim)
        for one, other in pairs:
            if one == other:
                raise ValueError(f"{where}: expected two different rows, got {one.row!r} twice")
            for cell in {one, other} - set(self.cells()):
                raise ValueError(f"{where}: the row {cell.row!r} is not in column {cell.column!r}")
        for better, than in itertools.product(claim.better, claim.than):
            if (better, than) not in {(one.row, other.row) for one, other in pairs}:
                raise ValueError(f"{where}: no column has both rows, {better!r} and {than!r}")

    def _check_fairness(self) -> None:
        """Check that every column has the two baselines, and one number of combinations in all searches."""
        if not self.claims:
            raise ValueError("answers_claims: the study has no claims; add claims, or leave answers_claims out")
        for column in self.columns:
            cells = [cell for cell in self.cells() if cell.column == column and not self.rows[cell.row].like]
            for name in ("local", "fedavg_ft"):
                if not any(self.rows[cell.row].algorithm == name for cell in cells):
                    raise ValueError(f"answers_claims: column {column!r} has no row with algorithm {name}; add it")
            sizes = {cell.row: len(self.choices(cell)) for cell in cells}
            counts = ", ".join(f"{row} {size}" for row, size in sizes.items())
            if len(set(sizes.values())) > 1:
                raise ValueError(
                    f"answers_claims: column {column!r}: expected one number of combinations for all rows, got "
                    f"{counts}; give every row a grid of one size"
                )

    def list_comparisons(self, claim: Claim) -> list[tuple[Cell, Cell]]:
        """List the pairs of cells that a claim compares, row by row: the better one by its sentence first."""
        pairs = (
            (Cell(better, column), Cell(than, column))
            for better, than in itertools.product(claim.better, claim.than)
            for column in claim.columns or self.columns
        )
        return [pair for pair in pairs if claim.columns or set(pair) <= set(self.cells())]

    def cells(self, selection: str = "*") -> list[Cell]:
        """Return the cells, column by column, that match one of the comma-separated patterns; see `--cells`."""
        cells = [
            Cell(name, column)
            for column in self.columns
            for name, row in self.rows.items()
            if row.columns is None or column in row.columns
        ]
        patterns = [one.strip() for one in selection.split(",") if one.strip()]
        if not patterns:
            raise ConfigError("--cells names no cell; leave it out for all of them")
        for pattern in patterns:
            if not any(_matches(pattern, cell) for cell in cells):
                names = did_you_mean(pattern, [*self.columns, *self.rows])
                raise ConfigError(f"--cells {pattern}: {self.name} has no such cell; {names}")
        return [cell for cell in cells if any(_matches(pattern, cell) for pattern in patterns)]

    def choices(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the combinations of the cell's grid; one empty combination if there is no grid."""
        grid = self._grid(cell)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def middle_choice(self, cell: Cell) -> dict[str, Any]:
        """Return the middle value of each list of the cell's grid, for runs without a search."""
        return {key: values[len(values) // 2] for key, values in self._grid(cell).items()}

    def _grid(self, cell: Cell) -> Grid:
        row = self.source_row(cell)
        return row.grids.get(cell.column, row.grid)

    def source_row(self, cell: Cell) -> StudyRow:
        row = self.rows[cell.row]
        return self.rows[row.like] if row.like else row

    def make_run(
        self, cell: Cell, choice: Mapping[str, Any], seed: int, extent: Extent = WHOLE, *, tuning: bool = False
    ) -> CellRun:
        """Make one run of a cell with a combination of its grid; with `tuning`, a run of the search."""
        key = repr((cell, choice, seed, extent, tuning))
        if key not in self._runs:
            self._runs[key] = self._make_run(cell, choice, seed, extent, tuning=tuning)
        return self._runs[key]

    def _make_run(self, cell: Cell, choice: Mapping[str, Any], seed: int, extent: Extent, *, tuning: bool) -> CellRun:
        row = self.source_row(cell)
        values = {"small_clients": "error", **self.settings, **row.settings, **self.columns[cell.column]}
        if own := values.keys() & {"algorithms", "seed", "seeds"}:
            raise ConfigError(f"{self.name}, {cell}: {', '.join(sorted(own))} cannot be among the settings")
        options: dict[str, Any] = {}
        for given in (one.get("set", {}) for one in (self.settings, row.settings, self.columns[cell.column])):
            if not isinstance(given, Mapping):
                raise ConfigError("set: expected options such as {fedmcsa.sigma: 50} or {fedmcsa: {sigma: 50}}")
            options |= flatten_options(given)
        values["set"] = {
            **{key: value for key, value in options.items() if not _is_of_another(key, row.algorithm)},
            **{f"{row.algorithm}.{key}": value for key, value in row.options.items()},
        }
        for key, value in choice.items():
            if key in Settings.flat_fields():
                values[key] = value
            else:
                values["set"][f"{row.algorithm}.{key}"] = value
        try:
            experiment = Experiment(**values, algorithms=(row.algorithm,), seed=seed)
        except ValidationError as error:
            raise ConfigError(f"{self.name}, {cell}: {'; '.join(describe_errors(error))}") from error
        rounds = min(extent.rounds or experiment.rounds, experiment.rounds)
        changes: dict[str, Any] = {"mixed_precision": extent.mixed_precision} if extent.mixed_precision else {}
        if tuning and self.tuning:
            rounds = min(self.tuning.rounds, rounds)
            changes["validation"] = self.tuning.validation
        if self.populations:
            changes["split_seed"] = seed
        changes["rounds"] = rounds
        if experiment.evaluation.every:
            changes["eval_every"] = min(experiment.evaluation.every, rounds)
        return CellRun(cell, dict(choice), experiment.replace(**changes))

    def paper_value(self, cell: Cell) -> tuple[float | None, float | None]:
        value = self.paper.get(cell.row, {}).get(cell.column)
        return value if isinstance(value, tuple) else (value, None)

    def find_reason(self, cell: Cell) -> str | None:
        texts = (one.text for one in self.reasons if any(_matches(pattern, cell) for pattern in one.cells))
        return next(texts, None)


def load_study(name: str, allow_code: Sequence[str] = ()) -> Study:
    """Load a study that comes with FedAttune, by name, or your own from a YAML file, whose code the user has named."""
    path = STUDY_FOLDER / f"{name}.yaml" if name in STUDIES else Path(name)
    if path.stem == "runs":
        raise ConfigError(f"{name}: a study cannot be called runs, which is the folder of unfinished runs")
    if name not in STUDIES and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"unknown study {name!r}; {did_you_mean(name, STUDIES)}")
    content = read_yaml(path)
    confirm_references(list_references(content), allow_code, path)
    try:
        return Study(**{**content, "name": path.stem})
    except ValidationError as error:
        parts = [(".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")) for one in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(': '.join(filter(None, one)) for one in parts)}") from error


def _is_of_another(key: str, algorithm: str) -> bool:
    """Return True for an option of another algorithm; a column may set options for one of its rows."""
    from ..algorithms import ALGORITHMS
    from ..data import PARTITIONS

    owner = key.rpartition(".")[0]  # pfedla is an algorithm and a partition
    return owner in ALGORITHMS and owner not in PARTITIONS and owner != algorithm


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _matches(pattern: str, cell: Cell) -> bool:
    """Return True if a pattern, "column/row" or one of the two, matches a cell; * matches anything, case is ignored."""
    column, row = cell.column.lower(), cell.row.lower()
    # Only * is special.
    parts = pattern.lower().replace("[", "[[]").replace("?", "[?]").partition("/")
    first, slash, second = (part.strip() for part in parts)
    if slash:
        return fnmatchcase(column, first) and fnmatchcase(row, second)
    return fnmatchcase(column, first) or fnmatchcase(row, first)


def _check_names(where: str, names: Any, allowed_names: Mapping[str, Any]) -> None:
    for name in names:
        if name not in allowed_names:
            raise ValueError(f"{where}: unknown name {name!r}; {did_you_mean(name, allowed_names)}")


def format_options(values: Mapping[str, Any], separator: str = ", ") -> str:
    """Format options as short words, such as lr=0.02."""
    words = (f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())
    return separator.join(words)
