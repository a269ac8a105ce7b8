"""What a report says in words: verdict, warnings, configuration."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...training.metrics import RunMetrics
from ..compare import BASELINE, compute_client_accuracy, compute_gains, group_by_algorithm, pair_runs
from ..load import Runs
from ..verdict import Verdict, describe_seed_differences, find_excluded


def list_warnings(runs: Runs, found: Verdict) -> list[str]:
    """What a reader must not miss: clients harmed, uploads lost, divergence, runs that are not finished."""
    groups = group_by_algorithm(runs.results)
    said = [f"{one}." for one in runs.failed]
    unfinished = [run for run in runs.results if not run.finished]
    if unfinished or runs.waiting:
        parts = [f"{run.algorithm} (round {run.rounds} of {run.config['rounds']})" for run in unfinished]
        parts += [f"{folder.parent.name}, {folder.name} (no round yet)" for folder in runs.waiting]
        said.append(f"Not finished: {'; '.join(parts)}. All numbers may still change.")
        if len({run.rounds for run in runs.results}) > 1:
            said.append(
                "Runs are at different rounds: those that are further have an advantage that may not last."
            )
    said += _describe_harm(runs, found)
    for name, of_one in groups.items():
        records = [record for run in of_one for record in run.store.rounds()]
        diverged = sum(len(record.dropped) for record in records)
        lost = sum(len(record.absent) for record in records)
        faults = sum(len(run.store.faults()) for run in of_one)
        if diverged:
            said.append(
                f"{name}: training diverged {diverged:,} times (a client in a round); nothing of it was used."
            )
        if lost:
            refused = f", {faults:,} of them with a recorded reason" if faults else ""
            said.append(
                f"{name}: {lost:,} uploads were lost (clients that were asked and did not answer{refused})."
            )
        if len({run.settings.seed for run in of_one}) == 1 and name == found.method:
            said.append(
                "There is one seed: the interval is over clients alone, and says nothing of chance in training. "
                "Give --seeds 3."
            )
    said += [f"{one}." for one in describe_seed_differences(runs.results).values()]
    said += [
        f"{name} is left out of the verdict: it {why}." for name, why in find_excluded(runs.results).items()
    ]
    return said


def summarise_newcomers(results: Sequence[RunMetrics]) -> list[dict[str, Any]]:
    """Per client that joined after training and per method: its accuracies, averaged over the seeds."""
    found: dict[str, dict[str, Any]] = {}
    for name, runs in group_by_algorithm(results).items():
        joined = [newcomer for run in runs for newcomer in run.newcomers]
        for id_ in dict.fromkeys(newcomer.id for newcomer in joined):
            mine = [newcomer for newcomer in joined if newcomer.id == id_]
            ways = ("received", "trained", "local")
            means = {way: float(np.mean([getattr(one, way) for one in mine])) for way in ways}
            sizes = {"id": id_, "n_train": mine[0].n_train, "n_test": mine[0].n_test, "methods": []}
            entry = found.setdefault(id_, sizes)
            entry["methods"].append({"name": name, **means})
    return list(found.values())


def describe_configuration(results: Sequence[RunMetrics]) -> dict[str, dict[str, str]]:
    """What all runs were asked to do, and what each method was asked beside."""
    hidden = {"algorithm", "definition", "split", "seed"}
    configs = {name: runs[0].config for name, runs in group_by_algorithm(results).items()}
    keys = [key for key in next(iter(configs.values())) if key not in hidden]
    same = {key for key in keys if len({str(config.get(key)) for config in configs.values()}) == 1} - {
        "options"
    }
    first = next(iter(configs.values()))
    said = {
        "all": {
            key: _format_setting(first[key]) for key in keys if key in same and first[key] not in ({}, None)
        }
    }
    said["all"]["seeds"] = ", ".join(map(str, sorted({run.settings.seed for run in results})))
    for name, config in configs.items():
        own = {
            key: _format_setting(config.get(key))
            for key in keys
            if key not in same and config.get(key) not in ({}, None)
        }
        said[name] = own | {"as": str(config["definition"])}
    return said


def _format_setting(value: Any) -> str:
    """A setting as a reader would write it: what is not set, and braces and quotes, say nothing."""
    if not isinstance(value, dict):
        return str(value)
    parts = {key: one for key, one in value.items() if one not in ({}, None)}
    return ", ".join(
        f"{key}: ({_format_setting(one)})" if isinstance(one, dict) else f"{key}: {one}"
        for key, one in parts.items()
    )


def build_answer(runs: Runs, found: Verdict) -> dict[str, Any]:
    """The verdict in words and numbers, for who reads nothing else."""
    groups = group_by_algorithm(runs.results)
    answers = {
        "yes": "Yes: federate.",
        "no": "No: do not federate here.",
        "unclear": "Not shown: no clear gain from federating.",
        "nothing": "Nothing to compare.",
    }
    if not runs.finished:
        answers |= {
            "yes": "So far it pays to federate.",
            "no": "So far it does not pay to federate.",
            "unclear": "So far no clear gain from federating.",
        }
    facts: list[tuple[str, str, str]] = []
    if found.gains is not None and found.method:
        mean = float(found.gains.mean())
        between = (
            f"95% over clients: {found.interval[0]:+.2f} to {found.interval[1]:+.2f}"
            if found.interval
            else ""
        )
        facts.append(("Mean gain over training alone", f"{mean:+.2f} points", f"{found.method}; {between}"))
        seeds = ", ".join(f"{gain:+.2f}" for gain in found.by_seed)
        several = len(found.by_seed) > 1
        count = "one seed" if found.by_seed else "no common seed"
        facts.append(
            (
                "Over seeds",
                f"±{np.std(found.by_seed):.2f}" if several else count,
                f"mean gain of each: {seeds}" if several else "spread is not known",
            )
        )
        better, worse = int((found.gains > 0).sum()), int((found.gains < 0).sum())
        same = len(found.gains) - better - worse
        facts.append(
            ("Clients that gain / lose", f"{better} / {worse}", f"{same} neither" if same else "all others")
        )
        best, alone = (
            100 * float(compute_client_accuracy(of).mean()) for of in pair_runs(groups, found.method)
        )
        facts.append(("Mean accuracy", f"{best:.2f}%", f"alone: {alone:.2f}%"))
    return {"answer": found.answer, "short": answers[found.answer], "text": found.text, "facts": facts}


def _describe_harm(runs: Runs, found: Verdict) -> list[str]:
    """Clients that are worse off than alone: with the method of the verdict, and in short with the others."""
    groups = group_by_algorithm(runs.results)
    each = {name: compute_gains(groups, name) for name in groups if name != BASELINE}
    counts = {name: int((gain < 0).sum()) for name, gain in each.items() if gain is not None}
    said = []
    if found.gains is not None and found.method and counts[found.method]:
        worst = int(found.gains.argmin())
        said.append(
            f"{found.method} harms {counts[found.method]} of {len(found.gains)} clients: they are worse than with "
            f"training alone, client {groups[found.method][0].clients[worst].id} by {-found.gains[worst]:.1f} points."
        )
    others = [f"{name} {count}" for name, count in counts.items() if count and name != found.method]
    if others:
        said.append(
            f"Clients that {'other methods harm' if said else 'are worse than alone'}: {', '.join(others)}."
        )
    return said
