"""Constants that standardise the numbers of a table: moments of all clients, or each client's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedattune
from data.table_files import parquet
from fedattune import DataError, Federation, load_federation
from fedattune.data.tables import encode_features
from fedattune.data.tables.scaling import (
    MAX_DEVIATIONS,
    constants_from_card,
    constants_to_card,
    fit_all_constants,
    standardise,
)

Columns = dict[str, Any]
NAN = float("nan")


def three_sites(n: int = 40) -> Columns:
    """Make three sites; `beds` is 250 throughout the first one, `opened` is constant in each, `floor` in all."""
    random = np.random.default_rng(2)
    age = random.normal(50, 12, 3 * n)
    return {
        "site": ["A"] * n + ["B"] * n + ["C"] * n,
        "age": age.tolist(),
        "beds": [250.0] * n + random.normal(300, 40, 2 * n).round().tolist(),
        "opened": [1950.0] * n + [1970.0] * n + [2000.0] * n,
        "floor": [3.0] * (3 * n),
        "ill": ["yes" if one > 50 else "no" for one in age + random.normal(0, 5, 3 * n)],
    }


def load(folder: Path, content: Columns, scaling: str = "auto") -> Federation:
    path = parquet(folder, content)
    return load_federation(path, client_column="site", target="ill", scaling=scaling)  # type: ignore[arg-type]


def training_rows(data: Federation) -> NDArray[np.int64]:
    return np.concatenate([client.train for client in data.clients])


def test_the_default_shares_moments_and_keeps_what_tells_clients_apart(tmp_path: Path) -> None:
    content = three_sites()
    data = load(tmp_path, content)
    assert data.partition["scaling"] == "federated"
    assert any("clients share count, sum and sum of squares" in note for note in data.notes)
    assert data.digest == load(tmp_path, content, "federated").digest
    train = training_rows(data)
    for k, name in enumerate(("age", "beds", "opened")):
        values = np.array(content[name])
        np.testing.assert_allclose(data.x[:, k], (values - values[train].mean()) / values[train].std(), atol=1e-5)


@pytest.mark.parametrize("scaling", ["auto", "client", "global"])
def test_new_values_of_a_column_that_is_constant_at_a_client_are_no_jump(scaling: str, tmp_path: Path) -> None:
    """No deviation of 250 beds throughout is known, so that of all clients counts; a column of one value counts not."""
    content = three_sites()
    data = load(tmp_path, content, scaling)
    result = fedattune.fit(data, "local", "mlr", rounds=5, lr=0.1)
    model = tmp_path / "A.safetensors"
    result.export("A", model)
    rows = {"age": [50.0] * 5, "beds": [250.0, 251, 260, 250, 250], "opened": [1950.0, 1950, 1950, 1960, 1950]}
    new = parquet(tmp_path, rows | {"floor": [3.0, 3, 3, 3, 90]}, "new.parquet")
    chance = fedattune.predict(model, new).probabilities[:, 0]
    assert np.abs(chance - chance[0]).max() < 0.12
    assert chance[4] == chance[0]


def test_client_scaling_takes_the_deviation_within_clients_where_a_client_has_too_few_values(tmp_path: Path) -> None:
    content = three_sites()
    data = load(tmp_path, content, "client")
    beds = np.array(content["beds"])
    own = [beds[client.train] for client in data.clients]
    within = np.sqrt(sum(len(one) * one.var() for one in own) / sum(map(len, own)))
    opened = np.array(content["opened"])[training_rows(data)]
    np.testing.assert_allclose(data.preparation["A"][2], [own_deviation(data, content, "A"), within, opened.std(), NAN])
    assert data.preparation["B"][2, 1] == pytest.approx(own[1].std())
    assert (
        "3 of 3 clients (A, B, C) have too few different values in 'beds', 'opened' and take the deviation of all "
        "clients there."
    ) in data.notes
    assert not (data.x[:, 2:] != 0).any()  # what is constant at a client says nothing there


def own_deviation(data: Federation, content: Columns, name: str) -> float:
    client = data.clients[list(data.names).index(name)]
    return float(np.array(content["age"])[client.train].std())


def test_four_odd_rows_give_no_scale_and_five_do() -> None:
    x = np.zeros((200, 2))
    x[:100] = np.random.default_rng(0).normal(0, 50, (100, 2))
    x[100:104, 0], x[100:105, 1] = 1, 1
    constants, borrowed = fit_all_constants(x, [np.arange(100), np.arange(100, 200)], "client")
    assert borrowed.tolist() == [[False, False], [True, False]]
    assert constants[1][2, 0] > 30
    assert constants[1][2, 1] == pytest.approx(np.sqrt(0.05 * 0.95))


def test_a_single_client_has_nobody_to_take_a_deviation_from() -> None:
    x = np.array([[1.0, 7, NAN], [2, 7, NAN], [4, 7, NAN]])
    constants, borrowed = fit_all_constants(x, [np.arange(3)], "client")
    assert not borrowed.any()
    assert constants[0][2, 0] == pytest.approx(x[:, 0].std())
    assert np.isnan(constants[0][2, 1:]).all()
    assert standardise(np.array([[2.0, 1e6, 5]]), constants[0])[0, 1:].tolist() == [0, 0]


@pytest.mark.parametrize("scaling", ["federated", "client", "global"])
def test_rounding_is_no_deviation(scaling: str) -> None:
    x = np.full((50, 1), 0.1) * np.array([[1e9]])
    constants, _ = fit_all_constants(x, [np.arange(20), np.arange(20, 50)], scaling)  # type: ignore[arg-type]
    assert all(np.isnan(one[2, 0]) for one in constants)


def test_a_card_says_nothing_of_columns_without_a_deviation() -> None:
    constants = np.array([[1.0, 5, NAN], [2, 5, NAN], [3, NAN, NAN]])
    card = json.loads(json.dumps(constants_to_card(constants, ["a", "b", "c"])))
    assert card == {"a": {"median": 1, "mean": 2, "deviation": 3}, "b": None, "c": None}
    read = constants_from_card(card, ["a", "b", "c"])
    x = np.array([[8.0, 9, 9], [NAN, NAN, NAN]])
    assert np.array_equal(standardise(x, read), standardise(x, constants))


def test_baselines_of_pooled_rows_see_pooled_scaling(tmp_path: Path) -> None:
    content = three_sites()
    pooled, by_client = load(tmp_path, content), load(tmp_path, content, "client")
    again = by_client.rescale()
    np.testing.assert_allclose(again.x, pooled.x, atol=1e-5)
    for name in pooled.names:
        np.testing.assert_allclose(again.preparation[name], pooled.preparation[name], rtol=1e-5)
    assert again.digest == by_client.digest  # the same clients with the same rows
    assert pooled.rescale() is pooled
    digits = load_federation("digits", partition="iid", clients=2)
    assert digits.rescale() is digits


def test_newcomers_take_the_constants_of_a_run(tmp_path: Path) -> None:
    content = three_sites()
    data = load(tmp_path, content)
    parts: Callable[[int], Columns] = lambda start: {name: one[start:] for name, one in content.items()}  # noqa: E731
    new = load(tmp_path, parts(40))
    assert not np.allclose(new.x, data.x[40:], atol=0.01)
    np.testing.assert_allclose(new.rescale(data.preparation["A"]).x, data.x[40:], atol=1e-5)
    with pytest.raises(DataError, match="constants of 3 columns for a table with 4 columns"):
        new.rescale(data.preparation["A"][:, :3])


def test_a_missing_number_keeps_its_place(tmp_path: Path) -> None:
    """Scaled by client, a gap is the client's median, and stays so in pooled rows."""
    content = three_sites()
    content["age"][3] = None
    by_client = load(tmp_path, content, "client")
    age = np.array([NAN if one is None else one for one in content["age"]])
    median = np.nanmedian(age[by_client.clients[0].train])
    pooled = by_client.rescale()
    _, mean, deviation = pooled.preparation["A"][:, 0]
    assert float(pooled.x[3, 0]) == pytest.approx((median - mean) / deviation, rel=1e-4)


def test_a_typing_error_hides_no_difference_between_the_other_rows() -> None:
    random = np.random.default_rng(0)
    x = random.normal(50, 10, size=(300, 2))
    clean = fit_all_constants(x, [np.arange(150), np.arange(150, 300)], "federated")[0][0]
    x[7, 0] = 50_000.0
    trimmed = fit_all_constants(x, [np.arange(150), np.arange(150, 300)], "federated")[0][0]
    assert trimmed[2, 0] == pytest.approx(clean[2, 0], rel=0.2)
    np.testing.assert_array_equal(trimmed[:, 1], clean[:, 1])
    rows = [np.arange(150), np.arange(150, 300)]
    features = encode_features(x, 2, rows, rows, "federated")[0]
    assert np.abs(features).max() == MAX_DEVIATIONS


def test_a_rare_flag_is_no_typing_error() -> None:
    x = np.zeros((1000, 1))
    x[:50] = 1.0
    constants = fit_all_constants(x, [np.arange(1000)], "federated")[0][0]
    assert constants[2, 0] == pytest.approx(x.std())
