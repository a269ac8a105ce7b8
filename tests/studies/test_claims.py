"""Answers to claims, with intervals by hand."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedattune.studies.claims import (
    CLAIM_COLUMNS,
    Answer,
    answer_claims,
    compute_interval,
    compute_p,
    compute_p_ranks,
    compute_p_small,
    describe_marks,
    describe_range,
    describe_ranks,
    format_answers,
    to_csv,
)
from fedattune.studies.outcome import StudyResults
from fedattune.studies.records import Records
from fedattune.studies.study import WHOLE, Cell, CellRun, Extent, Study

STUDY = """
title: Made up
source: nobody
measure: {over: last, mean: uniform, called: accuracy}
settings: {data: digits, clients: 4, partition: dirichlet, rounds: 10, steps: 5, validation: 0}
seeds: 3
columns: {one: {lr: 0.1}, two: {lr: 0.2}}
rows: {Local: {algorithm: local}, FedAvg: {algorithm: fedavg}, Prox: {algorithm: fedprox, columns: [one]}}
"""
BETTER = {"text": "Averaging is better.", "better": "FedAvg", "than": "Local"}
T_2 = 4.302653  # 97.5% of Student's t with two degrees of freedom, from a printed table
Numbers = dict[tuple[str, str], list[float]]


def answer(numbers: Numbers, facts: Any = None, **claim: Any) -> Answer:
    """Answer a claim for made-up accuracies in percent: (row, column) -> one for each seed."""
    study = Study(**yaml.safe_load(STUDY), name="made-up", claims=[BETTER | claim])
    records = Records(Path("nowhere"))
    for (row, column), values in numbers.items():
        for seed, value in enumerate(values):
            run = study.make_run(Cell(row, column), {}, seed)
            records.runs[run.id] = {
                "experiment": run.experiment.to_keywords(mode="json"),
                "evaluation_point": "received",
                "seconds": 1,
                "local_steps": 50,
                "split": "same",
            }
            accuracies = np.array([0, value / 100])
            curve = {"round": np.array([5, 10]), "acc_uniform": accuracies, "acc_pooled": accuracies / 2}
            records.curves[run.id] = {("test", "received"): curve | {"acc_std": accuracies, "acc_worst10": accuracies}}
            if facts:
                facts(records, run.id, row, seed)
    (found,) = answer_claims(StudyResults(study, records))
    return found


def both(one: list[float], two: list[float]) -> Numbers:
    """Accuracies of FedAvg in two columns where Local has 50, 60 and 70."""
    local: list[float] = [50, 60, 70]
    return {
        ("Local", "one"): local, ("Local", "two"): local,
        ("FedAvg", "one"): [a + b for a, b in zip(local, one, strict=True)],
        ("FedAvg", "two"): [a + b for a, b in zip(local, two, strict=True)],
    }  # fmt: skip


def test_the_interval_of_three_differences_by_hand() -> None:
    """1, 2 and 3: mean 2, deviation 1, so the margin is t / sqrt(3)."""
    interval = compute_interval([1, 2, 3])
    assert interval.mean == 2
    assert interval.margin == pytest.approx(T_2 / math.sqrt(3), abs=1e-6)
    assert interval.low == pytest.approx(2 - 2.484138, abs=1e-5)
    assert compute_interval([1, 1.5]).margin == pytest.approx(12.706205 * 0.25, abs=1e-5)  # one degree of freedom
    assert compute_interval([4, 4, 4]) == (4, 4, 4)
    alone = compute_interval([5])
    assert alone.mean == 5
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_all_recorded_seeds_count() -> None:
    """The study has three seeds, the records have fifteen; 14 differences of 2 and one of 5 have a mean of 2.2."""
    local = [50 + seed for seed in range(15)]
    found = answer({("Local", "one"): [*local], ("FedAvg", "one"): [52.0 + seed for seed in range(14)] + [69.0]})
    difference = found.comparisons[0].difference
    assert difference is not None
    assert difference.mean == pytest.approx(2.2)
    assert difference.high - 2.2 == pytest.approx(2.144787 * 0.2, abs=1e-5)  # Student's t, 14 degrees of freedom


def test_a_run_that_was_paused_does_not_change_the_time_of_a_row() -> None:
    study = Study(**yaml.safe_load(STUDY), name="made-up")
    records = Records(Path("nowhere"))
    cell = Cell("Local", "one")
    for seed, seconds in enumerate([40, 9000, 50]):
        run = study.make_run(cell, {}, seed)
        records.runs[run.id] = {"experiment": run.experiment.to_keywords(mode="json"), "evaluation_point": "received"}
        records.runs[run.id] |= {"seconds": seconds, "local_steps": 50}
    assert StudyResults(study, records).outcomes[cell].measures["seconds"].mean == 50


def test_differences_are_paired_by_seed() -> None:
    """Runs of one row are 10 apart, yet every seed gains 4, 5 or 6: 5 ± t/sqrt(3)."""
    found = answer(both([4, 5, 6], [1, 2, 3]))
    first, second = found.comparisons
    assert (first.better, first.than) == (Cell("FedAvg", "one"), Cell("Local", "one"))
    assert first.difference is not None
    assert first.difference.mean == pytest.approx(5)
    assert first.difference.low == pytest.approx(5 - 2.484138, abs=1e-5)
    assert first.holds
    assert second.difference is not None
    assert second.difference.low == pytest.approx(-0.484138, abs=1e-5)
    assert not second.holds
    assert found.text == "holds partly (1 of 2 comparisons)"
    assert format_answers([found], ["one", "two"]) == [
        ["claim", "answer", "after Holm", "difference", "one", "two"],
        ["Averaging is better.", found.text, "the same", "FedAvg minus Local", "+5.00 ±2.48 ▲", "+2.00 ±2.48"],
    ]
    assert describe_range(found) == "+2.00 ±2.48 (two) to +5.00 ±2.48 (one)"
    head, line, _ = to_csv("made-up", [found]).splitlines()
    formula = found._replace(claim=found.claim.model_copy(update={"text": "=HYPERLINK(1)"}))
    assert to_csv("@made-up", [formula]).splitlines()[1].startswith("'@made-up,'=HYPERLINK(1),")
    assert head == ",".join(CLAIM_COLUMNS)
    assert line == (
        "made-up,Averaging is better.,holds partly (1 of 2 comparisons),holds partly (1 of 2 comparisons),"
        "one,FedAvg,Local,0.0,5.000,2.516,7.484,0.013,,0.026,1,1,3,0,0"
    )


@pytest.mark.parametrize(
    ("one", "two", "claim", "said"),
    [
        ([4, 5, 6], [3, 3, 3], {}, "holds"),
        ([4, 5, 6], [3, 3, 3], {"by": 2.5}, "holds"),
        ([4, 5, 6], [3, 3, 3], {"by": 2.6}, "holds partly (1 of 2 comparisons)"),
        ([4, 5, 6], [3, 3, 3], {"by": 3}, "not seen"),  # 3 is not above 3
        ([-1, -1, -1], [0, 0, 0], {"by": -1.5}, "holds; less than a point in 1 of 2"),
        (
            [-2, -2, -2],
            [0, 0, 0],
            {"by": -1.5},
            "holds partly (1 of 2 comparisons); the opposite in 1 of 2; less than a point in 1 of 2",
        ),
        ([0.4, 0.5, 0.6], [0.1, 0.1, 0.1], {}, "holds; less than a point in 2 of 2"),
        ([0.4, 0.5, 0.6], [4, 5, 6], {}, "holds; less than a point in 1 of 2"),
        ([0.4, 0.5, 0.6], [-0.1, 0, 0.1], {}, "holds partly (1 of 2 comparisons); less than a point in 2 of 2"),
        ([-0.1, 0, 0.1], [-3, 0, 3], {}, "not seen; less than a point in 1 of 2"),
        ([1, 1, 1], [-3, 0, 3], {"by": 1}, "not seen"),  # a point is not less than a point
        ([4, 5, 6], [-3, 0, 3], {"columns": ["one"]}, "holds"),
        ([-1, 0, 1], [1, 2, 3], {}, "not seen"),
        ([0, 0, 0], [-0.1, 0, 0.1], {}, "no difference of a point or more"),
        ([-4, -5, -6], [1, 2, 3], {}, "not seen; the opposite in 1 of 2"),
        ([-4, -5, -6], [4, 5, 6], {}, "holds partly (1 of 2 comparisons); the opposite in 1 of 2"),
        ([-4, -5, -6], [-4, -5, -6], {"better": "Local", "than": ["FedAvg"]}, "holds"),
    ],
)
def test_the_answer(one: list[float], two: list[float], claim: dict[str, Any], said: str) -> None:
    assert answer(both(one, two), **claim).text == said


def test_rows_are_compared_in_the_columns_that_have_both() -> None:
    numbers = both([4, 5, 6], [4, 5, 6]) | {("Prox", "one"): [50, 60, 70]}
    found = answer(numbers, than=["Local", "Prox"])
    assert [(c.than.row, c.better.column) for c in found.comparisons] == [
        ("Local", "one"), ("Local", "two"), ("Prox", "one")
    ]  # fmt: skip
    assert format_answers([found], ["one", "two"])[2] == ["", "", "", "FedAvg minus Prox", "+5.00 ±2.48 ▲", ""]


def test_runs_without_the_curve_are_no_answer() -> None:
    def forget(records: Records, run: str, row: str, seed: int) -> None:
        if row == "FedAvg":
            del records.curves[run]

    found = answer(both([4, 5, 6], [4, 5, 6]), forget, columns=["one"])
    assert found.text == "not answered: one: FedAvg and Local have no seed in common"


def test_incomplete_runs_are_no_answer() -> None:
    numbers = both([4, 5, 6], [4, 5, 6])
    missing = {key: values for key, values in numbers.items() if key != ("FedAvg", "two")}
    assert answer(missing).text == "not answered: two / FedAvg: not run"
    numbers["FedAvg", "two"] = numbers["FedAvg", "two"][:2]
    found = answer(numbers)
    assert found.text == "not answered: two / FedAvg: 2 of 3 seeds"
    assert format_answers([found], ["one", "two"])[1][4:] == ["+5.00 ±2.48 ▲", "+4.50 ±6.35"]


def test_p_values_by_hand() -> None:
    """With two degrees of freedom, the two-sided p value of t is 1 - t / sqrt(t^2 + 2)."""
    t = 5 * math.sqrt(3)
    assert compute_p([4, 5, 6]) == compute_p([-4, -5, -6]) == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert compute_p([4, 5, 6], by=3) == compute_p([1, 2, 3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert compute_p([-4, -5, -6], by=-3) == compute_p([1, 2, 3])  # the opposite is below the points of the claim
    assert compute_p([-4, -5, -6], by=3) == compute_p([4, 5, 6])  # and below zero
    assert compute_p([1, 2, 3], by=2.5) == compute_p([7]) == compute_p([0, 0]) == 1
    assert compute_p([2, 2, 2]) == 0
    low = compute_interval([1, 2, 3]).low
    assert compute_p([1, 2, 3], by=low) == pytest.approx(0.05)


def test_ranks_are_tested_too_as_one_seed_may_be_far_from_the_others() -> None:
    """All six differences are above zero, by chance in 2 of 64 cases, and one outlier hides it from Student's t."""
    assert compute_p_ranks([1, 2, 3, 4, 5, 100]) == 2 / 64
    assert compute_p_ranks([2, 3, 4, 5, 6, 101], by=1) == 2 / 64
    assert compute_p_ranks([-2, -3, -4, -5, -6, -101], by=-1) == 2 / 64
    assert compute_p_ranks([-0.5] * 6, by=-1) < 0.05
    assert compute_p_ranks([0.5] * 6, by=1) == compute_p_ranks([1, 2, 3, 4, 5]) == compute_p_ranks([0] * 6) == 1
    assert compute_p_ranks([1, 1, -1, 2, 3, 4]) == 2 * 4 / 64  # ranks 2, 2, 2, 4, 5, 6: at most 2 by four signs
    assert compute_p_ranks([1e-6, -1e-6, 1, 2, 3, 4]) == 2 / 16  # float32 noise is no difference
    local = [50.0] * 6
    far = {("Local", "one"): local, ("FedAvg", "one"): [51, 52, 53, 54, 55, 90]}
    near = {("Local", "two"): local, ("FedAvg", "two"): [51, 52, 53, 54, 55, 56]}
    found = answer(far | near)
    assert [one.holds for one in found.comparisons] == [False, True]
    assert [one.ranks_disagree for one in found.comparisons] == [True, False]
    assert describe_ranks([found]).endswith("on: one, FedAvg minus Local (p = 0.031).")
    assert describe_ranks([answer(both([1, 1, 1], [1, 1, 90]))]) == ""  # three seeds cannot be sure by ranks


