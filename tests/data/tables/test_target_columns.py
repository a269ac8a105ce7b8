"""Several target columns of a table: labels or numbers, through training, export and predictions."""

import csv
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedattune
from data.table_files import columns, parquet
from fedattune import DataError
from fedattune.cli import main
from fedattune.data import Schema, infer_schema
from fedattune.data.tables import load_table
from fedattune.data.tables.by_schema import find_table_problems

EXAMPLE = Path(__file__).parents[3] / "examples" / "symptoms.csv"
CONDITIONS = ["infection", "anaemia", "diabetes", "asthma"]


def _several(folder: Path, **more: list[Any]) -> Path:
    table = columns()
    n = len(table["site"])
    table["cough"] = [int(i % 3 == 0) for i in range(n)]
    table["weight"] = [60.5 + i for i in range(n)]
    table["height"] = [1.5 + 0.01 * i for i in range(n)]
    return parquet(folder, {**table, **more})


def test_the_example_is_what_its_script_writes(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLE.with_name("make_symptoms.py")))["write"](tmp_path / "made.csv")
    assert (tmp_path / "made.csv").read_bytes() == EXAMPLE.read_bytes()


def test_columns_of_two_values_are_labels(tmp_path: Path) -> None:
    data = load_table(_several(tmp_path), client_column="site", target="ill, cough,smoker")
    assert (data.kind, data.labels, data.classes) == ("labels", ("ill", "cough", "smoker"), ())
    assert data.y[:3].tolist() == [[False, True, False], [True, False, True], [False, False, True]]
    assert data.schema is not None
    assert (data.schema.target, data.schema.target_columns) == ("ill,cough,smoker", data.labels)
    assert not {"ill", "cough", "smoker"} & set(data.schema.columns)
    assert Schema.from_json(data.schema.to_json()) == data.schema


def test_columns_of_numbers_are_learnt_together(tmp_path: Path) -> None:
    data = fedattune.load_federation(
        _several(tmp_path), client_column="site", target=["weight", "height"], small_clients="error"
    )
    assert (data.kind, data.outputs) == ("numbers", ("weight", "height"))
    assert data.target_scale is not None
    restored = data.target_scale.restore(data.y.double().numpy())
    np.testing.assert_allclose(restored[:2], [[60.5, 1.5], [61.5, 1.51]], rtol=1e-5)
    assert infer_schema(data).target_deviation == data.target_scale.deviation


def test_a_schema_reads_the_same_labels_and_names_what_is_none(tmp_path: Path) -> None:
    file = _several(tmp_path)
    first = load_table(file, client_column="site", target="ill,cough")
    again = load_table(file, first.schema, client_column="site", target="ill,cough")
    assert (again.y == first.y).all()
    assert again.labels == first.labels
    table = columns()["ill"]
    other = _several(tmp_path, ill=["maybe", *table[1:]])
    assert first.schema is not None
    (problem,) = find_table_problems(other, first.schema, client_column="site", target="ill,cough")
    assert "target column 'ill' holds 'maybe' in data row 1" in problem
    assert "expected 1 or 0, true or false, yes or no" in problem


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("ill,weight", {}, r"'ill' hold two values each and 'weight' hold numbers; give columns of one kind"),
        ("ill,ward", {}, r"'ward' holds values such as 'a', expected 1 or 0"),
        ("cough,weight", {"target_type": "label"}, r"'weight' holds values such as '60.5', expected 1 or 0"),
        ("ill,cough", {"target_type": "class"}, "several columns are labels or numbers; give one for classes"),
        ("ill,nothing", {}, "has no column 'nothing'"),
        ("ill,ill", {}, "target: a column is named twice"),
        ("ill,site", {}, "client_column and target are both 'site'"),
    ],
)
def test_what_is_neither_is_refused(tmp_path: Path, target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, fedattune.ConfigError), match=message):
        load_table(_several(tmp_path), client_column="site", target=target, **options)


def test_zeros_and_ones_may_be_numbers(tmp_path: Path) -> None:
    data = load_table(_several(tmp_path), client_column="site", target="cough,weight", target_type="number")
    assert data.outputs == ("cough", "weight")


def test_a_label_that_never_changes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="label 'cough' is true in all rows; leave it out of the targets"):
        load_table(_several(tmp_path, cough=[1] * 40), client_column="site", target="ill,cough")


def test_a_client_has_the_same_rows_in_a_file_of_its_own(tmp_path: Path) -> None:
    from fedattune.data.client_files import export_clients, read_client

    data = fedattune.load_federation(EXAMPLE, client_column="clinic", target=CONDITIONS)
    (folder,) = export_clients(data, tmp_path, [[1]])
    one = read_client(next(folder.iterdir())).federation
    assert (one.kind, list(one.labels)) == ("labels", CONDITIONS)
    assert one.y.sum(0).tolist() == data.label_counts()[1].tolist()


def test_labels_of_a_table_from_comparison_to_predictions(cli: Callable[..., Any], work: Path) -> None:
    target = ("--client-column", "clinic", "--target", ",".join(CONDITIONS))
    shown = cli("data", "show", "--data", EXAMPLE, *target, "--json", "data.json")
    assert "4 labels" in shown.out
    about = json.loads((work / "data.json").read_text())
    assert about["targets"] == CONDITIONS
    cli(
        "compare", "--data", EXAMPLE, *target, "--algorithms", "fedavg,attune", "--rounds", 2, "--lr", 0.5,
        "--baseline", "majority", "--metric", "micro_f1", "--out", "study",
    )  # fmt: skip
    result = json.loads((work / "study" / "result.json").read_text())
    assert [one["algorithm"] for one in result["runs"]] == ["local", "fedavg", "attune"]
    assert set(result["runs"][0]["recall"]) == set(CONDITIONS)
    assert {one["metric"] for one in result["table"]} == {"micro_f1"}
    assert (work / "study" / "report.html").exists()
    cli("export", "study", "--algorithm", "attune", "--client", "south-1", "--out", "model.safetensors")
    done = cli("predict", "model.safetensors", "--data", EXAMPLE, "--out", "said.csv")
    assert "label accuracy" in done.err
    with (work / "said.csv").open() as file:
        head, first, *_ = csv.reader(file)
    assert head == ["row", *CONDITIONS, *(f"p({name})" for name in CONDITIONS)]
    assert [int(float(p) > 0.5) for p in first[5:]] == [int(one) for one in first[1:5]]


def test_numbers_of_a_table_are_predicted_in_their_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _several(tmp_path)
    data = fedattune.load_federation(file, client_column="site", target="weight,height")
    result = fedattune.fit(data, "local", rounds=3, lr=0.1)
    (model, *_) = result.save_models(tmp_path / "models")
    found = fedattune.predict(model, file)
    assert found.values is not None
    assert found.values.shape == (40, 2)
    assert 50 < found.values[:, 0].mean() < 120
    assert 1 < found.values[:, 1].mean() < 3
    assert found.to_csv().splitlines()[0] == "row,weight,height"
    assert found.metrics["rmse"] < 3  # in deviations
    unknown = _several(tmp_path, weight=[70.5, None] * 20, height=[None, 1.8] * 20)
    assert main(["predict", str(model), "--data", str(unknown)]) == 0
    assert "no row has a known target, so nothing is scored" in capsys.readouterr().err
