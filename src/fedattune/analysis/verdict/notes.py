"""Notes on a comparison: predictions that are hardly any, curves that still move, and unequal conditions."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.metrics import METRICS, MetricName
from ...core.text import format_percent
from ...data.federated import IMBALANCED_SHARE
from ..compare import BASELINE, FloatArray, get_default_metric, group_by_algorithm
from . import count_steps, find_excluded, join_reasons

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics
    from ..compare import Baseline

CONSTANT_SHARE = 0.99
"""Share of one class among the predictions above which they are called nearly constant."""
CONSTANT_SPREAD = 0.05
"""Deviation of predicted numbers, relative to the deviation of the true ones, below which they are called so."""
UNIT_RATIO = 10.0
"""Ratio of the target's deviations at two clients above which their errors differ in size."""
MIN_EVALUATIONS = 4
"""Evaluations below which a curve is too short to say that it moves."""
MOVING_SHARE = 0.02
"""Relative change of a validation RMSE above which a curve still moves."""
MOVING_POINTS = 0.005
"""Change of the mean validation metric over the last fifth of the rounds above which a curve still moves."""


def write_prediction_notes(results: "Sequence[RunMetrics]", metric: MetricName | None = None) -> list[str]:
    """Say which methods predict nearly one value, and which still move."""
    notes = _note_imbalance(results, metric) + _note_constant(results)
    metric = metric or get_default_metric(results)
    notes += _note_units(results, metric)
    return [*notes, *_note_moving(results)]


def _note_imbalance(results: "Sequence[RunMetrics]", metric: MetricName | None) -> list[str]:
    labels = results[0].facts.get("labels") if results else None
    if not labels or metric not in (None, "accuracy"):
        return []
    totals = np.array(labels).sum(axis=0)
    share = totals.max() / max(totals.sum(), 1)
    if share < IMBALANCED_SHARE:
        return []
    name = results[0].facts["classes"][int(totals.argmax())]
    return [
        f"{format_percent(share, 0)} of all rows are of class {name!r}, so "
        "accuracy says little; --metric auc or balanced_accuracy says more"
    ]


def _note_constant(results: "Sequence[RunMetrics]") -> list[str]:
    flat: dict[str, float] = {}
    frequent: dict[int, dict[str, tuple[float, float]]] = {}
    for name, runs in group_by_algorithm(results).items():
        predictions = runs[0].predictions.get("test")
        if predictions is None:
            continue
        if predictions.is_regression:
            with np.errstate(invalid="ignore", over="ignore"):  # outputs of a model that diverged
                spread = float(predictions.outputs.std()) / max(float(predictions.y.std()), 1e-12)
            if spread < CONSTANT_SPREAD:
                flat[name] = spread
            continue
        if predictions.kind != "class":
            continue
        counts = np.bincount(predictions.outputs.argmax(axis=1))
        top = int(counts.argmax())
        share, truth = counts[top] / counts.sum(), float(np.mean(predictions.y == top))
        if share >= CONSTANT_SHARE and share > truth + 0.005:
            frequent.setdefault(top, {})[name] = share, truth
    notes = []
    if flat:
        notes.append(
            f"{_write_predict(flat)} nearly the same number everywhere: the predictions spread "
            f"{'at most ' * (len(flat) > 1)}{100 * max(flat.values()):.1g}% as far as the target"
        )
    for top, found in frequent.items():
        (share, truth), name = min(found.values()), results[0].facts["classes"][top]
        least, who = ("at least ", "they hardly look") if len(found) > 1 else ("", "it hardly looks")
        notes.append(
            f"{_write_predict(found)} {name!r} for {least}{format_percent(share)} of the test rows, of which "
            f"{format_percent(truth)} are so: {who} at the rows"
        )
    return notes


def _write_predict(names: Collection[str]) -> str:
    return f"{', '.join(names)} {'predicts' if len(names) == 1 else 'predict'}"


def _note_units(results: "Sequence[RunMetrics]", metric: MetricName) -> list[str]:
    """Say that a mean of errors is the mean of few clients if the target varies far more at some than at others."""
    predictions = results[0].predictions.get("test") if results and METRICS[metric].has_unit else None
    if predictions is None:
        return []
    every = [predictions.y[predictions.rows(i)] for i in range(predictions.n_clients)]
    spreads = {i: float(np.std(y)) for i, y in enumerate(every) if len(y) > 1 and np.std(y) > 0}
    if not spreads or max(spreads.values()) < UNIT_RATIO * min(spreads.values()):
        return []
    low, high = min(spreads, key=spreads.__getitem__), max(spreads, key=spreads.__getitem__)
    names = [str(client["id"]) for client in results[0].facts["clients"]]
    return [
        f"the target varies {spreads[high] / spreads[low]:,.0f} times as far at client {names[high]} as at client "
        f"{names[low]}, so the mean {METRICS[metric].label} is that of few clients; --metric r2 counts all alike, and "
        "clients with different units should have a common one"
    ]


