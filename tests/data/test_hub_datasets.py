"""Data of the library `datasets` of Hugging Face as a federation: images, arrays, and rows of a table."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedattune import ConfigError, DataError, Federation, federation_from, fit

hub = pytest.importorskip("datasets", reason="the library datasets is not installed: pip install datasets")


def make(columns: dict[str, Any], **features: Any) -> Any:
    kinds = {"label": hub.ClassLabel(names=["no", "yes"])} | features
    return hub.Dataset.from_dict(columns, features=hub.Features(kinds))


def pictures(n: int = 24) -> Any:
    """Images of one shade each: the row's number, in grey."""
    images = [Image.new("L", (4, 3), i) for i in range(n)]
    columns = {"image": images, "label": [i % 2 for i in range(n)], "writer": [f"w{i % 3}" for i in range(n)]}
    return make(columns, image=hub.Image(), writer=hub.Value("string"))


def rows_of(data: Federation, name: str) -> Any:
    return data.clients[list(data.names).index(name)].all


def test_a_column_names_the_client_of_each_image() -> None:
    data = federation_from(pictures(), client_column="writer")
    assert list(data.names) == ["w0", "w1", "w2"]
    assert data.classes == ("no", "yes")
    assert data.input_shape == (1, 3, 4)
    for u, name in enumerate(data.names):
        rows = rows_of(data, name)
        numbers = (data.x[rows, 0, 0, 0] * 255).round().long()
        assert sorted(numbers.tolist()) == list(range(u, 24, 3))
        assert torch.equal(data.y[rows], numbers % 2)
    assert len(fit(data, "fedavg", "mlr", rounds=1, steps=1, augment="flip").clients) == 3


def test_one_dataset_per_client_gives_the_same() -> None:
    whole = pictures()
    parts = {f"w{u}": whole.select(range(u, 24, 3)).remove_columns("writer") for u in range(3)}
    one, two = federation_from(parts), federation_from(whole, client_column="writer")
    assert torch.equal(one.x, two.x)
    assert one.digest == two.digest
    unnamed = federation_from(list(parts.values()))
    assert torch.equal(unnamed.x, two.x)
    assert list(unnamed.names) == ["0", "1", "2"]
    assert list(federation_from(list(parts.values()), names=["a", "b", "c"]).names) == ["a", "b", "c"]


