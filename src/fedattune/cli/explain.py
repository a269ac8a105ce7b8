"""`fedattune explain`: from which clients one learns, component by component, and the gain over training alone."""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import isclose
from typing import TYPE_CHECKING, Any

from ..analysis.mixing import N_TOP_PARTNERS
from ..analysis.output.tables import fill_table, make_console, make_table, print_whole
from ..core.metrics import format_number
from ..core.targets import KIND_WORDS
from ..core.text import format_percent
from .options import ExplainOptions, parse_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..analysis.mixing import ComponentSummary, ComponentTrace, LabelAgreement, MixtureShares
    from ..analysis.mixing.explain import ClientGain, ClientSummary, RunExplanation
    from ..core.metrics import Metric

MAX_SHOWN_CLIENTS = 60
"""Clients in the table; of more, those at both ends."""
CORRELATION_NOTE = (
    "Agreement of weights with labels is a correlation: the server sees no labels. A gain comes from the whole method, "
    "not from these partners alone."
)
AnyColumns = dict[str, Callable[[Any], str]]


def explain(space: Namespace, problems: list[str]) -> int:
    """Print who learns from whom in a finished run and what clients gain; write it to a file if asked for."""
    from ..analysis.load import read_runs
    from ..analysis.mixing.explain import RunExplanation
    from ..core.io import replace_nonfinite, write_text
    from ..experiments.output import check_output_files

    options = parse_options(ExplainOptions, space, problems)
    check_output_files({"--json": options.json_file}, {})
    explanation = RunExplanation(read_runs([space.run]), options.algorithm, options.seed, options.client)
    console = make_console()
    content = print_head(explanation, console)
    if options.client is None:
        content |= print_clients(explanation, console)
    else:
        content |= print_client(explanation, options.client, console)
    if options.json_file:
        write_text(options.json_file, json.dumps(replace_nonfinite(content), indent=2))
    return 0


def print_head(explanation: "RunExplanation", console: "Console") -> dict[str, Any]:
    """Print which run is explained, and notes on it; return the same as JSON values."""
    from ..analysis.verdict.notes import describe_seed_differences

    run, group = explanation.run, explanation.groups[explanation.method]
    seeds = [one.settings.seed for one in group]
    over = "runs (seeds and splits)" if len({one.split for one in group}) > 1 else "seeds"
    last = explanation.mixing.rounds[-1] if explanation.mixing.rounds else run.rounds
    console.print(
        f"{explanation.method} on {explanation.runs.title}, seed {run.settings.seed}, round {last} of {run.rounds}"
        + (f"; gains are means over {len(seeds)} {over}" if len(seeds) > 1 else ""),
        style="bold",
    )
    notes = [note for note in (explanation.choice_note, explanation.sending_note, explanation.gain_note) if note]
    if difference := describe_seed_differences(explanation.runs.results).get(explanation.method):
        notes.append(f"{difference}.")
    if waiting := len(explanation.runs.waiting):
        notes.append(f"{waiting} run{'s are' if waiting > 1 else ' is'} not finished and left out.")
    if explanation.mixing.has_mixtures and explanation.mixing.similarity is None:
        notes.append(
            f"The target is {KIND_WORDS[run.kind]}, so there are no shares of classes to compare, and no agreement "
            "with labels to show."
            if run.kind != "class"
            else "The label counts of the clients are not known here, for example because the data stay on their "
            "nodes. So agreement with labels is not shown."
        )
    notes += [f"{effect.sentence[0].upper()}{effect.sentence[1:]}." for effect in run.effects]
    notes += [f"{one[0].upper()}{one[1:]}." for report in run.reports.values() for one in report.get("sentences", ())]
    for note in notes:
        console.print(note)
    return {
        "data": run.config["data"],
        "n_clients": run.n_clients,
        "method": explanation.method,
        "seed": run.settings.seed,
        "seeds": seeds,
        "round": last,
        "mixes": explanation.mixing.has_mixtures,
        "notes": notes,
    }


