"""Sentences on a comparison that keep its numbers from being misread: what the methods were not given alike."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.metrics import MetricName
from ..compare import BASELINE, FloatArray, group_by_algorithm
from .choice import count_steps, find_excluded
from .predicted import write_prediction_notes
from .verdict import join_reasons

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics
    from .baseline import Baseline

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
