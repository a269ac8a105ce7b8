"""What the package promises to those who import it."""

import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys
import types

import pytest

import fedattune

HEAVY = {"ray", "flwr", "matplotlib", "datasets", "huggingface_hub", "pandas", "sklearn", "pyarrow"}


def public(name: str) -> object:
    return getattr(fedattune, name)


def test_all_names_the_public_api_and_nothing_else() -> None:
    """Whatever is in the namespace without an underscore is named, or is a submodule."""
    assert sorted(fedattune.__all__) == fedattune.__all__, "keep the list sorted"
    found = {
        name
        for name, value in vars(fedattune).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    modules = {name for name in fedattune.__all__ if isinstance(public(name), types.ModuleType)}
    assert found | modules | {"__version__"} == set(fedattune.__all__)


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


def test_import_is_quick_and_light() -> None:
    """Best of three, for the machine may be busy; what a user may not have installed is never imported."""
    code = (
        "import time, sys; start = time.perf_counter(); import fedattune; "
        "print(time.perf_counter() - start, *{name.split('.')[0] for name in sys.modules})"
    )
    seconds = []
    for _ in range(3):
        took, *modules = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        assert not HEAVY & set(modules)
        seconds.append(float(took))
        if seconds[-1] < 3:
            return
    pytest.fail(f"import fedattune took {min(seconds):.1f} s")


def test_version_is_that_of_the_installed_package() -> None:
    assert fedattune.__version__.count(".") >= 2
    try:
        installed = importlib.metadata.version("fedattune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fedattune runs from its source folder here")
    assert fedattune.__version__ == installed


def test_types_are_shipped() -> None:
    assert importlib.resources.files("fedattune").joinpath("py.typed").is_file()
