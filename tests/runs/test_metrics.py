"""Numbers of a run from what its store holds, on stores made by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from fedattune import ConfigError, Result
from fedattune.core.payload import MixingMatrices
from fedattune.engine.base import Scores
from fedattune.runs.metrics import build_history, summarize_scores
from fedattune.runs.store import RoundRecord, RunStore

SIZES = [10, 30]
"""Test samples of the two clients: a right answer counts 1/10 or 1/30 for its client, 1/40 for all."""


def scores(*correct: int) -> Scores:
    return Scores(torch.tensor(SIZES), torch.tensor(correct), torch.zeros(2, dtype=torch.float64))


def record(r: int, diverged: list[int] | None = None, absent: list[int] | None = None) -> RoundRecord:
    return RoundRecord(r, 0.5 * r, 10 * r, 20 * r, 8 * r, diverged or [], absent or [])


def run(*rounds: tuple[int, int] | None, evaluation_point: str = "trained", **facts: Any) -> Result:
    """A run with these right answers of its two clients per round, none where it was not evaluated."""
    store = RunStore(None)
    for r, correct in enumerate(rounds, 1):
        if correct is not None:
            other = "received" if evaluation_point == "trained" else "trained"
            store.add_scores(r, evaluation_point, "test", scores(*correct))
            store.add_scores(r, other, "test", scores(0, 0))
        store.add_round(record(r))
    clients = [{"id": f"c{i}", "n_train": 5, "n_test": n} for i, n in enumerate(SIZES)]
    known = {"evaluation_point": evaluation_point, "clients": clients, "notes": [], "n_parameters": 3}
    return Result({"algorithm": "m", "rounds": len(rounds)}, known | facts, store)


def test_means_over_clients_and_over_samples() -> None:
    """9/10 and 15/30: the mean over clients is 0.7, over samples 24/40 = 0.6, the deviation 0.2."""
    found = summarize_scores(np.array(SIZES), np.array([9, 15]), np.array([10.0, 60.0]))
    assert found == pytest.approx(
        {"acc_uniform": 0.7, "acc_pooled": 0.6, "acc_std": 0.2, "acc_worst10": 0.5, "loss_uniform": 1.5}
    )


@pytest.mark.parametrize("evaluation_point", ["received", "trained"])
def test_bmta_is_the_best_round_by_each_mean(evaluation_point: str) -> None:
    """(10, 3): 0.55 and 13/40; (2, 24): 0.5 and 26/40: one round is best by clients, another by samples."""
    result = run((0, 3), (10, 3), (2, 24), (10, 3), evaluation_point=evaluation_point)
    assert result.bmta == {
        "uniform": {"accuracy": pytest.approx(0.55), "round": 2},
        "pooled": {"accuracy": pytest.approx(0.65), "round": 3},
    }
    assert result.to_json()["bmta"] == result.bmta
    assert result.best_test == result.history[1][evaluation_point] | {"round": 2}


def test_rounds_to_is_the_first_evaluated_round_that_reaches_it() -> None:
    """Means over clients: -, 0.2, -, 0.55, 0.5, 0.9."""
    result = run(None, (1, 9), None, (10, 3), (2, 24), (9, 27))
    assert result.rounds_to(0.2) == 2
    assert result.rounds_to(0.21) == 4
    assert result.rounds_to(0.55) == 4
    assert result.rounds_to(0.9) == 6
    assert result.rounds_to(0.91) is None


@pytest.mark.parametrize("accuracy", [0, -0.1, 1.1, 90, float("nan")])
def test_rounds_to_needs_a_fraction(accuracy: float) -> None:
    with pytest.raises(ConfigError, match="fraction above 0 and at most 1"):
        run((1, 6)).rounds_to(accuracy)


def test_mean_of_the_last_tenth_of_the_rounds() -> None:
    """Of 20 rounds, the last two: (0.1 + 0.5) / 2."""
    result = run(*[(10, 30)] * 18, (1, 3), (5, 15))
    assert result.mean_last_10pct is not None
    assert result.mean_last_10pct["acc_uniform"] == pytest.approx(0.3)


def test_the_global_model_on_all_test_parts_together() -> None:
    """(10, 15) of 10 and 30: 25/40, of the last round in which it was evaluated; nothing else changes."""
    plain = run((9, 15), (1, 3), (2, 6))
    assert plain.global_accuracy is None
    assert all("global" not in entry for entry in plain.history)
    result = run((9, 15), (1, 3), (2, 6))
    result.store.add_scores(1, "global", "test", scores(0, 0))
    result.store.add_scores(2, "global", "test", scores(10, 15))
    assert result.global_accuracy == pytest.approx(0.625)
    assert result.to_json()["global_accuracy"] == result.global_accuracy
    assert [entry["global"]["acc_pooled"] for entry in result.history[:2]] == [0, 0.625]
    assert "global" not in result.history[2]
    for name in ("metrics", "final", "bmta", "best_test", "clients", "mean_last_10pct", "validation"):
        assert getattr(result, name) == getattr(plain, name)


def test_who_was_missing_since_the_evaluation_before() -> None:
    store = RunStore(None)
    for r, diverged, absent in ((1, [0], []), (2, [], [1]), (3, [], [0, 1]), (4, [], []), (5, [], []), (6, [], [0])):
        store.add_round(record(r, diverged, absent))
        if r % 2 == 0:
            store.add_scores(r, "trained", "test", scores(1, 1))
    assert store.rounds()[2] == record(3, absent=[0, 1])
    entries = build_history(store, ["a", "b"])
    found = [(e["round"], e["diverged"], e["absent"]) for e in entries]
    assert found == [(2, ["a"], ["b"]), (4, [], ["a", "b"]), (6, [], ["a"])]


def test_components_of_mixing_are_in_natural_order() -> None:
    store = RunStore(None)
    names = ["11.bias", "head", "4.bias", "layer10.0", "0.bias", "1.bias", "layer2.0"]
    store.add_mixing(
        1, MixingMatrices(torch.tensor([1]), torch.tensor([0, 1]), {n: torch.tensor([[0.25, 0.75]]) for n in names})
    )
    found = store.mixing(2).last()
    assert list(found) == ["0.bias", "1.bias", "4.bias", "11.bias", "head", "layer2.0", "layer10.0"]
    assert np.array_equal(found["head"], np.array([[np.nan, np.nan], [0.25, 0.75]]), equal_nan=True)
