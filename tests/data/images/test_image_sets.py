"""Image sets: Parquet files as on the hub, and the real files where they are at hand."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from data.image_files import DIGITS, LETTERS, grey_set, pictures, png, write
from fedattune import DataError, load_federation
from fedattune.data import load_data
from fedattune.data.images.decode import read_images

REAL = os.environ.get("FEDATTUNE_DATA")  # read before the fixture takes it away
MNIST_A = [5112, 4988, 3890, 4254, 3216, 3073, 3272, 3014, 3882, 4358]
MNIST_A += [2942, 1556, 2203, 1853, 1782, 3653, 4315, 4030, 4180, 4427]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDATTUNE_DATA", raising=False)


def test_mnist_layout_and_normalisation(tmp_path):
    x, y = grey_set(tmp_path / "mnist")
    data = load_data("mnist", data_dir=tmp_path)
    assert np.array_equal(data.x, x[:, None])
    assert np.array_equal(data.y, y)
    assert data.classes == tuple(DIGITS)
    assert np.allclose(data.shift, x.mean(axis=0), rtol=1e-6)
    assert np.allclose(data.scale, 1 / (x.std(axis=0) + 0.001), rtol=1e-5)
    assert load_data("mnist", data_dir=tmp_path / "mnist").fingerprint == data.fingerprint
    assert load_data("ylecun/mnist", data_dir=tmp_path).fingerprint == data.fingerprint


def test_class_names_tell_mnist_from_fashion_mnist(tmp_path):
    grey_set(tmp_path / "digits")
    grey_set(tmp_path / "clothes", classes=LETTERS)
    assert load_data("fashion_mnist", data_dir=tmp_path / "clothes").classes == tuple(LETTERS)
    for _ in range(2):  # decoded, then from the cache
        with pytest.raises(DataError, match="no part of mnist: its classes are a, b, c"):
            load_data("mnist", data_dir=tmp_path / "clothes")
        with pytest.raises(DataError, match="no part of fashion_mnist: its classes are 0, 1, 2"):
            load_data("fashion_mnist", data_dir=tmp_path / "digits")
    write(tmp_path / "bare" / "a.parquet", pictures(10, (28, 28)), {"label": np.arange(10)})
    for name in ("mnist", "fashion_mnist"):
        assert load_data(name, data_dir=tmp_path / "bare").classes == tuple(DIGITS)


def test_two_label_columns(tmp_path):
    x = pictures(4, (32, 32, 3))
    coarse_names, fine_names = [f"c{k}" for k in range(20)], [f"f{k}" for k in range(100)]
    labels = {"coarse_label": [0, 1, 0, 1], "fine_label": [3, 2, 1, 0]}
    features = {"coarse_label": coarse_names, "fine_label": fine_names}
    write(tmp_path / "cifar100" / "train-0.parquet", x, labels, image="img", features=features)
    data = load_data("cifar100", data_dir=tmp_path)
    assert data.y.tolist() == [3, 2, 1, 0]
    assert "fine_label (100 classes)" in data.notes[0]
    coarse = load_data("cifar100", data_dir=tmp_path, options={"label": "coarse_label"})
    assert coarse.classes == tuple(coarse_names)
    assert coarse.notes == ()
    with pytest.raises(DataError, match="did you mean 'fine_label'"):
        load_data("cifar100", data_dir=tmp_path, options={"label": "fine_labl"})


def test_files_without_metadata(tmp_path):
    x = pictures(4, (2, 2))
    found = read_images([write(tmp_path / "a.parquet", x, {"digit": [0, 1, 4, 1]}, image="picture")])
    assert found.classes == ("0", "1", "2", "3", "4")
    assert np.array_equal(found.x[:, 0], x)
    two = write(tmp_path / "b.parquet", x, {"digit": [0, 1, 4, 1], "other": [1, 1, 1, 1]})
    with pytest.raises(DataError, match="choose one with label: digit, other"):
        read_images([two])
    assert read_images([two], "other").y.tolist() == [1, 1, 1, 1]
    with pytest.raises(DataError, match="no label column"):
        read_images([write(tmp_path / "c.parquet", x, {})])
    with pytest.raises(DataError, match="one image column, found none"):
        read_images([write(tmp_path / "d.parquet", x, {"label": [0] * 4}, plain=True)])


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ([png(np.zeros((2, 2), np.uint8)), b"junk"], "row 1 of 'image'.*cannot be decoded"),
        ([png(np.zeros((2, 2), np.uint8)), None], "row 1 .*holds no image bytes"),
        ([png(np.zeros((2, 2), np.uint8)), png(np.zeros((2, 3), np.uint8))], r"shape \(1, 2, 3\)"),
    ],
)
def test_broken_images(tmp_path, encoded, message):
    path = write(tmp_path / "a.parquet", [], {"label": [0, 1]}, encoded=encoded)
    with pytest.raises(DataError, match=message):
        read_images([path])


def test_broken_files(tmp_path):
    bad = tmp_path / "bad.parquet"
    bad.write_text("no parquet")
    with pytest.raises(DataError, match="as Parquet"):
        read_images([bad])
    with pytest.raises(DataError, match="no rows"):
        read_images([write(tmp_path / "e.parquet", [], {"label": pa.array([], pa.int64())})])
    x = pictures(2, (2, 2))
    one = write(tmp_path / "one.parquet", x, {"label": [0, 1]})
    other = write(tmp_path / "two.parquet", x, {"digit": [0, 1]})
    with pytest.raises(DataError, match=r"two.parquet has no column 'label'"):
        read_images([one, other])
    with pytest.raises(DataError, match="lacks 1 labels"):
        read_images([write(tmp_path / "n.parquet", x, {"label": [0, None]})])


def test_hub_is_asked_last(tmp_path, monkeypatch):
    asked = []

    def download(repo, **options):
        asked.append((repo, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    grey_set(tmp_path / "snapshot" / "mnist")
    assert len(load_data("mnist").y) == 12
    assert asked == [("ylecun/mnist", {"repo_type": "dataset", "allow_patterns": "*.parquet"})]
    for file in (tmp_path / "snapshot" / "mnist").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="holds no Parquet files"):
        load_data("mnist")


def test_hub_failure_says_what_to_do(tmp_path, monkeypatch):
    def fail(repo, **options):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(DataError, match=r"cannot download uoft-cs/cifar10 .*\(no route\); put .*--data-dir DIR"):
        load_data("cifar10")
    monkeypatch.setenv("FEDATTUNE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"FEDATTUNE_DATA={tmp_path} was looked at and holds no .*cannot download"):
        load_data("cifar10")
    with pytest.raises(DataError, match="no Parquet files of cifar10 in"):
        load_data("cifar10", data_dir=tmp_path)


def test_real_mnist_has_the_papers_sizes():
    given = REAL
    folder = Path(given) if given else Path(__file__).parents[3] / "shared" / "data"
    if not (folder / "mnist").is_dir():
        pytest.skip("the real image files are not here; set FEDATTUNE_DATA to a folder that holds mnist/*.parquet")
    fed = load_federation("mnist", data_dir=folder, partition="two_class", clients=20)
    assert fed.label_counts().sum(axis=1).tolist() == MNIST_A
    assert ((fed.label_counts() > 0).sum(axis=1) == 2).all()
    assert fed.sizes("test").tolist() == [n - 3 * n // 4 for n in MNIST_A]
    assert abs(float(fed.features(torch.arange(70_000)).mean())) < 1e-4
