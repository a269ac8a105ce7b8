"""The commands `export` and `predict`."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.output.tables import format_bytes
from ..analysis.verdict import choose_method
from ..core.errors import ConfigError, RunError, list_some, suggest_name
from ..core.metrics import METRICS, format_number
from ..core.text import make_printable
from .main import print_content, print_message
from .options import ExportOptions, PredictOptions, parse_options

if TYPE_CHECKING:
    from ..analysis.load import Runs
    from ..models.export import ExportedModel, ExportFormat
    from ..runs.metrics import RunMetrics

ALL_CLIENTS = "all"
MAX_OFFERED_CLIENTS = 20
"""Clients that a message offers as values of --client."""


def export(space: Namespace, problems: Sequence[str]) -> int:
    """Write the model of one client or of all clients, and print the files."""
    from ..analysis.load import read_runs
    from ..core.io import clean_file_name
    from ..experiments.output import check_empty_folder, check_output_files
    from ..models.export import FORMAT_SUFFIXES, check_format, make_file_name
    from ..runs.result import Result

    options = parse_options(ExportOptions, space, problems)
    format_ = options.format_
    if options.out and "format_" not in options.model_fields_set:
        by_suffix: dict[str, ExportFormat] = {suffix: one for one, suffix in FORMAT_SUFFIXES.items()}
        format_ = by_suffix.get(options.out.suffix.lower(), format_)
    check_format(format_)
    runs = read_runs([space.run])
    run, folder, why = _choose_run(runs, options)
    ids = [client["id"] for client in run.facts["clients"]]
    client = _check_client(options.client, ids, bool(run.config.get("held_out")))
    is_single = client != ALL_CLIENTS or ALL_CLIENTS in ids
    suffix = FORMAT_SUFFIXES[format_]
    name = f"{clean_file_name(client)}-{run.algorithm}-seed{run.settings.seed}{suffix if is_single else ''}"
    out = options.out or Path(name)
    if options.out is None and is_single and out.exists():
        raise RunError(f"{out} exists already, maybe of another run; name the file by --out")
    if is_single:
        check_format(format_, out)
        check_output_files({"--out": out}, {})
    else:
        check_empty_folder(out)
    result = Result.load(folder)
    print_message(f"exporting {run.algorithm}, seed {run.settings.seed}: {why}")
    if is_single:
        _print_export(client, result.export(client, out, format_, factory=options.factory))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for number, name in zip(result.facts.get("numbers", range(len(ids))), ids, strict=True):
        model = result.export(number, out / (make_file_name(number, name) + suffix), format_, factory=options.factory)
        _print_export(name, model, is_brief=name != ids[-1])
    return 0


def _check_client(client: str | None, ids: Sequence[str], has_newcomers: bool) -> str:
    names = list_some(ids, MAX_OFFERED_CLIENTS)
    if client is None:
        raise ConfigError(f"--client is missing: name one of {names}, or {ALL_CLIENTS}")
    if client not in (*ids, ALL_CLIENTS):
        hint = suggest_name(client, ids)
        newcomers = "; models of clients that joined after training are not kept" if has_newcomers else ""
        raise RunError(
            f"--client {client}: there is no such client{f', {hint}' if hint else ''} "
            f"(known: {names}, or {ALL_CLIENTS}){newcomers}"
        )
    return client


def _choose_run(runs: "Runs", options: ExportOptions) -> "tuple[RunMetrics, Path, str]":
    """Choose the run of --algorithm and --seed, else the first run of the best method; add folder and reason."""
    names = list(dict.fromkeys(run.algorithm for run in runs.results))
    if options.algorithm is not None:
        name, why = options.algorithm, "as --algorithm says"
    elif len(names) == 1:
        name, why = names[0], "the only method here"
    else:
        name, why = choose_method(
            runs.results, runs.metric, runs.baselines, failed=runs.failed_methods, is_tuned=runs.is_tuned
        )
        why += "; --algorithm takes another"
    run, folder = min(runs.select(name, options.seed), key=lambda pair: pair[0].settings.seed)
    return run, folder, why


def _print_export(client: str, model: "ExportedModel", *, is_brief: bool = False) -> None:
    from ..models.export import CHECK_BATCH_SIZES

    size, inputs = format_bytes(model.size_bytes), " and ".join(map(str, CHECK_BATCH_SIZES))
    print(
        f"{model.file}: client {make_printable(client)}, {model.format}, {size}; checked on batches of {inputs} random "
        f"inputs: the run's model gives the same, outputs differ by at most {model.max_difference:.2g}"
    )
    if is_brief:
        return
    how = f"fedattune predict {shlex.quote(str(model.file))} --data new.csv"
    if model.format == "torch-export":
        how = f"torch.export.load({str(model.file)!r}).module()(x); fedattune predict reads safetensors and onnx"
    print(f"input: {model.input}\noutput: {model.output}\npredict: {how}", flush=True)


def predict(space: Namespace, problems: Sequence[str]) -> int:
    """Print or write the predictions for a table; notes and accuracy go to standard error."""
    from ..experiments.output import check_output_files

    options = parse_options(PredictOptions, space, problems)
    if options.data is None:
        raise ConfigError("--data is missing: give a table to predict for, such as --data new.csv")
    from ..models import predict as prediction

    if options.out:
        prediction.check_predictions_file(options.out)
        check_output_files({"--out": options.out}, {"the data": options.data, "the model": space.model})
    predictions = prediction.predict(space.model, options.data, factory=options.factory)
    for note in predictions.notes:
        print_message(note)
    if predictions.target is not None:
        n_known, metrics = predictions.n_known, predictions.metrics
        if metrics and not predictions.classes:
            numbers = ", ".join(f"{METRICS[key].label} {format_number(value)}" for key, value in metrics.items())
            print_message(f"{numbers} ({n_known:,} rows)")
        elif predictions.accuracy is None:
            print_message(f"no row has a known {'class' if predictions.classes else 'target'}, so nothing is scored")
        else:
            accuracy = f"{100 * predictions.accuracy:.2f}%"
            print_message(f"accuracy: {accuracy} ({predictions.n_correct:,} of {n_known:,} rows)")
    if options.out:
        predictions.save(options.out)
    else:
        print_content(predictions.to_csv())
    return 0
