"""Show how data is spread over clients: label counts, numbers of the heterogeneity, a picture."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.tables import make_table, print_whole
from ..core.errors import ConfigError
from ..core.io import replace_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from ..data import Federation

CLIENTS_SHOWN = 40


COUNTS_WIDTH = 60  # characters that label counts under their names may take; above, labels are numbered


NUMBERED_WIDTH = 140  # that those under numbers may take; above, one character stands for each label


LABELS_SHOWN = 100


PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def federation_to_json(federation: "Federation") -> dict[str, Any]:
    """Label counts per client and the numbers, all of them."""
    counts = federation.label_counts()
    return {
        "data": federation.name,
        "hash": federation.digest,
        "partition": dict(federation.partition),
        "classes": list(federation.classes),
        "clients": [
            {
                "name": client.name,
                "train": len(client.train),
                "validation": len(client.validation),
                "test": len(client.test),
                "labels": counts[i].tolist(),
            }
            for i, client in enumerate(federation.clients)
        ],
        "heterogeneity": federation.heterogeneity(),
        "notes": list(federation.notes),
    }


def print_federation(federation: "Federation", console: "Console") -> None:
    """Print the table of label counts, then the numbers, the notes and the hash."""
    import numpy as np
    from rich.style import Style
    from rich.text import Text

    counts = federation.label_counts()
    shares = counts / np.maximum(counts.max(axis=1, keepdims=True), 1)  # of the client's most frequent label
    digits = max(len(str(counts.max())), *(len(name) for name in federation.classes)) + 1
    heads: tuple[object, ...] = federation.classes
    numbered = digits * len(heads) > COUNTS_WIDTH
    if numbered:
        heads = tuple(range(len(heads)))
        digits = max(len(str(counts.max())), len(str(len(heads)))) + 1
    in_full = digits * len(heads) <= NUMBERED_WIDTH
    labels = "".join(f"{head!s:>{digits}}" for head in heads) if in_full else "labels"
    table = make_table("client", "train", "val.", "test", "classes", labels, left=("client", labels))

    def cell(count: int, share: float) -> tuple[str, Style]:
        heat = round(255 * (1 - 0.8 * share**0.5)) if count else 255
        text = f"{count or '.':>{digits}}" if in_full else "." if not count else str(math.ceil(9 * share))
        style = Style(bgcolor=f"rgb({heat},{heat},255)", color="black") if count else Style()
        return text, style

    for i, client in enumerate(federation.clients[:CLIENTS_SHOWN]):
        cells = [cell(int(c), float(s)) for c, s in zip(counts[i], shares[i], strict=True)]
        sizes = (str(len(part)) for part in (client.train, client.validation, client.test))
        held = str(int((counts[i] > 0).sum()))
        table.add_row(client.name, *sizes, held, Text.assemble(*cells[: None if in_full else LABELS_SHOWN]))
    print_whole(table, console)
    if numbered and in_full:
        console.print("labels: " + ", ".join(f"{i} {name}" for i, name in enumerate(federation.classes)))
    for line in (*_describe_omissions(federation, in_full), *_describe_heterogeneity(federation)):
        console.print(line)
    for note in federation.notes:
        console.print(f"note: {note}")
    console.print(f"partition hash: {federation.digest}")


def _describe_omissions(federation: "Federation", in_full: bool) -> list[str]:
    """What the table leaves out."""
    said = []
    if federation.n_clients > CLIENTS_SHOWN:
        said.append(
            f"The first {CLIENTS_SHOWN} of {federation.n_clients} clients are shown; --json gives all."
        )
    if not in_full:
        first = f" the first {LABELS_SHOWN} of" if federation.n_classes > LABELS_SHOWN else ""
        said.append(
            f"One character for each of{first} the {federation.n_classes} labels: how often the client has "
            "it, from 1 to 9, its most frequent label being 9; '.': never."
        )
    return said


def _describe_heterogeneity(federation: "Federation") -> list[str]:
    h = federation.heterogeneity()
    return [
        f"{federation.name}: {federation.n_clients} clients, {federation.n_classes} classes, "
        f"input {' x '.join(map(str, federation.input_shape))}",
        f"samples per client: {h['samples_min']} to {h['samples_max']}, median {h['samples_median']:g}; "
        f"classes per client: {h['classes_min']} to {h['classes_max']}, median {h['classes_median']:g}",
        f"distance of label distributions (0 alike, 1 nothing in common): {h['label_distance']:.3f} to all "
        f"data, {h['label_distance_pairs']:.3f} between two clients",
    ]


def check_picture(path: Path | None) -> None:
    """Refuse early a picture that cannot be drawn.

    Raises:
        ConfigError: an unknown format, or Matplotlib is missing.
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
    """Draw labels by clients, a disc's area the number of samples."""
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
    if n <= CLIENTS_SHOWN:
        axes.set_xticks(range(n), federation.names, rotation=90 if max(map(len, federation.names)) > 2 else 0)
    if k <= CLIENTS_SHOWN:
        axes.set_yticks(range(k), federation.classes)
    axes.set_title(f"{federation.name}, {federation.partition.get('name', '')}", fontsize=10)
    with replace_atomically(path) as new:
        figure.savefig(new, dpi=150, format=path.suffix[1:].lower())
