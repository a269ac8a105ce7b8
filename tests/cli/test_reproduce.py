"""`fedattune reproduce`: studies from data files, on made-up images; choices, resuming, failures, stored results."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from cli_helpers import Done
from data.image_files import pictures, write
from fedattune.cli import main
from fedattune.models import architectures
from fedattune.studies import load_study, outcome
from fedattune.studies.outcome import StudyResults, choose_options
from fedattune.studies.records import Records
from fedattune.studies.study import STUDY_FOLDER, WHOLE, Cell
from fedattune.studies.table import CSV_FILE, TABLE_FILE

Cli = Callable[..., Done]
SETS = {  # folder: classes, images per class, shape, names of the columns
    "mnist": (10, 200, (28, 28), "image", "label"),
    "fashion_mnist": (10, 40, (28, 28), "image", "label"),
    "cifar10": (10, 120, (32, 32, 3), "img", "label"),
}
SMALL = """
title: A small study
source: nobody
measure: {over: last, mean: uniform, called: accuracy}
settings: {data: digits, clients: 4, partition: dirichlet, rounds: 4, steps: 5, validation: 0}
seeds: 2
tuning: {rounds: 3, validation: 0.3}
columns: {few: {cohort: 2}, all: {cohort: 1.0}}
rows:
  Local: {algorithm: local}
  FedAvg: {algorithm: fedavg, grid: {lr: [1.0e-6, 0.1]}}
  trained: {like: FedAvg, point: trained}
differences: [[FedAvg, Local]]
paper: {FedAvg: {few: [50.0, 1.0], all: 99.9}}
"""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image sets of the papers' names and shapes, with random pixels."""
    folder = tmp_path_factory.mktemp("images")
    for name, (classes, each, shape, image, label) in SETS.items():
        y = np.repeat(np.arange(classes), each)
        path = folder / name / "train-0.parquet"
        write(path, pictures(len(y), shape), {label: y}, image=image)
    return folder


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of the papers with few channels and narrow layers: a tiny run shows nothing more with wide ones."""
    convolve, stack = architectures._convolve, architectures._stack_linear
    last_width = 1  # of the convolutions before the linear layers, in the paper

    def thin_convolve(channels: int, width: int, size: int, **options: Any) -> Any:
        nonlocal last_width
        last_width = width
        return convolve(min(channels, 8), min(width, 8), size, **options)

    def thin_stack(inputs: int, *widths: int, **options: bool) -> Any:
        nonlocal last_width
        inputs, last_width = inputs // last_width * min(last_width, 8), 1
        return stack(inputs, *(min(width, 16) for width in widths[:-1]), widths[-1], **options)

    monkeypatch.setattr(architectures, "_convolve", thin_convolve)
    monkeypatch.setattr(architectures, "_stack_linear", thin_stack)


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all runs of the small study, made once."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "small.yaml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDATTUNE_HOME", str(folder / "home"))
        words = ["reproduce", str(folder / "small.yaml"), "--out", str(folder / "out"), "--quiet"]
        assert main([*words, "--processes", "1"]) == 0
    return folder / "out"


@pytest.fixture
def figures() -> None:
    """Ask for the figures of studies: drawing takes as long as the tiny runs, so other tests go without."""


@pytest.fixture(autouse=True)
def only_asked_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("fedattune.studies.table.draw", lambda *_: None)


@pytest.fixture
def small(work: Path) -> Path:
    path = work / "small.yaml"
    path.write_text(SMALL)
    return path


def stored(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (TABLE_FILE, CSV_FILE)}


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / CSV_FILE).open() as file:
        return list(csv.DictReader(file))


# One of each kind; `test_docs.py` makes the runs of all.
@pytest.mark.parametrize("name", ["fedam-table", "fedmcsa-fig5", "igfl-claims", "pfedla-weights"])
@pytest.mark.usefixtures("thin", "figures")
def test_a_tiny_cell_of_each_kind_of_study(
    cli: Cli, work: Path, images: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell of the first column and its Local: one round, one seed, every file there."""
    monkeypatch.setattr(outcome, "MIN_SHARE", 0)
    study, text = load_study(name), (STUDY_FOLDER / f"{name}.yaml").read_text("utf-8")
    text = re.sub(r"\b(epochs|steps): \d+", r"\1: 1", text)
    if name.endswith(("-checks", "-claims", "-weights")):  # there are 400 images here
        text = text.replace(".samples: 4000", ".samples: 400").replace(".size: 300", ".size: 40")
        text = text.replace("clients: 20", "clients: 4")
    (work / f"{name}.yaml").write_text(text, "utf-8")
    cells = [cell for cell in study.cells() if not study.rows[cell.row].like]
    local = next(cell for cell in cells if study.source_row(cell).algorithm == "local")
    other = next(c for c in reversed(cells) if c.column == local.column and study.source_row(c).algorithm != "local")
    wanted = ",".join(f"{cell.column}/{cell.row}" for cell in (local, other)).replace("[", "?")
    done = cli("reproduce", f"{name}.yaml", "--cells", wanted, "--rounds", 1, "--seeds", 1, "--data-dir", images,
               "--quiet", "--processes", 1, "--no-search")  # fmt: skip
    assert done.code == 0, done.err
    folder = work / "results" / name
    found = {(line["column"], line["row"]) for line in lines(folder)}
    assert found >= {(cell.column, cell.row) for cell in (local, other)}
    assert "1 of " in (folder / TABLE_FILE).read_text()
    assert (folder / "figure.svg").read_text().lstrip().startswith("<?xml")
    before = stored(folder)
    again = cli("reproduce", f"{name}.yaml", "--cells", wanted, "--show")
    assert (again.code, stored(folder)) == (0, before)


