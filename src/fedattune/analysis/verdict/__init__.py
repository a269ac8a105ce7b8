"""The verdict on a comparison: whether to collaborate, with which method, and who loses.

Validation data choose the method and the strongest thing that a client can do alone; test data compare the two.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...core.errors import list_some
from ...core.io import replace_nonfinite
from ...core.metrics import CURVE_METRICS, METRICS, Metric, MetricName, format_gain, format_interval, format_number
from ...core.options import write_option
from ...data.splits import validation_weights
from ..compare import (
    BASELINE,
    Contestant,
    FloatArray,
    align_runs,
    average_clients,
    average_known,
    average_weighted,
    compute_gains,
    get_default_metric,
    group_by_algorithm,
    is_merged,
    pair_runs,
    weigh_tests,
)
from ..mixing.decisions import describe_decisions
from .statistics import MIN_CLIENTS, MIN_SPLITS, MeanGain, adjust_by_holm, compute_row_p, estimate_mean

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
        return max(names, key=lambda name: np.nan_to_num(self.scores[name], nan=-np.inf))


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
    """Score every method and baseline on validation data; on test data if there are no validation data.

    Where no client's validation rows define the metric, all rows together do, or their accuracy or RMSE.
    """
    measure = METRICS[metric]
    weights = {run.split: weigh_clients(run) for run in runs}
    shared = {split: np.ones(len(one), dtype=bool) for split, one in weights.items()}
    n_validated = min(int((one > 0).sum()) for one in weights.values())
    every = [one for group in groups.values() for one in group]
    diverged = find_diverged(groups)
    ranked = [one for name, group in groups.items() if name not in diverged for one in group] or every
    unknown = [one for one in ranked if not _has_value(one, metric, weights[one.split])]
    by_curve = CURVE_METRICS[runs[0].kind]
    if n_validated and unknown and metric != by_curve and all(map(_has_finite_outputs, unknown)):
        return score_methods(groups, runs, by_curve)
    if not n_validated or unknown:
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


def _has_value(one: Contestant, metric: MetricName, weights: FloatArray) -> bool:
    """Return whether some client's validation rows define the metric, or all of them together do."""
    if not np.isnan(one.measure_for_choice(metric)[weights > 0]).all():
        return True
    return "validation" in one.predictions and bool(np.isfinite(_measure_together(one, metric)))


def _has_finite_outputs(one: Contestant) -> bool:
    """Return False if the model's outputs, not the rows, are why a metric is not defined."""
    return "validation" not in one.predictions or bool(np.isfinite(one.predictions["validation"].outputs).all())


def _measure_together(one: Contestant, metric: MetricName) -> float:
    return (one.predictions.get("choice") or one.predictions["validation"]).pooled[metric]


def _is_defined(one: Contestant, metric: MetricName, weights: FloatArray) -> bool:
    values = one.measure_for_choice(metric)
    known = weights[~np.isnan(values)].sum()
    return bool(known >= MIN_DEFINED_SHARE * weights.sum()) or "validation" not in one.predictions


def _measure_validation(one: Contestant, metric: MetricName, weights: FloatArray, *, is_own: bool) -> float:
    if not is_own and "validation" in one.predictions:
        return _measure_together(one, metric)
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
            one = "the one client whose gain is known would not"
            return f"{one if self.n_clients == 1 else f'none of the {self.n_clients} clients would'} lose"
        text = f"{self._count_losing()} would lose"
        if self.n_sure is not None:
            sure = {0: "none of them", self.n_losing: "all of them"}.get(self.n_sure, f"{self.n_sure} of them")
            text += f", {sure} by more than chance explains"
        who = f"client {self.worst}" if self.n_losing == 1 else f"most of all client {self.worst}"
        return f"{text}; {who} with {self.worst_loss}{self._describe_chance()}"

    def summarize(self) -> str:
        """Say who loses, in few words."""
        if not self.n_losing:
            return self.describe()
        who = f"client {self.worst}" if self.n_losing == 1 else f"most of all client {self.worst}"
        sure = {None: "", 0: ", none surely", self.n_losing: ", surely"}.get(self.n_sure, f", {self.n_sure} surely")
        return f"{self._count_losing()} would lose ({who}){sure}"

    def _count_losing(self) -> str:
        return f"{self.n_losing} of {self.n_clients} client{'s' * (self.n_clients > 1)}"

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


