"""Tables and numbers as text, for a terminal and for a pipe: tables are never cut, and a pipe gets plain lines."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...core.effect import IDLE_BELOW
from ...core.errors import ConfigError, did_you_mean
from ...core.metrics import METRICS, format_gain, format_interval, format_number
from ...core.text import format_percent, make_printable
from ...privacy.accounting import format_epsilon
from ..compare import BASELINE, FULL_TEST_ROWS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..compare import MeanStd, MethodRow

AnyRow = TypeVar("AnyRow")


def format_bytes(count: float) -> str:
    """Format bytes as people read them: 146.4 kB."""
    from rich.filesize import decimal

    return decimal(round(count)).replace(" bytes", " B").replace(" byte", " B")


def format_points(share: float | None, decimals: int = 2, sign: str = "") -> str:
    """Format a fraction in percent without the unit: 12.34; a dash for None."""
    return "-" if share is None else f"{100 * share:{sign}.{decimals}f}"


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> "Console":
    """Make a console that neither wraps nor colours text in a pipe, and on which no text steers the terminal."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(make_printable(text), **options)  # before it is measured

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for one in super().render(renderable, options):
                # Codes of the console itself are controls, or styles that it has not written yet.
                yield one if one.control else one._replace(text=make_printable(one.text))

    is_terminal = file is None and (sys.stderr if stderr else sys.stdout).isatty()
    return PrintableConsole(
        file=file, stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not is_terminal
    )


def make_table(*columns: str, text_columns: Sequence[str]) -> "Table":
    """Make an empty table; columns not named in `text_columns` hold numbers and stand to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in columns:
        table.add_column(title, justify="left" if title in text_columns else "right", no_wrap=True)
    return table


def fill_table(
    rows: Sequence[AnyRow],
    columns: Mapping[str, Callable[[AnyRow], str]],
    text_columns: Sequence[str] = (),
    style: Callable[[AnyRow], str | None] = lambda _: None,
) -> "Table":
    """Make a table of some rows."""
    table = make_table(*columns, text_columns=text_columns)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()), style=style(row))
    return table


def measure_width(table: "Table", console: "Console") -> int:
    """Measure the characters that the table needs when nothing is cut."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum


def print_whole(table: "Table", console: "Console") -> None:
    """Print a table at its own width, even where that is more than the terminal's."""
    before = console.width
    try:
        console.width = max(measure_width(table, console), 1)
        with console.capture() as captured:
            console.print(table, crop=False)
    finally:
        console.width = before
    for line in captured.get().splitlines():
        print(line if console.is_terminal else line.rstrip(), file=console.file)


