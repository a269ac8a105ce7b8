"""Say what a command found: result files, table, notes and verdict."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import make_console

if TYPE_CHECKING:
    from ..output import Output
    from ..result import Result
    from .jobs import Failure
    from .plan import Plan


def conclude(
    command: str,
    plan: "Plan",
    results: "Sequence[Result]",
    failed: "Sequence[Failure]",
    *,
    out: Path,
    output: "Output",
    notes: Sequence[str],
) -> None:
    """Write the result files, then print the table, the notes and the verdict."""
    from ..compare import as_json, print_table, rows
    from ..files import write_text

    rounds_to = plan.experiment.rounds_to
    table = rows(results, rounds_to)
    content: dict[str, Any] = {
        "runs": [result.to_json() | _rounds_to(result, rounds_to) for result in results]
    }
    if command == "compare":
        content |= {
            "verdict": _verdict(results, failed),
            "table": as_json(table),
            "failed": [{"algorithm": o.algorithm, "seed": o.seed, "error": o.error} for o in failed],
        }
    elif len(results) == 1:
        content = content["runs"][0]
    text = json.dumps(content, indent=2)
    for path in (out / "result.json", output.json_file):
        if path:
            write_text(path, text)
    said = [*notes, *plan.federation.notes, *_notes(results), *_failures(failed)]
    said = list(dict.fromkeys(said))
    report = out / "report.html" if command == "compare" and results else None
    if report:
        from ..reading import read_runs
        from ..report import write_report

        write_report(report, read_runs([out]))
    console = make_console()
    if table:
        print_table(table, console, rounds_to)
    for one in said:
        console.print(f"note: {one}")
    if command == "compare":
        console.print(content["verdict"], style="bold")
    console.print(
        f"The report is {report}; all numbers are in {out}" if report else f"All numbers are in {out}"
    )


def _rounds_to(result: "Result", accuracy: float | None) -> dict[str, Any]:
    """The round that reaches the accuracy asked for, where one was."""
    if accuracy is None:
        return {}
    return {"rounds_to": {"accuracy": accuracy, "round": result.rounds_to(accuracy)}}


def _notes(results: "Sequence[Result]") -> list[str]:
    """What is to be known about the methods that finished; what several have to say is said once, of all of them."""
    from ..verdict import fairness_notes

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
    return [*notes, *(fairness_notes(results) if results else ())]


def _failures(failed: "Sequence[Failure]") -> list[str]:
    return [f"{one.algorithm} failed with seed {one.seed}: {one.error}" for one in failed]


def _verdict(results: "Sequence[Result]", failed: "Sequence[Failure]") -> str:
    """The verdict; where too few methods came to an end, that instead."""
    from ..compare import ALONE
    from ..verdict import verdict

    finished = {result.algorithm for result in results}
    if failed and not finished:
        return "Nothing to compare: no method finished."
    if failed and ALONE not in finished:
        return f"Nothing to compare: {ALONE}, with which the others are compared, did not finish."
    if failed and finished == {ALONE}:
        return f"Nothing to compare: only {ALONE} finished."
    return verdict(results).text