def test_clients_are_named_in_each_format_and_every_row_has_one() -> None:
    columns = {"x": [[i / 16, 1.0] for i in range(16)], "label": [0, 1] * 8, "ward": [i // 8 for i in range(16)]}
    plain = make(columns, x=hub.Sequence(hub.Value("float32")), ward=hub.Value("int64"))
    for kind in (hub.Value("int64"), hub.ClassLabel(names=["east", "west"])):
        rows = plain.cast_column("ward", kind)
        names = ["0", "1"] if isinstance(kind, hub.Value) else ["east", "west"]
        assert list(federation_from(rows.with_format("torch"), client_column="ward", target="label").names) == names
        unknown = hub.Dataset.from_dict({**columns, "ward": [None, *columns["ward"][1:]]}, features=rows.features)
        with pytest.raises(DataError, match="client_column: row 0 has no client in 'ward'"):
            federation_from(unknown, client_column="ward", target="label")


def test_lists_and_arrays_are_samples_and_the_target_may_be_a_number() -> None:
    x = np.random.default_rng(0).normal(size=(16, 2, 3)).astype(np.float32)
    columns = {"x": x, "dose": np.arange(16) / 3, "label": [0, 1] * 8, "ward": [0, 1] * 8}
    rows = make(columns, x=hub.Array2D((2, 3), "float32"), dose=hub.Value("float32"), ward=hub.Value("int64"))
    data = federation_from(rows, client_column="ward", target="dose", features=["x"])
    assert (list(data.names), data.classes, data.input_shape) == (["0", "1"], (), (2, 3))
    assert torch.equal(data.x, torch.from_numpy(np.concatenate([x[::2], x[1::2]])))
    scale = data.target_scale
    assert scale is not None
    torch.testing.assert_close(data.y[:8] * scale.deviation + scale.mean, torch.arange(0, 16, 2) / 3)


def test_numbers_names_and_texts_are_a_table() -> None:
    n = 240
    columns = {
        "age": [20 + i / 4 for i in range(n)],
        "sex": ["f", "m"] * (n // 2),
        "note": [f"patient number {i} feels fine today" for i in range(n)],
        "label": [i // 2 % 2 for i in range(n)],
        "ward": [i // 120 for i in range(n)],
    }
    rows = make(
        columns,
        age=hub.Value("float64"),
        sex=hub.Value("string"),
        note=hub.Value("string"),
        ward=hub.ClassLabel(names=["north", "south"]),
    )
    data = federation_from(rows, client_column="ward", name="visits")
    assert (data.name, list(data.names), data.classes) == ("visits", ["north", "south"], ("no", "yes"))
    assert data.schema is not None
    assert data.schema.numbers == ("age",)
    assert data.schema.categories == {"sex": ("f", "m")}
    assert data.schema.texts == {"note": 256}
    youngest = data.x[rows_of(data, "north"), 0].argmin()
    assert data.y[rows_of(data, "north")][youngest] == 0
    without_note = federation_from(rows, client_column="ward", features=["age", "sex"])
    assert without_note.input_shape == (3,)
    with pytest.raises(
        ConfigError, match=r"classes, names and targets: a datasets.Dataset of numbers and texts has them"
    ):
        federation_from(rows, client_column="ward", classes=["no", "yes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "client_column is missing: name the column with each row's client"),
        ({"client_column": "writr"}, "client_column: there is no column 'writr'; did you mean 'writer'"),
        ({"client_column": "writer", "target": "labl"}, "target: there is no column 'labl'; did you mean 'label'"),
        ({"client_column": "writer", "features": ["label"]}, "features: expected some of image, got label"),
        ({"client_column": "writer", "target": "image", "features": ["x"]}, "features: there is no column 'x'"),
    ],
)
def test_columns_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        federation_from(pictures(6), **options)


def test_what_goes_together_and_what_does_not() -> None:
    whole = pictures(12)
    with pytest.raises(ConfigError, match=r"client_column and target goes only with a datasets.Dataset"):
        federation_from([(torch.zeros(8, 2), [0, 1] * 4)] * 2, client_column="a", target="b")
    with pytest.raises(ConfigError, match=r"each datasets.Dataset is a client already"):
        federation_from({"a": whole, "b": whole}, client_column="writer")
    with pytest.raises(DataError, match="client 'b' has columns of other names or types than 'a'"):
        federation_from({"a": whole, "b": whole.remove_columns("writer")})
    with pytest.raises(ConfigError, match="must be the only one, got image, writer"):
        federation_from({"a": whole, "b": whole})
    with pytest.raises(ConfigError, match=re.escape("has parts (train, test), not clients")):
        federation_from(hub.DatasetDict(train=whole, test=whole), client_column="writer")
    with pytest.raises(ConfigError, match="a client is a DatasetDict, expected a"):
        federation_from({"a": hub.DatasetDict(train=whole, test=whole), "b": whole}, target="label")
    with pytest.raises(ConfigError, match="an IterableDataset cannot be divided into parts"):
        federation_from(whole.to_iterable_dataset(), client_column="writer")
    with pytest.raises(ConfigError, match="target is missing: name the column to predict, one of image, writer"):
        federation_from(whole.remove_columns("label"), client_column="writer")
    larger = make(
        {"image": [Image.new("L", (9, 9))], "label": [0], "writer": ["w0"]},
        image=hub.Image(),
        writer=hub.Value("string"),
    )
    with pytest.raises(DataError, match=re.escape("item 0 has (1, 3, 4), item 12 (1, 9, 9); make images of one size")):
        federation_from(hub.concatenate_datasets([whole, larger]), client_column="writer")


@pytest.mark.parametrize("form", ["numpy", "torch", "pandas"])
def test_images_are_the_same_in_each_format(form: str) -> None:
    data = federation_from(pictures().with_format(form), client_column="writer")
    plain = federation_from(pictures(), client_column="writer")
    assert data.input_shape == (1, 3, 4)
    assert torch.equal(data.x, plain.x)


def test_a_transform_of_images_is_kept() -> None:
    def double(rows: dict[str, Any]) -> dict[str, Any]:
        return rows | {"image": [np.asarray(one, dtype=np.float32)[None] * 2 for one in rows["image"]]}

    data = federation_from(pictures().with_transform(double), client_column="writer")
    assert data.x.unique().tolist() == [2.0 * i for i in range(24)]
