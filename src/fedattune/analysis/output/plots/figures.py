"""Figures: accuracy by rounds, accuracy of clients, bytes by layer, and the labels of each client."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ....core.errors import RunError
from ....core.metrics import METRICS, MetricName
from ....runs.metrics import RunMetrics
from ...compare import BASELINE, FloatArray, average_clients, compute_gains_over_local, group_by_algorithm
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
    from matplotlib.figure import Figure

    from ....data import Federation

MAX_DOTS = 60
"""Clients up to which each is a dot."""
MAX_LAYERS = 8
"""Layers with a colour of their own; of more, the smallest are taken together."""
OTHER_LAYERS = "other layers"
MAX_NAMED = 40
"""Clients, or labels, up to which the axis names each."""
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))

CurveAxis = Literal["rounds", "bytes", "seconds"]


def plot_curves(
    runs: Sequence[RunMetrics], against: CurveAxis = "rounds", width: float | None = None
) -> CaptionedFigure:
    """Plot the mean test accuracy over clients at the headline point, with one standard deviation over seeds.

    Of a target that is a number, it is the mean RMSE over clients.

    Training alone is a dashed line. Against bytes, it is level at its last accuracy if it sends none.

    Args:
        runs: the runs of some methods and seeds.
        against: the horizontal axis.
        width: inches; default: one column.

    Raises:
        RunError: nothing was evaluated.

    """
    groups = group_by_algorithm(runs)
    lines = {name: line for name, group in groups.items() if (line := _average_curve(group, against))}
    if not lines:
        raise RunError("no test accuracy of any round is stored, so there are no curves; see --kind bytes")
    width = width or COLUMN_INCHES
    figure = new_figure(width, 0.62 * width + 0.16 * (2 + len(lines) // 3))
    axes = figure.add_subplot()
    largest = max(float(x.max()) for x, _, _ in lines.values())
    scale, unit = _choose_byte_unit(largest) if against == "bytes" else (1.0, "")
    styles = choose_line_styles(list(groups))
    for k, (name, (x, mean, std)) in enumerate(lines.items()):
        style = styles[name]
        if against == "bytes" and not x.any():
            axes.axhline(mean[-1], label=name, color=style["color"], linestyle=style["linestyle"])
            continue
        every = max(1, len(x) // 8)
        axes.plot(x / scale, mean, label=name, markevery=(k % every, every), zorder=3, **style)
        if len(groups[name]) > 1:
            band = {"color": style["color"], "alpha": 0.18, "linewidth": 0}
            axes.fill_between(x / scale, mean - std, mean + std, zorder=2, **band)
    label = {"rounds": "Round", "bytes": f"Sent and received ({unit})", "seconds": "Seconds"}[against]
    curve = runs[0].curve_metric
    axes.set(xlabel=label, ylabel=f"Mean test {curve.label}" + " (%)" * curve.is_percent)
    axes.margins(x=0.02)
    axes.grid(visible=True)
    add_legend_below(figure, axes, round(width), handlelength=2.6, columnspacing=1.2)
    points = ", ".join(f"{name} {groups[name][0].headline}" for name in lines)
    band_note = ", band: one standard deviation" if _count_seeds(groups) > 1 else ""
    return CaptionedFigure(
        figure,
        f"Test {curve.label}, mean over clients ({_describe_seeds(groups)}{band_note}), of the model at the "
        f"point of each paper: {points}",
    )


def _average_curve(
    runs: Sequence[RunMetrics], against: CurveAxis
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Return x, mean and standard deviation over the seeds, accuracy in percent, at the rounds that all evaluated."""
    histories = [{e["round"]: e for e in run.history if e[run.headline]} for run in runs]
    rounds = sorted(set.intersection(*map(set, histories)))
    if not rounds:
        return None
    pick: Callable[[Any], float] = {
        "rounds": lambda e: e["round"],
        "bytes": lambda e: e["bytes"]["up"] + e["bytes"]["down"],
        "seconds": lambda e: e["seconds"],
    }[against]
    point = runs[0].headline
    x = np.array([[pick(history[r]) for r in rounds] for history in histories], dtype=np.float64)
    y = np.array(
        [
            [run.read_curve(history[r][point]) for r in rounds]
            for run, history in zip(runs, histories, strict=True)
        ]
    )
    return x.mean(0), y.mean(0), y.std(0)


