"""The figure of who learns from whom: a matrix for each component, and how alike the clients' labels are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import RunError, did_you_mean
from ..relations import FloatArray, MixingAnalysis, seriate
from .style import COLUMN_INCHES, CaptionedFigure, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_NAMED_CLIENTS = 24
"""Clients up to whom they are named at the axes."""


NAME_POINTS = 6.2
"""Points that a client's name needs; the letters are 0.85 of that, and not smaller than SMALLEST."""


MIN_FONT_POINTS = 4.0


MAX_NAME_LETTERS = 16
"""Letters of a client's name that are shown."""


MAX_VECTOR_CLIENTS = 60
"""Clients up to whom cells are drawn one by one: viewers blur images of few pixels."""


MAX_PANELS_ACROSS = 4


PANEL_INCHES = 1.45
"""Inches of one matrix."""


MARGIN_INCHES = 0.9
"""Inches of names and the colour bar beside the matrices."""


def plot_heatmap(
    relations: MixingAnalysis,
    round_: int | None = None,
    component: str | None = None,
    width: float | None = None,
) -> CaptionedFigure:
    """The last weights of every client at a round, receiving clients in rows, for one component or all.

    Clients are in the order in which those of like labels (where these are known, else of like weights) are neighbours.
    All components have one scale, which ends at the largest weight for another client.

    Raises:
        RunError: there are no mixing matrices, or none of this round or component.

    """
    shown, round_ = _choose_matrices(relations, round_, component)
    similarity = relations.similarity
    with_others = similarity if similarity is not None else np.mean(np.stack(list(shown.values())), axis=0)
    order = seriate(with_others)[0]
    n, panels = len(order), len(shown) + (similarity is not None)
    down = -(-panels // MAX_PANELS_ACROSS)
    across = -(-panels // down)
    side = max(PANEL_INCHES, n * NAME_POINTS / 72) if n <= MAX_NAMED_CLIENTS else PANEL_INCHES
    width = width or max(COLUMN_INCHES, side * across + MARGIN_INCHES)
    side = (width - MARGIN_INCHES) / across
    letters = min(0.85 * NAME_POINTS, 0.85 * 72 * side / n)
    figure = new_figure(
        width, (side + 0.25) * down + (0.45 if n <= MAX_NAMED_CLIENTS else 0.25), "compressed"
    )
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    axes = list(grid.flat)
    for spare in axes[panels:]:
        spare.remove()
    others = ~np.eye(n, dtype=bool)
    values = np.concatenate([matrix[others] for matrix in shown.values()])
    top = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    low = min(0.0, float(np.nanmin(values))) if np.isfinite(values).any() else 0.0
    largest = max(float(np.nanmax(matrix)) for matrix in shown.values())
    drawn: Any = None
    for place, (name, matrix) in enumerate(shown.items()):
        drawn = _draw_matrix(axes[place], matrix[np.ix_(order, order)], "Blues", low, top or 1.0)
        axes[place].set_title(name)
    figure.colorbar(
        drawn,
        ax=axes[:panels],
        extend="max" if largest > top * 1.001 else "neither",
        label="Weight",
        fraction=0.05,
        aspect=25 * down,
        pad=0.02,
    )
    if similarity is not None:
        last = axes[panels - 1]
        _draw_matrix(last, similarity[np.ix_(order, order)], "Greys", 0.0, 1.0)
        last.set_title("label similarity")
    _label_axes(axes[:panels], [_shorten_name(relations.names[i]) for i in order], across, letters)
    given = "labels" if similarity is not None else "weights"
    said = (
        f"Who learns from whom by {relations.run.algorithm}, seed {relations.run.settings.seed}, round {round_}: row "
        f"receives from column; clients in the order of their {given}; the scale ends at the largest weight for another"
    )
    if similarity is not None:
        said += "; label similarity from 0 (white) to 1 (black): 1 minus the total variation distance"
    if any(one not in (None, round_) for one in relations.since(round_)):
        said += "; of clients that did not take part in that round, what they were given last"
    if any(np.isnan(matrix).any() for matrix in shown.values()):
        said += "; hatched: clients without a stored row"
    return CaptionedFigure(figure, said)


def _choose_matrices(
    relations: MixingAnalysis, round_: int | None, component: str | None
) -> tuple[dict[str, FloatArray], int]:
    """The matrices to draw, and their round."""
    stored = relations.rounds
    if not stored:
        raise RunError(f"{relations.run.algorithm} has no mixing matrices, so there is no heatmap of it")
    round_ = stored[-1] if round_ is None else round_
    if round_ not in stored:
        near = sorted(sorted(stored, key=lambda r: (abs(r - round_), r))[:5])
        raise RunError(
            f"no mixing matrices of round {round_}; there are those of {len(stored)} rounds from {stored[0]} to "
            f"{stored[-1]}, near it {', '.join(map(str, near))} (evaluated rounds are stored)"
        )
    known = relations.known(round_)
    if component is None:
        return known, round_
    if component not in known:
        raise RunError(f"no component {component!r} in round {round_}; {did_you_mean(component, known)}")
    return {component: known[component]}, round_


def _shorten_name(name: str) -> str:
    """A client's name in one line that leaves room for the picture."""
    line = " ".join(name.split())
    return line if len(line) <= MAX_NAME_LETTERS else line[: MAX_NAME_LETTERS - 1] + "…"


def _draw_matrix(axes: "Axes", matrix: FloatArray, colours: str, low: float, top: float) -> Any:
    """Draw one matrix, the first row on top."""
    from matplotlib import colormaps

    n = len(matrix)
    masked = np.ma.masked_invalid(matrix)
    axes.patch.set(facecolor="white", edgecolor="#999999", hatch="////" if masked.mask.any() else "")
    common: dict[str, Any] = {"cmap": colormaps[colours], "vmin": low, "vmax": top}
    if n <= MAX_VECTOR_CLIENTS:
        # Lines of the cell's own colour close the gaps that viewers would show between cells.
        drawn: Any = axes.pcolormesh(masked, edgecolors="face", linewidth=0.1, **common)
    else:
        drawn = axes.imshow(masked, interpolation="none", extent=(0, n, n, 0), **common)
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
    for spine in axes.spines.values():
        spine.set_visible(True)
    return drawn


def _label_axes(axes: "Sequence[Axes]", names: Sequence[str], across: int, letters: float) -> None:
    """Names of clients at the outer axes, or what rows and columns are."""
    n = len(names)
    for place, one in enumerate(axes):
        lowest, leftmost = place + across >= len(axes), place % across == 0
        if n <= MAX_NAMED_CLIENTS and letters >= MIN_FONT_POINTS:
            upright = 90 if max(map(len, names)) > 2 or n > 12 else 0
            one.set_xticks(np.arange(n) + 0.5, names, fontsize=letters, rotation=upright)
            one.set_yticks(np.arange(n) + 0.5, names, fontsize=letters)
        else:
            one.set_xticks([])
            one.set_yticks([])
        one.tick_params(length=0, pad=1.5, labelbottom=lowest, labelleft=leftmost)
        if lowest:
            one.set_xlabel("from client")
        if leftmost:
            one.set_ylabel("to client")
