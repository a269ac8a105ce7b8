"""The argument parser, made from the typed schema: YAML keys, options and their help are one thing."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from .._version import __version__
from ..errors import ConfigError, did_you_mean, near

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

DATA_FIELDS = (
    "data", "data_dir", "client_column", "target", "partition", "clients", "split_seed", "test", "validation",
    "stratify", "small_clients", "save_partition",
)  # fmt: skip
METHOD_FIELDS = ("model", "algorithms", "set", "seeds")
KINDS = ("algorithms", "data", "models", "partitions")
WHAT = {
    "compare": "train several methods on the same split and say whether collaborating helps, and whom",
    "run": "train one method",
    "list": "what there is to choose from, with every option and its default",
    "data": "look at data and how it is spread over clients",
    "deploy": "write a folder that runs an experiment over a real network with Flower, TLS and keys",
    "reproduce": "a table or figure of a paper, its numbers beside ours; without a name, list them",
    "report": "what runs gave, as one HTML file to look at: verdict, clients, who learns from whom",
    "explain": "whom each client learns from, layer by layer, and what it gains",
    "watch": "look at runs while they train: a table that is renewed, and the report",
    "plot": "a figure for paper of what runs gave",
    "export": "a client's model as a file for use elsewhere, checked to predict the same",
    "predict": "what an exported model says of new data",
    "cite": "the BibTeX of what runs used: methods, data, partition, model, FedAttune",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one sentence, no usage."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise ConfigError(message)


def make_parser(chosen: str | None) -> Parser:
    """The parser of all commands; only the chosen one gets its options, for to read the schema takes a while."""
    parser = Parser(
        prog="fedattune",
        description="Personalized federated learning: should we federate, with which method, and who gains?",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fedattune {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    fill = {
        "compare": _add_training,
        "run": _add_training,
        "list": _add_list,
        "data": _add_data,
        "cite": _add_cite,
        "deploy": _add_deploy,
        "reproduce": _add_reproduce,
        "report": _add_report,
        "explain": _add_explain,
        "watch": _add_watch,
        "plot": _add_plot,
        "export": _add_export,
        "predict": _add_predict,
    }
    for name, what in WHAT.items():
        command = _command(commands, name, what)
        if name == chosen:
            fill[name](command)
    return parser


def _add_training(command: Parser) -> None:
    from ..config import Settings
    from ..experiment import Experiment
    from ..output import Output

    _add(command.add_argument_group("data"), Experiment, DATA_FIELDS)
    _add(command.add_argument_group("model and methods"), Experiment, METHOD_FIELDS)
    _add(command.add_argument_group("training"), Experiment, Settings.model_fields)
    output = command.add_argument_group("output")
    _add(output, Experiment, ("rounds_to",))
    _add(output, Output, Output.model_fields)


def _add_list(command: Parser) -> None:
    command.add_argument(
        "kind", nargs="?", metavar="{" + ",".join(KINDS) + "}", help="only these (default: all)"
    )
    command.add_argument("--json", action="store_true", help="as JSON")


def _add_data(command: Parser) -> None:
    from ..experiment import Experiment
    from ..output import Output

    show = _command(
        command.add_subparsers(dest="action", metavar="ACTION"),
        "show",
        "label counts per client and heterogeneity",
    )
    _add(show.add_argument_group("data"), Experiment, (*DATA_FIELDS, "set"))
    output = show.add_argument_group("output")
    _add(output, Output, ("config", "json_file"))
    output.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw labels by clients (.png, .svg, .pdf)"
    )
    output.add_argument(
        "--schema",
        metavar="FILE",
        type=Path,
        help="write what nodes with such data must agree on, for deploy",
    )


def _add_cite(command: Parser) -> None:
    command.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        type=Path,
        help="folder that run or compare wrote, or one of its runs",
    )
    command.add_argument(
        "--algorithm",
        "--algorithms",
        dest="algorithms",
        default=argparse.SUPPRESS,
        metavar="A,B,C",
        help="also these methods, or all",
    )


def _add_deploy(command: Parser) -> None:
    from ..config import Settings
    from ..deployment import SIMULATED, Deployment, Kit
    from ..experiment import Experiment

    _add(command.add_argument_group("data of a trial"), Experiment, DATA_FIELDS)
    _add(command.add_argument_group("model and methods"), Experiment, METHOD_FIELDS)
    training = [name for name in Settings.model_fields if name not in SIMULATED]
    _add(command.add_argument_group("training"), Experiment, training)
    server = [name for name in Deployment.model_fields if name != "data_schema"]
    _add(command.add_argument_group("server"), Deployment, server)
    _add(command.add_argument_group("folder"), Kit, Kit.model_fields)


def _add_reproduce(command: Parser) -> None:
    from ..reproduce.options import Reproduction

    command.add_argument("name", nargs="?", metavar="NAME", help="a study, or a YAML file of your own")
    _add(command, Reproduction, Reproduction.model_fields)


def _add_report(command: Parser) -> None:
    from .view_options import Report

    _add_runs(command, "+")
    _add(command, Report, Report.model_fields)


def _add_explain(command: Parser) -> None:
    from .view_options import Explain

    _add_runs(command)
    _add(command, Explain, Explain.model_fields)


def _add_watch(command: Parser) -> None:
    from .view_options import Watch

    _add_runs(command)
    _add(command, Watch, Watch.model_fields)


def _add_plot(command: Parser) -> None:
    from .view_options import Plot

    _add_runs(command, "+")
    _add(command, Plot, Plot.model_fields)


def _add_export(command: Parser) -> None:
    from .view_options import Export

    _add_runs(command)
    _add(command, Export, Export.model_fields)


def _add_predict(command: Parser) -> None:
    from .view_options import Predict

    command.add_argument("model", metavar="MODEL", type=Path, help="a file that fedattune export wrote")
    _add(command, Predict, Predict.model_fields)


def _add_runs(command: Parser, count: str | None = None) -> None:
    command.add_argument(
        "runs" if count else "run",
        nargs=count,
        metavar="RUN",
        type=Path,
        help="folder that run or compare wrote, or one of its runs",
    )


def _command(commands: Any, name: str, what: str) -> Parser:
    command: Parser = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
    )
    return command


def _add(group: Any, schema: "type[BaseModel]", names: Iterable[str]) -> None:
    """One option per field; values stay text, for the schema reads and checks them."""
    for name in names:
        field = schema.model_fields[name]
        flags = ["--" + (field.alias or name).replace("_", "-")]
        if name == "algorithms":
            flags.insert(0, "--algorithm")
        if name == "out":
            flags.insert(0, "-o")
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(name, field)}
        if field.annotation is bool:
            group.add_argument(*flags, action="store_true", **common)
        elif name == "set":
            group.add_argument(*flags, action="append", metavar="NAME=VALUE", **common)
        else:
            group.add_argument(*flags, metavar=_metavar(name, field), **common)


def _help(name: str, field: "FieldInfo") -> str:
    text = (field.description or "").replace("%", "%%")
    default = field.default
    if default is None or default == {} or default is False:
        return text
    said = ",".join(default) if isinstance(default, tuple) else str(default)
    return f"{text} (default: {said}{'; run: fedmcsa' if name == 'algorithms' else ''})"


def _metavar(name: str, field: "FieldInfo") -> str:
    kinds = [field.annotation, *get_args(field.annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            if any(int in get_args(other) for other in kinds):  # a word in place of a number
                return "|".join(["N", *get_args(kind)])
            return "{" + ",".join(get_args(kind)) + "}"
    if bool in kinds:
        return "{true,false}"
    if name == "algorithms":
        return "A,B,C"
    if Path in kinds:
        said = field.description or ""
        return "DIR" if "folder" in said and "file" not in said else "FILE"
    if name == "cells":
        return "FILTER"
    if float in kinds or any(float in get_args(kind) for kind in kinds):
        return "X"
    return "N" if int in kinds or any(int in get_args(kind) for kind in kinds) else "NAME"


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and a phrase for every one that is not known.

    Raises:
        ConfigError: a wrong command, or an option without its value.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(next((word for word in words if not word.startswith("-")), None))
    try:
        space, rest = parser.parse_known_args(words)
    except ConfigError as error:
        raise ConfigError(_mend(str(error))) from error
    if space.command is None:
        raise ConfigError(
            f"give a command: {', '.join(list(WHAT)[:-1])} or {list(WHAT)[-1]}; see fedattune --help"
        )
    if space.command == "data" and space.action is None:
        raise ConfigError("give an action: fedattune data show; see fedattune data --help")
    if space.command == "list" and space.kind is not None:
        from ..registry import lookup

        lookup("kind of thing", space.kind, dict.fromkeys(KINDS))
    known = _flags(parser, space)
    problems = []
    for i, argument in enumerate(rest):
        name = argument.partition("=")[0]
        if argument.startswith("-"):
            hint = near(name, known)
            problems.append(
                f"unknown option {name}"
                + (f", {hint}" if hint else f"; see fedattune {space.command} --help")
            )
        elif i == 0 or not rest[i - 1].startswith("-"):
            problems.append(f"unexpected argument {argument!r}; options start with --")
    return space, problems


def _mend(message: str) -> str:
    """Put argparse's message on a wrong command into our form."""
    if "invalid choice: " in message:
        known = ["show"] if message.startswith("argument ACTION") else WHAT
        got = message.partition("invalid choice: ")[2].partition(" (")[0].strip("'")
        return f"unknown command {got!r}; {did_you_mean(got, known)}"
    return message.removeprefix("argument ").replace("expected one argument", "expected a value")


def _flags(parser: argparse.ArgumentParser, space: argparse.Namespace) -> list[str]:
    """All options of the chosen command."""
    for name in (space.command, getattr(space, "action", None)):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                parser = action.choices[name]
                break
    return [flag for action in parser._actions for flag in action.option_strings]
