"""Predict new rows with a client's file: equal to the run's own predictions, or refused."""

import csv
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedattune
from data.image_files import pictures, write
from fedattune import ConfigError, DataError, Federation, Result, RunError
from fedattune.cli import main

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals.csv"
RUN: dict[str, Any] = {"rounds": 2, "steps": 2, "lr": 0.1}
Cells = dict[str, Any]


def write_rows(file: Path, rows: Iterable[Cells]) -> Path:
    rows = list(rows)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def read_rows(file: Path) -> list[Cells]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def hospitals() -> Federation:
    return fedattune.load_federation(HOSPITALS, client_column="hospital", target="outcome")


@pytest.fixture(scope="module")
def run(hospitals: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "fedmcsa"
    fedattune.fit(hospitals, "fedmcsa", "dnn", model_options={"hidden": 6}, out=out, **RUN)
    return out


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    """The model of the client H03."""
    out = run.parent / "h03.safetensors"
    Result.load(run).export("H03", out)
    return out


def expected(result: Result, data: Federation, client: str, rows: Any) -> np.ndarray[Any, Any]:
    """Probabilities by the run's model of samples as the run has them."""
    model = result.model(client)
    with torch.no_grad():
        logits = model(data.features(torch.as_tensor(rows), next(model.parameters()).dtype))
    return logits.softmax(1).numpy()


@pytest.mark.parametrize("suffix", ["safetensors", "onnx"])
def test_the_runs_own_rows(suffix: str, run: Path, hospitals: Federation, tmp_path: Path) -> None:
    """A client's test rows, taken from the table: the same probabilities and the same accuracy."""
    result, everyone = Result.load(run), read_rows(HOSPITALS)
    for number in (2, 7) if suffix == "safetensors" else (2,):
        name, test = hospitals.names[number], hospitals.clients[number].test
        model = tmp_path / f"{name}.{suffix}"
        result.export(name, model, "onnx" if suffix == "onnx" else "safetensors")
        found = fedattune.predict(model, write_rows(tmp_path / "new.csv", [everyone[i] for i in test]))
        wanted = expected(result, hospitals, name, test)
        room = 1e-6 if suffix == "onnx" else 0
        np.testing.assert_allclose(found.probabilities, wanted, atol=room, rtol=0)
        assert found.accuracy == getattr(result.clients[number], result.evaluation_point)
        assert (found.n_known, found.classes) == (len(test), hospitals.classes)
        assert found.labels == [hospitals.classes[k] for k in wanted.argmax(1)]


def fedattune_card(file: Path) -> str:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return str(opened.metadata()["fedattune"])


SMALL = ("a", "b")


def small(folder: Path, **more: Any) -> tuple[Result, Federation, Path]:
    """Two clients, of which b never measured `lab`; the model of b."""
    rows = []
    for client in SMALL:
        for k in range(12):
            size = 10 * k if client == "a" else k
            lab = "" if client == "b" or k % 4 == 0 else k
            sort = "k1" if k % 3 else "k2"
            rows.append(
                {
                    "who": client,
                    "size": size,
                    "age": 20 + k * k,
                    "lab": lab,
                    "kind": sort,
                    "sick": "yes" if k % 2 else "no",
                }
            )
    path = write_rows(folder / "small.csv", rows)
    data = fedattune.load_federation(path, client_column="who", target="sick", **more)
    result = fedattune.fit(data, "local", **RUN)
    result.export("b", folder / "b.safetensors")
    return result, data, folder / "b.safetensors"


def test_new_rows_by_hand(tmp_path: Path) -> None:
    """Numbers are standardised as those of training, a gap is the median, a column without values counts nothing."""
    result, data, model = small(tmp_path, scaling="client")
    new = [
        {"kind": "k2", "age": "", "size": 3.5, "lab": 7, "extra": "x"},
        {"kind": "k1", "age": 60, "size": 0, "lab": "", "extra": ""},
    ]
    found = fedattune.predict(model, write_rows(tmp_path / "new.csv", new))
    size = (data.clients[1].train % 12).tolist()  # the rows of b come after the twelve of a
    ages = [20 + k * k for k in size]

    def z(x: float, values: list[int]) -> float:
        return (x - statistics.fmean(values)) / statistics.pstdev(values)

    by_hand = [[z(3.5, size), z(statistics.median(ages), ages), 0, 0, 0, 1], [z(0, size), z(60, ages), 0, 1, 1, 0]]
    with torch.no_grad():
        wanted = result.model("b")(torch.tensor(by_hand, dtype=torch.float32)).softmax(1).numpy()
    np.testing.assert_allclose(found.probabilities, wanted, atol=1e-6)
    assert (found.accuracy, found.target) == (None, None)
    assert found.notes == (
        "the model belongs to client 'b': local, seed 0",
        "not used: the column 'extra'",
        f"column 'age' lacks 1 of 2 values; they become {statistics.median(ages):g}, the middle of the training rows, "
        "though none was missing in training",
        "column 'lab' held no value or a single one in training, and is not looked at",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "3.5 cm"}, "text with '3.5 cm' in data row 1, which has the unit 'cm', while none is expected"),
        ({"size": "1e40"}, r"column 'size' holds 1e\+40 in data row 1"),
        ({"size": None, "sizee": 1}, "no column 'size', which the model needs; did you mean 'sizee'"),
        ({"size": None, "kind": None}, r"no column 'size' \(nor 'kind'\), which the model needs"),
    ],
)
def test_rows_that_the_model_does_not_know(change: Cells, message: str, tmp_path: Path) -> None:
    _, _, model = small(tmp_path)
    row = {"kind": "k2", "age": 3, "size": 3.5, "lab": 7} | change
    row = {key: value for key, value in row.items() if value is not None}
    with pytest.raises(DataError, match=message):
        fedattune.predict(model, write_rows(tmp_path / "new.csv", [row]))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_table_of_another_encoding(encoding: str, file: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_bytes(HOSPITALS.read_text("utf-8").replace("H01", "Zürich").encode(encoding))
    found, same = fedattune.predict(file, table), fedattune.predict(file, HOSPITALS)
    np.testing.assert_array_equal(found.probabilities, same.probabilities)
    assert any(note.startswith("the file is not UTF-8 and is read as") for note in found.notes)
    data = fedattune.load_federation(table, client_column="hospital", target="outcome")
    assert "Zürich" in data.names


@pytest.mark.parametrize("scaling", ["federated", "client"])
def test_numbers_far_from_training_are_named(scaling: str, tmp_path: Path) -> None:
    _, data, model = small(tmp_path, scaling=scaling)
    _, mean, deviation = data.preparation["b"][:, 0]
    row: Cells = {"kind": "k2", "age": 30, "size": mean, "lab": 7}
    beside = {"size": f"{mean + 7.5 * deviation:.3f}"}
    assert not any(
        "far" in one for one in fedattune.predict(model, write_rows(tmp_path / "n.csv", [row, row | beside])).notes
    )
    value = float(f"{mean - 9 * deviation:.3f}")
    rows = [row, row | {"size": value}, row | {"size": mean - 8.5 * deviation}]
    notes = fedattune.predict(model, write_rows(tmp_path / "new.csv", rows)).notes
    (said,) = [one for one in notes if "far from training" in one]
    assert said.startswith(f"column 'size' is far from training in 2 of 3 rows, such as {value:.6g} in data row 2, ")
    assert f"most training rows have {mean - 2 * deviation:.6g} to {mean + 2 * deviation:.6g}" in said


def test_dates_far_from_training_are_named_as_dates(tmp_path: Path) -> None:
    rows = [
        {"who": "ab"[k % 2], "day": f"2024-03-{1 + k % 28:02d}", "sick": "yes" if k % 3 else "no"} for k in range(56)
    ]
    data = fedattune.load_federation(write_rows(tmp_path / "t.csv", rows), client_column="who", target="sick")
    fedattune.fit(data, "local", **RUN).export("a", tmp_path / "a.safetensors")
    new = write_rows(tmp_path / "new.csv", [{"day": "2024-03-09"}, {"day": "1924-03-09"}])
    (said,) = [one for one in fedattune.predict(tmp_path / "a.safetensors", new).notes if "far from" in one]
    assert "such as 1924-03-" in said
    assert "most training rows have 2024-02-" in said


def test_digits_from_columns_of_numbers(tmp_path: Path) -> None:
    """Data without names of columns: as many numbers as a sample has values, in their order."""
    data = fedattune.load_federation("digits", clients=3, partition="iid")
    result = fedattune.fit(data, "fedavg", **RUN)
    result.export("1", tmp_path / "m.safetensors")
    rows = torch.arange(40)
    pixels = data.x[rows].reshape(40, -1).tolist()
    table = [
        {f"p{k}": value for k, value in enumerate(one)} | {"label": int(y), "who": "x"}
        for one, y in zip(pixels, data.y[rows], strict=True)
    ]
    found = fedattune.predict(tmp_path / "m.safetensors", write_rows(tmp_path / "new.csv", table))
    assert np.array_equal(found.probabilities, expected(result, data, "1", rows))
    assert found.target is not None
    assert np.array_equal(found.target, data.y[rows].numpy())
    assert found.notes == (
        "the model belongs to client '1': fedavg, seed 0",
        "not used: the column 'who'",
        "the columns 'p0' to 'p63' are taken as they stand, as samples of shape (1, 8, 8)",
    )
    for change, message in (
        ({"p64": 1}, r"65 columns of numbers beside 'label', and the model needs 64.*Parquet file"),
        ({"p7": ""}, "column 'p7' holds no finite number in data row 1"),
    ):
        write_rows(tmp_path / "new.csv", [table[0] | change, table[1] | dict.fromkeys(change, 2)])
        with pytest.raises(DataError, match=message):
            fedattune.predict(tmp_path / "m.safetensors", tmp_path / "new.csv")


def test_images(tmp_path: Path) -> None:
    """Encoded images in Parquet, as the hub has them: prepared as those of training."""
    names = [str(k) for k in range(10)]
    x, y = pictures(60, (28, 28)), np.arange(60) % 3
    for part, some in (("train", slice(0, 40)), ("test", slice(40, 60))):
        write(tmp_path / "mnist" / f"{part}-0.parquet", x[some], {"label": y[some]}, features={"label": names})
    data = fedattune.load_federation("mnist", data_dir=tmp_path, partition="iid", clients=2, test=0.4)
    result = fedattune.fit(data, "fedavg", **RUN)
    result.export("0", tmp_path / "m.onnx", "onnx")
    result.export("0", tmp_path / "m.safetensors")
    at = [next(i for i, one in enumerate(data.x.numpy()) if np.array_equal(one[0], image)) for image in x[40:]]
    wanted = expected(result, data, "0", at)
    new = tmp_path / "mnist" / "test-0.parquet"
    found = fedattune.predict(tmp_path / "m.safetensors", new)
    assert np.array_equal(found.probabilities, wanted)
    assert found.accuracy == (wanted.argmax(1) == y[40:]).mean()
    np.testing.assert_allclose(fedattune.predict(tmp_path / "m.onnx", new).probabilities, wanted, atol=1e-6)
    bare = write(tmp_path / "bare.parquet", x[:2], {"target": ["2", "ape"]})
    assert fedattune.predict(tmp_path / "m.safetensors", bare).target.tolist() == [2, -1]  # type: ignore[union-attr]
    large = write(tmp_path / "large.parquet", pictures(1, (32, 32)), {})
    with pytest.raises(DataError, match=r"an image of shape \(1, 32, 32\) in data row 1, and the model needs"):
        fedattune.predict(tmp_path / "m.safetensors", large)


def own(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(math.prod(input_shape), n_classes))


def test_code_is_not_run_because_a_file_names_it(ragged: Federation, tmp_path: Path) -> None:
    result = fedattune.fit(ragged, "fedavg", "test_predict:own", **RUN)
    model, table = tmp_path / "m.safetensors", tmp_path / "new.csv"
    result.export("0", model)
    write_rows(table, [{f"x{k}": k for k in range(5)}])
    for factory in (None, "test_predict:other"):
        with pytest.raises(RunError, match=r"'test_predict:own', which is code of somebody's own.*--factory test"):
            fedattune.predict(model, table, factory=factory)
    named = fedattune.predict(model, table, factory="test_predict:own").probabilities
    given = fedattune.predict(model, table, own((5,), 3)).probabilities
    assert np.array_equal(named, given)


def changed(file: Path, folder: Path, **change: Any) -> Path:
    """The model's file with another card; None takes an entry away."""
    card = json.loads(fedattune_card(file)) | change
    card = {key: value for key, value in card.items() if value is not None}
    out = folder / "changed.safetensors"
    save_file(load_file(file), out, {"fedattune": json.dumps(card)})
    return out


def test_files_that_are_none(file: Path, tmp_path: Path) -> None:
    def refused(model: Path, message: str) -> None:
        with pytest.raises(RunError, match=message):
            fedattune.predict(model, HOSPITALS)

    (tmp_path / "m.pt2").write_bytes(file.read_bytes())
    refused(tmp_path / "m.pt2", "unpickles parts of a .pt2 file, and a pickle can run any code")
    refused(tmp_path / "m.pkl", "is no model; expected a file of fedattune export, .safetensors or .onnx")
    refused(tmp_path / "m.onnx", "no such model file")
    for name in ("m.onnx", "m.safetensors"):
        (tmp_path / name).write_bytes(b"nothing")
        refused(tmp_path / name, "cannot (be )?read")
    save_file({"w": torch.zeros(1)}, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", "no model that FedAttune saved")
    save_file({"w": torch.zeros(1)}, tmp_path / "m.safetensors", {"fedattune": "{"})
    refused(tmp_path / "m.safetensors", "lacks the description of its model")
    # An input shape of text is how a card would name what a factory of its choice is to run.
    refused(
        changed(file, tmp_path, model="subprocess:call", input_shape=["touch", "x"]),
        "lacks the description of its model",
    )
    refused(changed(file, tmp_path, schema=None), "does not say how inputs are prepared")
    refused(changed(file, tmp_path, preparation=None), "does not say how inputs are prepared")
    refused(changed(file, tmp_path, preparation={"age": None}), "constants of column 'pulse' are missing")
    refused(changed(file, tmp_path, schema={"classes": []}), "broken description of its inputs")
    refused(changed(file, tmp_path, classes=["recovered", "complication"]), "not of this model's inputs and classes")
    with pytest.raises(ConfigError, match="fedavg has no option 'foo'"):
        fedattune.predict(changed(file, tmp_path, algorithm="fedavg", options={"foo": 1}), HOSPITALS)
    with pytest.raises(RunError, match="a Net of your own; give one as `module`"):
        fedattune.predict(changed(file, tmp_path, model="Net"), HOSPITALS)


# The command.


def command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["predict", *map(str, argv)])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command(
    file: Path, run: Path, hospitals: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = np.sort(hospitals.clients[2].all)[:3].tolist()
    rows = read_rows(HOSPITALS)
    new = write_rows(tmp_path / "new.csv", [rows[i] for i in mine])
    code, out, err = command(capsys, file, "--data", new)
    assert code == 0
    wanted = expected(Result.load(run), hospitals, "H03", mine)
    lines = list(csv.reader(out.splitlines()))
    assert lines[0] == ["row", "prediction", "p(complication)", "p(recovered)"]
    assert [line[0] for line in lines[1:]] == ["1", "2", "3"]
    assert np.array_equal(np.array([line[2:] for line in lines[1:]], dtype=np.float32), wanted)
    assert [line[1] for line in lines[1:]] == [hospitals.classes[k] for k in wanted.argmax(1)]
    right = int((wanted.argmax(1) == hospitals.y[mine].numpy()).sum())
    assert f"fedattune: accuracy: {100 * right / 3:.2f}% ({right} of 3 rows)" in err
    assert "fedattune: not used: the column 'hospital'" in err
    code, nothing, _ = command(capsys, file, "--data", new, "-o", tmp_path / "p.csv")
    assert (code, nothing, (tmp_path / "p.csv").read_text()) == (0, "", out)
    assert command(capsys, file, "--data", new, "-o", tmp_path / "p.parquet")[0] == 0
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "p.parquet")
    assert table.column_names == lines[0]
    assert np.array_equal(table["p(recovered)"].to_numpy(), wanted[:, 1])
    assert table["prediction"].to_pylist() == [line[1] for line in lines[1:]]


def test_bad_input_of_the_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, *argv: object) -> None:
        code, out, err = command(capsys, *argv)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1

    new = write_rows(tmp_path / "new.csv", read_rows(HOSPITALS)[:3])
    refused("--data is missing: give a table", file)
    refused("no such table file", file, "--data", tmp_path / "no.csv")
    refused("expected a table that ends in", file, "--data", file)
    refused("written as .csv or .parquet", file, "--data", new, "-o", tmp_path / "p.json")
    refused("this is the data, which would be overwritten", file, "--data", new, "-o", new)
    refused("no such model file", tmp_path / "no.safetensors", "--data", new)
    refused("unknown option --dta", file, "--dta", new)
