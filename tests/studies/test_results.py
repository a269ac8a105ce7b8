"""The committed results are what the command makes of the committed raw results, and far cells have a reason."""

import re
from pathlib import Path

import numpy as np
import pytest
from docs.make import papers
from docs.make.methods import load_studies

from fedattune.studies import STUDIES, load_study
from fedattune.studies.claims import answer_claims
from fedattune.studies.claims import to_csv as claims_to_csv
from fedattune.studies.figures import compute_matching_rate, find_label_pairs
from fedattune.studies.outcome import StudyResults, compute_late_change
from fedattune.studies.table import CLAIMS_FILE, CSV_FILE, FIGURE_FILE, TABLE_FILE, to_csv, to_markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DONE = sorted(path.parent.name for path in RESULTS.glob("*/runs.json"))

each = pytest.mark.parametrize("name", DONE)


def load(name: str) -> StudyResults:
    return load_studies()[name]


@each
def test_the_table_is_what_the_raw_results_say(name: str) -> None:
    results = load(name)
    assert results.outcomes
    assert (RESULTS / name / TABLE_FILE).read_text("utf-8") == to_markdown(results)
    assert (RESULTS / name / CSV_FILE).read_text("utf-8") == to_csv(results)
    assert (RESULTS / name / FIGURE_FILE).stat().st_size > 1000


def test_claims_are_what_the_raw_results_say() -> None:
    with_claims = {name for name in DONE if load(name).study.claims}
    assert {path.parent.name for path in RESULTS.glob(f"*/{CLAIMS_FILE}")} == with_claims
    for name in with_claims:
        answers = answer_claims(load(name))
        assert (RESULTS / name / CLAIMS_FILE).read_text("utf-8") == claims_to_csv(name, answers)


def test_generated_parts_of_the_page_are_those_of_the_results() -> None:
    """After a new run: python -m docs.make.papers."""
    page = papers.PAGE.read_text("utf-8")
    assert papers.fill_page(page) == page
    assert page.index(papers.CLAIMS) < page.index("##")
    for name in DONE:
        for answer in answer_claims(load(name)):
            source = load(name).study.source
            assert f"\n| {source} | {answer.claim.text} | {answer.text} | " in page
    assert "(../results/fedmcsa-table1/table.md)" in page


@pytest.mark.parametrize("name", STUDIES)
def test_studies_of_claims_ask_for_fair_comparisons(name: str) -> None:
    assert load_study(name).answers_claims == name.endswith("-claims")


def test_numbers_of_the_page_are_those_of_the_tables() -> None:
    """Accuracies in the prose of docs/papers.md, with two digits, stand in a committed table."""
    page = (ROOT / "docs" / "papers.md").read_text("utf-8")
    tables = " ".join((RESULTS / name / TABLE_FILE).read_text("utf-8") for name in DONE)
    assert set(re.findall(r"\d+\.\d\d\b", page)) <= set(re.findall(r"\d+\.\d\d\b", tables))


@each
def test_a_whole_cell_that_is_more_than_a_point_off_has_a_reason(name: str) -> None:
    results = load(name)
    assert [str(one.cell) for one in results.list_distant() if not results.study.find_reason(one.cell)] == []


@each
def test_a_command_prints_the_numbers_that_reasons_name(name: str) -> None:
    """Accuracies in a reason stand in the numbers of its own study or of another's."""
    study, found = load(name).study, load(name).outcomes
    said = {study.find_reason(cell) for cell in found} - {None}
    tables = [(RESULTS / other / TABLE_FILE).read_text("utf-8").split("## All numbers")[1] for other in DONE]
    printed = {*re.findall(r"\d+\.\d\d", " ".join(tables))}
    for other in map(load_study, DONE):
        printed |= {f"{number:.2f}" for cell in other.cells() if (number := other.paper_value(cell)[0])}
    assert {number for text in said for number in re.findall(r"\d+\.\d\d", text or "")} <= printed


@each
def test_stored_runs_are_what_the_study_asks_for_today(name: str) -> None:
    """Settings and options at their defaults then are those of now; else old numbers would stand for new ones."""
    results = load(name)
    study, records, found = results.study, results.records, results.outcomes
    for cell, one in found.items():
        for run in one.runs:
            facts = records.runs[run]
            then = facts["experiment"]
            now = study.make_run(cell, one.choice, then["seed"], one.extent)
            dumped = now.experiment.to_keywords(mode="json")
            for option in now.options:  # these are compared below, with their defaults
                for given in (dumped["set"], then["set"]):
                    given.pop(f"{study.source_row(cell).algorithm}.{option}", None)
            if then.get("accept") == "always" and dumped["accept"] == "auto" and dumped["attack"] is None:
                then = {**then, "accept": "auto"}  # the same without an attack; the default until 2026-11
            assert {key: dumped[key] for key in then if key in dumped} == then
            assert now.options == facts["options"]


@pytest.mark.parametrize("name", STUDIES)
def test_personalised_methods_do_the_same_local_work(name: str) -> None:
    """Steps or epochs, batches and rounds are those of the study or the column; every column has a Local."""
    study = load_study(name)
    for row in study.rows.values():
        assert not {"steps", "epochs", "batch_size", "rounds"} & row.settings.keys()
    for column in study.columns:
        assert any(c.column == column and study.source_row(c).algorithm == "local" for c in study.cells()), column


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_is_chosen_on_test_data(name: str) -> None:
    """What is searched has validation data, what is reported has none; both leave the test part alone."""
    study = load_study(name)
    for cell in study.cells():
        choice = study.choices(cell)[0]
        final = study.make_run(cell, choice, 0).experiment
        assert final.validation == 0
        if len(study.choices(cell)) > 1:
            search = study.make_run(cell, choice, 0, tuning=True).experiment
            assert search.validation > 0
            assert (search.test, search.split_seed) == (final.test, final.split_seed)


LABELS = np.array([[3, 1, 0, 0], [0, 2, 2, 0], [0, 0, 0, 5], [1, 0, 0, 1]])  # 0 and 1 share, 0 and 3, 2 and 3


def test_the_matching_rate_by_hand() -> None:
    """Of the six darkest cells off the diagonal, those that are pairs with a label in common."""
    perfect = find_label_pairs(LABELS) + 9 * np.eye(4)  # the own cell does not count, however dark
    assert compute_matching_rate(perfect, LABELS) == 1
    assert compute_matching_rate(-perfect, LABELS) == 0
    wrong = perfect.copy()
    wrong[0, 1], wrong[0, 2] = 0, 1
    assert compute_matching_rate(wrong, LABELS) == pytest.approx(5 / 6)
    assert compute_matching_rate(perfect, np.eye(4)) is None


def test_the_late_change_by_hand() -> None:
    # Twenty rounds, evaluated every second: the last tenth is rounds 19 and 20, so round 20; as many before: round 18.
    curve = {"round": np.arange(2, 21, 2), "acc_pooled": np.array([0.1] * 8 + [0.5, 0.75])}
    assert compute_late_change(curve, "pooled") == pytest.approx(25)
    only_late = {"round": np.array([19, 20]), "acc_pooled": np.array([0.5, 0.75])}
    assert compute_late_change(only_late, "pooled") is None
