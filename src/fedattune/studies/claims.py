"""Answers to a paper's claims: differences between rows, paired by seed, with their intervals over the seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from ..core.text import format_csv
from .outcome import StudyResults
from .study import Cell, Claim, Study

CONFIDENCE = 0.95
HOLDS, OPPOSITE = "▲", "▼"
CLAIM_COLUMNS = ("study", "claim", "answer", "column", "better", "than", "by", "difference", "low", "high", "seeds")


class Interval(NamedTuple):
    """A mean with the limits of its interval; both limits are NaN with one number."""

    mean: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        return (self.high - self.low) / 2


class Comparison(NamedTuple):
    """Two cells of a column, compared for a claim over the seeds with a run of both.

    `by` is how many points the better cell should be ahead; `difference` is better minus other; `lacks` are phrases.
    """

    better: Cell
    than: Cell
    by: float
    seeds: tuple[int, ...]
    difference: Interval | None
    lacks: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if the whole interval is above the points that the claim asks for."""
        return self.difference is not None and self.difference.low > self.by

    @property
    def is_opposite(self) -> bool:
        """True if the whole interval is below zero, or below a negative `by`: the claim is wrong."""
        return self.difference is not None and self.difference.high < min(self.by, 0.0)


class Answer(NamedTuple):
    """A claim with its comparisons, row by row."""

    claim: Claim
    comparisons: tuple[Comparison, ...]

    @property
    def text(self) -> str:
        """The answer in words: holds, holds partly, not seen, or not answered and why."""
        if lacks := list(dict.fromkeys(lack for one in self.comparisons for lack in one.lacks)):
            more = f"; {len(lacks) - 3} more" if len(lacks) > 3 else ""
            return f"not answered: {'; '.join(lacks[:3])}{more}"
        if any(len(one.seeds) == 1 for one in self.comparisons):
            return "not answered: one seed"
        n, held = len(self.comparisons), sum(one.holds for one in self.comparisons)
        opposite = sum(one.is_opposite for one in self.comparisons)
        partly = f"holds partly ({held} of {n} comparisons)" if held else "not seen"
        return ("holds" if held == n else partly) + (f"; the opposite in {opposite} of {n}" if opposite else "")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((one.better.row, one.than.row) for one in self.comparisons))


def compute_interval(differences: Sequence[float]) -> Interval:
    """Compute the mean of some numbers with its interval by Student's t distribution."""
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return Interval(mean, math.nan, math.nan)
    margin = stdtrit(n - 1, (1 + CONFIDENCE) / 2) * np.std(differences, ddof=1) / math.sqrt(n)
    return Interval(mean, mean - float(margin), mean + float(margin))


def answer_claims(results: StudyResults) -> list[Answer]:
    """Answer the claims of a study from its runs."""
    study = results.study
    return [
        Answer(claim, tuple(_compare(results, claim, *pair) for pair in study.list_comparisons(claim)))
        for claim in study.claims
    ]


def _compare(results: StudyResults, claim: Claim, better: Cell, than: Cell) -> Comparison:
    lacks, values = [], []
    for cell in (better, than):
        one = results.outcomes.get(cell)
        shortfalls = ["not run"] if one is None else [one.not_run] if one.not_run else results.list_shortfalls(one)
        lacks += [f"{cell}: {shortfall}" for shortfall in shortfalls]
        values.append({} if one is None or one.not_run else results.list_values(one, claim.measure))
    seeds = tuple(sorted(values[0].keys() & values[1].keys()))
    splits = []
    for one in (results.outcomes.get(cell) for cell in (better, than)):
        facts = [results.records.runs[run] for run in one.runs] if one else []
        by_seed = {fact["experiment"]["seed"]: fact.get("split") for fact in facts}
        splits.append([by_seed[seed] for seed in seeds])
    if splits[0] != splits[1]:
        lacks.append(f"{better.column}: {better.row} and {than.row} have different splits of the data")
        seeds = ()
    elif not seeds and not lacks:
        lacks.append(f"{better.column}: {better.row} and {than.row} have no seed in common")
    differences = [values[0][seed] - values[1][seed] for seed in seeds]
    interval = compute_interval(differences) if seeds else None
    return Comparison(better, than, claim.by, seeds, interval, tuple(lacks))


def format_answers(answers: Sequence[Answer], columns: Sequence[str]) -> list[list[str]]:
    """Format the table of claims: its head, then a line for each claim and each pair of rows that it compares."""
    compared = {one.better.column for answer in answers for one in answer.comparisons}
    columns = [column for column in columns if column in compared]
    lines = [["claim", "answer", "difference", *columns]]
    for answer in answers:
        first = [answer.claim.text, answer.text]
        for better, than in answer.pairs:
            pair = [one for one in answer.comparisons if (one.better.row, one.than.row) == (better, than)]
            found = {one.better.column: one for one in pair}
            cells = (format_difference(found[column]) if column in found else "" for column in columns)
            lines.append([*first, f"{better} minus {than}", *cells])
            first = ["", ""]
    return lines


def format_difference(one: Comparison) -> str:
    """Format a difference with its interval; a mark says that the claim holds, or its opposite."""
    if one.difference is None:
        return "–"
    text = f"{one.difference.mean:+.2f}".replace("-", "−")
    if len(one.seeds) < 2:
        return text
    mark = HOLDS if one.holds else OPPOSITE if one.is_opposite else ""
    return f"{text} ±{one.difference.margin:.2f} {mark}".rstrip()


def describe_marks(study: Study, answers: Sequence[Answer]) -> str:
    """Describe how to read the table of claims."""
    counts = sorted({len(one.seeds) for answer in answers for one in answer.comparisons if one.seeds})
    split = "each with a split of its own" if study.populations else "all with one split of the data"
    seeds = f" over {' or '.join(map(str, counts))} seeds, {split}" if counts else ""
    beyond = "the points that the claim names" if any(answer.claim.by for answer in answers) else "zero"
    # A claim that allows a loss is not contradicted by a smaller loss.
    below = "zero and below these points" if any(answer.claim.by < 0 for answer in answers) else "zero"
    return (
        f"Differences in points, paired by seed, ± half of the {100 * CONFIDENCE:.0f}% interval (Student's t){seeds}. "
        f"{HOLDS}: the whole interval is above {beyond}; {OPPOSITE}: it is below {below}. A claim holds if all its "
        f"comparisons have {HOLDS}."
    )


def describe_range(answer: Answer) -> str:
    """Describe the differences of a claim in one phrase: the only one, or the smallest and the largest."""
    found = [one for one in answer.comparisons if one.difference]
    if not found:
        return "–"
    ordered = sorted(found, key=lambda one: one.difference.mean if one.difference else 0.0)
    ends = [ordered[0]] if len(ordered) == 1 else [ordered[0], ordered[-1]]
    words = []
    for one in ends:
        rival = f", {one.than.row}" if len(answer.pairs) > 1 else ""
        words.append(f"{format_difference(one).rstrip(f' {HOLDS}{OPPOSITE}')} ({one.better.column}{rival})")
    return " to ".join(words)


def to_csv(study: str, answers: Sequence[Answer]) -> str:
    """Render one CSV line per claim and comparison."""
    lines: list[Sequence[object]] = [CLAIM_COLUMNS]
    for answer in answers:
        for one in answer.comparisons:
            numbers = one.difference or ()
            lines.append(
                [study, answer.claim.text, answer.text, one.better.column, one.better.row, one.than.row, one.by]
                + (["" if math.isnan(number) else f"{number:.3f}" for number in numbers] or [""] * 3)
                + [len(one.seeds)]
            )
    return format_csv(lines)
