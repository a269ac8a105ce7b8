"""The command `data show`: label counts of each client and measures of heterogeneity."""

import json
import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..analysis.output.tables import make_console, make_table, print_whole
from ..core.errors import ConfigError
from ..core.io import write_text
from ..core.metrics import format_number
from ..core.targets import KIND_WORDS
from .options import ShowOptions, parse_options, read_experiment

if TYPE_CHECKING:
    from rich.console import Console

    from ..data import Federation

MAX_TABLE_CLIENTS = 40
"""Clients in the table."""
MAX_TABLE_LABELS = 100
"""Labels in the table when one character stands for each."""
MAX_WIDTH_NAMES = 60
"""Characters of label counts under the names of the labels; wider counts stand under numbers."""
MAX_WIDTH_NUMBERS = 140
"""Characters of label counts under numbers; where they are wider, one character stands for each label."""


def show_data(space: Namespace, problems: list[str]) -> int:
    """Print how data is distributed over clients, and write the files that were asked for."""
    from ..analysis.output.plots import check_figure_path, plot_label_counts, save_figure, use_style
    from ..experiments.output import check_output_files
    from ..experiments.plan import prepare_data
    from ..experiments.session import list_input_files

    experiment, output, _ = read_experiment(space, problems)
    options = parse_options(ShowOptions, space, ())
    if options.picture:
        check_figure_path(options.picture, "--picture")
    files = {"--json": output.json_file, "--picture": options.picture, "--schema": options.schema_file}
    check_output_files(files, list_input_files(experiment, config=output.config))
    federation = prepare_data(experiment)
    if options.picture and not federation.n_labels:
        what = KIND_WORDS[federation.kind]
        raise ConfigError(f"--picture draws the labels of clients, and the target of {federation.name} is {what}")
    if experiment.save_partition:
        from ..data.manifest import save_manifest

        save_manifest(federation, experiment.save_partition)
    if output.json_file:
        write_text(output.json_file, json.dumps(_to_json(federation), indent=2))
    if options.schema_file:
        from ..data import infer_schema

        write_text(options.schema_file, infer_schema(federation).to_yaml())
    if options.picture:
        with use_style():
            figure = plot_label_counts(federation)
        save_figure(figure, options.picture)
    _print_federation(federation, make_console())
    return 0


def _to_json(federation: "Federation") -> dict[str, Any]:
    counts = federation.label_counts()
    return {
        "data": federation.name,
        "hash": federation.digest,
        "partition": dict(federation.partition),
        "classes": list(federation.classes),
        **({"targets": list(names)} if (names := federation.labels or federation.outputs) else {}),
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
        "features": list_features(federation),
        "heterogeneity": federation.heterogeneity(),
        "notes": list(federation.notes),
    }


def list_features(federation: "Federation") -> list[dict[str, Any]]:
    """List the columns of a table that became features: name, kind, and number of model inputs."""
    from ..data.schema import count_date_inputs

    schema = federation.schema
    if schema is None:
        return []
    rows = []
    for name in schema.numbers:
        n = 1 + (name in schema.flagged) + (count_date_inputs(schema.dates[name]) if name in schema.dates else 0)
        rows.append((name, "date" if name in schema.dates else "number", n, name in schema.flagged))
    rows += [(name, "categories", len(each), False) for name, each in schema.categories.items()]
    rows += [(name, "text", n, False) for name, n in schema.texts.items()]
    rows += [(name, "tokens", schema.max_tokens or 1, False) for name in schema.tokens]
    return [dict(zip(("name", "kind", "inputs", "may lack values"), row, strict=True)) for row in rows]


def _print_federation(federation: "Federation", console: "Console") -> None:
    in_full = _print_labels(federation, console) if federation.n_labels else _print_targets(federation, console)
    if federation.n_clients > MAX_TABLE_CLIENTS:
        console.print(f"The first {MAX_TABLE_CLIENTS} of {federation.n_clients} clients are shown; --json gives all.")
    if not in_full:
        first = f" the first {MAX_TABLE_LABELS} of" if federation.n_labels > MAX_TABLE_LABELS else ""
        console.print(
            f"Each of{first} the {federation.n_labels} labels has one character, from 1 (few samples) to 9 (the "
            "client's most frequent label); '.' means no sample."
        )
    if features := list_features(federation):
        words = (f"{one['name']} ({one['kind']}, {one['inputs']})" for one in features)
        console.print(f"features, with their kinds and numbers of inputs: {', '.join(words)}")
    for line in _describe_heterogeneity(federation):
        console.print(line)
    for note in federation.notes:
        console.print(f"note: {note}")
    console.print(f"partition hash: {federation.digest}")


