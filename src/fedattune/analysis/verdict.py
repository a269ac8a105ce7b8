"""The verdict on a comparison: whether to collaborate, with which method, and who loses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .compare import BASELINE, FloatArray, compute_client_accuracy, compute_gap, group_by_algorithm, pair_runs

if TYPE_CHECKING:
    from ..training.metrics import RunMetrics
    from ..training.result import Result

N_RESAMPLES = 10_000


MAX_LISTED_METHODS = 5  # names above which they are not listed


MIN_CLIENTS = 5  # clients below which resampling them says nothing


def bootstrap_interval(gains: FloatArray) -> tuple[float, float]:
    """95% bootstrap interval of the mean gain over clients; always the same for the same gains."""
    generator = np.random.default_rng(0)
    chunk = max(1, 1_000_000 // len(gains))  # bounds memory for many clients
    resamples = N_RESAMPLES if len(gains) <= 1000 else N_RESAMPLES // 5
    means: list[float] = []
    while len(means) < resamples:
        picks = generator.integers(len(gains), size=(min(chunk, resamples - len(means)), len(gains)))
        means += gains[picks].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Verdict:
    """Whether collaborating helps: in one sentence, and in numbers.

    Attributes:
        text: the sentence.
        answer: yes, no, unclear, or nothing, where nothing can be compared.
        method: the method that it is about.
        gains: of each client over training alone (N,), in points.
        interval: 95% interval of their mean over clients, where these are enough.
        by_seed: the mean gain of each seed, in points.

    """

    text: str
    answer: Literal["yes", "no", "unclear", "nothing"] = "nothing"
    method: str | None = None
    gains: FloatArray | None = None
    interval: tuple[float, float] | None = None
    by_seed: tuple[float, ...] = ()


def reach_verdict(results: Sequence["RunMetrics"]) -> Verdict:
    """Whether collaborating helps here, with which method, and how many clients would lose."""
    groups = group_by_algorithm(results)
    if BASELINE not in groups or len(groups) == 1:
        missing = (
            f"give at least one method beside {BASELINE}"
            if BASELINE in groups
            else f"there is no run of {BASELINE}, training alone, with which the others are compared"
        )
        return Verdict(f"Nothing to compare: {missing}.")
    out = find_excluded(results)
    others = [name for name in groups if name != BASELINE and name not in out]
    if not others:
        why = "; ".join(f"{name} {why}" for name, why in out.items())
        return Verdict(f"Nothing can be compared fairly: {why}.")
    validated = all(run.validation is not None for run in results)
    score: Callable[[str], float] = (
        (lambda name: float(np.mean([run.validation or 0.0 for run in groups[name]])))
        if validated
        else (lambda name: float(compute_client_accuracy(groups[name]).mean()))
    )
    how = "by validation accuracy" if validated else "by test accuracy, there being no validation data"
    method = max(others, key=score)
    mine, local = pair_runs(groups, method)
    alone, chosen = compute_client_accuracy(local), compute_client_accuracy(mine)
    gains = 100 * compute_gap(chosen, alone)
    low, high = bootstrap_interval(gains)
    few = len(gains) < MIN_CLIENTS
    spread = "" if few else f"; 95% interval of the gain over clients {low:+.2f} to {high:+.2f}"
    numbers = (
        f"{abs(gains.mean()):.2f} points {'above' if gains.mean() >= 0 else 'below'} training alone "
        f"on test data ({100 * chosen.mean():.2f}% against {100 * alone.mean():.2f}%{spread})"
    )
    losers = _describe_losers(gains, [client.id for client in groups[BASELINE][0].clients])
    # A tie goes to local: it needs no collaboration.
    local_best, tied = score(BASELINE) >= score(method), score(BASELINE) == score(method)
    answer: Literal["yes", "no", "unclear"] = "unclear"
    if few:
        conclusion = f"{len(gains)} clients are too few to say whether collaborating helps"
    elif high < 0:
        answer, conclusion = "no", "Collaborating does not help here"
    elif local_best or low <= 0:
        conclusion = "No clear gain from collaborating is shown here"
    else:
        answer, conclusion = "yes", "Collaborating helps here"
    if answer == "yes":
        text = f"{conclusion}: use {method} (chosen {how}), which is {numbers}; {losers}."
    elif tied:
        text = f"{conclusion}: local and {method} are equally good {how}; {method} is {numbers}; {losers}."
    elif local_best:
        text = (
            f"{conclusion}: local is the best method {how}; the next one, {method}, is {numbers}; {losers}."
        )
    else:
        text = f"{conclusion}: {method}, the best method {how}, is {numbers}; {losers}."
    by_seed = _gain_by_seed(mine, local)
    return Verdict(text, answer, method, gains, None if few else (low, high), by_seed)


def _gain_by_seed(runs: Sequence["RunMetrics"], alone: Sequence["RunMetrics"]) -> tuple[float, ...]:
    """The mean gain of every seed that both were run with, in points."""
    of = {run.settings.seed: run for run in alone}
    pairs = [(run, of[run.settings.seed]) for run in runs if run.settings.seed in of]
    return tuple(
        100 * float(compute_gap(compute_client_accuracy([a]), compute_client_accuracy([b])).mean())
        for a, b in pairs
    )


def describe_seed_differences(results: Sequence["RunMetrics"]) -> dict[str, str]:
    """Methods that were not run with the seeds of `local`, and what to say, so that chance is not taken for a gain."""
    groups = group_by_algorithm(results)
    if BASELINE not in groups:
        return {}
    seeds = {name: {run.settings.seed for run in runs} for name, runs in groups.items()}
    said = {}
    for name in groups:
        both = seeds[name] & seeds[BASELINE]
        if not both:
            said[name] = (
                f"{name} (seeds {_join_seeds(seeds[name])}) and "
                f"{BASELINE} (seeds {_join_seeds(seeds[BASELINE])}) have no seed in "
                "common: a part of what seems to be a gain is that of other seeds"
            )
        elif seeds[name] != seeds[BASELINE]:
            said[name] = (
                f"{name} (seeds {_join_seeds(seeds[name])}) and "
                f"{BASELINE} (seeds {_join_seeds(seeds[BASELINE])}) are compared over "
                f"seeds {_join_seeds(both)} alone, which both were run with"
            )
    return said


def _join_seeds(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def find_excluded(results: Sequence["RunMetrics"]) -> dict[str, str]:
    """Methods that cannot show whether collaborating helps, and why: they shared nothing, or trained for longer."""
    groups = group_by_algorithm(results)
    steps = {name: float(np.mean([run.local_steps for run in runs])) for name, runs in groups.items()}
    out = {}
    for name, runs in groups.items():
        if name == BASELINE or BASELINE not in groups:
            continue
        if not any(run.bytes_up for run in runs):
            out[name] = "shared nothing"
        elif steps[name] > 1.05 * steps[BASELINE]:
            out[name] = (
                f"did {steps[name]:,.0f} local steps per client where local did {steps[BASELINE]:,.0f}"
            )
    return out


def _describe_losers(gains: FloatArray, ids: Sequence[str]) -> str:
    """How many clients would lose, and which one most."""
    count = int((gains < 0).sum())
    if count == 0:
        return f"none of the {len(gains)} clients would lose"
    worst = int(gains.argmin())
    most = f"{'client ' if count == 1 else 'most of all client '}{ids[worst]} with {gains[worst]:.2f} points"
    return f"{count} of {len(gains)} clients would lose, {most}"


def write_fairness_notes(results: Sequence["RunMetrics"]) -> list[str]:
    """What to say where the methods were not given the same, so that a gap is not misread."""
    notes = []
    groups = group_by_algorithm(results)
    if out := find_excluded(results):
        said = "; ".join(f"{name} {why}" for name, why in out.items())
        notes.append(f"left out of the conclusion on collaborating: {said}")
    notes += describe_seed_differences(results).values()
    steps = {name: float(np.mean([run.local_steps for run in runs])) for name, runs in groups.items()}
    counts = {name: f"{count:,.0f}" for name, count in steps.items()}
    apart = max(steps.values()) - min(steps.values()) > 0.005 * max(steps.values())
    if apart and len(set(counts.values())) > 1:
        said = _group_names(counts)
        settings = results[0].settings
        reasons = []
        if settings.cohort_size(results[0].n_clients) < results[0].n_clients:
            reasons.append(
                "some train only the clients asked in a round (--train all or --train cohort: all alike)"
            )
        if settings.epochs:
            reasons.append("with --epochs, a step of several batches is counted once")
        why = f": {'; '.join(reasons)}" if reasons else ""
        notes.append(f"the methods did different numbers of local steps per client ({said}){why}")
    decay = {name: f"{runs[0].facts['weight_decay']:g}" for name, runs in groups.items()}
    if len(set(decay.values())) > 1:
        notes.append(
            f"the methods' weight decay differs ({_group_names(decay)}); --weight-decay gives all methods the same"
        )
    return notes


def _group_names(values: dict[str, str]) -> str:
    """Names that share a value together: `local, fedavg: 20; pfedme: 40`; of many names, the most as `the others`."""
    shared: dict[str, list[str]] = {}
    for name, value in values.items():
        shared.setdefault(value, []).append(name)
    most = max(shared, key=lambda value: len(shared[value]))
    if len(shared[most]) > MAX_LISTED_METHODS:
        shared = {value: names for value, names in shared.items() if value != most} | {most: ["the others"]}
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in shared.items())


def merge_notes(results: "Sequence[Result]") -> list[str]:
    """What is to be known about the methods that finished; what several have to say is said once, of all of them."""
    # DROPPED IMPORT

    said: dict[str, list[str]] = {}  # sentence -> methods that say it of themselves, or none
    for result in results:
        name = f"{result.algorithm}: "
        for note in result.notes:
            sentence = note.removeprefix(name)
            said.setdefault(sentence, []).extend([result.algorithm] * (sentence != note))
    notes = [
        f"{', '.join(dict.fromkeys(names))}: {sentence}" if names else sentence
        for sentence, names in said.items()
    ]
    return [*notes, *(write_fairness_notes(results) if results else ())]


def choose_method(results: Sequence["RunMetrics"]) -> tuple[str, str]:
    """The method to use, and why: the verdict's, or where that is unclear the best one, training alone included."""
    from .compare import BASELINE, compute_client_accuracy, group_by_algorithm
    # DROPPED IMPORT

    found = reach_verdict(results)
    if found.answer == "yes" and found.method:
        return found.method, "the verdict's method"
    if found.answer == "no":
        return BASELINE, "the verdict is that collaborating does not help here"
    out, groups = find_excluded(results), group_by_algorithm(results)
    among = {name: runs for name, runs in groups.items() if name not in out}
    validated = all(run.validation is not None for run in results)

    def score(name: str) -> float:
        if validated:
            return sum(run.validation or 0.0 for run in among[name]) / len(among[name])
        return float(compute_client_accuracy(among[name]).mean())

    # Of equally good methods the first is taken, and training alone is the first.
    how = "validation accuracy" if validated else "test accuracy, there being no validation data"
    return max(among, key=score), f"the best one by {how}"
