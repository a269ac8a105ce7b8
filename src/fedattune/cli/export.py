"""The command `export`."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, RunError, near
from .view_options import Export, asked

if TYPE_CHECKING:
    from ..exporting import Exported, Format
    from ..numbers import Numbers
    from ..reading import Runs

EVERYONE = "all"
SHOWN = 20
"""Clients that one message names."""


def export(space: Namespace, problems: Sequence[str]) -> int:
    """Write the model of one client, or of all, and say what was written."""
    from ..exporting import SUFFIXES, check_format, file_name, plain_name
    from ..output import check_files
    from ..reading import read_runs
    from ..result import Result
    from ..runs.folder import RunFolder

    options = asked(Export, space, problems)
    wanted = _format(options)
    check_format(wanted)
    runs = read_runs([space.run])
    run, folder, why = _chosen(runs, options)
    ids = [client["id"] for client in run.facts["clients"]]
    client = _client(options.client, ids, bool(run.config.get("held_out")))
    one = client != EVERYONE or EVERYONE in ids
    name = f"{plain_name(client)}-{run.algorithm}-seed{run.settings.seed}{SUFFIXES[wanted] if one else ''}"
    out = options.out or Path(name)
    if options.out is None and one and out.exists():
        raise RunError(f"{out} is there already, maybe of another run; name the file by --out")
    if one and out.suffix.lower() != SUFFIXES[wanted]:
        raise ConfigError(
            f"--out {out}: a file of the format {wanted} ends in {SUFFIXES[wanted]}; name it so"
        )
    if one:
        kept = RunFolder(folder)
        check_files({"--out": out}, {"the run's models": kept.models, "the run's inputs": kept.inputs})
    elif out.is_dir() and any(out.iterdir()):
        raise RunError(f"--out {out}: the folder is not empty, and nothing is written over; give a new one")
    result = Result.load(folder)
    print(
        f"fedattune: the model is that of {run.algorithm}, seed {run.settings.seed}: {why}", file=sys.stderr
    )
    if one:
        _say(client, result.export(client, out, wanted))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for number, name in zip(result.facts.get("numbers", range(len(ids))), ids, strict=True):
        written = result.export(number, out / (file_name(number, name) + SUFFIXES[wanted]), wanted)
        _say(name, written, brief=name != ids[-1])
    return 0


def _format(options: Export) -> "Format":
    """The format that was asked for, else that of the file's ending."""
    from ..exporting import SUFFIXES

    if "format_" in options.model_fields_set or options.out is None:
        return options.format_
    names: dict[str, Format] = {suffix: name for name, suffix in SUFFIXES.items()}
    return names.get(options.out.suffix.lower(), options.format_)


def _client(given: str | None, ids: Sequence[str], held_out: bool) -> str:
    """The client that was asked for, or `EVERYONE`.

    Raises:
        ConfigError: none was.
        RunError: there is no such client.

    """
    known = ", ".join(ids[:SHOWN]) + (f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else "")
    if given is None:
        raise ConfigError(f"--client is missing: name one of {known}, or {EVERYONE}")
    if given not in (*ids, EVERYONE):
        hint = near(given, ids)
        joined = "; models of clients that joined after training are not kept" if held_out else ""
        raise RunError(
            f"--client {given}: there is no such client{f', {hint}' if hint else ''} (known: {known}, or {EVERYONE})"
            + joined
        )
    return given


def _chosen(runs: "Runs", options: Export) -> "tuple[Numbers, Path, str]":
    """The run that was asked for, else the first one of the best method; its folder, and why it was taken."""
    names = list(dict.fromkeys(run.algorithm for run in runs.results))
    if options.algorithm is not None:
        name, why = options.algorithm, "as asked"
    elif len(names) == 1:
        name, why = names[0], "the only method here"
    else:
        name, why = _best(runs.results)
        why += "; --algorithm takes another"
    run, folder = min(runs.of(name, options.seed), key=lambda found: found[0].settings.seed)
    return run, folder, why


def _best(results: Sequence["Numbers"]) -> tuple[str, str]:
    """The method to use, and why: the verdict's, or where that is unclear the best one, training alone included."""
    from ..compare import ALONE, by_algorithm, client_accuracy
    from ..verdict import left_out, verdict

    found = verdict(results)
    if found.answer == "yes" and found.method:
        return found.method, "the verdict's method"
    if found.answer == "no":
        return ALONE, "the verdict is that collaborating does not help here"
    out, groups = left_out(results), by_algorithm(results)
    among = {name: runs for name, runs in groups.items() if name not in out}
    validated = all(run.validation is not None for run in results)

    def score(name: str) -> float:
        if validated:
            return sum(run.validation or 0.0 for run in among[name]) / len(among[name])
        return float(client_accuracy(among[name]).mean())

    # Of equally good methods the first is taken, and training alone is the first.
    how = "validation accuracy" if validated else "test accuracy, there being no validation data"
    return max(among, key=score), f"the best one by {how}"


def _say(client: str, written: "Exported", *, brief: bool = False) -> None:
    """What was written, how near it comes to the run's model, and how to use it."""
    from ..exporting import BATCHES

    size = written.bytes / 1000
    shown = f"{size / 1000:.1f} MB" if size >= 1000 else f"{size:.1f} kB"
    inputs = " and ".join(map(str, BATCHES))
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
