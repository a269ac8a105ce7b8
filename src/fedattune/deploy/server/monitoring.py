"""Watch a deployment: its health, the numbers of its runs, and the state of its nodes in the run folder."""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from flwr.serverapp import Grid

from ...analysis.monitor import NODES_FILE
from ...core.faults import Fault, FaultKind
from ...core.io import write_json
from ...runs.context import Progress
from ..config import DeploymentOptions
from .registration import NodeRegistry

ONLINE_EVERY_S = 5.0
"""Seconds between two looks at the nodes that are online, while the server waits for replies."""

STALL_FACTOR = 3.0
"""Times the allowed time of the current messages, after which a run without a finished round is stalled."""

FaultLabel = Literal["offline", "late", "failed", "refused", "dropped"]
"""Label of a fault in metrics: `refused` is of a reply, `dropped` of the upload of one client."""

LABELS: Mapping[FaultKind, FaultLabel] = {
    "offline": "offline",
    "late": "late",
    "failed": "failed",
    "lost_state": "failed",
    "refused": "refused",
}
"""Kind of a node's fault -> its label; faults of other kinds are of single uploads."""


@dataclass
class RunNumbers:
    """The numbers of one method with one seed; None for what is not known yet."""

    planned: int
    done: int = 0
    accuracy: float | None = None
    rmse: float | None = None
    seconds: float | None = None
    sent: int = 0
    received: int = 0
    absent: int | None = None
    finished_at: float | None = None


class Snapshot(NamedTuple):
    """The numbers of a deployment at one moment. Nodes have their index in the registry.

    Attributes:
        runs: method and seed -> numbers.
        names: names of the nodes.
        online: the nodes that are online.
        last_faults: node -> the fault at its last message, or None after a reply that counts.
        faults: node and kind -> number of faults.
        is_healthy: whether the run makes progress.

    """

    runs: Mapping[tuple[str, int], RunNumbers]
    names: Sequence[str]
    online: Set[int]
    last_faults: Mapping[int, FaultLabel | None]
    faults: Mapping[tuple[int, FaultLabel], int]
    is_healthy: bool


