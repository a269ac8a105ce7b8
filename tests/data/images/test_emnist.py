"""EMNIST, FEMNIST and Tiny-ImageNet: files as they are published, written small, and the scalings."""

import gzip
import string

import numpy as np
import pytest
import torch

from data.image_files import colour_set, grey_set, pictures, png, write
from fedattune import ConfigError, DataError, load_federation
from fedattune.data import load_data
from fedattune.data.images.hub import read_idx

BYCLASS = list(string.digits + string.ascii_uppercase + string.ascii_lowercase)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDATTUNE_DATA", raising=False)


def idx(array):
    """An IDX file's content: 0, 0, 8 for bytes, number of dimensions, each of them in 4 bytes, the values."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def idx_set(folder, split="byclass", part="train", n=6, classes=62, packed=True):
    """Files of EMNIST, whose images lie on their side, and the upright images."""
    folder.mkdir(parents=True, exist_ok=True)
    x = pictures(n, (28, 28), seed=len(part))
    y = (np.arange(n) * 7 % classes).astype(np.uint8)
    for kind, array in (("images-idx3", x.transpose(0, 2, 1).copy()), ("labels-idx1", y)):
        path = folder / f"emnist-{split}-{part}-{kind}-ubyte{'.gz' * packed}"
        path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return x, y


@pytest.mark.parametrize("packed", [True, False])
def test_emnist_files_as_published(tmp_path, packed):
    test_x, test_y = idx_set(tmp_path / "emnist", part="test", n=4, packed=packed)
    x, y = idx_set(tmp_path / "emnist", packed=packed)
    data = load_data("emnist", data_dir=tmp_path)
    assert data.classes == tuple(BYCLASS)
    assert np.array_equal(data.x[:, 0], np.concatenate([x, test_x]))  # training first, upright
    assert data.x.flags.c_contiguous
    assert data.y.tolist() == [*y, *test_y]
    assert data.y.dtype == np.int64
    assert len(load_data("emnist", data_dir=tmp_path / "emnist", options={"rows": "train"}).y) == 6
    assert load_data("Royc30ne/emnist-byclass", data_dir=tmp_path).fingerprint == data.fingerprint


def test_emnist_in_parquet_is_taken_as_it_is(tmp_path):
    x = pictures(4, (28, 28))
    write(tmp_path / "emnist" / "a.parquet", x, {"label": [0, 1, 2, 61]}, features={"label": BYCLASS})
    data = load_data("emnist", data_dir=tmp_path)
    assert np.array_equal(data.x[:, 0], x)
    with pytest.raises(DataError, match=r"expected images .* in 47 classes, got .* and 62 classes;"):
        load_data("emnist", data_dir=tmp_path, options={"split": "balanced"})
    with pytest.raises(DataError, match=r"none of the 1 files of emnist, such as .* begins with train"):
        load_data("emnist", data_dir=tmp_path, options={"rows": "train"})
    with pytest.raises(DataError, match=r"no Parquet or emnist-byclass-\*-ubyte.gz files of emnist in"):
        load_data("emnist", data_dir=tmp_path / "empty")


def test_emnist_files_that_are_broken(tmp_path):
    folder = tmp_path / "emnist"
    idx_set(folder, split="balanced", n=8, classes=62)
    with pytest.raises(DataError, match=r"no part of emnist balanced: it has label 49, but the 47 classes"):
        load_data("emnist", data_dir=tmp_path, options={"split": "balanced"})
    idx_set(folder)
    images, labels = (folder / f"emnist-byclass-train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    whole = labels.read_bytes()
    labels.write_bytes(gzip.compress(idx(np.zeros(5, np.uint8))))
    with pytest.raises(DataError, match=r"holds 6 images, but .* 5 labels"):
        load_data("emnist", data_dir=tmp_path)
    labels.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"cannot read .*labels-idx1-ubyte.gz"):
        load_data("emnist", data_dir=tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match=r"cannot read .*labels-idx1-ubyte.gz: No such file"):
        load_data("emnist", data_dir=tmp_path)
    labels.write_bytes(whole)
    images.unlink()
    with pytest.raises(DataError, match=r"holds no emnist-byclass-...-images-idx3-ubyte file"):
        load_data("emnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\x08", idx(np.zeros(3, np.uint8))[:-1], idx(np.zeros((1, 2), np.uint8)), b"\0\0\x09\x01\0\0\0\x01a"],
)
def test_idx_files_that_are_none(tmp_path, content):
    path = tmp_path / "labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is no IDX file of bytes in 1 dimensions"):
        read_idx(path, 1)


def test_emnist_comes_from_its_repository_on_the_hub(tmp_path, monkeypatch):
    asked = []

    def download(repo, **options):
        asked.append((repo, options["allow_patterns"]))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    idx_set(tmp_path / "snapshot", split="balanced", classes=47)
    assert len(load_data("emnist", options={"split": "balanced"}).y) == 6
    with pytest.raises(DataError, match=r"Royc30ne/emnist-byclass on .* holds no emnist-byclass-\*-ubyte.gz files"):
        load_data("emnist")
    assert asked == [
        ("Royc30ne/emnist-balanced", "emnist-balanced-*-ubyte.gz"),
        ("Royc30ne/emnist-byclass", "emnist-byclass-*-ubyte.gz"),
    ]


def writers_set(folder, writers, **more):
    x = pictures(len(writers), (28, 28))
    labels = {"writer_id": writers, "hsf_id": [0] * len(writers), "character": np.arange(len(writers)) % 2}
    write(folder / "train-0.parquet", x, labels, features={"character": BYCLASS}, **more)
    return x


def test_femnist_has_its_writers_as_clients(tmp_path):
    x = writers_set(tmp_path / "femnist", ["f2", "f1"] * 2 + ["f2", "f2", "f3"] * 4 + ["f1", "f1", "f3", "f3"] * 2)
    for _ in range(2):  # decoded, then from the cache
        fed = load_federation("flwrlabs/femnist", data_dir=tmp_path, small_clients="drop")
        assert fed.names == ("f1", "f2", "f3")
        assert sorted(fed.clients[0].all) == [1, 3, 16, 17, 20, 21]
        assert fed.partition["name"] == "by_column"
    assert fed.classes == tuple(BYCLASS)
    assert np.array_equal(fed.x[:, 0].numpy(), x)
    assert np.allclose(fed.features(torch.tensor([0]))[0, 0].numpy(), x[0] / 255, atol=1e-6)
    other = load_federation("femnist", data_dir=tmp_path, partition="iid", clients=4)
    assert other.n_clients == 4


def test_femnist_takes_some_writers_at_random(tmp_path):
    writers = [f"f{k}" for k in range(6)] * 10
    x = writers_set(tmp_path / "femnist", writers)
    some = [load_data("femnist", data_dir=tmp_path, options={"clients": 2, "seed": seed}) for seed in range(20)]
    assert {name for data in some for name in data.owners} == set(writers)
    for data in some:
        rows = [i for i, name in enumerate(writers) if name in data.owners]
        assert np.array_equal(data.x[:, 0], x[rows])
        assert [data.owners[k] for k in data.owner] == [writers[i] for i in rows]
    # Every writer's labels are all alike here, which a federation of natural clients refuses.
    fed = load_federation("femnist", data_dir=tmp_path, clients=3, partition="iid")
    assert fed.n_clients == 3
    for options, message in (
        ({"clients": 7}, "clients must be at most 6, got 7"),
        ({"clients": 1, "seed": -1}, "seed"),
    ):
        with pytest.raises(ConfigError, match=f"femnist: .*{message}"):
            load_data("femnist", data_dir=tmp_path, options=options)


def test_tiny_imagenet_is_coloured_and_of_training_images(tmp_path):
    grey, coloured = np.full((64, 64), 9, dtype=np.uint8), pictures(2, (64, 64, 3))
    names = {"label": [f"n{k}" for k in range(200)]}
    folder = tmp_path / "tiny_imagenet"
    encoded = [png(grey), png(coloured[0])]
    write(folder / "valid-0.parquet", [], {"label": [3]}, features=names, encoded=[png(coloured[1])])
    write(folder / "train-0.parquet", [], {"label": [0, 199]}, features=names, encoded=encoded)
    data = load_data("zh-plus/tiny-imagenet", data_dir=tmp_path)
    assert data.x.shape == (2, 3, 64, 64)
    assert (data.x[0] == 9).all()
    assert np.array_equal(data.x[1], coloured[0].transpose(2, 0, 1))
    assert load_data("tiny_imagenet", data_dir=tmp_path, options={"rows": "all"}).y.tolist() == [0, 199, 3]
    (folder / "train-0.parquet").rename(folder / "images-0.parquet")
    with pytest.raises(DataError, match=r"none of the 2 files of tiny_imagenet.*or set tiny_imagenet.rows=all"):
        load_data("tiny_imagenet", data_dir=tmp_path)


def model_input(name, folder, scaling):
    fed = load_federation(name, data_dir=folder, options={"scaling": scaling}, partition="iid", clients=2)
    return fed.features(torch.arange(len(fed.y))).numpy()


def test_half_scaling_is_normalize_with_a_half_and_unit_is_from_zero_to_one(tmp_path):
    x = colour_set(tmp_path / "cifar10").transpose(0, 3, 1, 2)
    assert np.allclose(model_input("cifar10", tmp_path, "half"), (x / 255 - 0.5) / 0.5, atol=1e-6)
    assert np.allclose(model_input("cifar10", tmp_path, "unit"), x / 255, atol=1e-6)
    grey, _ = grey_set(tmp_path / "mnist", n=8)
    assert np.allclose(model_input("mnist", tmp_path, "half")[:, 0], (grey / 255 - 0.5) / 0.5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"mnist.scaling: input should be 'pixel', 'half' or 'unit'"):
        model_input("mnist", tmp_path, "channel")


def test_a_draw_of_images_keeps_the_shares_of_the_classes(tmp_path):
    y = np.repeat(np.arange(10), [40, *[20] * 8, 40])
    x = pictures(len(y), (28, 28))
    write(tmp_path / "mnist" / "train-0.parquet", x, {"label": y})
    drawn = load_data("mnist", data_dir=tmp_path, options={"samples": 60})
    assert np.bincount(drawn.y).tolist() == [10, *[5] * 8, 10]
    whole = {picture.tobytes(): label for picture, label in zip(x, y, strict=True)}
    assert [whole.pop(picture.tobytes()) for picture in drawn.x] == drawn.y.tolist()  # each image once
    again = load_data("mnist", data_dir=tmp_path, options={"samples": 60})
    assert np.array_equal(drawn.x, again.x)
    assert load_data("mnist", data_dir=tmp_path, options={"samples": 240}).y.tolist() == y.tolist()
    with pytest.raises(ConfigError, match="samples must be at most 240, got 241"):
        load_data("mnist", data_dir=tmp_path, options={"samples": 241})
