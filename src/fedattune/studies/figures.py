"""The figure of a study, drawn with Matplotlib from its results alone, and the numbers behind mixing matrices.

Such a number is IGFL's matching rate: how often attention finds equal labels.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import ConfigError, did_you_mean
from ..core.io import replace_atomically
from .outcome import Outcome, StudyResults, name_cells
from .study import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = np.ndarray[Any, Any]
WEIGHT_GROUPS = ("target itself", "same labels", "all but one label", "others, mean")
"""Clients 0, 1, 2 and the others of pFedLA's figure 5."""
STUDY_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000", "#8c564b", "#b8a600",
)  # fmt: skip
"""Colours for colour-blind readers; lines have different strokes as well."""
STUDY_STROKES = ("-", "--", "-.", ":")
PANELS_ACROSS = 4


def can_draw() -> bool:
    """Return True if Matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(results: StudyResults, path: Path) -> None:
    """Draw the figure of a study; remove an old one if there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    study = results.study
    outcomes = {
        cell: one
        for cell, one in results.outcomes.items()
        if one.value and (not study.mixing or results.records.mixing(one.runs[0]))
    }
    if not outcomes:
        path.unlink(missing_ok=True)
        return
    figure = Figure(layout="constrained")
    FigureCanvasSVG(figure)
    DRAWERS[study.figure.kind](_Drawing(figure, results, outcomes))
    absent: dict[str, list[Cell]] = {}
    for cell, one in results.outcomes.items():
        if one.not_run:
            absent.setdefault(one.not_run, []).append(cell)
    caption = [" ".join(study.figure.caption.split())]
    caption += [f"{rounds}: {name_cells(cells, results)}" for rounds, cells in absent.items()]
    if text := "\n".join(filter(None, caption)):
        figure.supxlabel(text, fontsize=8, wrap=True)
    # No date and no random ids, so that equal results give equal files.
    settings: dict[Any, Any] = {"svg.hashsalt": study.name, "svg.fonttype": "none"}
    with replace_atomically(path) as new, rc_context(settings):
        figure.savefig(new, format="svg", metadata={"Date": None})