def print_client(explanation: "RunExplanation", name: str, console: "Console") -> dict[str, Any]:
    """Print the gain of a client, its mixtures and their change; return the same as JSON values."""
    i = explanation.mixing.names.index(name)
    client = explanation.summarize_client(i)
    traces = explanation.mixing.trace(i) if explanation.mixing.has_mixtures else []
    console.print(f"\nClient {name}: {client.n_train:,} samples to train, {client.n_test:,} to test.")
    console.print(_describe_gain(explanation, client))
    if explanation.decisions and (decided := explanation.decisions.describe_client(name)):
        console.print(decided)
    if explanation.mixing.has_mixtures and not traces:
        console.print("It took part in no round with stored mixtures.")
    if traces:
        _print_traces(explanation, traces, console)
    content = {key: value for key, value in asdict(client).items() if key != "shares"}
    return {"client": content | {"components": [asdict(trace) for trace in traces]}}


def _describe_gain(explanation: "RunExplanation", client: "ClientSummary") -> str:
    gain, metric, method = client.gain, explanation.metric, explanation.method

    def show(value: float) -> str:
        return metric.format(value / metric.scale)

    if gain is None:
        reached = "" if client.value is None else f"{method} reaches {show(client.value)}."
        return reached if client.n_test else "It has no test samples, so nothing can be said of its accuracy."
    is_tie = isclose(gain.method, gain.local)  # means of several runs differ by rounding errors
    text = f"{method} {show(gain.method)}, local {show(gain.local)}: "
    if is_tie:
        text += "no difference"
    else:
        gap = metric.format_gap(abs(gain.points) / metric.scale)
        text += f"{'a gain' if gain.points > 0 else 'a loss'} of {gap}"
    if gain.samples is not None and not is_tie:
        text += f", which is {abs(gain.samples):.1f} of its {gain.n_test:,} test samples"
    if len(gain.by_run) > 1:
        points = [f"{one:+.2f}" if metric.is_percent else format_number(one, 3, "+") for one in gain.by_run.values()]
        std = f"{gain.std:.2f}" if metric.is_percent else format_number(gain.std or 0.0, 3)
        runs = "seed and split" if any("split" in key for key in gain.by_run) else "seed"
        text += f"; by {runs} {', '.join(points)} (std {std})"
    if gain.samples is not None and round(abs(gain.samples), 6) < 1 and not is_tie:
        text += ". That is less than one sample: too little to tell from chance"
    elif len(gain.by_run) > 1 and min(gain.by_run.values()) < 0 < max(gain.by_run.values()):
        several = "Seeds and splits" if any("split" in key for key in gain.by_run) else "Seeds"
        text += f". {several} do not agree on whether it gains"
    return f"{text}."


def _print_traces(explanation: "RunExplanation", traces: "list[ComponentTrace]", console: "Console") -> None:
    round_ = traces[0].last.round
    late = "" if round_ == explanation.mixing.rounds[-1] else ", the last one that it took part in"
    console.print(f"\nIts mixture at round {round_}{late}, in shares:")
    has_unseen = any(trace.last.unseen for trace in traces)
    columns: AnyColumns = {
        "component": lambda trace: trace.name,
        "own": lambda trace: format_percent(trace.last.own),
        "others": lambda trace: format_percent(trace.last.others),
    }
    if group := explanation.mixing.group:
        columns[group] = lambda trace: format_percent(trace.last.marked)
    if has_unseen:
        columns["not shown"] = lambda trace: format_percent(trace.last.unseen)
    columns["most from"] = lambda trace: format_partners(trace.last)
    columns |= _agreement_columns(traces)
    print_whole(fill_table(traces, columns, ("component", "most from")), console)
    if has_unseen:
        console.print("not shown: clients that were not evaluated.")
    _print_agreement_legend([trace.agreement for trace in traces], console)
    if traces[0].before:
        console.print("\nChange of its mixtures over the rounds:")
        titles = ("component", *(f"round {one.round}" for one in (*traces[0].before, traces[0].last)))
        table = make_table(*titles, "the same since", text_columns=titles)
        for trace in traces:
            mixtures = (f"own {format_percent(one.own)}; {format_partners(one)}" for one in (*trace.before, trace.last))
            since = "-" if trace.stable_since is None else f"round {trace.stable_since}"
            table.add_row(trace.name, *mixtures, since)
        print_whole(table, console)
        console.print("the same since: the first evaluated round since which the named partners are the same.")
    if traces[0].agreement:
        console.print(CORRELATION_NOTE)


