"""The verdict on a comparison: whether to collaborate, with which method, and who loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from .compare import BASELINE, FloatArray, compute_client_accuracy, compute_gap, group_by_algorithm, pair_runs

if TYPE_CHECKING:
    from ..training.metrics import RunMetrics

N_RESAMPLES = 10_000
MAX_LISTED_METHODS = 5
"""Methods with the same value that a note lists by name."""
MIN_CLIENTS = 5
"""Clients below which resampling them says nothing."""
EQUAL_LOSSES = 1e-5
"""Relative difference of two losses that rounding alone explains."""
MAX_STEPS_RATIO = 1.05
"""Local steps of a method per local step of `local`; the comparison is not fair above this ratio."""


@dataclass(frozen=True)
class Verdict:
    """The answer to the question of whether collaborating helps, in one sentence and in numbers.

    Attributes:
        text: the sentence.
        answer: yes, no, unclear, or nothing if there is nothing to compare.
        method: the method that the verdict is about.
        gains: of each client over training alone (N,), in points.
        interval: 95% bootstrap interval of the mean gain over clients; None if there are too few clients.
        by_seed: the mean gain of each seed, in points.

    """

    text: str
    answer: Literal["yes", "no", "unclear", "nothing"] = "nothing"
    method: str | None = None
    gains: FloatArray | None = None
    interval: tuple[float, float] | None = None
    by_seed: tuple[float, ...] = ()


def reach_verdict(
    results: Sequence["RunMetrics"], *, has_failures: bool = False, is_final: bool = True
) -> Verdict:
    """Decide whether collaborating helps, with which method, and how many clients would lose.

    Args:
        results: runs on the same clients.
        has_failures: other runs of the comparison failed.
        is_final: all runs have finished; otherwise the sentence says that it may change.

    """
    groups = group_by_algorithm(results)
    if missing := _find_missing(set(groups), has_failures):
        return Verdict(f"Nothing to compare: {missing}.")
    excluded = find_excluded(results)
    if len(excluded) == len(groups) - 1:
        return Verdict(f"Nothing can be compared fairly: {_join_reasons(excluded)}.")
    scores, criterion = _score_methods(groups)
    method = max(
        (name for name in groups if name != BASELINE and name not in excluded), key=scores.__getitem__
    )
    verdict = _compare_with_baseline(groups, method, scores, f"by {criterion}")
    return verdict if is_final else replace(verdict, text=f"As it stands now: {verdict.text}")


def choose_method(results: Sequence["RunMetrics"]) -> tuple[str, str]:
    """Choose the method to use, `local` included, and give the reason."""
    verdict = reach_verdict(results)
    if verdict.answer == "yes" and verdict.method:
        return verdict.method, "the verdict's method"
    if verdict.answer == "no":
        return BASELINE, "the verdict is that collaborating does not help here"
    excluded = find_excluded(results)
    scores, criterion = _score_methods(group_by_algorithm(results))
    # Of equally good methods the first is taken, and training alone is the first.
    best = max((name for name in scores if name not in excluded), key=scores.__getitem__)
    return best, f"the best one by {criterion}"


def find_excluded(results: Sequence["RunMetrics"]) -> dict[str, str]:
    """Find the methods that cannot show whether collaborating helps, and the reason of each.

    A method is excluded if it shared nothing, or trained for longer than `local`.
    """
    groups = group_by_algorithm(results)
    steps = _count_steps(groups)
    excluded = {}
    for name, runs in groups.items():
        if name == BASELINE or BASELINE not in groups:
            continue
        if not any(run.bytes_up for run in runs):
            excluded[name] = "shared nothing"
        elif steps[name] > MAX_STEPS_RATIO * steps[BASELINE]:
            excluded[name] = (
                f"did {steps[name]:,.0f} local steps per client where local did {steps[BASELINE]:,.0f}"
            )
    return excluded


def bootstrap_interval(gains: FloatArray) -> tuple[float, float]:
    """Compute the 95% bootstrap interval of the mean over clients; the same gains (N,) give the same interval."""
    generator = np.random.default_rng(0)
    chunk = max(1, 1_000_000 // len(gains))  # bounds memory for many clients
    resamples = N_RESAMPLES if len(gains) <= 1000 else N_RESAMPLES // 5
    means: list[float] = []
    while len(means) < resamples:
        picks = generator.integers(len(gains), size=(min(chunk, resamples - len(means)), len(gains)))
        means += gains[picks].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


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
    if excluded := find_excluded(results):
        notes.append(f"left out of the conclusion on collaborating: {_join_reasons(excluded)}")
    notes += describe_seed_differences(results).values()
    notes += [
        f"{', '.join(names)}: the same loss at every evaluation, so they are one method under these settings"
        for names in find_equal_methods(groups)
    ]
    steps = _count_steps(groups)
    counts = {name: f"{count:,.0f}" for name, count in steps.items()}
    apart = max(steps.values()) - min(steps.values()) > 0.005 * max(steps.values())
    if apart and len(set(counts.values())) > 1:
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
                (run.settings.seed, e["round"], e[run.headline]["loss_uniform"])
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


def merge_notes(results: Sequence["RunMetrics"]) -> list[str]:
    """Collect the notes of all runs, each once, with the methods that it is about; then the fairness notes."""
    methods_of: dict[str, list[str]] = {}  # note -> its methods; none if it is about all
    for result in results:
        name = f"{result.algorithm}: "
        for note in result.notes:
            text = note.removeprefix(name)
            methods_of.setdefault(text, []).extend([result.algorithm] * (text != note))
    notes = [
        f"{', '.join(dict.fromkeys(names))}: {note}" if names else note for note, names in methods_of.items()
    ]
    return [*notes, *write_fairness_notes(results)]


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


def _score_methods(groups: Mapping[str, Sequence["RunMetrics"]]) -> tuple[dict[str, float], str]:
    """Score each method by validation accuracy, or by test accuracy if a run has no validation data."""
    if all(run.validation is not None for runs in groups.values() for run in runs):
        scores = {
            name: float(np.mean([run.validation or 0.0 for run in runs])) for name, runs in groups.items()
        }
        return scores, "validation accuracy"
    scores = {name: float(compute_client_accuracy(runs).mean()) for name, runs in groups.items()}
    return scores, "test accuracy, there being no validation data"


def _compare_with_baseline(
    groups: Mapping[str, list["RunMetrics"]], method: str, scores: Mapping[str, float], how: str
) -> Verdict:
    """Compare the best method with `local`, and say in one sentence what follows."""
    mine, local = pair_runs(groups, method)
    local_accuracy, method_accuracy = compute_client_accuracy(local), compute_client_accuracy(mine)
    gains = 100 * compute_gap(method_accuracy, local_accuracy)
    low, high = bootstrap_interval(gains)
    is_few = len(gains) < MIN_CLIENTS
    interval = "" if is_few else f"; 95% interval of the gain over clients {low:+.2f} to {high:+.2f}"
    numbers = (
        f"{abs(gains.mean()):.2f} points {'above' if gains.mean() >= 0 else 'below'} training alone "
        f"on test data ({100 * method_accuracy.mean():.2f}% against {100 * local_accuracy.mean():.2f}%{interval})"
    )
    losers = _describe_losers(gains, [client.id for client in groups[BASELINE][0].clients])
    # A tie goes to local: it needs no collaboration.
    is_local_best, is_tied = scores[BASELINE] >= scores[method], scores[BASELINE] == scores[method]
    answer: Literal["yes", "no", "unclear"] = "unclear"
    if is_few:
        conclusion = f"{len(gains)} clients are too few to say whether collaborating helps"
    elif high < 0:
        answer, conclusion = "no", "Collaborating does not help here"
    elif is_local_best or low <= 0:
        conclusion = "No clear gain from collaborating is shown here"
    else:
        answer, conclusion = "yes", "Collaborating helps here"
    if answer == "yes":
        reason = f"use {method} (chosen {how}), which is {numbers}"
    elif is_tied:
        reason = f"local and {method} are equally good {how}; {method} is {numbers}"
    elif is_local_best:
        reason = f"local is the best method {how}; the next one, {method}, is {numbers}"
    else:
        reason = f"{method}, the best method {how}, is {numbers}"
    by_seed = _gain_by_seed(mine, local)
    return Verdict(
        f"{conclusion}: {reason}; {losers}.", answer, method, gains, None if is_few else (low, high), by_seed
    )


def _gain_by_seed(runs: Sequence["RunMetrics"], alone: Sequence["RunMetrics"]) -> tuple[float, ...]:
    """Compute the mean gain of every common seed, in points."""
    local_of = {run.settings.seed: run for run in alone}
    pairs = [(run, local_of[run.settings.seed]) for run in runs if run.settings.seed in local_of]
    return tuple(
        100 * float(compute_gap(compute_client_accuracy([a]), compute_client_accuracy([b])).mean())
        for a, b in pairs
    )


def _describe_losers(gains: FloatArray, ids: Sequence[str]) -> str:
    """Say how many clients would lose, and which one loses most."""
    count = int((gains < 0).sum())
    if count == 0:
        return f"none of the {len(gains)} clients would lose"
    worst = int(gains.argmin())
    most = f"{'client ' if count == 1 else 'most of all client '}{ids[worst]} with {gains[worst]:.2f} points"
    return f"{count} of {len(gains)} clients would lose, {most}"


def _count_steps(groups: Mapping[str, Sequence["RunMetrics"]]) -> dict[str, float]:
    """Count the local steps per client of each method."""
    return {name: float(np.mean([run.local_steps for run in runs])) for name, runs in groups.items()}


def _join_seeds(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _join_reasons(excluded: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in excluded.items())


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
