"""The status of runs while they train, read beside the process that writes them."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..core.errors import RunError
from ..core.io import parse_json
from ..core.metrics import METRICS, MetricName
from ..runs.folder import RunFolder
from ..runs.metrics import summarize_scores
from .compare import BASELINE
from .load import find_run_folders, list_planned_runs, read_failures, read_run

RunState = Literal["running", "waiting", "stopped?", "finished", "failed"]
QUIET_S, QUIET_ROUNDS = 60.0, 10.0
"""Seconds, and rounds' worth of seconds, without anything new after which a run is taken for stopped."""
FIRST_ROUND_S = 600.0
"""Seconds without a first round, whose length nobody knows, after which a run is taken for stopped."""
FEDERATION_FILE = "federation.json"
"""The server's file in a deployment's run folder: nodes, clients, and the token of the run's state on the nodes."""
NODES_FILE = "nodes.json"
"""The state of the nodes of a deployment, which the server writes into the run folder while it works."""


@dataclass(frozen=True)
class NodeStatus:
    """The status of one node, with the kind of the fault at its last message, empty after a reply that counts."""

    name: str
    is_online: bool
    fault: str = ""


@dataclass(frozen=True)
class RunStatus:
    """The status of one run.

    Attributes:
        state: `stopped?` if nothing new was seen for long.
        round, rounds: the last round seen, 0 before the first, and all rounds.
        mean: mean test accuracy over clients at the evaluation point at the last evaluation, a fraction; or the RMSE.
        worst10: the same over the worst tenth of the clients.
        gain: how much better the mean is than of `local` with the same seed and split in the same round.
        diverged, absent: clients and rounds in which training was not finite, or no answer came.
        quiet: seconds since something new was seen.
    """

    method: str
    seed: int
    state: RunState
    round: int = 0
    rounds: int = 0
    mean: float | None = None
    worst10: float | None = None
    gain: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    diverged: int = 0
    absent: int = 0
    quiet: float = 0.0
    failure: str = ""
    metric: MetricName = "accuracy"
    split: int = 0

    @property
    def seconds_left(self) -> float | None:
        """About how long a running run will take from here."""
        if self.state != "running" or not self.round:
            return None
        return self.seconds / self.round * (self.rounds - self.round)

    @property
    def has_ended(self) -> bool:
        return self.state in ("finished", "failed")


def read_statuses(path: Path) -> list[RunStatus]:
    """Read the status of every run in a folder, begun or not, in the order in which they were asked for.

    Stores are not copied, so that training hardly waits for the answer. Rounds are seen when they are committed: at
    every checkpoint, and about every two seconds if rounds are shorter.
    """
    failures, failed_at = read_failures(path), _read_time(path / "result.json")
    means: dict[tuple[str, str], dict[int, float]] = {}  # by method and folder, which names seed and split
    # The server of a deployment removes the file when it ends, as for a pause.
    has_server = not is_deployment(path) or (path / NODES_FILE).exists()
    statuses = []
    for folder, method, seed, split, rounds in _list_runs(path):
        changed = max(map(_read_time, (RunFolder(folder).metrics, RunFolder(folder).config)))
        # A failed run that goes on is of a comparison that was resumed.
        failure = failures[folder][1] if folder in failures and changed <= failed_at else ""
        progress, means[method, folder.name] = _read_progress(folder)
        quiet = max(0.0, time.time() - changed) if changed else 0.0
        progress = {"rounds": rounds, "split": split, **progress}
        status = RunStatus(method, seed, "running", **progress, quiet=quiet, failure=failure)
        limit = max(QUIET_S, QUIET_ROUNDS * status.seconds / status.round) if status.round else FIRST_ROUND_S
        state: RunState = "running"
        if RunFolder(folder).is_finished:
            state = "finished"
        elif failure:
            state = "failed"
        elif not changed:
            state = "waiting"
        elif quiet > limit or not has_server:
            state = "stopped?"
        statuses.append((replace(status, state=state), folder.name))
    return [_add_gain(status, name, means) for status, name in statuses]


def is_deployment(path: Path) -> bool:
    """Return True for the run folder of a deployment."""
    return (path / FEDERATION_FILE).exists()


def read_nodes(path: Path) -> list[NodeStatus]:
    """Read the status of the nodes of a deployment; none if the folder is of no deployment that is running."""
    file = path / NODES_FILE
    try:
        nodes = parse_json(file.read_text(encoding="utf-8"))["nodes"]
        return [NodeStatus(str(one["name"]), bool(one["online"]), str(one["fault"] or "")) for one in nodes]
    except FileNotFoundError:  # the server removes it at its end, at any moment
        return []
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged; remove it, the server writes it again") from error


def _list_runs(path: Path) -> Iterator[tuple[Path, str, int, int, int]]:
    planned = list(list_planned_runs(path))
    yield from planned
    known = {folder for folder, *_ in planned}
    for folder in find_run_folders(path):  # a comparison with a budget plans one split, and adds others
        if folder in known or not RunFolder(folder).config.is_file():
            continue
        config = RunFolder(folder).read_config()
        split = int(config.get("partition", {}).get("split", 0))
        yield folder, str(config["algorithm"]), int(config["seed"]), split, int(config["rounds"])


def _read_progress(folder: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """Read the fields of a run's status that its store holds, and evaluated round -> mean test accuracy."""
    run = read_run(folder, copy=False)
    if run is None:
        return {}, {}
    with closing(run.store) as store:
        records = store.rounds()
        last = records[-1]
        progress: dict[str, Any] = {
            "round": last.round,
            "rounds": int(run.config["rounds"]),
            "bytes": last.bytes_up + last.bytes_down,
            "seconds": last.seconds,
            "diverged": sum(len(record.diverged) for record in records),
            "absent": sum(len(record.absent) for record in records),
        }
        means: dict[int, float] = {}
        name = "rmse" if run.is_regression else "acc"
        for r, point, scores in store.scores("test"):
            if r <= last.round and point == run.evaluation_point and scores[0].any():
                metrics = summarize_scores(*scores, deviation=run.target_deviation)
                means[r] = metrics[f"{name}_uniform"]
                progress |= {"mean": means[r], "worst10": metrics[f"{name}_worst10"]}
        progress["metric"] = run.curve_metric.name
    return progress, means


def _add_gain(status: RunStatus, name: str, means: dict[tuple[str, str], dict[int, float]]) -> RunStatus:
    """Compare a run with `local` of the same seed and split at its last evaluation; `name` is of its folder."""
    mine, local = means[status.method, name], means.get((BASELINE, name), {})
    last = max(mine, default=0)
    has_gain = status.method != BASELINE and last in mine and last in local
    sign = METRICS[status.metric].sign
    return replace(status, gain=sign * (mine[last] - local[last])) if has_gain else status


def _read_time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
