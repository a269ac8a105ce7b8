"""The picture of a study, drawn with Matplotlib from its results alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.io import replace_atomically
from .cells import Cell
from .matching import matching, over_seeds, pairs_alike
from .outcome import Outcome
from .records import Records
from .study import Study
from .table import shorter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Outcomes = Mapping[Cell, Outcome]


STUDY_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#000000",
    "#8c564b",
    "#b8a600",
)
"""Told apart by colour-blind readers; lines have different strokes as well."""


STUDY_STROKES = ("-", "--", "-.", ":")


PANELS_ACROSS = 4  # panels beside each other


def can_draw() -> bool:
    """Whether Matplotlib is there."""
    return find_spec("matplotlib") is not None


def draw(study: Study, found: Outcomes, records: Records, path: Path) -> None:
    """Draw what the study asks for; where there is nothing to draw, remove a figure that was there."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    done = {cell: one for cell, one in found.items() if one.value}
    if study.mixing:
        done = {cell: one for cell, one in done.items() if records.mixing(one.runs[0])}
    if not done:
        path.unlink(missing_ok=True)
        return
    figure = Figure(layout="constrained")
    FigureCanvasSVG(figure)
    DRAWERS[study.figure.kind](figure, study, done, records)
    if study.figure.caption:
        figure.supxlabel(" ".join(study.figure.caption.split()), fontsize=8, wrap=True)
    with replace_atomically(path) as new:
        # No date and no random ids, so that equal results are equal files.
        import matplotlib as mpl

        with mpl.rc_context({"svg.hashsalt": study.name, "svg.fonttype": "none"}):
            figure.savefig(new, format="svg", metadata={"Date": None})