def test_holm_counts_the_comparisons_of_the_claim() -> None:
    """3 ± 2.48 has p = 0.035: sure alone, not as one of two. 5 ± 2.48 has 0.013, twice that is below 5%."""
    found = answer(both([2, 3, 4], [-1, 0, 1]))
    assert found.text == "holds partly (1 of 2 comparisons)"
    assert found.corrected == "not seen"
    assert [one.p_holm for one in found.comparisons] == pytest.approx([2 * compute_p([2, 3, 4]), 1])
    line = format_answers([found], ["one", "two"])[1]
    assert line[1:3] == [found.text, "not seen"]
    assert line[4:] == ["+3.00 ±2.48 △", "+0.00 ±2.48"]
    found = answer(both([4, 5, 6], [-2, -3, -4]))  # after the first, one is left: its p value stays
    assert found.corrected == found.text == "holds partly (1 of 2 comparisons); the opposite in 1 of 2"
    found = answer(both([2, 3, 4], [2, 3, 4]))  # both have to be sure for this, so nothing is to correct
    assert found.corrected == found.text == "holds"
    assert answer(both([-2, -3, -4], [-1, 0, 1])).corrected == "not seen"


def diverge(*runs: tuple[str, str, int]) -> Callable[[Records, str, str, int], None]:
    def change(records: Records, run: str, row: str, seed: int) -> None:
        column = "one" if records.runs[run]["experiment"]["lr"] == 0.1 else "two"
        if (row, column, seed) in runs:
            records.runs[run] = {**records.runs[run], "failed": "training diverged"}
            del records.curves[run]

    return change


