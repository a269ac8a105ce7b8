"""The words of a report: answer, warnings, newcomers and configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....core.metrics import METRICS, format_number
from ....runs.metrics import NewcomerResult, RunMetrics
from ...compare import (
    BASELINE,
    Contestant,
    average_clients,
    compute_gains_over_local,
    group_by_algorithm,
    pair_runs,
)
from ...load import Runs
from ...verdict.choice import find_excluded
from ...verdict.notes import describe_seed_differences
from ..tables import format_points

ANSWERS = {
    "yes": "Yes: federate.",
    "no": "No: do not federate here.",
    "undecided": "Undecided: no clear gain from federating is shown.",
    "nothing": "Nothing to compare.",
}
LIVE_ANSWERS = {
    "yes": "So far it pays to federate.",
    "no": "So far it does not pay to federate.",
    "undecided": "So far no clear gain from federating.",
    "nothing": "Nothing to compare.",
}


def build_answer(runs: Runs) -> dict[str, Any]:
    """Build the verdict in words and numbers, for a reader of nothing else."""
    verdict = runs.verdict
    metric = METRICS[verdict.metric]

    def signed(value: float) -> str:
        return format_number(value, 3, "+")

    facts: list[tuple[str, str, str]] = []
    if verdict.gains is not None and verdict.method:
        known = verdict.gains[np.isfinite(verdict.gains)]
        over_clients = ""
        if verdict.interval:
            low, high = verdict.interval
            over_clients = f"95% over {verdict.interval_over}: {signed(low)} to {signed(high)}"
        runs_text = ", ".join(map(signed, verdict.by_run))
        over_runs = ("one seed and split" if verdict.by_run else "no common seed", "spread is not known")
        if len(verdict.by_run) > 1:
            over_runs = (f"±{np.std(verdict.by_run):.3g}", f"mean gain of each: {runs_text}")
        better, worse = int((known > 0).sum()), int((known < 0).sum())
        same = len(known) - better - worse
        groups: dict[str, Sequence[Contestant]] = {
            **group_by_algorithm(runs.results),
            **group_by_algorithm(runs.baselines),
        }
        pairs = pair_runs(groups[verdict.method], groups[verdict.reference])
        is_known = np.isfinite(verdict.gains)  # both means are of the same clients
        best, alone = (
            metric.format(
                float(average_clients([pair[k] for pair in pairs], verdict.metric)[is_known].mean())
            )
            if pairs
            else "-"
            for k in (0, 1)
        )
        facts = [
            (
                f"Mean gain over {verdict.reference}{'' if metric.is_higher_better else ' (lower is a gain)'}",
                f"{signed(float(known.mean()))} {metric.points}",
                f"{verdict.method}; {over_clients}",
            ),
            ("Over seeds and splits", *over_runs),
            ("Clients that gain / lose", f"{better} / {worse}", f"{same} neither" if same else "all others"),
            (f"Mean {metric.label}", best, f"{verdict.reference}: {alone}"),
        ]
    short = (ANSWERS if runs.is_finished else LIVE_ANSWERS)[verdict.answer]
    return {"answer": verdict.answer, "short": short, "text": verdict.text, "facts": facts}


def list_warnings(runs: Runs) -> list[str]:
    """List warnings: failed and unfinished runs, clients harmed, divergence, uploads lost, unfair comparisons."""
    warnings = [f"{failure}." for failure in runs.failed]
    unfinished = [run for run in runs.results if not run.is_finished]
    if unfinished or runs.waiting:
        parts = [f"{run.algorithm} (round {run.rounds} of {run.config['rounds']})" for run in unfinished]
        parts += [f"{folder.parent.name}, {folder.name} (no round yet)" for folder in runs.waiting]
        warnings.append(f"Not finished: {'; '.join(parts)}. All numbers may still change.")
        if len({run.rounds for run in runs.results}) > 1:
            warnings.append("Runs are at different rounds. Later rounds have an advantage that may not last.")
    warnings += _describe_harm(runs)
    for name, group in group_by_algorithm(runs.results).items():
        records = [record for run in group for record in run.store.rounds()]
        diverged = sum(len(record.diverged) for record in records)
        lost = sum(len(record.absent) for record in records)
        faults = sum(len(run.store.faults()) for run in group)
        if diverged:
            warnings.append(
                f"{name}: training diverged {diverged:,} times (a client in a round); nothing of it was used."
            )
        if lost:
            refused = f", {faults:,} of them with a recorded reason" if faults else ""
            warnings.append(
                f"{name}: {lost:,} uploads were lost (the clients did not answer, or the server refused{refused})."
            )
        if name == runs.verdict.method and len({(run.seed, run.split) for run in group}) == 1:
            warnings.append(
                "There is one seed and one split: the interval says nothing of chance in training and in the division "
                "of rows into training and test. Give --splits 5."
            )
    warnings += [f"{note}." for note in describe_seed_differences(runs.results).values()]
    excluded = find_excluded(group_by_algorithm(runs.results))
    return warnings + [f"{name} is left out of the verdict: it {why}." for name, why in excluded.items()]


def _describe_harm(runs: Runs) -> list[str]:
    """Describe the clients that are worse than alone, with the verdict's method and with the others."""
    groups, verdict = group_by_algorithm(runs.results), runs.verdict
    gains = {
        name: compute_gains_over_local(groups, name, verdict.metric) for name in groups if name != BASELINE
    }
    counts = {method: int((gain < 0).sum()) for method, gain in gains.items() if gain is not None}
    text, name = [], verdict.method
    if verdict.harm and verdict.harm.n_losing:
        text.append(f"{name}: {verdict.harm.describe()}.")
    others = [f"{method} {count}" for method, count in counts.items() if count and method != name]
    if others:
        text.append(
            f"Clients that are worse than with {BASELINE}{', with other methods' if text else ''}: {', '.join(others)}."
        )
    return text


