"""Answers to a paper's claims: differences between rows, paired by seed, with their intervals over the seeds.

A claim of many comparisons is sometimes right by chance alone. So each answer stands beside one in which Holm's method
corrects the tests of the claim for their number.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from ..analysis.verdict.statistics import adjust_by_holm
from ..core.text import format_csv
from .outcome import StudyResults
from .study import Cell, Claim, Study

CONFIDENCE = 0.95
HOLDS, OPPOSITE, SMALL = "▲", "▼", "≈"
HOLDS_UNCORRECTED, OPPOSITE_UNCORRECTED = "△", "▽"
"""Marks of comparisons that hold, or whose opposite does, before Holm's correction alone."""

DIGITS = 3
"""Digits of a difference in points that count: accuracies are float32."""

MIN_RANKED_SEEDS = 6
"""Fewest seeds with which the signed-rank test can be sure."""

SMALL_POINTS = 1.0
"""Points that matter: a difference whose whole interval is below them in size is small."""

CLAIM_COLUMNS = (
    "study", "claim", "answer", "corrected", "column", "better", "than", "by", "difference", "low", "high", "p",
    "p_ranks", "p_holm", "p_small", "p_small_holm", "seeds", "diverged_better", "diverged_than",
)  # fmt: skip


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

    Attributes:
        better: the cell that the claim says is better.
        than: the other cell.
        by: points that the better cell should be ahead.
        seeds: seeds with a finished run of both.
        difference: better minus other, in points.
        lacks: phrases on what an answer still needs.
        diverged: runs of the better and of the other cell that diverged. They have no difference; a cell with one is
            never surely better.
        p: two-sided p value of the difference, against `by` or, below zero and `by`, against the smaller of both.
        p_ranks: as `p`, by Wilcoxon's signed-rank test, which a few seeds far from the others hardly move.
        p_small: two-sided p value of a difference of a point or more: at most 5% where the interval excludes it.
        p_holm: `p` by Holm's method over all comparisons of the claim.
        p_small_holm: `p_small` by the same.
    """

    better: Cell
    than: Cell
    by: float
    seeds: tuple[int, ...]
    difference: Interval | None
    lacks: tuple[str, ...]
    diverged: tuple[int, int] = (0, 0)
    p: float = 1.0
    p_ranks: float = 1.0
    p_small: float = 1.0
    p_holm: float = 1.0
    p_small_holm: float = 1.0

    @property
    def holds(self) -> bool:
        """True if the whole interval is above the points that the claim asks for."""
        return self.difference is not None and self.difference.low > self.by and not self.diverged[0]

    @property
    def is_opposite(self) -> bool:
        """True if the whole interval is below zero, or below a negative `by`: the claim is wrong."""
        return self.difference is not None and self.difference.high < min(self.by, 0.0) and not self.diverged[1]

    @property
    def is_small(self) -> bool:
        """True if the whole interval is within a point of zero: the methods are equivalent for practical use."""
        one = self.difference
        return one is not None and max(-one.low, one.high) < SMALL_POINTS and not any(self.diverged)

    @property
    def ranks_disagree(self) -> bool:
        """True if the signed-rank test, at the same level, sees a difference that the interval does not, or none."""
        is_enough = len(self.seeds) >= MIN_RANKED_SEEDS
        return is_enough and (self.p <= 1 - CONFIDENCE) != (self.p_ranks <= 1 - CONFIDENCE)

    @property
    def is_sure(self) -> bool:
        """True if Holm's correction leaves the difference sure."""
        return self.p_holm <= 1 - CONFIDENCE


class Answer(NamedTuple):
    """A claim with its comparisons, row by row."""

    claim: Claim
    comparisons: tuple[Comparison, ...]

    @property
    def text(self) -> str:
        """The answer in words: holds, holds partly, small, not seen, or not answered and why."""
        return self._answer(lambda _: True, lambda _: True)

    @property
    def corrected(self) -> str:
        """The answer after Holm's correction. What is sure in every comparison needs none.

        Source: Berger, Multiparameter hypothesis testing and acceptance sampling, Technometrics 24, 1982.
        """
        all_hold = all(one.holds for one in self.comparisons)
        all_small = all(one.is_small for one in self.comparisons)
        return self._answer(
            lambda one: all_hold or one.is_sure, lambda one: all_small or one.p_small_holm <= 1 - CONFIDENCE
        )

    def _answer(self, is_sure: Callable[[Comparison], bool], is_surely_small: Callable[[Comparison], bool]) -> str:
        """Put the answer into words; comparisons that are not sure neither hold nor contradict."""
        if lacks := list(dict.fromkeys(lack for one in self.comparisons for lack in one.lacks)):
            more = f"; {len(lacks) - 3} more" if len(lacks) > 3 else ""
            return f"not answered: {'; '.join(lacks[:3])}{more}"
        if any(len(one.seeds) == 1 and not any(one.diverged) for one in self.comparisons):
            return "not answered: one seed"
        n, held = len(self.comparisons), sum(one.holds and is_sure(one) for one in self.comparisons)
        opposite = sum(one.is_opposite and is_sure(one) for one in self.comparisons)
        small = sum(one.is_small and is_surely_small(one) for one in self.comparisons)
        if small == n and not held and not opposite:
            words = ["no difference of a point or more"]
        else:
            words = ["holds" if held == n else f"holds partly ({held} of {n} comparisons)" if held else "not seen"]
            words += [f"the opposite in {opposite} of {n}"] if opposite else []
            words += [f"less than a point in {small} of {n}"] if small else []
        diverged = [
            cells for one in self.comparisons for cells in zip((one.better, one.than), one.diverged, strict=True)
        ]
        words += [f"{cell}: {k} diverged" for cell, k in dict.fromkeys(diverged) if k]
        return "; ".join(words)

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


