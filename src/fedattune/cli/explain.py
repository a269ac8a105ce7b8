"""Explain a run in the terminal: which clients one learns from, layer by layer, and what it gains by that.

What `fedattune explain` says of one client, and the cells and words that it shares with that of all clients.

What `fedattune explain` says of all clients: each one in short, clusters, and how layers differ.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..analysis.partners import N_TOP_PARTNERS, ComponentTrace, MixtureShares, trace_components
from ..analysis.relations import LabelAgreement
from ..analysis.tables import make_console, make_table, print_whole

if TYPE_CHECKING:
    from rich.console import Console

    from ..analysis.explain import ClientGain, ClientSummary, RunExplanation


def explain(space: Namespace, problems: list[str]) -> int:
    """Print who learns from whom in a finished run and what clients gain; write it to a file if asked for."""
    from ..analysis.explain import RunExplanation
    from ..analysis.load import list_run_files, read_runs
    from ..core.io import write_text
    from ..experiments.output import check_output_files
    from ..training.metrics import replace_nonfinite

    # DROPPED IMPORT
    # DROPPED IMPORT
    from .options import ExplainOptions, parse_options

    options = parse_options(ExplainOptions, space, problems)
    check_output_files({"--json": options.json_file}, list_run_files([space.run]))
    subject = RunExplanation(read_runs([space.run]), options.algorithm, options.seed, options.client)
    console = make_console()
    content = _print_head(subject, console)
    if options.client is None:
        content |= print_clients(subject, console)
    else:
        content |= print_client(subject, options.client, console)
    if options.json_file:
        write_text(options.json_file, json.dumps(replace_nonfinite(content), indent=2))
    return 0


def _print_head(subject: "RunExplanation", console: "Console") -> dict[str, Any]:
    """Say which run is told of."""
    from ..analysis.verdict import describe_seed_differences

    run, seeds = subject.run, [one.settings.seed for one in subject.groups[subject.method]]
    last = subject.relations.rounds[-1] if subject.relations.rounds else run.rounds
    console.print(
        f"{subject.method} on {subject.runs.title}, seed {run.settings.seed}, round {last} of {run.rounds}"
        + (f"; gains are means over {len(seeds)} seeds" if len(seeds) > 1 else ""),
        style="bold",
    )
    notes = [note for note in (subject.why, subject.sends, subject.no_gain) if note]
    if gap := describe_seed_differences(subject.runs.results).get(subject.method):
        notes.append(f"{gap}.")
    waiting = len(subject.runs.waiting)
    if waiting:
        notes.append(f"{waiting} run{'s are' if waiting > 1 else ' is'} not finished and left out.")
    if subject.mixes and subject.relations.similarity is None:
        notes.append(
            "How labels are spread over clients is not known here (data that stay on their nodes, or an older run), "
            "so it cannot be said whether clients learn from those with like labels."
        )
    for note in notes:
        console.print(note)
    return {
        "data": run.config["data"],
        "n_clients": run.n_clients,
        "method": subject.method,
        "seed": run.settings.seed,
        "seeds": seeds,
        "round": last,
        "mixes": subject.mixes,
        "notes": notes,
    }


CORRELATION_NOTE = (
    "That weights go with labels is a correlation: the server sees no labels, and a gain is that of the method as a "
    "whole, not of these partners alone."
)


def print_client(subject: "RunExplanation", name: str, console: "Console") -> dict[str, Any]:
    """Print what a client gains, what it was given and how this changed; return the same as JSON values."""
    i = subject.relations.names.index(name)
    brief = subject.brief(i)
    found = trace_components(subject.relations, i) if subject.mixes else []
    console.print(f"\nClient {name}: {brief.n_train:,} samples to train, {brief.n_test:,} to test.")
    console.print(_describe_gain(subject, brief))
    if subject.mixes and not found:
        console.print(
            f"It took part in no round of which mixtures are stored, so {subject.method} gave it none."
        )
    if found:
        _print_layers(subject, found, console)
    content = {key: value for key, value in asdict(brief).items() if key != "given"}
    return {"client": content | {"layers": [asdict(layer) for layer in found]}}


def _describe_gain(subject: "RunExplanation", brief: "ClientSummary") -> str:
    gain = brief.gain
    if gain is None:
        reached = "" if brief.accuracy is None else f"{subject.method} reaches {brief.accuracy:.2f}%."
        return reached if brief.n_test else "It has no test samples, so nothing can be said of its accuracy."
    said = (
        f"{subject.method} {gain.method:.2f}%, local {gain.local:.2f}%: {_gain_or_loss(gain.points)} of "
        f"{abs(gain.points):.2f} points, which is {abs(gain.samples):.1f} of its {gain.n_test:,} test samples"
    )
    if len(gain.by_seed) > 1:
        by = ", ".join(f"{points:+.2f}" for points in gain.by_seed.values())
        said += f"; by seed {by} (std {gain.std:.2f})"
    if round(abs(gain.samples), 6) < 1 and gain.points:
        said += ". That is less than one sample: too little to tell from chance"
    elif len(gain.by_seed) > 1 and min(gain.by_seed.values()) < 0 < max(gain.by_seed.values()):
        said += ". Seeds do not agree on whether it gains"
    return said + "."


def _gain_or_loss(points: float) -> str:
    return "a gain" if points >= 0 else "a loss"


def _print_layers(subject: "RunExplanation", found: list[ComponentTrace], console: "Console") -> None:
    round_ = found[0].last.round
    late = "" if round_ == subject.relations.rounds[-1] else ", the last one that it took part in"
    console.print(f"\nWhat it was given at round {round_}{late}, in shares of the mixture:")
    unseen = any(layer.last.unseen for layer in found)
    labels = any(layer.agreement for layer in found)
    columns = ["layer", "own", "others", *["not shown"] * unseen, "most from"]
    table = make_table(*columns, *["Spearman", "from alike"] * labels, left=("layer", "most from"))
    for layer in found:
        last = layer.last
        shares = [
            format_percent(last.own),
            format_percent(last.others),
            *[format_percent(last.unseen)] * unseen,
        ]
        table.add_row(layer.name, *shares, format_partners(last), *format_agreement(layer.agreement) * labels)
    print_whole(table, console)
    if unseen:
        console.print("not shown: from clients that are not among those looked at.")
    if labels:
        print_agreement_legend([layer.agreement for layer in found], "it", console)
    if found[0].before:
        _print_change(found, console)
    if labels:
        console.print(CORRELATION_NOTE)


def _print_change(found: list[ComponentTrace], console: "Console") -> None:
    rounds = [one.round for one in (*found[0].before, found[0].last)]
    console.print("\nHow this changed:")
    table = make_table("layer", *(f"round {r}" for r in rounds), "the same since", left=("layer",))
    for column in table.columns[1:-1]:
        column.justify = "left"
    for layer in found:
        cells = [
            f"own {format_percent(one.own)}; {format_partners(one)}" for one in (*layer.before, layer.last)
        ]
        table.add_row(layer.name, *cells, "-" if layer.settled is None else f"round {layer.settled}")
    print_whole(table, console)
    console.print("the same since: the first round looked at since which the partners named are the same.")


def format_partners(given: MixtureShares, most: int = N_TOP_PARTNERS) -> str:
    """A cell: the top partners and their shares."""
    if not given.partners:
        return "nobody"
    if given.even:
        mean = given.others / len(given.partners)
        return f"all {len(given.partners)} alike, {format_percent(mean)} each"
    return ", ".join(f"{one.client} {format_percent(one.weight)}" for one in given.top[:most])


def format_agreement(found: LabelAgreement | None) -> list[str]:
    """Two cells: Spearman's correlation, and what came from the alike."""
    if found is None:
        return ["-", "-"]
    correlation = "-" if found.correlation is None else f"{found.correlation:+.2f}"
    return [correlation, "-" if found.share is None else f"{100 * found.share:.0f}%"]


