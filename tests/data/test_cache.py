"""Decoded images are kept on disk: used again, checked, made anew when damaged, and never in the way."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.image_files import pictures, write
from fedattune.core.io import find_cache_folder
from fedattune.data.cache import find_mapped_file
from fedattune.data.dataset import hash_arrays
from fedattune.data.images import decode as images
from fedattune.data.images.decode import read_images


def bmp(pixels):
    """An encoding whose length does not depend on the picture."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="BMP")
    return out.getvalue()


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    for name in ("FEDATTUNE_CACHE", "FEDATTUNE_HOME", "XDG_CACHE_HOME", "FEDATTUNE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDATTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def decoded(monkeypatch):
    """Every call of the decoder."""
    calls = []
    true_decode = images.decode_images

    def counted(*args, **options):
        calls.append(args)
        return true_decode(*args, **options)

    monkeypatch.setattr(images, "decode_images", counted)
    return calls


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "a.parquet", pictures(40, (8, 8)), {"label": np.arange(40) % 2})


def entry(tmp_path) -> Path:
    (found,) = (tmp_path / "cache").iterdir()
    return found


def test_decoded_once_and_mapped(tmp_path, decoded, source):
    first = read_images([source])
    again = read_images([source])
    assert len(decoded) == 1
    for found in (first, again):
        assert np.array_equal(found.x[:, 0], pictures(40, (8, 8)))
        assert found.y.tolist() == [0, 1] * 20
        assert (found.classes, found.notes, found.owners) == (("0", "1"), (), ())
        assert found.known_fingerprint == hash_arrays(found.x, found.y)
        assert find_mapped_file(found.x) == entry(tmp_path).resolve() / "x.npy"


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "header.json"])
def test_a_damaged_entry_is_made_anew(tmp_path, decoded, source, name):
    read_images([source])
    path = entry(tmp_path) / name
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    for number, content in enumerate([b"", b"junk", whole[: len(whole) // 2], bytes(flipped)], start=2):
        path.write_bytes(content)
        assert np.array_equal(read_images([source]).x[:, 0], pictures(40, (8, 8)))
        assert len(decoded) == number
        assert path.read_bytes() == whole
    path.unlink()
    read_images([source])
    assert len(decoded) == 6


def test_a_pickle_is_not_opened(tmp_path, decoded, source):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    read_images([source])
    np.save(entry(tmp_path) / "x.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    assert read_images([source]).x.dtype == np.uint8
    assert not (tmp_path / "sprung").exists()


def test_a_replaced_file_is_noticed_whatever_its_name_size_and_time(tmp_path, decoded):
    one = np.stack([np.full((8, 8), 5, np.uint8), np.full((8, 8), 6, np.uint8)])
    other = one[::-1]
    source = write(tmp_path / "a.parquet", one, {"label": [0, 1]}, encoded=[bmp(p) for p in one])
    assert read_images([source]).x[0, 0, 0, 0] == 5
    old = source.stat()
    write(source, other, {"label": [0, 1]}, encoded=[bmp(p) for p in other])
    os.utime(source, ns=(old.st_atime_ns, old.st_mtime_ns))
    new = source.stat()
    assert (new.st_size, new.st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    assert read_images([source]).x[0, 0, 0, 0] == 6
    assert len(decoded) == 2


@pytest.mark.parametrize("how", ["off", "a file", "read-only"])
def test_nothing_can_be_written(tmp_path, monkeypatch, decoded, source, how):
    if how == "off":
        monkeypatch.setenv("FEDATTUNE_CACHE", "off")
    elif how == "a file":
        (tmp_path / "cache").write_text("")
    else:
        real = Path.mkdir

        def refuse(path, *args, **options):  # not by chmod, which does not bind root
            if (tmp_path / "cache") in (path, *path.parents):
                raise PermissionError(13, "Permission denied", str(path))
            real(path, *args, **options)

        monkeypatch.setattr(Path, "mkdir", refuse)
    for number in (1, 2):
        found = read_images([source])
        assert np.array_equal(found.x[:, 0], pictures(40, (8, 8)))
        assert found.known_fingerprint == hash_arrays(found.x, found.y)
        assert len(decoded) == number
    assert how != "off" or not (tmp_path / "cache").exists()


def test_where_it_lies(tmp_path, monkeypatch):
    assert find_cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))
    assert find_cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FEDATTUNE_CACHE")
    assert find_cache_folder() == tmp_path / "home" / "cache"
    monkeypatch.delenv("FEDATTUNE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_cache_folder() == tmp_path / "xdg" / "fedattune" / "arrays"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert find_cache_folder().is_relative_to(Path.home())
