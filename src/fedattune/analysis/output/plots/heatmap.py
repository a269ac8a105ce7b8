"""The figure of who learns from whom: a matrix for each component, and the similarity of the clients' labels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....core.errors import RunError, did_you_mean
from ...compare import FloatArray
from ...mixing.clusters import seriate
from ...mixing.mixing import LastRows, MixingAnalysis
from .style import COLUMN_INCHES, CaptionedFigure, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

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
"""Largest weight, relative to the end of the others, from which on the scale is broken."""


class Scale(NamedTuple):
    """The scale of a heat map; `look.js` of the report has the same.

    Attributes:
        low: the weight of the first colour, 0 or a negative weight.
        end: the weight at which the colours of all but the outliers end.
        largest: the weight of the last colour; equal to `end` if the scale is not broken.

    """

    low: float
    end: float
    largest: float

    @property
    def is_broken(self) -> bool:
        """Tell whether outliers have colours of their own."""
        return self.largest > self.end

    def make_norm(self) -> "Normalize":
        """Make Matplotlib's map from weights to colours."""
        from matplotlib.colors import FuncNorm, Normalize

        if not self.is_broken:
            return Normalize(self.low, self.end)
        weights, shares = (self.low, self.end, self.largest), (0.0, OTHERS_COLOURS, 1.0)

        def forward(values: FloatArray) -> FloatArray:
            return np.ma.masked_array(np.interp(values, weights, shares), np.ma.getmask(values))

        def invert(values: FloatArray) -> FloatArray:
            return np.interp(values, shares, weights)

        return FuncNorm((forward, invert), self.low, self.largest)


def choose_scale(weights: FloatArray, n_clients: int) -> Scale:
    """Choose a scale on which a few weights far above all others do not make the others look alike.

    Args:
        weights: for other clients, of whole rows in any order; NaN where not known.
        n_clients: number of clients.

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
    mixing: MixingAnalysis,
    round_: int | None = None,
    component: str | None = None,
    width: float | None = None,
) -> CaptionedFigure:
    """Plot the last weights of every client at a round, receiving clients in rows.

    Clients with like labels are neighbours; where labels are not known, clients with like weights. All components
    share one scale, which ends at the largest weight for another client. It is broken where few weights are far above
    all others. Attackers of a simulation are there too, and their names say so.

    Args:
        mixing: the matrices of a run.
        round_: the round; default: the last one stored.
        component: the component; default: all.
        width: inches; default: by the number of matrices and clients.

    Raises:
        RunError: there are no mixing matrices, or none of this round or component.

    """
    from matplotlib.colors import Normalize

    mixing = mixing.include_attackers()
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
    bar = figure.colorbar(
        mappable,
        ax=axes[:panels],
        extend="max" if largest > scale.largest * 1.001 else "neither",
        label="Weight",
        fraction=0.05,
        aspect=25 * down,
        pad=0.02,
    )
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
    """Read the last rows at a round, which must be stored."""
    stored = mixing.rounds
    if not stored:
        raise RunError(
            f"{mixing.run.algorithm} has no mixing matrices, so there is no heatmap of it; name one that mixes models"
        )
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
        text += (
            f" and is broken: three quarters of the colours end at {scale.end:.2g}, as few weights are above"
        )
    if has_labels:
        text += "; label similarity from 0 (white) to 1 (black): 1 minus the total variation distance"
    if any(one not in (None, round_) for one in last.rounds):
        text += "; of clients that did not take part in that round, what they were given last"
    if any(np.isnan(matrix).any() for matrix in matrices.values()):
        text += "; hatched: clients without a stored row"
    return text


def _shorten_name(name: str) -> str:
    """Write a client's name in one line that leaves room for the picture."""
    line = " ".join(name.split())
    return line if len(line) <= MAX_NAME_LETTERS else line[: MAX_NAME_LETTERS - 1] + "…"


def _draw_matrix(axes: "Axes", matrix: FloatArray, colours: str, norm: "Normalize") -> Any:
    """Draw one matrix, the first row on top."""
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
    """Name the clients at the outer axes, if there is room, and say what rows and columns are."""
    n = len(names)
    for k, one in enumerate(axes):
        is_lowest, is_leftmost = k + across >= len(axes), k % across == 0
        if n <= MAX_AXIS_NAMES and letters >= MIN_FONT_POINTS:
            rotation = 90 if max(map(len, names)) > 2 or n > 12 else 0
            one.set_xticks(np.arange(n) + 0.5, names, fontsize=letters, rotation=rotation)
            one.set_yticks(np.arange(n) + 0.5, names, fontsize=letters)
        else:
            one.set_xticks([])
            one.set_yticks([])
        one.tick_params(length=0, pad=1.5, labelbottom=is_lowest, labelleft=is_leftmost)
        if is_lowest:
            one.set_xlabel("from client")
        if is_leftmost:
            one.set_ylabel("to client")