def test_the_table_has_the_papers_number_and_the_difference(full: Path, small: Path) -> None:
    folder, study = full / "small", load_study(str(small))
    records = Records(folder)
    found = StudyResults(study, records).outcomes
    received, trained = found[Cell("FedAvg", "few")], found[Cell("trained", "few")]
    assert received.runs == trained.runs  # the same runs at another point
    assert received.value != trained.value
    assert received.value is not None
    off = received.value.mean - 50
    assert f"(50.00, **{off:+.2f}**)".replace("-", "−") in (folder / TABLE_FILE).read_text()
    by_hand = [float(one["value"]) for one in lines(folder) if (one["row"], one["column"]) == ("FedAvg", "few")]
    assert np.mean(by_hand) == pytest.approx(received.value.mean, abs=1e-3)
    assert len(by_hand) == 2
    assert "No reason is known." in (folder / TABLE_FILE).read_text()


def test_it_goes_on_where_it_stopped(
    cli: Cli, work: Path, full: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part, then the rest: the same files as at once, and nothing is trained twice."""
    cli("reproduce", small, "--out", "parts", "--cells", "few", "--seeds", 1, "--quiet", "--processes", 1)
    refused = cli("reproduce", small, "--out", "parts", "--quiet")
    assert refused.code == 2
    assert "--resume" in refused.err
    trained = []
    train_run = "fedattune.training.fit.train_run"
    from fedattune.training import fit as trainer

    real = trainer.train_run

    def counting(*args: object, **more: object) -> object:
        trained.append(args[0])
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(train_run, counting)
    assert cli("reproduce", small, "--out", "parts", "--resume", "--quiet", "--processes", 1).code == 0
    done = len(trained)
    once, parts = full / "small", work / "parts" / "small"
    assert {r["run"]: r["value"] for r in lines(once)} == {r["run"]: r["value"] for r in lines(parts)}
    assert cli("reproduce", small, "--out", "parts", "--resume", "--quiet", "--processes", 1).code == 0
    assert len(trained) == done
    assert done == len(Records(once).runs) - 4  # two of the search, local and FedAvg with one seed were there
    assert not list((work / "parts" / "runs").glob("*/"))  # folders of finished runs are gone


def test_a_run_that_another_study_has_is_not_trained_again(
    cli: Cli, work: Path, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(full, work / "out")
    (work / "other.yaml").write_text(SMALL.replace("A small study", "Another"))
    monkeypatch.setattr("fedattune.experiments.runner.train_all", None)  # nothing is left to be trained
    monkeypatch.setattr("fedattune.studies.train.StudyTrainer._make_jobs", lambda *_: pytest.fail("trained"))
    done = cli("reproduce", work / "other.yaml", "--out", "out", "--quiet")
    assert done.code == 0, done.err
    other, first = work / "out" / "other", work / "out" / "small"
    assert [r["value"] for r in lines(other)] == [r["value"] for r in lines(first)]
    assert Records(other).runs == Records(first).runs


@pytest.mark.usefixtures("figures")
def test_a_run_that_diverges_is_a_result(cli: Cli, work: Path, small: Path) -> None:
    small.write_text(SMALL.replace("  FedAvg: {algorithm: fedavg, grid: {lr: [1.0e-6, 0.1]}}",
                                   "  FedAvg: {algorithm: fedavg, settings: {lr: 1.0e+38}}"))  # fmt: skip
    done = cli("reproduce", small, "--out", "out", "--cells", "few", "--quiet", "--processes", 1)
    assert done.code == 0, done.err
    folder = work / "out" / "small"
    assert "diverged" in (folder / TABLE_FILE).read_text()
    assert cli("reproduce", small, "--out", "out", "--show").code == 0
    assert not list((work / "out" / "runs").glob("*/"))
    failed = [facts["failed"] for facts in json.loads((folder / "runs.json").read_text()).values() if "failed" in facts]
    assert len(failed) == 2
    assert all("round 1" in text for text in failed)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("runs.json", "null", "is no list of runs"),
        ("runs.json", '{"a": {"experiment": 3}}', "is no list of runs"),
        ("runs.json", "{", "cannot read"),
        ("history.parquet", None, "lacks"),
        ("history.parquet", "x", "cannot read"),
    ],
)
def test_damaged_raw_results_are_refused(
    cli: Cli, work: Path, small: Path, name: str, content: str | None, said: str
) -> None:
    """Before anything is chosen or trained; another study beside them is not disturbed."""
    words = ("reproduce", small, "--out", "out", "--cells", "few/Local", "--quiet", "--processes", 1)
    assert cli(*words).code == 0
    path = work / "out" / "small" / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    for how in ("--resume", "--show"):
        done = cli(*words, how)
        assert done.code == 2
        assert said in done.err
        assert len(done.err.strip().splitlines()) == 1
    (work / "other.yaml").write_text(SMALL)
    assert cli("reproduce", work / "other.yaml", *words[2:]).code == 0


def test_missing_data_leave_the_other_columns_alone(cli: Cli, work: Path, small: Path) -> None:
    small.write_text(SMALL.replace("few: {cohort: 2}", "few: {cohort: 2, data: mnist, partition: iid}"))
    done = cli("reproduce", small, "--out", "out", "--data-dir", work, "--quiet", "--processes", 1)
    assert done.code == 1
    assert "few: " in done.err
    assert {line["column"] for line in lines(work / "out" / "small")} == {"all"}


def test_a_study_of_numbers_is_refused_before_it_trains(cli: Cli, work: Path, small: Path) -> None:
    (work / "t.csv").write_text("site,x,y\n" + "\n".join(f"s{i % 4},{i % 7},{i * 0.37}" for i in range(80)))
    table = "few: {data: t.csv, client_column: site, target: y}"
    text = SMALL.replace("few: {cohort: 2}", table).replace("clients: 4, partition: dirichlet, ", "")
    small.write_text(text)
    done = cli("reproduce", small, "--out", "out", "--quiet", "--processes", 1, "--cells", "few/Local")
    assert done.code == 1
    assert "a study compares accuracies, and the target of t.csv is a number" in done.err


@pytest.mark.usefixtures("figures")
def test_populations_have_a_split_each_and_their_matrices_are_kept(cli: Cli, work: Path) -> None:
    (work / "find.yaml").write_text("""
title: Attention
source: nobody
measure: {over: last, mean: pooled, called: accuracy}
settings: {data: digits, clients: 5, partition: shards, rounds: 6, steps: 3, validation: 0, batch_size: 50}
seeds: 3
populations: true
mixing: true
figure: {kind: matching, component: attention}
columns: {random: {}}
rows: {Local: {algorithm: local}, IGFL-S: {algorithm: igfl_s, options: {attention: self}}}
""")
    done = cli("reproduce", work / "find.yaml", "--out", "out", "--quiet", "--processes", 1)
    assert done.code == 0, done.err
    records = Records(work / "out" / "find")
    with_matrices = [facts for run, facts in records.runs.items() if records.mixing(run)]
    assert len({facts["split"] for facts in with_matrices}) == 3
    rows = pq.read_table(work / "out" / "find" / "mixing.parquet").num_rows
    assert rows == 3 * 4 * 2  # populations, thirds and all, model and attention
    for run in records.runs:
        for (_, component), matrix in records.mixing(run).items():
            assert np.allclose(matrix.sum(1), 1, atol=1e-5), component
    table = (work / "out" / "find" / TABLE_FILE).read_text()
    assert "matching rate" in table
    assert "\n| random | IGFL-S | " in table  # the numbers name their method


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fedmcsa-table3",), "fedmcsa-table"),
        (("fedmcsa-table1", "--cells", "nothing"), "has no such cell"),
        (("fedmcsa-table1", "--cells", ","), "--cells names no cell"),
        (("fedmcsa-table1", "--rounds", "0"), "--rounds"),
        (("fedmcsa-table1", "--processes", "none"), "--processes"),
        (("fedmcsa-table1", "--show"), "holds no results"),
        (("--rounds", "3"), "NAME"),
        (("fedmcsa-table1", "--round", "3"), "--rounds"),
    ],
)
def test_wrong_arguments_are_said_in_one_line(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = cli("reproduce", *arguments)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("algorithm: local", "algorithm: locale", "locale"),
        ("like: FedAvg", "like: FedSomething", "FedSomething"),
        ("few: [50.0, 1.0]", "many: 50.0", "many"),
        ("seeds: 2", "seeds: 0", "seeds"),
        ("tuning: {rounds: 3, validation: 0.3}", "", "tuning"),
        ("title: A", "titel: A", "titel"),
        ("steps: 5", "steps: 5, epochs: 2", "epochs"),
        ("[[FedAvg, Local]]", "[[FedAvg, Loca]]", "Loca"),
        ("lr: [1.0e-6, 0.1]}}", "lr: [0.1]}}", "at least 2"),
        ("lr: [1.0e-6, 0.1]}}", "lr: [0.1, 0.2]}, grids: {al: {lr: [0.1, 0.2]}}}", "'al'"),
        ("rounds: 4,", "rounds: many,", "rounds: input should be a valid integer"),
        ("steps: 5,", "steps: 5, eval_every: often,", "parse string as an integer, got 'often'"),
        ("steps: 5,", "steps: 5, set: 3,", "set: expected options"),
        ("steps: 5,", "steps: 5, seed: 3,", "seed cannot be among the settings"),
        ("algorithm: fedavg,", "algorithm: fedavg, options: {weigth: 1},", "weigth"),
        ("title: A", "figure: {kind: weights}\ntitle: A", "mixing: true"),
    ],
)
def test_a_wrong_study_is_said_in_one_line(cli: Cli, small: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    small.write_text(SMALL.replace(old, new))
    done = cli("reproduce", small, "--out", "out", "--quiet", "--processes", 1)
    assert done.code != 0
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.usefixtures("figures")
def test_a_cell_of_few_rounds_has_no_numbers(cli: Cli, work: Path, small: Path) -> None:
    """One round of six is less than a fifth, two of ten are a fifth."""
    small.write_text(SMALL.replace("rounds: 4", "rounds: 6"))
    words = ("reproduce", small, "--out", "out", "--rounds", 1, "--no-search", "--quiet", "--processes", 1)
    done = cli(*words, "--cells", "few")
    assert done.code == 0, done.err
    folder = work / "out" / "small"
    table = (folder / TABLE_FILE).read_text()
    assert "| FedAvg | not run: 1 of 6 rounds |" in table
    assert "| FedAvg | 50.00 ±1.00 | not run: 1 of 6 rounds | – | – | – | – | – | – | – | 2 | 1 |" in table
    assert "| *FedAvg minus Local* | – |" in table
    assert "not run: 1 of 6 rounds" in done.out
    for line in lines(folder):
        assert line["note"] == "not run: 1 of 6 rounds"
        assert not any(line[name] for name in ("value", "received", "trained", "last_pooled", "last_uniform"))
    assert not (folder / "figure.svg").exists()
    small.write_text(SMALL.replace("rounds: 4", "rounds: 10"))
    assert cli(*words, "--cells", "all", "--rounds", 2, "--out", "enough").code == 0
    assert {line["note"] for line in lines(work / "enough" / "small")} == {""}
    assert all(float(line["value"]) for line in lines(work / "enough" / "small"))


def test_claims_stand_first_on_the_terminal_and_in_the_table(cli: Cli, work: Path, small: Path) -> None:
    claim = "claims: [{text: Averaging beats training alone., better: FedAvg, than: Local, columns: few}]"
    small.write_text(f"{SMALL}{claim}\n".replace("columns: few", "columns: [few]"))
    words = ("reproduce", small, "--out", "out", "--no-search", "--quiet", "--processes", 1)
    done = cli(*words, "--seeds", 1)
    assert done.code == 0, done.err
    folder = work / "out" / "small"
    said = "not answered: few / FedAvg: 1 of 2 seeds; few / FedAvg: no search; few / Local: 1 of 2 seeds"
    assert said in (folder / TABLE_FILE).read_text()
    done = cli("reproduce", small, "--out", "out", "--quiet", "--processes", 1, "--resume")
    assert done.out.index("Claim 1. Averaging beats training alone.") < done.out.index("over clients")
    by_row = {
        row: [float(one["value"]) for one in lines(folder) if (one["row"], one["column"]) == (row, "few")]
        for row in ("FedAvg", "Local")
    }
    first, second = (one - other for one, other in zip(by_row["FedAvg"], by_row["Local"], strict=True))
    mean, margin = (first + second) / 2, 12.7062 * abs(first - second) / 2  # t of one degree of freedom
    with (folder / "claims.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["difference"]) == pytest.approx(mean, abs=2e-3)
    assert float(line["high"]) - float(line["low"]) == pytest.approx(2 * margin, abs=0.03)
    assert line["answer"] in done.out
    table = (folder / TABLE_FILE).read_text()
    assert table.index("## Claims") < table.index("## Accuracies")
    assert f"| Averaging beats training alone. | {line['answer']} | the same | FedAvg minus Local | " in table
    assert line["corrected"] == line["answer"]  # one comparison is not corrected
    small.write_text(SMALL)  # runs outlive their claims
    trained = len(Records(folder).runs)
    assert cli("reproduce", small, "--out", "out", "--quiet", "--processes", 1, "--resume").code == 0
    assert len(Records(folder).runs) == trained
    assert not (folder / "claims.csv").exists()


FAIR = """
answers_claims: true
claims: [{text: Yes., better: FedAvg, than: Local}]
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (FAIR, "answers_claims: true", "the study has no claims"),
        ("better: FedAvg", "better: FedAwg", "'FedAwg'"),
        ("than: Local", "than: [Local, FedAvg]", "expected two different rows, got 'FedAvg' twice"),
        ("than: Local", "than: Local, columns: [some]", "'some'"),
        ("than: Local", "than: Local, columns: []", "at least 1"),
        ("than: Local", "than: []", "at least 1"),
        ("text: Yes., ", "", "text"),
        ("than: Local", "than: FedAvg_ft, columns: [few, all]", "the row 'FedAvg_ft' is not in column 'all'"),
        ("0.1, 1]", "0.1]", "column 'all' has no row with algorithm fedavg_ft"),
        (", columns: [few]", "", "one number of combinations for all rows, got Local 2, FedAvg 2, FedAvg_ft 3"),
        ("algorithm: local,", "algorithm: fedavg,", "column 'few' has no row with algorithm local"),
    ],
)
def test_an_unfair_study_is_refused(cli: Cli, small: Path, old: str, new: str, said: str) -> None:
    text = SMALL.replace("algorithm: local}", "algorithm: local, grid: {lr: [0.01, 0.1]}}").replace(
        "  trained:", "  FedAvg_ft: {algorithm: fedavg_ft, columns: [few], grid: {lr: [0.01, 0.1, 1]}}\n  trained:"
    )
    small.write_text((text + FAIR).replace(old, new))
    done = cli("reproduce", small, "--out", "out", "--quiet", "--processes", 1)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_column_may_have_a_grid_of_its_own(cli: Cli, work: Path, small: Path) -> None:
    small.write_text(SMALL.replace("lr: [1.0e-6, 0.1]}}", "lr: [1.0e-6, 0.1]}, grids: {all: {lr: [1.0e-5, 0.2]}}}"))
    study = load_study(str(small))
    assert study.choices(Cell("FedAvg", "few")) == [{"lr": 1e-6}, {"lr": 0.1}]
    assert study.choices(Cell("trained", "all")) == [{"lr": 1e-5}, {"lr": 0.2}]
    assert cli("reproduce", small, "--out", "out", "--quiet", "--processes", 1).code == 0
    chosen = {(r["column"], r["choice"]) for r in lines(work / "out" / "small") if r["row"] == "FedAvg"}
    assert chosen == {("few", "lr=0.1"), ("all", "lr=0.2")}
    assert "lr from 1e-06, 0.1 | all: lr from 1e-05, 0.2" in (work / "out" / "small" / TABLE_FILE).read_text()


