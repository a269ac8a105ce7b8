"""Check the promises of the package to its importers: names, light imports, docstrings."""

import ast
import importlib.metadata
import importlib.resources
import inspect
import os
import subprocess
import sys

import pytest

import fedattune

HEAVY = {"ray", "flwr", "matplotlib", "datasets", "huggingface_hub", "pandas", "sklearn", "pyarrow"}


def public(name: str) -> object:
    return getattr(fedattune, name)


def test_all_names_the_public_api_and_nothing_else() -> None:
    """Names are loaded when first used, so `vars` does not know them; type checkers read the imports."""
    tree = ast.parse(inspect.getsource(fedattune))
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name for node in for_checkers.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported | {"__version__"} == set(fedattune.__all__)
    assert sorted(fedattune.__all__) == fedattune.__all__, "keep the list sorted"
    for name in fedattune.__all__:
        assert public(name) is not None
    with pytest.raises(AttributeError, match="no_such_thing"):
        public("no_such_thing")


@pytest.mark.parametrize("name", [n for n in fedattune.__all__ if n != "__version__"])
def test_public_things_are_documented(name: str) -> None:
    thing = public(name)
    assert (inspect.getdoc(thing) or "").strip()
    if not inspect.isclass(thing):
        return
    for member, value in vars(thing).items():
        is_own = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
        if is_own and not member.startswith("_"):
            assert inspect.getdoc(getattr(thing, member)), f"{name}.{member} has no docstring"


USE_IT_ALL = "[getattr(fedattune, name) for name in fedattune.__all__]"


@pytest.mark.parametrize("use", ["None", USE_IT_ALL], ids=["import", "all names"])
def test_import_is_quick_and_light(use: str) -> None:
    """In processor time, for the machine may be busy; what a user may not have installed is never imported."""
    code = (
        f"import time, sys, fedattune; {use}; "
        "print(time.process_time(), *{name.split('.')[0] for name in sys.modules})"
    )
    # Measuring coverage would be measured, too.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    took, *modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()
    assert not HEAVY & set(modules)
    assert float(took) < 3


def test_version_is_that_of_the_installed_package() -> None:
    assert fedattune.__version__.count(".") >= 2
    try:
        installed = importlib.metadata.version("fedattune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fedattune runs from its source folder here")
    assert fedattune.__version__ == installed


def test_types_are_shipped() -> None:
    assert importlib.resources.files("fedattune").joinpath("py.typed").is_file()
