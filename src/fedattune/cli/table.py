"""The command `table`: the table of runs for a paper, a page, or another program."""

import io
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError, RunError
from .main import print_content
from .options import TableFormat, TableOptions, parse_options

if TYPE_CHECKING:
    from ..analysis.load import Runs

FORMAT_OF_ENDING: dict[str, TableFormat] = {
    ".tex": "latex",
    ".md": "markdown",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


def print_table(space: Namespace, problems: Sequence[str]) -> int:
    """Print or write the table of some runs.

    Raises:
        ConfigError: options that cannot be.
        RunError: the folders hold no runs of the same clients, or no round is finished.

    """
    from ..analysis.load import read_runs
    from ..analysis.output import tidy
    from ..core.io import write_text
    from ..experiments.output import check_output_files

    paths: list[Path] = space.runs
    options = parse_options(TableOptions, space, problems)
    format_ = options.format_ or FORMAT_OF_ENDING.get(options.out.suffix if options.out else ".txt", "text")
    if format_ == "parquet" and options.out is None:
        raise ConfigError("--format parquet writes a file; name it by -o, such as -o runs.parquet")
    if options.clients and format_ not in ("csv", "parquet"):
        raise ConfigError(f"--clients is an option of --format csv and parquet, not of --format {format_}")
    check_output_files({"--out": options.out}, {})
    runs = read_runs(paths, running=True)
    if not runs.results:
        raise RunError(f"{paths[0]}: no round is finished yet, so there is no table; try again later")
    if format_ in ("csv", "parquet"):
        table = tidy.select_table_columns(runs.to_table(clients=options.clients), options.columns)
        if format_ == "parquet":
            assert options.out is not None
            tidy.write_parquet(table, options.out)
            return 0
        text = tidy.write_csv(table)
    else:
        text = _format_rows(runs, format_, options.columns)
    if options.out:
        write_text(options.out, text)
    elif format_ == "text":
        _print_rows(runs, options.columns)
    else:
        print_content(text)
    return 0


def _format_rows(runs: "Runs", format_: TableFormat, columns: str | None) -> str:
    """Format the table of methods as text for a file, Markdown or LaTeX."""
    from ..analysis.output.tables import make_console, print_methods, write_latex, write_markdown

    if format_ != "text":
        write = write_latex if format_ == "latex" else write_markdown
        return write(runs.rows, runs.rounds_to, columns)
    file = io.StringIO()
    print_methods(runs.rows, make_console(file), runs.rounds_to, columns)
    return file.getvalue().lstrip("\n")


def _print_rows(runs: "Runs", columns: str | None) -> None:
    from ..analysis.output.tables import make_console, print_methods

    print_methods(runs.rows, make_console(), runs.rounds_to, columns)
