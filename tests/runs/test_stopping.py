"""Early stopping: the model of a client's best round is judged, kept, predicted with and exported."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedattune
from fedattune import Federation, Result
from fedattune.runs import stopping
from fedattune.runs.stopping import StoppingRule, compute_criterion, pick_by_others
from federations import make_federation

RUN = {"rounds": 12, "steps": 5, "batch_size": 8, "lr": 1.0}


def scores(n: list[float], correct: list[float], loss: list[float]) -> np.ndarray:
    return np.array([n, correct, loss], dtype=float)


def test_a_client_follows_its_own_rows_and_the_mean_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10 prior rows: client 0 has 10 rows of loss 1, client 1 none; the mean loss of all rows is 1."""
    monkeypatch.setattr(stopping, "PRIOR_ROWS", 10.0)
    main = compute_criterion(scores([10, 0, 30], [0, 0, 0], [20, 0, 20]), "loss").main
    assert main.tolist() == pytest.approx([(20 + 10 * 1) / 20, 1.0, (20 + 10 * 1) / 40])
    wrong = compute_criterion(scores([10, 0, 30], [10, 0, 10], [1, 0, 1]), "accuracy").main
    assert wrong.tolist() == pytest.approx([(0 + 10 * 0.5) / 20, 0.5, (20 + 10 * 0.5) / 40])


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    rule = StoppingRule("loss")
    rule.add_round(1, scores([5, 5], [0, 0], [1.0, 1.0]))
    rule.add_round(2, scores([5, 5], [5, 5], [np.nan, np.inf]))
    assert rule.rounds.tolist() == [1, 1]


def check_judged(result: Result, data: Federation) -> None:
    """What is judged, predicted and exported is the same model."""
    predictions = result.predictions["test"]
    n, correct, _ = result.judged_scores("test")
    np.testing.assert_allclose(predictions.measure_clients("accuracy"), correct / n)
    np.testing.assert_allclose(result.measure_clients("accuracy"), correct / n)
    for i, client in enumerate(result.eval_ids):
        rows = data.part("test")[client]
        np.testing.assert_array_equal(predictions.sample[predictions.rows(i)], rows)
        model = result.model(client, result.module).double().eval()
        with torch.no_grad():
            logits = model(data.features(torch.as_tensor(rows), torch.float64))
        np.testing.assert_allclose(predictions.outputs[predictions.rows(i)], logits, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("local", "sequential"), *((name, "vectorized") for name in ("fedmcsa", "ditto", "fedavg_ft", "pfedme"))],
)
def test_what_is_judged_is_what_is_kept(name: str, engine: str, tmp_path: Path) -> None:
    data = make_federation([40, 60, 80, 9, 30])
    result = fedattune.fit(data, name, "dnn", engine=engine, out=tmp_path / "run", **RUN)
    assert (result.judged_rounds < 12).any()
    check_judged(result, data)
    again = Result.load(tmp_path / "run")
    np.testing.assert_array_equal(again.judged_rounds, result.judged_rounds)
    assert again.judged == result.judged
    np.testing.assert_array_equal(again.predictions["test"].outputs, result.predictions["test"].outputs)


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_resumed_run_keeps_the_same_models(state: str, tmp_path: Path) -> None:
    data = make_federation([40, 60, 80, 9, 30])
    whole = fedattune.fit(data, "fedmcsa", "dnn", **RUN)
    seen: list[int] = []
    out = {"out": tmp_path / "run", "client_state": state}
    fedattune.fit(
        data,
        "fedmcsa",
        "dnn",
        callbacks=[fedattune.OnRound(lambda p: seen.append(p.round) or seen[-1] == 7)],
        **out,
        **RUN,
    )
    resumed = fedattune.fit(data, "fedmcsa", "dnn", resume=True, **out, **RUN)
    np.testing.assert_array_equal(resumed.judged_rounds, whole.judged_rounds)
    np.testing.assert_allclose(resumed.predictions["test"].outputs, whole.predictions["test"].outputs, atol=1e-6)


@pytest.mark.parametrize("name", ["local", "fedavg", "ditto"])
def test_every_number_is_of_the_judged_round(name: str, tmp_path: Path) -> None:
    """`metrics`, `clients` and `model` speak of one round; `final` is of the last evaluation."""
    data = make_federation([40, 60, 80, 9, 30])
    result = fedattune.fit(data, name, "dnn", out=tmp_path / "run", **RUN)
    assert (result.judged_rounds < 12).any()
    found = []
    for i, client in enumerate(result.clients):
        rows = torch.as_tensor(data.part("test")[i])
        with torch.no_grad():
            predicted = result.model(client.id)(data.features(rows)).argmax(1)
        found.append(float((predicted == data.y[rows]).double().mean()))
        assert getattr(client, result.evaluation_point) == pytest.approx(found[-1])
    assert result.metrics["acc_uniform"] == pytest.approx(np.mean(found))
    assert result.final[result.evaluation_point] == result.history[-1][result.evaluation_point]
    assert Result.load(tmp_path / "run").clients == result.clients


