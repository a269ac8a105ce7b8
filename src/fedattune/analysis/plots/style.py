"""How figures for papers look, and how they are written: fonts, colours, strokes and files that do not change."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ...core.errors import ConfigError
from ...core.io import replace_atomically
from ..compare import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".pdf", ".svg", ".eps", ".png")


COLUMN_INCHES = 3.3
"""Inches of one column of a two-column paper."""


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Okabe and Ito's palette, told apart by colour-blind readers, and two more; black is training alone."""


STROKES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 1, 1, 1, 1, 1)))


MARKERS = "osD^vP*X"


HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "oooo")


RC_PARAMS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that a figure is the same everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "figure.titlesize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.4,
    "hatch.linewidth": 0.5,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts as TrueType: journals refuse the other kind
    "ps.fonttype": 42,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedattune",
    "savefig.dpi": 300,
}


UNDATED_METADATA: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure, and a sentence on what it shows for its caption."""

    figure: "Figure"
    caption: str


def check_figure_path(path: Path) -> None:
    """Refuse early a figure that cannot be drawn.

    Raises:
        ConfigError: an unknown format, or Matplotlib is missing.

    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {path}: expected a file ending in {', '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("plot needs Matplotlib; install it by: pip install 'fedattune[plot]'") from error


@contextmanager
def use_style() -> Iterator[None]:
    """Draw and write figures in this style."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc of the user's would make other figures of the same runs
        mpl.rcParams.update(cast(Any, RC_PARAMS))
        yield


def new_figure(
    width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained"
) -> "Figure":
    """An empty figure of so many inches that is not known to pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def save_figure(figure: "Figure", path: Path) -> bool:
    """Write a figure in the format of the file's suffix; the same figure gives the same bytes.

    Returns whether the font has all its letters; others, such as Chinese ones in clients' names, are boxes.

    """
    suffix = path.suffix.lower()
    buffer = io.BytesIO()
    with use_style(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if suffix == ".eps":
            _remove_transparency(figure)
        figure.savefig(buffer, format=suffix[1:], metadata=UNDATED_METADATA.get(suffix))
    content = buffer.getvalue()
    if suffix == ".eps":  # which Matplotlib always dates
        lines = content.split(b"\n")
        content = b"\n".join(line for line in lines if not line.startswith(b"%%CreationDate:"))
    with replace_atomically(path) as new:
        new.write_bytes(content)
    lacking = [one for one in said if "missing from font" in str(one.message)]
    for one in said:
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
    """Colour, stroke and marker of each method; training alone is black and dashed."""
    others = [name for name in names if name != BASELINE]
    found: dict[str, dict[str, Any]] = {
        name: {
            "color": COLOURS[k % len(COLOURS)],
            "linestyle": STROKES[(k + k // len(COLOURS)) % len(STROKES)],
            "marker": MARKERS[k % len(MARKERS)],
        }
        for k, name in enumerate(others)
    }
    return {BASELINE: {"color": "black", "linestyle": "--", "marker": "None"}, **found}


def add_legend_below(figure: "Figure", axes: "Axes", across: int, **options: Any) -> None:
    """A legend under all axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, min(across, len(labels))), **options
    )
