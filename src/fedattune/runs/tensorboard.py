"""Event files for TensorBoard: the numbers of a run, round by round."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from .callbacks import Callback, StartedRun, check_installed
from .context import Progress
from .metrics import score_clients, summarize_scores
from .store import RoundMixing

FLUSH_S = 5
"""Seconds after which the event file is written."""
ACCURACY_BINS = np.linspace(0, 1, 41)
"""Bins of the histograms of clients' accuracies."""
MAX_MIXING_ROWS = 256
"""Clients over which the mean of a mixing matrix is taken: the mean over thousands would cost too much."""


class TensorBoard(Callback):
    """Log every evaluated round to event files, which TensorBoard shows while the run goes on; the step is the round.

    Args:
        folder: folder of the event files of this run alone (default: the run folder).

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        check_installed("tensorboard", "TensorBoard")
        self.folder = None if folder is None else Path(folder)
        self._writer: Any = None

    def on_fit_start(self, run: StartedRun) -> None:
        """Open the event file, and log the rounds that an interrupted run had done before.

        Raises:
            ConfigError: there is no folder.
        """
        folder = self.folder or run.folder
        if folder is None:
            raise ConfigError("TensorBoard: give a folder, TensorBoard(folder), or a run folder, fit(..., out=folder)")
        from torch.utils.tensorboard import SummaryWriter

        is_continued = _wait_for_later_file_name(folder)
        self._writer = SummaryWriter(folder, purge_step=0 if is_continued else None, flush_secs=FLUSH_S)
        scale = run.context.federation.target_scale
        self._deviation = None if scale is None else scale.error_unit
        self._run, self._next = run, 0
        self._start = time.time() - run.seconds  # TensorBoard shows the time since then
        self._log_new_rounds()

    def on_round_end(self, progress: Progress, server_state: Any) -> None:
        """Log the round if it was evaluated."""
        if self._writer:
            self._log_new_rounds()

    def close(self) -> None:
        """Close the event file."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def _log_new_rounds(self) -> None:
        """Log the rounds since the last time, if one of them was evaluated."""
        store, point_of_paper = self._run.store, self._run.context.algorithm.evaluation_point
        evaluated: dict[int, dict[str, Any]] = {}
        for part in ("test", "validation"):
            for round_, point, (n, correct, loss) in store.scores(part, self._next):
                here = evaluated.setdefault(round_, {})
                here[f"{part}_{point}"] = summarize_scores(n, correct, loss, deviation=self._deviation)
                if part == "test":
                    has = n > 0
                    values = score_clients(n[has], correct[has], loss[has], deviation=self._deviation)
                    here.setdefault("clients", {})[point] = values
        if not evaluated:
            return
        absent = diverged = 0
        for record in store.rounds(self._next):
            absent += len(record.absent)
            diverged += len(record.diverged)
            if record.round not in evaluated:
                continue
            when = self._start + record.seconds
            clients = evaluated[record.round].pop("clients")
            groups = evaluated[record.round]
            groups["test"] = groups.get(f"test_{point_of_paper}", {})
            groups["cost"] = {key: getattr(record, key) for key in ("bytes_up", "bytes_down", "seconds", "steps")}
            groups["lost"] = {"absent": absent, "diverged": diverged}
            groups |= self._mixing(record.round)
            for group, numbers in groups.items():
                for name, value in numbers.items():
                    self._writer.add_scalar(f"{group}/{name}", value, record.round, walltime=when)
            bins: Any = ACCURACY_BINS if self._deviation is None else "auto"
            for point, values in clients.items():
                if len(finite := values[np.isfinite(values)]):  # a histogram has no place for models that diverged
                    self._writer.add_histogram(f"clients/{point}", finite, record.round, bins, walltime=when)
            self._next, absent, diverged = record.round + 1, 0, 0

    def _mixing(self, round_: int) -> dict[str, dict[str, float]]:
        """Summarise each component: the share of the own model, and the entropy over all models."""
        try:
            mixed = self._run.store.mixing(self._run.context.n_clients).among(round_)
        except KeyError:  # the method mixes nothing, or nobody uploaded
            return {}
        some = np.unique(np.linspace(0, len(mixed.rows) - 1, MAX_MIXING_ROWS).round().astype(int))
        rows = [mixed.rows[i] for i in some]
        mixed = RoundMixing(rows, mixed.columns, {name: matrix[some] for name, matrix in mixed.weights.items()})
        return {
            "mixing_own": {name: mean_own_weight(mixed, matrix) for name, matrix in mixed.weights.items()},
            "mixing_entropy": {name: mean_entropy(matrix) for name, matrix in mixed.weights.items()},
        }


def mean_own_weight(mixed: RoundMixing, matrix: NDArray[np.float32]) -> float:
    """Return the mean share of the own model, from a mixing matrix (R, K) of one round."""
    place = {client: k for k, client in enumerate(mixed.columns)}
    own = [matrix[i, place[client]] if client in place else 0.0 for i, client in enumerate(mixed.rows)]
    return float(np.mean(own))


def mean_entropy(matrix: NDArray[np.float32]) -> float:
    """Return the mean entropy of the rows (R, K) in nats: 0 if each has one model, ln K if all shares are equal."""
    weights = np.clip(matrix.astype(np.float64), 0, None)
    shares = weights / np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
    return float(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(1).mean())


def _wait_for_later_file_name(folder: Path) -> bool:
    """Wait until a new event file gets a later name (names are seconds); return whether there are event files."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    latest = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
    if 0 <= latest - int(time.time()) <= 1:
        time.sleep(latest + 1 - time.time())
    return bool(stamps)
