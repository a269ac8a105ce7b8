"""The `fedattune` command."""

import json
import os
import shlex
import sqlite3
import sys
import traceback
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.tables import make_console
from ..core.errors import ConfigError, FedAttuneError

if TYPE_CHECKING:
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions
    from ..experiments.plan import Plan

COMMAND_MODULES = {
    "deploy": "deploy",
    "reproduce": "reproduce",
    "report": "report",
    "explain": "explain",
    "watch": "watch",
    "plot": "report",
    "export": "export",
    "predict": "export",
}
"""Command -> module with a function of the command's name."""


FAILED, INTERNAL, BAD_INPUT, INTERRUPTED = 1, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done; 1: a method of a comparison failed, or a fault of FedAttune's;
    2: an input that cannot be, said in one sentence; 130: Ctrl-C.
    """
    where: list[Path] = []  # the run folder, once there is one
    try:
        return _command(argv, where)
    except SystemExit as leaving:  # --help and --version
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        _print_error("interrupted" + (f"; go on with: {_resume(argv, where[0])}" if where else ""))
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left, as in `fedattune list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except (FedAttuneError, OSError) as error:
        _print_error(f"error: {error}")
        return BAD_INPUT
    except sqlite3.DatabaseError as error:  # what opening a store does not find, reading it does
        _print_error(
            f"error: a run's metrics.sqlite is damaged ({error}); restore it from a copy, or train that run again"
        )
        return BAD_INPUT
    except MemoryError as error:
        _print_error(
            f"error: there is not enough memory ({error}); give fewer clients, or smaller data or models"
        )
        return BAD_INPUT
    except Exception as error:
        return _internal(error, where)


def _command(argv: list[str] | None, where: list[Path]) -> int:
    from .parser import parse_arguments

    space, problems = parse_arguments(argv)
    if space.command in COMMAND_MODULES:
        module = import_module(f".{COMMAND_MODULES[space.command]}", __package__)
        return int(getattr(module, space.command)(space, problems))
    if space.command == "list":
        return _list(space, problems)
    if space.command == "cite":
        return _cite(space, problems)
    if space.command == "data":
        return _show_data(space, problems)
    return _train(space, problems, where)


def _print_error(sentence: str) -> None:
    """One line on standard error, whatever line breaks a message had."""
    print("fedattune: " + " ".join(sentence.split()), file=sys.stderr, flush=True)


def _resume(argv: list[str] | None, out: Path) -> str:
    command = next(
        (word for word in (sys.argv[1:] if argv is None else argv) if word in ("run", "compare")), "compare"
    )
    return f"fedattune {command} --resume {shlex.quote(str(out))}"


def _internal(error: Exception, where: list[Path]) -> int:
    text = "".join(traceback.format_exception(error))
    help_ = "set FEDATTUNE_DEBUG=1 to see where"
    if os.environ.get("FEDATTUNE_DEBUG") == "1":
        print(text, file=sys.stderr, end="")
    elif where and where[0].is_dir():
        (where[0] / "error.log").write_text(text, encoding="utf-8")
        help_ = f"the details are in {where[0] / 'error.log'}"
    _print_error(f"internal error: {type(error).__name__}: {error}; {help_}")
    return INTERNAL


def _read(
    space: Namespace, problems: list[str], defaults: dict[str, Any]
) -> "tuple[Experiment, OutputOptions, dict[str, Any]]":
    """The experiment, the output options, and what was given on the command line for the experiment."""
    from ..experiments.config import Experiment, load_options, parse_set
    from ..experiments.output import OutputOptions

    given = {key: value for key, value in vars(space).items() if key in Experiment.model_fields}
    output = {key: value for key, value in vars(space).items() if key in OutputOptions.model_fields}
    if "set" in given:
        try:
            given["set"] = parse_set(given["set"])
        except ConfigError as error:
            problems.append(str(error))
            del given["set"]
    if "resume" not in output:
        config = Path(output["config"]) if "config" in output else None
        experiment, found = load_options(config, given | output, defaults=defaults, errors=problems)
        return experiment, found, given
    if {"out", "config"} & output.keys():
        problems.append("--out and --config cannot be given with --resume, which goes on in its own folder")
    experiment, found = load_options(None, output, errors=problems)
    return experiment, found, given


def _list(space: Namespace, problems: list[str]) -> int:
    if problems:
        raise ConfigError("; ".join(problems))
    from .list import KINDS, collect_choices, print_choices

    found = collect_choices((space.kind,) if space.kind else KINDS)
    if space.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print_choices(found, make_console())
    return 0


def _cite(space: Namespace, problems: list[str]) -> int:
    if problems:
        raise ConfigError("; ".join(problems))
    from .list import cite

    print(cite(space), end="")
    return 0


def _show_data(space: Namespace, problems: list[str]) -> int:
    from ..core.io import write_text
    from ..experiments.output import check_output_files
    from ..experiments.plan import prepare_data
    from ..experiments.session import input_files
    from .data import check_picture, draw_label_counts, federation_to_json, print_federation

    experiment, output, _ = _read(space, problems, {})
    picture = getattr(space, "picture", None)
    check_picture(picture)
    schema = getattr(space, "schema", None)
    files = {"--json": output.json_file, "--picture": picture, "--schema": schema}
    check_output_files(files, input_files(experiment, config=output.config))
    federation = prepare_data(experiment)
    if experiment.save_partition:
        from ..data.manifest import save_manifest

        save_manifest(federation, experiment.save_partition)
    if output.json_file:
        write_text(output.json_file, json.dumps(federation_to_json(federation), indent=2))
    if schema:
        from ..data import infer_schema

        write_text(schema, infer_schema(federation).to_yaml())
    if picture:
        draw_label_counts(federation, picture)
    print_federation(federation, make_console())
    return 0


def _train(space: Namespace, problems: list[str], where: list[Path]) -> int:
    from ..experiments.job import StoppedError
    from ..experiments.output import check_output_files, check_run_folder, default_run_folder
    from ..experiments.session import InterruptHandler, create_run_folder, input_files, reopen_run, train_plan
    from ..experiments.summary import write_summary

    command: str = space.command
    experiment, output, given = _read(space, problems, {"algorithm": "fedmcsa"} if command == "run" else {})
    if output.tensorboard:
        from ..training.tensorboard import check_tensorboard

        check_tensorboard()
    files = {"--json": output.json_file}
    if output.resume:
        out = output.resume
        plan, notes = reopen_run(command, out, given)
        _check_processes(plan.experiment, output)
        check_output_files(files, input_files(plan.experiment, out=out))
    else:
        out = output.out or default_run_folder(command, experiment.data)
        check_run_folder(out, command)
        check_output_files(files, input_files(experiment, config=output.config))
        _check_processes(experiment, output)
        plan, notes = _plan_command(command, experiment)
        create_run_folder(plan, out, command)
    where.append(out)
    with InterruptHandler() as stop:
        try:
            results, failed = train_plan(plan, out, stop, output, keep_going=command == "compare")
        except StoppedError as stopped:
            _print_error(f"{stopped}; go on with: {_resume([command], out)}")
            return INTERRUPTED
    write_summary(command, plan, results, failed, out=out, output=output, notes=notes)
    return FAILED if failed else 0


def _check_processes(experiment: "Experiment", output: "OutputOptions") -> None:
    if experiment.engine == "ray" and output.processes not in ("auto", 1):
        raise ConfigError(
            f"--processes {output.processes}: with --engine ray runs follow one another, as the actors take the cores; "
            "leave it out, or give --ray-actors"
        )


def _plan_command(command: str, experiment: "Experiment") -> "tuple[Plan, list[str]]":
    """The plan, with `local` added to a comparison that lacks it."""
    from ..analysis.compare import BASELINE
    from ..experiments.plan import make_plan
    from ..experiments.validate import ALL_METHODS

    notes = []
    names = experiment.algorithms
    if command == "run" and (len(names) > 1 or ALL_METHODS in names):
        raise ConfigError(
            f"run trains one algorithm, got {', '.join(names)}; use fedattune compare for several"
        )
    if command == "compare" and not {BASELINE, ALL_METHODS} & set(names):
        experiment = experiment.model_copy(update={"algorithms": (BASELINE, *names)})
        notes.append("local was added, for the others are compared with it.")
    return make_plan(experiment), notes
