"""Check the generated pages of the documentation site for completeness."""

import argparse
import importlib
import re
from pathlib import Path

import pytest
import yaml
from docs.make import commands, links, methods, pages, reference

from fedattune.algorithms import ALGORITHMS
from fedattune.analysis.citations import load_entries, load_tables
from fedattune.cli.parser import COMMANDS, make_parser
from fedattune.core.options import list_options, summarize

ROOT = Path(__file__).parents[1]
MODULES = ("fedattune", "fedattune.algorithms", "fedattune.client", "fedattune.server", "fedattune.models",
           "fedattune.data", "fedattune.core.algorithm", "fedattune.core.selectors")  # fmt: skip


def test_every_public_name_is_on_the_reference_pages() -> None:
    shown = {reference.find_member(name).path for page in reference.REFERENCE for name in reference.list_names(page)}
    for module in MODULES:
        for name in getattr(importlib.import_module(module), "__all__", ()):
            if module == "fedattune" and name in reference.MODULES_APART:
                assert f"reference/{name}.md" in reference.make_pages()
            else:
                assert reference.find_member(f"{module}.{name}").path in shown, f"{module}.{name}"
    text = "\n".join(reference.make_pages().values())
    for page in reference.REFERENCE:
        for name in reference.list_names(page):
            assert re.search(rf"^::: {re.escape(name)}$", text, re.MULTILINE)


def test_everything_public_has_a_docstring() -> None:
    assert reference.find_undocumented(reference.list_members()) == []
    assert [name for name in MODULES if not importlib.import_module(name).__doc__] == []


def test_every_method_has_a_page_of_its_own_and_a_family() -> None:
    made = methods.make_pages()
    assert {f"algorithms/{name}.md" for name in ALGORITHMS} <= made.keys()
    assert sorted(name for names in methods.group_by_family().values() for name in names) == sorted(ALGORITHMS)
    for listed in (made["algorithms/index.md"], made["algorithms/SUMMARY.md"]):
        assert sorted({*re.findall(r"\((\w+)\.md\)", listed)} - {"index"}) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_page_of_a_method_has_docstring_signature_paper_and_what_is_written(name: str) -> None:
    factory, text = ALGORITHMS[name], methods.make_page(name, ALGORITHMS[name])
    flat = " ".join(text.split())
    assert summarize(factory) in flat
    assert " ".join(methods.describe_factory(factory).split()) in flat
    assert "Args:" not in text
    for option in list_options(factory):
        assert f"{option.name}={option.default!r}" in text
        assert re.search(rf"^\| `{option.name}` \| `", text, re.MULTILINE), option.name
    assert f"`{factory().evaluation_point}`: " in text
    for key in load_tables()["method"][name]:
        assert load_entries()[key].splitlines()[0] in text
        assert re.search(r"arXiv|doi|20\d\d", text)
    others = [one for one in links.list_methods(methods.find_written_pages()[name]) if one != name]
    for other in others:
        assert f"({other}.md)" in text
        assert f"## `{other}`" not in text


def test_all_commands_and_options_are_on_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = commands.make_page()
    monkeypatch.setenv("COLUMNS", "40")
    assert commands.make_page() == text
    sections = dict(re.findall(r"^## `fedattune ([\w ]+)`\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert {name.split()[0] for name in sections} == set(COMMANDS)
    for name, parser in commands.list_parsers():
        assert f"usage: fedattune {name} " in f"{' '.join(parser.format_usage().split())} "
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:
                continue
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or f"`{flag}`" in sections[name], f"{name} {flag}"
            if action.help and action.dest != "help":
                words = re.sub(r"[\\|*<>&;]|lt", "", action.help.replace("%%", "%")).split()
                assert words[0] in sections[name]
    assert set(COMMANDS) == {name for name, _ in commands.find_subparsers(make_parser(None)).items()}


def test_every_written_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    named = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    written = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    assert {page for page in written if not page.startswith("algorithms/")} <= named
    assert named <= written | pages.make_all().keys()
    assert config["strict"] is True
    assert config["theme"]["font"] is False
