"""The figure of a federation: the labels of each client."""

from typing import TYPE_CHECKING

from .style import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...data import Federation

MAX_NAMED = 40
"""Clients, or labels, up to which the axis names each."""


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
