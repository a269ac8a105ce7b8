"""Tables: what is read, what is refused, and that features are fitted per client."""

import datetime as dt
import decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from data.table_files import N, columns, parquet
from fedattune import ConfigError, DataError, load_federation
from fedattune.data import load_table, partition_dataset


def made(path, **more):
    return load_table(path, client_column="site", target="ill", **more)


def test_csv_equals_parquet_and_keeps_client_names(tmp_path):
    content = columns() | {"site": ["007"] * 20 + ["08"] * 20}
    from pyarrow import csv

    csv.write_csv(pa.table(content), tmp_path / "t.csv")
    fed = partition_dataset(made(tmp_path / "t.csv"))
    assert fed.names == ("007", "08")
    for same in (
        partition_dataset(made(parquet(tmp_path, content))),
        load_federation(tmp_path / "t.csv", client_column="site", target="ill"),
    ):
        assert torch.equal(same.x, fed.x)
        assert same.manifest() == fed.manifest()


def test_scaling_uses_only_the_clients_own_training_part(tmp_path):
    first = partition_dataset(made(parquet(tmp_path, columns())), scaling="client")
    north = first.clients[0]
    changed = columns()
    for row in range(20, 40):
        changed["age"][row] *= 100
    changed["age"][int(north.test[0])] = 1e6
    second = partition_dataset(made(parquet(tmp_path, changed)), scaling="client")
    assert np.array_equal(second.clients[0].train, north.train)
    untouched = torch.tensor(np.concatenate([north.train, north.validation, north.test[1:]]))
    assert torch.equal(first.features(untouched), second.features(untouched))


def test_missing_values(tmp_path):
    content = columns()
    content["age"][3] = None
    content["ward"][5] = None
    content["visits"] = [None] * 20 + content["visits"][20:]
    content["nothing"] = pa.nulls(N)
    data = made(parquet(tmp_path, content))
    fed = partition_dataset(data)
    assert fed.x.shape == (N, 3 + 2 + 4)
    said = " ".join(data.notes)
    assert "marks them: 'age' (1), 'visits' (20)." in said
    assert "Missing texts are a category of their own: 'ward' (1)." in said
    assert "'nothing' holds no value and is left out" in said
    assert torch.isfinite(fed.x).all()
    assert (fed.x[:20, 1] == 0).all()
    flags = fed.x[:, 3:5]
    assert flags[:, 0].nonzero().flatten().tolist() == [3]
    assert flags[:, 1].nonzero().flatten().tolist() == list(range(20))
    age = np.array([np.nan if v is None else v for v in content["age"]])
    assert float(fed.x[3, 0]) == 0  # the mean of all training rows
    by_client = partition_dataset(data, scaling="client")
    mine = age[by_client.clients[0].train]
    median = np.nanmedian(mine)
    filled = np.where(np.isnan(mine), median, mine)
    assert float(by_client.x[3, 0]) == pytest.approx((median - filled.mean()) / filled.std(), rel=1e-5)
    assert (by_client.x[:20, 1] == 0).all()


def test_table_without_numbers_other_types_and_pandas_index(tmp_path):
    content = columns()
    text = partition_dataset(made(parquet(tmp_path, content), features=["ward"]))
    assert text.x.shape == (N, 3)
    content["ward"] = pa.array(content["ward"]).dictionary_encode()
    content["price"] = [decimal.Decimal(f"{i}.25") for i in range(N)]
    content["smoker"] = [None, *content["smoker"][1:]]
    content["__index_level_0__"] = list(range(N))
    fed = partition_dataset(made(parquet(tmp_path, content)))
    assert fed.x.shape == (N, 4 + 1 + 3)
    assert torch.isfinite(fed.x).all()