def compute_p(differences: Sequence[float], by: float = 0.0) -> float:
    """Compute the two-sided p value of Student's t test: at most 5% where the 95% interval leaves out the limit.

    The limit is `by` for a mean above it, and the smaller of `by` and zero for a mean below that.
    """
    n, mean, below = len(differences), float(np.mean(differences)), min(by, 0.0)
    distance = mean - by if mean > by else below - mean
    if n < 2 or distance <= 0:
        return 1.0
    deviation = float(np.std(differences, ddof=1))
    return 2 * float(stdtr(n - 1, -distance * math.sqrt(n) / deviation)) if deviation else 0.0


def compute_p_ranks(differences: Sequence[float], by: float = 0.0) -> float:
    """Compute the two-sided p value of Wilcoxon's signed-rank test, against the limit of `compute_p`.

    It is exact, also with ties, for which `scipy.stats.wilcoxon` has an approximation that depends on its version.
    """
    mean, below = float(np.mean(differences)), min(by, 0.0)
    if len(differences) < MIN_RANKED_SEEDS or below <= mean <= by:
        return 1.0
    from scipy.stats import rankdata  # its import takes a third of a second

    shifted = np.round(np.asarray(differences) - (by if mean > by else below), DIGITS)
    shifted = shifted[shifted != 0]
    ranks = np.rint(2 * rankdata(abs(shifted))).astype(np.int64)  # twice the ranks are whole numbers
    shares = np.ones(1)  # of all signs, by the sum of the positive ranks
    for rank in ranks:
        shares = (np.pad(shares, (0, rank)) + np.pad(shares, (rank, 0))) / 2
    found = int(ranks[shifted > 0].sum())
    return min(1.0, 2 * float(min(shares[: found + 1].sum(), shares[found:].sum())))


def compute_p_small(differences: Sequence[float]) -> float:
    """Compute the p value of a difference of a point or more, by two one-sided tests; doubled, as the interval is."""
    high, low = (compute_p([sign * one - SMALL_POINTS for one in differences]) for sign in (1, -1))
    is_inside = abs(float(np.mean(differences))) < SMALL_POINTS
    return max(high, low) if is_inside else 1.0


def answer_claims(results: StudyResults) -> list[Answer]:
    """Answer the claims of a study from its runs."""
    study, answers = results.study, []
    for claim in study.claims:
        found = [_compare(results, claim, *pair) for pair in study.list_comparisons(claim)]
        by_holm = adjust_by_holm([one.p for one in found])
        small_by_holm = adjust_by_holm([one.p_small for one in found])
        corrected = (
            one._replace(p_holm=p, p_small_holm=p_small)
            for one, p, p_small in zip(found, by_holm, small_by_holm, strict=True)
        )
        answers.append(Answer(claim, tuple(corrected)))
    return answers


def _compare(results: StudyResults, claim: Claim, better: Cell, than: Cell) -> Comparison:
    lacks, values, diverged = [], [], []
    for cell in (better, than):
        one = results.outcomes.get(cell)
        shortfalls = ["not run"] if one is None else [one.not_run] if one.not_run else results.list_lacks(one)
        lacks += [f"{cell}: {shortfall}" for shortfall in shortfalls]
        diverged.append(len(one.failures) if one else 0)
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
    elif not seeds and not lacks and not any(diverged):
        lacks.append(f"{better.column}: {better.row} and {than.row} have no seed in common")
    differences = [values[0][seed] - values[1][seed] for seed in seeds]
    interval = compute_interval(differences) if seeds else None
    p = compute_p(differences, claim.by) if seeds else 1.0
    p_ranks = compute_p_ranks(differences, claim.by) if seeds else 1.0
    p_small = compute_p_small(differences) if seeds else 1.0
    n_diverged = (diverged[0], diverged[1])
    return Comparison(better, than, claim.by, seeds, interval, tuple(lacks), n_diverged, p, p_ranks, p_small)


