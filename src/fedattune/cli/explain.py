"""Explain a run in the terminal: which clients one learns from, layer by layer, and what it gains by that."""

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..text import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from ..explanation import Subject


def explain(space: Namespace, problems: list[str]) -> int:
    """Print who learns from whom in a finished run and what clients gain; write it to a file if asked for."""
    from ..explanation import Subject
    from ..files import write_text
    from ..metrics import finite
    from ..output import check_files
    from ..reading import files_of, read_runs
    from .explain_client import explain_client
    from .explain_clients import explain_clients
    from .view_options import Explain, asked

    options = asked(Explain, space, problems)
    check_files({"--json": options.json_file}, files_of([space.run]))
    subject = Subject(read_runs([space.run]), options.algorithm, options.seed, options.client)
    console = make_console()
    content = _head(subject, console)
    if options.client is None:
        content |= explain_clients(subject, console)
    else:
        content |= explain_client(subject, options.client, console)
    if options.json_file:
        write_text(options.json_file, json.dumps(finite(content), indent=2))
    return 0


def _head(subject: "Subject", console: "Console") -> dict[str, Any]:
    """Say which run is told of."""
    from ..verdict import seed_gaps

    run, seeds = subject.run, [one.settings.seed for one in subject.groups[subject.method]]
    last = subject.relations.rounds[-1] if subject.relations.rounds else run.rounds
    console.print(
        f"{subject.method} on {subject.runs.title}, seed {run.settings.seed}, round {last} of {run.rounds}"
        + (f"; gains are means over {len(seeds)} seeds" if len(seeds) > 1 else ""),
        style="bold",
    )
    notes = [note for note in (subject.why, subject.sends, subject.no_gain) if note]
    if gap := seed_gaps(subject.runs.results).get(subject.method):
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
