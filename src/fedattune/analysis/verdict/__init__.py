"""The verdict on a comparison: whether to collaborate, with which method, and who loses.

Validation data choose the method and the strongest thing that a client can do alone; test data compare the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...core.metrics import METRICS, Metric, MetricName, format_number
from ...data.splits import validation_weights
from ..compare import (
    BASELINE,
    Contestant,
    FloatArray,
    align_runs,
    average_clients,
    compute_gains,
    get_default_metric,
    group_by_algorithm,
    is_merged,
    pair_runs,
)
from ..mixing.decisions import describe_decisions
from .statistics import (
    MIN_CLIENTS,
    adjust_by_holm,
    bootstrap_interval,
    compute_row_p,
    compute_split_interval,
    compute_wilcoxon_p,
    resample_rows,
)

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics
    from ...runs.predictions import RowPredictions
    from ..compare import Baseline

MIN_DEFINED_SHARE = 0.5
"""Share of the clients' weight with a metric of their own below which all validation rows are measured together."""


@dataclass(frozen=True)
class Choice:
    """The scores by which methods are chosen.

    Attributes:
        scores: name -> score, the larger the better.
        criterion: what the scores are, as a phrase after `by`.
        n_validated: number of clients that have validation rows; 0 if test data gave the scores.
    """

    scores: Mapping[str, float]
    criterion: str
    n_validated: int

    def find_best(self, names: Sequence[str]) -> str:
        """Return the best of some names; of equally good ones the first."""
        return max(names, key=self.scores.__getitem__)


def weigh_clients(run: "RunMetrics") -> FloatArray:
    """Return weights (E,) with which a mean over clients with validation rows stands for all clients.

    A client too small for a validation row of its own has one by chance; it then counts for all clients of its size.
    """
    clients = run.facts["clients"]
    n_train, n_validation = (np.array([one.get(key, 0) for one in clients]) for key in ("n_train", "n_validation"))
    share = run.config.get("partition", {}).get("fractions", {}).get("validation")
    if share is None:  # parts that the user made
        return (n_validation > 0).astype(np.float64)
    return validation_weights(n_train, n_validation, float(share))


def score_methods(
    groups: Mapping[str, Sequence[Contestant]], runs: "Sequence[RunMetrics]", metric: MetricName
) -> Choice:
    """Score every method and baseline on validation data; on test data if there are no validation data."""
    measure = METRICS[metric]
    weights = {run.split: weigh_clients(run) for run in runs}
    shared = {split: np.ones(len(one), dtype=bool) for split, one in weights.items()}
    n_validated = min(int((one > 0).sum()) for one in weights.values())
    every = [one for group in groups.values() for one in group]
    has_rows = all((~np.isnan(one.measure_for_choice(metric)[weights[one.split] > 0])).any() for one in every)
    if not n_validated or not has_rows:
        tested = {name: average_clients(group, metric) for name, group in groups.items()}
        means = {name: np.nanmean(one) if np.isfinite(one).any() else np.nan for name, one in tested.items()}
        scores = {name: measure.sign * float(mean) for name, mean in means.items()}
        reason = f"test {measure.label}, there being no validation data, which favours the method chosen"
        return Choice(scores, reason, 0)
    # A client on which one method has no value counts for no method; an infinite loss is a value.
    for one in every:
        is_defined = ~np.isnan(one.measure_for_choice(metric))
        if "validation" in one.predictions and (is_defined & (weights[one.split] > 0)).any():
            shared[one.split] = shared[one.split] & is_defined
    shared = {split: one if (one & (weights[split] > 0)).any() else np.ones_like(one) for split, one in shared.items()}
    is_own = all(_is_defined(one, metric, weights[one.split]) for one in every)
    weights = {split: np.where(shared[split], one, 0.0) for split, one in weights.items()}
    scores = {}
    for name, group in groups.items():
        values = [_measure_validation(one, metric, weights[one.split], is_own=is_own) for one in group]
        scores[name] = measure.sign * float(np.mean(values))
    criterion = f"validation {measure.label}" + ("" if is_own else " of all rows together")
    return Choice(scores, criterion, n_validated)


