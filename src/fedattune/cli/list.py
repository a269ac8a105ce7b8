"""The commands `list` and `cite`: all methods, data sets, models and partitions, and the papers to cite for them."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ..analysis.citations import UsedItem, collect_used_items, format_bibtex
from ..analysis.output.tables import make_console, print_indented
from ..core.errors import ConfigError
from ..core.options import list_options, look_up, summarize
from ..experiments.load import FOLDER_SOURCE, IMAGE_SIZE, TABLE_COLUMN_OPTIONS, TABLE_SOURCE, expand_names
from .main import print_content
from .options import CiteOptions, JsonOptions, parse_options
from .parser import LIST_KINDS

if TYPE_CHECKING:
    from rich.console import Console

Choices = dict[str, dict[str, dict[str, Any]]]
"""Kind -> name -> summary and options."""
FIELDS_OF: dict[str, Set[str]] = {TABLE_SOURCE: TABLE_COLUMN_OPTIONS, FOLDER_SOURCE: {IMAGE_SIZE}}
"""Options of a source of custom data that are options of the command."""
SHOWN_NAMES = {TABLE_SOURCE: "FILE.csv, FILE.parquet", FOLDER_SOURCE: "FOLDER/"}


def print_list(space: Namespace, problems: Sequence[str]) -> int:
    """Print the methods, data sets, models and partitions, or the entries of one kind."""
    options = parse_options(JsonOptions, space, problems)
    choices: Choices = {}
    for kind in (space.kind,) if space.kind else LIST_KINDS:
        choices[kind] = {}
        for name, factory in _get_factories(kind).items():
            hidden = FIELDS_OF.get(name, frozenset())
            defaults = {one.name: one.default for one in list_options(factory) if one.name not in hidden}
            choices[kind][name] = {"summary": summarize(factory), "options": defaults}
    if "algorithms" in choices:
        from ..algorithms import METHODS
        from ..experiments.tuning import LR_FACTORS

        for name, entry in choices["algorithms"].items():  # what --tune tries, the learning rate relative to --lr
            entry["tune"] = {"lr": tuple(round(factor, 3) for factor in LR_FACTORS), **METHODS[name].tune}
    if options.json_:
        print(json.dumps(choices, indent=2, default=str))
    else:
        _print_choices(choices, make_console())
    return 0


def _get_factories(kind: str) -> Mapping[str, Callable[..., Any]]:
    if kind == "algorithms":
        from ..algorithms import ALGORITHMS

        return ALGORITHMS
    if kind == "models":
        from ..models import MODELS

        return MODELS
    from ..data import PARTITIONS, SOURCES, load_image_folder, load_table

    return (
        PARTITIONS if kind == "partitions" else {**SOURCES, TABLE_SOURCE: load_table, FOLDER_SOURCE: load_image_folder}
    )


def _print_choices(choices: Choices, console: "Console") -> None:
    from rich.text import Text

    for kind, entries in choices.items():
        console.print(Text(kind, style="bold underline"))
        for name, entry in entries.items():
            shown_name = SHOWN_NAMES.get(name, name) if kind == "data" else name
            print_indented(Text.assemble((shown_name, "bold"), "  ", entry["summary"]), 2, console)
            if entry["options"]:
                defaults = "  ".join(f"{key}={_format_default(one)}" for key, one in entry["options"].items())
                print_indented(Text(defaults, style="dim"), 6, console)
            if tuned := {key: values for key, values in entry.get("tune", {}).items() if key != "lr"}:
                tried = "  ".join(f"{key}={','.join(map(_format_default, each))}" for key, each in tuned.items())
                print_indented(Text(f"--tune: {tried}", style="dim"), 6, console)
        console.print()
    if "data" in choices:
        console.print("A table of your own also needs --client-column and --target.")
    console.print("Set an option by --set name.option=value.")
    if "algorithms" in choices:
        factors = ", ".join(f"{one:g}" for one in next(iter(choices["algorithms"].values()))["tune"]["lr"])
        console.print(
            f"--tune N tries the learning rate of every method at {factors} times --lr, and the values behind --tune: "
            "together with it."
        )
        console.print("A method of your own: --algorithms file.py:factory; fedattune new algorithm NAME writes one.")


def _format_default(default: Any) -> str:
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def cite(space: Namespace, problems: Sequence[str]) -> int:
    """Print the BibTeX of runs and methods."""
    from ..algorithms import ALGORITHMS

    options = parse_options(CiteOptions, space, problems)
    entries = [name.strip() for name in (options.algorithms or "").split(",") if name.strip()]
    names = expand_names(entries, ALGORITHMS)
    if not space.runs and not names:
        raise ConfigError("cite needs the folders of runs, or --algorithms; see fedattune cite --help")
    for name in names:
        look_up("algorithm", name, ALGORITHMS)
    items, version = collect_used_items(space.runs)
    methods = (UsedItem("method", name) for name in names)
    print_content(format_bibtex(dict.fromkeys([*items, *methods]), version))
    return 0