@pytest.mark.parametrize("stop", [0, 7])
def test_every_metric_is_chosen_by_others_rows(stop: int, tmp_path: Path) -> None:
    """The outputs of the others' rounds give the accuracy that the scores of these rounds give, also after a break."""
    data = make_federation([40, 60, 80, 9, 30])

    def pause(progress: fedattune.Progress) -> bool:
        return progress.round == stop

    fedattune.fit(data, "local", "dnn", out=tmp_path, callbacks=[fedattune.OnRound(pause)], **RUN)
    result = fedattune.fit(data, "local", "dnn", out=tmp_path, resume=True, **RUN)
    scores = result._scores_by_others
    assert scores is not None
    np.testing.assert_allclose(result.measure_for_choice("accuracy"), scores[1] / scores[0])
    np.testing.assert_allclose(result.measure_for_choice("log_loss"), scores[2] / scores[0], rtol=1e-4, atol=1e-6)
    assert not np.allclose(result.predictions["choice"].outputs, result.predictions["validation"].outputs)
    by_others = result.predictions["choice"].measure_clients("f1")
    np.testing.assert_array_equal(result.measure_for_choice("f1"), by_others)
    assert set(result.to_json()["metrics"]) == {"test", "validation"}


def test_without_a_second_copy_of_models_some_metrics_are_flattered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedattune.training.backends.local.MAX_CHOICE_BYTES", 0)
    result = fedattune.fit(make_federation([40, 60, 80]), "local", "dnn", **RUN)
    assert set(result.predictions) == {"test", "validation"}
    judged = result.measure_clients("f1", "validation")
    np.testing.assert_array_equal(result.measure_for_choice("f1"), judged)


def test_off_judges_the_last_round() -> None:
    data = make_federation([40, 60, 80])
    result = fedattune.fit(data, "local", "dnn", early_stopping="off", **RUN)
    assert result.judged_rounds.tolist() == [12, 12, 12]
    assert result.judged == result.metrics
    check_judged(result, data)


def test_a_client_that_diverged_does_not_stop_the_others() -> None:
    """Client 0 never has a finite loss; client 1 gets better until round 3, and client 2 has no validation rows."""
    rule = StoppingRule("loss")
    for r, loss in enumerate([30.0, 20.0, 10.0, 40.0], start=1):
        rule.add_round(r, np.array([[10, 10, 0], [0, 5, 0], [np.inf, loss, 0]], dtype=float))
    assert rule.rounds.tolist() == [1, 3, 3]


def test_the_choice_between_methods_is_not_flattered_by_own_rows() -> None:
    """Client 0 has a lucky round 2 of its own; the others choose round 3, in which its score is an ordinary one."""
    n = np.array([4.0, 10.0, 10.0])
    losses = [(4.0, 9.0, 9.0), (0.4, 8.0, 9.0), (3.0, 5.0, 5.0)]
    scores = [np.array([n, n - 1, loss]) for loss in losses]
    picked = pick_by_others(scores, "loss")
    assert picked is not None
    np.testing.assert_allclose(picked[2], [3.0, 5.0, 5.0])
    rule = StoppingRule("loss")
    for r, one in enumerate(scores, 1):
        rule.add_round(r, one)
    # A client that diverges counts in every round, but hides no other one.
    scores = [np.array([n, n - 1, loss]) for loss in [(4.0, 9.0, 900.0), (3.0, 5.0, 800.0), (30.0, 40.0, np.inf)]]
    np.testing.assert_allclose(pick_by_others(scores, "loss")[2], [3.0, 5.0, 800.0])
    rule = StoppingRule("loss")
    for r, one in enumerate(scores, 1):
        rule.add_round(r, one)
    assert rule.rounds.tolist() == [2, 2, 2]
    both = [np.array([n, n - 1, [1.0, 2.0, np.inf]])] * 2
    assert np.isinf(pick_by_others(both, "loss")[2, 2])
    assert pick_by_others(scores, "off") is None
    assert pick_by_others([np.array([[4.0, 0.0], [1.0, 0.0], [2.0, 0.0]])], "loss") is None
