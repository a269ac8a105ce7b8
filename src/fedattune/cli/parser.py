"""The argument parser, made from the typed schema: YAML keys, options and their help are one thing."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from .._version import __version__
from ..core.errors import ConfigError, did_you_mean, suggest_name

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

DATA_FIELDS = (
    "data", "data_dir", "client_column", "target", "partition", "clients", "split_seed", "test", "validation",
    "stratify", "small_clients", "save_partition",
)  # fmt: skip


METHOD_FIELDS = ("model", "algorithms", "set", "seeds")


LIST_KINDS = ("algorithms", "data", "models", "partitions")


COMMANDS = {
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


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are ours: one sentence, no usage."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise ConfigError(message)


def make_parser(chosen: str | None) -> ArgumentParser:
    """The parser of all commands; only the chosen one gets its options, for to read the schema takes a while."""
    parser = ArgumentParser(
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
    for name, what in COMMANDS.items():
        command = _add_command(commands, name, what)
        if name == chosen:
            fill[name](command)
    return parser


def _add_training(command: ArgumentParser) -> None:
    from ..core.settings import Settings
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions

    _add_options(command.add_argument_group("data"), Experiment, DATA_FIELDS)
    _add_options(command.add_argument_group("model and methods"), Experiment, METHOD_FIELDS)
    _add_options(command.add_argument_group("training"), Experiment, Settings.model_fields)
    output = command.add_argument_group("output")
    _add_options(output, Experiment, ("rounds_to",))
    _add_options(output, OutputOptions, OutputOptions.model_fields)


def _add_list(command: ArgumentParser) -> None:
    command.add_argument(
        "kind", nargs="?", metavar="{" + ",".join(LIST_KINDS) + "}", help="only these (default: all)"
    )
    command.add_argument("--json", action="store_true", help="as JSON")


def _add_data(command: ArgumentParser) -> None:
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions

    show = _add_command(
        command.add_subparsers(dest="action", metavar="ACTION"),
        "show",
        "label counts per client and heterogeneity",
    )
    _add_options(show.add_argument_group("data"), Experiment, (*DATA_FIELDS, "set"))
    output = show.add_argument_group("output")
    _add_options(output, OutputOptions, ("config", "json_file"))
    output.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw labels by clients (.png, .svg, .pdf)"
    )
    output.add_argument(
        "--schema",
        metavar="FILE",
        type=Path,
        help="write what nodes with such data must agree on, for deploy",
    )


def _add_cite(command: ArgumentParser) -> None:
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


def _add_deploy(command: ArgumentParser) -> None:
    from ..core.settings import Settings
    from ..experiments.config import Experiment
    from ..experiments.deploy.config import SIMULATION_OPTIONS, DeploymentOptions, KitOptions

    _add_options(command.add_argument_group("data of a trial"), Experiment, DATA_FIELDS)
    _add_options(command.add_argument_group("model and methods"), Experiment, METHOD_FIELDS)
    training = [name for name in Settings.model_fields if name not in SIMULATION_OPTIONS]
    _add_options(command.add_argument_group("training"), Experiment, training)
    server = [name for name in DeploymentOptions.model_fields if name != "data_schema"]
    _add_options(command.add_argument_group("server"), DeploymentOptions, server)
    _add_options(command.add_argument_group("folder"), KitOptions, KitOptions.model_fields)


def _add_reproduce(command: ArgumentParser) -> None:
    from ..experiments.studies.cells import StudyOptions

    command.add_argument("name", nargs="?", metavar="NAME", help="a study, or a YAML file of your own")
    _add_options(command, StudyOptions, StudyOptions.model_fields)


def _add_report(command: ArgumentParser) -> None:
    from .options import ReportOptions

    _add_runs(command, "+")
    _add_options(command, ReportOptions, ReportOptions.model_fields)


def _add_explain(command: ArgumentParser) -> None:
    from .options import ExplainOptions

    _add_runs(command)
    _add_options(command, ExplainOptions, ExplainOptions.model_fields)


def _add_watch(command: ArgumentParser) -> None:
    from .options import WatchOptions

    _add_runs(command)
    _add_options(command, WatchOptions, WatchOptions.model_fields)


def _add_plot(command: ArgumentParser) -> None:
    from .options import PlotOptions

    _add_runs(command, "+")
    _add_options(command, PlotOptions, PlotOptions.model_fields)


def _add_export(command: ArgumentParser) -> None:
    from .options import ExportOptions

    _add_runs(command)
    _add_options(command, ExportOptions, ExportOptions.model_fields)


def _add_predict(command: ArgumentParser) -> None:
    from .options import PredictOptions

    command.add_argument("model", metavar="MODEL", type=Path, help="a file that fedattune export wrote")
    _add_options(command, PredictOptions, PredictOptions.model_fields)


def _add_runs(command: ArgumentParser, count: str | None = None) -> None:
    command.add_argument(
        "runs" if count else "run",
        nargs=count,
        metavar="RUN",
        type=Path,
        help="folder that run or compare wrote, or one of its runs",
    )


def _add_command(commands: Any, name: str, what: str) -> ArgumentParser:
    command: ArgumentParser = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
    )
    return command


def _add_options(group: Any, schema: "type[BaseModel]", names: Iterable[str]) -> None:
    """One option per field; values stay text, for the schema reads and checks them."""
    for name in names:
        field = schema.model_fields[name]
        flags = ["--" + (field.alias or name).replace("_", "-")]
        if name == "algorithms":
            flags.insert(0, "--algorithm")
        if name == "out":
            flags.insert(0, "-o")
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help_text(name, field)}
        if field.annotation is bool:
            group.add_argument(*flags, action="store_true", **common)
        elif name == "set":
            group.add_argument(*flags, action="append", metavar="NAME=VALUE", **common)
        else:
            group.add_argument(*flags, metavar=_metavar(name, field), **common)


def _help_text(name: str, field: "FieldInfo") -> str:
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


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and a phrase for every one that is not known.

    Raises:
        ConfigError: a wrong command, or an option without its value.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(next((word for word in words if not word.startswith("-")), None))
    try:
        space, rest = parser.parse_known_args(words)
    except ConfigError as error:
        raise ConfigError(_rephrase(str(error))) from error
    if space.command is None:
        raise ConfigError(
            f"give a command: {', '.join(list(COMMANDS)[:-1])} or {list(COMMANDS)[-1]}; see fedattune --help"
        )
    if space.command == "data" and space.action is None:
        raise ConfigError("give an action: fedattune data show; see fedattune data --help")
    if space.command == "list" and space.kind is not None:
        from ..core.options import look_up

        look_up("kind of thing", space.kind, dict.fromkeys(LIST_KINDS))
    known = option_flags(parser, space)
    problems = []
    for i, argument in enumerate(rest):
        name = argument.partition("=")[0]
        if argument.startswith("-"):
            hint = suggest_name(name, known)
            problems.append(
                f"unknown option {name}"
                + (f", {hint}" if hint else f"; see fedattune {space.command} --help")
            )
        elif i == 0 or not rest[i - 1].startswith("-"):
            problems.append(f"unexpected argument {argument!r}; options start with --")
    return space, problems


def _rephrase(message: str) -> str:
    """Put argparse's message on a wrong command into our form."""
    if "invalid choice: " in message:
        known = ["show"] if message.startswith("argument ACTION") else COMMANDS
        got = message.partition("invalid choice: ")[2].partition(" (")[0].strip("'")
        return f"unknown command {got!r}; {did_you_mean(got, known)}"
    return message.removeprefix("argument ").replace("expected one argument", "expected a value")


def option_flags(parser: argparse.ArgumentParser, space: argparse.Namespace) -> list[str]:
    """All options of the chosen command."""
    for name in (space.command, getattr(space, "action", None)):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                parser = action.choices[name]
                break
    return [flag for action in parser._actions for flag in action.option_strings]
