"""Attach the BibTeX of a paper to the data set, partition or model that comes from it."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., Any])

ENTRY = re.compile(r"^@\w+\{(\w+),\n.*?^\}$", re.DOTALL | re.MULTILINE)
"""A BibTeX entry; its first group is the key."""


def cite(*sources: str) -> Callable[[Factory], Factory]:
    """Attach papers to a factory: BibTeX entries, or keys of entries that stand elsewhere in the package."""

    def attach(factory: Factory) -> Factory:
        factory.sources = sources  # type: ignore[attr-defined]
        return factory

    return attach


def find_sources(factory: Callable[..., Any]) -> dict[str, str]:
    """Return the papers of a factory: key -> BibTeX entry, empty if the entry stands elsewhere."""
    sources: tuple[str, ...] = getattr(factory, "sources", ())
    found = ((ENTRY.search(source), source) for source in sources)
    return {match[1] if match else source: match[0] if match else "" for match, source in found}