def format_percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f}%"


def print_agreement_legend(found: Sequence[LabelAgreement | None], who: str, console: "Console") -> None:
    """Say what the two cells of agreement mean, where there are any."""
    known = [one for one in found if one and one.share is not None]
    if known:
        console.print(
            "Spearman: rank correlation of the others' shares with how alike their labels are; from alike: of what "
            f"{who} was given by others, the part from the nearest quarter by labels, where "
            f"{100 * known[0].chance:.0f}% would be chance."
        )


MAX_SHOWN_CLIENTS = 60
"""Clients in the table; of more, those at both ends."""


def print_clients(subject: "RunExplanation", console: "Console") -> dict[str, Any]:
    """Print all clients in short, clusters and components; return the same as JSON values."""
    _print_clients_table(subject, console)
    for paragraph in _describe_clusters(subject):
        console.print(paragraph)
    if subject.components:
        _print_components(subject, console)
    clusters = subject.clusters
    return {
        "components": [asdict(one) for one in subject.components],
        "clusters": None if clusters is None else asdict(clusters),
        "clients": [_summary_to_json(one) for one in subject.clients],
    }


def _print_clients_table(subject: "RunExplanation", console: "Console") -> None:
    shown, gains = _pick_clients(subject.clients), subject.no_gain is None and subject.method != "local"
    mixes, labels = subject.mixes, subject.mixes and subject.relations.similarity is not None
    columns = [
        "client",
        "train",
        "test",
        *["local %"] * gains,
        f"{subject.method} %",
        *["gain", "samples"] * gains,
    ]
    columns += [*["own", "most from"] * mixes, *["Spearman", "from alike"] * labels]
    table = make_table(*columns, left=("client", "most from"))
    for one in shown:
        row = [one.client, f"{one.n_train:,}", f"{one.n_test:,}"]
        reached = "-" if one.accuracy is None else f"{one.accuracy:.2f}"
        row += _format_gain(one.gain, reached) if gains else [reached]
        if mixes:
            row += (
                ["-", "-"]
                if one.given is None
                else [format_percent(one.given.own), format_partners(one.given, 2)]
            )
        table.add_row(*row, *format_agreement(one.agreement) * labels)
    print_whole(table, console)
    if len(shown) < len(subject.clients):
        which = (
            f"{MAX_SHOWN_CLIENTS // 2} that lose most or gain least and {MAX_SHOWN_CLIENTS // 2} that gain most"
            if gains
            else f"{MAX_SHOWN_CLIENTS} first"
        )
        console.print(f"The {which} of {len(subject.clients):,} clients are shown; --json gives all.")