def plot_clients(
    runs: Sequence[RunMetrics], width: float | None = None, metric: MetricName = "accuracy"
) -> CaptionedFigure:
    """Plot a metric of every client by method, and its gain over training alone, as boxes and dots.

    Args:
        runs: the runs.
        width: width in inches.
        metric: the metric.

    Raises:
        RunError: no client was evaluated.

    """
    groups = group_by_algorithm(runs)
    measure = METRICS[metric]
    label = f"Test {measure.label} of a client" + " (%)" * measure.is_percent
    accuracy = {name: measure.scale * average_clients(group, metric) for name, group in groups.items()}
    accuracy = {name: values for name, values in accuracy.items() if np.isfinite(values).any()}
    if not accuracy:
        raise RunError(f"no client has a test {measure.label} in these runs, so there is nothing to draw")
    gains = {name: compute_gains_over_local(groups, name, metric) for name in accuracy if name != BASELINE}
    points = {name: measure.scale * gain for name, gain in gains.items() if gain is not None}
    width = width or COLUMN_INCHES
    is_wide = bool(points) and width >= 5
    height = 0.5 + 0.24 * len(accuracy)
    if points and not is_wide:
        height = 0.9 + 0.24 * (len(accuracy) + len(points))
    figure = new_figure(width, height)
    heights = [len(accuracy), len(points)] if points else [1]
    axes = (
        figure.subplots(1, 2, squeeze=False)
        if is_wide
        else figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    ).flat
    styles = choose_line_styles(list(groups))
    _draw_boxes(axes[0], accuracy, styles, list(accuracy))
    axes[0].set_xlabel(label)
    if points:
        axes[1].axvline(0, color="black", linestyle="--", linewidth=0.8, zorder=1)
        _draw_boxes(axes[1], points, styles, list(accuracy if is_wide else points))
        axes[1].tick_params(labelleft=not is_wide)
        axes[1].set_xlabel(f"Gain over local ({measure.points})")
    n = len(next(iter(accuracy.values())))
    dots = "a dot per client, " if n <= MAX_DOTS else ""
    return CaptionedFigure(
        figure,
        f"Test {measure.label} of {n:,} clients ({_describe_seeds(groups)}): {dots}box: quartiles and median, "
        "whiskers: 5th and 95th percentile",
    )


def _draw_boxes(
    axes: "Axes", values: dict[str, FloatArray], styles: dict[str, dict[str, Any]], rows: Sequence[str]
) -> None:
    """Draw a box per method in its row, and dots if there are few; dots always move up and down alike."""
    heights = [rows.index(name) for name in values]
    finite = [one[np.isfinite(one)] for one in values.values()]
    box = axes.boxplot(
        finite, orientation="horizontal", positions=heights, widths=0.6, whis=(5, 95), showfliers=False
    )
    for line in (*box["boxes"], *box["whiskers"], *box["caps"]):
        line.set(color="#777777", linewidth=0.7)
    for line in box["medians"]:
        line.set(color="black", linewidth=1.2, zorder=4)
    for row, name, dots in zip(heights, values, finite, strict=True):
        if len(dots) <= MAX_DOTS:
            jitter = np.random.default_rng(0).uniform(-0.22, 0.22, len(dots))
            marker = "o" if name == BASELINE else styles[name]["marker"]
            style = {"color": styles[name]["color"], "marker": marker, "linestyle": "none"}
            axes.plot(dots, row + jitter, markersize=3.2, zorder=3, **style)
    axes.set_yticks(range(len(rows)), rows)
    _lay_out_rows(axes, len(rows))


