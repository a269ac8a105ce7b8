"""All pages that differ from the files in docs/."""

import json
from pathlib import Path

from . import commands, links, methods, reference

EXAMPLES = """# Examples

Programs in the folder `examples` of the repository; the tests run them.
"""


def everything() -> dict[str, bytes]:
    """Path on the site -> content."""
    made = generated() | _moved()
    return {path: text.encode() for path, text in made.items()} | methods.figures()


def generated() -> dict[str, str]:
    """Pages that nobody writes."""
    return {
        "commands.md": commands.page(),
        "examples.md": _examples(),
        "license.md": "# License\n\n```text\n" + (links.ROOT / "LICENSE").read_text("utf-8") + "```\n",
        **methods.pages(),
        **reference.make_pages(),
    }


def _moved() -> dict[str, str]:
    """Written pages whose links lead elsewhere on the site, and those that are written outside docs/."""
    made = {}
    for file in sorted((links.ROOT / "docs").rglob("*.md")):
        if file.parent != links.ALGORITHMS:
            path = file.relative_to(links.ROOT / "docs").as_posix()
            text = file.read_text("utf-8")
            changed = links.moved(text, f"docs/{path}", path)
            if changed != text:
                made[path] = changed
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        made[links.PLACES[name]] = links.moved(
            (links.ROOT / name).read_text("utf-8"), name, links.PLACES[name]
        )
    return made


def _examples() -> str:
    files = sorted((links.ROOT / "examples").glob("*.py"))
    blocks = [f"## {file.name}\n\n```python\n{file.read_text('utf-8')}```\n" for file in files]
    blocks += [_notebook(file) for file in sorted((links.ROOT / "examples").glob("*.ipynb"))]
    table = (links.ROOT / "examples" / "hospitals.csv").read_text("utf-8").splitlines()
    rows = "\n".join(table[:6])
    blocks.append(f"## hospitals.csv\n\nThe first of its {len(table) - 1:,} rows:\n\n```text\n{rows}\n```\n")
    return "\n".join([EXAMPLES, *blocks])


def _notebook(file: Path) -> str:
    """What is written in a notebook, without what came out."""
    parts = [f"## {file.name}"]
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
        else:
            parts.append(
                "\n".join(f"##{line}" if line.startswith("#") else line for line in text.splitlines())
            )
    return "\n\n".join(parts) + "\n"