def _note_moving(results: "Sequence[RunMetrics]") -> list[str]:
    notes = []
    for name, runs in group_by_algorithm(results).items():
        changes = [change for run in runs if (change := _measure_drift(run)) is not None]
        if not changes:
            continue
        drift, is_error = float(np.mean(changes)), runs[0].is_regression
        if abs(drift) < (MOVING_SHARE if is_error else MOVING_POINTS):
            continue
        label, unit = ("RMSE", "%") if is_error else ("accuracy", " points")
        is_better = (drift > 0) != is_error
        way = f"{'still ' * is_better}{'rises' if drift > 0 else 'falls'}"
        advice = "more rounds may be better" if is_better else "fewer rounds are enough"
        n = min(sum(bool(e.get("validation")) for e in run.history) for run in runs)
        over = "over the last fifth of the rounds" if n >= 10 else "from the evaluation before to the last one"
        notes.append(f"{name}: validation {label} {way}: {advice} ({100 * drift:+.1f}{unit} {over})")
    return notes


def _measure_drift(run: "RunMetrics") -> float | None:
    """Return the change of the mean validation curve from the fifth before the last one to the last fifth."""
    scored = [e["validation"] for e in run.history if e.get("validation")]
    # Under secure aggregation, an evaluation may have no point that all clients share.
    points = [one[run.evaluation_point] for one in scored if run.evaluation_point in one]
    curve = [run.read_curve(e) if run.is_regression else e["acc_uniform"] for e in points]
    n = len(curve) // 5
    if len(curve) < MIN_EVALUATIONS or not np.isfinite(curve).all():
        return None
    if n < 2:  # two evaluations cannot show a drift; three in one direction can
        steps = np.diff(curve[-3:])
        size = float(curve[-2]) if run.is_regression else 1.0
        return float(steps[-1]) / size if (steps > 0).all() or (steps < 0).all() else 0.0
    last, before = np.array(curve[-n:]), np.array(curve[-2 * n : -n])
    size = float(before.mean()) if run.is_regression else 1.0
    drift = float(last.mean() - before.mean()) / size
    noise = float(np.sqrt((last.var() + before.var()) / n)) / size
    return drift if abs(drift) > 3 * noise else 0.0


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
        both = f"{name} (seeds {_join_seeds(seeds[name])}) and {BASELINE} (seeds {_join_seeds(seeds[BASELINE])})"
        if not common:
            notes[name] = f"{both} have no seed in common: a part of what seems to be a gain may come from other seeds"
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
        settings, n = results[0].settings, results[0].n_clients
        reasons = []
        if settings.participation.cohort_size(n) < n:
            reasons.append("some train only the clients asked in a round (--train all or --train cohort: all alike)")
        if settings.training.epochs:
            reasons.append("with --epochs, a step of several batches is counted once")
        why = f": {'; '.join(reasons)}" if reasons else ""
        notes.append(f"the methods did different numbers of local steps per client ({_group_names(counts)}){why}")
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
        points = [(run.settings.seed, e["round"], e[run.evaluation_point]) for run in runs for e in run.history]
        losses = np.array([(seed, round_, point["loss_uniform"]) for seed, round_, point in points if point])
        if not len(losses):  # a run that has just begun
            continue
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
    notes = [f"{', '.join(dict.fromkeys(names))}: {note}" if names else note for note, names in methods_of.items()]
    notes += [note for baseline in baselines for note in baseline.notes]
    return [*notes, *write_prediction_notes(results, metric), *write_fairness_notes(results)]


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


MAX_SHOWN_NOTES = 3
"""Notes on the terminal; the report has all."""
URGENT_WORDS = (
    ("diverged", "failed with seed"),
    ("predicted far worse than randomly chosen ones",),
    ("for lack of time",),
    ("predicts the target nearly", "is it known before"),
    ("may be too good", "stay in one part"),
    ("--normalize-names", "only in case"),
    ("hardly look", "nearly the same number"),
    ("so accuracy says little", "target varies"),
    ("left out", "dropped"),
)
"""Words of the notes that matter most, the most urgent ones first."""
ROUTINE_WORDS = (
    " names ", "The target is a number", "are standardised", "weight decay", "local steps per client",
    "became categories", "are a category", "Missing numbers", "The categories of all rows",
)  # fmt: skip
"""Words of the notes that every comparison of its kind has: the report alone shows them."""


def select_notes(notes: Sequence[str], limit: int = MAX_SHOWN_NOTES) -> tuple[list[str], list[str]]:
    """Select the notes for the terminal, the most urgent first, and those that the report alone shows."""

    def rank(note: str) -> int:
        ranks = (i for i, words in enumerate(URGENT_WORDS) if any(word in note for word in words))
        return next(ranks, len(URGENT_WORDS) + any(word in note for word in ROUTINE_WORDS))

    ordered = sorted(notes, key=rank)
    n_shown = min(limit, sum(rank(note) <= len(URGENT_WORDS) for note in notes))
    return ordered[:n_shown], ordered[n_shown:]
