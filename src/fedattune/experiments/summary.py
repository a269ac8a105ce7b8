"""Say what a command found: result files, table, notes and verdict."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.tables import make_console
from ..analysis.verdict import merge_notes, reach_verdict

if TYPE_CHECKING:
    from ..training.result import Result
    from .job import FailedRun
    from .output import OutputOptions
    from .plan import Plan


def write_summary(
    command: str,
    plan: "Plan",
    results: "Sequence[Result]",
    failed: "Sequence[FailedRun]",
    *,
    out: Path,
    output: "OutputOptions",
    notes: Sequence[str],
) -> None:
    """Write the result files, then print the table, the notes and the verdict."""
    from ..analysis.compare import build_rows, rows_to_json
    from ..analysis.tables import print_methods
    from ..core.io import write_text

    rounds_to = plan.experiment.rounds_to
    table = build_rows(results, rounds_to)
    content: dict[str, Any] = {
        "runs": [result.to_json() | _rounds_to(result, rounds_to) for result in results]
    }
    if command == "compare":
        content |= {
            "verdict": reach_verdict(results, has_failures=bool(failed)).text,
            "table": rows_to_json(table),
            "failed": [{"algorithm": o.algorithm, "seed": o.seed, "error": o.error} for o in failed],
        }
    elif len(results) == 1:
        content = content["runs"][0]
    text = json.dumps(content, indent=2)
    for path in (out / "result.json", output.json_file):
        if path:
            write_text(path, text)
    said = [*notes, *plan.federation.notes, *merge_notes(results), *_describe_failures(failed)]
    said = list(dict.fromkeys(said))
    report = out / "report.html" if command == "compare" and results else None
    if report:
        from ..analysis.load import read_runs
        from ..analysis.report import write_report

        write_report(report, read_runs([out]))
    console = make_console()
    if table:
        print_methods(table, console, rounds_to)
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


def _describe_failures(failed: "Sequence[FailedRun]") -> list[str]:
    return [f"{one.algorithm} failed with seed {one.seed}: {one.error}" for one in failed]