def test_runs_that_diverged_are_told_and_leave_their_method_unsure() -> None:
    found = answer(both([3, 5, 5], [5, 5, 5]), diverge(("Local", "one", 0)))
    assert found.text == "holds; one / Local: 1 diverged"  # the rival diverged, and is worse where it did not
    assert found.comparisons[0].seeds == (1, 2)
    found = answer(both([3, 5, 5], [5, 5, 5]), diverge(("FedAvg", "one", 0)))
    assert found.text == "holds partly (1 of 2 comparisons); one / FedAvg: 1 diverged"
    assert to_csv("made-up", [found]).splitlines()[1].endswith(",2,1,0")
    assert answer(both([-5, -5, -5], [1, 1, 1]), diverge(("Local", "one", 0))).text == (
        "holds partly (1 of 2 comparisons); one / Local: 1 diverged"
    )
    found = answer(both([0, 0, 0], [0, 0, 0]), diverge(("Local", "one", 0)))
    assert found.text == "not seen; less than a point in 1 of 2; one / Local: 1 diverged"
    for n in (2, 3):  # one seed or none is left: this comparison has no answer, the other has
        found = answer(both([3, 3, 3], [5, 5, 5]), diverge(*(("FedAvg", "one", seed) for seed in range(n))))
        assert found.text == f"holds partly (1 of 2 comparisons); one / FedAvg: {n} diverged"
    assert "no mark in its favour" in describe_marks(Study(**yaml.safe_load(STUDY), name="made-up"), [found])


