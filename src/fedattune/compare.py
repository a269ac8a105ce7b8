"""Results side by side, and the verdict: whether to collaborate, with which method, and who loses."""

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
RESAMPLES = 10_000
FEWEST = 5  # clients below which resampling them says nothing
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


# --- the verdict ---------------------------------------------------------------------------------------


def interval(gains: Array) -> tuple[float, float]:
    """95% bootstrap interval of the mean gain over clients; always the same for the same gains."""
    generator = np.random.default_rng(0)
    chunk = max(1, 1_000_000 // len(gains))  # bounds memory for many clients
    resamples = RESAMPLES if len(gains) <= 1000 else RESAMPLES // 5
    means: list[float] = []
    while len(means) < resamples:
        picks = generator.integers(len(gains), size=(min(chunk, resamples - len(means)), len(gains)))
        means += gains[picks].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def verdict(results: Sequence["Result"]) -> str:
    """One plain sentence: whether collaborating helps here, which method, and how many clients would lose."""
    groups = by_algorithm(results)
    others = [name for name in groups if name != ALONE]
    if ALONE not in groups or not others:
        return "Nothing to compare: give at least one method beside local."
    validated = all(run.validation is not None for run in results)
    score: Callable[[str], float] = (
        (lambda name: float(np.mean([run.validation or 0.0 for run in groups[name]])))
        if validated
        else (lambda name: float(client_accuracy(groups[name]).mean()))
    )
    how = "by validation accuracy" if validated else "by test accuracy, there being no validation data"
    method = max(others, key=score)
    alone, chosen = client_accuracy(groups[ALONE]), client_accuracy(groups[method])
    gains = 100 * (chosen - alone)
    low, high = interval(gains)
    few = len(gains) < FEWEST
    spread = "" if few else f"; 95% interval of the gain over clients {low:+.2f} to {high:+.2f}"
    numbers = (
        f"{abs(gains.mean()):.2f} points {'above' if gains.mean() >= 0 else 'below'} training alone "
        f"on test data ({100 * chosen.mean():.2f}% against {100 * alone.mean():.2f}%{spread})"
    )
    losers = _losers(gains, [client.id for client in groups[ALONE][0].clients])
    # A tie goes to local: it needs no collaboration.
    local_best, tied = score(ALONE) >= score(method), score(ALONE) == score(method)
    if few:
        conclusion = f"{len(gains)} clients are too few to say whether collaborating helps"
    elif high < 0:
        conclusion = "Collaborating does not help here"
    elif local_best or low <= 0:
        conclusion = "No clear gain from collaborating is shown here"
    else:
        return f"Collaborating helps here: use {method} (chosen {how}), which is {numbers}; {losers}."
    if tied:
        return f"{conclusion}: local and {method} are equally good {how}; {method} is {numbers}; {losers}."
    if local_best:
        return (
            f"{conclusion}: local is the best method {how}; the next one, {method}, is {numbers}; {losers}."
        )
    return f"{conclusion}: {method}, the best method {how}, is {numbers}; {losers}."


def _losers(gains: Array, ids: Sequence[str]) -> str:
    """How many clients would lose, and which one most."""
    count = int((gains < 0).sum())
    if count == 0:
        return f"none of the {len(gains)} clients would lose"
    worst = int(gains.argmin())
    most = f"{'client ' if count == 1 else 'most of all client '}{ids[worst]} with {gains[worst]:.2f} points"
    return f"{count} of {len(gains)} clients would lose, {most}"


def fairness_notes(results: Sequence["Result"]) -> list[str]:
    """What to say where the methods were not given the same, so that a gap is not misread."""
    notes = []
    groups = by_algorithm(results)
    steps = {name: float(np.mean([run.local_steps for run in runs])) for name, runs in groups.items()}
    if max(steps.values()) - min(steps.values()) > 0.005 * max(steps.values()):
        said = _grouped({name: f"{count:,.0f}" for name, count in steps.items()})
        settings = results[0].settings
        reasons = []
        if settings.cohort_size(len(results[0].clients)) < len(results[0].clients):
            reasons.append(
                "some train only the clients asked in a round (--train all or --train cohort: all alike)"
            )
        if settings.epochs:
            reasons.append("with --epochs, a step of several batches is counted once")
        why = f": {'; '.join(reasons)}" if reasons else ""
        notes.append(f"the methods did different numbers of local steps per client ({said}){why}")
    decay = {name: f"{runs[0].facts['weight_decay']:g}" for name, runs in groups.items()}
    if len(set(decay.values())) > 1:
        notes.append(
            f"the methods' weight decay differs ({_grouped(decay)}); --weight-decay gives all methods the same"
        )
    return notes


def _grouped(values: dict[str, str]) -> str:
    """Names that share a value together: `local, fedavg: 20; pfedme: 40`."""
    shared: dict[str, list[str]] = {}
    for name, value in values.items():
        shared.setdefault(value, []).append(name)
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in shared.items())


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
