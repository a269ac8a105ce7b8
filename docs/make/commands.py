"""The page of all commands, from the parsers: it does not depend on the width of a window."""

import argparse
from collections.abc import Iterator

from fedattune.cli.parser import COMMANDS, make_parser

INTRO = """# Commands

This page is made from the program's own options; `fedattune COMMAND --help` says the same.
The options of methods, data sets, partitions and models, which `--set` takes, are on the pages of the
[methods](algorithms/index.md) and on the page on [data](data.md); `fedattune list` prints them all.

Every option of `compare` and `run` can also stand in a YAML file for `--config`, with underscores in place of
hyphens; the command line goes before the file.
"""


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and sub-command, as it is typed, with its parser."""
    for name in COMMANDS:
        parser = _children(make_parser(name))[name]
        children = _children(parser)
        if not children:
            yield name, parser
        for action, child in children.items():
            yield f"{name} {action}", child


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def page() -> str:
    """All commands with all options, as Markdown."""
    return "\n".join([INTRO, *(_section(name, parser) for name, parser in parsers())])


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"## `fedattune {name}`", "", parser.description or "", ""]
    for group in parser._action_groups:
        actions = [
            one for one in group._group_actions if one.help is not argparse.SUPPRESS and one.dest != "help"
        ]
        if not actions:
            continue
        if group.title not in ("positional arguments", "options"):
            lines += [f"### {name}: {group.title}", ""]
        lines += ["| | |", "|---|---|"]
        lines += [f"| {_called(one)} | {_cell(_help(one))} |" for one in actions]
        lines.append("")
    return "\n".join(lines)


def _called(action: argparse.Action) -> str:
    value = str(action.metavar or "")
    if not action.option_strings:
        many = {"+": " ...", "*": " ..."}.get(str(action.nargs), "")
        return f"`{_cell(value)}{many}`"
    names = ", ".join(f"`{flag}`" for flag in action.option_strings)
    return f"{names} `{_cell(value)}`" if action.nargs != 0 else names


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    return text.replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
