"""Notes on predictions that are hardly any, on units, and on curves that still move."""

from typing import Any

import numpy as np
import pytest

from fake_results import Fake, results
from fedattune.analysis.verdict.notes import write_prediction_notes
from fedattune.runs.predictions import RowPredictions

RNG = np.random.default_rng(0)


def rows(y: Any, outputs: Any, n_clients: int = 2) -> dict[str, RowPredictions]:
    n = len(y)
    owner = np.repeat(np.arange(n_clients), n // n_clients).astype(np.int32)
    return {"test": RowPredictions(owner, np.arange(n), np.asarray(y), np.asarray(outputs, np.float32), n_clients)}


def test_predictions_of_one_class_are_named_unless_the_rows_are_so() -> None:
    half, all_no = [0, 1] * 100, [0] * 200
    constant = np.tile([5.0, 0.0], (200, 1))
    (note,) = write_prediction_notes(results(Fake("a", [0.5, 0.5], predictions=rows(half, constant))))
    assert note == ("a predicts 'no' for 100.0% of the test rows, of which 50.0% are so: it hardly looks at the rows")
    assert write_prediction_notes(results(Fake("a", [1.0, 1.0], predictions=rows(all_no, constant)))) == []
    alike = [Fake(name, [0.5, 0.5], predictions=rows(half, constant)) for name in "ab"]
    (note,) = write_prediction_notes(results(*alike))
    assert note.startswith("a, b predict 'no' for at least 100.0% of the test rows, of which 50.0% are so: they hardly")


def test_shares_of_nearly_all_rows_are_not_called_all() -> None:
    facts = {"labels": [[997, 3], [999, 1]]}
    (note,) = write_prediction_notes(results(Fake("a", [0.5, 0.5], facts=facts)))
    assert note.startswith(">99% of all rows are of class 'no', so accuracy says little")
    outputs = np.tile([5.0, 0.0], (4000, 1))
    outputs[0] = [0.0, 5.0]
    (note,) = write_prediction_notes(results(Fake("a", [0.5, 0.5], predictions=rows([0, 1] * 2000, outputs))))
    assert note.startswith("a predicts 'no' for >99.9% of the test rows, of which 50.0% are so")


def test_predictions_of_one_number_are_named() -> None:
    y = RNG.normal(50, 10, 200)
    near = (50 + 0.1 * RNG.normal(size=200))[:, None]
    (note,) = write_prediction_notes(results(Fake("a", [10.0, 10.0], is_regression=True, predictions=rows(y, near))))
    assert note.startswith("a predicts nearly the same number everywhere: the predictions spread 1% as far")
    alike = results(Fake("a", [1.0, 1.0], is_regression=True, predictions=rows(y, y[:, None] + 1)))
    assert write_prediction_notes(alike) == []


def test_targets_in_other_units_are_named() -> None:
    """Client c1 has a thousand times the spread: the mean RMSE is its RMSE."""
    y = np.concatenate([RNG.normal(0, 1, 100), RNG.normal(0, 1000, 100)])
    fake = results(Fake("a", [0.5, 500.0], is_regression=True, predictions=rows(y, y[:, None])))
    (note,) = write_prediction_notes(fake, metric="rmse")
    assert "times as far at client c1 as at client c0, so the mean RMSE is that of few clients" in note
    assert write_prediction_notes(fake, metric="r2") == []
    same = results(Fake("a", [1.0, 1.0], is_regression=True, predictions=rows(y[:100], y[:100, None])))
    assert write_prediction_notes(same, metric="rmse") == []


class Moving(Fake):
    """A method whose validation curve is given."""

    curve: Any = ()

    @property
    def history(self) -> list[Any]:
        key = "loss_uniform" if self.is_regression else "acc_uniform"
        return [{"round": r, "validation": {self.evaluation_point: {key: v}}} for r, v in enumerate(self.curve)]

    def read_curve(self, metrics: Any) -> float:
        return float(metrics["loss_uniform"])


@pytest.mark.parametrize(
    ("is_number", "curve", "words"),
    [
        (False, np.linspace(0.5, 0.9, 20), "validation accuracy still rises: more rounds may be better (+"),
        (False, np.linspace(0.9, 0.5, 20), "validation accuracy falls: fewer rounds are enough (-"),
        (False, [0.8] * 20, None),
        (True, np.linspace(9, 5, 20), "validation RMSE still falls: more rounds may be better (-"),
        (True, np.linspace(5, 9, 20), "validation RMSE rises: fewer rounds are enough (+"),
        (True, 7 + 0.01 * np.cos(np.arange(20)), None),
        (False, [0.5, 0.7, 0.8, 0.83], "validation accuracy still rises: more rounds may be better (+3.0 points from"),
        (False, [0.5, 0.8, 0.7, 0.83], None),  # up and down
        (False, [0.5, 0.7, 0.8], None),  # too few evaluations
    ],
)
def test_curves_that_still_move_are_named(is_number: bool, curve: Any, words: str | None) -> None:
    fake = Moving("a", [0.5, 0.5], is_regression=is_number)
    fake.curve = curve
    notes = write_prediction_notes(results(fake))
    assert [note.partition(": ")[2].startswith(words or "") for note in notes] == ([True] if words else [])
