"""Reports: runs as one HTML file that needs no network, made from their stores alone."""

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ...._version import __version__
from ....core.errors import RunError
from ....core.io import write_text
from ....core.metrics import METRICS, Metric, MetricName, format_gain, format_interval
from ....core.targets import KIND_WORDS
from ....runs.folder import RunFolder
from ....runs.metrics import NewcomerResult, RunMetrics
from ...compare import BASELINE, FloatArray, average_clients, compute_gains_over_local, group_by_algorithm
from ...load import Runs
from ...mixing import N_TOP_PARTNERS, Arrangement, MixingAnalysis, arrange_clients, seriate, thin_out
from ...rows import build_rows
from ...verdict import OPTIONS, Option, find_excluded
from ...verdict.notes import describe_seed_differences, merge_notes, select_notes
from ..tables import choose_columns, format_points, write_legend

MAX_DATA_BYTES = 3_200_000
"""Bytes of data in a report; the page and its chart library take a million and a half."""


def write_report(path: Path | str, runs: Runs) -> None:
    """Write the report on some runs to `path`.

    The page holds its data and the chart library (Apache ECharts) and asks nothing from any network. It stays below
    5 MB: of many clients or rounds, it shows as many mixing matrices as fit.

    Raises:
        RunError: no run has finished a round.
    """
    write_text(Path(path), render_report(runs))


