"""The verdict on a comparison: whether to collaborate, with which method, and who loses.

Validation data choose the method and the strongest thing that a client can do alone; test data compare the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...core.metrics import METRICS, Metric, MetricName
from ..compare import (
    BASELINE,
    Contestant,
    FloatArray,
    average_clients,
    compute_gains,
    get_default_metric,
    group_by_algorithm,
    is_merged,
    pair_runs,
)
from ..mixing.decisions import describe_decisions
from .choice import Choice, find_excluded, score_methods
from .harm import Harm, measure_harm
from .statistics import (
    MIN_CLIENTS,
    adjust_by_holm,
    bootstrap_interval,
    compute_split_interval,
    compute_wilcoxon_p,
    resample_rows,
)

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics
    from .baseline import Baseline

SIGNIFICANCE = 0.05

Answer = Literal["yes", "no", "undecided", "nothing"]


@dataclass(frozen=True)
class Verdict:
    """The answer to the question of whether collaborating helps, in one sentence and in numbers.

    Attributes:
        text: the sentence; a second one if a method tells what it decided for the clients.
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
        results: runs on the same clients.
        baselines: what clients can do alone with other tools, and what everybody's rows together give.
        metric: the metric that decides; by default accuracy, or RMSE if the target is a number.
        has_failures: other runs of the comparison failed.
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

    def __init__(
        self, results: "Sequence[RunMetrics]", baselines: "Sequence[Baseline]", metric: MetricName
    ) -> None:
        self.metric: Metric = METRICS[metric]
        self.groups: dict[str, Sequence[Contestant]] = {
            **group_by_algorithm(results),
            **group_by_algorithm(baselines),
        }
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
        rivals = self._find_rivals(method, methods) if self.choice.is_validated else {}
        reasons: list[str] = []
        answer: Answer = "undecided"
        if rivals:
            names = " and ".join(f"{name} is {self.metric.format_gap(gap)}" for name, gap in rivals.items())
            reasons.append(f"validation data choose {method}, but on test data {names} better")
        if is_alone_better and is_sure_gain:
            reasons.append(f"{self.reference} is as good on validation data, but not on test data")
        if not is_alone_better and is_sure_loss:
            reasons.append(
                f"{method} is better than {self.reference} on validation data, but worse on test data"
            )
        if is_alone_better and is_sure_loss:
            answer = "no"
        elif is_sure_gain and not is_alone_better and not (rivals and not self._all_gain(rivals)):
            answer = "yes"
        if answer != "yes" and (gap := self._describe_pooled_gain()):
            answer = "undecided"
            reasons.append(gap)
        return self._phrase(replace(verdict, answer=answer, reasons=tuple(reasons)), is_alone_better, rivals)

    def _measure(self, method: str, other: str) -> Verdict:
        """Measure the gain of a method over another one on test data."""
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
        elif len(known) and all("test" in one.predictions for pair in pairs for one in pair) and pairs:
            low, high = resample_rows(
                [(a.predictions["test"], b.predictions["test"]) for a, b in pairs], name
            )
            verdict = replace(verdict, interval=(scale * low, scale * high), interval_over="rows")
        by_split: dict[int, list[float]] = {}
        for split, mean in means:
            by_split.setdefault(split, []).append(mean)
        return replace(
            verdict,
            split_interval=compute_split_interval(
                [float(np.mean(one)) for one in by_split.values()], self.test_share
            ),
            harm=measure_harm(pairs, gains, self.metric, self.ids),
        )

    def _find_rivals(self, method: str, methods: Sequence[str]) -> dict[str, float]:
        """Find the methods that are surely better than the chosen one on test data: name -> mean gain over it."""
        others = [name for name in methods if name != method]
        gaps = {
            name: compute_gains(self.groups[name], self.groups[method], self.metric.name) for name in others
        }
        known = {name: gap[np.isfinite(gap)] for name, gap in gaps.items()}
        tested = [name for name in others if len(known[name]) >= MIN_CLIENTS]
        p_values = adjust_by_holm([compute_wilcoxon_p(known[name]) for name in tested])
        p_of = dict(zip(tested, p_values, strict=True))
        rivals = {}
        for name in others:
            low, _ = self._measure(name, method).interval or (-np.inf, np.inf)
            if low > 0 and p_of.get(name, 0.0) <= SIGNIFICANCE:  # of few clients, test rows alone say it
                rivals[name] = float(known[name].mean())
        return rivals

    def _describe_pooled_gain(self) -> str:
        """Describe how much better the best pooled baseline surely is than the reference; empty if it is not.

        Then the rows of others do help, and a method without a gain has not learned what they teach.
        """
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

    def _all_gain(self, rivals: Mapping[str, float]) -> bool:
        """Tell whether each of the rivals is surely better than the reference, too."""
        verdicts = [self._measure(name, self.reference) for name in rivals]
        return all(one.interval is not None and one.interval[0] > 0 for one in verdicts)

    def _phrase(self, verdict: Verdict, is_alone_better: bool, rivals: Mapping[str, float]) -> Verdict:
        """Put the verdict into words."""
        method, other, by = str(verdict.method), verdict.reference, f"by {self.choice.criterion}"
        scores = self.choice.scores
        numbers = f"{method} is {self._describe_numbers(verdict)}"
        n = int(np.isfinite(verdict.gains).sum()) if verdict.gains is not None else 0
        of_these = f"For these {n} clients: " if verdict.interval_over == "rows" else ""
        if verdict.answer == "yes":
            conclusion = f"{of_these}Collaborating helps here"
            reason = f"use {method} (chosen {by}), which is {self._describe_numbers(verdict)}"
            if rivals:
                reason = f"use {method} or {' or '.join(rivals)}: {verdict.reasons[0]}; {numbers}"
        else:
            conclusion = "Collaborating does not help here"
            if verdict.answer == "undecided":
                conclusion = (
                    "Undecided" if verdict.reasons else "No clear gain from collaborating is shown here"
                )
                if verdict.interval is None:
                    conclusion = f"{n} clients are too few to say whether collaborating helps"
                if self.is_merged:
                    conclusion = "Sums over all clients do not say whether collaborating helps"
            conclusion = of_these + conclusion
            if scores[other] == scores[method]:
                reason = f"{other} and {method} are equally good {by}; {numbers}"
            elif is_alone_better:
                numbers = self._describe_numbers(verdict)
                reason = f"{other} is the best method {by}; the next one, {method}, is {numbers}"
            else:
                reason = f"{method}, the best method {by}, is {self._describe_numbers(verdict)}"
            reason = "; ".join([*verdict.reasons, reason])
        harm = None if self.is_merged else verdict.harm
        losers = harm.describe() if harm else "nobody's loss is known"
        return replace(verdict, text=f"{conclusion}: {reason}; {losers}.")

    def _describe_numbers(self, verdict: Verdict) -> str:
        """Describe the gain on test data, with its intervals."""
        metric, gains = self.metric, verdict.gains
        assert gains is not None
        mine, others = (self.groups[name] for name in (str(verdict.method), verdict.reference))
        pairs = pair_runs(mine, others)
        first, second = ([a for a, _ in pairs], [b for _, b in pairs]) if pairs else (mine, others)
        known = np.isfinite(gains)
        values = [
            metric.format(float(average_clients(runs, metric.name)[known].mean())) for runs in (first, second)
        ]
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
        side = "better than" if not metric.is_percent else "above"
        if mean < 0:
            side = "worse than" if not metric.is_percent else "below"
        gap = metric.format_gap(abs(mean) / metric.scale)
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
