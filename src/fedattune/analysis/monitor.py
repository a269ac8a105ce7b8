"""Runs as they stand while they train: one line each, read beside the process that writes them."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.errors import RunError
from ..core.io import read_json
from ..training.metrics import summarise
from ..training.storage import RunStore
from ..training.storage.folder import RunFolder
from .compare import BASELINE
from .load import find_run_folders, list_planned_runs, read_failures

RunState = Literal["running", "waiting", "stopped?", "finished", "failed"]


QUIET_S, QUIET_ROUNDS = 60.0, 10.0
"""Seconds, and rounds' worth of seconds, without anything new after which a run is taken for stopped."""


FIRST_ROUND_S = 600.0
"""The same for the first round, of which nobody knows how long it takes."""


@dataclass(frozen=True)
class RunStatus:
    """Where one run stands.

    Attributes:
        method, seed: which run.
        state: waiting for its turn, running, without anything new for so long that it may have been stopped, finished,
            or failed.
        round, rounds: the last round seen, 0 before the first, and all rounds.
        accuracy, worst10: test accuracy at the headline point at the last evaluation seen, a fraction: mean over
            clients, and over the worst tenth of them.
        gain: difference of the mean to that of `local` with the same seed in the same round, a fraction.
        bytes: sent in both directions.
        seconds, left: trained so far, and about how long it will take from here.
        diverged, absent: clients and rounds in which training was not finite, or no answer came.
        quiet: seconds since something new was seen.
        why: of a failed run.

    """

    method: str
    seed: int
    state: RunState
    round: int = 0
    rounds: int = 0
    accuracy: float | None = None
    worst10: float | None = None
    gain: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    left: float | None = None
    diverged: int = 0
    absent: int = 0
    quiet: float = 0.0
    why: str = ""


class RunMonitor:
    """What is seen of the runs in a folder, again and again.

    A look asks the store of each run that has changed for its new rounds alone and copies nothing, so that training
    hardly waits for it. Rounds are seen when they are committed: at every checkpoint, and about every two
    seconds (`rounds.SHOWN_AFTER`) where rounds are shorter than that.

    Raises:
        RunError: there is no such folder, or neither runs nor an experiment are in it.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[Path, _RunReader] = {}
        for _ in self._expected():
            pass

    def lines(self) -> list[RunStatus]:
        """One line per method and seed, in the order in which they were asked for.

        Raises:
            RunError: a run is damaged.

        """
        failed = read_failures(self.path)
        ended = _modified_at(self.path / "result.json")
        found: dict[Path, tuple[str, int, _RunReader]] = {}
        for folder, method, seed, rounds in self._expected():
            seen = self._seen.setdefault(folder, _RunReader(folder))
            seen.look()
            found[folder] = method, seed, seen
            seen.rounds = seen.rounds or rounds
        alone = {seed: seen.means for method, seed, seen in found.values() if method == BASELINE}
        lines = []
        for folder, (method, seed, seen) in found.items():
            # One that goes on after it failed is of a comparison that was resumed.
            why = failed.get(folder, "") if seen.changed <= ended else ""
            lines.append(seen.line(method, seed, alone.get(seed, {}), why))
        return lines

    def _expected(self) -> Iterator[tuple[Path, str, int, int]]:
        """Folder, method, seed and rounds of all runs, begun or not."""
        asked = list(list_planned_runs(self.path))
        yield from asked
        if not asked:
            for folder in find_run_folders(self.path):
                config = read_json(RunFolder(folder).config)
                name, seed = config.get("algorithm", folder.parent.name), config.get("seed", 0)
                yield folder, str(name), int(seed), int(config.get("rounds", 0))


@dataclass
class _RunReader:
    """What was read of one run so far."""

    folder: Path
    round: int = 0
    rounds: int = 0
    means: dict[int, float] = field(default_factory=dict)  # evaluated round -> mean at the headline point
    worst10: float | None = None
    accuracy: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    diverged: int = 0
    absent: int = 0
    finished: bool = False
    changed: float = 0.0  # when something was last written, by the clock of the file system
    stamp: Any = None

    def look(self) -> None:
        """Read what is new."""
        kept = RunFolder(self.folder)
        finished = kept.is_finished
        self.changed = max(_modified_at(kept.metrics), _modified_at(kept.config))
        stamp = (self.changed, kept.metrics.stat().st_size if kept.metrics.exists() else 0)
        if stamp != self.stamp and kept.metrics.exists() and kept.facts.exists():
            try:
                facts, config = read_json(kept.facts), read_json(kept.config)
                if "headline" not in facts:
                    raise RunError(f"{kept.facts} is damaged: it lacks the headline")
                self._read(kept.metrics, str(facts["headline"]))
                self.rounds = int(config.get("rounds", 0))
            except RunError:
                if self.round or finished or time.time() - self.changed > QUIET_S:
                    raise
                return  # it is being made at this moment
            self.stamp = stamp
        self.finished = finished

    def _read(self, metrics: Path, headline: str) -> None:
        with closing(RunStore.open_read_only(metrics)) as store:
            records = store.rounds(self.round)
            if not records and self.round:  # it was resumed from an earlier round
                self.round, self.diverged, self.absent, self.means = 0, 0, 0, {}
                records = store.rounds()
            if self.round:
                del records[0]  # known already
            if not records:
                return
            self.diverged += sum(len(record.dropped) for record in records)
            self.absent += sum(len(record.absent) for record in records)
            last = records[-1]
            new = {
                r: mean
                for r, mean in store.mean_accuracies(headline, self.round + 1).items()
                if r <= last.round
            }
            self.means |= new
            if new:
                latest = max(new)
                for r, point, (n, correct, loss) in store.scores("test", latest):
                    if (r, point) == (latest, headline):
                        found = summarise(n.astype(int), correct.astype(int), loss)
                        self.accuracy, self.worst10 = found["acc_uniform"], found["acc_worst10"]
            self.round, self.seconds = last.round, last.seconds
            self.bytes = last.bytes_up + last.bytes_down

    def line(self, method: str, seed: int, alone: dict[int, float], why: str) -> RunStatus:
        """Where the run stands, beside the means of `local` by round."""
        quiet = max(0.0, time.time() - self.changed) if self.changed else 0.0
        each = self.seconds / self.round if self.round else 0.0
        limit = max(QUIET_S, QUIET_ROUNDS * each) if self.round else FIRST_ROUND_S
        state: RunState = "running"
        if self.finished:
            state = "finished"
        elif why:
            state = "failed"
        elif not self.changed:
            state = "waiting"
        elif quiet > limit:
            state = "stopped?"
        last = max(self.means, default=None)
        compared = last is not None and method != BASELINE and last in alone
        return RunStatus(
            method,
            seed,
            state,
            self.round,
            self.rounds,
            self.accuracy,
            self.worst10,
            self.means[last] - alone[last] if last is not None and compared else None,
            self.bytes,
            self.seconds,
            each * (self.rounds - self.round) if state == "running" and self.round else None,
            self.diverged,
            self.absent,
            quiet,
            why,
        )


def _modified_at(file: Path) -> float:
    """When a file was last written, in seconds; 0 if there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
