"""What nodes agree on: how it is made, written and read, and tables that are read by it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from fedattune import ConfigError, DataError, load_federation
from fedattune.data import Schema, infer_schema, load_data, load_table, partition_dataset
from fedattune.data.schema import merge_schemas

HEAD = "ward,age,pulse,sex,grade,note,ill"


def row(i: int) -> str:
    pulse, grade = 60 + i if i % 7 else "", i % 3 if i % 5 else "x"
    return f"{'ab'[i % 2]},{30 + i},{pulse},{'mf'[i // 2 % 2]},{grade},n{i // 2 % 4},{'yn'[i % 3 > 0]}"


ROWS = [HEAD, *map(row, range(40))]


def csv(folder: Path, rows: list[str] = ROWS, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([*rows, ""]))
    return path


def made(path: Path, schema: Schema | None = None, **more: Any) -> Any:
    return load_table(path, schema, **{"client_column": "ward", "target": "ill", **more})


WARDS: dict[str, Any] = {
    "classes": ["n", "y"],
    "numbers": ["age", "pulse"],
    "flagged": ["pulse"],
    "categories": {"sex": ["f", "m"], "grade": ["0", "1", "2", "x"], "note": ["n0", "n1", "n2", "n3"]},
    "target": "ill",
}
DIGITS: dict[str, Any] = {"classes": [str(k) for k in range(10)], "input_shape": [1, 8, 8], "scale": [[[0.0625]]]}


def test_of_data_at_hand(tmp_path: Path) -> None:
    data = made(csv(tmp_path))
    schema = infer_schema(data)
    assert schema == Schema.model_validate(WARDS) == infer_schema(partition_dataset(data))
    assert schema.input_shape == (2 + 1 + 2 + 4 + 4,) == partition_dataset(data).input_shape
    assert schema.columns == ("age", "pulse", "sex", "grade", "note")
    assert infer_schema(load_data("digits")) == Schema.model_validate(DIGITS) == infer_schema(load_federation("digits"))


def test_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    path.write_text(
        "classes: [n, y]\nnumbers: [age, pulse]\nflagged: [pulse]\ntarget: ill\n"
        "categories: {sex: [f, m], grade: [0, 1, 2, x], note: [n0, n1, n2, n3]}\n".replace("[n, y]", '["n", "y"]')
    )
    assert Schema.read(path) == Schema.model_validate(WARDS)
    path.write_text(Schema.model_validate(DIGITS).to_json())
    assert Schema.read(path) == Schema.model_validate(DIGITS)
    path.write_text("classes: [no, yes]\ninput_shape: [2]\n")
    with pytest.raises(ConfigError, match=r"schema.yaml: classes: input should be a valid string, got False"):
        Schema.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Schema.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (WARDS, {"classes": ["y"]}, "classes: expected two classes or more, or none"),
        (WARDS, {"classes": ["y", "y"]}, "classes: 'y' is named twice"),
        (WARDS, {"numbers": ["age", "age"]}, "numbers: 'age' is named twice"),
        (WARDS, {"flagged": ["bp"]}, "flagged: 'bp' is none of the numbers"),
        (WARDS, {"categories": {"age": ["a"]}}, "categories: 'age' is one of the numbers, too"),
        (WARDS, {"categories": {"sex": []}}, "categories: 'sex' has no categories"),
        (WARDS, {"categories": {"sex": ["f", "f"]}}, "categories: 'f' is named twice"),
        (WARDS, {"target": "sex"}, "target: it is one of the features, too"),
        (WARDS, {"target": None}, "target: a table has both a target and features"),
        (WARDS, {"input_shape": [3]}, r"input_shape: the columns of the table make \(13,\); leave it out"),
        (WARDS, {"scale": [2.0]}, "scale: each client standardises its own numbers"),
        (WARDS, {"categoris": {}}, "unknown key 'categoris'; did you mean 'categories'"),
        (DIGITS, {"target": "ill"}, "target: a table has both"),
        (DIGITS, {"input_shape": []}, r"input_shape: expected the sizes of one sample, such as \[1, 28, 28\]"),
        (DIGITS, {"input_shape": [1, 0]}, "input_shape: expected the sizes"),
        (DIGITS, {"scale": [[[1.0, 2.0]]]}, r"scale: expected numbers .* fit the input shape \(1, 8, 8\)"),
        (DIGITS, {"scale": [[1.0], [2.0, 3.0]]}, "scale: expected numbers"),
        (DIGITS, {"scale": ["a"]}, "scale: expected numbers"),
        (DIGITS, {"scale": [float("inf")]}, "scale: expected numbers"),
    ],
)
def test_refuses_what_cannot_be(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    import json

    with pytest.raises(ConfigError, match=f"the schema: .*{message}"):
        Schema.from_json(json.dumps(base | change))
    with pytest.raises(ValidationError):
        Schema.model_validate(base | change)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", r"must be an object.*\[1\]")])
def test_refuses_text_that_is_no_schema(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schema.from_json(text)


def test_columns_come_in_the_order_of_the_schema(tmp_path: Path) -> None:
    schema = infer_schema(made(csv(tmp_path)))
    order = [5, 2, 6, 0, 3, 1, 4]
    mixed = [",".join([*(row.split(",")[k] for k in order), "more"]) for row in ROWS]
    plain, other = made(csv(tmp_path), schema), made(csv(tmp_path, mixed, "mixed.csv"), schema)
    assert torch.equal(partition_dataset(plain).x, partition_dataset(other).x)
    assert any("does not have the columns more; they are left out" in note for note in other.notes)
    pq.write_table(pa.csv.read_csv(tmp_path / "mixed.csv"), tmp_path / "t.parquet")
    assert torch.equal(partition_dataset(made(tmp_path / "t.parquet", schema)).x, partition_dataset(plain).x)


def test_text_is_read_as_it_is_written(tmp_path: Path) -> None:
    """Categories that pyarrow takes for numbers or truth values where there are no others."""
    schema = Schema(
        classes=("0", "1"),
        numbers=("age",),
        categories={"code": ("01", "02", "x"), "smoker": ("true", "false", "unknown")},
        target="ill",
    )
    rows = [f"0{1 + i % 2},{'true' if i % 3 else 'false'},{i},{float(i % 2)}" for i in range(20)]
    data = load_table(csv(tmp_path, ["code,smoker,age,ill", *rows]), schema, client_column=None, target="ill")
    assert data.owner is None
    assert data.x[:3, 1:].tolist() == [[1, 0, 0, 0, 1, 0], [0, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0]]
    assert data.y.tolist() == [0, 1] * 10


def test_whole_columns_without_values(tmp_path: Path) -> None:
    categories = WARDS["categories"] | {"sex": ["f", "m", "missing"]}
    schema = Schema.model_validate(WARDS | {"categories": categories})
    bare = [ROWS[0], *(",".join([*(c := row.split(","))[:2], "", "", *c[4:]]) for row in ROWS[1:])]
    data = made(csv(tmp_path, bare), schema)
    assert data.x[:, 2].all()
    assert data.x[:, 5].all()
    assert any("Missing texts are a category of their own: 'sex' (40)" in note for note in data.notes)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,30,60,m,0,n0,q", "target column 'ill' holds 'q' in data row 41, which is no class of the schema; .*n, y"),
        (
            "a,30,60,d,0,n0,y",
            r"t.csv: column 'sex' holds 'd' in data row 41, which is no category of the .*\(?known: f, m",
        ),
        ("a,30,60,,0,n0,y", "column 'sex' holds no value in data row 41, which is no category .*schema with it"),
        ("a,,60,m,0,n0,y", "'age' lacks 1 of 41 values, the first in data row 41, but the schema does not flag it"),
        ("a,old,60,m,0,n0,y", "'age' is text with 'old' in data row 41, but the schema says .*correct that cell"),
        ("a,1e31,60,m,0,n0,y", "'age' holds 1e.31 in data row 41"),
    ],
)
def test_refuses_rows_that_do_not_fit(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(csv(tmp_path, [*ROWS, row]), Schema.model_validate(WARDS))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1,5"] * 39 + ["old"], "'old' in data row 40, but the schema says that it holds numbers; correct that cell"),
        (["1 kg"] * 40, "'1 kg' in data row 1, which has the unit 'kg', while none is expected"),
        ([b"1"] * 40, "has the type binary, but the schema says that it holds numbers"),
    ],
)
def test_refuses_columns_of_other_types(tmp_path: Path, values: list[Any], message: str) -> None:
    content = pa.csv.read_csv(csv(tmp_path)).to_pydict()
    pq.write_table(pa.table(content | {"age": values}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=message):
        made(tmp_path / "t.parquet", Schema.model_validate(WARDS))
    pq.write_table(pa.table(content | {"sex": [b"m"] * 40}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="'sex' has the type binary, but the schema says that it holds text"):
        made(tmp_path / "t.parquet", Schema.model_validate(WARDS))


def test_refuses_tables_and_options_that_do_not_fit(tmp_path: Path) -> None:
    schema, path = Schema.model_validate(WARDS), csv(tmp_path)
    with pytest.raises(DataError, match=r"t.csv has no column 'sex', which the schema asks for; .*add it, or rename"):
        made(csv(tmp_path, [ROWS[0].replace("sex", "gender"), *ROWS[1:]], "t.csv"), schema)
    path = csv(tmp_path)
    with pytest.raises(ConfigError, match="target is 'age', but the schema says 'ill'"):
        made(path, schema, target="age")
    with pytest.raises(ConfigError, match="the schema names the features already"):
        made(path, schema, features=["age"])
    with pytest.raises(ConfigError, match="column 'age' is the client column"):
        made(path, schema, client_column="age")
    with pytest.raises(ConfigError, match="the schema names no columns"):
        made(path, Schema.model_validate(DIGITS))


def test_union_of_tables(tmp_path: Path) -> None:
    whole = infer_schema(made(csv(tmp_path)))
    halves = [made(csv(tmp_path, [ROWS[0], *ROWS[1 + k :: 2]], f"{k}.csv")).schema for k in (0, 1)]
    narrow = halves[1].model_dump(exclude={"input_shape"})
    narrow["categories"]["grade"] = ("0", "x")
    assert merge_schemas([halves[0], Schema.model_validate(narrow)]) == whole
    few = Schema(classes=("9", "10"), numbers=("age",), target="ill")
    more = Schema(classes=("10", "11"), numbers=("bp",), categories={"sex": ("f",)}, target="ill")
    both = merge_schemas([few, more])
    assert both.classes == ("9", "10", "11")
    assert both.numbers == both.flagged == ("age", "bp")
    assert both.categories == {"sex": ("f", "missing")}
    with pytest.raises(DataError, match="'sex' holds numbers in one table and text in another"):
        merge_schemas([more, Schema(classes=("1", "2"), numbers=("sex",), target="ill")])
    with pytest.raises(DataError, match="one target, got dead, ill"):
        merge_schemas([few, few.model_copy(update={"target": "dead"})])