class _Drawing:
    """A figure with panels, and the outcomes to draw into it."""

    def __init__(self, figure: "Figure", results: StudyResults, outcomes: dict[Cell, Outcome]) -> None:
        self.figure, self.results, self.outcomes = figure, results, outcomes
        self.study = results.study
        self.columns = [c for c in self.study.columns if any(cell.column == c for cell in outcomes)]
        self.rows = [r for r in self.study.rows if any(cell.row == r for cell in outcomes)]

    def add_panels(self, titles: Sequence[str], width: float, height: float) -> "list[Axes]":
        """Add one panel per title; `width` and `height` are in inches."""
        across = min(PANELS_ACROSS, len(titles))
        down = -(-len(titles) // across)
        self.figure.set_size_inches(width * across, height * down + 0.4)
        panels: list[Axes] = list(self.figure.subplots(down, across, squeeze=False).flat)
        for spare in panels[len(titles) :]:
            spare.remove()
        for axes, title in zip(panels, titles, strict=False):
            axes.set_title(title, fontsize=10)
        return panels[: len(titles)]

    def add_column_panels(self, width: float, height: float) -> "list[Axes]":
        titles = [
            self.title(column, *(one for cell, one in self.outcomes.items() if cell.column == column))
            for column in self.columns
        ]
        return self.add_panels(titles, width, height)

    def title(self, name: str, *outcomes: Outcome) -> str:
        """Make a panel's title, with the rounds of shortened cells: a reader may see the figure without its table."""
        rounds = (one.missing_rounds for one in outcomes)
        return "\n".join([name, *dict.fromkeys(filter(None, rounds))])

    def style(self, row: str) -> dict[str, Any]:
        number = list(self.study.rows).index(row)
        colours, strokes = len(STUDY_COLOURS), len(STUDY_STROKES)
        return {"color": STUDY_COLOURS[number % colours], "linestyle": STUDY_STROKES[number // colours % strokes]}

    def add_matrix(self, axes: "Axes", matrix: Any, names: Sequence[str], x: str, y: str, **bar: Any) -> None:
        """Draw a matrix with its colour bar, from its smallest to its largest value."""
        image = axes.imshow(matrix, cmap="Blues")
        axes.set_xticks(range(len(names)), names, fontsize=6, rotation=90)
        axes.set_yticks(range(len(names)), names, fontsize=6)
        axes.set_xlabel(x, fontsize=7)
        axes.set_ylabel(y, fontsize=7)
        self.figure.colorbar(image, ax=axes, **bar)


def _draw_bars(drawing: _Drawing) -> None:
    study, rows = drawing.study, drawing.rows
    panels = drawing.add_column_panels(3.2, 0.6 + 0.24 * len(rows))
    for number, (axes, column) in enumerate(zip(panels, drawing.columns, strict=True)):
        for height, row in enumerate(rows):
            one = drawing.outcomes.get(Cell(row, column))
            if one is None or one.value is None:
                continue
            axes.errorbar(one.value.mean, height, xerr=one.value.std, fmt="o", color="#0072b2", markersize=4)
            paper = study.paper_value(one.cell)[0]
            if paper is not None and not study.gap_to:
                axes.plot(paper, height, "o", markersize=8, markerfacecolor="none", markeredgecolor="#d55e00")
        names = rows if number % PANELS_ACROSS == 0 else [""] * len(rows)
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="x", labelsize=7)
    panels[0].set_xlabel(f"{study.measure.called} in %: dot ours, ring paper", fontsize=8)


def _draw_curves(drawing: _Drawing) -> None:
    records = drawing.results.records
    lines: dict[str, Any] = {}
    for axes, column in zip(drawing.add_column_panels(4.6, 3.6), drawing.columns, strict=True):
        low = []
        for cell, one in drawing.outcomes.items():
            curves = [curve for run in one.runs if (curve := records.curve(run, one.point)) is not None]
            if cell.column != column or not curves:
                continue
            mean = 100 * np.mean([c[f"acc_{drawing.study.measure.mean}"] for c in curves], axis=0)
            (lines[cell.row],) = axes.plot(curves[0]["round"], mean, linewidth=1.2, **drawing.style(cell.row))
            low.append(float(mean[len(mean) // 8 :].min()))
        axes.set_ylim(bottom=min(low) - 2)
        axes.set_xlabel("round", fontsize=8)
        axes.set_ylabel("test accuracy in %", fontsize=8)
        axes.grid(alpha=0.3)
    drawing.figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=7)


def _draw_sweep(drawing: _Drawing) -> None:
    study = drawing.study
    (axes,) = drawing.add_panels([study.title], 8.4, 4.0)
    for row in study.rows:
        line = [(float(c), drawing.outcomes[Cell(row, c)]) for c in study.columns if Cell(row, c) in drawing.outcomes]
        if line:
            x, y = [value for value, _ in line], [one.value.mean for _, one in line if one.value]
            axes.plot(x, y, marker="o", markersize=3, label=row, **drawing.style(row))
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xticks([float(c) for c in study.columns], list(study.columns), fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel(study.figure.x, fontsize=8)
    axes.set_ylabel(f"{study.measure.called} in %", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_matching(drawing: _Drawing) -> None:
    from matplotlib.patches import Rectangle

    results, titles = drawing.results, []
    for cell, one in drawing.outcomes.items():
        rates = list(matching_rates(results, one).values())
        rate = f"matching rate {100 * np.mean(rates):.0f}% over {len(rates)} populations"
        titles.append(f"{drawing.title(str(cell), one)}\n{rate}")
    panels = drawing.add_panels(titles, 4.4, 4.4)
    for axes, one in zip(panels, drawing.outcomes.values(), strict=True):
        run = one.runs[0]
        matrix = results.records.mixing(run)["all", drawing.study.figure.component or "attention"].copy()
        np.fill_diagonal(matrix, np.nan)
        counts = label_counts(results, run)
        names = [" ".join(str(label) for label in np.nonzero(row)[0]) for row in counts]
        drawing.add_matrix(axes, matrix, names, "update of the client with labels", "asked by", shrink=0.7)
        for i, j in np.argwhere(find_label_pairs(counts)):
            frame = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="#d55e00", linewidth=1.2)
            axes.add_patch(frame)


def _draw_weights(drawing: _Drawing) -> None:
    titles = [drawing.title(str(cell), one) for cell, one in drawing.outcomes.items()]
    panels = drawing.add_panels(titles, 5.2, 3.6)
    for axes, one in zip(panels, drawing.outcomes.values(), strict=True):
        mixing = average_mixing(drawing.results, one)
        layers = list(dict.fromkeys(component for _, component in mixing))
        for number, layer in enumerate(layers):
            rows = np.array([mixing[part, layer][0] for part in ("first", "middle", "last")])  # of client 0
            groups = [rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:].mean(1)]
            for group, name, colour in zip(groups, WEIGHT_GROUPS, STUDY_COLOURS, strict=False):
                axes.plot(
                    number + np.array([-0.25, 0, 0.25]), group, marker="o", markersize=4,
                    color=colour, label=None if number else name,
                )  # fmt: skip
        axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers], fontsize=7)
        axes.axhline(1 / len(rows[0]), color="#7f7f7f", linewidth=0.8, linestyle=":")
        axes.set_ylabel("weight in the target's model", fontsize=8)
        axes.legend(fontsize=6)
        axes.set_xlabel("each layer: first, middle and last third of the rounds; dotted: equal weights", fontsize=7)


def _draw_heat_map(drawing: _Drawing) -> None:
    titles = [
        title
        for cell, one in drawing.outcomes.items()
        for title in (drawing.title(f"{cell}: weights", one), f"{cell.column}: labels in common")
    ]
    panels = iter(drawing.add_panels(titles, 3.4, 3.4))
    for one in drawing.outcomes.values():
        mixing = average_mixing(drawing.results, one)
        layer = drawing.study.figure.component or [key for part, key in mixing if part == "last"][-1]
        common = count_common_labels(label_counts(drawing.results, one.runs[0]))
        names = [str(i) for i in range(len(common))]
        drawing.add_matrix(next(panels), mixing["last", layer], names, "of client", f"layer {layer}, into client")
        drawing.add_matrix(next(panels), common, names, "client", "client")


DRAWERS: dict[str, Callable[[_Drawing], None]] = {
    "bars": _draw_bars,
    "curves": _draw_curves,
    "sweep": _draw_sweep,
    "matching": _draw_matching,
    "weights": _draw_weights,
    "heat_map": _draw_heat_map,
}


def find_label_pairs(labels: Matrix) -> Matrix:
    """Find the ordered pairs of different clients with a label in common, (N, N), from label counts (N, K)."""
    pairs = count_common_labels(labels) > 0
    np.fill_diagonal(pairs, False)
    return pairs


def count_common_labels(labels: Matrix) -> Matrix:
    """Count the labels that each pair of clients has in common, (N, N), from label counts (N, K)."""
    has = np.asarray(labels) > 0
    return np.asarray((has[:, None] & has[None]).sum(2))


def compute_matching_rate(attention: Matrix, labels: Matrix) -> float | None:
    """Compute the share of pairs with a label in common among the darkest cells of attention (N, N), or None.

    The paper does not say how dark a cell must be. With as many cells as pairs, 1 means that attention puts exactly
    these pairs first, and chance gives their share of all pairs.

    Source: IGFL (Huang et al., 2021), figure 2 and its text.
    """
    pairs = find_label_pairs(labels)
    n = int(pairs.sum())
    if not n:
        return None
    scores = np.where(np.eye(len(pairs), dtype=bool), -np.inf, attention)
    darkest = np.argsort(-scores, axis=None, kind="stable")[:n]
    return float(pairs.ravel()[darkest].mean())


def matching_rates(results: StudyResults, one: Outcome) -> dict[str, float]:
    """Compute the matching rate of each run of a cell, from attention averaged over the rounds."""
    component = results.study.figure.component or "attention"
    attention = {run: results.records.mixing(run).get(("all", component)) for run in one.runs}
    known = {run: matrix for run, matrix in attention.items() if matrix is not None}
    rates = {run: compute_matching_rate(matrix, label_counts(results, run)) for run, matrix in known.items()}
    return {run: rate for run, rate in rates.items() if rate is not None}


def label_counts(results: StudyResults, run: str) -> Matrix:
    """Return the label counts of the clients of a run, (N, K)."""
    return np.array(results.records.runs[run]["labels"])


def average_mixing(results: StudyResults, one: Outcome) -> dict[tuple[str, str], Matrix]:
    """Average the mixing matrices of a cell over its seeds, by rounds and component."""
    mixings = [results.records.mixing(run) for run in one.runs]
    return {key: np.mean([each[key] for each in mixings], axis=0) for key in mixings[0]}


def summarize_mixing(results: StudyResults) -> list[list[str]]:
    """Make a table of the numbers behind a figure of mixing matrices; empty for studies without such a figure."""
    if results.study.figure.kind not in SUMMARIES:
        return []
    head, summarize = SUMMARIES[results.study.figure.kind]
    lines = [list(head)]
    for cell, one in results.outcomes.items():
        if one.runs and not one.not_run and results.records.mixing(one.runs[0]):
            _check(results, cell, one)
            lines += [[cell.column, cell.row, *line] for line in summarize(results, one)]
    return lines


def _check(results: StudyResults, cell: Cell, one: Outcome) -> None:
    study, mixing = results.study, results.records.mixing(one.runs[0])
    where, kind = f"{study.name}, {cell}: figure", study.figure.kind
    components = {key for _, key in mixing}
    component = study.figure.component or ("attention" if kind == "matching" else None)
    if component and component not in components:
        raise ConfigError(f"{where}: there is no component {component!r}; {did_you_mean(component, components)}")
    n = len(next(iter(mixing.values())))
    if kind == "weights" and n < 4:
        raise ConfigError(f"{where}: weights needs four clients or more, got {n}")


def _summarize_matching(results: StudyResults, one: Outcome) -> Iterator[list[str]]:
    rates = matching_rates(results, one)
    values = [100 * rate for rate in rates.values()]
    pairs = [find_label_pairs(label_counts(results, run)) for run in rates]
    chance = np.mean([each.sum() / (len(each) * (len(each) - 1)) for each in pairs])  # of random attention
    yield [f"{np.mean(values):.1f}", f"{np.std(values):.1f}", f"{100 * chance:.1f}", str(len(values))]


def _summarize_common_labels(results: StudyResults, one: Outcome) -> Iterator[list[str]]:
    common = count_common_labels(label_counts(results, one.runs[0]))
    np.fill_diagonal(common, -1)
    for layer, mixing in _last_third(results, one).items():
        groups = [mixing[common == n] for n in (-1, 3, 2, 1, 0)]
        yield [layer, *(f"{group.mean():.4f}" if len(group) else "–" for group in groups)]


def _summarize_weights(results: StudyResults, one: Outcome) -> Iterator[list[str]]:
    for layer, mixing in _last_third(results, one).items():
        row = mixing[0]  # of client 0, the target
        yield [layer, *(f"{weight:.4f}" for weight in (*row[:3], row[3:].mean()))]


def _last_third(results: StudyResults, one: Outcome) -> dict[str, Matrix]:
    mixing = average_mixing(results, one)
    return {component: matrix for (rounds, component), matrix in mixing.items() if rounds == "last"}


SUMMARIES: dict[str, tuple[tuple[str, ...], Callable[[StudyResults, Outcome], Iterator[list[str]]]]] = {
    "matching": (
        ("populations", "method", "matching rate in %", "spread", "by chance", "number of populations"),
        _summarize_matching,
    ),
    "heat_map": (("data", "method", "layer", "own", "3 labels in common", "2", "1", "none"), _summarize_common_labels),
    "weights": (("data", "method", "layer", *WEIGHT_GROUPS), _summarize_weights),
}
"""Kind of figure -> head of its table, and the function that makes the lines of a cell."""
