"""Draw how the labels of a federation are distributed over its clients."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...core.io import replace_atomically

if TYPE_CHECKING:
    from ...data import Federation

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")

MAX_NAMED = 40
"""Clients, or labels, up to which the axis names each."""


def check_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        ConfigError: the format is unknown, or Matplotlib is missing.

    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ConfigError(f"--picture {path}: expected a file ending in {', '.join(PICTURE_SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--picture needs Matplotlib; install it by: pip install 'fedattune[plot]'"
        ) from error


def draw_label_counts(federation: "Federation", path: Path) -> None:
    """Draw a disc for each label of each client; its area is the number of samples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = federation.label_counts()
    rows, labels = counts.nonzero()
    n, k = counts.shape
    figure = Figure(figsize=(min(2 + 0.3 * n, 24), min(1.6 + 0.3 * k, 24)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    cell = 72 * min(figure.get_figwidth() / (n + 4), figure.get_figheight() / (k + 3))  # points
    sizes = counts[rows, labels] / counts.max() * (0.95 * cell) ** 2
    axes.scatter(rows, labels, s=sizes, color="#2b6cb0", linewidths=0)
    axes.set(xlabel="client", ylabel="label", xlim=(-0.7, n - 0.3), ylim=(-0.7, k - 0.3))
    if n <= MAX_NAMED:
        axes.set_xticks(range(n), federation.names, rotation=90 if max(map(len, federation.names)) > 2 else 0)
    if k <= MAX_NAMED:
        axes.set_yticks(range(k), federation.classes)
    axes.set_title(f"{federation.name}, {federation.partition.get('name', '')}", fontsize=10)
    with replace_atomically(path) as new:
        figure.savefig(new, dpi=150, format=path.suffix[1:].lower())