def test_label_partition_of_a_table(tmp_path):
    data = made(parquet(tmp_path, columns()))
    fed = partition_dataset(data, partition="iid", clients=4)
    assert fed.n_clients == 4
    with pytest.raises(DataError, match="share rows"):
        partition_dataset(data, partition="two_class", options={"protocol": "B"}, clients=2)


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        ([True, False] * 20, ("False", "True")),
        ([10, 9] * 20, ("9", "10")),
        ([1.0, 2.0] * 20, ("1", "2")),
        ([f"c{i % 30}" for i in range(N)], tuple(sorted(f"c{i}" for i in range(30)))),
    ],
)
def test_targets(tmp_path, target, classes):
    assert made(parquet(tmp_path, columns() | {"ill": target})).classes == classes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ill": ["yes"] * N}, "single class yes"),
        ({"ill": [1.5] * N}, "single value 1.5"),
        ({"ill": [dt.date(2020, 1, 1)] * N}, "target column 'ill' has the type date32"),
        ({"site": pa.nulls(N)}, "column 'site' holds no value"),
        ({"age": [1.0] * 4 + [float("inf")] + [1.0] * 35}, "'age' holds inf in data row 5"),
        ({"age": [1e31] + [1.0] * 39}, "at most 1e\\+30"),
        ({"ill": [f"{i},5" for i in range(39)] + ["x"]}, "'x' in data row 40, which is no number"),
        ({"ill": [f"p{i}" for i in range(N)]}, "40 different texts in 40 rows, 40 of them only once"),
        (
            {"bp": [str(i) for i in range(6)] + ["high"] + [None] * 30 + ["7", "8", "9"]},
            r"t.parquet: column 'bp' is text with 'high' in data row 7, but 9 of its 10 values are numbers; "
            r"correct that cell or leave it empty, or leave it out .*--set 'features=\[age,visits,smoker,ward\]'",
        ),
        ({"bp": ["1.5"] * 3 + ["-2,5"] * 37}, "'-2,5' in data row 4, .*not that of '1.5'; write all with one"),
        ({"bp": ["01", "02"] * 20}, "'01' in data row 1, .*put a letter before them"),
        ({"bp": ["1e3"] * 39 + ["12O"]}, "'12O' in data row 40"),
    ],
)
def test_refuses_columns(tmp_path, change, message):
    content = columns()
    with pytest.raises(DataError, match=message):
        made(parquet(tmp_path, content | change))


def test_refuses_names_that_do_not_fit(tmp_path):
    path = parquet(tmp_path, columns())
    with pytest.raises(DataError, match="did you mean 'site'"):
        load_table(path, client_column="sites", target="ill")
    with pytest.raises(DataError, match=r"no column 'agee'.*'age'"):
        made(path, features=["agee"])
    with pytest.raises(ConfigError, match="both 'ill'"):
        load_table(path, client_column="ill", target="ill")
    with pytest.raises(ConfigError, match="'ill' is the client column or the target"):
        made(path, features=["ill"])
    with pytest.raises(ConfigError, match="named twice"):
        made(path, features=["age", "age"])
    with pytest.raises(DataError, match="no feature columns"):
        made(path, features=[])
    empty = {k: columns()[k] for k in ("site", "ill")} | {"x": pa.nulls(N)}
    with pytest.raises(DataError, match="no feature column holds"):
        made(parquet(tmp_path, empty))


def test_refuses_files(tmp_path):
    with pytest.raises(DataError, match="no such table file"):
        made(tmp_path / "none.csv")
    path = tmp_path / "t.csv"
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        made(path)
    path.write_text("site,age,ill\n")
    with pytest.raises(DataError, match="holds no rows"):
        made(path)
    path.write_text("site,age,age,ill\na,1,2,3\n")
    with pytest.raises(DataError, match="more than one column called 'age'"):
        made(path)
    path.write_text("site,age,ill\na,1\n")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        made(path)
    (tmp_path / "t.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        made(tmp_path / "t.parquet")


@pytest.mark.parametrize("sign", [";", "\t"])
def test_other_separators(tmp_path: Path, sign: str) -> None:
    """What spreadsheets write where the comma is the decimal sign."""
    rows = [["ward", "age", "ill"], *([f"w{i % 2}", str(20 + i), "yn"[i // 2 % 2]] for i in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(sign.join(row) for row in rows))
    data = load_table(tmp_path / "t.csv", client_column="ward", target="ill")
    assert data.owners == ("w0", "w1")
    assert data.classes == ("n", "y")
