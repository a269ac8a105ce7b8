"""Make all pages that differ from the files in docs/."""

import json
from pathlib import Path

from . import commands, links, methods, reference

EXAMPLES = """# Examples

The programs of the folder `examples`. Tests run all of them.
"""


def make_all() -> dict[str, bytes]:
    """Return the content of every page and picture by its path on the site."""
    texts = generate_pages() | _rewrite_pages()
    return {path: text.encode() for path, text in texts.items()} | methods.load_figures()


def generate_pages() -> dict[str, str]:
    """Return the pages that are made from code and data."""
    return {
        "commands.md": commands.make_page(),
        "examples.md": _make_examples(),
        "license.md": "# License\n\n```text\n" + (links.ROOT / "LICENSE").read_text("utf-8") + "```\n",
        **methods.make_pages(),
        **reference.make_pages(),
    }


def _rewrite_pages() -> dict[str, str]:
    """Return written pages whose links change on the site, and pages that are written outside docs/."""
    texts = {}
    for file in sorted((links.ROOT / "docs").rglob("*.md")):
        if file.parent != links.ALGORITHMS:
            path = file.relative_to(links.ROOT / "docs").as_posix()
            text = file.read_text("utf-8")
            changed = links.rewrite_links(text, f"docs/{path}", path)
            if changed != text:
                texts[path] = changed
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        texts[links.PAGE_OF_FILE[name]] = links.rewrite_links(
            (links.ROOT / name).read_text("utf-8"), name, links.PAGE_OF_FILE[name]
        )
    return texts


def _make_examples() -> str:
    files = sorted((links.ROOT / "examples").glob("*.py"))
    blocks = [f"## {file.name}\n\n```python\n{file.read_text('utf-8')}```\n" for file in files]
    blocks += [_format_notebook(file) for file in sorted((links.ROOT / "examples").glob("*.ipynb"))]
    table = (links.ROOT / "examples" / "hospitals.csv").read_text("utf-8").splitlines()
    rows = "\n".join(table[:6])
    blocks.append(f"## hospitals.csv\n\nThe first of its {len(table) - 1:,} rows:\n\n```text\n{rows}\n```\n")
    return "\n".join([EXAMPLES, *blocks])


def _format_notebook(file: Path) -> str:
    """Return the text and code of a notebook without its outputs."""
    parts = [f"## {file.name}"]
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
        else:
            parts.append("\n".join(f"##{line}" if line.startswith("#") else line for line in text.splitlines()))
    return "\n\n".join(parts) + "\n"
