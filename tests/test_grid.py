"""The grid of federations: its scores by hand, its search, what it stores, and its cells."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import grid, grid_cells, grid_controls, grid_measures, grid_scores, grid_trials
from benchmarks.__main__ import main
from docs.make import grids

import fedattune
from fedattune import Params, Payload
from fedattune.runs.predictions import RowPredictions
from fedattune.server.mixing import Pool

SEEDS = (0, 1)


def make_run(method: str, seed: int, accuracies: list[float] | None, lr: float = 0.02, **more: Any) -> dict:
    """Make a stored run whose validation accuracy is its test accuracy; without accuracies, training diverged."""
    mean = None if accuracies is None else float(np.mean(accuracies))
    return {
        "cell": "one",
        "kind": "iid",
        "method": method,
        "lr": lr,
        "seed": seed,
        "validation_accuracy": mean,
        "validation_loss": 1.0,
        "accuracy": mean,
        "accuracies": accuracies,
        "clients": accuracies and ["a", "b"],
        "seconds": 0.1,
        "error": grid_scores.DIVERGED if accuracies is None else None,
    } | more


RUNS = [
    make_run("local", 0, [0.80, 0.90]),
    make_run("local", 1, [0.70, 0.80]),
    make_run("fedavg_ft", 0, [0.70, 0.70], lr=0.02),
    make_run("fedavg_ft", 0, [0.90, 0.90], lr=0.2),
    make_run("fedavg_ft", 1, [0.78, 0.90], lr=0.2),
    make_run("ditto", 0, [0.795, 0.885]),
    make_run("ditto", 1, None),
    make_run("variant", 0, [1.0, 1.0]),
    make_run("variant", 1, [1.0, 1.0]),
    make_run("unfinished", 0, [1.0, 1.0]),
    make_run("useless", 0, None, error="useless needs a head"),
]
RIVALS = ("local", "fedavg_ft", "ditto")


def test_scores_of_methods_are_those_worked_out_by_hand() -> None:
    other = [run | {"cell": "two", "accuracy": 0.85} for run in RUNS if run["method"] in ("local", "ditto")]
    scores = grid_scores.score_cells([*RUNS, *other], SEEDS)
    found = grid_scores.score_methods(scores, RIVALS)
    # A variant is no rival: it is 13 points better than the best method, fedavg_ft.
    assert list(found) == ["variant", "fedavg_ft", "local", "ditto"]
    assert found["variant"].mean_regret == pytest.approx(-13)
    assert (found["local"].cells, found["local"].near, found["local"].worst_cell) == (2, 0.5, "one")
    assert found["local"].mean_regret == pytest.approx(7 / 2)
    assert found["local"].shortfall == pytest.approx(7)  # on the cell that has fedavg_ft too
    assert found["ditto"].worst_regret == pytest.approx(87 - 42)
    assert found["ditto"].harmed == 6 / 8


def test_the_search_tries_all_rates_and_then_the_best_on_the_other_seeds() -> None:
    """Equal validation accuracies go to the smaller loss."""
    runs: list[dict] = []
    losses = {0.02: 0.5, 0.06: 0.3, 0.2: 0.4}
    steps = []
    while (step := grid.find_next(runs, (0, 1, 2))) is not None:
        steps.append(step)
        runs.append(make_run("ditto", step[1], [0.5, 0.5], lr=step[0], validation_loss=losses[step[0]]))
    assert steps == [(0.02, 0), (0.06, 0), (0.2, 0), (0.06, 1), (0.06, 2)]
    assert grid.find_next([make_run("ditto", 0, None, error="no head")], (0, 1)) is None
    assert grid.find_next([make_run("ditto", 0, None, lr=rate) for rate in grid.RATES], (0, 1)) is None


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train two rounds of one cell in this process: to start another takes seconds."""
    settings = {"rounds": 2, "epochs": 1, "train": "cohort"}
    monkeypatch.setattr(grid_cells.Cell, "settings", property(lambda cell: settings))

    def run_here(units: Any, out: Path, processes: int) -> int:
        for unit in units:
            grid.store_runs(out, unit.cell, grid.train_unit(unit))
        return 0

    monkeypatch.setattr(grid, "run_units", run_here)


CALL = ["grid", "--cells", "digits-rotated-10", "--seeds", "0,1", "--algorithms"]


