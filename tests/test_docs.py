"""Compare the documents with the code: options and defaults, commands, examples."""

import argparse
import re
import runpy
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.make import methods, visibility

from fedattune.algorithms import ALGORITHMS
from fedattune.cli import options as view_options
from fedattune.cli.parser import make_parser, parse_arguments
from fedattune.core.options import StrictSchema, build, list_options
from fedattune.core.own_code import get_short_name, is_reference, list_references
from fedattune.data import PARTITIONS, SOURCES, Schema, load_image_folder, load_table
from fedattune.deploy.secagg.methods import find_sums
from fedattune.experiments.config import Experiment
from fedattune.experiments.load import load_experiment, parse_set
from fedattune.models import MODELS
from fedattune.studies import load_study

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE = ROOT / "src" / "fedattune"
EXAMPLES = ROOT / "examples"
VIEWS: dict[str, type[StrictSchema]] = {
    "report": view_options.ReportOptions,
    "explain": view_options.ExplainOptions,
    "watch": view_options.WatchOptions,
    "plot": view_options.PlotOptions,
    "export": view_options.ExportOptions,
    "predict": view_options.PredictOptions,
    "table": view_options.TableOptions,
    "doctor": view_options.DoctorOptions,
    "privacy": view_options.PrivacyOptions,
}
"""Commands without an experiment of their own."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def format_default(default: Any) -> str:
    """Write a default as the documents and the command line do."""
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return all lines of bash that run fedattune, as words after `fedattune`."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "fedattune":
                end = words.index(">") if ">" in words else len(words)  # the file that gets the output
                found.append(words[1:end])
    return found


def option_tables() -> dict[str, dict[str, str]]:
    """Return the options and defaults of every method section: method -> option -> default."""
    tables: dict[str, dict[str, str]] = {}
    for page in (ROOT / "docs" / "algorithms").glob("*.md"):
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            if heading := re.match(r"`(\w+)`$", section.splitlines()[0]):
                rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE)
                tables[heading[1]] = dict(rows)
    return tables


def test_every_method_and_every_option_stands_on_a_page_with_its_default() -> None:
    assert option_tables() == {
        name: {option.name: format_default(option.default) for option in list_options(factory)}
        for name, factory in ALGORITHMS.items()
    }


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "algorithms").glob("*.md")), ids=lambda page: page.stem)
def test_every_method_says_what_clients_hold_that_are_not_there(page: Path) -> None:
    rows = {line.split("|")[1].strip() for line in page.read_text("utf-8").splitlines() if line.startswith("| ")}
    assert {"never sampled", "drops out", "joins after training"} <= rows


def test_options_of_data_partitions_and_models_stand_on_the_data_page() -> None:
    rows = [line for line in (ROOT / "docs" / "data.md").read_text("utf-8").splitlines() if line.startswith("| `")]
    for name, factory in {**SOURCES, **PARTITIONS, **MODELS}.items():
        row = next((row for row in rows if f"`{name}`" in row.split("|")[1]), None)
        assert row, f"{name} has no row"
        cell = row.split("|")[2]
        assert cell.strip() == ", ".join(f"`{o.name}={format_default(o.default)}`" for o in list_options(factory)), name


def test_methods_page_holds_the_table_of_methods() -> None:
    table = methods.make_table()
    page = (ROOT / "docs" / "concepts" / "methods.md").read_text("utf-8")
    assert table in page, f"docs/concepts/methods.md needs this table:\n{table}"


def test_deployment_page_says_who_sees_what_with_every_method() -> None:
    table = visibility.make_table()
    page = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    assert table in page, f"docs/deployment.md needs this table:\n{table}"


def test_page_of_secure_aggregation_names_the_methods_that_it_takes() -> None:
    page = (ROOT / "docs" / "secure-aggregation.md").read_text("utf-8")
    section = page.partition("## Which methods")[2].partition("A server rule of your own")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert named == {name for name, make in ALGORITHMS.items() if find_sums(build(name, make, {})) is not None}


def test_architecture_shows_all_packages_and_files_that_exist() -> None:
    """The picture, the page and the guide for contributors name files of the package or of the repository."""
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text("utf-8")
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    package = {"client.py", *(folder.parent.name for folder in PACKAGE.glob("*/__init__.py"))}
    assert re.findall(r'class="name"[^>]*>([\w.]+)<', picture) == re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert set(re.findall(r'class="name"[^>]*>([\w.]+)<', picture)) == package
    named = re.findall(r"`([\w./]+(?:\.py|/))`", page + guide)
    named += [one for text in re.findall(r'class="file"[^>]*>([^<]+)<', picture) for one in text.split(", ")]
    assert len(named) > 20
    for one in named:
        if "&lt;" not in one:
            assert (PACKAGE / one).exists() or (ROOT / one).exists(), one


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]


def list_own_data(page: Path) -> set[str]:
    """Return the tables that the page's programs write, and the folders of images that it shows."""
    text = page.read_text(encoding="utf-8")
    return {*re.findall(r'to_csv\("([^"]+)"', text), *re.findall(r"^(\w+/)\w+/\w+/\w+\.png", text, re.MULTILINE)}


