"""Check the promises of the package to its importers: names, light imports, docstrings."""

import ast
import importlib.metadata
import importlib.resources
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import fedattune

HEAVY = {
    "datasets", "flwr", "huggingface_hub", "jinja2", "matplotlib", "onnx", "onnxruntime", "pandas", "peft", "pyarrow",
    "ray", "rich", "scipy", "shtab", "sklearn", "sympy", "tensorboard", "torchvision", "transformers",
}  # fmt: skip
"""What no import of the package may load: it takes long, or a user may not have it."""


def public(name: str) -> object:
    return getattr(fedattune, name)


def test_all_names_the_public_api_and_nothing_else() -> None:
    """Names are loaded when first used, so `vars` does not know them; type checkers read the imports."""
    tree = ast.parse(inspect.getsource(fedattune))
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in for_checkers.body if isinstance(node, ast.ImportFrom) for alias in node.names}
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


@pytest.mark.parametrize(("use", "most"), [("None", 100), (USE_IT_ALL, 800)], ids=["import", "all names"])
def test_import_is_light(use: str, most: int) -> None:
    """Modules are counted, for times depend on the machine; PyTorch has as many as it likes."""
    code = f"import sys, fedattune; {use}; print(*sys.modules)"
    # Measuring coverage imports modules, too.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()
    packages = [module.partition(".")[0] for module in modules]
    assert not HEAVY & set(packages)
    assert ("torch" in packages) == (use != "None")
    assert sum(package not in {"torch", "torchgen"} for package in packages) < most


def test_a_comparison_imports_no_package_that_takes_as_long_as_its_report() -> None:
    run = "fedattune.compare('digits', ['fedmcsa'], clients=4, rounds=2, processes=1)"
    code = f"import sys, fedattune; print(len({run}.rows), *sys.modules)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    rows, *modules = said.split()
    assert int(rows) == 3
    assert not {"scipy.optimize", "scipy.stats", "sklearn", "pandas", "matplotlib"} & set(modules)


def test_types_are_shipped() -> None:
    assert importlib.resources.files("fedattune").joinpath("py.typed").is_file()


def list_attributes(one: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """List the attributes, methods and fields of a class and of its bases in the package."""
    own = {
        getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", "")
        for node in ast.walk(one)
        if isinstance(node, ast.FunctionDef) or isinstance(getattr(node, "ctx", None), ast.Store)
    }
    bases = {ast.unparse(base).rpartition(".")[2] for base in one.bases} & (classes.keys() - {one.name})
    return own.union(*(list_attributes(classes[base], classes) for base in bases))


def list_wrong_attributes(sources: Iterable[str]) -> list[str]:
    """List the attributes in docstrings of classes that the classes do not have."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    found = [node for node in nodes if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in found}
    wrong = []
    for node in found:
        _, _, section = (ast.get_docstring(node) or "").partition("Attributes:\n")
        lines = re.findall(r"^    (\w[\w, ]*):", section.partition("\n\n")[0], re.MULTILINE)
        documented = {one for line in lines for one in line.split(", ")}
        known = list_attributes(node, classes) if documented else set()
        wrong += [f"{node.name}.{one}" for one in sorted(documented - known)]
    return wrong


def test_documented_attributes_exist() -> None:
    """An attribute that is renamed keeps no old name in a docstring; for arguments, ruff checks it."""
    source = "class A:\n    '''A.\n\n    Attributes:\n        x: there.\n        y, z: gone.\n\n    '''\n    x: int\n"
    assert list_wrong_attributes([source]) == ["A.y", "A.z"]
    files = Path(fedattune.__file__).parent.rglob("*.py")
    assert list_wrong_attributes(file.read_text() for file in files) == []
