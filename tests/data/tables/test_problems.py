"""All problems of a table with a schema at once."""

from pathlib import Path

import pytest

from data.nodes import csv, rows
from fedattune.data import Schema
from fedattune.data.tables.by_schema import find_table_problems

SCHEMA = Schema(
    classes=("n", "y"), numbers=("age", "more"), flagged=("more",), categories={"sex": ("f", "m")}, target="ill"
)


def test_every_column_is_compared(tmp_path: Path) -> None:
    lines = ["a,,d,,y", ",21,q,1,n", "a,22,f,z,"]
    table = csv(tmp_path / "t.csv", lines, "ward,age,sex,more,ill")
    found = find_table_problems(table, SCHEMA, client_column="ward", target="ill")
    assert [one.partition(": ")[2].partition("'")[2].partition("'")[0] for one in found] == [
        "age", "more", "sex", "ill", "ward",
    ]  # fmt: skip
    assert "lacks 1 of 3 values, the first in data row 1" in found[0]
    assert "text with 'z' in data row 3" in found[1]
    assert found[2].endswith("nor does it have 'q'")
    assert "target column 'ill' lacks 1 of 3 values" in found[3]
    assert "client column 'ward' lacks 1 of 3 values, the first in data row 2" in found[4]


@pytest.mark.parametrize(("classes", "values"), [(("n", "y"), ("", "z", "y")), (("0", "1"), ("", "7", "1"))])
def test_a_missing_target_hides_no_unknown_class(
    classes: tuple[str, ...], values: tuple[str, ...], tmp_path: Path
) -> None:
    schema = Schema(classes=classes, numbers=("age",), target="ill")
    table = csv(tmp_path / "t.csv", [f"1,{value}" for value in values], "age,ill")
    lacking, unknown = find_table_problems(table, schema, client_column=None, target="ill")
    assert "lacks 1 of 3 values, the first in data row 1" in lacking
    assert f"holds {values[1]!r} in data row 2" in unknown


def test_a_table_that_fits_or_cannot_be_read(tmp_path: Path) -> None:
    schema = Schema(classes=("n", "y"), numbers=("age",), categories={"sex": ("f", "m")}, target="ill")
    table = csv(tmp_path / "t.csv", rows(9))
    assert find_table_problems(table, schema, client_column="ward", target="ill") == []
    (problem,) = find_table_problems(tmp_path / "none.csv", schema, client_column=None, target="ill")
    assert "none.csv" in problem
