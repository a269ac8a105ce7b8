"""Results side by side, as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from .text import make_table, print_whole, said_bytes, width_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .numbers import Numbers, Point

ALONE = "local"  # the method that everything is compared with: each client trains by itself
Run = TypeVar("Run", bound="Numbers")
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
    bmta: Spread | None
    bmta_pooled: Spread | None
    mean_last_10pct: Spread | None
    rounds_to: list[int | None] | None  # per seed, of the accuracy asked for; None: not reached
    generalised: Spread | None
    arrived: Spread | None  # clients that joined after training: with what they were sent first
    newcomers: Spread | None  # and after rounds of their own
    bytes_up: float
    bytes_down: float
    seconds: float
    local_steps: float
    n_seeds: int


def by_algorithm(results: Sequence[Run]) -> dict[str, list[Run]]:
    """The results of each method, one per seed, in the order given."""
    groups: dict[str, list[Run]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(result)
    return groups


def client_accuracy(runs: Sequence["Numbers"]) -> Array:
    """Test accuracy per client (N,) at the headline point, averaged over the seeds."""
    per_run = [[getattr(client, run.headline) for client in run.clients] for run in runs]
    mean: Array = np.array(per_run, dtype=np.float64).mean(axis=0)
    return mean


def paired(groups: Mapping[str, list[Run]], algorithm: str) -> tuple[list[Run], list[Run]]:
    """The runs of a method and those of `local` with the same seeds; all of both where they share no seed."""
    mine, alone = groups[algorithm], groups[ALONE]
    both = {run.settings.seed for run in mine} & {run.settings.seed for run in alone}
    if not both:
        return mine, alone
    first, second = ([run for run in runs if run.settings.seed in both] for runs in (mine, alone))
    return first, second


def gap(mine: Array, alone: Array) -> Array:
    """How much one is above the other; who was right as often neither gains nor loses by the rounding of means."""
    return np.round(mine - alone, 12) + 0.0


def gains(groups: Mapping[str, list[Run]], algorithm: str) -> Array | None:
    """Gain of every client over training alone (N,), in fractions, averaged over the seeds; None without `local`."""
    if ALONE not in groups or algorithm not in groups:
        return None
    mine, alone = paired(groups, algorithm)
    return gap(client_accuracy(mine), client_accuracy(alone))


def spread(values: Sequence[float]) -> Spread:
    """Mean and population standard deviation of some numbers."""
    return Spread(float(np.mean(values)), float(np.std(values)))


def _maybe(values: Sequence[float | None]) -> Spread | None:
    """The spread of the seeds that have the number; None if none has."""
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def _best(run: "Numbers", mean: str) -> float | None:
    return run.bmta[mean]["accuracy"] if run.bmta else None


def _of_newcomers(run: "Numbers", point: "Point") -> float | None:
    """Mean over the newcomers: as they arrived, or after rounds of their own."""
    found = [getattr(newcomer, point) for newcomer in run.newcomers]
    return float(np.mean(found)) if found else None


def rows(results: Sequence["Numbers"], rounds_to: float | None = None) -> list[Row]:
    """One row per method, in the order given; `rounds_to`: a mean test accuracy, a fraction, to be reached."""
    groups = by_algorithm(results)
    table = []
    for name, runs in groups.items():
        final = [run.metrics for run in runs]
        best = [run.best_validation["acc_uniform"] if run.best_validation else None for run in runs]
        late = [run.mean_last_10pct["acc_uniform"] if run.mean_last_10pct else None for run in runs]
        gained = None if name == ALONE else gains(groups, name)
        table.append(
            Row(
                algorithm=name,
                point=runs[0].headline,
                mean=spread([one["acc_uniform"] for one in final]),
                pooled=spread([one["acc_pooled"] for one in final]),
                std=spread([one["acc_std"] for one in final]),
                worst10=spread([one["acc_worst10"] for one in final]),
                better_than_local=None if gained is None else float(np.mean(gained > 0)),
                best_validation=_maybe(best),
                bmta=_maybe([_best(run, "uniform") for run in runs]),
                bmta_pooled=_maybe([_best(run, "pooled") for run in runs]),
                mean_last_10pct=_maybe(late),
                rounds_to=None if rounds_to is None else [run.rounds_to(rounds_to) for run in runs],
                generalised=_maybe([run.generalised for run in runs]),
                arrived=_maybe([_of_newcomers(run, "received") for run in runs]),
                newcomers=_maybe([_of_newcomers(run, "trained") for run in runs]),
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


def _rounds(row: Row) -> str:
    """The mean round in which the accuracy was reached, and of how many seeds where not all reached it."""
    reached = [round_ for round_ in row.rounds_to or () if round_ is not None]
    if not reached:
        return "never"
    mean = f"{np.mean(reached):.0f}" if len(set(reached)) == 1 else f"{np.mean(reached):.1f}"
    if len(reached) < row.n_seeds:
        return f"{mean} in {len(reached)} of {row.n_seeds}"
    return mean + (f" ±{np.std(reached):.1f}" if row.n_seeds > 1 else "")


QUALITY: dict[str, Cell] = {
    "model": lambda row: row.point,
    "mean %": lambda row: _percent(row.mean, row.n_seeds),
    "pooled %": lambda row: _percent(row.pooled, row.n_seeds),
    "std": lambda row: _percent(row.std, row.n_seeds),
    "worst 10%": lambda row: _percent(row.worst10, row.n_seeds),
    "> local": lambda row: "-" if row.better_than_local is None else f"{100 * row.better_than_local:.0f}%",
}
BEYOND: dict[str, Cell] = {
    "global %": lambda row: _percent(row.generalised, row.n_seeds),
    "arrived %": lambda row: _percent(row.arrived, row.n_seeds),
    "new %": lambda row: _percent(row.newcomers, row.n_seeds),
}
ROUNDS: dict[str, Cell] = {
    "last 10%": lambda row: _percent(row.mean_last_10pct, row.n_seeds),
    "best val.": lambda row: _percent(row.best_validation, row.n_seeds),
    "BMTA*": lambda row: _percent(row.bmta, row.n_seeds),
    "pooled BMTA*": lambda row: _percent(row.bmta_pooled, row.n_seeds),
}
COST: dict[str, Cell] = {
    "up": lambda row: said_bytes(row.bytes_up),
    "down": lambda row: said_bytes(row.bytes_down),
    "seconds": lambda row: f"{row.seconds:.1f}",
    "steps": lambda row: f"{row.local_steps:,.0f}",
}
LEGEND = (
    "mean, pooled, std, worst 10%: test accuracy over clients, over all samples, its spread and its mean "
    "over the worst tenth of clients, last round; > local: clients better than alone; last 10%: mean over the "
    "last tenth of the rounds; best val.: mean at the round with the best validation; BMTA*: best mean test "
    "accuracy of any round, optimistic, for the test data choose the round; steps: local mini-batch steps per "
    "client"
)
MORE = {
    "global %": "the one global model on all clients' test samples together",
    "arrived %": "mean over clients that joined after training, with the model that they were sent at first",
    "new %": "the same after rounds of their own",
}


def columns(lines: Sequence[Row], rounds_to: float | None = None) -> list[dict[str, Cell]]:
    """The columns in groups that belong together; those that no method has a number for are left out."""
    has = {
        "global %": any(row.generalised is not None for row in lines),
        "arrived %": any(row.arrived is not None for row in lines),
        "new %": any(row.newcomers is not None for row in lines),
    }
    beyond = {title: cell for title, cell in BEYOND.items() if has[title]}
    asked = {} if rounds_to is None else {f"rounds to {100 * rounds_to:g}%": _rounds}
    return [QUALITY, beyond | ROUNDS | asked, COST]


def legend(lines: Sequence[Row], rounds_to: float | None = None) -> str:
    """What the columns mean."""
    said = [LEGEND]
    titles = [title for group in columns(lines, rounds_to) for title in group]
    said += [f"{title.removesuffix(' %')}: {text}" for title, text in MORE.items() if title in titles]
    if rounds_to is not None:
        said.append(
            f"rounds to {100 * rounds_to:g}%: the first evaluated round with that mean or more, of the seeds that "
            "reach it"
        )
    return "; ".join(said)


def _table(lines: Sequence[Row], columns: dict[str, Cell]) -> "Table":
    table = make_table("method", *columns, left=("method", "model"))
    best = max(row.mean.mean for row in lines)
    for row in lines:
        style = "bold" if row.mean.mean == best and len(lines) > 1 else None
        table.add_row(row.algorithm, *(cell(row) for cell in columns.values()), style=style)
    return table


def _parts(
    lines: Sequence[Row], groups: Sequence[dict[str, Cell]], console: "Console"
) -> list[dict[str, Cell]]:
    """The columns in few tables that fit the width; a group stays whole where it can."""

    def fits(wanted: dict[str, Cell]) -> bool:
        return not console.is_terminal or width_of(_table(lines, wanted), console) <= console.width

    parts: list[dict[str, Cell]] = [{}]
    for group in groups:
        if not fits(parts[-1] | group) and fits(group):
            parts.append({})
        for title, cell in group.items():
            if parts[-1] and not fits(parts[-1] | {title: cell}):
                parts.append({})
            parts[-1][title] = cell
    return parts


def print_table(lines: Sequence[Row], console: "Console", rounds_to: float | None = None) -> None:
    """Print the rows without ever cutting a number: in several parts where one does not fit the width."""
    for part in _parts(lines, columns(lines, rounds_to), console):
        print_whole(_table(lines, part), console)
    console.print(legend(lines, rounds_to), style="dim")