def _print_targets(federation: "Federation", console: "Console") -> bool:
    """Print the sizes of clients, and mean and deviation of their targets, which are numbers; nothing is left out."""
    scale = federation.target_scale
    assert scale is not None
    y = scale.restore(federation.y.double().cpu().numpy()).reshape(len(federation.y), -1)
    names = federation.outputs or ("target",)
    heads = [head for name in names for head in (f"mean {name}", "deviation")]
    table = make_table("client", "train", "val.", "test", *heads, text_columns=("client",))
    for client in federation.clients[:MAX_TABLE_CLIENTS]:
        mine = y[client.all]
        sizes = (str(len(part)) for part in (client.train, client.validation, client.test))
        numbers = [format_number(one) for column in mine.T for one in (column.mean(), column.std())]
        table.add_row(client.name, *sizes, *numbers)
    print_whole(table, console)
    return True


def _print_labels(federation: "Federation", console: "Console") -> bool:
    """Print the table of label counts; return whether it shows the counts themselves."""
    import numpy as np
    from rich.style import Style
    from rich.text import Text

    counts = federation.label_counts()
    shares = counts / np.maximum(counts.max(axis=1, keepdims=True), 1)  # of the client's most frequent label
    names = federation.classes or federation.labels
    digits = max(len(str(counts.max())), *(len(name) for name in names)) + 1
    heads: tuple[object, ...] = names
    is_numbered = digits * len(heads) > MAX_WIDTH_NAMES
    if is_numbered:
        heads = tuple(range(len(heads)))
        digits = max(len(str(counts.max())), len(str(len(heads)))) + 1
    in_full = digits * len(heads) <= MAX_WIDTH_NUMBERS
    labels = "".join(f"{head!s:>{digits}}" for head in heads) if in_full else "labels"
    held = "classes" if federation.classes else "present"
    table = make_table("client", "train", "val.", "test", held, labels, text_columns=("client", labels))

    def cell(count: int, share: float) -> tuple[str, Style]:
        heat = round(255 * (1 - 0.8 * share**0.5)) if count else 255
        text = f"{count or '.':>{digits}}" if in_full else "." if not count else str(math.ceil(9 * share))
        style = Style(bgcolor=f"rgb({heat},{heat},255)", color="black") if count else Style()
        return text, style

    for i, client in enumerate(federation.clients[:MAX_TABLE_CLIENTS]):
        cells = [cell(int(c), float(s)) for c, s in zip(counts[i], shares[i], strict=True)]
        sizes = (str(len(part)) for part in (client.train, client.validation, client.test))
        n_classes = int((counts[i] > 0).sum())
        table.add_row(
            client.name, *sizes, str(n_classes), Text.assemble(*cells[: None if in_full else MAX_TABLE_LABELS])
        )
    print_whole(table, console)
    if is_numbered and in_full:
        console.print("labels: " + ", ".join(f"{i} {name}" for i, name in enumerate(names)))
    return in_full


def _describe_heterogeneity(federation: "Federation") -> list[str]:
    h = federation.heterogeneity()
    shape = " x ".join(map(str, federation.input_shape))
    head = f"{federation.name}: {federation.n_clients} clients, {federation.describe_target()}, input {shape}"
    samples = f"samples per client: {h['samples_min']} to {h['samples_max']}, median {h['samples_median']:g}"
    if federation.labels:
        return [head, samples, f"distance of the shares of labels from those of all data: {h['label_distance']:.3f}"]
    if not federation.classes:
        distance = f"distance of the clients' mean targets from the mean of all: {h['target_distance']:.3f} deviations"
        return [head, samples, distance]
    return [
        head,
        f"{samples}; classes per client: {h['classes_min']} to {h['classes_max']}, median {h['classes_median']:g}",
        f"distance of label distributions (0 alike, 1 nothing in common): {h['label_distance']:.3f} to all "
        f"data, {h['label_distance_pairs']:.3f} between two clients",
    ]