def _is_defined(one: Contestant, metric: MetricName, weights: FloatArray) -> bool:
    values = one.measure_for_choice(metric)
    known = weights[~np.isnan(values)].sum()
    return bool(known >= MIN_DEFINED_SHARE * weights.sum()) or "validation" not in one.predictions


def _measure_validation(one: Contestant, metric: MetricName, weights: FloatArray, *, is_own: bool) -> float:
    if not is_own and "validation" in one.predictions:
        return one.predictions["validation"].pooled[metric]
    values = one.measure_for_choice(metric)
    known = ~np.isnan(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else float("nan")


def find_excluded(groups: "Mapping[str, Sequence[RunMetrics]]") -> dict[str, str]:
    """Find the methods that cannot show whether collaborating helps, and the reason of each.

    A method is excluded if it shared nothing, or trained for longer than `local`.
    """
    steps = count_steps(groups)
    excluded = {}
    for name, runs in groups.items():
        if name == BASELINE or BASELINE not in groups:
            continue
        if not any(run.bytes_up for run in runs):
            excluded[name] = "shared nothing"
        elif steps[name] > MAX_STEPS_RATIO * steps[BASELINE]:
            excluded[name] = f"did {steps[name]:,.0f} local steps per client where local did {steps[BASELINE]:,.0f}"
    return excluded


MAX_STEPS_RATIO = 1.05
"""Local steps of a method per local step of `local`; the comparison is not fair above this ratio."""


def count_steps(groups: "Mapping[str, Sequence[RunMetrics]]") -> dict[str, float]:
    """Count the local steps per client of each method."""
    return {name: float(np.mean([run.local_steps for run in runs])) for name, runs in groups.items()}


SURE_LOSS = 0.05
"""Holm's adjusted p value up to which a client's loss is more than chance explains."""


@dataclass(frozen=True)
class Harm:
    """The clients that are worse with a method than with its reference.

    Attributes:
        n_clients, n_losing: clients whose gain is known; of these, the clients with a loss.
        n_sure: of these, the clients whose test rows show more than chance explains; None if rows are not known.
        worst, worst_loss: the client with the largest loss, and its loss in words: rows, or the unit of the metric.
        worst_chance: the probability that chance alone makes a client lose so much; None if rows are not known.
    """

    n_clients: int
    n_losing: int
    n_sure: int | None = None
    worst: str = ""
    worst_loss: str = ""
    worst_chance: float | None = None

    def describe(self) -> str:
        if not self.n_losing:
            return f"none of the {self.n_clients} clients would lose"
        text = f"{self.n_losing} of {self.n_clients} clients would lose"
        if self.n_sure is not None:
            sure = {0: "none of them", self.n_losing: "all of them"}.get(self.n_sure, f"{self.n_sure} of them")
            text += f", {sure} by more than chance explains"
        who = f"client {self.worst}" if self.n_losing == 1 else f"most of all client {self.worst}"
        return f"{text}; {who} with {self.worst_loss}{self._describe_chance()}"

    def _describe_chance(self) -> str:
        if self.worst_chance is None:
            return ""
        n = max(2, round(1 / max(self.worst_chance, 1e-9)))
        if self.worst_chance > 2 / 3:
            return " (by chance most clients would look so)"
        return f" (by chance 1 in {n:,} clients would look so)" if n <= 1000 else " (hardly by chance)"


def list_row_pairs(pairs: Sequence[tuple[Contestant, Contestant]]) -> "list[tuple[RowPredictions, RowPredictions]]":
    """List the predictions of test rows of some pairs of runs; none if one of them has none."""
    if not all("test" in one.predictions for pair in pairs for one in pair):
        return []
    return [(a.predictions["test"], b.predictions["test"]) for a, b in pairs]


def measure_harm(
    pairs: Sequence[tuple[Contestant, Contestant]], gains: FloatArray, metric: Metric, ids: Sequence[str]
) -> Harm:
    """Find the clients that lose, by their gains (N,) in points or in the unit of the metric; NaN where not known.

    Each pair is of a run of the method and one of its reference with the same seed and split.
    """
    losing = np.flatnonzero(gains < 0)
    n_clients = int(np.isfinite(gains).sum())
    if not len(losing):
        return Harm(n_clients, 0)
    worst = int(np.nanargmin(gains))
    loss = f"{gains[worst]:.2f} points" if metric.is_percent else metric.format_gap(gains[worst], signed=True)
    if not metric.is_higher_better:
        loss = f"{metric.label} higher by {format_number(-gains[worst], 3)}"
    with_rows = list_row_pairs(pairs)
    if not with_rows:
        return Harm(n_clients, len(losing), None, ids[worst], loss)
    # Splits and seeds share rows, so each test takes one of them; the median is what a typical one shows.
    chance = {
        int(client): float(np.median([compute_row_p(a, b, int(client), metric.name) for a, b in with_rows]))
        for client in losing
    }
    # Any client could have lost, so all of them are tested, those with a gain with p = 1.
    n_sure = sum(p <= SURE_LOSS for p in adjust_by_holm([*chance.values(), *[1.0] * (n_clients - len(chance))]))
    if metric.name == "accuracy":
        rows = with_rows[0][0].rows(worst)
        n = rows.stop - rows.start
        loss += f" on {n} test row{'s' * (n > 1)}"
        if len(with_rows) == 1:
            mine, others = (int((one.outputs[rows].argmax(axis=1) != one.y[rows]).sum()) for one in with_rows[0])
            loss = f"{mine - others} of {n} test rows more wrong"
    return Harm(n_clients, len(losing), n_sure, ids[worst], loss, chance[worst])


SIGNIFICANCE = 0.05
Answer = Literal["yes", "no", "undecided", "nothing"]


@dataclass(frozen=True)
class Verdict:
    """The answer to the question of whether collaborating helps, in one sentence and in numbers.

    Attributes:
        text: the sentence; a second one describes what a method decided for the clients, if it reports this.
        answer: yes, no, undecided, or nothing if there is nothing to compare.
        method: the method that the verdict is about.
        reference: the strongest thing that a client can do alone, `local` or a baseline.
        metric: name of the metric.
        gains: of each client over the reference (N,), in points or in the unit of the metric; NaN where not known.
        interval: 95% interval of the mean gain: over clients, or of the test rows of these clients if they are few.
        interval_over: clients or rows.
        split_interval: 95% interval of the mean gain over splits; None for one split.
        by_run: the mean gain of each seed and split.
        p_value: of Wilcoxon's test over clients; None for few clients.
        harm: the clients that would lose.
        reasons: why the answer is undecided.
    """

    text: str
    answer: Answer = "nothing"
    method: str | None = None
    reference: str = BASELINE
    metric: MetricName = "accuracy"
    gains: FloatArray | None = None
    interval: tuple[float, float] | None = None
    interval_over: Literal["clients", "rows"] = "clients"
    split_interval: tuple[float, float] | None = None
    by_run: tuple[float, ...] = ()
    p_value: float | None = None
    harm: Harm | None = None
    reasons: tuple[str, ...] = ()


def reach_verdict(
    results: "Sequence[RunMetrics]",
    *,
    baselines: "Sequence[Baseline]" = (),
    metric: MetricName | None = None,
    has_failures: bool = False,
    is_final: bool = True,
) -> Verdict:
    """Decide whether collaborating helps, with which method, and how many clients would lose.

    Args:
        baselines: what clients can do alone with other tools, and what everybody's rows together give.
        metric: the metric that decides; by default accuracy, or RMSE if the target is a number.
        is_final: all runs have finished; otherwise the sentence says that it may change.
    """
    groups = group_by_algorithm(results)
    if missing := _find_missing(set(groups), has_failures):
        return Verdict(f"Nothing to compare: {missing}.")
    excluded = find_excluded(groups)
    if len(excluded) == len(groups) - 1:
        return Verdict(f"Nothing can be compared fairly: {join_reasons(excluded)}.")
    comparison = Comparison(results, baselines, metric or get_default_metric(results))
    verdict = comparison.decide([name for name in groups if name != BASELINE and name not in excluded])
    if decided := describe_decisions(groups, verdict.method):
        verdict = replace(verdict, text=f"{verdict.text} {decided}")
    return verdict if is_final else replace(verdict, text=f"As it stands now: {verdict.text}")


def choose_method(
    results: "Sequence[RunMetrics]", metric: MetricName | None = None, baselines: "Sequence[Baseline]" = ()
) -> tuple[str, str]:
    """Choose the method to use, `local` included, and give the reason."""
    verdict = reach_verdict(results, metric=metric, baselines=baselines)
    if verdict.answer == "yes" and verdict.method:
        return verdict.method, "the verdict's method"
    if verdict.answer == "no":
        return BASELINE, "the verdict is that collaborating does not help here"
    groups = group_by_algorithm(results)
    excluded = find_excluded(groups)
    choice = score_methods(groups, results, metric or get_default_metric(results))
    # Of equally good methods the first is taken, and training alone is the first.
    best = choice.find_best([name for name in choice.scores if name not in excluded])
    return best, f"the best one by {choice.criterion}"


class Comparison:
    """Methods against the strongest thing that a client can do alone, by one metric."""

    def __init__(self, results: "Sequence[RunMetrics]", baselines: "Sequence[Baseline]", metric: MetricName) -> None:
        self.metric: Metric = METRICS[metric]
        self.groups: Mapping[str, Sequence[Contestant]] = group_by_algorithm([*results, *baselines])
        alone = [one.name for one in baselines if one.kind == "alone"]
        self.pooled = list(dict.fromkeys(one.name for one in baselines if one.kind == "pooled"))
        self.choice: Choice = score_methods(self.groups, results, metric)
        self.reference = self.choice.find_best([BASELINE, *dict.fromkeys(alone)])
        self.ids = [str(client["id"]) for client in results[0].facts["clients"]]
        self.is_merged = is_merged(results[0])
        fractions = results[0].config.get("partition", {}).get("fractions", {})
        self.test_share = float(fractions.get("test", 0.25))

    def decide(self, methods: Sequence[str]) -> Verdict:
        """Compare the best of some methods with the reference, and say in one sentence what follows."""
        method = self.choice.find_best(methods)
        verdict = self._measure(method, self.reference)
        gains = verdict.gains
        if gains is None or not np.isfinite(gains).any():
            return Verdict(
                f"Nothing can be compared: the test rows do not define the {self.metric.label} of any client.",
                metric=self.metric.name,
            )
        low, high = verdict.interval or (-np.inf, np.inf)
        split_low, split_high = verdict.split_interval or (low, high)
        is_tested = verdict.p_value is None or verdict.p_value <= SIGNIFICANCE
        is_sure_gain = min(low, split_low) > 0 and is_tested
        is_sure_loss = max(high, split_high) < 0 and is_tested
        is_alone_better = self.choice.scores[self.reference] >= self.choice.scores[method]
        rivals = self._find_rivals(method, methods) if self.choice.n_validated else {}
        reasons: list[str] = []
        answer: Answer = "undecided"
        if rivals:
            names = " and ".join(f"{name} is {self.metric.format_gap(gap)}" for name, gap in rivals.items())
            reasons.append(f"validation data choose {method}, but on test data {names} better")
        if is_alone_better and is_sure_gain:
            reasons.append(f"{self.reference} is as good on validation data, but not on test data")
        if not is_alone_better and is_sure_loss:
            reasons.append(f"{method} is better than {self.reference} on validation data, but worse on test data")
        if is_alone_better and is_sure_loss:
            answer = "no"
        elif is_sure_gain and not is_alone_better:
            others = [self._measure(name, self.reference).interval for name in rivals]
            if all(one is not None and one[0] > 0 for one in others):
                answer = "yes"
        if answer != "yes" and (gap := self._describe_pooled_gain()):
            answer = "undecided"
            reasons.append(gap)
        return self._phrase(replace(verdict, answer=answer, reasons=tuple(reasons)), is_alone_better, rivals)

    def _measure(self, method: str, other: str) -> Verdict:
        mine, others, name = self.groups[method], self.groups[other], self.metric.name
        scale = self.metric.scale
        gains = scale * compute_gains(mine, others, name)
        known = gains[np.isfinite(gains)]
        pairs = pair_runs(mine, others)
        each = [(one.split, compute_gains([one], [two], name)) for one, two in pairs]
        means = [(split, scale * float(np.nanmean(gain))) for split, gain in each if np.isfinite(gain).any()]
        by_run = tuple(mean for _, mean in means)
        verdict = Verdict("", method=method, reference=other, metric=name, gains=gains, by_run=by_run)
        if len(known) >= MIN_CLIENTS:
            verdict = replace(verdict, interval=bootstrap_interval(known), p_value=compute_wilcoxon_p(known))
        elif len(known) and (with_rows := list_row_pairs(pairs)):
            low, high = resample_rows(with_rows, name)
            verdict = replace(verdict, interval=(scale * low, scale * high), interval_over="rows")
        by_split: dict[int, list[float]] = {}
        for split, mean in means:
            by_split.setdefault(split, []).append(mean)
        return replace(
            verdict,
            split_interval=compute_split_interval([float(np.mean(one)) for one in by_split.values()], self.test_share),
            harm=measure_harm(pairs, gains, self.metric, self.ids),
        )

    def _find_rivals(self, method: str, methods: Sequence[str]) -> dict[str, float]:
        """Find the methods that are surely better than the chosen one on test data: name -> mean gain over it."""
        known, rivals = {}, {}
        for name in methods:
            if name != method:
                gap = compute_gains(self.groups[name], self.groups[method], self.metric.name)
                known[name] = gap[np.isfinite(gap)]
        tested = [name for name, gains in known.items() if len(gains) >= MIN_CLIENTS]
        p_values = adjust_by_holm([compute_wilcoxon_p(known[name]) for name in tested])
        p_of = dict(zip(tested, p_values, strict=True))
        for name, gains in known.items():
            low, _ = self._measure(name, method).interval or (-np.inf, np.inf)
            if low > 0 and p_of.get(name, 0.0) <= SIGNIFICANCE:  # of few clients, test rows alone say it
                rivals[name] = float(gains.mean())
        return rivals

    def _describe_pooled_gain(self) -> str:
        """Describe how much better the best pooled baseline surely is than the reference; empty if it is not."""
        if not self.pooled:
            return ""
        name = self.choice.find_best(self.pooled)
        verdict = self._measure(name, self.reference)
        if verdict.gains is None or not verdict.interval or verdict.interval[0] <= 0:
            return ""
        if verdict.p_value is not None and verdict.p_value > SIGNIFICANCE:
            return ""
        gap = self.metric.format_gap(float(np.nanmean(verdict.gains)) / self.metric.scale)
        side = "above" if self.metric.is_percent else "better than"
        alone = "training alone" if self.reference == BASELINE else self.reference
        return (
            f"{name}, on everybody's rows, is {gap} {side} {alone} on test data, so the rows of others help, and more "
            "rounds, another --lr or --tune may let a method use them"
        )

    def _phrase(self, verdict: Verdict, is_alone_better: bool, rivals: Mapping[str, float]) -> Verdict:
        method, other, by = str(verdict.method), verdict.reference, f"by {self.choice.criterion}"
        scores, numbers = self.choice.scores, self._describe_numbers(verdict)
        n = int(np.isfinite(verdict.gains).sum()) if verdict.gains is not None else 0
        of_these = f"For these {n} clients: " if verdict.interval_over == "rows" else ""
        if verdict.answer == "yes":
            conclusion = f"{of_these}Collaborating helps here"
            reason = f"use {method} (chosen {by}), which is {numbers}"
            if rivals:
                reason = f"use {method} or {' or '.join(rivals)}: {verdict.reasons[0]}; {method} is {numbers}"
        else:
            conclusion = "Collaborating does not help here"
            if verdict.answer == "undecided":
                conclusion = "Undecided" if verdict.reasons else "No clear gain from collaborating is shown here"
                if verdict.interval is None:
                    conclusion = f"{n} clients are too few to say whether collaborating helps"
                if self.is_merged:
                    conclusion = "Sums over all clients do not say whether collaborating helps"
            conclusion = of_these + conclusion
            if scores[other] == scores[method]:
                reason = f"{other} and {method} are equally good {by}; {method} is {numbers}"
            elif is_alone_better:
                reason = f"{other} is the best method {by}; the next one, {method}, is {numbers}"
            else:
                reason = f"{method}, the best method {by}, is {numbers}"
            reason = "; ".join([*verdict.reasons, reason])
        harm = None if self.is_merged else verdict.harm
        losers = harm.describe() if harm else "nobody's loss is known"
        return replace(verdict, text=f"{conclusion}: {reason}; {losers}.")

    def _describe_numbers(self, verdict: Verdict) -> str:
        metric, gains = self.metric, verdict.gains
        assert gains is not None
        both = align_runs(self.groups[str(verdict.method)], self.groups[verdict.reference])
        known = np.isfinite(gains)
        values = [metric.format(float(average_clients(runs, metric.name)[known].mean())) for runs in both]
        what = "" if metric.name == "accuracy" else f"{metric.label} "
        parts = [f"{what}{values[0]} against {values[1]}"]
        if verdict.interval:
            parts.append(f"95% interval of the gain over {verdict.interval_over} {_format(verdict.interval)}")
        if verdict.split_interval:
            parts.append(f"over splits {_format(verdict.split_interval)}")
        if verdict.p_value is not None:
            parts.append(f"Wilcoxon p {_format_p(verdict.p_value)}")
        mean = float(gains[known].mean())
        alone = "training alone" if verdict.reference == BASELINE else f"{verdict.reference}, the best alone,"
        sides = ("above", "below") if metric.is_percent else ("better than", "worse than")
        side, gap = sides[mean < 0], metric.format_gap(abs(mean) / metric.scale)
        return f"{gap} {side} {alone} on test data ({'; '.join(parts)})"


def _format(interval: tuple[float, float]) -> str:
    low, high = (f"{value:+,.2f}" if abs(value) >= 0.1 else f"{value:+.3g}" for value in interval)
    return f"{low} to {high}"


def _format_p(p: float) -> str:
    return "below 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def join_reasons(excluded: Mapping[str, str]) -> str:
    """Join methods and the reasons why they are left out."""
    return "; ".join(f"{name} {reason}" for name, reason in excluded.items())


def _find_missing(methods: set[str], has_failures: bool) -> str | None:
    """Name the methods without which there is no comparison; None if there is one."""
    if BASELINE in methods and len(methods) > 1:
        return None
    if has_failures and not methods:
        return "no method finished"
    if BASELINE in methods:
        return f"only {BASELINE} finished" if has_failures else f"give at least one method beside {BASELINE}"
    if has_failures:
        return f"{BASELINE}, with which the others are compared, did not finish"
    return f"there is no run of {BASELINE}, training alone, with which the others are compared"