def render_report(runs: Runs) -> str:
    """Render the page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    if not runs.results:
        raise RunError("there is nothing to report yet: no round is finished; look again later")
    environment = Environment(
        loader=PackageLoader("fedattune.analysis.output.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["percent"] = lambda share: format_points(share, 1)
    here = files("fedattune.analysis.output.report")
    scripts = [
        "".join((here / name).read_text("utf-8") for name in names)
        for names in (["templates/theme.js"], ["vendor/echarts.min.js"], ["templates/look.js", "templates/report.js"])
    ]
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    results, rounds_to = runs.results, runs.rounds_to
    table = build_rows(results, rounds_to, metric=runs.metric, baselines=runs.baselines)
    groups = group_by_algorithm(results)
    data, matrices = _fit_data(runs)
    joined = summarize_newcomers(results)
    return environment.get_template("report.html").render(
        title=runs.title + (f", {len(joined)} of them joining after training" if joined else ""),
        head=build_answer(runs),
        live=not runs.is_finished,
        reference=runs.verdict.reference,
        warnings=list_warnings(runs),
        tables=[
            {
                "columns": [(title, column.legend) for title, column in one.items()],
                "rows": [(row.algorithm, [c.format(row) for c in one.values()]) for row in table],
            }
            for one in choose_columns(table, rounds_to)
        ],
        legend=write_legend(table, rounds_to),
        metric=data["metric"],
        curve=data["curve"],
        newcomers=joined,
        methods=list(groups),
        mixes=bool(data["mixing"]),
        notes=_collect_notes(runs),
        config=describe_configuration(results),
        environments=_collect_environments(runs),
        version=__version__,
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        css=Markup((here / "templates" / "report.css").read_text("utf-8")),  # noqa: S704 (our own)
        scripts=[Markup(script) for script in scripts],  # noqa: S704
        hashes=Markup(" ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)),  # noqa: S704
        data=_encode(json.dumps(data, separators=(",", ":"), allow_nan=False).encode()),
        matrices=matrices,
    )


def _fit_data(runs: Runs) -> tuple[dict[str, Any], str]:
    groups = group_by_algorithm(runs.results)
    mixings = {name: MixingAnalysis(group[0]) for name, group in groups.items()}
    data: dict[str, Any] = {
        "method": runs.verdict.method,
        "methods": list(groups),
        "metric": describe_metric(METRICS[runs.metric]),
        "curve": describe_metric(runs.results[0].curve_metric),
        "curves": build_curves(groups),
        "clients": build_clients(groups, mixings, runs.metric),
        "traffic": build_traffic(groups),
        "seeds": {name: [run.settings.seed for run in group] for name, group in groups.items()},
    }
    n_bytes = MAX_MATRIX_BYTES
    while True:
        data["mixing"], matrices = build_mixing(mixings, n_bytes)
        packed = _encode(matrices)
        if len(packed) < MAX_DATA_BYTES or n_bytes < 1_000:
            return data, packed
        n_bytes = min(n_bytes, len(matrices)) // 2


def _encode(raw: bytes) -> str:
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def _collect_notes(runs: Runs) -> list[str]:
    """Collect all notes, the most urgent first, as on the terminal."""
    data_notes = [note for run in runs.results for note in run.facts.get("data_notes", ())]
    warnings = describe_seed_differences(runs.results).values()
    notes = [*data_notes, *merge_notes(runs.results, runs.baselines, runs.metric), *runs.notes]
    shown, others = select_notes([note for note in dict.fromkeys(notes) if note not in warnings])
    return [*shown, *others]


def _collect_environments(runs: Runs) -> list[dict[str, str]]:
    environments: list[dict[str, str]] = []
    for folder in map(RunFolder, runs.folders):
        if values := folder.read_environment():
            packages = values.pop("packages", {})
            text = {key: str(value) for key, value in values.items() if value is not None}
            text["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
            if text not in environments:
                environments.append(text)
    return environments


MAX_LEVEL, UNKNOWN_LEVEL = 254, 255
"""The byte of the largest weight, and the byte of a weight that is not known."""
MAX_PICTURED_CLIENTS = 150
"""Maximum number of clients in the pictures of who learns from whom; more would be unreadable."""
MAX_CURVE_POINTS = 400
MAX_MATRIX_BYTES = 6_000_000
"""Bytes of mixing matrices before they are zipped; halved until the page is small enough."""
MIN_PARTNER_SHARE = 1e-4
"""Share below which a client is not listed as a partner."""
Groups = dict[str, list[RunMetrics]]


def build_curves(groups: Groups) -> list[dict[str, Any]]:
    """Build, for each method and seed: rounds, bytes and seconds so far, mean and worst tenth of the curve.

    These are of the rounds that all runs of the method have, as means of other rounds would be of unlike models.
    """
    curves = []
    for name, runs in groups.items():
        seeds = []
        histories = [{entry["round"]: entry for entry in run.history if entry[run.evaluation_point]} for run in runs]
        rounds = thin_out(sorted(set.intersection(*map(set, histories))), MAX_CURVE_POINTS)
        for run, history in zip(runs, histories, strict=True):
            entries = [history[r] for r in rounds]
            seeds.append(
                {
                    "seed": run.settings.seed,
                    "rounds": [e["round"] for e in entries],
                    "bytes": [e["bytes"]["up"] + e["bytes"]["down"] for e in entries],
                    "seconds": [round(e["seconds"], 2) for e in entries],
                    "mean": [_round(run.read_curve(e[run.evaluation_point])) for e in entries],
                    "worst": [_round(run.read_curve(e[run.evaluation_point], "worst10")) for e in entries],
                }
            )
        curves.append({"method": name, "point": runs[0].evaluation_point, "seeds": seeds})
    return curves


def describe_metric(metric: Metric) -> dict[str, Any]:
    """Describe a metric for the page: name, unit, the word behind differences, and what it counts."""
    return {
        "label": metric.label,
        "title": f"Test {metric.label}" + " in percent" * metric.is_percent,
        "unit": "%" * metric.is_percent,
        "word": metric.points,
        "samples": metric.name == "accuracy",
        "higher": metric.is_higher_better,
        "has_unit": metric.has_unit,
    }


def build_clients(
    groups: Groups, mixings: dict[str, MixingAnalysis], metric: MetricName = "accuracy"
) -> dict[str, Any]:
    """Build, for each client: samples and classes; with each method, the metric, gain and partners."""
    scale = METRICS[metric].scale
    first = next(iter(groups.values()))[0]
    labels = first.facts.get("labels")
    methods: dict[str, Any] = {}
    for name, runs in groups.items():
        entry: dict[str, Any] = {"judged": [_round(scale * value) for value in average_clients(runs, metric)]}
        if metric == "accuracy":
            entry |= {point: _mean_accuracies(runs, point) for point in ("received", "trained")}
        gains = None if name == BASELINE else compute_gains_over_local(groups, name, metric)
        entry["gain"] = None if gains is None else [_round(scale * gain) for gain in gains]
        if mixings[name].has_mixtures:
            entry |= _list_partners(mixings[name], len(first.clients))
        methods[name] = entry
    return {
        "ids": [client.id for client in first.clients],
        "train": [client.n_train for client in first.clients],
        "test": [client.n_test for client in first.clients],
        "classes": None if labels is None else [sum(1 for n in row if n) for row in labels],
        "methods": methods,
    }


def _list_partners(mixing: MixingAnalysis, n_clients: int) -> dict[str, Any]:
    own: list[float | None] = [None] * n_clients
    partners: list[list[list[Any]]] = [[] for _ in range(n_clients)]
    for position, shares in zip(mixing.positions, mixing.shares, strict=True):
        if shares:
            own[position] = _round_percent(shares.own)
            top = [one for one in shares.partners[:N_TOP_PARTNERS] if one.weight > MIN_PARTNER_SHARE]
            partners[position] = [[one.client, _round_percent(one.weight)] for one in top]
    return {"own": own, "partners": partners}


def _mean_accuracies(runs: Sequence[RunMetrics], point: str) -> list[float | None]:
    rows = zip(*([getattr(client, point) for client in run.clients] for run in runs), strict=True)
    values = [[a for a in row if a is not None] for row in rows]
    return [_round_percent(float(np.mean(row))) if row else None for row in values]


def build_mixing(mixings: dict[str, MixingAnalysis], n_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Build who learns from whom with every method that mixes client by client: data of the pictures, packed matrices.

    The matrices have at most `n_bytes`.
    """
    honest = {name: one for name, one in mixings.items() if one.has_mixtures}
    if not honest:
        return {}, b""
    mixed = {name: one.include_marked() for name, one in honest.items()}
    first = next(iter(mixed.values()))
    clients = list(range(len(first.names)))
    if len(clients) > MAX_PICTURED_CLIENTS:
        clients = sorted(thin_out(seriate(first.mean)[0], MAX_PICTURED_CLIENTS))
    square = np.ix_(clients, clients)
    n_matrices = sum(len(one.components) for one in mixed.values())
    n_rounds = max(2, n_bytes // (n_matrices * len(clients) ** 2))
    content, methods = b"", {}
    for name, one in mixed.items():
        rounds = thin_out(one.rounds, n_rounds)
        components, packed = pack_matrices(one, clients, rounds)
        arrangement = arrange_clients(one.mean[square], one.last.offered[square])
        summaries = honest[name].components
        methods[name] = {
            "components": components,
            "rounds": rounds,
            "start": len(content),
            "order": arrangement.order,
            "clusters": _number_clusters(arrangement),
            "all_rounds": len(one.rounds),
            "own": {each.name: each.own for each in summaries},
            "agreement": {each.name: vars(each.agreement) for each in summaries if each.agreement},
        }
        content += packed
    similarity = first.similarity
    return {
        "clients": [first.positions[i] for i in clients],
        "names": [first.names[i] for i in clients],
        "hidden": len(first.run.facts["clients"]) + len(first.marked) - len(clients),
        "labels": None if first.labels is None else first.labels[clients].astype(int).tolist(),
        "classes": list(first.run.facts["classes"]),
        "target": None if first.run.kind == "class" else KIND_WORDS[first.run.kind],
        "label_order": None if similarity is None else seriate(similarity[square])[0],
        "methods": methods,
    }, content


def _number_clusters(arrangement: Arrangement) -> list[int]:
    if arrangement.share is None:
        return [0] * len(arrangement.clusters)
    sizes = Counter(arrangement.clusters)
    several = [c for c in dict.fromkeys(arrangement.clusters[i] for i in arrangement.order) if sizes[c] > 1]
    return [several.index(c) + 1 if c in several else 0 for c in arrangement.clusters]


def pack_matrices(
    mixing: MixingAnalysis, clients: Sequence[int], rounds: Sequence[int]
) -> tuple[list[dict[str, Any]], bytes]:
    """Pack the matrices among some clients: name and scale of each component, and its matrices of all rounds, one
    component after the other. Where a client was given nothing, its last row stands.
    """
    square = np.ix_(clients, clients)
    stack = [{name: m[square] for name, m in mixing.read_last_rows(r).weights.items()} for r in rounds]
    components, content = [], b""
    for name in stack[-1]:
        series = np.stack([one.get(name, np.full((len(clients),) * 2, np.nan)) for one in stack])
        weights = series[~np.isnan(series)]
        largest = float(np.abs(weights).max()) or 1.0 if len(weights) else 1.0
        is_signed = bool(len(weights) and weights.min() < 0)
        components.append({"name": name, "largest": largest, "signed": is_signed})
        content += b"".join(pack_weights(one, largest, is_signed) for one in series)
    return components, content


def pack_weights(weights: FloatArray, largest: float, signed: bool) -> bytes:
    """Pack weights (N, N), NaN where not known, as one byte each: the fourth root of their share of the largest.

    Large weights are exact to about a hundredth of themselves, weights of a hundredth of the largest to three, and
    weights of a millionth differ from zero. Signed weights have their zero in the middle.
    """
    root = (np.abs(np.nan_to_num(weights)) / largest) ** 0.25
    levels = MAX_LEVEL // 2 * (1 + np.sign(np.nan_to_num(weights)) * root) if signed else MAX_LEVEL * root
    out = np.round(levels).clip(0, MAX_LEVEL).astype(np.uint8)
    out[np.isnan(weights)] = UNKNOWN_LEVEL
    return out.tobytes()


def build_traffic(groups: Groups) -> dict[str, Any]:
    """Build, for each method, the bytes up and down by layer, averaged over the seeds, and the rounds done."""
    traffic = {}
    for name, runs in groups.items():
        stored = [run.store.traffic() for run in runs]
        parts = list(dict.fromkeys(part for one in stored for way in one.values() for part in way))
        traffic[name] = {
            "parts": parts,
            "rounds": runs[0].rounds,
            **{way: [float(np.mean([one[way].get(p, 0) for one in stored])) for p in parts] for way in ("up", "down")},
            "total": np.mean([(run.bytes_up, run.bytes_down) for run in runs], axis=0).tolist(),
        }
    return traffic


def _round(value: float) -> float | None:
    """Return a number with four significant digits, two decimals at least; None if it is not known."""
    if not np.isfinite(value):
        return None
    return round(float(value), 2) if abs(value) >= 1 else float(f"{value:.3g}")


def _round_percent(value: float | None) -> float | None:
    """Return percent with two decimals; None if the value is not known."""
    return None if value is None or not np.isfinite(value) else round(100 * value, 2)


ANSWERS = {
    "yes": "Yes: federate.",
    "no": "No: do not federate here.",
    "undecided": "Undecided: no clear gain from federating is shown.",
    "nothing_learned": "Nothing was learned from these rows.",
    "nothing": "Nothing to compare.",
}
LIVE_ANSWERS = {
    "yes": "So far it pays to federate.",
    "no": "So far it does not pay to federate.",
    "undecided": "So far no clear gain from federating.",
    "nothing_learned": "So far nothing was learned from these rows.",
    "nothing": "Nothing to compare.",
}


def build_answer(runs: Runs) -> dict[str, Any]:
    """Build the verdict in words and numbers, for a reader of nothing else."""
    verdict = runs.verdict
    metric = METRICS[verdict.metric]
    facts: list[tuple[str, str, str]] = []
    if verdict.gains is not None and verdict.gain is not None:
        known = verdict.gains[np.isfinite(verdict.gains)]
        interval = f"95% interval {format_interval(verdict.interval)}" if verdict.interval else "too few clients"
        better, worse = int((known > 0).sum()), int((known < 0).sum())
        same = len(known) - better - worse
        direction = "" if metric.is_higher_better else f" (lower {metric.label} is a gain)"
        facts = [
            (
                f"Mean gain over {verdict.reference}{direction}",
                f"{format_gain(verdict.gain)} {metric.points}",
                f"{verdict.method}; {interval}",
            ),
            *(_describe_option(option, metric) for option in verdict.options),
            ("Clients that gain / lose", f"{better} / {worse}", f"{same} neither"),
        ]
    short = (ANSWERS if runs.is_finished else LIVE_ANSWERS)[verdict.answer]
    if verdict.answer == "undecided" and verdict.interval and verdict.interval[0] > 0:
        short = "Undecided." if runs.is_finished else "So far undecided."  # for another reason, which the text gives
    details = [*verdict.details]
    if len(verdict.by_run) > 1:
        details.append(f"Mean gain of each seed and split: {', '.join(map(format_gain, verdict.by_run))}.")
    return {"answer": verdict.answer, "short": short, "text": verdict.text, "facts": facts, "details": details}


def _describe_option(option: Option, metric: Metric) -> tuple[str, str, str]:
    """Describe what clients can do: what it is, the metric, and its gain."""
    more = option.name
    if option.gain is not None:
        more += f": {format_gain(option.gain)}" + (f" ({format_interval(option.interval)})" if option.interval else "")
    words = OPTIONS[option.kind].removesuffix(" with")
    title = words[0].upper() + words[1:] + (" (recommended)" if option.is_recommended else "")
    return title, metric.format(option.value), more


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
        if diverged := sum(len(record.diverged) for record in records):
            warnings.append(
                f"{name}: training diverged {diverged:,} times (a client in a round); nothing of it was used."
            )
        if lost := sum(len(record.absent) for record in records):
            faults = sum(len(run.store.faults()) for run in group)
            known = f"; {faults:,} of them with a recorded reason" if faults else ""
            warnings.append(
                f"{name}: {lost:,} uploads were lost (the clients did not answer, or the server rejected them{known})."
            )
    warnings += [f"{note}." for note in describe_seed_differences(runs.results).values()]
    excluded = find_excluded(group_by_algorithm(runs.results))
    return warnings + [f"{name} is left out of the verdict: it {why}." for name, why in excluded.items()]


def _describe_harm(runs: Runs) -> list[str]:
    groups, verdict = group_by_algorithm(runs.results), runs.verdict
    gains = {name: compute_gains_over_local(groups, name, verdict.metric) for name in groups if name != BASELINE}
    counts = {method: int((gain < 0).sum()) for method, gain in gains.items() if gain is not None}
    others = [f"{method} {count}" for method, count in counts.items() if count and method != verdict.method]
    return [f"Clients that are worse than with {BASELINE}, with other methods: {', '.join(others)}."] * bool(others)


def summarize_newcomers(results: Sequence[RunMetrics]) -> list[dict[str, Any]]:
    """Summarise each client that joined after training: its accuracies with each method, over the seeds."""
    entries: dict[str, dict[str, Any]] = {}
    for name, runs in group_by_algorithm(results).items():
        by_id: dict[str, list[NewcomerResult]] = {}
        for newcomer in (newcomer for run in runs for newcomer in run.newcomers):
            by_id.setdefault(newcomer.id, []).append(newcomer)
        for id_, same in by_id.items():
            sizes = {"id": id_, "n_train": same[0].n_train, "n_test": same[0].n_test, "methods": []}
            words, curve = {"name": name}, runs[0].curve_metric
            for point in ("received", "trained", "local"):
                mean = float(np.mean([getattr(one, point) for one in same]))
                words[point] = format_points(mean, 1) if curve.is_percent else curve.format(mean)
            entries.setdefault(id_, sizes)["methods"].append(words)
    return list(entries.values())


def describe_configuration(results: Sequence[RunMetrics]) -> dict[str, dict[str, str]]:
    """Describe the settings that all runs share, and the settings of each method besides."""
    configs = {name: runs[0].config for name, runs in group_by_algorithm(results).items()}
    first = next(iter(configs.values()))
    keys = [key for key in first if key not in {"algorithm", "definition", "split", "seed"}]
    own = [key for key in keys if key == "options" or len({str(config.get(key)) for config in configs.values()}) > 1]

    def describe(config: Mapping[str, Any], config_keys: Sequence[str]) -> dict[str, str]:
        return {key: _format_setting(config[key]) for key in config_keys if config.get(key) not in ({}, None)}

    shared = describe(first, [key for key in keys if key not in own])
    shared["seeds"] = ", ".join(map(str, sorted({run.settings.seed for run in results})))
    each = {name: describe(config, own) | {"as": str(config["definition"])} for name, config in configs.items()}
    return {"all": shared, **each}


def _format_setting(value: Any) -> str:
    """Format a setting without braces, quotes, and settings that are not set."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(
        f"{key}: ({_format_setting(one)})" if isinstance(one, dict) else f"{key}: {one}"
        for key, one in value.items()
        if one not in ({}, None)
    )
