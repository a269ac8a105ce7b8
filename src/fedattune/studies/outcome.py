"""Outcomes of a study: each cell's choice from its grid, its numbers over the seeds, and the paper's beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..analysis.compare import MeanStd, compute_mean_std
from ..runs.metrics import Point, is_in_last_tenth
from .records import Array, Curve, Records
from .study import Cell, Extent, Measure, Study

MAX_DIFFERENCE = 1.0
"""Points of difference to the paper; a larger one needs a reason."""
MIN_SHARE = 0.2
"""Share of its rounds that a cell needs to show numbers: fewer rounds show the start of training."""


@dataclass(frozen=True)
class Outcome:
    """The numbers of a cell: one finished run per seed, by id, with the reason of each failed run.

    Without a search, `choice` is the middle of the grid. `measures` are accuracies in percent, unless `not_run`.
    """

    cell: Cell
    choice: dict[str, Any]
    is_searched: bool
    point: Point
    runs: tuple[str, ...]
    failures: tuple[str, ...]
    extent: Extent
    full_rounds: int
    measures: Mapping[str, MeanStd]

    @property
    def value(self) -> MeanStd | None:
        return self.measures.get("value")

    @property
    def missing_rounds(self) -> str:
        """Count the rounds that the cell has; empty if it has all."""
        rounds = self.extent.rounds
        return "" if rounds == self.full_rounds else f"{rounds} of {self.full_rounds} rounds"

    @property
    def not_run(self) -> str:
        """Words that stand for the numbers of a cell with too few of its rounds; empty if it has enough."""
        is_short = (self.extent.rounds or 0) < MIN_SHARE * self.full_rounds
        return f"not run: {self.missing_rounds}" if is_short else ""

    @property
    def n_seeds(self) -> int:
        return len(self.runs)


class StudyResults:
    """The outcomes of a study's cells, all by default, that have results, and their differences to the paper."""

    def __init__(self, study: Study, records: Records, cells: Sequence[Cell] | None = None) -> None:
        self.study, self.records = study, records
        experiments = [facts["experiment"] for facts in records.runs.values()]
        self._seeds = range(1 + max((one["seed"] for one in experiments), default=0))
        extents = {Extent(one["rounds"], one["mixed_precision"]) for one in experiments}
        # Runs with the most rounds; among these, runs in full precision.
        order = sorted(extents, key=lambda one: (-(one.rounds or 0), one.mixed_precision != "off"))
        outcomes = {
            cell: next(filter(None, (self._compute(cell, extent) for extent in order)), None)
            for cell in (study.cells() if cells is None else cells)
        }
        self.outcomes = {cell: one for cell, one in outcomes.items() if one}

    def _compute(self, cell: Cell, extent: Extent) -> Outcome | None:
        choice = choose_options(self.study, cell, self.records, extent)
        outcome = None if choice is None else self._compute_choice(cell, extent, choice, is_searched=True)
        return outcome or self._compute_choice(cell, extent, self.study.middle_choice(cell), is_searched=False)

    def _compute_choice(
        self, cell: Cell, extent: Extent, choice: dict[str, Any], *, is_searched: bool
    ) -> Outcome | None:
        runs = [self.study.make_run(cell, choice, seed, extent) for seed in self._seeds]
        if runs[0].experiment.rounds != extent.rounds:
            return None
        recorded_runs = {run.id: self.records.runs[run.id] for run in runs if run in self.records}
        if not recorded_runs:
            return None
        failures = tuple(facts["failed"] for facts in recorded_runs.values() if "failed" in facts)
        finished_runs = {run: facts for run, facts in recorded_runs.items() if "failed" not in facts}
        evaluation_point: Point = next((facts["evaluation_point"] for facts in finished_runs.values()), "received")
        point = self.study.rows[cell.row].point or evaluation_point
        measures: dict[str, MeanStd] = {}
        if finished_runs:
            # The median, because a run that is paused, or shares its core, takes hours.
            seconds = float(np.median([facts["seconds"] for facts in finished_runs.values()]))
            steps = compute_mean_std([facts["local_steps"] for facts in finished_runs.values()])
            measures |= {"seconds": MeanStd(seconds, 0), "local_steps": steps}
        full_rounds = self.study.make_run(cell, choice, 0).experiment.rounds
        outcome = Outcome(
            cell, choice, is_searched, point, tuple(finished_runs), failures, extent, full_rounds, measures
        )
        if finished_runs and not outcome.not_run:
            measures |= self._measure(tuple(finished_runs), point)
        return outcome

    def _measure(self, runs: Sequence[str], point: Point) -> dict[str, MeanStd]:
        measures = {}
        own, last = self.study.measure, Measure(over="last", mean="pooled", called="")
        for name, kind, at in (
            ("value", own, point),
            ("received", own, "received"),
            ("trained", own, "trained"),
            ("last", last, point),
            ("last_uniform", last.model_copy(update={"mean": "uniform"}), point),
            ("worst10", None, point),
        ):
            curves = [curve for run in runs if (curve := self.records.curve(run, at)) is not None]
            if len(curves) == len(runs):
                values = [reduce_curve(c, kind) if kind else 100 * float(c["acc_worst10"][-1]) for c in curves]
                measures[name] = compute_mean_std(values)
                changes = [compute_late_change(curve, own.mean) for curve in curves if name == "value"]
                if known_changes := [change for change in changes if change is not None]:
                    measures["late_change"] = compute_mean_std(known_changes)
        return measures

    def list_values(self, one: Outcome, measure: Measure | None = None) -> dict[int, float]:
        """Return the number of each finished run of a cell, in percent, by seed."""
        runs = {self.records.runs[run]["experiment"]["seed"]: run for run in one.runs}
        curves = {seed: self.records.curve(run, one.point) for seed, run in runs.items()}
        return {seed: reduce_curve(curve, measure or self.study.measure) for seed, curve in curves.items() if curve}

    def compute_compared_value(self, one: Outcome) -> float | None:
        """Return the number to compare with the paper: the accuracy, or its gap to the row that `gap_to` names."""
        if one.value is None or not self.study.gap_to:
            return one.value and one.value.mean
        other = self.outcomes.get(Cell(self.study.gap_to, one.cell.column))
        return other.value.mean - one.value.mean if other and other.value else None

    def compute_difference(self, one: Outcome) -> float | None:
        """Return our number minus the paper's, in points; None if one of the two is missing."""
        paper, _ = self.study.paper_value(one.cell)
        ours = self.compute_compared_value(one)
        return None if paper is None or ours is None else ours - paper

    def list_comparable(self) -> list[tuple[Outcome, float]]:
        """Return cells that should match the paper and are complete, with their differences."""
        pairs = []
        for cell, one in self.outcomes.items():
            off = self.compute_difference(one)
            if off is None or not self.study.rows[cell.row].match:
                continue
            gap_to = self.study.gap_to
            compared = [one, self.outcomes[Cell(gap_to, cell.column)]] if gap_to else [one]
            if not any(self.list_shortfalls(each) for each in compared):
                pairs.append((one, off))
        return pairs

    def list_distant(self) -> list[Outcome]:
        """Return cells that should match the paper and differ by more than a point."""
        return [one for one, off in self.list_comparable() if abs(off) > MAX_DIFFERENCE]

    def list_shortfalls(self, one: Outcome) -> list[str]:
        """Return short phrases on everything that a cell lacks of what the study specifies, runs that diverged too."""
        lacks = self.list_lacks(one)
        if one.failures and not any("diverged" in lack for lack in lacks):
            lacks.append(f"{one.n_seeds} of {one.n_seeds + len(one.failures)} seeds, {len(one.failures)} diverged")
        return lacks

    def list_lacks(self, one: Outcome) -> list[str]:
        """Return short phrases on what has to be run yet to have everything that the study specifies."""
        full = self.study.make_run(one.cell, one.choice, 0).experiment
        parts = [one.missing_rounds] if one.missing_rounds else []
        if one.extent.mixed_precision != full.execution.mixed_precision:
            parts.append(f"{one.extent.mixed_precision} products")
        if one.n_seeds + len(one.failures) < self.study.seeds:
            diverged = f", {len(one.failures)} diverged" * bool(one.failures)
            parts.append(f"{one.n_seeds} of {self.study.seeds} seeds{diverged}")
        if one.choice and not one.is_searched:
            parts.append("no search")
        return parts