@every_page
def test_commands_have_options_that_exist_and_values_that_can_be(page: Path) -> None:
    owned = {**ALGORITHMS, **SOURCES, **PARTITIONS, **MODELS, "table": load_table, "folder": load_image_folder}
    for words in commands(page):
        space, problems = parse_arguments(words)
        assert not problems, words
        if space.command in VIEWS:
            view_options.parse_options(VIEWS[space.command], space, problems)
            continue
        given = {key: value for key, value in vars(space).items() if key in Experiment.flat_fields()}
        given["set"] = parse_set(given.get("set", []))
        experiment = load_experiment(None, given)
        own = {get_short_name(name) for name in (*experiment.algorithms, experiment.model) if is_reference(name)}
        for key in given["set"]:
            name, _, option = key.rpartition(".")
            if name in own:  # of a file that the page describes
                continue
            assert option in {o.name for o in list_options(owned[name])}, key
        if experiment.data not in SOURCES and experiment.data not in list_own_data(page):
            assert (ROOT / experiment.data).is_file()


@every_page
def test_yaml_is_a_configuration(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        file = tmp_path / "experiment.yaml"
        file.write_text(block, encoding="utf-8")
        if "classes" in yaml.safe_load(block):
            assert Schema.read(file).classes
            continue
        if "rows" in yaml.safe_load(block):
            study = load_study(str(file))
            for cell in study.cells():
                study.make_run(cell, study.middle_choice(cell), 0)
            continue
        known = {"allow_code": tuple(list_references(yaml.safe_load(block)))}
        assert load_experiment(file, known).given == set(yaml.safe_load(block))


def list_options_of_commands(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of all commands below a parser."""
    flags = set()
    for action in parser._actions:
        flags |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            flags |= {flag for child in action.choices.values() for flag in list_options_of_commands(child)}
    return flags


def test_every_command_line_option_that_the_pages_name_exists() -> None:
    known = list_options_of_commands(make_parser(None, is_full=True))
    known |= {
        "--run-config",  # of Flower
        "--stream",
        "--federation-config",
        "--attach",  # of a deployment's run.sh
        "--build-arg",  # of Docker
        "--no-deps",  # of pip
        "--wheel-dir",
        "--write-docs",  # of the benchmarks
        "--list",
        "--attacks",
        "--rules",
        "--first-split",
        "--clip",
        "--evidence",
        "--federations",
        "--variant",
        "--against",
        "--newest",
        "--minutes",  # of benchmarks.on_gpu
        "--only",
        "--logdir",  # of TensorBoard
        "--head",  # of Ray
        "--address",
    }
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
        assert named <= known, page


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), space)
    assert space["result"].mixing.last()["1.weight"].shape == (10, 10)
    assert len(space["files"]) == 10


@pytest.fixture
def run_example(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run a program of the folder `examples` in this process and return its output; a warning is an error."""

    def run(name: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_own_algorithm_is_short_and_runs(run_example: Callable[[str], str]) -> None:
    assert len((EXAMPLES / "own_algorithm.py").read_text("utf-8").splitlines()) <= 40
    means = dict(re.findall(r"^ (\w+) +([\d.]+) ", run_example("own_algorithm.py"), re.MULTILINE))
    assert list(means) == ["local", "fedavg", "robust", "majority"]
    assert float(means["robust"]) > float(means["fedavg"])  # few classes per client: the personal head must help


def test_own_data_runs(run_example: Callable[[str], str]) -> None:
    out = run_example("own_data.py")
    means = dict(re.findall(r"^(\w+) +([\d.]+) \(\w+\)", out, re.MULTILINE))
    assert float(means["fedmcsa"]) > float(means["fedavg"])  # two opposite rules: one model cannot do both
    assert "the same model True" in out


def test_image_folder_runs(run_example: Callable[[str], str]) -> None:
    out = run_example("image_folder.py")
    assert "Federation('digits', 4 clients, 320 samples, 10 classes) (1, 32, 32)" in out
    means = dict(re.findall(r"^(off|crop) +([\d.]+)$", out, re.MULTILINE))
    assert float(means["off"]) > 0.5
    assert float(means["crop"]) > 0.5
    assert means["off"] != means["crop"]