def test_a_second_command_adds_what_is_missing_and_repeats_nothing(
    tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # As after a command that was stopped: the second rate is stored, with a time that no run takes.
    stopped = make_run("local", 0, [0.1, 0.1], lr=0.06, cell="digits-rotated-10", kind="groups", seconds=1e6)
    grid.store_runs(tmp_path, "digits-rotated-10", [stopped])
    assert main([*CALL, "local", "--out", str(tmp_path)]) == 0
    first = grid.read_runs(tmp_path, "digits-rotated-10")
    assert sorted((run["lr"], run["seed"]) for run in first if run["seed"] == 0) == [(rate, 0) for rate in grid.RATES]
    assert len(first) == 4
    assert 1e6 in {run["seconds"] for run in first}
    assert main([*CALL, "fedavg,local", "--out", str(tmp_path)]) == 0
    second = grid.read_runs(tmp_path, "digits-rotated-10")
    assert second[:4] == first
    assert {run["method"] for run in second[4:]} == {"fedavg"}
    assert {run["error"] for run in second} == {None}
    run = second[-1]
    assert run["accuracy"] == pytest.approx(np.mean(run["accuracies"]), abs=1e-4)  # they are rounded
    variant = ["--variant", "still=ditto:lam=0.5", "--force", "local"]
    assert main([*CALL[:-1], *variant, "--out", str(tmp_path)]) == 0
    assert {run["method"] for run in grid.read_runs(tmp_path, "digits-rotated-10")} == {"fedavg", "still"}
    assert {file.name for file in tmp_path.iterdir()} >= {"table.md", "cells.md", "heatmap.png"}
    capsys.readouterr()
    assert main([*CALL, "fedavg", "--show", "--out", str(tmp_path)]) == 0
    assert "still" not in capsys.readouterr().out


def test_groups_have_what_they_are_named_after() -> None:
    whole = fedattune.load_federation("digits", partition="iid", clients=8, seed=0)
    rows = [torch.as_tensor(client.all) for client in whole.clients]
    turned, permuted = grid_cells.rotate_groups(whole, 4, 0), grid_cells.permute_groups(whole, 3, 0)
    plain = whole.features(torch.arange(len(whole.y)))
    for u, mine in enumerate(rows):
        assert torch.equal(torch.rot90(turned.x[mine], -(u % 4), (-2, -1)), plain[mine])
        pairs = set(zip(whole.y[mine].tolist(), permuted.y[mine].tolist(), strict=True))
        assert len(pairs) == 10  # each class has one new meaning
        assert torch.equal(permuted.y[mine], whole.y[mine]) == (u % 3 == 0)
    shifted = grid_cells.shift_features(whole, 0, 0)
    means = [float(shifted.x[mine].mean()) for mine in rows]
    assert np.std(means) > 10 * np.std([float(plain[mine].mean()) for mine in rows])


SURE_RUNS = [
    make_run("local", 0, [0.90, 0.90], deviations=[0.02, 0.02]),
    make_run("fedavg_ft", 0, [0.50, 0.50], deviations=[0.05, 0.05]),
    make_run("attune", 0, [0.80, 0.85], deviations=[0.03, 0.03]),
    make_run("late", 0, None),
]


def test_sure_losses_are_those_worked_out_by_hand() -> None:
    """Attune's clients lose 10 and 5 points, and chance explains 1.645 sqrt(0.02^2 + 0.03^2) = 5.9 points."""
    found = grid_scores.score_methods(grid_scores.score_cells(SURE_RUNS, [0]), RIVALS)
    assert (found["attune"].harmed, found["attune"].surely_harmed) == (1, 0.5)
    assert found["local"].surely_harmed == 0
    assert found["late"].surely_harmed == 1
    assert found["attune"].sure_shortfall == pytest.approx(7.5 - 1.96 * 2.5)
    assert found["local"].sure_shortfall == 0
    assert found["fedavg_ft"].sure_shortfall == pytest.approx(40)  # both clients lose as much
    better = make_run("local_2x", 0, [1.0, 1.0])
    found = grid_scores.score_methods(grid_scores.score_cells([*SURE_RUNS, better], [0]), RIVALS)
    assert found["attune"].sure_shortfall == pytest.approx(17.5 - 1.96 * 2.5)
    assert np.isnan(found["local_2x"].surely_harmed)  # its file has no standard errors


def test_tables_have_a_column_without_controls_and_one_for_minorities(tmp_path: Path) -> None:
    runs = [*SURE_RUNS, make_run("local_2x", 0, [0.95, 0.95]), make_run("local_all", 0, [1.0, 0.7])]
    scores, kinds = grid_scores.score_cells(runs, [0], {"one": 1}), {"one": "iid"}
    tables = grid_scores.write_scores(scores, grid.METHODS, kinds, tmp_path, tuple(grid_controls.CONTROLS))
    head, _, best, *_ = tables[0].splitlines()
    assert head.startswith("| method | cells | mean regret | without controls |")
    assert best.startswith("| local_2x | 1 | 0.00 | -5.00 |")
    assert "| one | 90.0 | 50.0 | 80.0 | local_all | 100.0 |" in (tmp_path / "minorities.md").read_text("utf-8")
    plain = grid_scores.write_methods(grid_scores.score_cells(RUNS, SEEDS), RIVALS, kinds)
    assert "controls" not in plain
    assert "|  | 0.0 |" in plain  # no standard errors are known


def test_files_without_standard_errors_can_still_be_read(tmp_path: Path) -> None:
    old = grid.SCHEMA.remove(grid.SCHEMA.get_field_index("deviations"))
    pq.write_table(pa.Table.from_pylist(RUNS[:2], schema=old), tmp_path / "one.parquet")
    grid.store_runs(tmp_path, "one", [make_run("attune", 0, [0.5, 0.5], deviations=[0.1, None])])
    runs = grid.read_runs(tmp_path, "one")
    assert [run["deviations"] for run in runs] == [None, None, [0.1, None]]
    assert runs[0] == {**RUNS[0], "deviations": None}


def make_rows(outputs: list[list[float]], y: list[Any]) -> RowPredictions:
    """Make the predictions for rows of one client."""
    n = len(y)
    return RowPredictions(np.zeros(n, np.int32), np.arange(n), np.array(y), np.array(outputs, np.float32), 1)


def test_a_mixture_of_classes_is_the_one_worked_out_by_hand() -> None:
    """With one row of one client, the weight of an expert is its probability of the right class to the power 1 + 20."""
    own, shared = (make_rows([[np.log(p), np.log(1 - p)]], [0]) for p in (0.8, 0.5))
    half = np.sqrt(3) / (1 + np.sqrt(3))  # the shared model's probability, half corrected by shares of 3 to 1
    p = np.array([0.8, 0.65, (half + 0.8) / 2, 0.775, 0.5, half, 0.75])
    parts = {"validation": own, "test": own}, {"validation": shared, "test": shared}
    mixed = grid_controls.mix_parts(*parts, np.array([[0.75, 0.25]]))
    assert np.exp(mixed["test"].outputs[0, 0]) == pytest.approx(np.sum(p**22) / np.sum(p**21))


def test_a_mixture_of_numbers_is_the_one_worked_out_by_hand() -> None:
    own, shared = make_rows([[1.0]], [20.0]), make_rows([[3.0]], [20.0])
    weights = np.exp(-21 * np.array([19.0, 18.0, 17.0]) ** 2 / (2 * 17**2))
    parts = {"validation": own, "test": own}, {"validation": shared, "test": shared}
    mixed = grid_controls.mix_parts(*parts, np.ones((1, 0)))
    assert mixed["test"].outputs[0, 0] == pytest.approx(weights @ [1, 2, 3] / weights.sum())


TINY = {
    "digits": grid_cells.make_usual_cell("few", "digits", "beta0.5", 4),
    "linear": grid_cells.make_linear_cell("tiny", grid_cells.draw_two_groups, 40, minority=1, clients=4, first=1),
}


@pytest.mark.parametrize("cell", TINY.values(), ids=list(TINY))
def test_controls_train_what_they_are_named_after(cell: grid_cells.Cell, short: None) -> None:
    data = cell.load(0)
    found = {name: control(cell, data, 0.05, 0) for name, control in grid_controls.CONTROLS.items()}
    for measures in found.values():
        assert measures["clients"] == ["0", "1", "2", "3"]
        assert measures["accuracy"] == pytest.approx(np.mean(measures["accuracies"]), abs=1e-4)
        assert all(deviation > 0 for deviation in measures["deviations"])
    fit = partial(grid_measures.fit_cell, cell, algorithm="local", lr=0.05, seed=0)
    assert found["local_2x"] == grid_measures.measure_result(data, fit(data, epochs=2))
    plain, everything = grid_measures.measure_result(data, fit(data)), grid_controls.join_validation(data)
    assert found["local_all"]["validation_loss"] == plain["validation_loss"]
    rows = fit(everything, early_stopping="off").predictions["test"]
    assert found["local_all"]["accuracies"] == grid_measures.measure_clients(data, rows)["accuracies"]
    for before, after in zip(data.clients, everything.clients, strict=True):
        assert set(after.train) == {*before.train, *before.validation}
        assert np.array_equal(before.test, after.test)
        assert len(before.validation) > len(after.validation) == 0


def test_accuracies_and_their_standard_errors_are_those_worked_out_by_hand() -> None:
    numbers, digits = TINY["linear"].load(0), TINY["digits"].load(0)
    measures = grid_measures.measure_clients(digits, make_rows([[1, 0], [1, 0], [1, 0], [0, 1]], [0, 0, 0, 1]))
    assert (measures["accuracies"], measures["deviations"]) == ([1], [round(np.sqrt(5 / 6 * 1 / 6 / 4), 4)])
    variance = np.var(np.concatenate([numbers.y[client.train] for client in numbers.clients]))
    assert variance == pytest.approx(1)  # in the unit in which models learn it
    unit = numbers.target_scale.deviation
    rows = make_rows([[0.0], [0.0]], [0.6 * unit, 0.8 * unit])  # squared errors of 0.36 and 0.64
    measures = grid_measures.measure_clients(numbers, rows)
    assert (measures["accuracies"], measures["deviations"]) == ([0.5], [0.14])
    measures = grid_measures.measure_validation(numbers, rows)
    assert measures["validation_accuracy"] == pytest.approx(0.5)
    assert measures["validation_loss"] == pytest.approx(0.5 * unit**2)


def test_minorities_differ_from_all_others() -> None:
    plain = grid_cells.load_images("digits", 8, "iid", validation=0.1)(0)
    for name, change in grid_cells.MINORITY_CHANGES.items():
        turned = grid_cells.change_first(lambda _: plain, 2, change)(0)
        for u, client in enumerate(plain.clients):
            x, y = (torch.equal(getattr(turned, key)[client.all], getattr(plain, key)[client.all]) for key in "xy")
            assert (x, y) == (u > 1 or name in ("exchanged", "permuted"), u > 1 or name in ("turned", "inverted"))
    linear = TINY["linear"].load(0)
    slopes = [np.linalg.lstsq(linear.x[client.all], linear.y[client.all], rcond=None)[0] for client in linear.clients]
    gaps = [np.linalg.norm(slope - slopes[-1]) for slope in slopes]
    assert gaps[0] > 2 * max(gaps[1:])


def test_own_partitions_give_the_sizes_and_classes_they_promise() -> None:
    labels = np.arange(1000) % 5
    zeros = grid_cells.divide_mostly_zeros(labels, 2, 0)
    assert [np.bincount(labels[rows] > 0).tolist() for rows in zeros] == [[80, 20]] * 2
    sizes = [len(rows) for rows in grid_cells.divide_unequally(labels, 20, 0)]
    assert min(sizes) >= 8
    assert max(sizes) > 5 * min(sizes)
    assert 980 <= sum(sizes) <= 1000


def test_cells_of_all_grids_have_names_of_their_own_and_start_with_all_kinds() -> None:
    names = [name for cells in grid.GRIDS.values() for name in cells]
    assert len(names) == len(set(names))
    kinds = [cell.kind for cell in grid_cells.MINORITIES.values()]
    assert len(kinds) == 18
    assert len(set(kinds[:6])) == len(set(kinds)) == 6
    assert {kind for cells in grid.GRIDS.values() for kind in (c.kind for c in cells.values())} == set(grid_cells.KINDS)


def test_the_grid_of_minorities_trains_controls_of_its_cells(tmp_path: Path, short: None) -> None:
    call = ["minorities", "--cells", "linear-minority-20", "--seeds", "0", "--out", str(tmp_path)]
    assert main([*call, "--algorithms", "local,local+fedavg"]) == 0
    runs = grid.read_runs(tmp_path, "linear-minority-20")
    assert [(run["method"], run["error"]) for run in runs] == [("local", None)] * 3 + [("local+fedavg", None)] * 3
    assert "| linear-minority-20 |" in (tmp_path / "minorities.md").read_text("utf-8")
    with pytest.raises(SystemExit, match="known method"):
        main([*call, "--variant", "local_2x=ditto"])


def test_trials_change_the_point_that_they_are_named_after(short: None) -> None:
    cell = TINY["digits"]
    data = cell.load(0)
    fit = partial(grid_measures.fit_cell, cell, data, lr=0.05, seed=0)
    for name, make in grid_trials.CHANGED.items():
        method, _, change = name.partition("@")
        if change in ("received", "trained"):
            changed, plain = fit(algorithm=make()), fit(algorithm=method)
            assert (plain.evaluation_point, changed.evaluation_point) in (
                ("trained", "received"), ("received", "trained")
            )  # fmt: skip
            assert changed.evaluation_point == change
            assert changed.history[-1]["trained"] == plain.history[-1]["trained"]
    measures = grid_trials.TRIALS["fedmcsa@received"](cell, data, 0.05, 0)
    assert measures["clients"] == ["0", "1", "2", "3"]


def make_pool(models: Params) -> Pool:
    """Make a pool of clients that all may receive each other's models."""
    n = len(next(iter(models.values())))
    everyone, yes = torch.arange(n), torch.ones(n, dtype=torch.bool)
    return Pool(models, slice(None), everyone, slice(None), yes, yes.expand(n, n), torch.ones(n))


def test_attention_to_updates_compares_differences_from_the_mean_model() -> None:
    """Models 1, 2 and -3 have the mean 0: the cosines are 1, 1 and -1. The same 9 in all models does not count."""
    pool = make_pool(Params(w=torch.tensor([[1.0, 9.0], [2.0, 9.0], [-3.0, 9.0]])))
    found = grid_trials.UpdateAttention("model", sigma=2.0).weights(pool)
    total = 2 * np.exp(2) + np.exp(-2)
    np.testing.assert_allclose(found[0], [np.exp(2) / total, np.exp(2) / total, np.exp(-2) / total], rtol=1e-5)


def test_half_of_the_weight_stays_with_the_own_model() -> None:
    """The two others have the cosines 0 and 1 with the first model."""
    pool = make_pool(Params(w=torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])))
    found = grid_trials.HalfOwnAttention("model", sigma=1.0).weights(pool)
    total = 2 * (1 + np.e)
    np.testing.assert_allclose(found[0], [0.5, 1 / total, np.e / total], rtol=1e-5)