def test_small_differences_are_corrected_too() -> None:
    """0.5 ± 0.248 is within a point with t = 0.5 * sqrt(3) / 0.1 = 8.66, and 0.7 ± 0.248 with 5.196."""
    t = 3 * math.sqrt(3)
    assert compute_p_small([0.6, 0.7, 0.8]) == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert compute_p_small([-0.6, -0.7, -0.8]) == compute_p_small([0.6, 0.7, 0.8])
    assert compute_p_small([0, 0, 0]) == 0
    assert compute_p_small([1, 1.1, 0.9]) == compute_p_small([3, 4, 5]) == 1
    assert compute_p_small([0.7, 0.7 - 0.3, 0.7 + 0.3]) > 0.05  # 0.7 ± 0.75
    found = answer(both([0.6, 0.7, 0.8], [-30, 0, 30]))
    assert found.text == "holds partly (1 of 2 comparisons); less than a point in 1 of 2"
    assert found.corrected == "holds partly (1 of 2 comparisons)"  # 2 * 0.035 is above 5%
    found = answer(both([-0.8, 0.7, 0.1], [0.5, -0.5, 0]))
    assert not any(one.is_small for one in found.comparisons)
    found = answer(both([0.1, 0.3, -0.3], [0.2, -0.2, 0]))
    assert found.text == found.corrected == "no difference of a point or more"


def rounds(n: int) -> Callable[[Records, str, str, int], None]:
    def change(records: Records, run: str, row: str, seed: int) -> None:
        if row == "FedAvg":
            study = Study(**yaml.safe_load(STUDY), name="made-up")
            column = "one" if records.runs[run]["experiment"]["lr"] == 0.1 else "two"
            from fedattune.studies.study import Extent

            short = study.make_run(Cell(row, column), {}, seed, Extent(n, "off"))
            records.runs[short.id] = records.runs.pop(run) | {"experiment": short.experiment.to_keywords(mode="json")}
            records.curves[short.id] = records.curves.pop(run)

    return change


def test_runs_of_a_study_are_evaluated_by_their_own_rounds() -> None:
    """Stored runs keep their ids: up to November 2026, every round was evaluated by default."""
    settings = yaml.safe_load(STUDY)
    cell = Cell(next(iter(settings["rows"])), next(iter(settings["columns"])))

    def make(extent: Extent = WHOLE, **changes: int) -> CellRun:
        study = Study(**settings | {"settings": settings["settings"] | changes}, name="made-up")
        return study.make_run(cell, study.middle_choice(cell), 0, extent)

    assert make(rounds=1000).experiment.eval_every == 40
    assert make(Extent(25), rounds=1000).experiment.eval_every == 1
    assert make(Extent(25), rounds=1000, eval_every=10).experiment.eval_every == 10
    assert make(rounds=40).id == make(rounds=40, eval_every=1).id
    assert make(rounds=1000).id == make(rounds=1000, eval_every=40).id != make(rounds=1000, eval_every=1).id