def plot_traffic(runs: Sequence[RunMetrics], width: float | None = None) -> CaptionedFigure:
    """Plot the bytes that all clients sent and were sent, by layer, a pair of bars for each method.

    Raises:
        RunError: nothing was sent.

    """
    groups = group_by_algorithm(runs)
    traffic = {name: _average_traffic(group) for name, group in groups.items()}
    sent = {
        name: ways for name, ways in traffic.items() if any(sum(parts.values()) for parts in ways.values())
    }
    if not sent:
        raise RunError(f"nothing was sent in these runs ({', '.join(groups)}), so there are no bytes to draw")
    bars = [parts for ways in sent.values() for parts in ways.values()]
    layers = _pick_layers(bars)
    scale, unit = _choose_byte_unit(max(sum(parts.values()) for parts in bars))
    width = width or COLUMN_INCHES
    across = max(1, round(1.2 * width))
    figure = new_figure(width, 0.55 + 0.36 * len(sent) + 0.17 * (-(-len(layers) // across) + 1))
    axes = figure.add_subplot()
    for k, parts in enumerate(bars):
        sizes = {layer: parts[layer] for layer in layers if layer in parts}
        if rest := sum(parts.values()) - sum(sizes.values()):
            sizes[OTHER_LAYERS] = rest
        start = 0.0
        for layer, size in sizes.items():
            colour = layers.index(layer) if layer in layers else MAX_LAYERS - 1
            look: Any = {"facecolor": COLOURS[colour], "hatch": HATCHES[colour], "edgecolor": "white"}
            height = k // 2 + 0.19 * (2 * (k % 2) - 1)
            axes.barh(height, size / scale, 0.34, left=start, label=layer, linewidth=0.4, **look)
            start += size / scale
    heights = [row + 0.19 * side for row in range(len(sent)) for side in (-1, 1)]
    axes.set_yticks(heights, [tick for name in sent for tick in (f"{name}  up", "down")])
    _lay_out_rows(axes, len(sent))
    axes.set_xlabel(f"All clients and rounds ({unit})")
    add_legend_below(figure, axes, across, [*layers, OTHER_LAYERS], handlelength=1.4, title="Layer")
    silent = ", ".join(name for name in groups if name not in sent)
    note = f"; nothing was sent by {silent}" if silent else ""
    return CaptionedFigure(figure, f"Bytes that all clients sent (up) and were sent (down), by layer{note}")


def _average_traffic(runs: Sequence[RunMetrics]) -> dict[str, dict[str, float]]:
    """Return direction -> layer -> bytes, the mean over seeds."""
    out: dict[str, dict[str, float]] = {"up": {}, "down": {}}
    for run in runs:
        for way, parts in run.store.traffic().items():
            for part, size in parts.items():
                out[way][part] = out[way].get(part, 0) + size / len(runs)
    return out


def _pick_layers(bars: Sequence[dict[str, float]]) -> list[str]:
    """Pick the layers that get a colour: all, or of many the largest; in the order in which they are stored."""
    largest: dict[str, float] = {}
    for parts in bars:
        for part, size in parts.items():
            largest[part] = max(largest.get(part, 0.0), size)
    if len(largest) <= MAX_LAYERS:
        return list(largest)
    top = sorted(largest, key=lambda part: -largest[part])[: MAX_LAYERS - 1]
    return [part for part in largest if part in top]


def plot_label_counts(federation: "Federation") -> "Figure":
    """Plot a disc for each label of each client; its area is the number of samples."""
    counts = federation.label_counts()
    rows, labels = counts.nonzero()
    n, k = counts.shape
    figure = new_figure(min(2 + 0.3 * n, 24), min(1.6 + 0.3 * k, 24))
    axes = figure.add_subplot()
    cell = 72 * min(figure.get_figwidth() / (n + 4), figure.get_figheight() / (k + 3))  # points
    sizes = counts[rows, labels] / counts.max() * (0.95 * cell) ** 2
    axes.scatter(rows, labels, s=sizes, color=COLOURS[0], linewidths=0)
    axes.set(xlabel="client", ylabel="label", xlim=(-0.7, n - 0.3), ylim=(-0.7, k - 0.3))
    if n <= MAX_NAMED:
        axes.set_xticks(range(n), federation.names, rotation=90 if max(map(len, federation.names)) > 2 else 0)
    if k <= MAX_NAMED:
        axes.set_yticks(range(k), federation.classes)
    axes.set_title(f"{federation.name}, {federation.partition.get('name', '')}")
    return figure


def _lay_out_rows(axes: "Axes", n_rows: int) -> None:
    """Put the first of some rows on top."""
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(n_rows - 0.5, -0.5)
    axes.grid(visible=True, axis="x")


def _choose_byte_unit(largest: float) -> tuple[float, str]:
    """Choose the largest unit of bytes that is not above a number: its bytes and its name."""
    return next((unit for unit in BYTE_UNITS if largest >= unit[0]), BYTE_UNITS[-1])


def _count_seeds(groups: dict[str, list[RunMetrics]]) -> int:
    return max(len(group) for group in groups.values())


def _describe_seeds(groups: dict[str, list[RunMetrics]]) -> str:
    seeds = _count_seeds(groups)
    return f"mean over {seeds} seeds" if seeds > 1 else "one seed"