def print_clients(explanation: "RunExplanation", console: "Console") -> dict[str, Any]:
    """Print all clients in short, clusters and components; return the same as JSON values."""
    _print_clients_table(explanation, console)
    decisions = explanation.decisions
    for paragraph in decisions.write_paragraphs() if decisions else _describe_clusters(explanation):
        console.print(paragraph)
    components, clusters = explanation.mixing.components, explanation.mixing.clusters
    if components:
        _print_components(components, console)
    return {
        "components": [asdict(one) for one in components],
        "clusters": None if clusters is None else asdict(clusters),
        "groups": decisions.groups if decisions else None,
        "shared": decisions.list_shares() if decisions else None,
        "clients": [asdict(replace(one, shares=_shorten(one.shares))) for one in explanation.clients],
    }


def _print_clients_table(explanation: "RunExplanation", console: "Console") -> None:
    has_gains = explanation.gain_note is None and explanation.method != "local"
    metric = explanation.metric
    unit = " %" if metric.is_percent else f" {metric.label}"
    shown_clients, which = _pick_clients(explanation.clients)

    def show(value: float) -> str:
        return f"{value:.2f}" if metric.is_percent else format_number(value)

    columns: AnyColumns = {
        "client": lambda one: one.client,
        "train": lambda one: f"{one.n_train:,}",
        "test": lambda one: f"{one.n_test:,}",
    }
    if has_gains:
        columns[f"local{unit}"] = lambda one: show(one.gain.local) if one.gain else "-"
    columns[f"{explanation.method}{unit}"] = lambda one: "-" if one.value is None else show(one.value)
    if has_gains:
        columns["gain"] = lambda one: _format_gain(one.gain, metric)
        if metric.name == "accuracy":
            columns["samples"] = lambda one: (
                f"{one.gain.samples:+.1f}" if one.gain and one.gain.samples is not None else "-"
            )
    if explanation.mixing.has_mixtures:
        columns["own"] = lambda one: format_percent(one.shares.own) if one.shares else "-"
        if group := explanation.mixing.group:
            columns[group] = lambda one: format_percent(one.shares.marked) if one.shares else "-"
        columns["most from"] = lambda one: format_partners(one.shares, 2) if one.shares else "-"
        columns |= _agreement_columns(explanation.clients)
    print_whole(fill_table(shown_clients, columns, ("client", "most from")), console)
    if len(shown_clients) < len(explanation.clients):
        console.print(f"The table shows {which}, of {len(explanation.clients):,} in all; --json gives all.")


def _pick_clients(clients: "list[ClientSummary]") -> "tuple[list[ClientSummary], str]":
    """Pick the clients of the table, and say which: all, or those at both ends, or the first."""
    if len(clients) <= MAX_SHOWN_CLIENTS:
        return clients, "all clients"
    half = MAX_SHOWN_CLIENTS // 2
    gaining = sorted((one for one in clients if one.gain), key=lambda one: one.gain.points if one.gain else 0.0)
    if len(gaining) < 2 * half:  # too few for two ends
        return clients[: 2 * half], f"the first {2 * half} clients"
    which = f"the {half} clients that lose most or gain least, and the {half} clients that gain most"
    return [*gaining[:half], *gaining[-half:]], which


