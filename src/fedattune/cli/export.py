"""The command `export`.

The command `predict`.
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.verdict import choose_method
from ..core.errors import ConfigError, RunError, suggest_name
from .options import ExportOptions, PredictOptions, parse_options

if TYPE_CHECKING:
    from ..analysis.load import Runs
    from ..models.export import ExportedModel, ExportFormat
    from ..training.metrics import RunMetrics

ALL_CLIENTS = "all"


MAX_LISTED_CLIENTS = 20
"""Clients that one message names."""


def export(space: Namespace, problems: Sequence[str]) -> int:
    """Write the model of one client, or of all, and say what was written."""
    from ..analysis.load import read_runs
    from ..core.io import clean_file_name
    from ..experiments.output import check_output_files
    from ..models.export import FORMAT_SUFFIXES, check_format, make_file_name
    from ..training.result import Result
    from ..training.storage.folder import RunFolder

    options = parse_options(ExportOptions, space, problems)
    wanted = _choose_format(options)
    check_format(wanted)
    runs = read_runs([space.run])
    run, folder, why = _choose_run(runs, options)
    ids = [client["id"] for client in run.facts["clients"]]
    client = _check_client(options.client, ids, bool(run.config.get("held_out")))
    one = client != ALL_CLIENTS or ALL_CLIENTS in ids
    name = f"{clean_file_name(client)}-{run.algorithm}-seed{run.settings.seed}{FORMAT_SUFFIXES[wanted] if one else ''}"
    out = options.out or Path(name)
    if options.out is None and one and out.exists():
        raise RunError(f"{out} is there already, maybe of another run; name the file by --out")
    if one and out.suffix.lower() != FORMAT_SUFFIXES[wanted]:
        raise ConfigError(
            f"--out {out}: a file of the format {wanted} ends in {FORMAT_SUFFIXES[wanted]}; name it so"
        )
    if one:
        kept = RunFolder(folder)
        check_output_files({"--out": out}, {"the run's models": kept.models, "the run's inputs": kept.inputs})
    elif out.is_dir() and any(out.iterdir()):
        raise RunError(f"--out {out}: the folder is not empty, and nothing is written over; give a new one")
    result = Result.load(folder)
    print(
        f"fedattune: the model is that of {run.algorithm}, seed {run.settings.seed}: {why}", file=sys.stderr
    )
    if one:
        _print_export(client, result.export(client, out, wanted))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for number, name in zip(result.facts.get("numbers", range(len(ids))), ids, strict=True):
        written = result.export(
            number, out / (make_file_name(number, name) + FORMAT_SUFFIXES[wanted]), wanted
        )
        _print_export(name, written, brief=name != ids[-1])
    return 0


def _choose_format(options: ExportOptions) -> "ExportFormat":
    """The format that was asked for, else that of the file's ending."""
    from ..models.export import FORMAT_SUFFIXES

    if "format_" in options.model_fields_set or options.out is None:
        return options.format_
    names: dict[str, ExportFormat] = {suffix: name for name, suffix in FORMAT_SUFFIXES.items()}
    return names.get(options.out.suffix.lower(), options.format_)


def _check_client(given: str | None, ids: Sequence[str], held_out: bool) -> str:
    """The client that was asked for, or `ALL_CLIENTS`.

    Raises:
        ConfigError: none was.
        RunError: there is no such client.

    """
    known = ", ".join(ids[:MAX_LISTED_CLIENTS]) + (
        f" and {len(ids) - MAX_LISTED_CLIENTS:,} more" if len(ids) > MAX_LISTED_CLIENTS else ""
    )
    if given is None:
        raise ConfigError(f"--client is missing: name one of {known}, or {ALL_CLIENTS}")
    if given not in (*ids, ALL_CLIENTS):
        hint = suggest_name(given, ids)
        joined = "; models of clients that joined after training are not kept" if held_out else ""
        raise RunError(
            f"--client {given}: there is no such client{f', {hint}' if hint else ''} (known: {known}, or {ALL_CLIENTS})"
            + joined
        )
    return given


def _choose_run(runs: "Runs", options: ExportOptions) -> "tuple[RunMetrics, Path, str]":
    """The run that was asked for, else the first one of the best method; its folder, and why it was taken."""
    names = list(dict.fromkeys(run.algorithm for run in runs.results))
    if options.algorithm is not None:
        name, why = options.algorithm, "as asked"
    elif len(names) == 1:
        name, why = names[0], "the only method here"
    else:
        name, why = choose_method(runs.results)
        why += "; --algorithm takes another"
    run, folder = min(runs.of(name, options.seed), key=lambda found: found[0].settings.seed)
    return run, folder, why


def _print_export(client: str, written: "ExportedModel", *, brief: bool = False) -> None:
    """What was written, how near it comes to the run's model, and how to use it."""
    from ..models.export import CHECK_BATCH_SIZES

    size = written.bytes / 1000
    shown = f"{size / 1000:.1f} MB" if size >= 1000 else f"{size:.1f} kB"
    inputs = " and ".join(map(str, CHECK_BATCH_SIZES))
    print(
        f"{written.file}: {client}, {written.format}, {shown}; checked on batches of {inputs} random inputs: the "
        f"classes are those of the run's model, logits differ by at most {written.difference:.2g}"
    )
    if brief:
        return
    how = f"fedattune predict {shlex.quote(str(written.file))} --data new.csv"
    if written.format == "torch-export":
        how = f"torch.export.load({str(written.file)!r}).module()(x); fedattune predict reads safetensors and onnx"
    print(f"input: {written.input}\noutput: {written.output}\npredict: {how}", flush=True)


def predict(space: Namespace, problems: Sequence[str]) -> int:
    """Print or write what a model says of a table; notes and accuracy go to standard error."""
    from ..experiments.output import check_output_files

    options = parse_options(PredictOptions, space, problems)
    if options.data is None:
        raise ConfigError("--data is missing: give a table to predict for, such as --data new.csv")
    from ..models import predict as prediction

    if options.out:
        prediction.check_predictions_file(options.out)
        check_output_files({"--out": options.out}, {"the data": options.data, "the model": space.model})
    found = prediction.predict(space.model, options.data, factory=options.factory)
    for note in found.notes:
        print(f"fedattune: {note}", file=sys.stderr)
    if found.target is not None:
        said = "no row has a known class"
        if found.accuracy is not None:
            said = f"{100 * found.accuracy:.2f}% ({found.correct:,} of {found.known:,} rows)"
        print(f"fedattune: accuracy: {said}", file=sys.stderr, flush=True)
    if options.out:
        found.save(options.out)
    else:
        print(found.to_csv(), end="")
    return 0
