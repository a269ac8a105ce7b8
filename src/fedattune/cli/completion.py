"""The command `completion`: a script with which a shell completes commands, options, names and files.

The scripts come from shtab: they are static, so the shell starts no Python while the user types. Refused: argcomplete,
which runs the command itself at every press of the tab key, and would wait for its imports each time.
"""

import argparse
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from .parser import make_parser

FOLDERS = {
    "bash": "fedattune completion bash > ~/.local/share/bash-completion/completions/fedattune",
    "zsh": 'fedattune completion zsh > "${fpath[1]}/_fedattune"',
    "fish": "fedattune completion fish > ~/.config/fish/completions/fedattune.fish",
    "tcsh": "fedattune completion tcsh > ~/.fedattune.tcsh, and source ~/.fedattune.tcsh in ~/.tcshrc",
}
"""Shell -> the command that installs the script."""
ENDINGS = {
    "data": ("csv", "parquet", "gz"), "model": ("py",), "metric": ("py",), "format_": ("py",),
    "partition": ("py", "json"), "name": ("yaml",),
}  # fmt: skip
"""Option or argument -> endings of files that it takes beside names."""
BASH_LIST = """
_fedattune_{name}() {{
  local head="" word="$1"
  case "$word" in *,*) head="${{word%,*}},"; word="${{word##*,}}";; esac
  compgen -P "$head" -W {words} -- "$word"
}}
"""
BASH_WORDS = """
_fedattune_{name}() {{
  compgen -W {words} -- "$1"
  for ending in {endings}; do compgen -f -X "!*.$ending" -- "$1"; done
  compgen -d -- "$1"
}}
"""
ZSH_WORDS = """
_fedattune_{name}() {{
  _alternative "names:{name}:({words})" "files:file:_files -g '{pattern}'"
}}
"""
FISH_LIST = """
function _fedattune_{name}
  set -l head (string replace -r '[^,]*$' '' -- (commandline -ct))
  printf "$head%s\\n" {words}
end
"""
FISH_WORDS = """
function _fedattune_{name}
  printf '%s\\n' {words}
  __fish_complete_suffix {endings}
end
"""


def print_completion(space: Namespace, _: Sequence[str]) -> int:
    """Print the script for a shell, and on a terminal how to install it."""
    import shtab

    parser = make_parser(None, is_full=True)
    names = collect_names()
    for action in _list_actions(parser):
        _complete_action(action, names)
    print(shtab.complete(parser, space.shell))
    if sys.stdout.isatty():
        print(f"install it by: {FOLDERS[space.shell]}", file=sys.stderr)
    return 0


def collect_names() -> dict[str, list[str]]:
    """Collect the names that options and arguments take."""
    from ..algorithms import ALGORITHMS
    from ..analysis.output.formats import TABLE_FORMATS
    from ..core.metrics import METRICS
    from ..core.settings import LOSSES
    from ..data import PARTITIONS, SOURCES
    from ..models import MODELS
    from ..studies import STUDIES

    return {
        "algorithms": [*ALGORITHMS, "all"],
        "data": [*SOURCES],
        "partition": [*PARTITIONS],
        "model": [*MODELS],
        "baseline": ["majority", "sklearn", "centralized"],
        "name": [*STUDIES],
        "metric": [*METRICS],
        "loss": [*LOSSES],
        "format_": [*TABLE_FORMATS],
    }


def _list_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    actions: list[argparse.Action] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                actions += _list_actions(child)
        else:
            actions.append(action)
    return actions


def _complete_action(action: Any, names: dict[str, list[str]]) -> None:
    from shtab import DIRECTORY, FILE

    metavar = str(action.metavar or "")
    if action.dest in ("algorithms", "baseline"):
        action.complete = complete_list(action.dest, names[action.dest])
    elif action.dest in ENDINGS and metavar == "NAME" and (action.option_strings or action.nargs == "?"):
        kind = "study" if action.dest == "name" else action.dest
        action.complete = complete_words(kind, names[action.dest], *ENDINGS[action.dest])
    elif action.dest in ("run", "runs") or metavar == "DIR":
        action.complete = DIRECTORY
    elif metavar == "FILE" or (action.dest in ("model", "data") and metavar != "NAME"):
        action.complete = FILE
    elif metavar.startswith("{") and metavar.endswith("}"):
        action.choices = metavar[1:-1].split(",")


def complete_list(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Complete names with commas between."""
    text = shlex.join(words)
    return {
        "bash": f"_fedattune_{name}",
        "zsh": f"_values -s , {name} {text}",
        "fish": f"(_fedattune_{name})",
        "tcsh": f"({' '.join(words)})",
        "preamble": {
            "bash": BASH_LIST.format(name=name, words=shlex.quote(" ".join(words))),
            "fish": FISH_LIST.format(name=name, words=text),
        },
    }


def complete_words(name: str, words: Sequence[str], *endings: str) -> dict[str, Any]:
    """Complete one name, or a file with one of these endings."""
    text = shlex.join(words)
    pattern = f"*.({'|'.join(endings)})" if len(endings) > 1 else f"*.{endings[0]}"
    return {
        **dict.fromkeys(("bash", "zsh"), f"_fedattune_{name}"),
        "fish": f"(_fedattune_{name})",
        "tcsh": f"({' '.join(words)})",
        "preamble": {
            "bash": BASH_WORDS.format(name=name, words=shlex.quote(" ".join(words)), endings=" ".join(endings)),
            "zsh": ZSH_WORDS.format(name=name, words=text, pattern=pattern),
            "fish": FISH_WORDS.format(name=name, words=text, endings=" ".join(f".{one}" for one in endings)),
        },
    }
