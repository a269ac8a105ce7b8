"""`fedattune report`: what runs gave, as one HTML file."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..output import check_files
from ..reading import files_of, read_runs
from ..report import write_report
from ..text import make_console
from .view_options import Report, asked


def report(space: Namespace, problems: Sequence[str]) -> int:
    """Write the report on some runs, and say the verdict.

    Raises:
        ConfigError, RunError: options that cannot be, or folders without runs of the same clients.

    """
    from ..report.findings import judged

    runs: list[Path] = space.runs
    options = asked(Report, space, problems)
    found = read_runs(runs, running=True)
    out = options.out or runs[0] / "report.html"
    check_files({"--out": out}, files_of(runs))
    write_report(out, found)
    console = make_console()
    console.print(judged(found).text, style="bold")
    console.print(f"The report is {out}")
    return 0
