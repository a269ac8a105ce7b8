"""Results side by side, as a table."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .text import make_table, print_whole, width_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .result import Result

ALONE = "local"  # the method that everything is compared with: each client trains by itself
Array = np.ndarray[Any, np.dtype[np.float64]]


class Spread(NamedTuple):
    """Mean and population standard deviation over the seeds."""

    mean: float
    std: float


@dataclass(frozen=True)
class Row:
    """One line of the table: a method, its numbers averaged over the seeds; accuracies are fractions."""

    algorithm: str
    point: str  # received or trained: when the method's model is meant to be used
    mean: Spread
    pooled: Spread
    std: Spread
    worst10: Spread
    better_than_local: float | None
    best_validation: Spread | None
    bytes_up: float
    bytes_down: float
    seconds: float
    local_steps: float
    n_seeds: int


def by_algorithm(results: Sequence["Result"]) -> dict[str, list["Result"]]:
    """The results of each method, one per seed, in the order given."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(result)
    return groups


def client_accuracy(runs: Sequence["Result"]) -> Array:
    """Test accuracy per client (N,) at the headline point, averaged over the seeds."""
    per_run = [[getattr(client, run.headline) for client in run.clients] for run in runs]
    mean: Array = np.array(per_run, dtype=np.float64).mean(axis=0)
    return mean


def _spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), float(np.std(values)))


def rows(results: Sequence["Result"]) -> list[Row]:
    """One row per method, in the order given."""
    groups = by_algorithm(results)
    alone = client_accuracy(groups[ALONE]) if ALONE in groups else None
    table = []
    for name, runs in groups.items():
        final = [run.metrics for run in runs]
        best = [run.best_validation["acc_uniform"] for run in runs if run.best_validation]
        better = None if alone is None or name == ALONE else float(np.mean(client_accuracy(runs) > alone))
        table.append(
            Row(
                algorithm=name,
                point=runs[0].headline,
                mean=_spread([one["acc_uniform"] for one in final]),
                pooled=_spread([one["acc_pooled"] for one in final]),
                std=_spread([one["acc_std"] for one in final]),
                worst10=_spread([one["acc_worst10"] for one in final]),
                better_than_local=better,
                best_validation=_spread(best) if best else None,
                bytes_up=float(np.mean([run.bytes_up for run in runs])),
                bytes_down=float(np.mean([run.bytes_down for run in runs])),
                seconds=float(np.mean([run.seconds for run in runs])),
                local_steps=float(np.mean([run.local_steps for run in runs])),
                n_seeds=len(runs),
            )
        )
    return table


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON-able dictionaries."""
    return [
        {key: value._asdict() if isinstance(value, Spread) else value for key, value in vars_.items()}
        for vars_ in ({name: getattr(row, name) for name in asdict(row)} for row in table)
    ]


# --- the table -----------------------------------------------------------------------------------------

Cell = Callable[[Row], str]


def _percent(spread: Spread | None, n_seeds: int) -> str:
    if spread is None:
        return "-"
    return f"{100 * spread.mean:.2f}" + (f" ±{100 * spread.std:.1f}" if n_seeds > 1 else "")


def _bytes(count: float) -> str:
    from rich.filesize import decimal

    return decimal(round(count)).replace(" bytes", " B").replace(" byte", " B")


QUALITY: dict[str, Cell] = {
    "model": lambda row: row.point,
    "mean %": lambda row: _percent(row.mean, row.n_seeds),
    "pooled %": lambda row: _percent(row.pooled, row.n_seeds),
    "std": lambda row: _percent(row.std, row.n_seeds),
    "worst 10%": lambda row: _percent(row.worst10, row.n_seeds),
    "> local": lambda row: "-" if row.better_than_local is None else f"{100 * row.better_than_local:.0f}%",
    "best val.": lambda row: _percent(row.best_validation, row.n_seeds),
}
COST: dict[str, Cell] = {
    "up": lambda row: _bytes(row.bytes_up),
    "down": lambda row: _bytes(row.bytes_down),
    "seconds": lambda row: f"{row.seconds:.1f}",
    "steps": lambda row: f"{row.local_steps:,.0f}",
}
LEGEND = (
    "mean, pooled, std, worst 10%: test accuracy over clients, over all samples, its spread and its mean "
    "over the worst tenth of clients, last round; > local: clients better than alone; best val.: mean at the "
    "round with the best validation; steps: local mini-batch steps per client"
)


def _table(lines: Sequence[Row], columns: dict[str, Cell]) -> "Table":
    table = make_table("method", *columns, left=("method", "model"))
    best = max(row.mean.mean for row in lines)
    for row in lines:
        style = "bold" if row.mean.mean == best and len(lines) > 1 else None
        table.add_row(row.algorithm, *(cell(row) for cell in columns.values()), style=style)
    return table


def print_table(lines: Sequence[Row], console: "Console") -> None:
    """Print the rows without ever cutting a number: in two parts where one does not fit the width."""
    whole = _table(lines, QUALITY | COST)
    fits = not console.is_terminal or width_of(whole, console) <= console.width
    for part in [whole] if fits else [_table(lines, QUALITY), _table(lines, COST)]:
        print_whole(part, console)
    console.print(LEGEND, style="dim")