def test_validation_data_choose_where_test_data_say_otherwise(small: Path) -> None:
    """Two combinations, one better on validation data and the other on test data."""
    study, cell = load_study(str(small)), Cell("FedAvg", "few")
    records = Records(small.parent / "none")
    curves = {}
    for choice, (validation, test) in zip(study.choices(cell), ((0.9, 0.1), (0.2, 0.8)), strict=True):
        run = study.make_run(cell, choice, 0, tuning=True)
        records.runs[run.id] = {"evaluation_point": "received"}
        curves[run.id] = {
            (part, "received"): {"round": np.array([3]), "acc_uniform": np.array([accuracy])}
            for part, accuracy in (("validation", validation), ("test", test))
        }
    records.curves = curves
    assert choose_options(study, cell, records, WHOLE) == {"lr": 1e-6}
    # A run of the choice diverges after the search: the next best takes its place, if there is one that does not.
    for choice, expected in (({"lr": 1e-6}, {"lr": 0.1}), ({"lr": 0.1}, {"lr": 1e-6})):
        records.runs[study.make_run(cell, choice, 1).id] = {"failed": "training diverged"}
        assert choose_options(study, cell, records, WHOLE) == expected


def test_a_killed_process_is_no_result(cli: Cli, work: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is resumed, not taken for one that diverged; the other columns are trained."""
    from fedattune.experiments import runner
    from fedattune.experiments.plan import FailedRun

    real = runner.train_all

    def kill(jobs: Any, *how: Any, on_failure: Any, **more: Any) -> Any:
        for job in jobs:
            if job.name == "fedavg" and job.settings.participation.cohort == 2:
                on_failure(FailedRun("fedavg", job.settings.seed, "its process was killed", job.folder, False))
        rest = [job for job in jobs if job.name != "fedavg" or job.settings.participation.cohort != 2]
        return real(rest, *how, on_failure=on_failure, **more)

    monkeypatch.setattr(runner, "train_all", kill)
    done = cli("reproduce", small, "--out", "out", "--quiet", "--no-search", "--processes", 1)
    assert done.code == 1
    assert "few: its process was killed; go on by --resume" in done.err
    folder = work / "out" / "small"
    assert {(r["column"], r["row"]) for r in lines(folder)} >= {("few", "Local"), ("all", "FedAvg")}
    assert not any("failed" in facts for facts in Records(folder).runs.values())


def test_one_command_at_a_time_in_a_folder(cli: Cli, work: Path, small: Path) -> None:
    (work / "out").mkdir()
    with FileLock(work / "out" / "runs.lock"):
        done = cli("reproduce", small, "--out", "out", "--quiet")
    assert done.code == 2
    assert "another fedattune reproduce is at work in out" in done.err


def test_an_interrupted_study_says_how_to_go_on(
    cli: Cli, work: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the first run: that is kept, and the line to go on with has all that was given."""
    seen = []

    def stop(self: object) -> bool:
        seen.append(1)
        return len(seen) > 7

    words = ("reproduce", small, "--out", "out", "--no-search", "--seeds", 1, "--quiet", "--processes", 1)
    with monkeypatch.context() as patch:
        patch.setattr("fedattune.experiments.session.InterruptHandler.__call__", stop)
        done = cli(*words)
    assert done.code == 130
    said = done.err.partition("resume with: fedattune ")[2].strip()
    assert said == f"reproduce {small} --no-search --out out --processes 1 --quiet --seeds 1 --resume"
    assert len(Records(work / "out" / "small").runs) >= 1
    assert cli(*said.split()).code == 0
    cli("reproduce", small, "--out", "once", "--no-search", "--seeds", 1, "--quiet", "--processes", 1)
    assert Records(work / "out" / "small").runs.keys() == Records(work / "once" / "small").runs.keys()
    assert [r["value"] for r in lines(work / "out" / "small")] == [r["value"] for r in lines(work / "once" / "small")]
