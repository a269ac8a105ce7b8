"""Cite the papers behind methods, data, partitions and models, as BibTeX.

The entries of methods stand in the docstrings of the methods' files, those of data sets, partitions and models at their
functions: `core.citing.cite`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .._version import __version__
from ..core.citing import ENTRY, find_sources
from ..core.errors import RunError

Keys = tuple[str, ...]
FEDATTUNE = "fedattune"
"""Key of the entry of FedAttune itself."""
FEDATTUNE_ENTRY = """@software{fedattune,
  author = {{The FedAttune developers}},
  title = {{FedAttune}: Personalized Federated Learning},
  version = {VERSION},
  year = {2026}
}"""


class UsedItem(NamedTuple):
    """One thing that a run used: its kind (method, part, data, partition or model) and its name."""

    kind: str
    name: str


@cache
def load_entries() -> dict[str, str]:
    """Return the text of every BibTeX entry, by key."""
    entries = {FEDATTUNE: FEDATTUNE_ENTRY}
    for table in _factories().values():
        for factory in table.values():
            entries |= {key: entry for key, entry in find_sources(factory).items() if entry}
    for text in _read_method_texts().values():
        entries |= {match[1]: match[0] for match in ENTRY.finditer(text)}
    return entries


@cache
def load_tables() -> dict[str, dict[str, Keys]]:
    """Return kind -> name -> keys of its entries; a name without keys has no paper."""
    from ..algorithms import METHODS
    from ..algorithms.combined import PART_METHODS

    own = {name: tuple(match[1] for match in ENTRY.finditer(text)) for name, text in _read_method_texts().items()}
    methods = {
        name: tuple(dict.fromkeys(key for one in (name, *entry.cites) for key in own[one]))
        for name, entry in METHODS.items()
    }
    parts = {part: methods[name] for part, name in PART_METHODS.items()}
    rest = {
        kind: {name: tuple(find_sources(factory)) for name, factory in table.items()}
        for kind, table in _factories().items()
    }
    return {"method": methods, "part": parts, **rest}


def _factories() -> dict[str, Mapping[str, Callable[..., Any]]]:
    from ..data import PARTITIONS, SOURCES
    from ..models import MODELS

    return {"data": SOURCES, "partition": PARTITIONS, "model": MODELS}


def _read_method_texts() -> dict[str, str]:
    """Return method -> text of its file without indentation; the docstring at its top holds the BibTeX entry."""
    from ..algorithms import METHODS

    # The file itself is read, because `python -OO` removes docstrings.
    files = {name: inspect.getsource(sys.modules[entry.factory.__module__]) for name, entry in METHODS.items()}
    return {name: re.sub("^    ", "", text, flags=re.MULTILINE) for name, text in files.items()}


def collect_used_items(runs: Iterable[Path]) -> tuple[list[UsedItem], str]:
    """List the things that the runs in these folders used, each once, and the version of FedAttune of the last run.

    A folder holds one run, or the runs of a comparison as METHOD/seed-N.
    """
    from ..runs.folder import RunFolder

    items: dict[UsedItem, None] = {}
    version = __version__
    for path in runs:
        configs = [RunFolder(path).config] if RunFolder(path).config.is_file() else []
        configs = configs or sorted(path.glob("*/seed-*/config.json"))
        if not configs:
            raise RunError(f"{path} holds no run; give a folder that fedattune run or compare wrote, or --algorithms")
        for file in configs:
            folder = RunFolder(file.parent)
            items |= dict.fromkeys(_list_config_items(folder.read_config(), _find_table(file)))
            version = folder.read_environment().get("fedattune", version)
    return list(items), version


def _find_table(config: Path) -> str | None:
    from ..core.io import read_yaml
    from ..data import is_table
    from .folder import EXPERIMENT_FILE

    experiment = config.resolve().parent.parent.parent / EXPERIMENT_FILE
    data = str(read_yaml(experiment).get("data")) if experiment.is_file() else ""
    return Path(data).name if data and is_table(data) else None


def _list_config_items(config: Mapping[str, Any], table: str | None) -> Iterator[UsedItem]:
    from ..algorithms import combined
    from ..core.options import list_options

    options, partition = config.get("options", {}), config.get("partition", {}).get("name")
    if config["algorithm"] == "combined":
        values = {option.name: options.get(option.name, option.default) for option in list_options(combined)}
        yield from (
            UsedItem("part", part) for key in ("server", "client", "personal") if (part := values[key]) != "none"
        )
    else:
        yield UsedItem("method", config["algorithm"])
    if data := table or config["data"]:
        yield UsedItem("data", data)
    if partition and partition != "given":  # of ready clients
        yield UsedItem("partition", partition)
    if model := config.get("model"):
        yield UsedItem("model", model)


def format_bibtex(items: Iterable[UsedItem], version: str = __version__) -> str:
    """Write the entries of FedAttune and of all used items, each once, under a comment that names the items.

    Comments (%) at the end name the items that have no entry.
    """
    tables, entries = load_tables(), load_entries()
    reasons_by_key: dict[str, list[str]] = {FEDATTUNE: []}
    uncited: list[str] = []
    foreign: list[str] = []
    for kind, name in items:
        keys = tables[kind].get(name)
        if keys is None:
            foreign.append(f"{kind} {name}")
        elif not keys:
            uncited.append(f"{kind} {name}")
        for key in keys or ():
            reasons_by_key.setdefault(key, []).append(f"{kind} {name}")
    blocks = [
        "\n".join([*([f"% {', '.join(reasons)}"] if reasons else []), entries[key]])
        for key, reasons in reasons_by_key.items()
    ]
    blocks[0] = blocks[0].replace("VERSION", version)
    if uncited:
        blocks.append(f"% Nothing to cite for {', '.join(uncited)}.")
    if foreign:
        blocks.append(f"% Not part of FedAttune; please cite the source of {', '.join(foreign)}.")
    return "\n\n".join(blocks) + "\n"
