"""Baselines without rounds: what a client can do alone with other tools, and what everybody's rows together give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.io import read_json, write_json
from ...core.metrics import MetricName
from ..folder import list_parts, verify_experiment

if TYPE_CHECKING:
    from ...runs.metrics import Part
    from ...runs.predictions import RowPredictions

FloatArray = NDArray[np.float64]

BASELINE_FOLDER = "baselines"
"""Folder of the baselines in the folder of an experiment: baselines/NAME/split-0."""

Kind = Literal["alone", "pooled"]


@dataclass(frozen=True, eq=False)
class Baseline:
    """One baseline on one split.

    Attributes:
        name: its name in tables.
        kind: `alone` uses the rows of one client at a time; `pooled` uses everybody's rows, as no client can.
        split: number of the split.
        split_digest: digest of the split, the same as of runs on it.
        seconds: time of its training.
        predictions: part -> outputs for its rows.
        notes: sentences for the user.
    """

    name: str
    kind: Kind
    split: int
    split_digest: str
    seconds: float
    predictions: "Mapping[str, RowPredictions]"
    notes: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        """Its name, as runs have it."""
        return self.name

    @property
    def seed(self) -> None:
        """None: it goes with the runs of all seeds."""

    def measure_clients(self, metric: MetricName, part: "Part" = "test") -> FloatArray:
        """Measure the baseline on one part: a value for each client (E,), NaN where it is not defined."""
        if part not in self.predictions:
            n = next(iter(self.predictions.values())).n_clients
            return np.full(n, np.nan)
        return self.predictions[part].by_client[metric]

    def measure_for_choice(self, metric: MetricName) -> FloatArray:
        """Measure validation rows; they chose nothing about a baseline."""
        return self.measure_clients(metric, "validation")

    def save(self, experiment: Path) -> None:
        """Write the baseline into the folder of an experiment; the last file says that it is whole."""
        from ...runs.predictions import save_predictions

        folder = make_baseline_folder(experiment, self.name, self.split)
        folder.mkdir(parents=True, exist_ok=True)
        save_predictions(folder / "predictions.safetensors", self.predictions)
        facts = {
            key: getattr(self, key) for key in ("name", "kind", "split", "split_digest", "seconds", "notes")
        }
        write_json(folder / "baseline.json", facts)


def make_baseline_folder(experiment: Path, name: str, split: int) -> Path:
    """Return the folder of one baseline on one split."""
    return experiment / BASELINE_FOLDER / name.replace(" ", "-") / f"split-{split}"


def read_baselines(experiments: Sequence[Path]) -> list[Baseline]:
    """Read the baselines in folders of experiments, in the order in which they were trained.

    Raises:
        RunError: a file is damaged.
    """
    files = []
    for path in experiments:
        parts = [file for file in list_parts(path) if file.relative_to(path).parts[0] == BASELINE_FOLDER]
        verify_experiment(path, *parts)
        files += [file for file in parts if file.name == "baseline.json"]
    found = [_read_baseline(file) for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]
    return list({(one.name, one.split): one for one in found}.values())


def _read_baseline(file: Path) -> Baseline:
    from ...runs.predictions import load_predictions

    facts: dict[str, Any] = read_json(file)
    notes = tuple(facts.pop("notes"))
    return Baseline(
        **facts, notes=notes, predictions=load_predictions(file.with_name("predictions.safetensors"))
    )
