"""Comparisons by metric, splits, baselines and tuning, through the command."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import fedattune
from cli_helpers import Done, refused
from fedattune import ConfigError, FedAttuneError, Federation, RunError, load_federation
from fedattune.analysis.compare import read_baselines
from fedattune.analysis.load import read_runs
from fedattune.data.client_index import Client
from fedattune.experiments.baselines import (
    STRENGTHS,
    SplitRows,
    _Categories,
    _fit_boosting,
    _fit_constant,
    _fit_logistic,
    _fit_pooled,
    _fit_ridge,
    by_part,
)
from fedattune.experiments.config import Experiment
from fedattune.experiments.plan import make_plan
from fedattune.experiments.runner import ProgressDisplay
from fedattune.experiments.tuning import (
    LR_FACTORS,
    count_cost,
    list_combinations,
    make_tuning_split,
    plan_steps,
    tune_plan,
)
from fedattune.training.setup import hold_out_newcomers

Cli = Callable[..., Done]


def write_wards(
    path: Path, *, n_clients: int = 8, rows: int = 60, bias: float = 0.0, seed: int = 0, number: bool = False
) -> Path:
    """Write a table of clients with own weights near common ones; `bias` makes the class `yes` rare."""
    random = np.random.default_rng(seed)
    common, lines = random.normal(size=3), ["ward,a,b,c,size,outcome"]
    for ward in range(n_clients):
        w, size = common + 0.3 * random.normal(size=3), random.integers(10, 99)
        for x in random.normal(size=(rows, 3)):
            value = float(x @ w + 0.03 * size + bias + 0.5 * random.normal())
            outcome = f"{50 + 10 * value:.3f}" if number else "yes" if value > 1.5 else "no"
            lines.append(f"w{ward},{x[0]:.4f},{x[1]:.4f},{x[2]:.4f},{size},{outcome}")
    path.write_text("\n".join(lines))
    return path


TABLE = ("--data t.csv --client-column ward --target outcome --rounds 8 --lr 0.1 --quiet --out run").split()  # noqa: SIM905


@pytest.mark.parametrize("n_sites", [2, 4])
def test_few_sites_get_an_answer_for_these_sites(n_sites: int, cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv", n_clients=n_sites, rows=150)
    done = cli("compare", *TABLE, "--algorithms", "local,fedavg")
    assert done.code == 0
    verdict = done.out.splitlines()[-2]
    assert "No clear gain from collaborating is shown here" in verdict
    assert json.loads((work / "run" / "result.json").read_text())["decision"]["answer"] == "undecided"


def test_splits_keep_the_clients_and_change_their_parts(cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv")
    assert cli("compare", *TABLE, "--algorithms", "local,fedavg", "--splits", 3).code == 0
    runs = read_runs([work / "run"])
    assert [run.split for run in runs.results] == [0, 1, 2] * 2
    assert len({run.config["split"] for run in runs.results}) == 3
    tests = [run.predictions["test"].sample for run in runs.results[:3]]
    assert all(len(one) == len(tests[0]) for one in tests)
    assert set(tests[0].tolist()) != set(tests[1].tolist())
    assert len(runs.verdict.by_run) == 3
    assert runs.verdict.interval is not None
    # A split more does not change the ones before, and a finished experiment resumes to the same words.
    assert cli("compare", "--resume", "run", "--quiet").out.splitlines()[-2] == runs.verdict.text


def test_a_saved_partition_has_one_split(cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv")
    assert cli("compare", *TABLE, "--algorithms", "local,fedavg", "--save-partition", "mine").code == 0
    done = cli("compare", *TABLE[:-1], "again", "--partition", "mine", "--splits", 2)
    refused(done, "'mine' fixes the parts of its clients, so there is one split")


def test_the_metric_follows_the_classes(cli: Cli, work: Path) -> None:
    """One class of 86% of the rows: AUC decides, and a method that never says `yes` is named."""
    write_wards(work / "t.csv", bias=-1.7, rows=300)
    done = cli("compare", *TABLE, "--algorithms", "local,fedavg")
    runs = read_runs([work / "run"])
    assert runs.metric == "auc"
    assert "AUC" in runs.verdict.text
    done = cli("compare", *TABLE[:-1], "second", "--algorithms", "local,fedavg", "--metric", "accuracy", "--lr", "1e-9")
    assert "so accuracy says little; --metric auc" in done.out
    refused(cli("compare", *TABLE[:-1], "third", "--metric", "rmse"), "metric: got 'rmse', expected one of accuracy")


def scaled(model: Any) -> Any:
    return make_pipeline(StandardScaler(), model)


def test_boosting_takes_a_column_of_categories_as_one(work: Path) -> None:
    """A number, then two texts; row 3 has no known letter."""
    rows = [f"{'ab'[i % 2]},{i},{'abc'[i % 3]},{'xy'[i % 2]},{'no' if i % 4 else 'yes'}" for i in range(40)]
    (work / "t.csv").write_text("ward,n,letter,side,outcome\n" + "\n".join(rows) + "\n")
    data = fedattune.load_federation(work / "t.csv", client_column="ward", target="outcome")
    categories = _Categories.find(data)
    x = data.features(data.y.new_tensor(range(40)).long()).numpy()
    x[3, 1:4] = 0
    merged = categories.merge(x)
    assert (categories.start, categories.sizes, categories.n_merged) == (1, (3, 2), 2)
    assert merged[:5, :2].tolist() == [[0, 0], [1, 1], [2, 0], [pytest.approx(np.nan, nan_ok=True), 1], [1, 0]]
    assert np.array_equal(merged[:, 2], x[:, 0])
    many = np.eye(302, dtype=np.float32)[[0, 301]]
    assert _Categories(0, (300, 2)).n_merged == 1
    assert np.array_equal(_Categories(0, (300, 2)).merge(many), np.c_[[np.nan, 1], many[:, :300]], equal_nan=True)


@pytest.mark.parametrize("number", [False, True])
def test_baselines_are_scikit_learn_on_the_same_rows(number: bool, cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv", number=number)
    assert cli("compare", *TABLE, "--algorithms", "local,fedavg", "--baseline", "sklearn,centralized").code == 0
    found = {one.name: one for one in read_baselines([work / "run"])}
    first = "ridge" if number else "logistic"
    assert set(found) == {
        "mean" if number else "majority",
        f"{first} alone",
        "boosting alone",
        f"{first} pooled",
        f"{first} pooled+client",
        "boosting pooled",
        "centralized",
    }
    data = fedattune.load_federation(work / "t.csv", client_column="ward", target="outcome")
    scale = data.target_scale
    for i, client in enumerate(data.clients):
        (x, y), (new, truth) = (
            (data.features(data.y.new_tensor(rows).long()).numpy(), data.y[rows].numpy())
            for rows in (client.train, client.test)
        )
        mine = {name: one.predictions["test"].measure_clients for name, one in found.items()}
        if number:
            assert scale is not None
            fits = [scaled(Ridge(alpha=alpha)).fit(x, y).predict(new) for alpha in STRENGTHS["ridge"]]
            errors = [scale.deviation * float(np.sqrt(((one - truth) ** 2).mean())) for one in fits]
            assert any(mine["ridge alone"]("rmse")[i] == pytest.approx(error, rel=1e-4) for error in errors)
            constant = scale.deviation * float(np.sqrt(((y.mean() - truth) ** 2).mean()))
            assert mine["mean"]("rmse")[i] == pytest.approx(constant, rel=1e-4)
        else:
            models = [scaled(LogisticRegression(C=strength, max_iter=1000)) for strength in STRENGTHS["logistic"]]
            fits = [model.fit(x, y).predict(new) for model in models]
            assert any(mine["logistic alone"]("accuracy")[i] == pytest.approx((one == truth).mean()) for one in fits)
            assert mine["majority"]("accuracy")[i] == pytest.approx(float((truth == np.bincount(y).argmax()).mean()))
    # The model on all rows is near the pooled regression, and better than the constant.
    metric, sign = ("rmse", -1) if number else ("accuracy", 1)
    value = {name: sign * float(np.nanmean(one.measure_clients(metric))) for name, one in found.items()}
    assert value["centralized"] > value["mean" if number else "majority"]


def test_several_labels_and_numbers_are_fitted_each_alone() -> None:
    random = np.random.default_rng(0)
    x, new = random.normal(size=(80, 3)), random.normal(size=(5, 3))
    z = x @ random.normal(size=(3, 2)) + random.normal(0, 0.5, size=(80, 2))
    logits = by_part(partial(_fit_logistic, strength=1.0), "labels")(x, z > 0, 0)(new)
    values = by_part(partial(_fit_ridge, strength=1.0), "numbers")(x, z, 0)(new)
    scaler = StandardScaler().fit(x)
    for k in range(2):
        model = LogisticRegression(C=1.0, max_iter=1000).fit(scaler.transform(x), z[:, k] > 0)
        np.testing.assert_allclose(logits[:, k], model.decision_function(scaler.transform(new)), rtol=1e-4)
        ridge = Ridge(alpha=1.0).fit(scaler.transform(x), z[:, k])
        np.testing.assert_allclose(values[:, k], ridge.predict(scaler.transform(new)), rtol=1e-6)
    share = (z > 0).mean(axis=0)
    np.testing.assert_allclose(by_part(_fit_constant, "labels")(x, z > 0, 0)(new)[0], np.log(share / (1 - share)))


def test_boosting_fits_many_rows_with_a_class_of_one_row() -> None:
    """Beyond 10,000 rows, scikit-learn stops early by rows of each class, and fails if a class has one row."""
    random = np.random.default_rng(0)
    x = random.normal(size=(10_001, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    y[7] = 2
    outputs = _fit_boosting(x, y, 3, _Categories())(x[:500])
    assert (outputs.argmax(axis=1) == y[:500]).mean() > 0.98


def make_sharing_clients() -> Federation:
    """Make two clients that train on the same rows, and test on rows that the other one trains on or tests, too."""
    random = np.random.default_rng(0)
    parts = [(range(10), range(10, 14), range(14, 24)), (range(20), [], range(20, 30))]
    return Federation(
        name="own",
        x=torch.from_numpy(random.normal(size=(30, 3)).astype(np.float32)),
        y=torch.arange(30) % 2,
        classes=("a", "b"),
        clients=[Client(f"c{i}", *(np.array(rows, dtype=np.int64) for rows in one)) for i, one in enumerate(parts)],
    )


def test_baselines_of_clients_that_share_rows() -> None:
    federation = make_sharing_clients()
    seen = []

    def fit(x: Any, y: Any, n_classes: int) -> Any:
        seen.append(x)
        return lambda new: new[:, -2:]  # the client, as the model is told

    found = _fit_pooled(SplitRows(federation, [0, 1], has_client=True), fit)
    assert seen[0][:, -2:].argmax(axis=1).tolist() == [0] * 10 + [1] * 20
    assert found["test"].outputs.argmax(axis=1).tolist() == [0] * 10 + [1] * 10

    compared = fedattune.compare(federation, ["local"], rounds=2, lr=0.1, budget="off", baseline="centralized")
    predictions = next(one for one in compared.baselines if one.name == "centralized").predictions["test"]
    assert predictions.sample.tolist() == [*range(14, 24), *range(20, 30)]
    assert predictions.y.tolist() == federation.y[predictions.sample].tolist()
    assert predictions.outputs[6:10] == pytest.approx(predictions.outputs[10:14])


def test_the_table_has_the_epsilon_of_the_centralized_baseline(tmp_path: Path) -> None:
    """It trains with the noise of a client that has all rows; other baselines have none."""
    data = load_federation("digits", partition="iid", clients=3)
    settings = {"rounds": 1, "lr": 0.1, "budget": "off", "dp_record": 10.0, "dp_delta": 1e-4}
    compared = fedattune.compare(data, ["fedavg"], baseline="majority,centralized", out=tmp_path, **settings)
    assert compared.baselines
    found = {row.algorithm: row.epsilon for row in read_runs([tmp_path]).rows}
    assert 9 < found["centralized"] <= 10
    assert found["majority"] is None


def test_the_centralized_baseline_has_no_trusted_clients() -> None:
    data = load_federation("digits", partition="iid", clients=3)
    plain = {"rounds": 2, "lr": 0.1, "budget": "off", "baseline": "centralized"}
    outputs = [
        next(one for one in compared.baselines if one.name == "centralized").predictions["test"].outputs
        for given in ({}, {"robust": "trust", "trusted": "0", "robust_share": 0.3})
        if (compared := fedattune.compare(data, ["fedavg"], **plain, **given))
    ]
    assert np.array_equal(*outputs)


def test_the_verdict_is_against_the_best_alone(cli: Cli, work: Path) -> None:
    """Training alone with a rate that learns nothing is no bar: regression alone is."""
    write_wards(work / "t.csv")
    done = cli("compare", *TABLE, "--algorithms", "local,fedavg", "--lr", "1e-6", "--baseline", "sklearn")
    runs = read_runs([work / "run"])
    assert runs.verdict.reference == "logistic alone"
    assert runs.verdict.answer in ("no", "undecided")
    assert "logistic alone" in done.out.splitlines()[-2]


def test_numbers_are_judged_in_their_unit(cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv", number=True)
    done = cli("compare", *TABLE, "--algorithms", "local,fedavg", "--metric", "mae")
    assert done.code == 0
    runs = read_runs([work / "run"])
    run = runs.results[0]
    predictions = run.predictions["test"]
    assert abs(predictions.y.mean() - 50 - 15) < 15  # the unit of the table, not deviations
    assert run.measure_clients("mae").mean() < 10
    assert "MAE" in runs.verdict.text
    assert "points" not in runs.verdict.text
    # Without predictions, the store's losses give RMSE in the same unit.
    bare = type(run)(run.config, run.facts, run.store)
    np.testing.assert_allclose(bare.measure_clients("rmse"), run.measure_clients("rmse"), rtol=1e-4)
    for command in ("report", "explain", "export --client w0 --out m.safetensors --algorithm local"):
        name, *more = command.split()
        assert cli(name, "run", *more).code == 0, command
    done = cli("predict", "m.safetensors", "--data", "t.csv")
    assert "RMSE" in done.err
    assert 20 < float(done.out.splitlines()[1].split(",")[1]) < 120


def test_halving_spends_a_third_of_the_budget_in_each_step() -> None:
    for budget, n in ((3, 9), (5, 15), (9, 27), (5, 9)):
        steps = plan_steps(n, budget, 90)
        assert [rounds for _, rounds in steps] == [10, 30, 90]
        for count, rounds in steps:
            assert count * rounds / 90 <= max(budget / 3, rounds / 90) + 1e-9
        chosen_only = [step for step in steps if step[0] > 1]
        assert plan_steps(n, budget, 90, choose_only=True) == chosen_only
    assert plan_steps(1, 5, 2) == [(1, 2)]
    assert plan_steps(3, 1, 10) == [(3, 3), (1, 10)]
    assert count_cost(3, 90) == (13, pytest.approx(3))
    assert count_cost(3, 90, choose_only=True) == (12, pytest.approx(2))


def test_combinations_begin_with_the_given_ones_and_spare_what_the_user_fixed() -> None:
    local = list_combinations("local", 0.1, 100, 0, {})
    assert len(local) == len(LR_FACTORS)
    assert local[0] == (0.1, {})
    assert sorted(one.lr for one in local) == pytest.approx([0.1 * factor for factor in LR_FACTORS])
    some = list_combinations("fedmcsa", 0.1, 6, 0, {})
    assert len(some) == 6
    assert some == list_combinations("fedmcsa", 0.1, 6, 0, {})
    assert all(not one.options for one in list_combinations("fedmcsa", 0.1, 6, 0, {"sigma": 3.0}))


def test_every_tuned_value_can_be_given() -> None:
    from fedattune.algorithms import ALGORITHMS
    from fedattune.algorithms.table import METHODS
    from fedattune.core.options import build, list_options

    for name, method in METHODS.items():
        defaults = {option.name: option.default for option in list_options(ALGORITHMS[name])}
        for option, values in method.tune.items():
            assert defaults[option] in values, (name, option)
            for value in values:
                build(name, ALGORITHMS[name], {option: value})


def test_tuning_is_for_all_and_resumes(cli: Cli, work: Path) -> None:
    """`local` gets the same budget; a rate that is a ninth of a good one is fixed; what was chosen is kept."""
    write_wards(work / "t.csv")
    argv = [*TABLE, "--algorithms", "local,fedprox", "--tune", 3, "--lr", 0.005]
    done = cli("compare", *argv)
    assert "tuned by validation data on a split and a seed of their own, with a budget of 3 runs" in done.out
    chosen = json.loads((work / "run" / "tuning" / "chosen.json").read_text())
    assert chosen["n_tried"] == {"local": 9, "fedprox": 9}
    assert chosen["choices"]["local"]["lr"] > 0.01
    log = json.loads((work / "run" / "tuning" / "log.json").read_text())
    assert len(log["local"]) > 9
    assert not [path for path in (work / "run" / "tuning").iterdir() if path.is_dir()]
    runs = {run.algorithm: run for run in read_runs([work / "run"]).results}
    assert runs["local"].settings.training.lr == chosen["choices"]["local"]["lr"]
    assert runs["fedprox"].config["options"] == chosen["choices"]["fedprox"]["options"]
    assert "tuned by validation data" in (work / "run" / "report.html").read_text("utf-8")
    again = cli("compare", "--resume", "run", "--quiet")
    assert again.out.splitlines()[-2] == done.out.splitlines()[-2]
    untuned = cli("compare", *TABLE[:-1], "untuned", "--algorithms", "local,fedprox")
    assert "not tuned: every method trains with lr 0.1" in untuned.out


def test_tune_in_python_is_the_tuning_of_the_command(cli: Cli, work: Path) -> None:
    """The same grid, split and budget: `--tune` chooses the same."""
    data = write_wards(work / "t.csv")
    options = {"client_column": "ward", "target": "outcome", "rounds": 8, "lr": 0.005}
    chosen = fedattune.tune(data, ["local", "fedprox"], runs=1, out="tuned", **options)
    assert [*chosen] == ["local", "fedprox"]
    argv = [*TABLE, "--algorithms", "local,fedprox", "--tune", 1, "--lr", 0.005]
    assert cli("compare", *argv).code == 0
    by_command = json.loads((work / "run" / "tuning" / "chosen.json").read_text())["choices"]
    for name, one in chosen.items():
        assert (one.lr, one.options) == (by_command[name]["lr"], by_command[name]["options"])
        best = max(trial["score"] for trial in one.trials if trial["rounds"] == 8)
        assert one.score == best
        assert one.metric == "accuracy"
        assert str(one).startswith(f"{name}: lr={one.lr:.3g}")
    assert json.loads((work / "tuned" / "tuning" / "log.json").read_text())["local"]
    with pytest.raises(fedattune.RunError, match="not empty"):
        fedattune.tune(data, "local", out="tuned", **options)


def test_a_method_that_needs_classes_refuses_a_number(cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv", number=True)
    refused(
        cli("compare", *TABLE, "--algorithms", "local,fedrod"), "fedrod: it needs classes, and the target is a number"
    )
    refused(
        cli("compare", *TABLE, "--algorithms", "local,fedavg", "--partition", "dirichlet"),
        "the partition dirichlet divides samples by class",
    )


def test_a_round_of_a_table_is_one_epoch(cli: Cli, work: Path) -> None:
    """The run folder records the epoch, a resumed run has it, and Python does the same."""
    write_wards(work / "t.csv")
    assert cli("compare", *TABLE, "--algorithms", "local,fedavg").code == 0
    recorded = yaml.safe_load((work / "run" / "experiment.yaml").read_text("utf-8"))
    assert (recorded["steps"], recorded["epochs"]) == (None, 1)
    runs = read_runs([work / "run"]).results
    n_train = [client["n_train"] for client in runs[0].facts["clients"]]
    assert runs[0].local_steps == 8 * np.mean([-(-n // 20) for n in n_train])
    shutil.rmtree(work / "run" / "fedavg")  # what is missing is trained again, by the same settings
    assert cli("compare", "--resume", "run", "--quiet").code == 0
    again = read_runs([work / "run"]).results[1]
    assert (again.settings.training.epochs, again.judged) == (1, runs[1].judged)
    data = fedattune.load_federation(work / "t.csv", client_column="ward", target="outcome")
    found = fedattune.compare(data, ["fedavg"], rounds=8, lr=0.1)
    assert [run.settings.training.epochs for run in found.results] == [1, 1]
    assert found.results[1].judged["acc_uniform"] == pytest.approx(runs[1].judged["acc_uniform"])


def test_tuning_sees_no_test_rows_of_any_split(work: Path) -> None:
    write_wards(work / "t.csv")
    words = {"client_column": "ward", "target": "outcome"}
    splits = [fedattune.load_federation(work / "t.csv", split_number=k, **words) for k in range(3)]
    tuning = make_tuning_split(splits, 0)
    for i, client in enumerate(tuning.clients):
        rows = {*client.train.tolist(), *client.validation.tolist()}
        assert rows
        assert not rows & {row for one in splits for row in one.clients[i].test.tolist()}
    many = [fedattune.load_federation(work / "t.csv", split_number=k, test=0.9, **words) for k in range(40)]
    with pytest.raises(RunError, match="the 40 splits leave rows without a test to 0 clients"):
        make_tuning_split(many, 0)


@pytest.mark.parametrize(
    "given",
    [{"cohort": 4}, {"robust": "trust", "trusted": "w0, tiny"}, {"attack": "negated_model", "attackers": 3}],
    ids=str,
)
def test_tuning_does_without_clients_whose_rows_are_all_tested(given: dict[str, Any], work: Path) -> None:
    """What counts or names clients is of all of them; the tuning split may have fewer."""
    write_wards(work / "t.csv", n_clients=3, rows=30)
    with (work / "t.csv").open("a", encoding="utf-8") as file:
        file.writelines(f"\ntiny,0.{i},0.2,0.3,{40 + i},{'yes' if i else 'no'}" for i in range(3))
    table = {"client_column": "ward", "target": "outcome", "splits": 6}
    plan = make_plan(Experiment(data=str(work / "t.csv"), algorithms="fedavg", **table))
    assert [*make_tuning_split(plan.federations, 0).names] == ["w0", "w1", "w2"]
    chosen = fedattune.tune(work / "t.csv", "fedavg", runs=1, rounds=3, **table, **given)
    assert chosen["fedavg"].trials


@pytest.mark.parametrize(("validation", "stopping"), [(0.1, "loss"), (0.0, "off")])
def test_tuning_trains_no_newcomer_and_stops_as_the_reported_runs_do(
    validation: float, stopping: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wards(work / "t.csv")
    plan = make_plan(
        Experiment(
            data=str(work / "t.csv"),
            client_column="ward",
            target="outcome",
            algorithms=("local", "fedavg"),
            tune=1,
            held_out=3,
            validation=validation,
        )
    )
    training, newcomers = hold_out_newcomers(plan.federation, plan.experiment)
    assert newcomers is not None
    jobs: list[Any] = []

    class Seen(Exception):
        pass

    def see(seen: list[Any], *args: object, **kwargs: object) -> None:
        jobs.extend(seen)
        raise Seen

    monkeypatch.setattr("fedattune.experiments.runner.train_all", see)
    with pytest.raises(Seen):
        tune_plan(plan, 1, work / "out", lambda: False, ProgressDisplay())
    assert jobs
    for job in jobs:
        assert set(job.federation.names) == set(training.names)
        assert not set(job.federation.names) & set(newcomers.names)
        assert job.settings.evaluation.early_stopping == stopping


def test_options_of_data_are_refused_beside_a_federation() -> None:
    data = fedattune.load_federation("digits", clients=4)
    with pytest.raises(ConfigError, match="scaling, test: a federation made in Python has its data and parts"):
        fedattune.compare(data, ["fedavg"], scaling="global", test=0.5, rounds=1)


NAMES = "expected names such as 'fedavg' or 'file.py:factory', .*; only fedattune.fit takes objects"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lrr": 3, "rounds": 0}, "unknown keyword 'lrr'; did you mean 'lr'.*; rounds: input should be greater"),
        ({"quite": True}, "unknown keyword 'quite'; did you mean 'quiet'"),
        ({"tensorboard": True}, "unknown keyword 'tensorboard'; known: accept, algorithms"),
        ({"processes": 0}, "^processes: expected a number of processes"),
        ({"options": 3}, "^options: expected options such as"),
        ({"options": {"fedavg.sigma": 1}}, "^options fedavg.sigma: fedavg has no option 'sigma'"),
        ({"options": {"fedavg.sigma": 1}, "lr": -1}, "^lr: .*; options fedavg.sigma: fedavg has no option 'sigma'"),
        ({"save_partition": "iid"}, "^save_partition iid: this is a built-in partition"),
        ({"drop_columns": "a"}, "^drop_columns goes only with a table"),
        ({"out": __file__}, "^out .*: this is a file"),
        ({"upload_steps": [len]}, '^upload_steps: expected "file.py:Step", or several with commas between, got'),
        ({"model": nn.Linear(1, 1)}, "^model: got a Linear object, expected a name such as 'mlr'"),
        ({"model": nn.Linear}, "^model: got the class Linear"),
        ({"algorithms": [fedattune.algorithms.fedavg()]}, f"^algorithms: got an Algorithm object, {NAMES}"),
        ({"algorithms": fedattune.algorithms.fedavg}, f"^algorithms: got a function object, {NAMES}"),
    ],
)
def test_python_names_keywords(given: dict[str, Any], said: str) -> None:
    for function in (fedattune.compare, fedattune.tune):
        with pytest.raises(FedAttuneError, match=said):
            function("digits", **{"algorithms": "fedavg", **given})


def test_a_callback_that_stops_a_run_is_refused(tmp_path: Path) -> None:
    """Unfinished runs have no predictions, so they cannot be compared."""
    data = fedattune.load_federation("digits", clients=4)
    with pytest.raises(ConfigError, match="local: a callback stopped the run; a comparison trains every run to its"):
        fedattune.compare(data, ["fedavg"], rounds=3, out=tmp_path, callbacks=[fedattune.OnRound(lambda _: True)])


def test_a_wrong_column_does_not_hide_the_verdict(cli: Cli, work: Path) -> None:
    write_wards(work / "t.csv")
    done = cli("compare", *TABLE, "--algorithms", "local,fedavg", "--columns", "gian")
    assert done.code == 0
    assert "note: --columns gian: no such column; did you mean 'gain'" in done.out
    assert json.loads((work / "run" / "result.json").read_text())["verdict"] in done.out


def test_tune_knows_its_budget() -> None:
    with pytest.raises(ConfigError, match="unknown keyword 'rusn'; did you mean 'runs'"):
        fedattune.tune("digits", "local", rusn=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^runs: input should be greater than or equal to 1, got 0"):
        fedattune.tune("digits", "local", runs=0)
    with pytest.raises(ConfigError, match=r"unknown keyword 'tune'; known: accept, .* runs"):
        fedattune.tune("digits", "local", tune=3)