def summarize_newcomers(results: Sequence[RunMetrics]) -> list[dict[str, Any]]:
    """Summarise each client that joined after training: its accuracies with each method, over the seeds."""
    entries: dict[str, dict[str, Any]] = {}
    for name, runs in group_by_algorithm(results).items():
        by_id: dict[str, list[NewcomerResult]] = {}
        for newcomer in (newcomer for run in runs for newcomer in run.newcomers):
            by_id.setdefault(newcomer.id, []).append(newcomer)
        for id_, same in by_id.items():
            sizes = {"id": id_, "n_train": same[0].n_train, "n_test": same[0].n_test, "methods": []}
            points = ("received", "trained", "local")
            means = {point: float(np.mean([getattr(one, point) for one in same])) for point in points}
            curve = runs[0].curve_metric
            words = {
                point: format_points(value, 1) if curve.is_percent else curve.format(value)
                for point, value in means.items()
            }
            entries.setdefault(id_, sizes)["methods"].append({"name": name, **words})
    return list(entries.values())


def describe_configuration(results: Sequence[RunMetrics]) -> dict[str, dict[str, str]]:
    """Describe the settings that all runs share, and the settings of each method besides."""
    configs = {name: runs[0].config for name, runs in group_by_algorithm(results).items()}
    hidden = {"algorithm", "definition", "split", "seed"}
    keys = [key for key in next(iter(configs.values())) if key not in hidden]
    common = {key for key in keys if len({str(config.get(key)) for config in configs.values()}) == 1}
    common -= {"options"}

    def describe(config: Mapping[str, Any], config_keys: Sequence[str]) -> dict[str, str]:
        return {key: _format_setting(config[key]) for key in config_keys if config.get(key) not in ({}, None)}

    shared = describe(next(iter(configs.values())), [key for key in keys if key in common])
    shared["seeds"] = ", ".join(map(str, sorted({run.settings.seed for run in results})))
    own = [key for key in keys if key not in common]
    return {
        "all": shared,
        **{
            name: describe(config, own) | {"as": str(config["definition"])}
            for name, config in configs.items()
        },
    }


def _format_setting(value: Any) -> str:
    """Format a setting without braces, quotes, and settings that are not set."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(
        f"{key}: ({_format_setting(one)})" if isinstance(one, dict) else f"{key}: {one}"
        for key, one in value.items()
        if one not in ({}, None)
    )
