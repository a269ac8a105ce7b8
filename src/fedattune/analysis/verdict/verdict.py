"""The verdict on a comparison: whether to collaborate, with which method, and who loses.

Validation data choose the method and the strongest thing that a client can do alone; test data compare the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...core.metrics import METRICS, Metric, MetricName, compute_row_losses, format_number
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
from .choice import Choice, count_steps, find_excluded, score_methods
from .predicted import write_prediction_notes
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
    from .baseline import Baseline

SURE_LOSS = 0.05
"""Holm's adjusted p value up to which a client's loss is more than chance explains."""


@dataclass(frozen=True)
class Harm:
    """The clients that are worse with a method than with its reference.

    Attributes:
        n_clients: clients whose gain is known.
        n_losing: of these, the clients with a loss.
        n_sure: of these, the clients whose test rows show more than chance explains; None if rows are not known.
        worst: name of the client with the largest loss.
        worst_loss: its loss in words: rows, or the unit of the metric.
        worst_chance: the probability that chance alone makes a client lose so much; None if rows are not known.
    """

    n_clients: int
    n_losing: int
    n_sure: int | None = None
    worst: str = ""
    worst_loss: str = ""
    worst_chance: float | None = None

    def describe(self) -> str:
        """Say how many clients would lose, and which one has the largest loss."""
        if not self.n_losing:
            return f"none of the {self.n_clients} clients would lose"
        text = f"{self.n_losing} of {self.n_clients} clients would lose"
        if self.n_sure is not None:
            sure = {0: "none of them", self.n_losing: "all of them"}.get(
                self.n_sure, f"{self.n_sure} of them"
            )
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


def measure_harm(
    pairs: Sequence[tuple[Contestant, Contestant]], gains: FloatArray, metric: Metric, ids: Sequence[str]
) -> Harm:
    """Find the clients that lose.

    Args:
        pairs: runs of the method and of its reference with the same seed and split.
        gains: of each client (N,), in points or in the unit of the metric; NaN where not known.
        metric: the metric.
        ids: names of the clients.
    """
    losing = np.flatnonzero(gains < 0)
    n_clients = int(np.isfinite(gains).sum())
    if not len(losing):
        return Harm(n_clients, 0)
    worst = int(np.nanargmin(gains))
    loss = f"{gains[worst]:.2f} points" if metric.is_percent else metric.format_gap(gains[worst], signed=True)
    if not metric.is_higher_better:
        loss = f"{metric.label} higher by {format_number(-gains[worst], 3)}"
    with_rows = [
        (a.predictions["test"], b.predictions["test"])
        for a, b in pairs
        if "test" in a.predictions and "test" in b.predictions
    ]
    if not with_rows or len(with_rows) < len(pairs):
        return Harm(n_clients, len(losing), None, ids[worst], loss)
    # Splits and seeds share rows, so each test takes one of them; the median is what a typical one shows.
    chance = {
        int(client): float(np.median([compute_row_p(a, b, int(client), metric.name) for a, b in with_rows]))
        for client in losing
    }
    # Any client could have lost, so all of them are tested, those with a gain with p = 1.
    n_sure = sum(
        p <= SURE_LOSS for p in adjust_by_holm([*chance.values(), *[1.0] * (n_clients - len(chance))])
    )
    if metric.name == "accuracy":
        rows = with_rows[0][0].rows(worst)
        n = rows.stop - rows.start
        wrong = [
            int(compute_row_losses(one.y[rows], one.outputs[rows].astype(np.float64), "accuracy").sum())
            for one in with_rows[0]
        ]
        is_one = len(with_rows) == 1
        loss = (
            f"{wrong[0] - wrong[1]} of {n} test rows more wrong"
            if is_one
            else f"{loss} on {n} test row{'s' * (n > 1)}"
        )
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

    def _all_gain(self, rivals: Mapping[str, float]) -> bool:
        """Check that each of the rivals is surely better than the reference, too."""
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


MAX_LISTED_METHODS = 5
"""Methods with the same value that a note lists by name."""
EQUAL_LOSSES = 1e-5
"""Relative difference of two losses that rounding alone explains."""


def describe_seed_differences(results: Sequence["RunMetrics"]) -> dict[str, str]:
    """Describe, by method, how its seeds differ from the seeds of `local`, so that chance is not taken for a gain."""
    groups = group_by_algorithm(results)
    seeds = {name: {run.settings.seed for run in runs} for name, runs in groups.items()}
    notes = {}
    for name in groups if BASELINE in groups else ():
        common = seeds[name] & seeds[BASELINE]
        both = (
            f"{name} (seeds {_join_seeds(seeds[name])}) and {BASELINE} (seeds {_join_seeds(seeds[BASELINE])})"
        )
        if not common:
            notes[name] = (
                f"{both} have no seed in common: a part of what seems to be a gain may come from other seeds"
            )
        elif seeds[name] != seeds[BASELINE]:
            notes[name] = f"{both} are compared over seeds {_join_seeds(common)} alone, which both have"
    return notes


def write_fairness_notes(results: Sequence["RunMetrics"]) -> list[str]:
    """Describe what the methods were not given alike, so that a gap is not misread."""
    if not results:
        return []
    notes = []
    groups = group_by_algorithm(results)
    if excluded := find_excluded(groups):
        notes.append(f"left out of the conclusion on collaborating: {join_reasons(excluded)}")
    notes += describe_seed_differences(results).values()
    notes += [
        f"{', '.join(names)}: the same loss at every evaluation, so they are one method under these settings"
        for names in find_equal_methods(groups)
    ]
    steps = count_steps(groups)
    counts = {name: f"{count:,.0f}" for name, count in steps.items()}
    differs = max(steps.values()) - min(steps.values()) > 0.005 * max(steps.values())
    if differs and len(set(counts.values())) > 1:
        settings = results[0].settings
        reasons = []
        if settings.cohort_size(results[0].n_clients) < results[0].n_clients:
            reasons.append(
                "some train only the clients asked in a round (--train all or --train cohort: all alike)"
            )
        if settings.epochs:
            reasons.append("with --epochs, a step of several batches is counted once")
        why = f": {'; '.join(reasons)}" if reasons else ""
        notes.append(
            f"the methods did different numbers of local steps per client ({_group_names(counts)}){why}"
        )
    decay = {name: f"{runs[0].facts['weight_decay']:g}" for name, runs in groups.items()}
    if len(set(decay.values())) > 1:
        notes.append(
            f"the methods' weight decay differs ({_group_names(decay)}); --weight-decay gives all methods the same"
        )
    return notes


def find_equal_methods(groups: Mapping[str, Sequence["RunMetrics"]]) -> list[list[str]]:
    """Group methods with equal losses, up to rounding, at every evaluation and seed; only groups of several."""
    found: list[tuple[FloatArray, list[str]]] = []
    for name, runs in groups.items():
        losses = np.array(
            [
                (run.settings.seed, e["round"], e[run.evaluation_point]["loss_uniform"])
                for run in runs
                for e in run.history
            ]
        )
        for like, names in found:
            if losses.shape == like.shape and np.allclose(losses, like, rtol=EQUAL_LOSSES, atol=0):
                names.append(name)
                break
        else:
            found.append((losses, [name]))
    return [names for _, names in found if len(names) > 1]


def merge_notes(
    results: Sequence["RunMetrics"], baselines: Sequence["Baseline"] = (), metric: MetricName | None = None
) -> list[str]:
    """Collect the notes of all runs, each once, with the methods that it is about; then notes on the comparison."""
    methods_of: dict[str, list[str]] = {}  # note -> its methods; none if it is about all
    for result in results:
        name = f"{result.algorithm}: "
        for note in result.notes:
            text = note.removeprefix(name)
            methods_of.setdefault(text, []).extend([result.algorithm] * (text != note))
    notes = [
        f"{', '.join(dict.fromkeys(names))}: {note}" if names else note for note, names in methods_of.items()
    ]
    notes += [note for baseline in baselines for note in baseline.notes]
    return [*notes, *write_prediction_notes(results, baselines, metric), *write_fairness_notes(results)]


def _join_seeds(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _group_names(values: dict[str, str]) -> str:
    """Join methods that share a value: `local, fedavg: 20; pfedme: 40`; the largest group may be `the others`."""
    shared: dict[str, list[str]] = {}
    for name, value in values.items():
        shared.setdefault(value, []).append(name)
    largest = max(shared, key=lambda value: len(shared[value]))
    if len(shared[largest]) > MAX_LISTED_METHODS:
        del shared[largest]
        shared[largest] = ["the others"]
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in shared.items())
