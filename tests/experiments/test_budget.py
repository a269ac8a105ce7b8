"""Comparisons that decide by themselves how much to train."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedattune
from cli_helpers import Done, refused
from fedattune import ConfigError
from fedattune.analysis.load import read_runs
from fedattune.core.settings import Settings
from fedattune.experiments import budget as budgets
from fedattune.experiments.budget import format_seconds, parse_budget, settle_budget
from fedattune.experiments.config import Experiment
from fedattune.experiments.plan import make_plan

Cli = Callable[..., Done]
TABLE = ("compare --data t.csv --client-column ward --target outcome --out run --quiet").split()  # noqa: SIM905
SHORT = (*TABLE, "--algorithms", "local,fedavg", "--budget", "10m", "--rounds", "3", "--model", "mlr")
PARTS = ("test", "validation", "train")


def write_wards(path: Path, *, n_clients: int = 8, rows: int = 40, noise: float = 0.5) -> Path:
    """Write a table whose clients have own weights near common ones."""
    random = np.random.default_rng(0)
    common, lines = random.normal(size=3), ["ward,a,b,c,outcome"]
    for ward in range(n_clients):
        w = common + 0.3 * random.normal(size=3)
        for x in random.normal(size=(rows, 3)):
            outcome = "yes" if x @ w + noise * random.normal() > 0 else "no"
            lines.append(f"w{ward},{x[0]:.4f},{x[1]:.4f},{x[2]:.4f},{outcome}")
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SPLITS", (2, 3))
    monkeypatch.setattr(budgets, "MAX_TUNING", 1)


def test_times_are_read_and_written() -> None:
    assert [parse_budget(one) for one in ("5m", "90s", "1.5h", "30", "off")] == [300, 90, 5400, 30, None]
    assert [format_seconds(one) for one in (300, 90, 5400, 7200)] == [
        "5 minutes",
        "90 seconds",
        "90 minutes",
        "2 hours",
    ]
    for wrong in ("5 m", "0m", "-3m", "soon", "5d"):
        with pytest.raises(ConfigError, match="expected a time such as 5m, 90s or 1h, or off"):
            parse_budget(wrong)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "300s"),
        ({"seed": 3, "device": "cpu", "model": "dnn", "metric": "auc"}, "300s"),
        ({"eval_clients": 3}, "300s"),
        ({"eval_every": 1}, "300s"),
        ({"held_out": 1, "join_rounds": 3}, "300s"),
        ({"rounds": 5}, "off"),
        ({"tune": 2}, "off"),
        ({"dp_client": 3.0}, "off"),
        ({"budget": "20s", "rounds": 5}, "20s"),
        ({"budget": "300h"}, "1080000s"),
        ({"budget": "off"}, "off"),
    ],
)
def test_a_table_has_a_budget_unless_the_user_says_how_much_to_train(
    given: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    table = write_wards(tmp_path / "t.csv")
    experiment = Experiment(data=str(table), client_column="ward", target="outcome", **given)
    plan = settle_budget(make_plan(experiment), experiment.given)
    assert plan.experiment.budget == expected
    assert plan.models == (() if expected == "off" or "model" in given else budgets.TABLE_MODELS)
    assert ("rounds" in plan.free) == (expected != "off" and "rounds" not in given)


def test_large_data_have_no_budget_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(data="digits")
    assert settle_budget(make_plan(experiment), experiment.given).experiment.budget == "300s"
    monkeypatch.setattr(budgets, "MAX_SMALL_VALUES", 1000)
    assert settle_budget(make_plan(experiment), experiment.given).experiment.budget == "off"


def test_the_settings_that_say_nothing_of_training_exist() -> None:
    assert Settings.flat_fields().keys() >= budgets.NO_TRAINING
    assert Experiment.flat_fields().keys() >= budgets.DECIDES_ALONE


def test_a_budget_refuses_what_it_decides(cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv")
    refused(
        cli(*TABLE, "--budget", "1m", "--tune", "3", "--splits", "4"),
        "--budget decides about --splits and --tune; leave --splits and --tune out, or give it as off",
    )
    refused(cli(*TABLE, "--budget", "soon"), "--budget: got 'soon', expected a time such as 5m, 90s or 1h, or off")


def test_every_split_is_tuned_on_rows_that_it_does_not_test(
    cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wards(work / "t.csv")
    tuned = []
    tune = budgets.tune_plan

    def spy(plan: Any, *args: Any, **more: Any) -> Any:
        tuned.append((more["label"], [one.partition.get("split", 0) for one in plan.federations]))
        return tune(plan, *args, **more)

    monkeypatch.setattr(budgets, "tune_plan", spy)
    done = cli(*SHORT)
    assert done.code == 0, done.err
    runs = read_runs([work / "run"])
    splits = sorted({run.split for run in runs.results})
    first = [("model-mlr-3", [0]), ("model-mlr-3-client", [0]), ("", [0])]
    assert tuned == [*first, *((f"split-{k}", [k]) for k in splits[1:])]
    assert len(splits) in (2, 3)
    assert sorted((run.algorithm, run.split) for run in runs.results) == sorted(
        (name, split) for name in ("local", "fedavg") for split in splits
    )
    assert {one.split for one in runs.baselines} == set(splits)
    assert "logistic alone" in done.out
    assert "logistic pooled+client" in done.out
    content = json.loads((work / "run" / "result.json").read_text())
    assert content["verdict"] == runs.verdict.text
    assert content["verdict"] in done.out
    assert f"on each of {len(splits)} random splits" in " ".join(runs.notes)
    assert not [path for path in (work / "run" / "tuning").iterdir() if path.is_dir()]
    assert "Still training." not in (work / "run" / "report.html").read_text()


def test_a_stop_gives_the_verdict_so_far_and_a_resumed_run_goes_on(
    cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wards(work / "t.csv")
    train = budgets.train_all
    stopped = []

    def stop_in_the_second_split(jobs: Any, should_stop: Any, *args: Any, **more: Any) -> Any:
        names = {job.folder.name for job in jobs}
        if names == {"seed-0-split-1"} and not stopped:
            stopped.append(True)
            train(jobs[:1], should_stop, *args, **more)
            raise budgets.StoppedError("stopped")
        return train(jobs, should_stop, *args, **more)

    monkeypatch.setattr(budgets, "train_all", stop_in_the_second_split)
    monkeypatch.setattr(budgets._Trainer, "_is_sure", lambda _: False)
    done = cli(*SHORT)
    assert done.code == 0, done.err  # as if the time were up
    runs = read_runs([work / "run"])
    assert {run.split for run in runs.results} == {0}
    assert {one.split for one in runs.baselines} == {0}
    assert not list((work / "run").glob("*/seed-0-split-1"))
    assert cli("report", "run").code == 0
    again = cli("compare", "--resume", "run", "--quiet")
    assert again.code == 0, again.err
    assert {run.split for run in read_runs([work / "run"]).results} == {0, 1, 2}


def test_a_model_that_diverged_in_every_trial_is_not_chosen_after_a_resumption(
    cli: Cli, work: Path, few_splits: None
) -> None:
    """Its score is minus infinity, which the file has as null."""
    write_wards(work / "t.csv")
    assert cli(*SHORT).code == 0
    file = work / "run" / "budget.json"
    state = json.loads(file.read_text())
    assert state["choices"]["scaling"] == "auto"
    del state["choices"]["model"], state["choices"]["scaling"]
    state["choices"]["trials"]["model-mlr-3-client"][1] = None
    file.write_text(json.dumps(state))
    done = cli("compare", "--resume", "run", "--quiet")
    assert done.code == 0, done.err
    assert json.loads(file.read_text())["choices"]["scaling"] == "auto"


def write_visits(
    path: Path, *, day_effect: float = 0, ward_effect: float = 0, is_number: bool = False, born: bool = False
) -> None:
    """Write a table of visits; on odd days the outcome is shifted down, on even ones up, and so in wards."""
    random, lines = np.random.default_rng(0), ["ward,visited,a,outcome" + ",born" * born]
    for row in range(1000):
        day, ward, a = int(random.integers(20)), row % 8, random.normal()
        outcome = a + day_effect * (-1) ** day + ward_effect * (-1) ** ward + 0.3 * random.normal()
        shown = f"{outcome:.3f}" if is_number else "yes" if outcome > 0 else "no"
        lines.append(f"w{ward},2024-03-{day + 1:02d},{a:.3f},{shown}" + ",1970-01-01" * born)
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("settings", "options", "is_said"),
    [
        ({"day_effect": 2}, "", True),
        ({"day_effect": 2, "is_number": True}, "", True),
        ({}, "", False),
        ({"is_number": True}, "", False),
        ({"ward_effect": 9, "is_number": True}, "", False),  # without the ward, boosting explains nothing
        ({"day_effect": 2, "born": True}, "", False),  # which date?
        ({"day_effect": 2}, "--split time", False),
        ({"day_effect": 2}, "--baseline majority", False),
    ],
)
def test_newest_rows_that_are_predicted_far_worse_than_random_ones_are_told(
    cli: Cli, work: Path, few_splits: None, settings: dict[str, Any], options: str, is_said: bool
) -> None:
    """Trees knew the storms of 2013 from other flights of the same days: AUC 76% by chance, 60% of later flights."""
    write_visits(work / "t.csv", **settings)
    alone = [one.replace("local,fedavg", "local") for one in SHORT]
    done = cli(*alone, *options.split())
    assert done.code == 0, done.err

    def find_note(done: Done) -> list[str]:
        return [line for line in done.out.splitlines() if "predicted far worse than randomly chosen ones" in line]

    notes = find_note(done)
    assert bool(notes) == is_said
    state = json.loads((work / "run" / "budget.json").read_text())
    assert (state["choices"].get("newest") is not None) == is_said
    if is_said:
        row = next(line for line in done.out.splitlines() if line.startswith(" boosting pooled"))
        assert f" against {row.split()[2]}" in notes[0]  # the table's number
        assert "the newest rows by 'visited'" in notes[0]
        assert "--split time tests on the newest rows, as in real use" in notes[0]
        assert "<h2>Notes</h2><ul><li>the newest rows" in (work / "run" / "report.html").read_text()
        again = cli("compare", "--resume", "run", "--quiet")
        assert (again.code, find_note(again)) == (0, notes)


@pytest.mark.parametrize(("most", "is_said"), [(10, False), (20, True)])
def test_the_most_rounds_are_no_lack_of_time(
    cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch, most: int, is_said: bool
) -> None:
    write_wards(work / "t.csv")
    monkeypatch.setattr(budgets, "MAX_ROUNDS", most)
    monkeypatch.setattr(budgets, "MOVING_SHARE", 0)  # every curve still moves
    monkeypatch.setattr(budgets._Trainer, "_count_affordable", lambda *_: 10)
    monkeypatch.setattr(budgets._Trainer, "_can_afford", lambda *_: False)
    done = cli(*TABLE, "--algorithms", "local,fedavg", "--budget", "10m", "--model", "mlr")
    assert done.code == 0, done.err
    assert ("for lack of time, only 10 rounds" in done.out) == is_said


@pytest.mark.parametrize(("answer", "is_said"), [("undecided", True), ("yes", False)])
def test_an_answer_that_more_splits_may_decide_says_so(
    cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch, answer: str, is_said: bool
) -> None:
    """At 43,699 traffic stops, five minutes are five splits and undecided, ten minutes are six and a yes."""
    write_wards(work / "t.csv")
    monkeypatch.setattr(budgets._Trainer, "_is_sure", lambda _: False)
    monkeypatch.setattr(budgets._Trainer, "_reach_verdict", lambda _: SimpleNamespace(answer=answer))
    monkeypatch.setattr(budgets._Trainer, "_time_rest", lambda _, split: 0.0 if split < 2 else math.inf)
    done = cli(*SHORT)
    assert done.code == 0, done.err
    said = "for lack of time, only 2 of 3 splits were run: a longer --budget may change the answer"
    assert (said in done.out) == is_said


def test_the_end_of_the_time_ends_the_splits(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wards(work / "t.csv")
    monkeypatch.setattr(budgets._Trainer, "_is_sure", lambda _: False)
    done = cli(*TABLE, "--algorithms", "local,fedavg", "--budget", "1s")
    assert done.code == 0
    assert (
        "the models gam and dnn, and per-client scaling were not tried: a longer --budget may change the answer"
        in done.out
    )
    state = json.loads((work / "run" / "budget.json").read_text())
    verdict = json.loads((work / "run" / "result.json").read_text())["verdict"]
    assert cli("compare", "--resume", "run", "--quiet").code == 0  # no time is left, and nothing is lost
    assert json.loads((work / "run" / "result.json").read_text())["verdict"] == verdict
    assert state["choices"]["splits"] == len({run.split for run in read_runs([work / "run"]).results}) < 10
    assert state["choices"]["rounds"] == budgets.MIN_ROUNDS


def test_what_was_begun_before_counts_with_its_time(tmp_path: Path) -> None:
    first = budgets.Budget(60, tmp_path)
    first.begin("split-0")
    first.started -= 20
    first.save()
    again = budgets.Budget(60, tmp_path)
    again.begin("split-0")
    assert again.measure("split-0") == pytest.approx(20, abs=1)
    assert again.left == pytest.approx(40 - again.for_report, abs=1)


def test_of_a_split_that_was_begun_before_only_the_rest_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets._Trainer, "_time_split", lambda *_: 100.0)
    trainer = object.__new__(budgets._Trainer)
    trainer.budget = budgets.Budget(600, tmp_path)
    trainer.budget.begin("split-1")
    trainer.budget.started -= 30
    assert [trainer._time_rest(split) for split in (1, 2)] == pytest.approx([70, 100], abs=1)


def test_time_is_left_for_the_report(tmp_path: Path) -> None:
    assert budgets.Budget(300, tmp_path, 8).for_report == pytest.approx(15, abs=0.1)
    assert budgets.Budget(300, tmp_path, 3000).for_report == pytest.approx(30)
    assert budgets.Budget(10, tmp_path, 3000).for_report == pytest.approx(2)


def test_a_split_takes_the_time_of_its_baselines_too(
    cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wards(work / "t.csv")
    train = budgets.train_baselines
    monkeypatch.setattr(
        budgets, "train_baselines", lambda *args: [replace(one, seconds=1000.0) for one in train(*args)]
    )
    assert cli(*SHORT).code == 0
    assert {run.split for run in read_runs([work / "run"]).results} == {0}


def test_rounds_double_while_the_curves_move(
    cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wards(work / "t.csv", n_clients=2)
    monkeypatch.setattr(budgets._Trainer, "_is_sure", lambda _: True)
    monkeypatch.setattr(budgets, "MAX_ROUNDS", 20)
    monkeypatch.setattr(budgets._Trainer, "_count_affordable", lambda *_: 10)
    monkeypatch.setattr(budgets, "MOVING_SHARE", 0.0)  # as if they always moved
    assert cli(*TABLE, "--algorithms", "local,fedavg", "--budget", "1h").code == 0
    choices = json.loads((work / "run" / "budget.json").read_text())["choices"]
    assert choices["rounds"] == 20
    assert choices["model"] in budgets.TABLE_MODELS
    assert {run.config["rounds"] for run in read_runs([work / "run"]).results} == {20}


def test_a_federation_made_in_python_has_one_split() -> None:
    random = np.random.default_rng(0)
    clients = {
        f"c{i}": (x := random.normal(size=(60, 3)).astype(np.float32), (x[:, 0] > 0).astype(int)) for i in range(3)
    }
    found = fedattune.compare(fedattune.federation_from(clients), ["fedavg"], rounds=3, budget="2s")
    assert {run.split for run in found.results} == {0}
    assert {row.algorithm for row in found.rows} >= {"local", "fedavg", "majority", "logistic alone"}


def test_what_is_evaluated_may_be_told(cli: Cli, work: Path, few_splits: None) -> None:
    """The pilot of 3 rounds, too, runs with an interval above its rounds."""
    write_wards(work / "t.csv")
    words = ("--eval-every", "4", "--eval-clients", "5", "--held-out", "1", "--join-rounds", "2")
    done = cli(*TABLE, "--algorithms", "local,fedavg", "--budget", "3s", "--model", "mlr", *words)
    assert done.code == 0, done.err
    for run in read_runs([work / "run"]).results:
        assert [run.config[name] for name in ("eval_every", "eval_clients", "held_out", "join_rounds")] == [4, 5, 1, 2]
        assert run.rounds >= budgets.MIN_ROUNDS


def test_a_method_that_always_diverges_is_a_finding(cli: Cli, work: Path, few_splits: None) -> None:
    write_wards(work / "t.csv")
    done = cli(*SHORT, "--lr", "1e30", "--baseline", "majority")
    assert done.code in (0, 1)
    assert "Traceback" not in done.err
    assert (work / "run" / "result.json").exists()


def test_the_default_rate_is_lower_where_inputs_are_large(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lines = [",".join(["ward", *(f"x{k}" for k in range(400)), "outcome"])]
    for i, row in enumerate(random.normal(size=(120, 400))):
        lines.append(",".join([f"w{i % 4}", *(f"{x:.3f}" for x in row), f"{row[:3].sum():.4f}"]))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    table: dict[str, Any] = {"data": str(tmp_path / "t.csv"), "client_column": "ward", "target": "outcome"}
    plan = make_plan(Experiment(**table))
    assert plan.experiment.training.lr < 0.02
    assert "the learning rate is" in plan.notes[0]
    assert make_plan(Experiment(**table, lr=0.02)).experiment.training.lr == 0.02
    heavy = make_plan(Experiment(**table, momentum=0.9))
    assert heavy.experiment.training.lr == pytest.approx(plan.experiment.training.lr / 10, rel=0.1)
    assert "because the inputs are large for momentum 0.9" in heavy.notes[0]
    # Steps of Adam do not grow with the inputs.
    assert make_plan(Experiment(**table, optimizer="adam")).experiment.training.lr == 0.001


@pytest.mark.parametrize(("score", "expected"), [(0.9, "client"), (0.69, "federated")])
def test_validation_data_choose_who_scales_the_numbers(
    score: float, expected: str, cli: Cli, work: Path, few_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wards(work / "t.csv", n_clients=3)

    def try_model(_: Any, model: str, rounds: int, methods: Any, scaling: str | None = None) -> budgets.Trial:
        return budgets.Trial(rounds, 0.7 if scaling is None else score, False, 0.1)

    monkeypatch.setattr(budgets._Trainer, "_try_model", try_model)
    assert cli(*SHORT).code == 0
    runs = read_runs([work / "run"])
    assert {run.config["partition"].get("scaling", "client") for run in runs.results} == {expected}
    assert ("per-client scaling is better" in " ".join(runs.notes)) == (expected == "client")
    assert cli("compare", "--resume", "run", "--quiet").code == 0


def test_the_client_is_suggested_as_a_feature_where_it_helps(cli: Cli, work: Path, few_splits: None) -> None:
    """Clients differ by nothing but their mean, which one model without them cannot know."""
    random = np.random.default_rng(0)
    lines = [
        "ward,a,outcome",
        *(f"w{i % 4},{a:.3f},{3 * (i % 4) + a:.3f}" for i, a in enumerate(random.normal(size=240))),
    ]
    (work / "t.csv").write_text("\n".join(lines))
    assert cli(*SHORT).code == 0
    assert "--client-feature gives the client's name" in " ".join(read_runs([work / "run"]).notes)
    done = cli(*SHORT[:-1], "mlr", "--client-feature", "--out", "second")
    assert done.code == 0, done.err
    runs = read_runs([work / "second"])
    assert "--client-feature" not in " ".join(runs.notes)
    rmse = {row.algorithm: row.mean.mean for row in runs.rows if row.mean}
    assert rmse["ridge pooled"] < 0.5 * rmse["mean"]


def test_the_client_feature_is_suggested_for_a_clear_gain_alone() -> None:
    """Less loss by chance on a few splits is no reason."""
    for loss, is_said in ((0.68, False), (0.5, True)):
        found = [
            SimpleNamespace(
                name=name, predictions={"validation": SimpleNamespace(is_regression=False, pooled={"log_loss": value})}
            )
            for _ in range(3)
            for name, value in (("logistic pooled", 0.685), ("logistic pooled+client", loss))
        ]
        assert bool(budgets.suggest_client_feature(found)) == is_said
