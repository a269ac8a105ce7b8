"""Figures for papers and for the report: curves, clients, bytes by layer, and who learns from whom."""

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ...core.errors import ConfigError, RunError, did_you_mean
from ...core.io import replace_atomically
from ...core.metrics import METRICS, MetricName
from ...runs.metrics import RunMetrics
from ..compare import BASELINE, FloatArray, average_clients, compute_gains_over_local, group_by_algorithm
from ..mixing import LastRows, MixingAnalysis, seriate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    from ...data import Federation

SUFFIXES = (".pdf", ".svg", ".eps", ".png")
COLUMN_INCHES = 3.3
"""One column of a two-column paper."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Okabe and Ito's palette for colour-blind readers, and two more colours; black is training alone."""
STROKES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 1, 1, 1, 1, 1)))
MARKERS = "osD^vP*X"
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "oooo")
UNDATED_METADATA: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure, and a sentence for its caption."""

    figure: "Figure"
    caption: str


def check_figure_path(path: Path, option: str = "--out") -> None:
    """Refuse early a figure that cannot be drawn: its format is unknown, or Matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option} {path}: expected a file ending in {', '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} {path} needs Matplotlib; install it by: pip install 'fedattune[plot]'") from error


@contextmanager
def use_style() -> Iterator[None]:
    """Draw and write figures in the style of this package; the user's matplotlibrc has no effect."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rc_file(Path(__file__).with_name("paper.mplstyle"))
        yield


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> "Figure":
    """Return an empty figure of so many inches that pyplot does not know."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def save_figure(figure: "Figure", path: Path) -> bool:
    """Write a figure in the format of the file's suffix; the same figure gives the same bytes.

    Returns whether the font has all letters of the figure; others, such as Chinese ones, are boxes.
    """
    suffix = path.suffix.lower()
    buffer = io.BytesIO()
    with use_style(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if suffix == ".eps":
            _remove_transparency(figure)
        figure.savefig(buffer, format=suffix[1:], metadata=UNDATED_METADATA.get(suffix))
    content = buffer.getvalue()
    if suffix == ".eps":  # Matplotlib always dates it
        lines = content.split(b"\n")
        content = b"\n".join(line for line in lines if not line.startswith(b"%%CreationDate:"))
    with replace_atomically(path) as new:
        new.write_bytes(content)
    lacking = [one for one in caught if "missing from font" in str(one.message)]
    for one in caught:
        if one not in lacking:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return not lacking


def _remove_transparency(figure: "Figure") -> None:
    """Mix transparent areas with white, as this format knows no transparency."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    area: Any
    for area in figure.findobj(PolyCollection):
        if (alpha := area.get_alpha()) is not None:
            share = float(np.max(alpha))
            mixed = [tuple(1 - share * (1 - part) for part in to_rgb(one)) for one in area.get_facecolor()]
            area.set(alpha=None, facecolor=mixed)


def choose_line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choose colour, stroke and marker of each method; training alone is black and dashed."""
    styles: dict[str, dict[str, Any]] = {BASELINE: {"color": "black", "linestyle": "--", "marker": "None"}}
    for k, name in enumerate(name for name in names if name != BASELINE):
        styles[name] = {
            "color": COLOURS[k % len(COLOURS)],
            "linestyle": STROKES[(k + k // len(COLOURS)) % len(STROKES)],
            "marker": MARKERS[k % len(MARKERS)],
        }
    return styles


def add_legend_below(figure: "Figure", axes: "Axes", across: int, names: Iterable[str], **options: Any) -> None:
    """Add a legend of the names that were drawn under all axes, where it covers nothing."""
    artists: list[Any] = [*axes.containers, *axes.lines]
    drawn = {one.get_label(): one for one in artists}
    names = [name for name in names if name in drawn]
    figure.legend(
        [drawn[name] for name in names],
        # Matplotlib leaves out names that begin with an underscore, but not with a space of no width.
        [f"\u200b{name}" if name.startswith("_") else name for name in names],
        loc="outside lower center",
        ncols=max(1, min(across, len(names))),
        **options,
    )


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
    """Plot the mean test accuracy over clients at the evaluation point, with one standard deviation over seeds.

    Of a target that is a number, it is the mean RMSE. Training alone is a dashed line; against bytes, it is level at
    its last accuracy if it sends none.
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
    add_legend_below(figure, axes, round(width), lines, handlelength=2.6, columnspacing=1.2)
    points = ", ".join(f"{name} {groups[name][0].evaluation_point}" for name in lines)
    band_note = ", band: one standard deviation" if max(map(len, groups.values())) > 1 else ""
    return CaptionedFigure(
        figure,
        f"Test {curve.label}, mean over clients ({_describe_seeds(groups)}{band_note}), of the model at the "
        f"point of each paper: {points}",
    )


def _average_curve(runs: Sequence[RunMetrics], against: CurveAxis) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    histories = [{e["round"]: e for e in run.history if e[run.evaluation_point]} for run in runs]
    rounds = sorted(set.intersection(*map(set, histories)))
    if not rounds:
        return None
    pick: Callable[[Any], float] = {
        "rounds": lambda e: e["round"],
        "bytes": lambda e: e["bytes"]["up"] + e["bytes"]["down"],
        "seconds": lambda e: e["seconds"],
    }[against]
    point, both = runs[0].evaluation_point, zip(runs, histories, strict=True)
    x = np.array([[pick(history[r]) for r in rounds] for history in histories], dtype=np.float64)
    y = np.array([[run.read_curve(history[r][point]) for r in rounds] for run, history in both])
    with np.errstate(invalid="ignore", over="ignore"):  # errors of models that diverged
        return x.mean(0), y.mean(0), y.std(0)


def plot_clients(
    runs: Sequence[RunMetrics], width: float | None = None, metric: MetricName = "accuracy"
) -> CaptionedFigure:
    """Plot a metric of every client by method, and its gain over training alone, as boxes and dots."""
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
    is_tall = bool(points) and not is_wide
    height = 0.9 + 0.24 * (len(accuracy) + len(points)) if is_tall else 0.5 + 0.24 * len(accuracy)
    figure = new_figure(width, height)
    heights = [len(accuracy), len(points)] if is_tall else [1]
    shape = (1, 2) if is_wide else (len(heights), 1)
    axes = figure.subplots(*shape, squeeze=False, height_ratios=heights).flat
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
    heights = [rows.index(name) for name in values]
    finite = [one[np.isfinite(one)] for one in values.values()]
    box = axes.boxplot(finite, orientation="horizontal", positions=heights, widths=0.6, whis=(5, 95), showfliers=False)
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
    """Plot the bytes that all clients sent and were sent, by layer, a pair of bars for each method."""
    groups = group_by_algorithm(runs)
    traffic = {name: _average_traffic(group) for name, group in groups.items()}
    sent = {name: ways for name, ways in traffic.items() if any(sum(parts.values()) for parts in ways.values())}
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
    out: dict[str, dict[str, float]] = {"up": {}, "down": {}}
    for run in runs:
        for way, parts in run.store.traffic().items():
            for part, size in parts.items():
                out[way][part] = out[way].get(part, 0) + size / len(runs)
    return out


def _pick_layers(bars: Sequence[dict[str, float]]) -> list[str]:
    """Pick the layers that get a colour: all, or of many the largest; in the order in which they are stored."""
    layers = list(dict.fromkeys(part for parts in bars for part in parts))
    top = sorted(layers, key=lambda part: -max(parts.get(part, 0.0) for parts in bars))[: MAX_LAYERS - 1]
    return layers if len(layers) <= MAX_LAYERS else [part for part in layers if part in top]


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
        axes.set_yticks(range(k), federation.classes or federation.labels)
    axes.set_title(f"{federation.name}, {federation.partition.get('name', '')}")
    return figure


def _lay_out_rows(axes: "Axes", n_rows: int) -> None:
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(n_rows - 0.5, -0.5)
    axes.grid(visible=True, axis="x")


def _choose_byte_unit(largest: float) -> tuple[float, str]:
    return next((unit for unit in BYTE_UNITS if largest >= unit[0]), BYTE_UNITS[-1])


def _describe_seeds(groups: dict[str, list[RunMetrics]]) -> str:
    n = max(map(len, groups.values()))
    has_splits = len({run.split for group in groups.values() for run in group}) > 1
    return f"mean over {n} {'runs (seeds and splits)' if has_splits else 'seeds'}" if n > 1 else "one seed"


MAX_AXIS_NAMES = 24
"""Clients up to which the axes show their names."""
NAME_POINTS = 6.2
"""Points that a client's name needs; its letters are 0.85 of that."""
MIN_FONT_POINTS = 4.0
MAX_NAME_LETTERS = 16
MAX_VECTOR_CLIENTS = 60
"""Clients up to which cells are drawn one by one: viewers blur images of few pixels."""
MAX_PANELS_ACROSS = 4
PANEL_INCHES = 1.45
"""Side of one matrix."""
MARGIN_INCHES = 0.9
"""Names and the colour bar beside the matrices."""
OTHERS_COLOURS = 0.75
"""Share of the colours for all weights but the outliers, where there are outliers."""
OUTLIER_SHARE = 0.02
"""Largest share of the weights that are outliers; they are fewer than one in every second row, too."""
FAINT_SHARE = 0.05
"""Share that all others have together below which weights keep the faintest colours."""
OUTLIER_RATIO = 2.0
"""Largest weight, relative to the end of the others, above which the scale is broken."""


class Scale(NamedTuple):
    """The scale of a heat map; `look.js` of the report has the same.

    The first colour is of the weight `low`, 0 or negative. At `end`, the colours of all but the outliers end. The last
    colour is of `largest`, which is `end` if the scale is not broken.
    """

    low: float
    end: float
    largest: float

    @property
    def is_broken(self) -> bool:
        return self.largest > self.end

    def make_norm(self) -> "Normalize":
        from matplotlib.colors import FuncNorm, Normalize

        if not self.is_broken:
            return Normalize(self.low, self.end)
        weights, shares = (self.low, self.end, self.largest), (0.0, OTHERS_COLOURS, 1.0)

        def forward(values: FloatArray) -> FloatArray:
            return np.ma.masked_array(np.interp(values, weights, shares), np.ma.getmask(values))

        return FuncNorm((forward, lambda values: np.interp(values, shares, weights)), self.low, self.largest)


def choose_scale(weights: FloatArray, n_clients: int) -> Scale:
    """Choose a scale on which a few weights far above all others do not make the others look alike.

    The weights are for other clients, of whole rows in any order; NaN where not known.
    """
    known = np.sort(weights[np.isfinite(weights)])[::-1]
    if not len(known) or known[0] <= 0:
        return Scale(min(0.0, float(known[-1])) if len(known) else 0.0, 1.0, 1.0)
    n_rows = len(known) / max(1, n_clients - 1)
    rank = max(1, int(min(OUTLIER_SHARE * len(known), n_rows / 2)))
    low, largest = min(0.0, float(known[-1])), float(known[0])
    end = max(float(known[min(rank, len(known) - 1)]), FAINT_SHARE / n_clients)
    is_broken = largest > OUTLIER_RATIO * end
    return Scale(low, end if is_broken else largest, largest)


def plot_heatmap(
    mixing: MixingAnalysis, round_: int | None = None, component: str | None = None, width: float | None = None
) -> CaptionedFigure:
    """Plot the last weights of every client at a round (default: the last one), receiving clients in rows.

    Clients with like labels are neighbours; where labels are not known, clients with like weights. All components
    share one scale, which ends at the largest weight for another client. It is broken where few weights are far above
    all others. Marked clients are there too, and their names have the mark.
    """
    from matplotlib.colors import Normalize

    mixing = mixing.include_marked()
    round_, last = _read_rows(mixing, round_)
    matrices = last.weights
    if component is not None and component not in matrices:
        raise RunError(f"no component {component!r} in round {round_}; {did_you_mean(component, matrices)}")
    matrices = matrices if component is None else {component: matrices[component]}
    similarity = mixing.similarity
    alike = similarity if similarity is not None else np.mean(np.stack(list(matrices.values())), axis=0)
    order = seriate(alike)[0]
    n, panels = len(order), len(matrices) + (similarity is not None)
    down = -(-panels // MAX_PANELS_ACROSS)
    across = -(-panels // down)
    side = max(PANEL_INCHES, n * NAME_POINTS / 72) if n <= MAX_AXIS_NAMES else PANEL_INCHES
    width = width or max(COLUMN_INCHES, side * across + MARGIN_INCHES)
    side = (width - MARGIN_INCHES) / across
    height = (side + 0.25) * down + (0.45 if n <= MAX_AXIS_NAMES else 0.25)
    figure = new_figure(width, height, "compressed")
    axes = list(figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    for empty in axes[panels:]:
        empty.remove()
    others = ~np.eye(n, dtype=bool)
    values = np.concatenate([matrix[others] for matrix in matrices.values()])
    scale = choose_scale(values, n)
    largest = max(float(np.nanmax(matrix)) for matrix in matrices.values())
    mappable: Any = None
    for k, (name, matrix) in enumerate(matrices.items()):
        mappable = _draw_matrix(axes[k], matrix[np.ix_(order, order)], "Blues", scale.make_norm())
        axes[k].set_title(name)
    extend: Any = "max" if largest > scale.largest * 1.001 else "neither"
    look: Any = {"fraction": 0.05, "aspect": 25 * down, "pad": 0.02}
    bar = figure.colorbar(mappable, ax=axes[:panels], extend=extend, label="Weight", **look)
    if scale.is_broken:
        ticks = sorted({scale.low, 0.0, scale.end / 2, scale.end, scale.largest})
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    if similarity is not None:
        _draw_matrix(axes[panels - 1], similarity[np.ix_(order, order)], "Greys", Normalize(0.0, 1.0))
        axes[panels - 1].set_title("label similarity")
    letters = min(0.85 * NAME_POINTS, 0.85 * 72 * side / n)
    _label_axes(axes[:panels], [_shorten_name(mixing.names[i]) for i in order], across, letters)
    return CaptionedFigure(figure, _write_caption(mixing, round_, last, matrices, scale))


def _read_rows(mixing: MixingAnalysis, round_: int | None) -> tuple[int, LastRows]:
    stored, method = mixing.rounds, mixing.run.algorithm
    if not stored:
        raise RunError(f"{method} has no mixing matrices, so there is no heatmap of it; name one that mixes models")
    round_ = stored[-1] if round_ is None else round_
    if round_ not in stored:
        near = sorted(sorted(stored, key=lambda r: (abs(r - round_), r))[:5])
        raise RunError(
            f"no mixing matrices of round {round_}; the {len(stored)} evaluated rounds from {stored[0]} to "
            f"{stored[-1]} have some; take one of the nearest, {', '.join(map(str, near))}"
        )
    return round_, mixing.read_last_rows(round_)


def _write_caption(
    mixing: MixingAnalysis, round_: int, last: LastRows, matrices: dict[str, FloatArray], scale: Scale
) -> str:
    has_labels = mixing.similarity is not None
    text = (
        f"Who learns from whom by {mixing.run.algorithm}, seed {mixing.run.settings.seed}, round {round_}: row "
        f"receives from column; clients in the order of their {'labels' if has_labels else 'weights'}; the scale ends "
        "at the largest weight for another"
    )
    if scale.is_broken:
        text += f" and is broken: three quarters of the colours end at {scale.end:.2g}, as few weights are above"
    if has_labels:
        text += "; label similarity from 0 (white) to 1 (black): 1 minus the total variation distance"
    if any(one not in (None, round_) for one in last.rounds):
        text += "; of clients that did not take part in that round, what they were given last"
    if any(np.isnan(matrix).any() for matrix in matrices.values()):
        text += "; hatched: clients without a stored row"
    return text


def _shorten_name(name: str) -> str:
    line = " ".join(name.split())
    return line if len(line) <= MAX_NAME_LETTERS else line[: MAX_NAME_LETTERS - 1] + "…"


def _draw_matrix(axes: "Axes", matrix: FloatArray, colours: str, norm: "Normalize") -> Any:
    from matplotlib import colormaps

    n = len(matrix)
    masked = np.ma.masked_invalid(matrix)
    axes.patch.set(facecolor="white", edgecolor="#999999", hatch="////" if masked.mask.any() else "")
    common: dict[str, Any] = {"cmap": colormaps[colours], "norm": norm}
    if n <= MAX_VECTOR_CLIENTS:
        # Lines of the cell's own colour close the gaps that viewers would show between cells.
        mappable: Any = axes.pcolormesh(masked, edgecolors="face", linewidth=0.1, **common)
    else:
        mappable = axes.imshow(masked, interpolation="none", extent=(0, n, n, 0), **common)
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
    for spine in axes.spines.values():
        spine.set_visible(True)
    return mappable


def _label_axes(axes: "Sequence[Axes]", names: Sequence[str], across: int, letters: float) -> None:
    n = len(names)
    for k, one in enumerate(axes):
        is_lowest, is_leftmost = k + across >= len(axes), k % across == 0
        if n <= MAX_AXIS_NAMES and letters >= MIN_FONT_POINTS:
            rotation = 90 if max(map(len, names)) > 2 or n > 12 else 0
            one.set_xticks(np.arange(n) + 0.5, names, fontsize=letters, rotation=rotation)
            one.set_yticks(np.arange(n) + 0.5, names, fontsize=letters)
        else:
            one.set(xticks=[], yticks=[])
        one.tick_params(length=0, pad=1.5, labelbottom=is_lowest, labelleft=is_leftmost)
        if is_lowest:
            one.set_xlabel("from client")
        if is_leftmost:
            one.set_ylabel("to client")