def _panels(figure: "Figure", titles: Sequence[str], width: float, height: float) -> "list[Axes]":
    across = min(PANELS_ACROSS, len(titles))
    down = -(-len(titles) // across)
    figure.set_size_inches(width * across, height * down + 0.4)
    grid = figure.subplots(down, across, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for spare in panels[len(titles) :]:
        spare.remove()
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, fontsize=10)
    return panels[: len(titles)]


def _columns(study: Study, found: Outcomes) -> list[str]:
    return [column for column in study.columns if any(cell.column == column for cell in found)]


def _title(study: Study, name: str, cells: Iterable[Outcome]) -> str:
    """A panel's name and the rounds of shortened cells in it, for a figure is looked at without its table."""
    return "\n".join([name, *dict.fromkeys(text for one in cells if (text := shorter(study, one)))])


def _titles(study: Study, found: Outcomes) -> list[str]:
    return [
        _title(study, column, [one for cell, one in found.items() if cell.column == column])
        for column in _columns(study, found)
    ]


def _style(study: Study, row: str) -> dict[str, Any]:
    place = list(study.rows).index(row)
    return {
        "color": STUDY_COLOURS[place % len(STUDY_COLOURS)],
        "linestyle": STUDY_STROKES[place // len(STUDY_COLOURS) % len(STUDY_STROKES)],
    }


def _bars(figure: "Figure", study: Study, found: Outcomes, _: Records) -> None:
    """One panel per column: a dot with its spread for ours, a ring for the paper's, per row."""
    columns = _columns(study, found)
    rows = [row for row in study.rows if any(cell.row == row for cell in found)]
    panels = _panels(figure, _titles(study, found), 3.2, 0.6 + 0.24 * len(rows))
    for number, (axes, column) in enumerate(zip(panels, columns, strict=True)):
        for place, row in enumerate(rows):
            one = found.get(Cell(row, column))
            if one is None or one.value is None:
                continue
            axes.errorbar(one.value.mean, place, xerr=one.value.std, fmt="o", color="#0072b2", markersize=4)
            printed = study.printed(one.cell)[0]
            if printed is not None and not study.gap_to:
                axes.plot(
                    printed, place, "o", markersize=8, markerfacecolor="none", markeredgecolor="#d55e00"
                )
        axes.set_yticks(
            range(len(rows)), rows if number % PANELS_ACROSS == 0 else [""] * len(rows), fontsize=7
        )
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="x", labelsize=7)
    panels[0].set_xlabel(f"{study.measure.called} in %: dot ours, ring paper", fontsize=8)


def _curves(figure: "Figure", study: Study, found: Outcomes, records: Records) -> None:
    """One panel per column: test accuracy over rounds, a line per row, averaged over the seeds."""
    columns = _columns(study, found)
    lines: dict[str, Any] = {}
    for axes, column in zip(_panels(figure, _titles(study, found), 4.6, 3.6), columns, strict=True):
        low = []
        for cell, one in found.items():
            curves = [c for run in one.runs if (c := records.curve(run, one.point)) is not None]
            if cell.column != column or not curves:
                continue
            mean = 100 * np.mean([c[f"acc_{study.measure.mean}"] for c in curves], axis=0)
            (lines[cell.row],) = axes.plot(curves[0]["round"], mean, linewidth=1.2, **_style(study, cell.row))
            low.append(float(mean[len(mean) // 8 :].min()))
        axes.set_ylim(bottom=min(low) - 2)
        axes.set_xlabel("round", fontsize=8)
        axes.set_ylabel("test accuracy in %", fontsize=8)
        axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=7)


def _sweep(figure: "Figure", study: Study, found: Outcomes, _: Records) -> None:
    """A line per row over the columns, whose names are values."""
    (axes,) = _panels(figure, [study.title], 8.4, 4.0)
    for row in study.rows:
        line = [(float(c), found[Cell(row, c)]) for c in study.columns if Cell(row, c) in found]
        if line:
            x, y = [value for value, _ in line], [one.value.mean for _, one in line if one.value]
            axes.plot(x, y, marker="o", markersize=3, label=row, **_style(study, row))
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xticks([float(c) for c in study.columns], list(study.columns), fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel(study.figure.x, fontsize=8)
    axes.set_ylabel(f"{study.measure.called} in %", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _heat(axes: "Axes", matrix: np.ndarray[Any, Any], names: Sequence[str], xlabel: str, ylabel: str) -> Any:
    """Draw a matrix, colours from its smallest to its largest value."""
    image = axes.imshow(matrix, cmap="Blues")
    axes.set_xticks(range(len(names)), names, fontsize=6, rotation=90)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_xlabel(xlabel, fontsize=7)
    axes.set_ylabel(ylabel, fontsize=7)
    return image


def _matching(figure: "Figure", study: Study, found: Outcomes, records: Records) -> None:
    """The attention of the first population of every column; pairs with a label in common are framed."""
    from matplotlib.patches import Rectangle

    shown = list(found.items())
    titles = []
    for cell, one in shown:
        rates = [rate for run in one.runs if (rate := matching(records, run, study)) is not None]
        titles.append(
            _title(study, cell.column, [one])
            + f"\nmatching rate {100 * np.mean(rates):.0f}% over {len(rates)} populations"
        )
    for axes, (_, one) in zip(_panels(figure, titles, 4.4, 4.4), shown, strict=True):
        run = one.runs[0]
        matrix = records.mixing(run)["all", study.figure.component or "attention"]
        counts = np.array(records.runs[run]["labels"])
        names = [" ".join(str(label) for label in np.nonzero(row)[0]) for row in counts]
        off = matrix.copy()
        np.fill_diagonal(off, np.nan)
        figure.colorbar(
            _heat(axes, off, names, "update of the client with labels", "asked by"), ax=axes, shrink=0.7
        )
        for i, j in np.argwhere(pairs_alike(counts)):
            axes.add_patch(
                Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="#d55e00", linewidth=1.2)
            )


def _weights(figure: "Figure", study: Study, found: Outcomes, records: Records) -> None:
    """The target's mixing weights per layer in the first, middle and last third of the rounds."""
    shown = list(found.items())
    panels = _panels(figure, [_title(study, cell.column, [one]) for cell, one in shown], 5.2, 3.6)
    for axes, one in zip(panels, [one for _cell, one in shown], strict=True):
        mixing = over_seeds(records, one)
        layers = list(dict.fromkeys(component for _, component in mixing))
        parts = ("first", "middle", "last")
        for place, layer in enumerate(layers):
            rows = np.array([mixing[part, layer][0] for part in parts])  # of client 0, the target
            groups = np.stack([rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:].mean(1)])
            for line, (name, colour) in enumerate(
                zip(
                    ("target itself", "same labels", "all but one label", "others, mean"),
                    STUDY_COLOURS,
                    strict=False,
                )
            ):
                axes.plot(
                    place + np.array([-0.25, 0, 0.25]), groups[line], marker="o", markersize=4,
                    color=colour, label=name if not place else None,
                )  # fmt: skip
        axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers], fontsize=7)
        axes.axhline(1 / len(rows[0]), color="#7f7f7f", linewidth=0.8, linestyle=":")
        axes.set_ylabel("weight in the target's model", fontsize=8)
        axes.legend(fontsize=6)
        axes.set_xlabel(
            "each layer: first, middle and last third of the rounds; dotted: equal weights", fontsize=7
        )


def _heat_map(figure: "Figure", study: Study, found: Outcomes, records: Records) -> None:
    """The mixing weights of one layer beside the labels that clients share, in the last third of the rounds."""
    shown = list(found.items())
    titles = [
        title
        for cell, one in shown
        for title in (
            _title(study, f"{cell.column}: weights", [one]),
            f"{cell.column}: labels in common",
        )
    ]
    panels = _panels(figure, titles, 3.4, 3.4)
    for number, (_, one) in enumerate(shown):
        mixing = over_seeds(records, one)
        layers = [component for part, component in mixing if part == "last"]
        layer = study.figure.component or layers[-1]
        counts = np.array(records.runs[one.runs[0]]["labels"]) > 0
        names = [str(i) for i in range(len(counts))]
        overlap = (counts[:, None] & counts[None]).sum(2)
        left, right = panels[2 * number : 2 * number + 2]
        figure.colorbar(
            _heat(left, mixing["last", layer], names, "of client", f"layer {layer}, into client"), ax=left
        )
        figure.colorbar(_heat(right, overlap, names, "client", "client"), ax=right)


DRAWERS: dict[str, Callable[["Figure", Study, Outcomes, Records], None]] = {
    "bars": _bars,
    "curves": _curves,
    "sweep": _sweep,
    "matching": _matching,
    "weights": _weights,
    "heat_map": _heat_map,
}
