"""Rewrite links of pages that people read on GitHub and on the site, where some files have another path."""

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
ALGORITHMS = ROOT / "docs" / "algorithms"
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
HEADING = re.compile(r"^## `(\w+)`$", re.MULTILINE)
PAGE_OF_FILE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "extend/contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "results": "studies/index.md",
    "examples": "examples.md",
    "benchmarks": "performance.md",
}
"""Files outside docs/ -> page on the site."""


def list_methods(page: Path) -> list[str]:
    """Return the methods of a page in docs/algorithms, in its order."""
    return HEADING.findall(page.read_text(encoding="utf-8"))


def find_page(file: str) -> str:
    """Return the page on the site that shows a file of the repository.

    Raises:
        ValueError: no page shows the file.

    """
    path = PurePosixPath(file)
    if path.parent == PurePosixPath("docs/algorithms") and path.suffix == ".md":
        return f"algorithms/{list_methods(ROOT / path)[0]}.md"
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.parts[0] == "results" and path.name == "table.md":
        return f"studies/{path.parts[1]}.md"
    if file in PAGE_OF_FILE:
        return PAGE_OF_FILE[file]
    if path.parts[0] in ("examples", "results", "benchmarks"):
        return PAGE_OF_FILE[path.parts[0]]
    raise ValueError(f"{file} has no page on the site")


def rewrite_links(text: str, file: str, page: str) -> str:
    """Rewrite the links of a text from a file of the repository for a page of the site.

    Args:
        text: the Markdown text.
        file: path of the file in the repository.
        page: path of the page on the site.

    """
    here, there = PurePosixPath(file).parent, PurePosixPath(page).parent

    def target(found: re.Match[str]) -> str:
        named = os.path.normpath(here / found[1]).replace(os.sep, "/")
        return os.path.relpath(find_page(named), there).replace(os.sep, "/")

    return map_prose(text, lambda part: LINK.sub(target, part))


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """Change a text everywhere but in its fenced blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])