def print_indented(text: "Text", by: int, console: "Console") -> None:
    """Print a paragraph moved to the right, all its lines on a terminal."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, by)))
    else:
        console.print(Text(" " * by) + text)


MAX_RECALLS = 10
"""Classes of a cell with recalls."""

TEXT_COLUMNS = ("model", "recall", "effect")
"""Columns that stand to the left."""


class Column(NamedTuple):
    """A column of the table of methods.

    Attributes:
        pick: the number of a row; the best is the largest, or the smallest of an error. None: no row is the best.
        is_metric: whether the numbers are of the row's metric.
        is_curve: whether they are accuracies, or the RMSE of a numeric target, whatever the metric.
    """

    format: Callable[["MethodRow"], str]
    legend: str = ""
    pick: "Callable[[MethodRow], float | None] | None" = None
    is_metric: bool = False
    is_curve: bool = False


Columns = dict[str, Column]


def _make_spread_column(name: str, legend: str = "", *, is_metric: bool = False, has_best: bool = True) -> Column:
    def pick(row: "MethodRow") -> float | None:
        spread: MeanStd | None = getattr(row, name)
        return None if spread is None else spread.mean

    def cell(row: "MethodRow") -> str:
        spread: MeanStd | None = getattr(row, name)
        if spread is None:
            return "-"
        measure = METRICS[row.metric]
        is_share = measure.is_percent if is_metric else measure.is_for_classes
        mean = format_points(spread.mean) if is_share else format_number(spread.mean)
        std = format_points(spread.std, 1) if is_share else format_number(spread.std, 2)
        return f"{mean} ±{std}" if row.n_seeds > 1 else mean

    return Column(cell, legend, pick if has_best else None, is_metric, is_curve=not is_metric)


def _format_rounds(row: "MethodRow") -> str:
    if row.rounds_to is None:  # a baseline
        return "-"
    reached = [round_ for round_ in row.rounds_to if round_ is not None]
    if not reached:
        return "never"
    mean = f"{fmean(reached):.0f}" if len(set(reached)) == 1 else f"{fmean(reached):.1f}"
    if len(reached) < row.n_seeds:
        return f"{mean} in {len(reached)} of {row.n_seeds}"
    return mean + (f" ±{pstdev(reached):.1f}" if row.n_seeds > 1 else "")


def _format_effect(value: float) -> str:
    return f"{100 * value:.1g}% (idle)" if value < IDLE_BELOW else f"{100 * value:.0f}%"


def _format_recall(row: "MethodRow") -> str:
    shares = sorted(row.recall.items(), key=lambda one: one[1]) if len(row.recall) > MAX_RECALLS else row.recall.items()
    return ", ".join(f"{name} {format_points(share, 1)}" for name, share in list(shares)[:MAX_RECALLS]) or "-"


def _format_interval(row: "MethodRow") -> str:
    return format_interval(row.interval) if row.interval else "-"


def _format_gain(row: "MethodRow") -> str:
    return "-" if row.gain is None else format_gain(row.gain)


def get_metric_title(lines: Sequence["MethodRow"]) -> str:
    """Return the title of the column with the mean of the metric."""
    metric = METRICS[lines[0].metric if lines else "accuracy"]
    return f"{metric.label} %" if metric.is_percent else metric.label


QUALITY_COLUMNS: Columns = {
    "pooled": _make_spread_column("pooled", "the same over all test rows together", is_metric=True),
    "std": _make_spread_column("std", "its spread over clients", is_metric=True, has_best=False),
    "worst 10%": _make_spread_column("worst10", "mean of the worst tenth of the clients", is_metric=True),
    "worst": _make_spread_column("worst", "the worst client", is_metric=True),
    "> local": Column(
        lambda row: format_percent(row.better_than_local, 0),
        "clients better than under local",
        lambda row: row.better_than_local,
    ),
}
EXTRA_COLUMNS: Columns = {
    "epsilon": Column(
        lambda row: "-" if row.epsilon is None else format_epsilon(row.epsilon),
        "differential privacy spent by a run: of one client, or of a training row of the client with least",
    ),
    "recall": Column(
        _format_recall,
        "percent of each class's test rows, of all clients, that are classified rightly; of many classes, the "
        f"{MAX_RECALLS} lowest",
    ),
    "effect": Column(
        lambda row: ", ".join(f"{part} {_format_effect(value)}" for part, value in row.effects.items()) or "-",
        "distance of what the method's mechanism changes (its weights, steps, ...) from the same without it, at the "
        "end; a note says which method an idle one is",
    ),
    "global": _make_spread_column("global_accuracy", "the one global model on all clients' test samples together"),
    "arrived": _make_spread_column(
        "arrived", "mean over clients that joined after training, with the model that they were sent at first"
    ),
    "new": _make_spread_column("newcomers", "the same after rounds of their own"),
}
ROUND_COLUMNS: Columns = {
    "last": _make_spread_column("last", "mean test accuracy (RMSE of numbers) after the last round"),
    "last 10%": _make_spread_column("mean_last_10pct", "mean over the last tenth of the rounds"),
    "best val.": _make_spread_column("best_validation", "mean at the round with the best validation"),
    "BMTA*": _make_spread_column(
        "bmta", "best mean test accuracy of any round, optimistic, as the test data choose the round"
    ),
    "pooled BMTA*": _make_spread_column("bmta_pooled"),
}
COST_COLUMNS: Columns = {
    "up": Column(lambda row: format_bytes(row.bytes_up)),
    "down": Column(lambda row: format_bytes(row.bytes_down)),
    "seconds": Column(lambda row: f"{row.seconds:.1f}"),
    "steps": Column(lambda row: f"{row.local_steps:,.0f}", "local mini-batch steps per client"),
}
DEFAULT_COLUMNS = ("gain", "95% interval", "worst 10%", "> local", "up", "seconds")
"""Columns that are shown beside the metric unless others are asked for."""
DROPPABLE_COLUMNS = ("seconds", "up", "> local", "worst 10%", "95% interval")
"""Columns that are left out unless asked for, the first ones first, where the table is wider than `WIDTH`."""
WIDTH = 80
"""Characters that fit every terminal."""


def choose_columns(lines: Sequence["MethodRow"], rounds_to: float | None = None) -> list[Columns]:
    """Choose all columns, in groups that belong together; columns without any number are left out."""
    quality = {
        "model": Column(lambda row: row.point),
        get_metric_title(lines): _make_spread_column("mean", is_metric=True),
        "gain": Column(
            _format_gain, f"over {lines[0].reference if lines else BASELINE}, the best alone", lambda row: row.gain
        ),
        "95% interval": Column(_format_interval, "of the gain"),
    }
    extra = {title: one for title, one in EXTRA_COLUMNS.items() if any(one.format(row) != "-" for row in lines)}
    are_accuracies = not lines or METRICS[lines[0].metric].is_for_classes
    history = ROUND_COLUMNS if are_accuracies else {}
    rounds = {} if rounds_to is None else {f"rounds to {100 * rounds_to:g}%": Column(_format_rounds)}
    groups = [quality | QUALITY_COLUMNS, extra | history | rounds, COST_COLUMNS]
    return [group for group in groups if group]


def select_columns(
    lines: Sequence["MethodRow"], rounds_to: float | None = None, names: str | None = None
) -> list[Columns]:
    """Select columns, in groups: `all`, or titles with commas between; by default, those that fit 80 characters."""
    groups = choose_columns(lines, rounds_to)
    if names == "all":
        return groups
    columns = {title: cell for group in groups for title, cell in group.items()}
    if names is None:
        extra = [title for title in columns if title == "epsilon" or title.startswith("rounds")]
        wanted = [get_metric_title(lines), *DEFAULT_COLUMNS, *extra]
    else:
        wanted = pick_columns(names, list(columns))
    return [{title: columns[title] for title in wanted}]


def pick_columns(names: str, titles: Sequence[str]) -> list[str]:
    """Pick columns by their titles, with commas between; a percent sign at the end may be left out."""
    known = {title.removesuffix(" %"): title for title in titles} | {title: title for title in titles}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--columns {name}: no such column; {did_you_mean(name, titles)}, or all")
    return [known[name] for name in wanted]


def write_legend(
    lines: Sequence["MethodRow"], rounds_to: float | None = None, columns: Sequence[Columns] | None = None
) -> str:
    """Explain the columns that are shown; by default all."""
    shown = {title: one for group in columns or choose_columns(lines, rounds_to) for title, one in group.items()}
    metric = f"{get_metric_title(lines)}: mean over clients on test rows (under {FULL_TEST_ROWS}: less weight)"
    if any(row.n_seeds > 1 for row in lines):
        metric += ", ± over runs"
    parts = [metric, *(f"{title}: {one.legend}" for title, one in shown.items() if one.legend)]
    if rounds_to is not None and any(title.startswith("rounds to") for title in shown):
        parts.append(f"rounds to {100 * rounds_to:g}%: first round with that mean")
    return "; ".join(parts)


def print_methods(
    lines: Sequence["MethodRow"], console: "Console", rounds_to: float | None = None, columns: str | None = None
) -> None:
    """Print methods side by side without cutting a number: in several tables if one does not fit the width."""
    methods = {i: row.mean.mean for i, row in enumerate(lines) if row.mean and row.point != "-"}  # no baselines
    sign = METRICS[lines[0].metric].sign if lines else 1
    best = lines[max(methods, key=lambda i: sign * methods[i])] if methods and len(lines) > 1 else None
    method = {"method": Column(lambda row: row.algorithm)}

    def make(columns: Columns) -> "Table":
        def style(row: "MethodRow") -> str | None:
            return "bold" if row == best else None

        cells = {title: one.format for title, one in (method | columns).items()}
        return fill_table(lines, cells, ("method", *TEXT_COLUMNS), style)

    def fits(columns: Columns) -> bool:
        return not console.is_terminal or measure_width(make(columns), console) <= console.width

    groups = select_columns(lines, rounds_to, columns)
    if columns is None:
        for title in DROPPABLE_COLUMNS:
            if measure_width(make(groups[0]), console) > WIDTH:
                groups = [{name: cell for name, cell in groups[0].items() if name != title}]
    parts: list[Columns] = [{}]
    for group in groups:
        if not fits(parts[-1] | group) and fits(group):
            parts.append({})
        for title, cell in group.items():
            if parts[-1] and not fits(parts[-1] | {title: cell}):
                parts.append({})
            parts[-1][title] = cell
    for part in parts:
        print_whole(make(part), console)
    more = "" if columns else "; --columns all: more"
    console.print(write_legend(lines, rounds_to, groups) + more, style="dim")
