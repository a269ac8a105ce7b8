"""Make the reference pages, and check that every public name is on a page and has a docstring.

The pages are read from the source, without an import, as mkdocstrings reads it when the site is built.
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


class ReferencePage(NamedTuple):
    """One page of the reference: its module, its first sentence, and the names that it shows (default: all public)."""

    module: str
    about: str
    names: tuple[str, ...] = ()


REFERENCE = {
    "index": ReferencePage("fedattune", "The names that most programs need; import all of them from `fedattune`."),
    "data": ReferencePage("fedattune.data", "Data and their division among clients. See also [Data](../data.md)."),
    "algorithms": ReferencePage(
        "fedattune.algorithms",
        "One module per paper, with the method's factory and rules. See [Methods](../algorithms/index.md).",
        tuple(sorted(file.stem for file in (SOURCE / "fedattune" / "algorithms").glob("[a-z]*.py"))),
    ),
    "core": ReferencePage(
        "fedattune.core.algorithm",
        "The parts of a method, beside [`Algorithm`](index.md), `ClientUpdate` and `ServerUpdate`.",
    ),
    "payload": ReferencePage("fedattune.core.payload", "The values that rules take and return."),
    "params": ReferencePage("fedattune.core.params", "Functions beside [`Params`](index.md)."),
    "client": ReferencePage("fedattune.client", "Client rules and corrections that several papers share."),
    "server": ReferencePage("fedattune.server", "Server rules that several papers share."),
    "select": ReferencePage("fedattune.core.selectors", "Selectors of personal tensors and of mixed components."),
    "network": ReferencePage("fedattune.core.network", "The base of methods that change the user's model."),
    "models": ReferencePage(
        "fedattune.models", "Networks by name; [Data](../data.md#models) lists the papers that use them."
    ),
    "verdict": ReferencePage(
        "fedattune.analysis.verdict",
        "[The verdict](../results.md#the-verdict) of a comparison.",
        ("reach_verdict", "Verdict", "estimate_mean"),
    ),
    "mixing": ReferencePage(
        "fedattune.analysis.mixing",
        "The mixing matrices of a run, and their agreement with labels.",
        ("MixingAnalysis", "compute_label_similarity", "measure_agreement", "LabelAgreement", "seriate"),
    ),
    "options": ReferencePage(
        "fedattune.core.options",
        "Keywords of a factory become options that are listed, checked and stored.",
        ("Option", "list_options", "summarize", "build", "Positive", "NonNegative", "Fraction", "Count"),
    ),
    "errors": ReferencePage(
        "fedattune.core.errors", "Errors beside the errors of [fedattune](index.md).", ("DivergedError",)
    ),
    "deploy": ReferencePage(
        "fedattune.deploy",
        "Your own method over a network; see [Deployment](../deployment.md).",
        ("server.server_app.make_server_app", "node.client_app.make_client_app"),
    ),
    "flower": ReferencePage(
        "fedattune.flower", "Methods inside a Flower project; see [Inside a Flower project](../tutorials/flower.md)."
    ),
}
"""File name -> page, in the order of the navigation."""


@cache
def load_package() -> griffe.Module:
    """Read the package from its source."""
    loader = griffe.GriffeLoader(search_paths=[SOURCE], allow_inspection=False)
    found = loader.load("fedattune")
    loader.resolve_aliases()
    assert isinstance(found, griffe.Module)
    return found


def clean_docstring(thing: Any) -> str:
    """Return a docstring without its indentation."""
    return inspect.cleandoc(thing.__doc__ or "")


def find_member(path: str, root: griffe.Module | None = None) -> griffe.Object:
    """Return the object at a dotted path that begins with the package's name."""
    root = root or load_package()
    name = path.partition(".")[2]
    found = root[name] if name else root
    target = found.final_target if isinstance(found, griffe.Alias) else found
    assert not isinstance(target, griffe.Alias)
    return target


def list_public(module: griffe.Object) -> list[str]:
    """Return the public names of a module: `__all__`, or all names defined in the module or below it."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return [name for name, one in module.members.items() if not name.startswith("_") and _is_defined_in(module, one)]


def _is_defined_in(module: griffe.Object, one: griffe.Object | griffe.Alias) -> bool:
    if isinstance(one, griffe.Alias):
        return one.target_path.startswith(module.path + ".")
    return not one.is_module


def list_names(page: str) -> list[str]:
    """Return the full paths of the names on a page; each name is on the first page that could show it."""
    seen: set[str] = set()
    for stem, (module, _, names) in REFERENCE.items():
        chosen = []
        for name in names or list_public(find_member(module)):
            if module == "fedattune" and name in MODULES_APART:
                continue
            path = find_member(f"{module}.{name}").path
            if path not in seen:
                seen.add(path)
                chosen.append(f"{module}.{name}")
        if stem == page:
            return chosen
    raise KeyError(page)


def make_pages() -> dict[str, str]:
    """Return the text of every reference page by its path on the site."""
    texts = {}
    for stem, page in REFERENCE.items():
        blocks = [f"::: {name}\n" for name in list_names(stem)]
        texts[f"reference/{stem}.md"] = "\n".join([f"# {page.module}\n", f"{page.about}\n", *blocks])
    lines = [f"- [{page.module}]({stem}.md)" for stem, page in REFERENCE.items()]
    return texts | {"reference/SUMMARY.md": "\n".join(lines) + "\n"}


def find_undocumented(things: Sequence[griffe.Object]) -> list[str]:
    """Return the paths of things, and of their public methods and properties, that have no docstring, nor a base's."""
    return [one for thing in things for one in _find_undocumented_in(thing)]


def _find_undocumented_in(thing: griffe.Object) -> Iterator[str]:
    if not thing.has_docstring:
        yield thing.path
    if isinstance(thing, griffe.Module):
        for name in list_public(thing):
            if thing[name].is_function or thing[name].is_class:
                yield from _find_undocumented_in(thing[name])
    if isinstance(thing, griffe.Class):
        for name, one in thing.members.items():
            if name.startswith("_") or isinstance(one, griffe.Alias):
                continue
            is_callable = one.is_function or "property" in one.labels
            is_described = any(name in base.members and base.members[name].has_docstring for base in thing.mro())
            if is_callable and not one.has_docstring and not is_described:
                yield one.path


def list_members() -> list[griffe.Object]:
    """Return every object on every page."""
    return [find_member(name) for page in REFERENCE for name in list_names(page)]
