"""The packages stand in layers: each imports only from the layers before it, and `cli` is imported by nobody."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fedattune

ROOT = Path(fedattune.__file__).parent
LAYERS = (
    "core", "data", "client", "server", "algorithms", "models", "privacy", "engine", "runs", "training",
    "analysis", "experiments", "studies", "deploy", "flower", "cli",
)  # fmt: skip
"""The entries of the package, from the foundation up."""
ENTRY_POINTS = {"", "__main__", "_version"}
"""Modules at the root that hand names on: `fedattune` itself, and `python -m fedattune`."""


class Import(NamedTuple):
    """One imported name: `name` of module `target`, as module `source` imports it in a line."""

    source: str
    target: str
    name: str | None
    line: int
    is_lazy: bool

    def __str__(self) -> str:
        what = f"{self.target}.{self.name}" if self.name else self.target
        return f"{self.source} (line {self.line}) imports {what}"


def find_modules(root: Path) -> dict[str, Path]:
    """Return every module below a package's folder, by its dotted name without the package's own."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(modules: dict[str, Path]) -> Iterator[Import]:
    """Yield every import of the package's own modules, also those inside functions and under TYPE_CHECKING."""
    for source, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lazy = {id(node) for node in ast.walk(tree)} - {id(node) for node in tree.body}
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    if one.name.partition(".")[0] == "fedattune":
                        target = one.name.partition(".")[2]
                        yield Import(source, target, None, node.lineno, id(node) in lazy)
            elif isinstance(node, ast.ImportFrom):
                base = resolve(package, node)
                for one in node.names if base is not None else ():
                    inner = f"{base}.{one.name}".lstrip(".")
                    target, name = (inner, None) if inner in modules else (base or "", one.name)
                    yield Import(source, target, name, node.lineno, id(node) in lazy)


def resolve(package: str, node: ast.ImportFrom) -> str | None:
    """Return the module that a `from` statement names, without the package's own name; None for other packages."""
    module = node.module or ""
    if node.level == 0:
        return module.partition(".")[2] if module.partition(".")[0] == "fedattune" else None
    parents = package.split(".") if package else []
    return ".".join([*parents[: len(parents) - node.level + 1], *([module] if module else [])])


def layer(module: str) -> int:
    """Return the number of the layer of a module, from 0."""
    return LAYERS.index(module.partition(".")[0])


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return list(find_imports(find_modules(ROOT)))


@pytest.fixture(scope="module")
def inner(imports: list[Import]) -> list[Import]:
    return [one for one in imports if not {one.source, one.target} & ENTRY_POINTS]


def upward(imports: list[Import]) -> list[str]:
    """Return the imports of a later layer."""
    return [str(one) for one in imports if layer(one.target) > layer(one.source)]


def private(imports: list[Import]) -> list[str]:
    """Return the imports of names or modules whose name says that they are not for others."""
    return [
        str(one)
        for one in imports
        for part in (*one.target.split("."), one.name or "")
        if part.startswith("_") and not part.startswith("__")
    ]


def circles(imports: list[Import]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle (Tarjan's strongly connected components)."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.source != one.target:
            graph.setdefault(one.source, set()).add(one.target)
            graph.setdefault(one.target, set())
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_the_package_has_these_entries() -> None:
    entries = {module.partition(".")[0] for module in find_modules(ROOT)} - ENTRY_POINTS
    assert entries == set(LAYERS)


def test_nothing_imports_a_later_layer(inner: list[Import]) -> None:
    assert upward(inner) == []


def test_no_modules_import_each_other_in_a_circle(inner: list[Import]) -> None:
    assert circles(inner) == []


def test_nothing_imports_a_private_name_of_another_module(imports: list[Import]) -> None:
    assert private([one for one in imports if one.target != "_version"]) == []


def test_nothing_imports_cli_from_outside(imports: list[Import]) -> None:
    outside = [one for one in imports if layer_name(one.target) == "cli" and layer_name(one.source) != "cli"]
    assert {one.source for one in outside} == {"__main__"}


def test_the_compiler_of_local_steps_has_one_entry_point(imports: list[Import]) -> None:
    inside = "engine.compiler."
    assert not [
        str(one) for one in imports if one.target.startswith(inside) and not f"{one.source}.".startswith(inside)
    ]


def layer_name(module: str) -> str:
    """Return the entry that a module belongs to."""
    return module.partition(".")[0]


@pytest.mark.parametrize(
    ("files", "check", "count"),
    [
        ({"core/a.py": "from ..data import b", "data/b.py": ""}, upward, 1),
        ({"core/a.py": "def f():\n    from ..data.b import c", "data/b.py": "c = 1"}, upward, 1),
        ({"data/a.py": "from ..core import b", "core/b.py": ""}, upward, 0),
        ({"core/a.py": "from . import b", "core/b.py": "from .a import x"}, circles, 1),
        ({"core/a.py": "import fedattune.core.b", "core/b.py": ""}, circles, 0),
        ({"core/a.py": "from .b import _hidden", "core/b.py": ""}, private, 1),
        ({"core/a.py": "from ._b import shown", "core/_b.py": ""}, private, 1),
        ({"core/a.py": "from .b import shown, __doc__", "core/b.py": ""}, private, 0),
    ],
)  # fmt: skip
def test_the_checks_find_what_they_look_for(files: dict[str, str], check, count: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert len(check(list(find_imports(find_modules(tmp_path))))) == count