def reduce_curve(curve: Curve, measure: Measure) -> float:
    """Reduce a curve to the number of a run, in percent."""
    accuracy = curve[f"acc_{measure.mean}"]
    if measure.over == "max":
        return 100 * float(accuracy.max())
    if measure.over == "last":
        return 100 * float(accuracy[-1])
    return 100 * float(accuracy[_find_last_tenth(curve["round"])].mean())


def compute_late_change(curve: Curve, mean: Literal["pooled", "uniform"]) -> float | None:
    """Compute how far a curve still moves, in points; None if all evaluated rounds are in the last tenth.

    That is the mean over its last tenth minus the mean over as many evaluated rounds before.
    """
    accuracy, is_late = curve[f"acc_{mean}"], _find_last_tenth(curve["round"])
    earlier = accuracy[~is_late][-int(is_late.sum()) :]
    return 100 * float(accuracy[is_late].mean() - earlier.mean()) if len(earlier) else None


def _find_last_tenth(rounds: Array) -> Array:
    last = int(rounds[-1])
    return np.array([is_in_last_tenth(one, last) for one in rounds.tolist()])


def choose_options(study: Study, cell: Cell, records: Records, extent: Extent) -> dict[str, Any] | None:
    """Choose the combination of the grid with the best validation accuracy in the last tenth of the rounds.

    A combination that diverged with some seed after the search gives way to the next best. None if one is not tried.
    """
    choices = study.choices(cell)
    if len(choices) == 1:
        return choices[0]
    scored = [(choice, score) for choice, score in score_choices(study, cell, records, extent) if score is not None]
    if len(scored) < len(choices):
        return None
    stable = []
    for choice, score in scored:
        runs = (study.make_run(cell, choice, seed, extent).id for seed in range(study.seeds))
        if not any("failed" in records.runs.get(run, {}) for run in runs):
            stable.append((choice, score))
    return max(stable or scored, key=lambda one: one[1])[0]


def score_choices(
    study: Study, cell: Cell, records: Records, extent: Extent
) -> list[tuple[dict[str, Any], float | None]]:
    """Score all combinations of the grid by validation accuracy in percent: 0 if diverged, None if not tried."""
    scores: list[tuple[dict[str, Any], float | None]] = []
    late = Measure(over="last10", mean=study.measure.mean, called="")
    for choice in study.choices(cell):
        run = study.make_run(cell, choice, 0, extent, tuning=True).id
        facts = records.runs.get(run, {})
        point = study.source_row(cell).point or facts.get("evaluation_point", "received")
        curve = records.curve(run, point, "validation")
        scores.append((choice, reduce_curve(curve, late) if curve else 0.0 if "failed" in facts else None))
    return scores


def name_cells(cells: Sequence[Cell], results: StudyResults) -> str:
    """Name cells; a column whose cells are all among them has only its own name."""
    if len(cells) == len(results.outcomes):
        return "all cells"
    whole = {c.column for c in cells} - {c.column for c in results.outcomes if c not in cells}
    return "; ".join(dict.fromkeys(c.column if c.column in whole else str(c) for c in cells))
