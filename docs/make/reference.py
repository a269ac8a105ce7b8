"""The reference pages, and the check that everything public is on them and has a docstring.

Read without importing anything, as mkdocstrings does when the site is built.
"""

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe

SOURCE = Path(__file__).parents[2] / "src"
MODULES_APART = ("algorithms", "models")
"""Names of `fedattune.__all__` that are modules with a page of their own."""


class Reference(NamedTuple):
    """A page of the reference: its title, the module, and what stands on top; `names` where they are not all."""

    title: str
    module: str
    about: str
    names: tuple[str, ...] = ()


REFERENCE = {
    "index": Reference(
        "fedattune", "fedattune", "What most programs need; all of it is imported from `fedattune`."
    ),
    "data": Reference(
        "fedattune.data",
        "fedattune.data",
        "Data and its division among clients. See also [Data](../data.md).",
    ),
    "algorithms": Reference(
        "fedattune.algorithms",
        "fedattune.algorithms",
        "One factory per method, whose keywords are its options. A page on each: [Methods](../algorithms/index.md).",
    ),
    "core": Reference(
        "fedattune.core.algorithm",
        "fedattune.core.algorithm",
        "What methods are made of, beside [`Algorithm`](index.md), `ClientUpdate` and `ServerUpdate`.",
    ),
    "params": Reference(
        "fedattune.core.params", "fedattune.core.params", "Beside [`Params`](index.md) itself."
    ),
    "client": Reference("fedattune.client", "fedattune.client", "Client rules and corrections."),
    "server": Reference("fedattune.server", "fedattune.server", "Server rules."),
    "select": Reference(
        "fedattune.core.selectors", "fedattune.core.selectors", "Which tensors are personal or mixed as one."
    ),
    "network": Reference(
        "fedattune.core.network", "fedattune.core.network", "For methods that change the user's model."
    ),
    "networks": Reference(
        "fedattune.algorithms.fedrod",
        "fedattune.algorithms.fedrod",
        "Networks of the methods that change the model.",
    ),
    "models": Reference(
        "fedattune.models",
        "fedattune.models",
        "Networks by name; which paper has which: [Data](../data.md#models).",
    ),
    "verdict": Reference(
        "fedattune.analysis.verdict",
        "fedattune.analysis.verdict",
        "See [The verdict](../results.md#the-verdict).",
        ("reach_verdict", "Verdict", "interval"),
    ),
    "relations": Reference(
        "fedattune.analysis.relations",
        "fedattune.analysis.relations",
        "Who learns from whom, of a finished run.",
        ("MixingAnalysis", "compute_label_similarity", "measure_agreement", "LabelAgreement", "seriate"),
    ),
    "registry": Reference(
        "fedattune.core.options",
        "fedattune.core.options",
        "How keywords of a factory become options that are listed, checked and stored.",
        ("Option", "list_options", "summarize", "build", "Positive", "NonNegative", "Fraction", "Count"),
    ),
    "errors": Reference(
        "fedattune.core.errors",
        "fedattune.core.errors",
        "Beside those of [fedattune](index.md).",
        ("DivergedError",),
    ),
    "flower": Reference(
        "fedattune.experiments.deploy",
        "fedattune.experiments.deploy",
        "Your own method over a network; see [Deployment](../deployment.md).",
        ("server_app.make_server_app", "client_app.make_client_app"),
    ),
}
"""File name -> page, in the order of the navigation."""


@cache
def package() -> griffe.Module:
    """The package as its source says."""
    loader = griffe.GriffeLoader(search_paths=[SOURCE], allow_inspection=False)
    found = loader.load("fedattune")
    loader.resolve_aliases()
    assert isinstance(found, griffe.Module)
    return found


def cleaned(thing: Any) -> str:
    """A docstring without its indentation."""
    return inspect.cleandoc(thing.__doc__ or "")


def member(path: str, root: griffe.Module | None = None) -> griffe.Object:
    """What stands behind a dotted path that begins with the package's name."""
    root = root or package()
    name = path.partition(".")[2]
    found = root[name] if name else root
    target = found.final_target if isinstance(found, griffe.Alias) else found
    assert not isinstance(target, griffe.Alias)
    return target


def public(module: griffe.Object) -> list[str]:
    """The public names of a module: `__all__`, or all that are made in it or in a module below it."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return [name for name, one in module.members.items() if not name.startswith("_") and _is_of(module, one)]


def _is_of(module: griffe.Object, one: griffe.Object | griffe.Alias) -> bool:
    if isinstance(one, griffe.Alias):
        return one.target_path.startswith(module.path + ".")
    return not one.is_module


def names_on(page: str) -> list[str]:
    """Full paths of what a page shows; a thing is on the first page that has it."""
    seen: set[str] = set()
    for stem, (_, module, _, chosen) in REFERENCE.items():
        mine = []
        for name in chosen or public(member(module)):
            if module == "fedattune" and name in MODULES_APART:
                continue
            where = member(f"{module}.{name}").path
            if where not in seen:
                seen.add(where)
                mine.append(f"{module}.{name}")
        if stem == page:
            return mine
    raise KeyError(page)


def pages() -> dict[str, str]:
    """Path on the site -> text."""
    made = {}
    for stem, (title, _, about, _) in REFERENCE.items():
        blocks = [f"::: {name}\n" for name in names_on(stem)]
        made[f"reference/{stem}.md"] = "\n".join([f"# {title}\n", f"{about}\n", *blocks])
    lines = [f"- [{one.title}]({stem}.md)" for stem, one in REFERENCE.items()]
    return made | {"reference/SUMMARY.md": "\n".join(lines) + "\n"}


def undocumented(things: Sequence[griffe.Object]) -> list[str]:
    """Which of these, and of their public methods and properties, have no docstring of their own."""
    return [one for thing in things for one in _without(thing)]


def _without(thing: griffe.Object) -> Iterator[str]:
    if not thing.has_docstring:
        yield thing.path
    if isinstance(thing, griffe.Class):
        for name, one in thing.members.items():
            if name.startswith("_") or isinstance(one, griffe.Alias):
                continue
            asks = one.is_function or "property" in one.labels
            if asks and not one.has_docstring:
                yield one.path


def everything() -> list[griffe.Object]:
    """All things on all pages."""
    return [member(name) for page in REFERENCE for name in names_on(page)]
