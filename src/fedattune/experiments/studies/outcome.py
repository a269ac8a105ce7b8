"""What the runs of a cell come to: the choice from its grid, and its numbers over the seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analysis.compare import MeanStd, compute_mean_std
from ...training.metrics import Point, is_in_last_tenth
from .cells import Cell, Extent
from .records import Records
from .study import Measure, Study

MAX_SEEDS = 10
"""Runs of a cell that are looked for, if the study has not more."""


Curve = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Outcome:
    """A cell's numbers; accuracies are in percent, and `runs` are those of its seeds that finished.

    `searched` says whether `choice` is that of a search of the cell's grid, or its middle.
    """

    cell: Cell
    choice: dict[str, Any]
    searched: bool
    point: Point
    runs: tuple[str, ...]
    failed: tuple[str, ...]
    extent: Extent
    measures: Mapping[str, MeanStd]

    @property
    def value(self) -> MeanStd | None:
        """The number that stands beside the printed one."""
        return self.measures.get("value")

    @property
    def n_seeds(self) -> int:
        """How many runs it is the mean of."""
        return len(self.runs)


def reached(curve: Curve, measure: Measure) -> float:
    """One number of a run, in percent."""
    accuracy = curve[f"acc_{measure.mean}"]
    if measure.over == "max":
        return 100 * float(accuracy.max())
    if measure.over == "last":
        return 100 * float(accuracy[-1])
    late = [is_in_last_tenth(round_, int(curve["round"][-1])) for round_ in curve["round"].tolist()]
    return 100 * float(accuracy[late].mean())


def choose(study: Study, cell: Cell, records: Records, extent: Extent) -> dict[str, Any] | None:
    """The combination of the grid with the best validation accuracy in the last tenth of the rounds.

    Of equals it is the first; None where a combination has not been tried yet.
    """
    choices = study.choices(cell)
    if len(choices) == 1:
        return choices[0]
    scores = search(study, cell, records, extent)
    if any(score is None for _, score in scores):
        return None
    return max(scores, key=lambda one: one[1] if one[1] is not None else -1.0)[0]


def search(
    study: Study, cell: Cell, records: Records, extent: Extent
) -> list[tuple[dict[str, Any], float | None]]:
    """Validation accuracy of every combination, in percent; 0 of one that diverged, None of one not tried."""
    scores: list[tuple[dict[str, Any], float | None]] = []
    for choice in study.choices(cell):
        run = study.run(cell, choice, 0, extent, tuning=True)
        facts = records.runs.get(run.id)
        if facts is None:
            scores.append((choice, None))
            continue
        point = study.owner(cell).point or facts.get("headline", "received")
        curve = records.curve(run.id, point, "validation")
        late = Measure(over="last10", mean=study.measure.mean, called="")
        lost = 0.0 if "failed" in facts else None
        scores.append((choice, reached(curve, late) if curve else lost))
    return scores


def outcomes(study: Study, cells: Sequence[Cell], records: Records) -> dict[Cell, Outcome]:
    """The numbers of every cell that has any: from its runs with the most rounds, of these in full precision."""
    trained = (facts["experiment"] for facts in records.runs.values())
    extents = {Extent(one["rounds"], one["mixed_precision"]) for one in trained}
    first = sorted(extents, key=lambda one: (-(one.rounds or 0), one.mixed_precision != "off"))
    found: dict[Cell, Outcome] = {}
    for cell in cells:
        for extent in first:
            if (outcome := _outcome(study, cell, records, extent)) is not None:
                found[cell] = outcome
                break
    return found


def _outcome(study: Study, cell: Cell, records: Records, extent: Extent) -> Outcome | None:
    choice = choose(study, cell, records, extent)
    found = None if choice is None else _of_choice(study, cell, records, extent, choice, searched=True)
    return found or _of_choice(study, cell, records, extent, study.middle(cell), searched=False)


def _of_choice(
    study: Study, cell: Cell, records: Records, extent: Extent, choice: dict[str, Any], *, searched: bool
) -> Outcome | None:
    ids = []
    for seed in range(max(study.seeds, MAX_SEEDS)):
        run = study.run(cell, choice, seed, extent)
        if run.experiment.rounds != extent.rounds:
            return None
        if run in records:
            ids.append(run.id)
    if not ids:
        return None
    failed = tuple(records.runs[i]["failed"] for i in ids if "failed" in records.runs[i])
    done = tuple(i for i in ids if "failed" not in records.runs[i])
    facts = [records.runs[i] for i in done]
    point = study.rows[cell.row].point or (facts[0]["headline"] if facts else "received")
    measures: dict[str, MeanStd] = {}
    if done:
        measures = _measures(study, records, done, point)
        for name in ("seconds", "local_steps"):
            measures[name] = compute_mean_std([one[name] for one in facts])
    return Outcome(cell, choice, searched, point, done, failed, extent, measures)


def _measures(study: Study, records: Records, runs: Sequence[str], point: Point) -> dict[str, MeanStd]:
    measures = {}
    for name, kind, at in (
        ("value", study.measure, point),
        ("received", study.measure, "received"),
        ("trained", study.measure, "trained"),
        ("last", Measure(over="last", mean="pooled", called=""), point),
        ("last_uniform", Measure(over="last", mean="uniform", called=""), point),
    ):
        curves = [records.curve(run, at) for run in runs]
        if all(curve is not None for curve in curves):
            measures[name] = compute_mean_std([reached(curve, kind) for curve in curves if curve is not None])
    curves = [records.curve(run, point) for run in runs]
    if all(curve is not None for curve in curves):
        measures["worst10"] = compute_mean_std(
            [100 * float(c["acc_worst10"][-1]) for c in curves if c is not None]
        )
    return measures
