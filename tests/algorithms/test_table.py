"""One paper, one file: the table of methods, and the files that a method's rules come from."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fedattune.algorithms
from fedattune.algorithms import ALGORITHMS, METHODS
from fedattune.algorithms.table import Family

FOLDER = Path(fedattune.algorithms.__file__).parent


def modules_of(rule: Any) -> set[str]:
    """The modules of a rule, of the rules inside it, and of its corrections."""
    found = {type(rule).__module__}
    for field in fields(rule):
        value = getattr(rule, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if type(part).__module__.startswith("fedattune."):
                found |= modules_of(part)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_rules_stand_in_the_file_of_the_paper_or_are_shared(name: str) -> None:
    entry = METHODS[name]
    papers = {METHODS[one].factory.__module__ for one in (name, *entry.cites)}
    algorithm = ALGORITHMS[name]()
    rules = (algorithm.client, algorithm.server, *([algorithm.network] if algorithm.network else []))
    modules = {module for rule in rules for module in modules_of(rule)} - papers
    assert {
        module
        for module in modules
        if not module.startswith(("fedattune.client", "fedattune.server.", "fedattune.core."))
    } <= {"fedattune.algorithms.separation", "fedattune.algorithms.twins"}


def test_names_and_families_are_whole() -> None:
    assert all(getattr(fedattune.algorithms, name) is entry.factory for name, entry in METHODS.items())
    assert {entry.family for entry in METHODS.values()} == set(Family)
