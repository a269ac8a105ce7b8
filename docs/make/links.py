"""Links of pages that are read on GitHub and on the site, where some files have another place."""

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
ALGORITHMS = ROOT / "docs" / "algorithms"
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
HEADING = re.compile(r"^## `(\w+)`$", re.MULTILINE)
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "extend/contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "results": "studies/index.md",
    "examples": "examples.md",
    "benchmarks": "performance.md",
}
"""Files outside docs/ -> page."""


def methods_of(page: Path) -> list[str]:
    """The methods that a page in docs/algorithms is about, in its order."""
    return HEADING.findall(page.read_text(encoding="utf-8"))


def place(file: str) -> str:
    """The page on the site that shows a file of the repository.

    Raises:
        ValueError: it is on none.
    """
    path = PurePosixPath(file)
    if path.parent == PurePosixPath("docs/algorithms") and path.suffix == ".md":
        return f"algorithms/{methods_of(ROOT / path)[0]}.md"
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.parts[0] == "results" and path.name == "table.md":
        return f"studies/{path.parts[1]}.md"
    if file in PLACES:
        return PLACES[file]
    if path.parts[0] in ("examples", "results", "benchmarks"):
        return PLACES[path.parts[0]]
    raise ValueError(f"{file} has no page on the site")


def moved(text: str, file: str, page: str) -> str:
    """The text of a file of the repository with its links as they must be on a page of the site."""
    here, there = PurePosixPath(file).parent, PurePosixPath(page).parent

    def target(found: re.Match[str]) -> str:
        named = os.path.normpath(here / found[1]).replace(os.sep, "/")
        return os.path.relpath(place(named), there).replace(os.sep, "/")

    return outside_code(text, lambda part: LINK.sub(target, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text changed everywhere but in its fenced blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])
