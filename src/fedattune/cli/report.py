"""The commands `report`, `plot` and `table`: one HTML page about runs; figures and tables for papers and programs."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..analysis.compare import BASELINE
from ..analysis.load import Runs, read_runs
from ..analysis.mixing import MixingAnalysis
from ..analysis.mixing.explain import RunExplanation
from ..analysis.output import plots
from ..analysis.output.formats import find_format
from ..analysis.output.report import write_report
from ..analysis.output.tables import make_console, print_methods
from ..core.errors import ConfigError, RunError
from ..core.io import replace_atomically, write_text
from ..experiments.output import check_output_files
from .main import print_content
from .options import PlotOptions, ReportOptions, TableOptions, parse_options


def report(space: Namespace, problems: Sequence[str]) -> int:
    """Write the report on some runs, and print the verdict."""
    paths: list[Path] = space.runs
    options = parse_options(ReportOptions, space, problems)
    runs = read_runs(paths, running=True)
    out = options.out or paths[0] / "report.html"
    check_output_files({"--out": out}, {}, {"--out": (".html",)})
    write_report(out, runs)
    console = make_console()
    console.print(runs.verdict.text, style="bold")
    console.print(f"The report is {out}")
    return 0


KIND_OF_OPTION = {"against": "curves", "round_": "heatmap", "component": "heatmap"}


def plot(space: Namespace, problems: Sequence[str]) -> int:
    """Draw a figure of some runs, and say what it shows."""
    options = parse_options(PlotOptions, space, problems)
    for name, kind in KIND_OF_OPTION.items():
        if hasattr(space, name) and options.kind != kind:
            raise ConfigError(f"--{name.rstrip('_')} is an option of --kind {kind}, not of --kind {options.kind}")
    plots.check_figure_path(options.out)
    check_output_files({"--out": options.out}, {})
    runs = read_runs(space.runs, running=True)
    if not runs.results:
        raise RunError(f"{space.runs[0]}: no round is finished yet, so there is nothing to draw; try again later")
    with plots.use_style():
        captioned_figure = _draw(runs, options)
    is_complete = plots.save_figure(captioned_figure.figure, options.out)
    console = make_console()
    console.print(f"{captioned_figure.caption}.")
    if not is_complete:
        console.print("note: the font lacks letters of clients' names, which are boxes in the figure")
    for run in runs.results:
        if not run.is_finished:
            console.print(f"note: {run.algorithm}, seed {run.settings.seed}, is at round {run.rounds}, not finished")
    console.print(f"The figure is {options.out}")
    return 0


def _draw(runs: Runs, options: PlotOptions) -> plots.CaptionedFigure:
    if options.kind == "heatmap":
        return plots.plot_heatmap(_find_mixing(runs, options), options.round_, options.component, options.width)
    selected_runs = [run for run, _ in runs.select(options.algorithm, options.seed)]
    if options.algorithm not in (None, BASELINE):  # every method is compared with it
        baseline_runs = [run for run in runs.results if run.algorithm == BASELINE]
        seed_runs = [run for run in baseline_runs if options.seed in (None, run.settings.seed)]
        selected_runs = seed_runs + selected_runs
    if options.kind == "curves":
        return plots.plot_curves(selected_runs, options.against, options.width)
    if options.kind == "clients":
        return plots.plot_clients(selected_runs, options.width, runs.metric)
    return plots.plot_traffic(selected_runs, options.width)


def _find_mixing(runs: Runs, options: PlotOptions) -> MixingAnalysis:
    """Return the mixing of the run to draw, whose method must mix client by client."""
    explanation = RunExplanation(runs, options.algorithm, options.seed)
    if explanation.sending_note:
        mixing = [name for name, group in explanation.groups.items() if MixingAnalysis(group[0]).has_mixtures]
        others = f"these do: {', '.join(mixing)}" if mixing else "no method in these runs does"
        raise RunError(
            f"{explanation.sending_note} A heatmap needs a method that gives clients mixtures of their own; {others}."
        )
    return explanation.mixing


def print_table(space: Namespace, problems: Sequence[str]) -> int:
    """Print or write the table of some runs."""
    options = parse_options(TableOptions, space, problems)
    chosen = find_format(options.format_, options.out.suffix if options.out else "")
    if chosen.is_binary and options.out is None:
        raise ConfigError(f"--format {chosen.name} writes a file; name it by -o, such as -o runs{chosen.ending}")
    if options.clients and not chosen.has_clients:
        raise ConfigError(f"--clients is an option of formats for programs such as csv, not of --format {chosen.name}")
    check_output_files({"--out": options.out}, {}, {"--out": (chosen.ending,)})
    runs = read_runs(space.runs, running=True)
    if not runs.results:
        raise RunError(f"{space.runs[0]}: no round is finished yet, so there is no table; try again later")
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
