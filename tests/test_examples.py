"""Run the examples of docstrings and pages, and every command of the tutorials that need no network."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

import pytest
import torch
from sybil import Document, Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import PythonCodeBlockParser

from fedattune.cli import main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
OPTIONS = ELLIPSIS | NORMALIZE_WHITESPACE
WITH_EXAMPLES = [file for file in sorted(SOURCE.rglob("*.py")) if ">>> " in file.read_text("utf-8")]
PAGES = [
    file
    for file in sorted((ROOT / "docs").rglob("*.md"))  # README.md: see test_docs
    if "```python\n" in file.read_text("utf-8")
]
RUN = (
    "tutorials/researcher",
    "tutorials/practitioner",
    "tutorials/text",
    "looking",
)  # that of deployment: make deployed


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the repository's examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    torch.set_num_threads(1)
    return tmp_path


def evaluate(document: Document) -> int:
    """Run all examples of a document and return their number."""
    examples = list(document.examples())
    for example in examples:
        example.evaluate()
    return len(examples)


def of_docstrings(file: Path) -> Document:
    sybil = Sybil([DocTestParser(OPTIONS)], document_types={".py": PythonDocStringDocument})
    return sybil.parse(file)


def of_page(file: Path) -> Document:
    return Sybil([PythonCodeBlockParser(doctest_optionflags=OPTIONS)]).parse(file)


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=name_of)
def test_examples_of_docstrings(file: Path) -> None:
    assert evaluate(of_docstrings(file))


@pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")  # Flower's
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_of_pages(page: Path) -> None:
    assert evaluate(of_page(page))


def lines_of_bash(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return [line for line in lines if not line.endswith("# needs a network")]


def run(line: str) -> None:
    """Run a line of a page: our commands and scripts in this process, others in a shell; skip installations."""
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
    elif words[0] == "fedattune":
        fedattune(shorten(words[1:]))
    elif words[0] != "pip":
        subprocess.run(line, shell=True, check=True)


def shorten(words: Sequence[str]) -> list[str]:
    """Train for three rounds of three steps on two splits at most, with one seed; for a second without such options."""
    limits = {"--rounds": 3, "--steps": 3, "--splits": 2, "--seeds": 1, "--eval-every": 3}
    short = [
        str(min(int(word), limits[before])) if before in limits else "1s" if before == "--budget" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    has_budget = words[0] == "compare" and not {*limits, "--budget", "--resume"} & {*words}
    return [*short, "--budget", "1s"] if has_budget else short


def fedattune(words: Sequence[str]) -> None:
    if ">" in words:
        at = words.index(">")
        with open(words[at + 1], "w", encoding="utf-8") as file, redirect_stdout(file):
            assert main(list(words[:at])) == 0
    else:
        assert main(list(words)) == 0


@pytest.mark.parametrize("page", [ROOT / "docs" / f"{name}.md" for name in RUN], ids=RUN)
def test_commands_of_pages(page: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of_bash(page)
    assert len([line for line in lines if line.startswith("fedattune ")]) >= 6
    for line in lines:
        run(line)
        said = capsys.readouterr()
        assert "Traceback" not in said.err, line
    written = re.findall(r"(?:^|\s)(?:-o|--out|>) (\S+)", "\n".join(lines))
    assert written
    assert [name for name in written if not (work / name).exists()] == []
