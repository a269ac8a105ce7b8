"""The command `table`: the table of runs for a paper, a page, or another program."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import ConfigError, RunError
from .main import print_content
from .options import TableOptions, parse_options


def print_table(space: Namespace, problems: Sequence[str]) -> int:
    """Print or write the table of some runs."""
    from ..analysis.load import read_runs
    from ..analysis.output.formats import find_format
    from ..analysis.output.tables import make_console, print_methods
    from ..core.io import replace_atomically, write_text
    from ..experiments.output import check_output_files

    paths: list[Path] = space.runs
    options = parse_options(TableOptions, space, problems)
    chosen = find_format(options.format_, options.out.suffix if options.out else "")
    if chosen.is_binary and options.out is None:
        raise ConfigError(f"--format {chosen.name} writes a file; name it by -o, such as -o runs{chosen.ending}")
    if options.clients and not chosen.has_clients:
        raise ConfigError(f"--clients is an option of formats for programs such as csv, not of --format {chosen.name}")
    check_output_files({"--out": options.out}, {})
    runs = read_runs(paths, running=True)
    if not runs.results:
        raise RunError(f"{paths[0]}: no round is finished yet, so there is no table; try again later")
    if chosen.name == "text" and not options.out:  # with colours
        print_methods(runs.rows, make_console(), runs.rounds_to, options.columns)
        return 0
    keywords = {"clients": True} if options.clients else {}
    content = chosen.write(runs, options.columns, **keywords)
    if isinstance(content, bytes):
        assert options.out is not None
        with replace_atomically(options.out) as new:
            new.write_bytes(content)
    elif options.out:
        write_text(options.out, content)
    else:
        print_content(content)
    return 0
