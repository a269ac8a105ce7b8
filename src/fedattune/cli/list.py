"""What there is to choose from: methods, data, models and partitions, with every option and its default.

`fedattune cite`: the BibTeX of what runs used.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..analysis.citations import UsedItem, collect_used_items, format_bibtex
from ..analysis.tables import print_indented
from ..core.errors import ConfigError
from ..core.options import list_options, look_up, summarize
from ..experiments.plan import TABLE_COLUMN_OPTIONS, TABLE_SOURCE
from ..experiments.validate import expand_names

if TYPE_CHECKING:
    from rich.console import Console

KINDS = ("algorithms", "data", "models", "partitions")


Factories = Mapping[str, Callable[..., Any]]


Choices = dict[str, dict[str, dict[str, Any]]]  # kind -> name -> summary and options


def collect_choices(kinds: tuple[str, ...] = KINDS) -> Choices:
    """Summary and options of everything of these kinds."""
    return {
        kind: {name: _entry(name, factory) for name, factory in _factories(kind).items()} for kind in kinds
    }


def _factories(kind: str) -> Factories:
    if kind == "algorithms":
        from ..algorithms import ALGORITHMS

        return ALGORITHMS
    if kind == "models":
        from ..models import MODELS

        return MODELS
    from ..data import PARTITIONS, SOURCES, load_table

    return PARTITIONS if kind == "partitions" else {**SOURCES, TABLE_SOURCE: load_table}


def _entry(name: str, factory: Callable[..., Any]) -> dict[str, Any]:
    hidden = TABLE_COLUMN_OPTIONS if name == TABLE_SOURCE else frozenset()
    return {
        "summary": summarize(factory),
        "options": {
            option.name: option.default for option in list_options(factory) if option.name not in hidden
        },
    }


def print_choices(found: Choices, console: "Console") -> None:
    """Print one paragraph per name: what it is, then its options."""
    from rich.text import Text

    for kind, entries in found.items():
        console.print(Text(kind, style="bold underline"))
        for name, entry in entries.items():
            called = "FILE.csv, FILE.parquet" if kind == "data" and name == TABLE_SOURCE else name
            print_indented(Text.assemble((called, "bold"), "  ", entry["summary"]), 2, console)
            if entry["options"]:
                said = "  ".join(
                    f"{option}={_format_default(default)}" for option, default in entry["options"].items()
                )
                print_indented(Text(said, style="dim"), 6, console)
        console.print()
    if "data" in found:
        console.print("A table of your own also needs --client-column and --target.")
    console.print("Set an option by --set name.option=value.")


def _format_default(default: Any) -> str:
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def cite(space: Namespace) -> str:
    """The BibTeX for the folders and methods given.

    Raises:
        ConfigError: nothing or an unknown method was given.
        RunError: a folder holds no run.
    """
    from ..algorithms import ALGORITHMS

    given = [name.strip() for name in getattr(space, "algorithms", "").split(",") if name.strip()]
    names = expand_names(given, ALGORITHMS)
    if not space.runs and not names:
        raise ConfigError("cite needs the folders of runs, or --algorithms; see fedattune cite --help")
    for name in names:
        look_up("algorithm", name, ALGORITHMS)
    used, version = collect_used_items(space.runs)
    return format_bibtex(dict.fromkeys([*used, *(UsedItem("method", name) for name in names)]), version)
