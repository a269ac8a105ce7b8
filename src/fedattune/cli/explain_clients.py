"""What `fedattune explain` says of all clients: each one in short, clusters, and how layers differ."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..given import TOP
from ..text import make_table, print_whole
from .explain_client import CORRELATION, agreement_cells, partners, percent, print_legend

if TYPE_CHECKING:
    from rich.console import Console

    from ..explanation import Brief, Gain, Subject

SHOWN = 60
"""Clients in the table; of more, those at both ends."""


def explain_clients(subject: "Subject", console: "Console") -> dict[str, Any]:
    """Print all clients in short, clusters and components; return the same as JSON values."""
    _print_clients(subject, console)
    for paragraph in _clusters_said(subject):
        console.print(paragraph)
    if subject.components:
        _print_components(subject, console)
    clusters = subject.clusters
    return {
        "components": [asdict(one) for one in subject.components],
        "clusters": None if clusters is None else asdict(clusters),
        "clients": [_as_json(one) for one in subject.clients],
    }


def _print_clients(subject: "Subject", console: "Console") -> None:
    shown, gains = _shown(subject.clients), subject.no_gain is None and subject.method != "local"
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
        row += _gain_cells(one.gain, reached) if gains else [reached]
        if mixes:
            row += ["-", "-"] if one.given is None else [percent(one.given.own), partners(one.given, 2)]
        table.add_row(*row, *agreement_cells(one.agreement) * labels)
    print_whole(table, console)
    if len(shown) < len(subject.clients):
        which = (
            f"{SHOWN // 2} that lose most or gain least and {SHOWN // 2} that gain most"
            if gains
            else f"{SHOWN} first"
        )
        console.print(f"The {which} of {len(subject.clients):,} clients are shown; --json gives all.")


def _shown(clients: "list[Brief]") -> "list[Brief]":
    """The clients of the table: all, or those at both ends, or the first."""
    if len(clients) <= SHOWN:
        return clients
    known = sorted((one for one in clients if one.gain), key=lambda one: one.gain.points if one.gain else 0.0)
    return [*known[: SHOWN // 2], *known[-SHOWN // 2 :]] if len(known) >= SHOWN else clients[:SHOWN]


def _gain_cells(gain: "Gain | None", reached: str) -> list[str]:
    if gain is None:
        return ["-", reached, "-", "-"]
    spread = "" if gain.std is None else f" ±{gain.std:.1f}"
    return [f"{gain.local:.2f}", reached, f"{gain.points:+.2f}{spread}", f"{gain.samples:+.1f}"]


def _clusters_said(subject: "Subject") -> list[str]:
    """Who learns from each other, if there are any apart."""
    found = subject.clusters
    if not subject.mixes:
        return []
    if found is None:
        return ["No clusters: clients do not learn more from some others than from the rest."]
    said = [
        f"Clusters of clients that learn from each other: of what they were given by others, {percent(found.kept)} "
        f"came from their own cluster, where {percent(found.chance)} would be chance."
    ]
    single = {one[0] for one in found.clients if len(one) == 1}
    alone = [name for name in subject.relations.names if name in single]
    for number, names in enumerate((one for one in found.clients if len(one) > 1), 1):
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        said.append(f"  {number}: {', '.join(names[:SHOWN])}{more}")
    if alone:
        more = f", and {len(alone) - SHOWN} more" if len(alone) > SHOWN else ""
        said.append(f"  in none: {', '.join(alone[:SHOWN])}{more}")
    if found.inside is not None and found.between is not None:
        said.append(
            f"Labels of two clients of one cluster are alike by {found.inside:.2f}, of two clusters by "
            f"{found.between:.2f} (1: the same shares of every class; 0: none in common)."
        )
    return said


def _print_components(subject: "Subject", console: "Console") -> None:
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
        table.add_row(one.name, percent(one.own), *agreement_cells(one.agreement) * labels, said)
    print_whole(table, console)
    console.print("own: what clients keep of their own model, on average.")
    if labels:
        print_legend([one.agreement for one in subject.components], "a client", console)
        console.print(CORRELATION)
    console.print("More of one client: --client NAME.")


def _as_json(brief: "Brief") -> dict[str, Any]:
    """A client's facts with its top partners; all are in the file of --client."""
    given = brief.given
    return asdict(replace(brief, given=given and replace(given, partners=given.partners[:TOP])))
