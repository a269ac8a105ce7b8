"""`fedattune plot`: figures for papers from the folders of runs."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..compare import ALONE
from ..errors import ConfigError, RunError
from ..explanation import Subject
from ..output import check_files
from ..reading import Runs, files_of, read_runs
from ..relations import Relations
from ..report import figure_style as look
from ..text import make_console
from .view_options import Plot, asked

OF_KIND = {"against": "curves", "round_": "heatmap", "component": "heatmap"}


def plot(space: Namespace, problems: Sequence[str]) -> int:
    """Draw a figure of some runs, and say what it shows.

    Raises:
        ConfigError: options that cannot be, or Matplotlib is missing.
        RunError: the runs have nothing of what is to be drawn.

    """
    paths: list[Path] = space.runs
    options = asked(Plot, space, problems)
    for name, kind in OF_KIND.items():
        if hasattr(space, name) and options.kind != kind:
            raise ConfigError(
                f"--{name.rstrip('_')} is an option of --kind {kind}, not of --kind {options.kind}"
            )
    look.check_figure(options.out)
    check_files({"--out": options.out}, files_of(paths))
    runs = read_runs(paths, running=True)
    if not runs.results:
        raise RunError(f"{paths[0]}: no round is finished yet, so there is nothing to draw")
    with look.style():
        drawn = _draw(runs, options)
    complete = look.save_figure(drawn.figure, options.out)
    console = make_console()
    console.print(f"{drawn.caption}.")
    if not complete:
        console.print("note: the font lacks letters of clients' names, which are boxes in the figure")
    for run in runs.results:
        if not run.finished:
            console.print(
                f"note: {run.algorithm}, seed {run.settings.seed}, is at round {run.rounds}, not finished"
            )
    console.print(f"The figure is {options.out}")
    return 0


def _draw(runs: Runs, options: Plot) -> look.Drawn:
    from ..report import figures
    from ..report.heatmap import heatmap
    from ..report.traffic import traffic

    if options.kind == "heatmap":
        return heatmap(_mixing(runs, options), options.round_, options.component, options.width)
    chosen = [run for run, _ in runs.of(options.algorithm, options.seed)]
    if options.algorithm not in (None, ALONE):  # which every method is compared with
        alone = [run for run in runs.results if run.algorithm == ALONE]
        chosen = [run for run in alone if options.seed in (None, run.settings.seed)] + chosen
    if not chosen:
        raise RunError(f"no run of {options.algorithm} with seed {options.seed} here")
    if options.kind == "curves":
        return figures.curves(chosen, options.against, options.width)
    return (figures.clients if options.kind == "clients" else traffic)(chosen, options.width)


def _mixing(runs: Runs, options: Plot) -> Relations:
    """The relations of the run to be drawn.

    Raises:
        RunError: its method does not mix client by client.

    """
    subject = Subject(runs, options.algorithm, options.seed)
    if subject.sends:
        able = [name for name in subject.groups if Relations(subject.groups[name][0]).mixes]
        others = f"these do: {', '.join(able)}" if able else "no method in these runs does"
        raise RunError(
            f"{subject.sends} A heatmap needs a method that gives clients mixtures of their own; {others}."
        )
    return subject.relations
