"""What `fedattune explain` says of one client, and the cells and words that it shares with that of all clients."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..given import TOP, Given, Layer, layers
from ..relations import Agreement
from ..text import make_table, print_whole

if TYPE_CHECKING:
    from rich.console import Console

    from ..explanation import Brief, Subject

CORRELATION = (
    "That weights go with labels is a correlation: the server sees no labels, and a gain is that of the method as a "
    "whole, not of these partners alone."
)


def explain_client(subject: "Subject", name: str, console: "Console") -> dict[str, Any]:
    """Print what a client gains, what it was given and how this changed; return the same as JSON values."""
    i = subject.relations.names.index(name)
    brief = subject.brief(i)
    found = layers(subject.relations, i) if subject.mixes else []
    console.print(f"\nClient {name}: {brief.n_train:,} samples to train, {brief.n_test:,} to test.")
    console.print(_gain_said(subject, brief))
    if subject.mixes and not found:
        console.print(
            f"It took part in no round of which mixtures are stored, so {subject.method} gave it none."
        )
    if found:
        _print_layers(subject, found, console)
    content = {key: value for key, value in asdict(brief).items() if key != "given"}
    return {"client": content | {"layers": [asdict(layer) for layer in found]}}


def _gain_said(subject: "Subject", brief: "Brief") -> str:
    gain = brief.gain
    if gain is None:
        reached = "" if brief.accuracy is None else f"{subject.method} reaches {brief.accuracy:.2f}%."
        return reached if brief.n_test else "It has no test samples, so nothing can be said of its accuracy."
    said = (
        f"{subject.method} {gain.method:.2f}%, local {gain.local:.2f}%: {_gains(gain.points)} of "
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


def _gains(points: float) -> str:
    return "a gain" if points >= 0 else "a loss"


def _print_layers(subject: "Subject", found: list[Layer], console: "Console") -> None:
    round_ = found[0].last.round
    late = "" if round_ == subject.relations.rounds[-1] else ", the last one that it took part in"
    console.print(f"\nWhat it was given at round {round_}{late}, in shares of the mixture:")
    unseen = any(layer.last.unseen for layer in found)
    labels = any(layer.agreement for layer in found)
    columns = ["layer", "own", "others", *["not shown"] * unseen, "most from"]
    table = make_table(*columns, *["Spearman", "from alike"] * labels, left=("layer", "most from"))
    for layer in found:
        last = layer.last
        shares = [percent(last.own), percent(last.others), *[percent(last.unseen)] * unseen]
        table.add_row(layer.name, *shares, partners(last), *agreement_cells(layer.agreement) * labels)
    print_whole(table, console)
    if unseen:
        console.print("not shown: from clients that are not among those looked at.")
    if labels:
        print_legend([layer.agreement for layer in found], "it", console)
    if found[0].before:
        _print_change(found, console)
    if labels:
        console.print(CORRELATION)


def _print_change(found: list[Layer], console: "Console") -> None:
    rounds = [one.round for one in (*found[0].before, found[0].last)]
    console.print("\nHow this changed:")
    table = make_table("layer", *(f"round {r}" for r in rounds), "the same since", left=("layer",))
    for column in table.columns[1:-1]:
        column.justify = "left"
    for layer in found:
        cells = [f"own {percent(one.own)}; {partners(one)}" for one in (*layer.before, layer.last)]
        table.add_row(layer.name, *cells, "-" if layer.settled is None else f"round {layer.settled}")
    print_whole(table, console)
    console.print("the same since: the first round looked at since which the partners named are the same.")


def partners(given: Given, most: int = TOP) -> str:
    """A cell: the top partners and their shares."""
    if not given.partners:
        return "nobody"
    if given.even:
        mean = given.others / len(given.partners)
        return f"all {len(given.partners)} alike, {percent(mean)} each"
    return ", ".join(f"{one.client} {percent(one.weight)}" for one in given.top[:most])


def agreement_cells(found: Agreement | None) -> list[str]:
    """Two cells: Spearman's correlation, and what came from the alike."""
    if found is None:
        return ["-", "-"]
    correlation = "-" if found.correlation is None else f"{found.correlation:+.2f}"
    return [correlation, "-" if found.share is None else f"{100 * found.share:.0f}%"]


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f}%"


def print_legend(found: Sequence[Agreement | None], who: str, console: "Console") -> None:
    """Say what the two cells of agreement mean, where there are any."""
    known = [one for one in found if one and one.share is not None]
    if known:
        console.print(
            "Spearman: rank correlation of the others' shares with how alike their labels are; from alike: of what "
            f"{who} was given by others, the part from the nearest quarter by labels, where "
            f"{100 * known[0].chance:.0f}% would be chance."
        )
