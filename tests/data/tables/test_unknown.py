"""Categories of new rows that a model did not meet in training."""

from pathlib import Path

import numpy as np
import pytest

from data.nodes import csv
from fedattune.data import Schema
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
