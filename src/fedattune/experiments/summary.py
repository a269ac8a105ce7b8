"""Summarize the runs of an experiment: result files, table, notes, verdict and report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..analysis.compare import MethodRow, build_rows, describe_failure, rows_to_json
from ..analysis.verdict import reach_verdict
from ..analysis.verdict.notes import merge_notes
from ..core.io import write_text
from ..core.metrics import MetricName

if TYPE_CHECKING:
    from ..runs.result import Result
    from .session import Outcome


class Summary(NamedTuple):
    """The findings of an experiment; only a comparison has a verdict, and a report of its results."""

    rows: list[MethodRow]
    notes: list[str]
    verdict: str | None
    report: Path | None


def write_summary(
    outcome: "Outcome",
    *,
    files: Sequence[Path],
    report: Path | None,
    rounds_to: float | None = None,
    metric: MetricName | None = None,
) -> Summary:
    """Write the result files, and the report of a comparison beside the folders of the runs."""
    results, failed, baselines, tuning_notes = outcome
    rows = build_rows(results, rounds_to, metric=metric, baselines=baselines)
    verdict = None
    if report:
        verdict = reach_verdict(results, baselines=baselines, metric=metric, has_failures=bool(failed)).text
    content: dict[str, Any] = {"runs": [_run_to_json(result, rounds_to) for result in results]}
    if report:
        content |= {
            "verdict": verdict,
            "table": rows_to_json(rows),
            "failed": [{"algorithm": o.algorithm, "seed": o.seed, "split": o.split, "error": o.error} for o in failed],
        }
    elif len(results) == 1:
        content = content["runs"][0]
    text = json.dumps(content, indent=2)
    for file in files:
        write_text(file, text)
    if report and results:
        from ..analysis.load import read_runs
        from ..analysis.output.report import write_report

        write_report(report, read_runs([report.parent]))
    failures = [describe_failure(one.algorithm, one.seed, one.error) for one in failed]
    return Summary(
        rows, [*merge_notes(results, baselines, metric), *tuning_notes, *failures], verdict, report if results else None
    )


def _run_to_json(result: "Result", rounds_to: float | None) -> dict[str, Any]:
    """Return the numbers of a run, with the first round that reaches the accuracy `rounds_to`."""
    if rounds_to is None:
        return result.to_json()
    return result.to_json() | {"rounds_to": {"accuracy": rounds_to, "round": result.rounds_to(rounds_to)}}