def _pick_clients(clients: "list[ClientSummary]") -> "list[ClientSummary]":
    """The clients of the table: all, or those at both ends, or the first."""
    if len(clients) <= MAX_SHOWN_CLIENTS:
        return clients
    known = sorted((one for one in clients if one.gain), key=lambda one: one.gain.points if one.gain else 0.0)
    return (
        [*known[: MAX_SHOWN_CLIENTS // 2], *known[-MAX_SHOWN_CLIENTS // 2 :]]
        if len(known) >= MAX_SHOWN_CLIENTS
        else clients[:MAX_SHOWN_CLIENTS]
    )


def _format_gain(gain: "ClientGain | None", reached: str) -> list[str]:
    if gain is None:
        return ["-", reached, "-", "-"]
    spread = "" if gain.std is None else f" ±{gain.std:.1f}"
    return [f"{gain.local:.2f}", reached, f"{gain.points:+.2f}{spread}", f"{gain.samples:+.1f}"]


def _describe_clusters(subject: "RunExplanation") -> list[str]:
    """Who learns from each other, if there are any apart."""
    found = subject.clusters
    if not subject.mixes:
        return []
    if found is None:
        return ["No clusters: clients do not learn more from some others than from the rest."]
    said = [
        f"Clusters of clients that learn from each other: of what they were given by others, "
        f"{format_percent(found.kept)} "
        f"came from their own cluster, where {format_percent(found.chance)} would be chance."
    ]
    single = {one[0] for one in found.clients if len(one) == 1}
    alone = [name for name in subject.relations.names if name in single]
    for number, names in enumerate((one for one in found.clients if len(one) > 1), 1):
        more = f", and {len(names) - MAX_SHOWN_CLIENTS} more" if len(names) > MAX_SHOWN_CLIENTS else ""
        said.append(f"  {number}: {', '.join(names[:MAX_SHOWN_CLIENTS])}{more}")
    if alone:
        more = f", and {len(alone) - MAX_SHOWN_CLIENTS} more" if len(alone) > MAX_SHOWN_CLIENTS else ""
        said.append(f"  in none: {', '.join(alone[:MAX_SHOWN_CLIENTS])}{more}")
    if found.inside is not None and found.between is not None:
        said.append(
            f"Labels of two clients of one cluster are alike by {found.inside:.2f}, of two clusters by "
            f"{found.between:.2f} (1: the same shares of every class; 0: none in common)."
        )
    return said


def _print_components(subject: "RunExplanation", console: "Console") -> None:
    labels = any(one.agreement for one in subject.components)
    table = make_table(
        "layer",
        "own",
        *["Spearman", "from alike"] * labels,
        "others' shares",
        left=("layer", "others' shares"),
    )
    for one in subject.components:
        said = "all alike" if one.even else "differ"
        table.add_row(one.name, format_percent(one.own), *format_agreement(one.agreement) * labels, said)
    print_whole(table, console)
    console.print("own: what clients keep of their own model, on average.")
    if labels:
        print_agreement_legend([one.agreement for one in subject.components], "a client", console)
        console.print(CORRELATION_NOTE)
    console.print("More of one client: --client NAME.")


def _summary_to_json(brief: "ClientSummary") -> dict[str, Any]:
    """A client's facts with its top partners; all are in the file of --client."""
    given = brief.given
    return asdict(replace(brief, given=given and replace(given, partners=given.partners[:N_TOP_PARTNERS])))
