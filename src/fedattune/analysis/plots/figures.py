"""Figures for papers, drawn from the numbers of runs: curves, and accuracy of clients.

The figure of what travelled: bytes by layer and direction.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...core.errors import RunError
from ...training.metrics import RunMetrics
from ..compare import BASELINE, FloatArray, compute_client_accuracy, compute_gains, group_by_algorithm
from .style import (
    COLOURS,
    COLUMN_INCHES,
    HATCHES,
    CaptionedFigure,
    add_legend_below,
    choose_line_styles,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LAYERS = 8
"""Layers that get a colour of their own in the bytes; of more, the smallest are taken together."""


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


_ALL_LAYERS, _OTHER_LAYERS = "all of it", "other layers"


def plot_traffic(runs: Sequence[RunMetrics], width: float | None = None) -> CaptionedFigure:
    """Bytes that all clients sent and were sent, by layer, a pair of bars for each method; means over the seeds.

    Raises:
        RunError: nothing was sent.

    """
    groups = group_by_algorithm(runs)
    found = {name: _average_traffic(group) for name, group in groups.items()}
    sent = {name: ways for name, ways in found.items() if any(sum(parts.values()) for parts in ways.values())}
    if not sent:
        raise RunError(f"nothing was sent in these runs ({', '.join(groups)}), so there are no bytes to draw")
    names = _pick_layers([parts for ways in sent.values() for parts in ways.values()])
    scale, unit = choose_byte_unit(
        max(sum(parts.values()) for ways in sent.values() for parts in ways.values())
    )
    width = width or COLUMN_INCHES
    legend_rows = -(-len(names) // max(1, round(1.2 * width)))
    figure = new_figure(width, 0.55 + 0.36 * len(sent) + 0.17 * (legend_rows + 1))
    axes = figure.add_subplot()
    places, ticks = [], []
    for row, (name, ways) in enumerate(sent.items()):
        for k, way in enumerate(("up", "down")):
            place, left = row + 0.19 * (2 * k - 1), 0.0
            places.append(place)
            ticks.append(f"{name}  {way}" if k == 0 else way)
            known = [part for part in names if part in ways[way]]
            sizes = {part: ways[way][part] for part in known}
            if rest := sum(ways[way].values()) - sum(sizes.values()):
                sizes[_OTHER_LAYERS] = rest
            for part, size in sizes.items():
                axes.barh(place, size / scale, 0.34, left=left, label=part, **_bar_style(names, part))
                left += size / scale
    axes.set_yticks(places, ticks)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(sent) - 0.5, -0.5)
    axes.set_xlabel(f"All clients and rounds ({unit})")
    axes.grid(visible=True, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    once = {part: handles[labels.index(part)] for part in [*names, _OTHER_LAYERS] if part in labels}
    if set(once) != {_ALL_LAYERS}:
        across = max(1, min(round(1.2 * width), len(once)))
        figure.legend(
            once.values(),
            once.keys(),
            loc="outside lower center",
            ncols=across,
            handlelength=1.4,
            title="Layer",
        )
    none = [name for name in groups if name not in sent]
    said = f"; nothing was sent by {', '.join(none)}" if none else ""
    old = [name for name in sent if _ALL_LAYERS in sent[name]["up"] or _ALL_LAYERS in sent[name]["down"]]
    said += f"; not stored by layer: {', '.join(old)}" if old else ""
    return CaptionedFigure(figure, f"Bytes that all clients sent (up) and were sent (down), by layer{said}")


def choose_byte_unit(largest: float) -> tuple[float, str]:
    """The largest unit of bytes that is not above a number, and its name."""
    return next((pair for pair in BYTE_UNITS if largest >= pair[0]), BYTE_UNITS[-1])


def _average_traffic(runs: Sequence[RunMetrics]) -> dict[str, dict[str, float]]:
    """Direction -> layer -> bytes, the mean over seeds; older runs know only how much it was in all."""
    out: dict[str, dict[str, float]] = {"up": {}, "down": {}}
    for run in runs:
        stored = run.store.traffic()
        for way, total in (("up", run.bytes_up), ("down", run.bytes_down)):
            parts = stored[way] if any(stored.values()) else {_ALL_LAYERS: total} if total else {}
            for part, size in parts.items():
                out[way][part] = out[way].get(part, 0) + size / len(runs)
    return out


def _pick_layers(found: Sequence[dict[str, float]]) -> list[str]:
    """The layers that get a colour: all, or of many the largest; in the order in which they are stored."""
    largest: dict[str, float] = {}
    for parts in found:
        for part, size in parts.items():
            largest[part] = max(largest.get(part, 0.0), size)
    if len(largest) <= MAX_LAYERS:
        return list(largest)
    kept = sorted(largest, key=lambda part: -largest[part])[: MAX_LAYERS - 1]
    return [part for part in largest if part in kept]


def _bar_style(names: Sequence[str], part: str) -> dict[str, Any]:
    place = names.index(part) if part in names else MAX_LAYERS - 1
    return {
        "facecolor": COLOURS[place],
        "hatch": HATCHES[place],
        "edgecolor": "white",
        "linewidth": 0.4,
    }


MAX_DOTS = 60
"""Clients up to whom each is a dot."""


CurveAxis = Literal["rounds", "bytes", "seconds"]


def plot_curves(
    runs: Sequence[RunMetrics], against: CurveAxis = "rounds", width: float | None = None
) -> CaptionedFigure:
    """Mean test accuracy over clients at the headline point, with a band of one standard deviation over seeds.

    Training alone is a dashed line; against bytes, where it sends none, it is level at what it reaches in the end.

    Raises:
        RunError: nothing was evaluated.

    """
    groups = group_by_algorithm(runs)
    lines = {
        name: found for name, group in groups.items() if (found := _average_curve(group, against)) is not None
    }
    if not lines:
        raise RunError("no test accuracy of any round is stored, so there are no curves; see --kind bytes")
    width = width or COLUMN_INCHES
    figure = new_figure(width, 0.62 * width + 0.16 * (2 + len(lines) // 3))
    axes = figure.add_subplot()
    scale, unit = (
        choose_byte_unit(max(float(x.max()) for x, _, _ in lines.values()))
        if against == "bytes"
        else (1.0, "")
    )
    look, seeds = choose_line_styles(list(groups)), max(len(group) for group in groups.values())
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
    add_legend_below(figure, axes, max(1, round(width)), handlelength=2.6, columnspacing=1.2)
    spread = f"mean over {seeds} seeds, band: one standard deviation" if seeds > 1 else "one seed"
    points = ", ".join(f"{name} {group[0].headline}" for name, group in groups.items() if name in lines)
    return CaptionedFigure(
        figure,
        f"Test accuracy, mean over clients ({spread}), of the model at the point of each paper: {points}",
    )


def plot_clients(runs: Sequence[RunMetrics], width: float | None = None) -> CaptionedFigure:
    """Accuracy of every client by method, and beside it what it gains over training alone, as boxes and dots.

    Raises:
        RunError: no client was evaluated.

    """
    groups = group_by_algorithm(runs)
    accuracy = {name: 100 * compute_client_accuracy(group) for name, group in groups.items()}
    accuracy = {name: values for name, values in accuracy.items() if np.isfinite(values).any()}
    if not accuracy:
        raise RunError("no client has a test accuracy in these runs, so there is nothing to draw")
    gained = {
        name: found
        for name in accuracy
        if name != BASELINE and (found := compute_gains(groups, name)) is not None
    }
    width = width or COLUMN_INCHES
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
    look, seeds = choose_line_styles(list(groups)), max(len(group) for group in groups.values())
    axes = list(grid.flat)
    _draw_boxes(axes[0], accuracy, look)
    axes[0].set_xlabel("Test accuracy of a client (%)")
    if gained:
        axes[1].axvline(0, color="black", linestyle="--", linewidth=0.8, zorder=1)
        rows = list(accuracy) if beside else list(gained)
        _draw_boxes(axes[1], {name: 100 * values for name, values in gained.items()}, look, rows)
        if beside:
            axes[1].tick_params(labelleft=False)
        axes[1].set_xlabel("Gain over local (points)")
    of = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    n = len(next(iter(accuracy.values())))
    dots = "a dot per client, " if n <= MAX_DOTS else ""
    return CaptionedFigure(
        figure,
        f"Test accuracy of {n:,} clients ({of}): {dots}box: quartiles and median, whiskers: 5th and 95th percentile",
    )


def _average_curve(
    runs: Sequence[RunMetrics], against: CurveAxis
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Where along the axis, mean and standard deviation over the seeds in percent, at rounds that all evaluated."""
    found = [{e["round"]: e for e in run.history if e[run.headline]} for run in runs]
    rounds = sorted(set.intersection(*(set(entries) for entries in found)))
    if not rounds:
        return None
    point = runs[0].headline
    reached = np.array([[100 * entries[r][point]["acc_uniform"] for r in rounds] for entries in found])
    along: dict[CurveAxis, Any] = {
        "rounds": lambda e: e["round"],
        "bytes": lambda e: e["bytes"]["up"] + e["bytes"]["down"],
        "seconds": lambda e: e["seconds"],
    }
    x = np.array([[along[against](entries[r]) for r in rounds] for entries in found], dtype=np.float64)
    return x.mean(0), reached.mean(0), reached.std(0)


def _draw_boxes(
    axes: "Axes", values: dict[str, FloatArray], look: dict[str, dict[str, Any]], rows: Sequence[str] = ()
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
        if len(found) <= MAX_DOTS:
            away = np.random.default_rng(0).uniform(-0.22, 0.22, len(found))
            marker = "o" if name == BASELINE else look[name]["marker"]
            style = {"color": look[name]["color"], "marker": marker, "linestyle": "none"}
            axes.plot(found, row + away, markersize=3.2, zorder=3, **style)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
