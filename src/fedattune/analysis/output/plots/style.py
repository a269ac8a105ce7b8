"""The look of figures for papers, and files of figures that are the same bytes every time."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ....core.errors import ConfigError
from ....core.io import replace_atomically
from ...compare import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".pdf", ".svg", ".eps", ".png")
COLUMN_INCHES = 3.3
"""One column of a two-column paper."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Okabe and Ito's palette, told apart by colour-blind readers, and two more; black is training alone."""
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
    """Refuse early a figure that cannot be drawn.

    Raises:
        ConfigError: the format is unknown, or Matplotlib is missing.

    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option} {path}: expected a file ending in {', '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{option} {path} needs Matplotlib; install it by: pip install 'fedattune[plot]'"
        ) from error


@contextmanager
def use_style() -> Iterator[None]:
    """Draw and write figures in the style of this package, whatever the user's matplotlibrc says."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rc_file(Path(__file__).with_name("paper.mplstyle"))
        yield


def new_figure(
    width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained"
) -> "Figure":
    """Return an empty figure of so many inches that pyplot does not know."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def save_figure(figure: "Figure", path: Path) -> bool:
    """Write a figure in the format of the file's suffix; the same figure gives the same bytes.

    Returns:
        Whether the font has all letters of the figure; others, such as Chinese ones, are boxes.

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

    areas: list[Any] = [*figure.findobj(PolyCollection)]
    for area in areas:
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


def add_legend_below(
    figure: "Figure", axes: "Axes", across: int, names: Sequence[str] | None = None, **options: Any
) -> None:
    """Add a legend under all axes, where it covers nothing.

    Args:
        figure: the figure.
        axes: the axes whose labels are explained.
        across: most labels in a row.
        names: the labels, in order; default: all.
        options: of Matplotlib's legend.

    """
    handles, labels = axes.get_legend_handles_labels()
    names = labels if names is None else [name for name in names if name in labels]
    figure.legend(
        [handles[labels.index(name)] for name in names],
        names,
        loc="outside lower center",
        ncols=max(1, min(across, len(names))),
        **options,
    )