CONSTANT_BASELINES = ("majority", "mean")
"""Names of the baselines that predict one value for each client."""
SAME_LOSS = 1e-4
"""Relative difference of the losses of two models up to which they count as one."""
CLEAR_LEVEL = 0.99
"""Level at which an answer is clear, so that it holds if it is looked at after every few splits."""
MAX_NAMED = 3
"""Clients of one method, or methods, that the sentence names."""
Answer = Literal["yes", "no", "undecided", "nothing_learned", "nothing"]
OptionKind = Literal["alone", "shared", "personal"]
OPTIONS: dict[OptionKind, str] = {
    "alone": "stay alone with",
    "shared": "share one model with",
    "personal": "a model for each client with",
}
"""Words for the options of the clients, the cheapest first."""


@dataclass(frozen=True)
class Option:
    """One thing that the clients can do.

    Attributes:
        kind: stay alone, share one model, or train a model for each client together.
        name: the best method of this kind by validation.
        value: mean of the metric over clients on test rows; a fraction if the metric is in percent.
        gain: mean gain over the reference, in points or in the unit of the metric; None for the reference itself.
        interval: 95% interval of the gain.
        is_recommended: whether the verdict recommends it.
    """

    kind: OptionKind
    name: str
    value: float
    gain: float | None = None
    interval: tuple[float, float] | None = None
    is_recommended: bool = False


@dataclass(frozen=True)
class Verdict:
    """The answer to the question of whether collaborating helps, in words and in numbers.

    Attributes:
        text: conclusion, gain, who loses, and the options, in a few sentences.
        answer: yes, no, undecided, nothing_learned (no model is surely better than a constant), or nothing to compare.
        method: the method that the verdict is about: the recommended one, or the best one by validation.
        reference: the strongest thing that a client can do alone: `local` or a baseline.
        metric: name of the metric.
        gains: of each client over the reference (N,), in points or in the unit of the metric; NaN where not known.
        weights: of the clients in all means (N,): 1, and less for clients with few test rows.
        gain: the weighted mean of the gains.
        interval: 95% interval of the mean gain, which decides; None if there are too few clients.
        is_clear: whether yes or no also holds at the 99% level, so that more splits would hardly change it.
        by_run: the mean gain of each seed and split.
        harm: the clients that would lose.
        reasons: why the answer is undecided.
        options: the best of each thing that clients can do, the cheapest first.
        diverged: method -> clients whose training diverged; such a method is not ranked.
        untrained: methods and baselines that are worse than a constant on test rows; they are not ranked either.
        details: sentences for a reader of the report.
    """

    text: str
    answer: Answer = "nothing"
    method: str | None = None
    reference: str = BASELINE
    metric: MetricName = "accuracy"
    gains: FloatArray | None = None
    weights: FloatArray | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    is_clear: bool = False
    by_run: tuple[float, ...] = ()
    harm: Harm | None = None
    reasons: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    diverged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; None for numbers that are not finite."""
        content = asdict(self)
        for key in ("gains", "weights"):
            content[key] = None if content[key] is None else content[key].tolist()
        return {key: replace_nonfinite(_list_tuples(value)) for key, value in content.items()}


def _list_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _list_tuples(one) for key, one in value.items()}
    return [_list_tuples(one) for one in value] if isinstance(value, tuple | list) else value


def reach_verdict(
    results: "Sequence[RunMetrics]",
    *,
    baselines: "Sequence[Baseline]" = (),
    metric: MetricName | None = None,
    failed: Sequence[str] = (),
    is_final: bool = True,
    is_tuned: bool = False,
) -> Verdict:
    """Decide whether collaborating helps, with which method, and how many clients would lose.

    Args:
        baselines: what clients can do alone with other tools, and what everybody's rows together give.
        metric: the metric that decides; by default accuracy, or RMSE if the target is a number.
        failed: the method of each run that failed. Such a method is not ranked, as its other runs are the easy ones.
        is_final: all runs have finished; otherwise the sentence says that it may change.
        is_tuned: validation data chose the rates. Without it, fewer than three splits decide nothing.
    """
    groups = group_by_algorithm(results)
    if missing := _find_missing(set(groups), bool(failed)):
        return Verdict(f"Nothing to compare: {missing}.")
    excluded = find_excluded(groups)
    if len(excluded) == len(groups) - 1:
        return Verdict(f"Nothing can be compared fairly: {join_reasons(excluded)}.")
    comparison = Comparison(results, baselines, metric or get_default_metric(results), failed)
    methods = [name for name in groups if name != BASELINE and name not in excluded]
    verdict = comparison.decide(methods, is_tuned=is_tuned)
    if decided := describe_decisions(groups, verdict.method):
        verdict = replace(verdict, details=(*verdict.details, decided))
    return verdict if is_final else replace(verdict, text=f"As it stands now: {verdict.text}")


def choose_method(
    results: "Sequence[RunMetrics]",
    metric: MetricName | None = None,
    baselines: "Sequence[Baseline]" = (),
    *,
    failed: Sequence[str] = (),
    is_tuned: bool = False,
) -> tuple[str, str]:
    """Choose the method to use, `local` included, and give the reason."""
    verdict = reach_verdict(results, metric=metric, baselines=baselines, failed=failed, is_tuned=is_tuned)
    if verdict.answer == "yes" and verdict.method:
        return verdict.method, "the verdict's method"
    if verdict.answer == "no":
        return BASELINE, "the verdict is that collaborating does not help here"
    groups = group_by_algorithm(results)
    unfit = {*find_excluded(groups), *verdict.diverged, *verdict.untrained, *failed} - {BASELINE}
    choice = score_methods(groups, results, metric or get_default_metric(results))
    # Of equally good methods the first is taken, and training alone is the first.
    best = choice.find_best([name for name in groups if name not in unfit] or [*groups])
    return best, f"the best one by {choice.criterion}"


def shares_one_model(runs: "Sequence[RunMetrics]") -> bool:
    """Return whether all clients get one model: at every evaluation it has the loss of the server's global model."""
    for run in runs:
        points = [(entry.get(run.evaluation_point), entry.get("global")) for entry in run.history]
        losses = np.array([(one["loss_uniform"], whole["loss_uniform"]) for one, whole in points if one and whole])
        if (
            run.evaluation_point != "received"
            or not len(losses)
            or not np.allclose(losses[:, 0], losses[:, 1], rtol=SAME_LOSS)
        ):
            return False
    return True


