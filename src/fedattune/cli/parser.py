"""Make the argument parser from the typed schemas: YAML keys, options and help texts have one source."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from .._version import __version__
from ..core.errors import ConfigError, did_you_mean, suggest_name

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

COMMON_OPTIONS = (
    "data", "client_column", "target", "partition", "clients", "model", "algorithms", "set", "seeds",
    "metric", "splits", "tune", "baseline", "rounds", "cohort", "steps", "epochs", "batch_size", "lr",
    "engine", "device", "config", "out", "resume", "quiet",
)  # fmt: skip
"""Options that `--help` shows of a command with more than `MAX_SHORT_HELP` options; `--help-all` shows all."""
MAX_SHORT_HELP = 25
METAVARS = {
    "algorithms": "A,B,C",
    "allow_code": "CODE",
    "cells": "FILTER",
    "class_weights": "WEIGHTS",
    "set": "NAME=VALUE",
}
OTHER_FLAGS = {"algorithms": ("--algorithm",), "out": ("-o",)}
LIST_KINDS = ("algorithms", "data", "models", "partitions")
TEMPLATES = ("algorithm", "model", "data")
SHELLS = ("bash", "zsh", "fish", "tcsh")
DEFAULT_ALGORITHMS = {"run": "fedmcsa", "deploy": "local,fedmcsa"}
"""Defaults of --algorithms in commands that do not take the default of `Experiment`."""
ONE_METHOD_HELP = {
    "algorithms": "the method, or your own as file.py:factory",
    "baseline": argparse.SUPPRESS,
    "budget": argparse.SUPPRESS,
}
"""Option -> help in `run`, which trains one method; it refuses what is hidden, and says so."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises its errors, so that they are printed as one sentence without usage.

    `shown` holds the destinations that `--help` shows; None shows all.
    """

    shown: frozenset[str] | None = None

    def shorten_help(self, common: Iterable[str]) -> None:
        """Let `--help` show the common options only, and add `--help-all`, if the command has many options."""
        visible = (one for one in self._actions if one.help != argparse.SUPPRESS)
        options = [one for one in visible if one.option_strings and one.dest != "help"]
        if len(options) > MAX_SHORT_HELP:
            self.shown = frozenset({"help", "help_all", *common})
            self.epilog = f"These are the common options; {self.prog} --help-all shows all {len(options)}."
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all options and exit"
            )

    def format_help(self) -> str:
        """Return the help text, without the options that are not shown."""
        formatter = self._get_formatter()
        actions = [one for one in self._actions if self._is_shown(one)]
        formatter.add_usage(self.usage, actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([one for one in group._group_actions if self._is_shown(one)])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _is_shown(self, action: argparse.Action) -> bool:
        return self.shown is None or not action.option_strings or action.dest in self.shown

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        _, is_missing, names = message.partition("arguments are required: ")
        if is_missing:
            raise ConfigError(f"give {names.upper()}; see {self.prog} --help")
        raise ConfigError(message.removeprefix("argument ").replace("expected one argument", "expected a value"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            raise ConfigError(f"unknown {kind} {value!r}; {did_you_mean(value, action.choices)}")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, ArgumentParser)
        parser.shown = parser.epilog = None
        parser.print_help()
        parser.exit()


class Options(NamedTuple):
    """A group of options: fields of `schema` (`module:Schema`, or a schema of `cli.options`); by default, all of them.

    `fields` are names or `module:NAMES`, and `without` is `module:NAMES` of fields to leave out. `common` is
    `module:NAMES` of options that `--help` shows in addition to `COMMON_OPTIONS`.
    """

    schema: str
    title: str = "options"
    fields: str | tuple[str, ...] = ()
    without: str = ""
    common: str = ""


class Command(NamedTuple):
    """A command: its help begins with an imperative verb, and its arguments are keywords of `add_argument`.

    `function` is `module:function` in this package, or the name of both. It takes the parsed arguments and the problems
    with them, and returns the exit code. `commands` stand below this one, which then only groups them.
    """

    help: str
    function: str = ""
    options: str | tuple[Options, ...] = ()
    arguments: tuple[Mapping[str, Any], ...] = ()
    commands: Mapping[str, "Command"] = MappingProxyType({})


EXPERIMENT, SETTINGS = "experiments.config:Experiment", "core.settings:Settings"
OUTPUT, DEPLOY = "experiments.output:OutputOptions", "deploy.config"
DATA_FIELDS = "experiments.config:DATA_FIELDS"
METHOD_OPTIONS = ("model", "algorithms", "set", "seeds")
TRAINING = (
    Options(EXPERIMENT, "data", DATA_FIELDS),
    Options(EXPERIMENT, "model and methods", METHOD_OPTIONS),
    Options(EXPERIMENT, "verdict", ("metric", "budget", "splits", "tune", "baseline")),
    Options(SETTINGS, "training"),
    Options(EXPERIMENT, "output", ("rounds_to",)),
    Options(OUTPUT, "output"),
)
SHOW = (
    Options(EXPERIMENT, "data", DATA_FIELDS),
    Options(EXPERIMENT, "data", ("set",)),
    Options(OUTPUT, "output", ("config", "allow_code", "json_file")),
    Options("ShowOptions", "output"),
)
DEPLOYMENT = (
    Options(EXPERIMENT, "data of a trial", DATA_FIELDS),
    Options(EXPERIMENT, "model and methods", METHOD_OPTIONS),
    Options(SETTINGS, "training", without=f"{DEPLOY}:SIMULATION_OPTIONS"),
    Options(f"{DEPLOY}:DeploymentOptions", "server", common=f"{DEPLOY}:COMMON_OPTIONS"),
    Options(f"{DEPLOY}:KitOptions", "folder"),
    Options(OUTPUT, "folder", ("allow_code",)),
)
STUDY = "studies.study:StudyOptions"


def _make_argument(name: str, help_: str, **more: Any) -> dict[str, Any]:
    return {"dest": name, "metavar": name.upper(), "help": help_, **more}


RUN = _make_argument("run", "folder that run or compare wrote, or one of its runs", type=Path)
RUNS = {**RUN, "dest": "runs", "nargs": "+"}
KIND = {
    "dest": "kind", "help": "list only these (default: all)", "nargs": "?", "choices": LIST_KINDS,
    "type": lambda word: "algorithms" if word == "methods" else word,  # messages and pages call algorithms methods
}  # fmt: skip
NAME = _make_argument("name", "a study, or your own YAML file", nargs="?")
MODEL = _make_argument("model", "a file that fedattune export wrote", type=Path)
TEMPLATE = {"dest": "template", "help": "kind of the file", "choices": TEMPLATES}
NEW_NAME = _make_argument("name", "its name; the file is NAME.py in the current folder")
NODE_FILE = _make_argument("node", "the node's configuration, nodes/N.toml", type=Path)
NODE = {
    **NODE_FILE,
    "nargs": "?",
    "help": "a node's configuration, nodes/N.toml, or the folder of its state (default: FEDATTUNE_STATE, else state)",
}
DEPLOY_FOLDER = _make_argument("folder", "the folder that deploy write wrote", type=Path)
RUNNING_FOLDER = {**DEPLOY_FOLDER, "help": "the folder that deploy write wrote, or its run folder"}
SHELL = {"dest": "shell", "help": "your shell", "choices": SHELLS}
REQUEST: tuple[Any, ...] = ("deploy:request", (), (RUNNING_FOLDER,))
COMMANDS = {
    "compare": Command(
        "train several methods on the same split and report whether collaboration helps, and whom", "train", TRAINING
    ),
    "run": Command("train one method", "train", TRAINING),
    "list": Command(
        "list methods, data sets, models and partitions, with their options", "list:print_list", "JsonOptions", (KIND,)
    ),
    "data": Command(
        "look at data before training",
        commands={
            "show": Command("show label counts per client and measures of heterogeneity", "data:show_data", SHOW)
        },
    ),
    "deploy": Command(
        "train over a real network with Flower, TLS and keys",
        commands={
            "write": Command("write the folder of a deployment", "deploy:write", DEPLOYMENT),
            "check": Command("check a written folder", "deploy:check", (), (DEPLOY_FOLDER,)),
            "nodes": Command("list the registered nodes", "deploy:print_nodes", (), (DEPLOY_FOLDER,)),
            "pause": Command("end the run after its current round, to be continued", *REQUEST),
            "resume": Command("take back a request to pause or abort", *REQUEST),
            "abort": Command("end the run after its current round, and compare the finished methods", *REQUEST),
        },
    ),
    "reproduce": Command("reproduce a paper's table or figure, or list them", "reproduce", STUDY, (NAME,)),
    "report": Command(
        "write one HTML page about runs: verdict, gains, curves, who learns from whom",
        "report",
        "ReportOptions",
        (RUNS,),
    ),
    "table": Command(
        "print or write the table of runs: text, LaTeX, Markdown, CSV or Parquet",
        "report:print_table",
        "TableOptions",
        (RUNS,),
    ),
    "explain": Command(
        "explain from whom clients learn, layer by layer, and their gain", "explain", "ExplainOptions", (RUN,)
    ),
    "watch": Command("watch runs while they train; with -o, write their report", "watch", "WatchOptions", (RUN,)),
    "plot": Command("draw a figure of runs for a paper", "report:plot", "PlotOptions", (RUNS,)),
    "export": Command("export a client's model to a file that predicts the same", "export", "ExportOptions", (RUN,)),
    "predict": Command("predict new data with a model", "export:predict", "PredictOptions", (MODEL,)),
    "cite": Command("print the BibTeX of all that runs used", "list:cite", "CiteOptions", ({**RUNS, "nargs": "*"},)),
    "new": Command(
        "write a commented file that works: a method, a model or data of your own",
        "new:write_template",
        arguments=(TEMPLATE, NEW_NAME),
    ),
    "completion": Command(
        "print a script that completes commands, options and names in your shell",
        "completion:print_completion",
        arguments=(SHELL,),
    ),
    "privacy": Command(
        "compute the noise for an epsilon, or the epsilon of a noise, without training",
        "privacy:plan_privacy",
        "PrivacyOptions",
    ),
    "node": Command(
        "check a node of a deployment, and see what left it",
        commands={
            "check": Command("check that a node is ready", "node:check", "NodeCheckOptions", (NODE_FILE,)),
            "approve": Command(
                "approve what a node tells about its data", "node:approve", "NodeApproveOptions", (NODE,)
            ),
            "audit": Command("show what came to a node and what left it", "node:audit", "JsonOptions", (NODE,)),
        },
    ),
    "doctor": Command("check the installation, and say what to do", "doctor", "DoctorOptions"),
}


def make_parser(selected_command: str | None, *, is_full: bool = False) -> ArgumentParser:
    """Make the parser of all commands; add options only to the selected one, because schemas load slowly."""
    parser = ArgumentParser(
        prog="fedattune",
        description="Personalized federated learning: should we federate, with which method, and who gains?",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fedattune {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = _add_command(subparsers, name, command.help)
        if name == selected_command or is_full:
            _fill_command(subparser, command, name)
    return parser


def _fill_command(parser: ArgumentParser, command: Command, word: str) -> None:
    """Add the arguments and options of a command; `word` is its name, or that of the command above it."""
    if command.commands:
        subparsers = parser.add_subparsers(dest="action", metavar="ACTION")
        for name, child in command.commands.items():
            _fill_command(_add_command(subparsers, name, child.help), child, word)
    for argument in command.arguments:
        parser.add_argument(**argument)
    groups: dict[str, Any] = {"options": parser}
    common = [*COMMON_OPTIONS]
    for options in (Options(command.options),) if isinstance(command.options, str) else command.options:
        if options.title not in groups:
            groups[options.title] = parser.add_argument_group(options.title)
        schema = _import(options.schema)
        known = schema.flat_fields() if hasattr(schema, "flat_fields") else schema.model_fields
        without = _import(options.without) if options.without else ()
        fields = _import(options.fields) if isinstance(options.fields, str) else options.fields
        _add_options(groups[options.title], {k: known[k] for k in fields or known if k not in without}, word)
        common += _import(options.common) if options.common else ()
    parser.shorten_help(common)


def _import(path: str) -> Any:
    module, _, name = path.rpartition(":")
    return getattr(import_module(f"fedattune.{module or 'cli.options'}"), name)


def _add_command(subparsers: Any, name: str, help_: str) -> ArgumentParser:
    description = help_[0].upper() + help_[1:] + "."
    command: ArgumentParser = subparsers.add_parser(name, help=help_, description=description, allow_abbrev=False)
    return command


def _add_options(group: Any, fields: "Mapping[str, FieldInfo]", command: str) -> None:
    """Add one option per field; values stay text, because the schema reads and checks them."""
    for name, field in fields.items():
        if field.exclude:  # no option of the command line
            continue
        flags = [*OTHER_FLAGS.get(name, ()), "--" + (field.alias or name).replace("_", "-")]
        text = _format_help(name, field, command)
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if field.annotation is bool:
            group.add_argument(*flags, action="store_true", **common)
        else:
            action = "append" if name == "set" else "store"
            group.add_argument(*flags, action=action, metavar=_choose_metavar(name, field, command), **common)


def _format_help(name: str, field: "FieldInfo", command: str) -> str:
    text = (field.description or "").replace("%", "%%")
    if command == "run":
        text = ONE_METHOD_HELP.get(name, text)
    default = DEFAULT_ALGORITHMS.get(command, field.default) if name == "algorithms" else field.default
    if default in (None, {}, ()) or default is False or "(default: " in text or text == argparse.SUPPRESS:
        return text
    value = ",".join(default) if isinstance(default, tuple) else str(default)
    return f"{text} (default: {value})"


def _choose_metavar(name: str, field: "FieldInfo", command: str) -> str:
    if name in METAVARS and (command, name) != ("run", "algorithms"):
        return METAVARS[name]
    kinds = [field.annotation, *get_args(field.annotation)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    kinds += [inner for kind in kinds for inner in get_args(kind)]
    if words:  # in the place of a number, or the only values
        return "|".join(["N", *words]) if int in kinds else "{" + ",".join(words) + "}"
    if bool in kinds:
        return "{true,false}"
    if Path in kinds:
        text = field.description or ""
        return "DIR" if "folder" in text and "file" not in text else "FILE"
    return "X" if float in kinds else "N" if int in kinds else "NAME"


def parse_arguments(
    argv: list[str] | None, into: argparse.Namespace | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line, by default this process's own; add a phrase for every unknown argument."""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(next((word for word in words if not word.startswith("-")), None))
    space, rest = parser.parse_known_args(words, into or argparse.Namespace())
    if space.command is None:
        raise ConfigError(
            f"give a command: {', '.join(list(COMMANDS)[:-1])} or {list(COMMANDS)[-1]}; see fedattune --help"
        )
    command = space.command
    if (actions := COMMANDS[command].commands) and space.action is None:
        *others, last = actions
        ways = f"{', '.join(others)}{' or ' * bool(others)}{last}"
        raise ConfigError(f"give an action: fedattune {command} {ways}; see fedattune {command} --help")
    for name in (command, getattr(space, "action", None)):  # the parser of the chosen command
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                parser = action.choices[name]
                break
    flags = [flag for action in parser._actions for flag in action.option_strings]
    typed = f"fedattune {command}" + (f" {space.action}" if actions else "")
    problems = []
    for i, argument in enumerate(rest):
        name = argument.partition("=")[0]
        if argument.startswith("-"):
            hint = suggest_name(name, flags)
            problems.append(f"unknown option {name}" + (f", {hint}" if hint else f"; see {typed} --help"))
        elif i == 0 or not rest[i - 1].startswith("-"):
            problems.append(f"unexpected argument {argument!r}; options start with --")
    return space, problems
