"""Make the page of all commands from their parsers, independent of the width of a window."""

import argparse
from collections.abc import Iterator

from fedattune.cli.parser import COMMANDS, make_parser

INTRO = """# Commands

This page is made from the program's own options; `fedattune COMMAND --help` prints the same text. `compare`, `run` and
`deploy write` print their common options by `--help`, and all of them by `--help-all`. `--set` takes the
options of [methods](algorithms/index.md) and of [data sets, partitions and models](data.md); `fedattune list` prints
all of them.

Every option of `compare` and `run` can also stand in a YAML file for `--config`, with underscores in place of hyphens.
The command line overrides the file.
"""


def list_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command and sub-command, as typed, with its parser."""
    for name in COMMANDS:
        parser = find_subparsers(make_parser(name))[name]
        children = find_subparsers(parser)
        if not children:
            yield name, parser
        for action, child in children.items():
            yield f"{name} {action}", child


def find_subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def make_page() -> str:
    """Return all commands with all options, as Markdown."""
    return "\n".join([INTRO, *(_format_section(name, parser) for name, parser in list_parsers())])


def _format_section(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"## `fedattune {name}`", "", parser.description or "", ""]
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.help is not argparse.SUPPRESS and one.dest != "help"]
        if not actions:
            continue
        if group.title not in ("positional arguments", "options"):
            lines += [f"### {name}: {group.title}", ""]
        lines += ["| | |", "|---|---|"]
        lines += [f"| {_format_flags(one)} | {_escape_cell(_format_help(one))} |" for one in actions]
        lines.append("")
    return "\n".join(lines)


def _format_flags(action: argparse.Action) -> str:
    value = str(action.metavar or "")
    if not action.option_strings:
        many = {"+": " ...", "*": " ..."}.get(str(action.nargs), "")
        return f"`{_escape_cell(value)}{many}`"
    names = ", ".join(f"`{flag}`" for flag in action.option_strings)
    return f"{names} `{_escape_cell(value)}`" if action.nargs != 0 else names


def _format_help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    return text.replace("<", "&lt;").replace("*", "\\*")


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")
