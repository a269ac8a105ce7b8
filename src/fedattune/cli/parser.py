"""Make the argument parser from the typed schemas: YAML keys, options and help texts have one source."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

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


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises its errors, so that they are printed as one sentence without usage."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise ConfigError(message)


def _add_training_options(command: ArgumentParser) -> None:
    from ..core.settings import Settings
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions

    _add_options(command.add_argument_group("data"), Experiment, DATA_FIELDS)
    _add_options(command.add_argument_group("model and methods"), Experiment, METHOD_FIELDS)
    _add_options(command.add_argument_group("training"), Experiment, Settings.model_fields)
    output = command.add_argument_group("output")
    _add_options(output, Experiment, ("rounds_to",))
    _add_options(output, OutputOptions, OutputOptions.model_fields)


def _add_data_options(command: ArgumentParser) -> None:
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions

    actions = command.add_subparsers(dest="action", metavar="ACTION")
    show = _add_command(actions, "show", "show label counts per client and measures of heterogeneity")
    _add_options(show.add_argument_group("data"), Experiment, (*DATA_FIELDS, "set"))
    output = show.add_argument_group("output")
    _add_options(output, OutputOptions, ("config", "json_file"))
    for flag, text in (
        ("--picture", "draw the labels of each client (.png, .svg, .pdf)"),
        ("--schema", "write the schema on which the nodes of a deployment must agree"),
    ):
        output.add_argument(flag, metavar="FILE", type=Path, help=text)


def _add_deploy_options(command: ArgumentParser) -> None:
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


def _add_list_options(command: ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_cite_options(command: ArgumentParser) -> None:
    flags = ("--algorithm", "--algorithms")
    common: dict[str, Any] = {"dest": "algorithms", "default": argparse.SUPPRESS, "metavar": "A,B,C"}
    command.add_argument(*flags, **common, help="cite these methods too, or all")


class Command(NamedTuple):
    """A command.

    Attributes:
        help: a phrase with an imperative verb.
        function: `module:function` in this package; it takes the parsed arguments and the problems with them.
        argument: the argument by position, as keywords of `add_argument`.
        options: `module:Schema` whose fields are the options, or a function that adds the options.

    """

    help: str
    function: str
    argument: Mapping[str, Any] | None = None
    options: str | Callable[[ArgumentParser], None] = ""


RUN = {
    "dest": "run",
    "metavar": "RUN",
    "type": Path,
    "help": "folder that run or compare wrote, or one of its runs",
}
RUNS = {**RUN, "dest": "runs", "nargs": "+"}
KIND = {
    "dest": "kind",
    "nargs": "?",
    "metavar": "{" + ",".join(LIST_KINDS) + "}",
    "help": "list only these (default: all)",
}
STUDY = {"dest": "name", "nargs": "?", "metavar": "NAME", "help": "a study, or your own YAML file"}
MODEL = {"dest": "model", "metavar": "MODEL", "type": Path, "help": "a file that fedattune export wrote"}

COMMANDS = {
    "compare": Command(
        "train several methods on the same data split and report whether collaboration helps, and whom",
        "train:train",
        options=_add_training_options,
    ),
    "run": Command("train one method", "train:train", options=_add_training_options),
    "list": Command(
        "list the methods, data sets, models and partitions with their options and defaults",
        "list:print_list",
        KIND,
        _add_list_options,
    ),
    "data": Command("show how data is distributed over clients", "data:show_data", options=_add_data_options),
    "deploy": Command(
        "write a folder that runs an experiment over a real network with Flower, TLS and keys",
        "deploy:deploy",
        options=_add_deploy_options,
    ),
    "reproduce": Command(
        "reproduce a table or figure of a paper and print its numbers beside ours; without a name, list the studies",
        "reproduce:reproduce",
        STUDY,
        "experiments.studies.cells:StudyOptions",
    ),
    "report": Command(
        "write one HTML file about runs: the verdict, the clients, and who learns from whom",
        "report:report",
        RUNS,
        "cli.options:ReportOptions",
    ),
    "explain": Command(
        "explain from whom each client learns, layer by layer, and how much it gains",
        "explain:explain",
        RUN,
        "cli.options:ExplainOptions",
    ),
    "watch": Command(
        "watch runs while they train: a table that updates itself, and the report",
        "watch:watch",
        RUN,
        "cli.options:WatchOptions",
    ),
    "plot": Command("draw a figure of runs for a paper", "report:plot", RUNS, "cli.options:PlotOptions"),
    "export": Command(
        "export a client's model to a file, and check that it predicts the same",
        "export:export",
        RUN,
        "cli.options:ExportOptions",
    ),
    "predict": Command(
        "predict new data with an exported model", "export:predict", MODEL, "cli.options:PredictOptions"
    ),
    "cite": Command(
        "print the BibTeX of everything that runs used: methods, data, partition, model, FedAttune",
        "list:cite",
        {**RUNS, "nargs": "*"},
        _add_cite_options,
    ),
}


def make_parser(chosen: str | None) -> ArgumentParser:
    """Make the parser of all commands; add options only to the chosen command, because schemas load slowly."""
    parser = ArgumentParser(
        prog="fedattune",
        description="Personalized federated learning: should we federate, with which method, and who gains?",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fedattune {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = _add_command(subparsers, name, command.help)
        if name != chosen:
            continue
        if command.argument:
            subparser.add_argument(**command.argument)
        if isinstance(command.options, str):
            module, _, schema = command.options.partition(":")
            found = getattr(import_module(f"fedattune.{module}"), schema)
            _add_options(subparser, found, found.model_fields)
        else:
            command.options(subparser)
    return parser


def _add_command(subparsers: Any, name: str, help_: str) -> ArgumentParser:
    description = help_[0].upper() + help_[1:] + "."
    command: ArgumentParser = subparsers.add_parser(
        name, help=help_, description=description, allow_abbrev=False
    )
    return command


def _add_options(group: Any, schema: "type[BaseModel]", names: Iterable[str]) -> None:
    """Add one option per field; values stay text, because the schema reads and checks them."""
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
    shown = ",".join(default) if isinstance(default, tuple) else str(default)
    return f"{text} (default: {shown}{'; run: fedmcsa' if name == 'algorithms' else ''})"


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
        text = field.description or ""
        return "DIR" if "folder" in text and "file" not in text else "FILE"
    if name == "cells":
        return "FILTER"
    if float in kinds or any(float in get_args(kind) for kind in kinds):
        return "X"
    return "N" if int in kinds or any(int in get_args(kind) for kind in kinds) else "NAME"


def parse_arguments(
    argv: list[str] | None, into: argparse.Namespace | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Args:
        argv: the words of the command line; None for those of this process.
        into: the object that receives the arguments; by default, a new one.

    Returns:
        The arguments, and a phrase for every unknown argument.

    Raises:
        ConfigError: a wrong command, or an option without its value.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(next((word for word in words if not word.startswith("-")), None))
    try:
        space, rest = parser.parse_known_args(words, into or argparse.Namespace())
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
    """Rephrase a message of argparse."""
    if "invalid choice: " in message:
        known = ["show"] if message.startswith("argument ACTION") else COMMANDS
        got = message.partition("invalid choice: ")[2].partition(" (")[0].strip("'")
        return f"unknown command {got!r}; {did_you_mean(got, known)}"
    return message.removeprefix("argument ").replace("expected one argument", "expected a value")


def option_flags(parser: argparse.ArgumentParser, space: argparse.Namespace) -> list[str]:
    """List all options of the chosen command."""
    for name in (space.command, getattr(space, "action", None)):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                parser = action.choices[name]
                break
    return [flag for action in parser._actions for flag in action.option_strings]
