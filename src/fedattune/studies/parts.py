"""What a study is made of: measure, rows, search, claims, figure. `Study` puts these parts together."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..runs.metrics import Point

Over = Literal["max", "last10", "last"]
Mean = Literal["pooled", "uniform"]
Grid = dict[str, Annotated[list[Any], Field(min_length=2)]]
"""Option or setting -> values to try."""


RowNames = Annotated[
    list[str],
    Field(min_length=1),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
"""A row, or a list of rows."""


PrintedValue = float | tuple[float, float] | None
"""A number of the paper, or the number and its spread; None where the paper's cell is empty."""


class StudyPart(BaseModel):
    """Base of the parts of a study: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Measure(StudyPart):
    """Rule that reduces a run to one number, an accuracy in percent.

    Attributes:
        over: max (the best evaluated round, as papers report), last10 (mean over the last tenth) or last.
        mean: pooled (over all test samples) or uniform (over clients).
        called: the paper's word for the number.

    """

    over: Over
    mean: Mean
    called: str


class StudyRow(StudyPart):
    """A line of the table: a method with its options.

    Attributes:
        algorithm: name of the method.
        options: its options.
        settings: settings of the experiment; settings of the column go before them.
        grid: options or settings to choose on validation data; every combination is tried.
        grids: column -> a grid of its own.
        point: the model to score; None for the method's headline point.
        like: name of a row whose runs this row shows at another point.
        columns: columns that have this row; None for all columns.
        match: True if its numbers should match the paper's.

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


class Tuning(StudyPart):
    """Search of a grid, with fewer rounds and with validation data from the training data.

    Attributes:
        rounds: communication rounds of each combination.
        validation: share of each client's training samples to hold out for the choice.

    """

    rounds: Annotated[int, Field(ge=1)]
    validation: Annotated[float, Field(gt=0, lt=1)]


class DifferenceReason(StudyPart):
    """Reason why cells differ by more than a point; patterns as for `--cells`."""

    cells: list[str]
    text: str


class Claim(StudyPart):
    """A sentence of the paper that compares methods. Runs answer it, so no answer stands in the study.

    Attributes:
        text: the sentence.
        better: the rows that are better by the sentence.
        than: the rows that each of them is compared with.
        columns: columns to compare in; None for every column that has both rows.
        by: points that the better row should be ahead; a negative number allows a loss.
        measure: number of a run to compare; None for the measure of the study.

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
