"""Measure the structure of the package, to compare two states of it: `python -m benchmarks.house [ROOT]`.

ROOT is a checkout, by default this one. Every figure is counted from the source alone; nothing is imported.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

CONCEPTS = {
    "secure aggregation": (r"secagg|(?<!in)secure", r"secagg|secure"),
    "attack": (r"attack|adversar", r"attack|adversary|poisoning"),
    "acceptance": (r"acceptance|AcceptBetter|accept ==|--accept", r"acceptance"),
    "client privacy": (r"dp_client|client_priva|ClientPrivacy|client-level", r"client_privacy|privacy/clients"),
    "record privacy": (r"dp_record|record_priva|RecordPriv|RecordPlan|record-level", r"record|dp_sgd|calibration"),
    "screening": (r"screen(?!shot|\.)", r"screening|labels\.py|layer_measures"),
    "robust rules": (r"robust", r"robust|defence"),
    "compression": (r"\.compress\b(?!\()|\.compression import|compress:|compress uploads", r"uploads/compression"),
}
"""Concept -> pattern of its words in a module, and pattern of the paths of its own modules."""


def count_lines(text: str) -> Counter[str]:
    """Count the lines of code, docstrings, comments and blank lines."""
    kinds: dict[int, str] = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            for one in body:
                if (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                ):
                    kinds |= dict.fromkeys(range(one.lineno, (one.end_lineno or one.lineno) + 1), "docstring")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            kinds.setdefault(token.start[0], "comment")
    lines = text.splitlines()
    return Counter(kinds.get(number, "code" if line.strip() else "blank") for number, line in enumerate(lines, start=1))


def strip_prose(text: str) -> str:
    """Return the code without comments and docstrings: a sentence about a concept couples nothing."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return ast.unparse(tree)


def find_imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """Find the package's modules that each module imports."""
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                parents = package.split(".") if package else []
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
                for alias in node.names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    found[name].add(inner if inner in files else base)
    return found


def list_members(path: Path, cls: str) -> list[str]:
    """List the members of a class that a subclass may override: functions and annotated values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == cls:
            return [
                one.name if isinstance(one, ast.FunctionDef) else ast.unparse(one.target)
                for one in node.body
                if (isinstance(one, ast.FunctionDef) and not one.name.startswith("_")) or isinstance(one, ast.AnnAssign)
            ]
    return []


def follow(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that importing one module reaches."""
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name in imports and name not in seen:
            seen.add(name)
            todo += imports[name]
    return seen


def main() -> int:
    """Print the figures."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]) / "src" / "fedattune"
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    total: Counter[str] = Counter()
    for text in texts.values():
        total += count_lines(text)
    print(f"modules: {len(files)}")
    print(f"lines: {total.total()} ({', '.join(f'{kind} {n}' for kind, n in sorted(total.items()))})")
    imports = find_imports(files)
    inside = [name for name in files if name.startswith("training.")]
    arrows = sum(len({t for t in imports[name] if t.startswith("training.") and t != name}) for name in inside)
    rooms = Counter(".".join(name.split(".")[1:-1]) or "(top)" for name in inside if files[name].name != "__init__.py")
    print(f"training: {len(rooms)} rooms ({', '.join(f'{k} {v}' for k, v in sorted(rooms.items()))}), {arrows} imports")
    codes = {name: strip_prose(text) for name, text in texts.items()}
    for concept, (words, own) in CONCEPTS.items():
        naming = [
            name
            for name, code in codes.items()
            if re.search(words, code, re.IGNORECASE) and not re.search(own, str(files[name].relative_to(root)))
        ]
        print(f"modules that name {concept} outside its own files: {len(naming)} ({', '.join(naming)})")
    for cls in ("ClientUpdate", "ServerUpdate"):
        members = list_members(root / "core" / "algorithm.py", cls)
        print(f"members of {cls}: {len(members)} ({', '.join(members)})")
    print(f"casts: {sum(len(re.findall(r'(?<![a-z_.])cast[(]', text)) for text in texts.values())}")
    reached = follow("algorithms.fedmcsa", imports)
    print(f"files entered by importing fedmcsa: {len(reached)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
