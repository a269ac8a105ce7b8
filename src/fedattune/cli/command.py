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

from ..errors import ConfigError, FedAttuneError
from ..text import make_console

if TYPE_CHECKING:
    from ..experiment import Experiment
    from ..output import Output
    from .plan import Plan

OWN_FILE = ("deploy", "reproduce", "report", "explain", "watch", "plot", "export", "predict")
"""Commands whose function stands in a module of the same name."""
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
        _say("interrupted" + (f"; go on with: {_resume(argv, where[0])}" if where else ""))
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left, as in `fedattune list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except (FedAttuneError, OSError) as error:
        _say(f"error: {error}")
        return BAD_INPUT
    except sqlite3.DatabaseError as error:  # what opening a store does not find, reading it does
        _say(
            f"error: a run's metrics.sqlite is damaged ({error}); restore it from a copy, or train that run again"
        )
        return BAD_INPUT
    except MemoryError as error:
        _say(f"error: there is not enough memory ({error}); give fewer clients, or smaller data or models")
        return BAD_INPUT
    except Exception as error:
        return _internal(error, where)


def _command(argv: list[str] | None, where: list[Path]) -> int:
    from .arguments import parse

    space, problems = parse(argv)
    if space.command in OWN_FILE:
        return int(getattr(import_module(f".{space.command}", __package__), space.command)(space, problems))
    if space.command == "list":
        return _list(space, problems)
    if space.command == "cite":
        return _cite(space, problems)
    if space.command == "data":
        return _show(space, problems)
    return _train(space, problems, where)


def _say(sentence: str) -> None:
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
    _say(f"internal error: {type(error).__name__}: {error}; {help_}")
    return INTERNAL


def _read(
    space: Namespace, problems: list[str], defaults: dict[str, Any]
) -> "tuple[Experiment, Output, dict[str, Any]]":
    """The experiment, the output options, and what was given on the command line for the experiment."""
    from ..experiment import Experiment, load_options, parse_set
    from ..output import Output

    given = {key: value for key, value in vars(space).items() if key in Experiment.model_fields}
    output = {key: value for key, value in vars(space).items() if key in Output.model_fields}
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
    from .listing import KINDS, listing, print_listing

    found = listing((space.kind,) if space.kind else KINDS)
    if space.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print_listing(found, make_console())
    return 0


def _cite(space: Namespace, problems: list[str]) -> int:
    if problems:
        raise ConfigError("; ".join(problems))
    from .cite import cite

    print(cite(space), end="")
    return 0


def _show(space: Namespace, problems: list[str]) -> int:
    from ..files import write_text
    from ..output import check_files
    from .plan import prepare_data
    from .session import inputs
    from .show import as_json, check_picture, draw, print_federation

    experiment, output, _ = _read(space, problems, {})
    picture = getattr(space, "picture", None)
    check_picture(picture)
    schema = getattr(space, "schema", None)
    files = {"--json": output.json_file, "--picture": picture, "--schema": schema}
    check_files(files, inputs(experiment, config=output.config))
    federation = prepare_data(experiment)
    if experiment.save_partition:
        from ..data.manifest import save_manifest

        save_manifest(federation, experiment.save_partition)
    if output.json_file:
        write_text(output.json_file, json.dumps(as_json(federation), indent=2))
    if schema:
        from ..data import Schema

        write_text(schema, Schema.of(federation).to_yaml())
    if picture:
        draw(federation, picture)
    print_federation(federation, make_console())
    return 0


def _train(space: Namespace, problems: list[str], where: list[Path]) -> int:
    from ..output import check_files, check_out, default_out
    from .conclude import conclude
    from .jobs import StoppedError
    from .session import Interrupt, begin, execute, inputs, reopen

    command: str = space.command
    experiment, output, given = _read(space, problems, {"algorithm": "fedmcsa"} if command == "run" else {})
    if output.tensorboard:
        from ..tensorboard import check_tensorboard

        check_tensorboard()
    files = {"--json": output.json_file}
    if output.resume:
        out = output.resume
        plan, notes = reopen(command, out, given)
        _check_processes(plan.experiment, output)
        check_files(files, inputs(plan.experiment, out=out))
    else:
        out = output.out or default_out(command, experiment.data)
        check_out(out, command)
        check_files(files, inputs(experiment, config=output.config))
        _check_processes(experiment, output)
        plan, notes = _prepare(command, experiment)
        begin(plan, out, command)
    where.append(out)
    with Interrupt() as stop:
        try:
            results, failed = execute(plan, out, stop, output, go_on=command == "compare")
        except StoppedError as stopped:
            _say(f"{stopped}; go on with: {_resume([command], out)}")
            return INTERRUPTED
    conclude(command, plan, results, failed, out=out, output=output, notes=notes)
    return FAILED if failed else 0


def _check_processes(experiment: "Experiment", output: "Output") -> None:
    if experiment.engine == "ray" and output.processes not in ("auto", 1):
        raise ConfigError(
            f"--processes {output.processes}: with --engine ray runs follow one another, as the actors take the cores; "
            "leave it out, or give --ray-actors"
        )


def _prepare(command: str, experiment: "Experiment") -> "tuple[Plan, list[str]]":
    """The plan, with `local` added to a comparison that lacks it."""
    from ..compare import ALONE
    from .choices import ALL
    from .plan import prepare

    notes = []
    names = experiment.algorithms
    if command == "run" and (len(names) > 1 or ALL in names):
        raise ConfigError(
            f"run trains one algorithm, got {', '.join(names)}; use fedattune compare for several"
        )
    if command == "compare" and not {ALONE, ALL} & set(names):
        experiment = experiment.model_copy(update={"algorithms": (ALONE, *names)})
        notes.append("local was added, for the others are compared with it.")
    return prepare(experiment), notes
