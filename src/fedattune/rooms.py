"""Where the rows of many clients are kept: in memory, or in files of the run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from torch import Tensor

from .config import Settings
from .core import Algorithm, State
from .errors import ConfigError
from .params import Params
from .runs.rows import DiskRows, rows_file
from .task import Task

Stack: TypeAlias = Params | DiskRows
"""One row per client, with the methods `only`, `without`, `rows` and `put_rows`."""

MEMORY = 1 << 30
"""Bytes of client rows above which `client_state="auto"` keeps them on disk."""


JOIN_MEMORY = 4 << 30
"""Bytes of rows that the server may keep on disk if clients are to join, who take them into memory."""


class Unwritten(Params):
    """A stack of equal rows that takes no memory and cannot be written yet: `Room.settle` gives it room."""


class Spare(Params):
    """A model whose copies take no memory, for server rules that begin with a row per client."""

    def map(self, f: Callable[..., Tensor], *others: Params) -> Params:
        """As `Params`; what comes of it is spare too."""
        return Spare(super().map(f, *others))

    def copies(self, n: int) -> Params:
        """A stack of `n` copies that is given room later."""
        return Unwritten(self.repeat(n))

    def repeat(self, n: int) -> Params:
        """As `Params`."""
        return Params({k: v.expand(n, *v.shape) for k, v in self.items()})


@dataclass(frozen=True)
class Room:
    """Room for stacks of `n` rows: in memory, or, on `disk`, in files of `folder` (temporary ones without it)."""

    n: int
    disk: bool = False
    folder: Path | None = None

    @classmethod
    def choose(cls, settings: Settings, n: int, row_bytes: int, folder: Path | None) -> "Room":
        """The room that the settings ask for; `row_bytes` are all that is kept for one client."""
        disk = settings.client_state == "disk"
        if settings.client_state == "auto":
            disk = n * row_bytes > MEMORY
        return cls(n, disk, folder)

    def stack(self, name: str, row: Params, each: Params | None = None) -> Stack:
        """A stack that can be written, each row of which is `row` at first, but for tensors `each` (N, ...)."""
        if self.disk and row:
            return DiskRows(row, self.n, rows_file(self.folder, name), each)
        return Params({**row.copies(self.n), **(each or {})})

    def settle(self, server: State) -> State:
        """The server's first state, with room for what it keeps of every client."""
        return {
            name: cast(Params, self.stack(f"server/{name}", part.rows(0)))
            if isinstance(part, Unwritten)
            else part
            for name, part in server.items()
        }


def row_bytes(algorithm: Algorithm, task: Task, server: State) -> int:
    """Bytes that a run keeps for one client; `server` is the first state, not settled yet."""
    w0 = task.params
    kept = [
        *algorithm.client.memory(w0).values(),
        w0.only(algorithm.personal.names(task.model)),
        task.buffers,
    ]
    kept += [part.rows(0) for part in server.values() if isinstance(part, Unwritten)]
    if algorithm.participation.receive == "reply":
        kept.append(w0)
    return sum(part.nbytes() for part in kept)


def plain(server: State) -> State:
    """The state without the mark that copies of a model take no memory."""
    return {k: Params(v) if isinstance(v, Spare) else v for k, v in server.items()}


def picked(stack: Stack, ids: Tensor, n: int) -> Params:
    """Rows of clients `ids`, sorted; a stack in memory is not copied if all `n` are asked for."""
    return stack if isinstance(stack, Params) and len(ids) == n else stack.rows(ids)


def check_joining(server: State) -> None:
    """Check that clients can join after training, for which all that the server keeps of others is in memory.

    Raises:
        ConfigError: it keeps too much.

    """
    stacks: list[DiskRows] = [part for part in map(_stack, server.values()) if isinstance(part, DiskRows)]
    needed = sum(stack.n * stack.row_bytes for stack in stacks)
    if needed > JOIN_MEMORY:
        raise ConfigError(
            f"clients cannot join after training: the server keeps {needed / 2**30:.1f} GiB of the models of "
            f"{stacks[0].n:,} clients, expected at most {JOIN_MEMORY >> 30} GiB, as joining takes them into memory; "
            "leave held_out at 0, train fewer clients, or choose a method that keeps one model, such as fedavg_ft"
        )


def gathered(server: State) -> State:
    """The server's state with all rows in memory.

    Raises:
        ConfigError: they are too many.

    """
    check_joining(server)
    return {k: part if isinstance(part, Tensor) else in_memory(part) for k, part in server.items()}


def _stack(part: object) -> object:
    """A part of the server's state, which may be a stack on disk although its type does not say so."""
    return part


def in_memory(stack: Stack) -> Params:
    """All rows of a stack."""
    return stack if isinstance(stack, Params) else stack.rows(slice(None))