class RunMonitor:
    """The state of a deployment, which the server's thread writes and the threads of HTTP requests read.

    Args:
        deployment: the options of the server.
        folder: the run folder.

    """

    def __init__(self, deployment: DeploymentOptions, folder: Path) -> None:
        self._deployment, self._folder = deployment, folder
        self._lock = threading.RLock()
        self._registry: NodeRegistry | None = None
        self._names: list[str] = []
        self._token: str | None = None
        self._runs: dict[tuple[str, int], RunNumbers] = {}
        self._current: tuple[str, int] | None = None
        self._online: set[int] = set()
        self._last_faults: dict[
            int, FaultLabel | None
        ] = {}  # of each node's last message; None after a reply
        self._faults: Counter[tuple[int, FaultLabel]] = Counter()
        self._progress = self._round_began = time.monotonic()
        self._allowed = deployment.start_timeout

    def begin_federation(self, token: str, registry: NodeRegistry, online: set[int]) -> None:
        """Take over the nodes of the federation.

        Args:
            token: identifies the federation's runs at the nodes.
            registry: the nodes.
            online: Flower's numbers of the nodes that are online.

        """
        with self._lock:
            self._token, self._registry = token, registry
            # The clients' names would stand in for a missing name in `label`, but metrics name no clients.
            names = [hello.name[:100] or f"node {i}" for i, hello in enumerate(registry.hellos)]
            while len(set(names)) < len(names):
                names = [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]
            self._names = names
        self.record_online(online)

    def begin_run(self, method: str, seed: int, done: int, planned: int) -> None:
        """Take the following numbers for a method with a seed.

        Args:
            method: the method.
            seed: the seed.
            done: rounds that are finished already.
            planned: rounds in all.

        """
        with self._lock:
            self._current = method, seed
            self._runs[method, seed] = RunNumbers(planned, done)
            self._progress = self._round_began = time.monotonic()
            self._allowed = self._deployment.round_timeout

    def record_exchange(self, faults: Mapping[int, Fault | None], sent: int, received: int) -> None:
        """Count what became of messages.

        Args:
            faults: index of each asked node -> why its reply does not count, or None.
            sent: bytes of the run's messages so far.
            received: bytes of the run's replies so far.

        """
        with self._lock:
            for i, fault in faults.items():
                self._last_faults[i] = label = LABELS.get(fault.kind) if fault else None
                if label:
                    self._faults[i, label] += 1
            if self._current:
                run = self._runs[self._current]
                run.sent, run.received = sent, received
        self._write()

    def record_dropped(self, nodes: Iterable[int]) -> None:
        """Count uploads of single clients that the server does not take, by the index of their node."""
        with self._lock:
            self._faults.update((i, "dropped") for i in nodes)

    def record_progress(self, progress: Progress, absent: int, *, is_empty: bool = False) -> None:
        """Take over a finished round.

        Args:
            progress: the position of the run.
            absent: clients of the round's cohort without part in it.
            is_empty: whether no client at all had part in it; then it is no progress.

        """
        with self._lock:
            assert self._current
            run, now = self._runs[self._current], time.monotonic()
            run.done, run.accuracy, run.rmse = progress.round, progress.accuracy, progress.rmse
            run.seconds, run.absent, run.finished_at = now - self._round_began, absent, time.time()
            self._round_began = now
            if not is_empty:
                self._progress = now
        self._write()

    def record_online(self, numbers: set[int]) -> None:
        """Take over which nodes are online, by Flower's numbers."""
        with self._lock:
            before = self._online
            self._online = self._registry.list_online(numbers) if self._registry else numbers
            is_new = before != self._online
        if is_new:
            self._write()

    def end_runs(self) -> None:
        """Take the following sentences of the log for sentences about all methods."""
        with self._lock:
            self._current = None
            self._progress = time.monotonic()

    def end(self) -> None:
        """Say in the run folder that no node works for this run any more."""
        with suppress(OSError):
            (self._folder / NODES_FILE).unlink(missing_ok=True)

    def get_fields(self, sentence: str) -> dict[str, Any]:
        """Return what is known about a sentence of the log: run, method, seed, round and node."""
        with self._lock:
            method, seed = self._current or (None, None)
            found = re.search(r"\bround (\d+)", sentence)
            nodes = self._registry.nodes if self._registry else []
            named = [name for name, node in zip(self._names, nodes, strict=False) if node.label in sentence]
            return {
                "run": self._token,
                "method": method,
                "seed": seed,
                "round": int(found[1]) if found else None,
                "node": named[0] if len(named) == 1 else None,
            }

    def describe_health(self) -> tuple[bool, dict[str, Any]]:
        """Tell whether the run makes progress, and describe it: status, method, seed, round, nodes and a reason."""
        with self._lock:
            quiet, limit = time.monotonic() - self._progress, STALL_FACTOR * self._allowed
            reason = ""
            if not self._online:
                reason = "no node is online; look at the logs of the nodes"
            elif quiet > limit:
                reason = f"no round finished for {quiet:.0f} s, expected one in {limit:.0f} s; look at the run's log"
            method, seed = self._current or (None, None)
            run = self._runs[self._current] if self._current else None
            status = "stalled" if reason else "running" if run else "waiting"
            facts = {
                "status": status,
                "method": method,
                "seed": seed,
                "round": run.done if run else None,
                "rounds": run.planned if run else None,
                "seconds_since_progress": round(quiet, 1),
                "nodes_online": len(self._online),
                "nodes_known": len(self._names),
            }
            return not reason, {**facts, "reason": reason} if reason else facts

    def take_snapshot(self) -> Snapshot:
        """Copy the numbers, so that a request sees all of them at one moment."""
        with self._lock:
            return Snapshot(
                {key: replace(run) for key, run in self._runs.items()},
                tuple(self._names),
                frozenset(self._online),
                dict(self._last_faults),
                Counter(self._faults),
                self.describe_health()[0],
            )

    def _write(self) -> None:
        """Write the state of the nodes for `fedattune watch`; a full disk must not end the run here."""
        with self._lock, suppress(OSError):
            if self._registry:
                nodes = [
                    {"name": name, "online": i in self._online, "fault": self._last_faults.get(i)}
                    for i, name in enumerate(self._names)
                ]
                write_json(self._folder / NODES_FILE, {"nodes": nodes})


class MonitoredGrid:
    """Flower's grid, which tells a monitor the nodes that are online.

    Args:
        grid: Flower's grid.
        monitor: the monitor.

    """

    def __init__(self, grid: Grid, monitor: RunMonitor) -> None:
        self._grid, self._monitor, self._next = grid, monitor, 0.0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Flower's grid."""
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        """Return the numbers of the nodes that are online."""
        numbers = list(self._grid.get_node_ids())
        self._monitor.record_online(set(numbers))
        self._next = time.monotonic() + ONLINE_EVERY_S
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Any:
        """Pull replies; from time to time, look who is online."""
        # The server's thread looks, because Flower does not say that its connection can serve several threads.
        if time.monotonic() > self._next:
            self.get_node_ids()
        return self._grid.pull_messages(message_ids)


def monitor_grid(grid: Grid, monitor: RunMonitor) -> Grid:
    """Return the grid as a grid that tells a monitor the nodes that are online."""
    return cast(Grid, MonitoredGrid(grid, monitor))
