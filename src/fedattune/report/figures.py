"""Figures for papers, drawn from the numbers of runs: curves, and accuracy of clients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..compare import ALONE, Array, by_algorithm, client_accuracy, gains
from ..errors import RunError
from ..numbers import Numbers
from .figure_style import COLUMN, Drawn, legend_below, looks, new_figure
from .traffic import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_DOTS = 60
"""Clients up to whom each is a dot."""
Axis = Literal["rounds", "bytes", "seconds"]


def curves(runs: Sequence[Numbers], against: Axis = "rounds", width: float | None = None) -> Drawn:
    """Mean test accuracy over clients at the headline point, with a band of one standard deviation over seeds.

    Training alone is a dashed line; against bytes, where it sends none, it is level at what it reaches in the end.

    Raises:
        RunError: nothing was evaluated.

    """
    groups = by_algorithm(runs)
    lines = {name: found for name, group in groups.items() if (found := _curve(group, against)) is not None}
    if not lines:
        raise RunError("no test accuracy of any round is stored, so there are no curves; see --kind bytes")
    width = width or COLUMN
    figure = new_figure(width, 0.62 * width + 0.16 * (2 + len(lines) // 3))
    axes = figure.add_subplot()
    scale, unit = (
        unit_of(max(float(x.max()) for x, _, _ in lines.values())) if against == "bytes" else (1.0, "")
    )
    look, seeds = looks(list(groups)), max(len(group) for group in groups.values())
    for place, (name, (x, mean, std)) in enumerate(lines.items()):
        level = against == "bytes" and not x.any()
        style = {key: value for key, value in look[name].items() if key != "marker" or not level}
        if level:
            axes.axhline(mean[-1], label=name, **style)
            continue
        every = max(1, len(x) // 8)
        axes.plot(x / scale, mean, label=name, markevery=(place % every, every), zorder=3, **style)
        if len(groups[name]) > 1:
            band = {"color": look[name]["color"], "alpha": 0.18, "linewidth": 0}
            axes.fill_between(x / scale, mean - std, mean + std, zorder=2, **band)
    label = {"rounds": "Round", "bytes": f"Sent and received ({unit})", "seconds": "Seconds"}[against]
    axes.set(xlabel=label, ylabel="Mean test accuracy (%)")
    axes.margins(x=0.02)
    axes.grid(visible=True)
    legend_below(figure, axes, max(1, round(width)), handlelength=2.6, columnspacing=1.2)
    spread = f"mean over {seeds} seeds, band: one standard deviation" if seeds > 1 else "one seed"
    points = ", ".join(f"{name} {group[0].headline}" for name, group in groups.items() if name in lines)
    return Drawn(
        figure,
        f"Test accuracy, mean over clients ({spread}), of the model at the point of each paper: {points}",
    )


def clients(runs: Sequence[Numbers], width: float | None = None) -> Drawn:
    """Accuracy of every client by method, and beside it what it gains over training alone, as boxes and dots.

    Raises:
        RunError: no client was evaluated.

    """
    groups = by_algorithm(runs)
    accuracy = {name: 100 * client_accuracy(group) for name, group in groups.items()}
    accuracy = {name: values for name, values in accuracy.items() if np.isfinite(values).any()}
    if not accuracy:
        raise RunError("no client has a test accuracy in these runs, so there is nothing to draw")
    gained = {
        name: found for name in accuracy if name != ALONE and (found := gains(groups, name)) is not None
    }
    width = width or COLUMN
    panels = 2 if gained else 1
    beside = panels == 2 and width >= 5
    height = 0.5 + 0.24 * len(accuracy)
    tall = height if beside or panels == 1 else 0.9 + 0.24 * (len(accuracy) + len(gained))
    figure = new_figure(width, tall)
    if beside:
        grid = figure.subplots(1, 2, squeeze=False)
    else:
        heights = [len(accuracy), len(gained)][:panels]
        grid = figure.subplots(panels, 1, squeeze=False, height_ratios=heights)
    look, seeds = looks(list(groups)), max(len(group) for group in groups.values())
    axes = list(grid.flat)
    _boxes(axes[0], accuracy, look)
    axes[0].set_xlabel("Test accuracy of a client (%)")
    if gained:
        axes[1].axvline(0, color="black", linestyle="--", linewidth=0.8, zorder=1)
        rows = list(accuracy) if beside else list(gained)
        _boxes(axes[1], {name: 100 * values for name, values in gained.items()}, look, rows)
        if beside:
            axes[1].tick_params(labelleft=False)
        axes[1].set_xlabel("Gain over local (points)")
    of = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    n = len(next(iter(accuracy.values())))
    dots = "a dot per client, " if n <= MOST_DOTS else ""
    return Drawn(
        figure,
        f"Test accuracy of {n:,} clients ({of}): {dots}box: quartiles and median, whiskers: 5th and 95th percentile",
    )


def _curve(runs: Sequence[Numbers], against: Axis) -> tuple[Array, Array, Array] | None:
    """Where along the axis, mean and standard deviation over the seeds in percent, at rounds that all evaluated."""
    found = [{e["round"]: e for e in run.history if e[run.headline]} for run in runs]
    rounds = sorted(set.intersection(*(set(entries) for entries in found)))
    if not rounds:
        return None
    point = runs[0].headline
    reached = np.array([[100 * entries[r][point]["acc_uniform"] for r in rounds] for entries in found])
    along: dict[Axis, Any] = {
        "rounds": lambda e: e["round"],
        "bytes": lambda e: e["bytes"]["up"] + e["bytes"]["down"],
        "seconds": lambda e: e["seconds"],
    }
    x = np.array([[along[against](entries[r]) for r in rounds] for entries in found], dtype=np.float64)
    return x.mean(0), reached.mean(0), reached.std(0)


def _boxes(
    axes: "Axes", values: dict[str, Array], look: dict[str, dict[str, Any]], rows: Sequence[str] = ()
) -> None:
    """A box per method in its row, and dots where these are few; dots are moved up and down, always by the same."""
    names, rows = list(values), rows or list(values)
    places = [rows.index(name) for name in names]
    known = [values[name][np.isfinite(values[name])] for name in names]
    box = axes.boxplot(
        known,
        orientation="horizontal",
        positions=places,
        widths=0.6,
        whis=(5, 95),
        showfliers=False,
    )
    for line in (*box["boxes"], *box["whiskers"], *box["caps"]):
        line.set(color="#777777", linewidth=0.7)
    for line in box["medians"]:
        line.set(color="black", linewidth=1.2, zorder=4)
    for row, name, found in zip(places, names, known, strict=True):
        if len(found) <= MOST_DOTS:
            away = np.random.default_rng(0).uniform(-0.22, 0.22, len(found))
            marker = "o" if name == ALONE else look[name]["marker"]
            style = {"color": look[name]["color"], "marker": marker, "linestyle": "none"}
            axes.plot(found, row + away, markersize=3.2, zorder=3, **style)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
