"""Images in folders of clients and classes: labels, sizes, colours, what is left out, and the node that holds some."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.nodes import loaded
from fedattune import ConfigError, DataError, Federation, fit, load_federation
from fedattune.data import Schema, infer_schema
from fedattune.data.images.decode import decode_image
from fedattune.data.node import find_node_problems
from fedattune.experiments.config import Experiment
from fedattune.experiments.plan import prepare_data


def save(path: Path, shade: int, *, size: tuple[int, int] = (6, 4), mode: str = "L") -> Path:
    """Write an image of one shade and the given width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode in ("L", "I;16") else (shade, 0, 9)).save(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two clients; only the first knows the class bird, only the second the class dog. Shades tell the classes."""
    root = tmp_path / "pets"
    for client, shades in {"south": {"cat": 20, "bird": 10}, "north": {"dog": 30, "cat": 20}}.items():
        for label, shade in shades.items():
            for number in range(6):
                save(root / client / label / f"{number}.png", shade + number)
    return root


def shades(federation: Federation, u: int) -> dict[int, list[str]]:
    """Return a client's shades with their classes."""
    rows = federation.clients[u].all
    found: dict[int, list[str]] = {}
    for x, y in zip(federation.x[rows], federation.y[rows], strict=True):
        assert (x == x[0, 0, 0]).all()
        found.setdefault(int(x[0, 0, 0]), []).append(federation.classes[int(y)])
    return found


def test_folders_name_clients_and_classes(root: Path) -> None:
    data = load_federation(root)
    assert data.name == "pets"
    assert list(data.names) == ["north", "south"]
    assert data.classes == ("bird", "cat", "dog")
    assert data.x.shape == (24, 1, 4, 6)
    assert data.x.dtype == torch.uint8
    dogs, cats, birds = (
        {first + i: [label] for i in range(6)} for first, label in ((30, "dog"), (20, "cat"), (10, "bird"))
    )
    assert shades(data, 0) == dogs | cats
    assert shades(data, 1) == cats | birds
    torch.testing.assert_close(data.features(torch.arange(24)), data.x.float() / 255)
    assert data.notes == ("1 of 2 clients have no validation part: north.",)


def test_folders_of_classes_alone_are_divided(root: Path) -> None:
    save(root / "south" / "dog" / "1.JPG", 30)
    data = load_federation(root / "south", partition="iid", clients=2)
    assert (data.name, data.n_clients, data.classes) == ("south", 2, ("bird", "cat", "dog"))


def test_images_of_two_sizes_are_refused_or_resized(root: Path) -> None:
    other = save(root / "north" / "dog" / "large.png", 40, size=(9, 8))
    first = root / "north" / "cat" / "0.png"
    with pytest.raises(DataError) as error:
        load_federation(root)
    assert f"{first} has 6x4 pixels and {other} 9x8; give --image-size to resize all images, such as 4" in str(
        error.value
    )
    data = load_federation(root, options={"image_size": 5})
    assert data.x.shape == (25, 1, 5, 5)
    assert 40 in shades(data, 0)


def test_a_resized_image_is_what_pillow_makes_of_it(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    for label in "ab":
        for number in range(4):
            path = tmp_path / "x" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    data = load_federation(tmp_path / "x", options={"image_size": 4, "scaling": "half"}, partition="iid", clients=2)
    want = np.asarray(Image.fromarray(pixels).resize((4, 4), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert (data.x.numpy() == want).all()
    torch.testing.assert_close(data.features(torch.tensor(0)), torch.from_numpy(want / 127.5 - 1).float())


def test_grey_images_among_coloured_ones_become_coloured(root: Path) -> None:
    save(root / "south" / "cat" / "red.png", 200, mode="RGB")
    data = load_federation(root)
    assert data.x.shape == (25, 3, 4, 6)
    assert "24 of the 25 images in pets are grey and become coloured like the others." in data.notes
    red = data.x[(data.x[:, 0, 0, 0] == 200).nonzero()[0, 0]]
    assert red[:, 2, 3].tolist() == [200, 0, 9]
    assert data.x[0].amax((1, 2)).tolist() == data.x[0].amin((1, 2)).tolist() == [20, 20, 20]


def test_what_is_no_image_is_left_out_and_named(root: Path) -> None:
    (root / "north" / "Thumbs.db").write_text("")
    (root / "south" / "cat" / ".hidden.png").write_text("")
    (root / "south" / "horse").mkdir()
    data = load_federation(root)
    assert data.classes == ("bird", "cat", "dog")
    assert data.notes[0] == (
        "3 of the files and folders in pets are no images or hold none, and left out: north/Thumbs.db, "
        "south/cat/.hidden.png, south/horse."
    )


def test_images_are_decoded_once(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDATTUNE_CACHE", str(tmp_path / "cache"))
    first = load_federation(root)
    with monkeypatch.context() as patch:
        patch.setattr("fedattune.data.images.folder.decode_image", None)
        again = load_federation(root)
    assert again.digest == first.digest
    (root / "north" / "cat").rename(root / "north" / "bird")  # the same files under another label
    assert shades(load_federation(root), 0)[20] == ["bird"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/x/1.png": 1, "b/1.png": 1}, "b/1.png is in a folder of a class, and .*a/x/1.png in one of a client"),
        ({"1.png": 1}, "1.png is 0 folders deep in .*, expected .*CLIENT/CLASS/1.png"),
        ({"a/b/c/1.png": 1}, "1.png is 3 folders deep"),
        ({"train/x/1.png": 1, "test/x/1.png": 1}, "has the folder 'test' where clients are expected"),
        ({"a/x/1.png": 1, "b/x/1.png": 1}, "all images are of the class 'x'"),
        ({"a/x/1.txt": None}, "holds no images; expected files such as .*CLIENT/CLASS/1.png"),
        ({"a/x/1.png": 1, "a/y/2.png": None}, "2.png cannot be read as an image"),
        ({"a/x/1.png": "I;16", "a/y/2.png": 3}, "1.png has more than 8 bits per channel"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, shade in files.items():
        path = tmp_path / "pics" / name
        if shade is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("no image")
        else:
            save(path, 1 if isinstance(shade, str) else shade, mode=shade if isinstance(shade, str) else "L")
    with pytest.raises(DataError, match=message):
        load_federation(tmp_path / "pics")


def test_a_broken_png_is_named(tmp_path: Path) -> None:
    save(tmp_path / "pics/a/x/1.png", 1)
    path = save(tmp_path / "pics/b/y/2.png", 2)
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") - 1] = 2  # the length of the pixels is wrong, so that the next chunk has no name
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"2.png cannot be decoded as an image: broken PNG file"):
        load_federation(tmp_path / "pics")


def test_a_missing_folder_and_options_of_others_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*none/; give the path of a folder of images"):
        load_federation(f"{root}/none/")
    with pytest.raises(ConfigError, match="folder has no option 'size'; known: image_size, scaling"):
        load_federation(root, options={"size": 3})
    with pytest.raises(ConfigError, match="target goes only with a table"):
        load_federation(root, target="x")
    with pytest.raises(ConfigError, match="--image-size goes only with a folder of images, not with 'digits'"):
        prepare_data(Experiment(data="digits", image_size=3))


def test_the_command_reads_a_folder_and_trains_with_augmentation(root: Path) -> None:
    data = prepare_data(Experiment(data=str(root), image_size=8, set={"folder.scaling": "half"}))
    assert data.input_shape == (1, 8, 8)
    assert data.shift is not None
    result = fit(data, "fedavg", "mlr", rounds=1, steps=2, augment="crop,flip")
    assert len(result.measure_clients("accuracy")) == 2


def test_a_node_reads_the_folder_of_its_one_client_by_the_common_schema(root: Path) -> None:
    whole = load_federation(root)
    schema = infer_schema(whole)
    for u, name in enumerate(("north", "south")):
        mine = loaded(schema, data=root / name, name=name).federation
        assert mine.classes == whole.classes
        assert list(mine.names) == [name]
        assert shades(mine, 0) == shades(whole, u)
        assert torch.equal(mine.features(torch.tensor(0)), mine.x[0].float() / 255)
    both = loaded(schema, data=root, name="clinic").federation
    assert list(both.names) == ["north", "south"]
    assert both.clients[1].train.tolist() == whole.clients[1].train.tolist()


def test_a_node_makes_its_images_fit_the_schema_or_says_why_not(root: Path) -> None:
    schema = Schema(classes=("bird", "cat", "dog"), input_shape=(3, 8, 8), scale=[[[1 / 255]]])
    with pytest.raises(DataError, match=r"shape \(3, 4, 6\), but the schema says \(3, 8, 8\); add image-size=8"):
        loaded(schema, data=root)
    assert loaded(schema, data=root, image_size=8).federation.input_shape == (3, 8, 8)
    for shape in ((3, 8, 16), (4,)):  # no one size gives it
        with pytest.raises(DataError, match=f"but the schema says {re.escape(str(shape))}$"):
            loaded(schema.model_copy(update={"input_shape": shape}), data=root)
    narrow = schema.model_copy(update={"classes": ("bird", "cats")})
    with pytest.raises(DataError, match="the folder 'cat' is no class of the schema; did you mean 'cats'"):
        loaded(narrow, data=root, image_size=8)
    with pytest.raises(ConfigError, match=r"north/CLASS need the client's name, name='...'"):
        loaded(schema, data=root / "north")
    with pytest.raises(ConfigError, match="image-size goes only with a folder of images, not with 'digits'"):
        loaded(data="digits", clients=3, image_size=8)
    problems = find_node_problems({"data": str(root), "target": "x"}, schema, test=0.25, validation=0.1)
    assert [one.text for one in problems] == [
        f"the node's configuration: target goes only with a table, not with {str(root)!r}"
    ]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_photos_are_read_upright(tmp_path: Path, suffix: str) -> None:
    upright = Image.new("L", (8, 16), 0)
    upright.paste(255, (0, 8, 8, 16))  # black above, white below
    turned = Image.Exif()
    turned[0x0112] = 6  # a viewer turns it by 90 degrees clockwise
    for client in "ab":
        for label in "xy":
            for number in range(3):
                save(file := tmp_path / client / label / f"{number}.{suffix}", 0)
                if number:
                    upright.save(file)
                else:
                    upright.transpose(Image.Transpose.ROTATE_90).save(file, exif=turned)
    x = load_federation(tmp_path).x.float().mean(1)
    assert x.shape[1:] == (16, 8)
    assert bool((x[:, :6] < 40).all())
    assert bool((x[:, -6:] > 215).all())


def test_broken_exif_does_not_matter() -> None:
    out = io.BytesIO()
    Image.new("L", (4, 6), 7).save(out, "JPEG", exif=b"Exif\0\0not TIFF at all")
    assert decode_image(out.getvalue(), None, None, "it").shape == (1, 6, 4)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    drawing = Image.new("RGBA", (4, 3), (0, 0, 0, 0))
    drawing.putpixel((1, 2), (0, 0, 0, 255))  # black on a transparent ground, which is black as well
    drawing = drawing.quantize(4) if mode == "P" else drawing.convert(mode)
    out = io.BytesIO()
    drawing.save(out, "PNG")
    x = decode_image(out.getvalue(), None, None, "it")
    assert x.shape == (3, 3, 4)
    assert not x[:, 2, 1].any()
    assert (x == 255).sum() == 3 * 11