def find_diverged(groups: Mapping[str, Sequence[Contestant]]) -> dict[str, tuple[str, ...]]:
    """Find the clients whose training diverged: method -> clients, of any seed and split."""
    found = {}
    for name, runs in groups.items():
        if clients := list(dict.fromkeys(one for run in runs for one in getattr(run, "diverged", ()))):
            found[name] = tuple(clients)
    return found


class Comparison:
    """Methods against the strongest thing that a client can do alone, by one metric.

    Attributes:
        reference: the best thing alone by validation.
        diverged: method -> clients whose training diverged.
        untrained: methods and baselines worse than a constant on test rows.
        failed: method -> its runs that failed.
    """

    def __init__(
        self,
        results: "Sequence[RunMetrics]",
        baselines: "Sequence[Baseline]",
        metric: MetricName,
        failed: Sequence[str] = (),
    ) -> None:
        self.metric: Metric = METRICS[metric]
        splits = {run.split for run in results}
        baselines = [one for one in baselines if one.split in splits]  # a stop may have left more
        self.groups: Mapping[str, Sequence[Contestant]] = group_by_algorithm([*results, *baselines])
        fractions = results[0].config.get("partition", {}).get("fractions", {})
        self.test_share = float(fractions.get("test", 0.25))
        self.weights = weigh_tests(results)
        self.choice: Choice = score_methods(self.groups, results, metric)
        kinds = {one.name: one.kind for one in baselines}
        self.pooled = [name for name, kind in kinds.items() if kind == "pooled"]
        self.constants = [name for name in kinds if name in CONSTANT_BASELINES]
        self.diverged = find_diverged(self.groups)
        # Not `local`: without it, a method would be compared with something weaker.
        self.failed = Counter(name for name in failed if name in self.groups and name != BASELINE)
        self.untrained = self._find_untrained()
        self.alone = [BASELINE, *(name for name, kind in kinds.items() if kind == "alone")]
        self.reference = self.choice.find_best(self._rank(self.alone) or [BASELINE])
        self.shared = [name for name, runs in group_by_algorithm(results).items() if shares_one_model(runs)]
        self.ids = [str(client["id"]) for client in results[0].facts["clients"]]
        self.is_merged = is_merged(results[0])
        self.kind = results[0].kind

    def _find_untrained(self) -> tuple[str, ...]:
        if not self.constants:
            return ()
        constant = self.choice.find_best(self.constants)
        others = (name for name in self.groups if name not in self.constants)
        return tuple(name for name in others if self.estimate(name, constant).mean < 0)

    def _rank(self, names: Sequence[str]) -> list[str]:
        unfit = {*self.diverged, *self.untrained, *self.failed}
        return [name for name in names if name not in unfit]

    def decide(self, methods: Sequence[str], *, is_tuned: bool) -> Verdict:
        """Compare the best of some methods with the reference, and say what follows."""
        ranked = self._rank(methods)
        # Test rows say who is untrained, so they must not make a method that validation places second the best one.
        whole = [name for name in methods if name not in self.diverged and name not in self.failed]
        best = self.choice.find_best(whole or methods)
        if not np.isfinite(compute_gains(self.groups[best], self.groups[self.reference], self.metric.name)).any():
            text = f"the test rows do not define the {self.metric.label} of any client"
            if not all("test" in run.predictions for run in self.groups[best]):
                text = (
                    f"the {self.metric.label} needs the models' outputs for test rows, which are not stored above 50 "
                    f"million numbers and in deployments; take {write_option('metric')} {CURVE_METRICS[self.kind]}"
                )
            return Verdict(
                f"Nothing can be compared: {text}.",
                metric=self.metric.name,
                diverged=self.diverged,
                untrained=self.untrained,
            )
        answer, method = self._answer(best, ranked)
        is_clear = answer in ("yes", "no") and self._answer(best, ranked, CLEAR_LEVEL)[0] == answer
        reasons = self._find_reasons(best, ranked, is_no=answer == "no")
        if answer == "no" and reasons:
            answer = "undecided"
        n_splits = len({one.split for one, _ in pair_runs(self.groups[best], self.groups[self.reference])})
        if answer in ("yes", "no") and not is_tuned and n_splits < MIN_SPLITS:
            answer = "undecided"
            what = {0: "no split in common", 1: "one split"}.get(n_splits, f"{n_splits} splits")
            reasons.insert(0, f"{what} without tuning cannot decide; --budget 5m, or --splits 5 --tune 3, can")
        if answer in ("no", "undecided") and self.constants and not self._has_learned():
            answer, is_clear = "nothing_learned", False
        verdict = self._measure(method)
        return self._phrase(
            replace(
                verdict,
                answer=answer,
                is_clear=is_clear and answer in ("yes", "no"),
                reasons=tuple(reasons),
                options=self._list_options(ranked, method if answer == "yes" else None, answer),
                diverged=self.diverged,
                untrained=self.untrained,
            )
        )

    def _answer(self, best: str, ranked: Sequence[str], level: float = 0.95) -> tuple[Answer, str]:
        """Answer by the interval of the best method at a level, and name the method to use.

        It is the cheapest one that is surely better than the reference and that no dearer one surely beats.
        """
        if best in ranked and self._is_surely_better(best, level):
            kinds = self._find_kinds(ranked)
            shared, personal = kinds.get("shared", best), kinds.get("personal", best)
            if not (self._is_surely_better(shared, level) and self._is_surely_better(personal, level)):
                return "yes", best
            low, _ = self.estimate(personal, shared).compute_interval() or (-np.inf, np.inf)
            return "yes", personal if low > 0 else shared
        _, high = self.estimate(best, self.reference).compute_interval(level) or (-np.inf, np.inf)
        prefers_alone = self.choice.scores[self.reference] >= self.choice.scores[best]
        return ("no" if prefers_alone and high < 0 else "undecided"), best

    def _is_surely_better(self, name: str, level: float) -> bool:
        """Return whether a method is surely better than the reference, and better than everything else alone."""
        low, _ = self.estimate(name, self.reference).compute_interval(level) or (-np.inf, np.inf)
        return low > 0 and all(self.estimate(name, one).mean > 0 for one in self._rank(self.alone))

    def _find_kinds(self, ranked: Sequence[str]) -> dict[OptionKind, str]:
        kinds: dict[OptionKind, list[str]] = {
            "shared": [name for name in ranked if name in self.shared],
            "personal": [name for name in ranked if name not in self.shared],
        }
        return {kind: self.choice.find_best(names) for kind, names in kinds.items() if names}

    def _list_options(self, ranked: Sequence[str], method: str | None, answer: Answer) -> tuple[Option, ...]:
        """List the best of each kind; a method that is recommended, else staying alone if the answer is no."""
        alone = average_weighted(average_clients(self.groups[self.reference], self.metric.name), self.weights)
        options = [Option("alone", self.reference, alone, is_recommended=answer == "no")]
        for kind, name in self._find_kinds(ranked).items():
            one, value = self.estimate(name, self.reference), self._average_both(name)[0]
            options.append(Option(kind, name, value, one.mean, one.compute_interval(), name == method))
        return tuple(options)

    def _has_learned(self) -> bool:
        """Return whether anything is surely better than the best constant: on average, or for one of few clients."""
        constant = self.choice.find_best(self.constants)
        others = [name for name in self.groups if name not in (*self.constants, *self.diverged)]
        intervals = (self.estimate(name, constant).compute_interval() for name in others)
        if any(one is not None and one[0] > 0 for one in intervals):
            return True
        return len(self.weights) < MIN_CLIENTS and any(self._helps_a_client(name, constant) for name in others)

    def _helps_a_client(self, name: str, constant: str) -> bool:
        """Return whether the test rows of a client show that a model is better there than a constant."""
        pairs = list_row_pairs(pair_runs(self.groups[name], self.groups[constant]))
        if not pairs:
            return False
        p_values = [
            float(np.median([compute_row_p(other, mine, client, self.metric.name) for mine, other in pairs]))
            for client in np.flatnonzero(self.weights > 0).tolist()
        ]
        return min(adjust_by_holm(p_values), default=1.0) <= SURE_LOSS

    def estimate(self, method: str, other: str) -> MeanGain:
        """Estimate the mean gain of a method over another, in points or in the unit of the metric."""
        mine, others, name = self.groups[method], self.groups[other], self.metric.name
        by_split: dict[int, list[FloatArray]] = {}
        for one, two in pair_runs(mine, others):
            by_split.setdefault(one.split, []).append(compute_gains([one], [two], name))
        rows = [average_known(np.array(one)) for one in by_split.values()] or [compute_gains(mine, others, name)]
        return estimate_mean(self.metric.scale * np.array(rows), self.weights, self.test_share)

    def _measure(self, method: str) -> Verdict:
        mine, others, name = self.groups[method], self.groups[self.reference], self.metric.name
        scale = self.metric.scale
        gains = scale * compute_gains(mine, others, name)
        pairs = pair_runs(mine, others)
        by_run = [average_weighted(scale * compute_gains([one], [two], name), self.weights) for one, two in pairs]
        estimate = self.estimate(method, self.reference)
        return Verdict(
            "",
            method=method,
            reference=self.reference,
            metric=name,
            gains=gains,
            weights=self.weights,
            gain=estimate.mean if np.isfinite(estimate.mean) else None,
            interval=estimate.compute_interval(),
            by_run=tuple(one for one in by_run if np.isfinite(one)),
            harm=None if self.is_merged else measure_harm(pairs, gains, self.metric, self.ids),
        )

    def _average_both(self, method: str) -> tuple[float, float]:
        """Average the metric with a method and with the reference over the same runs."""
        both = align_runs(self.groups[method], self.groups[self.reference])
        mine, others = (average_weighted(average_clients(one, self.metric.name), self.weights) for one in both)
        return mine, others

    def _find_reasons(self, best: str, ranked: Sequence[str], *, is_no: bool) -> list[str]:
        """Say what speaks against a yes or a no, or that pooled rows help where the best method shows no sure gain."""
        if not ranked:
            return [f"every federated method diverged{', failed,' if self.failed else ''} or is worse than a constant"]
        low, high = self.estimate(best, self.reference).compute_interval() or (-np.inf, np.inf)
        prefers_alone = self.choice.scores[self.reference] >= self.choice.scores[best]
        reasons = []
        if not prefers_alone and high < 0:
            reasons.append(f"{best} is better than {self.reference} on validation rows, but worse on test rows")
        if low <= 0:
            may_be_luck = self.choice.n_validated > 0 and not is_no
            sure = [name for name in ranked if may_be_luck and self._is_surely_better(name, 0.95)]
            reasons += self._describe_pooled_gain(best, is_no=is_no, is_used=bool(sure))
            if sure:
                named = list_some(sure, MAX_NAMED)
                reasons.append(
                    f"test rows show a sure gain for {named}, but validation rows chose {best}; among several methods, "
                    "one may look sure by chance"
                )
            return reasons
        better = (one for one in self._rank(self.alone) if self.estimate(best, one).mean <= 0)
        return reasons + [f"{one} is at least as good on test rows, though not on validation rows" for one in better]

    def _describe_pooled_gain(self, best: str, *, is_no: bool, is_used: bool) -> list[str]:
        """Describe the gain of the best pooled baseline if it is sure; for a no, if it is over a standard error.

        Args:
            is_used: a method gains from others' rows, too.
        """
        for name in [self.choice.find_best(self.pooled)] if self.pooled else ():
            estimate = self.estimate(name, self.reference)
            low, high = estimate.compute_interval() or (-np.inf, np.inf)
            gap = f"{self.metric.format_gap(estimate.mean / self.metric.scale)} better than {self.reference}"
            if low > 0:
                advice = "" if is_used else "; more training or another --model may let a method use them"
                return [f"{name}, on everybody's rows, is {gap}, so the rows of others help{advice}"]
            if is_no and estimate.mean > estimate.error:
                return [
                    f"{name}, on everybody's rows, is {gap}, though not surely (95% interval "
                    f"{format_interval((low, high))}); the rows of others may help, but {best} gains nothing from them"
                ]
        return []

    def _phrase(self, verdict: Verdict) -> Verdict:
        method, metric = str(verdict.method), self.metric
        n = int(np.isfinite(verdict.gains).sum()) if verdict.gains is not None else 0
        kind = "one model for all" if method in self.shared else "a model for each client"
        conclusions: dict[Answer, str] = {
            "yes": f"Collaborating helps: use {method}, {kind}",
            "no": f"Collaborating does not help here: stay alone with {self.reference}",
            "undecided": "Undecided" if verdict.reasons else "No clear gain from collaborating is shown here",
        }
        conclusion = conclusions.get(verdict.answer) or self._describe_nothing_learned()
        if verdict.answer == "undecided" and self.is_merged:
            conclusion = "Sums over all clients do not say whether collaborating helps"
        elif verdict.answer == "undecided" and verdict.interval is None:
            conclusion = f"{'1 client is' if n == 1 else f'{n} clients are'} too few to say whether collaborating helps"
        reasons = f": {'; '.join(verdict.reasons)}" if verdict.answer == "undecided" and verdict.reasons else ""
        mine, alone = (metric.format(one) for one in self._average_both(method))
        interval = f" (95% interval {format_interval(verdict.interval)})" if verdict.interval else ""
        by = "" if verdict.answer == "yes" else f", the best method by {self.choice.criterion},"
        gap = f": {format_gain(verdict.gain)} {metric.points}{interval}" if verdict.gain is not None else ""
        numbers = f"{method}{by} has {metric.label} {mine} against {alone} with {self.reference}, the best alone{gap}"
        losers = verdict.harm.summarize() if verdict.harm else "nobody's loss is known"
        losers = losers[0].upper() + losers[1:]
        text = f"{conclusion}{reasons}. {numbers}. {losers}."
        if method in self.diverged or method in self.failed:  # so did every method, and its numbers say nothing
            text = f"{conclusion}{reasons}."
        text += self._describe_others(verdict) + self._describe_unranked()
        details = (f"{method}: {verdict.harm.describe()}.",) if verdict.harm and verdict.harm.n_losing else ()
        return replace(verdict, text=text, details=details)

    def _describe_nothing_learned(self) -> str:
        constant = self.choice.find_best(self.constants)
        what = "the most frequent class" if self.metric.is_for_classes else "the mean"
        if self.kind == "labels":
            what = "the more frequent value of each label"
        return (
            f"Nothing was learned: no model is surely better than {what} of each client ({constant}); give more rows, "
            "other columns, or another --model"
        )

    def _describe_others(self, verdict: Verdict) -> str:
        """Describe the options beside staying alone and the method of the verdict."""
        text = ""
        for one in verdict.options:
            if one.gain is not None and one.name != verdict.method:
                interval = f", 95% interval {format_interval(one.interval)}" if one.interval else ""
                value = f"{self.metric.format(one.value)} ({format_gain(one.gain)}{interval})"
                text += f" Another option: {OPTIONS[one.kind]} {one.name}, {value}."
        return text

    def _describe_unranked(self) -> str:
        text = "".join(
            f" {name} diverged at {list_some(ids, MAX_NAMED)}: a smaller --lr or --tune may prevent it."
            for name, ids in self.diverged.items()
        )
        for name, n in self.failed.items():
            text += f" {name} failed in {n} of {n + len(self.groups[name])} runs, so it is not ranked."
        others = [name for name in self.untrained if name not in (*self.diverged, *self.failed)]
        return text + (f" Worse than a constant: {list_some(others, MAX_NAMED)}." if others else "")


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