def format_answers(answers: Sequence[Answer], columns: Sequence[str]) -> list[list[str]]:
    """Format the table of claims: its head, then a line for each claim and each pair of rows that it compares."""
    compared = {one.better.column for answer in answers for one in answer.comparisons}
    columns = [column for column in columns if column in compared]
    lines = [["claim", "answer", "after Holm", "difference", *columns]]
    for answer in answers:
        first = [answer.claim.text, answer.text, describe_correction(answer)]
        for better, than in answer.pairs:
            pair = [one for one in answer.comparisons if (one.better.row, one.than.row) == (better, than)]
            found = {one.better.column: one for one in pair}
            cells = (format_difference(found[column]) if column in found else "" for column in columns)
            lines.append([*first, f"{better} minus {than}", *cells])
            first = ["", "", ""]
    return lines


def format_difference(one: Comparison, *, has_marks: bool = True) -> str:
    """Format a difference with its interval; marks say that the claim holds, or its opposite, and that it is small."""
    if one.difference is None:
        return "–"
    text = f"{one.difference.mean:+.2f}".replace("-", "−")
    if len(one.seeds) < 2:
        return text
    text = f"{text} ±{one.difference.margin:.2f}"
    if not has_marks:
        return text
    sides = (HOLDS, OPPOSITE) if one.is_sure else (HOLDS_UNCORRECTED, OPPOSITE_UNCORRECTED)
    side = sides[0] if one.holds else sides[1] if one.is_opposite else ""
    return f"{text} {side}{SMALL * one.is_small}".rstrip()


def describe_marks(study: Study, answers: Sequence[Answer]) -> str:
    """Describe how to read the table of claims."""
    counts = sorted({len(one.seeds) for answer in answers for one in answer.comparisons if one.seeds})
    split = "each with a split of its own" if study.populations else "all with one split of the data"
    seeds = f" over {' or '.join(map(str, counts))} seeds, {split}" if counts else ""
    beyond = "the points that the claim names" if any(answer.claim.by for answer in answers) else "zero"
    # A claim that allows a loss is not contradicted by a smaller loss.
    below = "zero and below these points" if any(answer.claim.by < 0 for answer in answers) else "zero"
    has_diverged = any(any(one.diverged) for answer in answers for one in answer.comparisons)
    return (
        f"Differences in points, paired by seed, ± half of the {100 * CONFIDENCE:.0f}% interval (Student's t){seeds}. "
        f"{HOLDS_UNCORRECTED}: the whole interval is above {beyond}; {OPPOSITE_UNCORRECTED}: it is below {below}; "
        f"{HOLDS} and {OPPOSITE}: still so after Holm's correction for the number of the claim's comparisons; {SMALL}: "
        f"it is within a point of zero, before the correction. A claim holds if all its comparisons have "
        f"{HOLDS_UNCORRECTED} or {HOLDS}."
    ) + " A method of which a run diverged gets no mark in its favour, nor of a small difference." * has_diverged


def describe_ranks(answers: Sequence[Answer]) -> str:
    """Name the comparisons in which the signed-rank test disagrees with the interval."""
    names = [
        f"{one.better.column}, {one.better.row} minus {one.than.row} (p = {one.p_ranks:.2g})"
        for one in dict.fromkeys(one for answer in answers for one in answer.comparisons)
        if one.ranks_disagree
    ]
    if not names:
        return ""
    return (
        "Student's t is sensitive to single seeds far from the others. Wilcoxon's signed-rank test disagrees with it, "
        f"at {100 * (1 - CONFIDENCE):.0f}% before the correction, on: {'; '.join(names)}."
    )


def describe_correction(answer: Answer) -> str:
    """Return the corrected answer if it differs."""
    return "the same" if answer.corrected == answer.text else answer.corrected


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
        words.append(f"{format_difference(one, has_marks=False)} ({one.better.column}{rival})")
    return " to ".join(words)


def to_csv(study: str, answers: Sequence[Answer]) -> str:
    """Render one CSV line per claim and comparison."""
    lines: list[Sequence[object]] = [CLAIM_COLUMNS]
    for answer in answers:
        for one in answer.comparisons:
            numbers = one.difference or (math.nan,) * 3
            n = len(one.seeds)
            p, *others = (f"{p:.2g}" * (n > 1) for p in (one.p, one.p_holm, one.p_small, one.p_small_holm))
            p_ranks = f"{one.p_ranks:.2g}" * (n >= MIN_RANKED_SEEDS)
            lines.append(
                [study, answer.claim.text, answer.text, answer.corrected]
                + [one.better.column, one.better.row, one.than.row, one.by]
                + ["" if math.isnan(number) else f"{number:.{DIGITS}f}" for number in numbers]
                + [p, p_ranks, *others, n, *one.diverged]
            )
    return format_csv(lines)