def _describe_clusters(explanation: "RunExplanation") -> list[str]:
    """Describe in paragraphs who learns from each other, if there are clusters."""
    clusters = explanation.mixing.clusters
    if not explanation.mixing.has_mixtures:
        return []
    if clusters is None:
        return ["No clusters: clients do not learn more from some others than from the rest."]
    text = [
        "Clusters of clients that learn from each other. Their own cluster has "
        f"{format_percent(clusters.share)} of the weight on others; {format_percent(clusters.chance)} would be chance."
    ]
    single = {one[0] for one in clusters.clients if len(one) == 1}
    groups = {str(k): one for k, one in enumerate((one for one in clusters.clients if len(one) > 1), 1)}
    if single:
        groups["in none"] = [name for name in explanation.mixing.names if name in single]
    for title, names in groups.items():
        more = f", and {len(names) - MAX_SHOWN_CLIENTS} more" if len(names) > MAX_SHOWN_CLIENTS else ""
        text.append(f"  {title}: {', '.join(names[:MAX_SHOWN_CLIENTS])}{more}")
    if clusters.similarity_inside is not None and clusters.similarity_between is not None:
        text.append(
            f"Labels of two clients of one cluster are alike by {clusters.similarity_inside:.2f}, of two clusters by "
            f"{clusters.similarity_between:.2f} (1: the same shares of every class; 0: no class in common)."
        )
    return text


def _print_components(components: "list[ComponentSummary]", console: "Console") -> None:
    columns: AnyColumns = {
        "component": lambda one: one.name,
        "own": lambda one: format_percent(one.own),
        **_agreement_columns(components),
        "others' shares": lambda one: "all alike" if one.is_even else "differ",
    }
    print_whole(fill_table(components, columns, ("component", "others' shares")), console)
    console.print("own: the mean share that clients keep of their own model.")
    _print_agreement_legend([one.agreement for one in components], console)
    if components[0].agreement:
        console.print(CORRELATION_NOTE)
    console.print("More of one client: --client NAME.")


def _shorten(shares: "MixtureShares | None") -> "MixtureShares | None":
    """Keep only the top partners; the file of --client has all."""
    return shares and replace(shares, partners=shares.partners[:N_TOP_PARTNERS])


def format_partners(shares: "MixtureShares", max_partners: int = N_TOP_PARTNERS) -> str:
    """Format the top partners and their shares."""
    if not shares.partners:
        return "nobody"
    if shares.is_even:
        mean = shares.others / len(shares.partners)
        return f"all {len(shares.partners)} alike, {format_percent(mean)} each"
    return ", ".join(f"{one.client} {format_percent(one.weight)}" for one in shares.top[:max_partners])


def _format_gain(gain: "ClientGain | None", metric: "Metric") -> str:
    if gain is None:
        return "-"
    points = f"{gain.points:+.2f}" if metric.is_percent else format_number(gain.points, 3, "+")
    if gain.std is None:
        return points
    return f"{points} ±{gain.std:.1f}" if metric.is_percent else f"{points} ±{format_number(gain.std, 2)}"


def _agreement_columns(rows: Sequence[Any]) -> AnyColumns:
    """Return the columns of the agreement with labels, if labels are known."""
    if not any(row.agreement for row in rows):
        return {}
    return {
        "Spearman": lambda row: (
            f"{row.agreement.correlation:+.2f}" if row.agreement and row.agreement.correlation is not None else "-"
        ),
        "from alike": lambda row: format_percent(row.agreement.share, 0) if row.agreement else "-",
    }


def _print_agreement_legend(agreements: "Sequence[LabelAgreement | None]", console: "Console") -> None:
    """Explain the two columns of the agreement, if they say anything."""
    if chances := [one.chance for one in agreements if one and one.share is not None]:
        console.print(
            "Spearman: rank correlation of the shares of the other clients with the similarity of their labels. From "
            "alike: the part of these shares that the quarter of clients with the most similar labels gives; "
            f"{format_percent(chances[0], 0)} would be chance."
        )
