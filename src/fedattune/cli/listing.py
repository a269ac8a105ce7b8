"""What there is to choose from: methods, data, models and partitions, with every option and its default."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..registry import options, summary
from ..text import print_indented
from .plan import OWN_OPTIONS, TABLE

if TYPE_CHECKING:
    from rich.console import Console

KINDS = ("algorithms", "data", "models", "partitions")
Factories = Mapping[str, Callable[..., Any]]
Listing = dict[str, dict[str, dict[str, Any]]]  # kind -> name -> summary and options


def listing(kinds: tuple[str, ...] = KINDS) -> Listing:
    """Summary and options of everything of these kinds."""
    return {kind: {name: _entry(name, factory) for name, factory in _table(kind).items()} for kind in kinds}


def _table(kind: str) -> Factories:
    if kind == "algorithms":
        from ..algorithms import ALGORITHMS

        return ALGORITHMS
    if kind == "models":
        from ..models import MODELS

        return MODELS
    from ..data import PARTITIONS, SOURCES, table

    return PARTITIONS if kind == "partitions" else {**SOURCES, TABLE: table}


def _entry(name: str, factory: Callable[..., Any]) -> dict[str, Any]:
    hidden = OWN_OPTIONS if name == TABLE else frozenset()
    return {
        "summary": summary(factory),
        "options": {option.name: option.default for option in options(factory) if option.name not in hidden},
    }


def print_listing(found: Listing, console: "Console") -> None:
    """Print one paragraph per name: what it is, then its options."""
    from rich.text import Text

    for kind, entries in found.items():
        console.print(Text(kind, style="bold underline"))
        for name, entry in entries.items():
            called = "FILE.csv, FILE.parquet" if kind == "data" and name == TABLE else name
            print_indented(Text.assemble((called, "bold"), "  ", entry["summary"]), 2, console)
            if entry["options"]:
                said = "  ".join(f"{option}={_said(default)}" for option, default in entry["options"].items())
                print_indented(Text(said, style="dim"), 6, console)
        console.print()
    if "data" in found:
        console.print("A table of your own also needs --client-column and --target.")
    console.print("Set an option by --set name.option=value.")


def _said(default: Any) -> str:
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