def test_late_attention_averages_all_but_the_last_layer_in_early_rounds() -> None:
    rule = grid_trials.LateAttention("tensor", sigma=50.0, early=2)
    names = ("body.weight", "head.weight")
    state = rule.init(Params({name: torch.zeros(2) for name in names}), 2)
    uploads = Params({name: torch.tensor([[1.0, 0.0], [0.0, 1.0]]) for name in names})
    ids = torch.arange(2)
    found = []
    for _ in range(2):
        state = rule.aggregate(state, ids, Payload(uploads), Payload(uploads), torch.ones(2, dtype=torch.long))
        found.append(rule.pool_for(state, ids, ids))
    early, late = ({key: rule.weights(pool) for key, pool in rule.split_pool(one)} for one in found)
    equal, own = torch.full((2, 2), 0.5), torch.eye(2)
    for weights, body in ((early, equal), (late, own)):
        torch.testing.assert_close(weights["body.weight"], body, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights["head.weight"], own, atol=1e-6, rtol=0)


@pytest.mark.parametrize("page", grids.PAGES, ids=lambda page: page.name)
def test_pages_have_the_numbers_of_the_committed_runs(page: Path) -> None:
    """After a new run: python -m docs.make.grids."""
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- grid ") >= 2
    assert grids.fill_page(text) == text


def test_the_best_sigma_is_that_of_the_best_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    validation = {5.0: (0.5, 1.0), 20.0: (0.7, 0.9), 50.0: (0.7, 0.8), 200.0: (np.nan, 0.1)}

    def train(make: Any, *_: Any) -> dict[str, Any]:
        accuracy, loss = validation[make().server.sigma]
        return {"validation_accuracy": accuracy, "validation_loss": loss, "sigma": make().server.sigma}

    monkeypatch.setattr(grid_trials, "train_trial", train)
    cell = TINY["digits"]
    assert grid_trials.train_best_sigma(cell, cell.load(0), 0.1, 0)["sigma"] == 50.0
