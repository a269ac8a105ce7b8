"""How `fedattune watch` shows runs: a table that fits the terminal, or plain lines."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import make_table, print_whole, said_bytes, width_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from ..watching import Line, State

Cell = Callable[["Line"], str]

CELLS: dict[str, Cell] = {
    "method": lambda line: line.method,
    "seed": lambda line: str(line.seed),
    "state": lambda line: line.state,
    "round": lambda line: f"{line.round} of {line.rounds}" if line.rounds else "-",
    "mean %": lambda line: _percent(line.accuracy),
    "- local": lambda line: "-" if line.gain is None else f"{100 * line.gain:+.2f}",
    "worst 10%": lambda line: _percent(line.worst10),
    "bytes": lambda line: said_bytes(line.bytes) if line.round else "-",
    "time": lambda line: _clock(line.seconds) if line.round else "-",
    "left": lambda line: "-" if line.left is None else _clock(line.left),
    "absent": lambda line: f"{line.absent:,}",
    "diverged": lambda line: f"{line.diverged:,}",
}
SPARED = ("bytes", "time", "absent", "worst 10%", "diverged", "left", "- local")
"""Columns that a narrow terminal goes without, the first ones first."""
STYLES = {"running": "bold", "failed": "red", "stopped?": "yellow", "waiting": "dim"}
LEGEND = {
    "mean %": "mean: test accuracy over clients at the last evaluation",
    "worst 10%": "worst 10%: that of the worst tenth of them",
    "- local": "- local: points above local in the same round",
    "left": "left: about how long",
    "absent": "absent: times that a client did not answer",
    "diverged": "diverged: times that a client's training was not finite",
}
ORDER: "tuple[State, ...]" = ("running", "stopped?", "failed", "finished", "waiting")
"""Whom a low terminal shows, these first."""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _clock(seconds: float) -> str:
    """Seconds below a minute, then 12:34, then 5:12:34."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _cells(lines: "Sequence[Line]") -> dict[str, Cell]:
    """The columns that say something here."""
    out = dict(CELLS)
    if len({line.seed for line in lines}) == 1:
        del out["seed"]
    for title, counts in (
        ("- local", [line.gain is not None for line in lines]),
        ("absent", [line.absent for line in lines]),
        ("diverged", [line.diverged for line in lines]),
    ):
        if not any(counts):
            del out[title]
    return out


def _table(lines: "Sequence[Line]", cells: Mapping[str, Cell]) -> "Table":
    table = make_table(*cells, left=("method", "state"))
    for line in lines:
        table.add_row(*(cell(line) for cell in cells.values()), style=STYLES.get(line.state))
    return table


def _legend(cells: Mapping[str, Cell]) -> str:
    return "; ".join(text for title, text in LEGEND.items() if title in cells)


def _notes(lines: "Sequence[Line]", run: Path) -> list[str]:
    said = [line.why for line in lines if line.why]
    quiet = [line.quiet for line in lines if line.state == "stopped?"]
    if quiet and not any(line.state == "running" for line in lines):
        said.append(
            f"stopped?: nothing new for {_clock(min(quiet))}; if nothing trains there any more, go on with: "
            f"fedattune {_command(run)} --resume {shlex.quote(str(run))}"
        )
    if all(line.state == "waiting" or not line.round for line in lines):
        said.append("No round is finished yet.")
    return said


def _command(run: Path) -> str:
    """The command that runs in a folder are of."""
    file = run / "command.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else "compare"


def view(lines: "Sequence[Line]", run: Path, console: "Console") -> "RenderableType":
    """What fits the terminal: columns that matter less are left out, and then lines."""
    from rich.console import Group
    from rich.text import Text

    cells = _cells(lines)
    for title in SPARED:
        if width_of(_table(lines, cells), console) <= console.width:
            break
        cells.pop(title, None)
    texts = [Text(note, style="dim") for note in [*_notes(lines, run), f"{_legend(cells)}. Ctrl-C leaves."]]

    def rows() -> int:
        # Above and below the table are lines too: an empty one, titles, a rule, another empty one.
        return console.height - 5 - sum(len(text.wrap(console, console.width)) for text in texts)

    if rows() < len(lines):
        del texts[-1]
    room = rows()
    shown, hidden = list(lines), ""
    if len(lines) > max(room, 1):
        kept = sorted(range(len(lines)), key=lambda i: ORDER.index(lines[i].state))[: max(room - 1, 1)]
        shown = [lines[i] for i in sorted(kept)]
        rest = [line.state for i, line in enumerate(lines) if i not in kept]
        hidden = "and " + ", ".join(f"{rest.count(state)} {state}" for state in ORDER if state in rest)
    return Group(_table(shown, cells), *([Text(hidden, style="dim")] if hidden else []), *texts)


def show(lines: "Sequence[Line]", run: Path, console: "Console") -> None:
    """Print all there is, once."""
    print_whole(_table(lines, _cells(lines)), console)
    for note in [*_notes(lines, run), _legend(_cells(lines))]:
        console.print(note, style="dim")


def tell(lines: "Sequence[Line]", before: "Sequence[Line]", console: "Console") -> None:
    """Print a plain line for every run that has changed."""
    known = {(line.method, line.seed): (line.state, line.round) for line in before}
    several = len({line.seed for line in lines}) > 1
    for line in lines:
        if known.get((line.method, line.seed)) == (line.state, line.round):
            continue
        if line.state == "waiting" and before:
            continue
        console.print(_sentence(line, several))


def _sentence(line: "Line", several: bool) -> str:
    """One run in plain words: `fedavg (seed 1): running, round 3 of 9, mean 81.20%, ...`."""
    said: list[str] = [line.state]
    if line.round:
        said.append(f"round {line.round} of {line.rounds}")
    if line.accuracy is not None:
        said.append(f"mean {100 * line.accuracy:.2f}%")
    if line.gain is not None:
        said.append(f"{100 * line.gain:+.2f} points to local")
    if line.worst10 is not None:
        said.append(f"worst 10% {100 * line.worst10:.2f}%")
    if line.round:
        said += [said_bytes(line.bytes), f"{_clock(line.seconds)} so far"]
    if line.left is not None and line.left >= 1:
        said.append(f"about {_clock(line.left)} left")
    said += [
        f"{count:,} {what}" for count, what in ((line.absent, "absent"), (line.diverged, "diverged")) if count
    ]
    seed = f" (seed {line.seed})" if several else ""
    return f"{line.method}{seed}: {', '.join(said)}" + (f"; {line.why}" if line.why else "")
