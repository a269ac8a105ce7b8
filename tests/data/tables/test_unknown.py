"""Categories of new rows that a model did not meet in training."""

from pathlib import Path

import numpy as np
import pytest

from data.nodes import csv
from fedattune import ConfigError, DataError
from fedattune.data import Schema, load_table
from fedattune.data.schema import make_schema, merge_schemas
from fedattune.data.tables.by_schema import read_schema_features
from fedattune.data.tables.file import read_table


@pytest.mark.parametrize(
    ("categories", "rows", "fate"),
    [
        (("f", "m", "other"), [[0, 1, 0], [0, 0, 1], [0, 0, 1]], "count as 'other', as in training"),
        (("f", "m", "missing"), [[0, 1, 0], [0, 0, 1], [0, 0, 1]], "count as 'missing'"),
        (("f", "m", "missing", "other"), [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], "count as 'other'"),
        (("f", "m"), [[0, 1], [0, 0], [0, 0]], "count as none of the known categories"),
    ],
)
def test_unknown_categories_go_where_training_put_them(
    categories: tuple[str, ...], rows: list[list[int]], fate: str, tmp_path: Path
) -> None:
    table = read_table(csv(tmp_path / "t.csv", ["m,1", "d,1", ",1"], "sex,one"), None, None)
    schema = Schema(classes=("n", "y"), categories={"sex": categories}, target="ill")
    columns = read_schema_features(table, schema, is_prediction=True)
    np.testing.assert_array_equal(columns.matrix(), rows)
    assert any("holds 'd' in 1 of 3 rows" in note and fate in note for note in columns.notes)
    lacks = [note for note in columns.notes if "lacks 1 of 3 values" in note]
    assert len(lacks) == ("missing" not in categories)


def test_a_real_category_other_takes_no_unknown_ones(tmp_path: Path) -> None:
    """Only where training grouped its rare categories; schemas that do not tell are read as before."""
    head, cells = "ward,job,code,ill", [f"D{k:02d}" for k in range(40)]
    lines = [f"{'ab'[i % 2]},{('cook', 'nurse', 'other')[i % 3]},{cells[i % 40]},{'yn'[i % 2]}" for i in range(80)]
    given = {"client_column": "ward", "target": "ill", "max_categories": 20}
    schema = load_table(csv(tmp_path / "t.csv", lines, head), **given).schema
    assert schema.grouped == ("code",)
    assert Schema.from_json(schema.to_json()) == schema
    mistaken = csv(tmp_path / "new.csv", ["a,nruse,D99,y", "b,cook,D01,n"], head)
    with pytest.raises(DataError, match=r"column 'job' holds 'nruse' in data row 1, which is no category"):
        load_table(mistaken, schema, client_column="ward", target="ill")
    columns = read_schema_features(read_table(mistaken, None, None), schema, is_prediction=True)
    assert any("'nruse' in 1 of 2 rows" in one and "none of the known categories" in one for one in columns.notes)
    assert columns.texts["code"][0] == "other"
    fitting = load_table(csv(tmp_path / "fit.csv", lines[:40], head), schema, client_column="ward", target="ill")
    assert fitting.schema.grouped == ("code",)
    assert merge_schemas([schema, schema]).grouped == ("code",)
    old = schema.model_copy(update={"grouped": None})
    columns = read_schema_features(read_table(mistaken, None, None), old)
    assert columns.texts["job"][0] == "other"
    assert merge_schemas([schema, old]).grouped is None
    old.check(schema, "the node")  # they differ in nothing that a node must know


def test_a_schema_groups_only_what_has_the_category() -> None:
    with pytest.raises(ConfigError, match="grouped: 'sex' has no category 'other'"):
        make_schema({"classes": ["n", "y"], "categories": {"sex": ["f"]}, "grouped": ["sex"], "target": "ill"}, "s")


@pytest.mark.parametrize("sign", ["?", " ?", "-", "--", "NA", ""])
def test_signs_are_gaps_for_a_schema_too(sign: str, tmp_path: Path) -> None:
    """The table fits the schema that was made from it, and predictions take the place that training gave a gap."""
    lines = [f"{'ab'[i % 2]},{'mf'[i // 2 % 2] if i % 5 else sign},{'yn'[i % 3 > 0]}" for i in range(40)]
    path = csv(tmp_path / "t.csv", lines, "ward,sex,ill")
    data = load_table(path, client_column="ward", target="ill")
    assert data.schema.categories == {"sex": ("f", "m", "missing")}
    np.testing.assert_array_equal(load_table(path, data.schema, client_column="ward", target="ill").x, data.x)
    grouped = Schema(classes=("n", "y"), categories={"sex": ("f", "missing", "other")}, target="ill")
    columns = read_schema_features(read_table(path, None, "ill"), grouped, is_prediction=True)
    assert columns.texts["sex"][0] == "missing"


def test_a_category_may_look_like_a_gap(tmp_path: Path) -> None:
    schema = Schema(classes=("n", "y"), categories={"sex": ("-", "NA", "m", "missing")}, target="ill")
    table = read_table(csv(tmp_path / "t.csv", ["-,1", "NA,1", "m,1", "?,1", ",1"], "sex,one"), None, None)
    found = read_schema_features(table, schema).texts["sex"]
    assert found.tolist() == ["-", "NA", "m", "missing", "missing"]
