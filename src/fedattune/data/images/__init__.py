"""The image sets known by name, and how their bytes become the model's input."""

from pathlib import Path
from typing import Literal

import numpy as np

from ...core.citing import cite
from ...core.options import Count
from ..dataset import Dataset
from ..types import Array
from .decode import Images
from .hub import EmnistSplit, RowSet, read_emnist, read_known_images

Folder = Path | None
"""Folder to look in; by default FEDATTUNE_DATA and the hub."""
Label = str | None
"""Column of the label; by default the label column with most classes."""
Size = Count | None
"""Number of images, or of clients, to draw at random; by default all. Images are the same in every run."""
ByPixel = Literal["pixel", "half", "unit"]
ByChannel = Literal["channel", "half", "unit"]
Unfitted = Literal["half", "unit"]
"""Scaling of the bytes: `pixel` and `channel` standardise, `half` scales from -1 to 1, `unit` from 0 to 1."""
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)
"""Mean and deviation of the channels of CIFAR-10's training images."""


@cite(r"""
@article{lecun1998gradient,
  author = {LeCun, Yann and Bottou, L{\'e}on and Bengio, Yoshua and Haffner, Patrick},
  title = {Gradient-Based Learning Applied to Document Recognition},
  journal = {Proceedings of the IEEE},
  year = {1998},
  volume = {86},
  number = {11},
  pages = {2278--2324}
}
""")
def mnist(
    data_dir: Folder, *, label: Label = None, scaling: ByPixel = "pixel", rows: RowSet = "all", samples: Size = None
) -> Dataset:
    """MNIST, 70,000 handwritten digits of 28x28; every pixel standardised over all of them."""
    images = read_known_images("mnist", data_dir, label, rows=rows)
    return build_image_dataset("mnist", _draw_images(images, samples), scaling)


@cite("""
@misc{xiao2017fashion,
  author = {Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  title = {{Fashion-MNIST}: A Novel Image Dataset for Benchmarking Machine Learning Algorithms},
  year = {2017},
  eprint = {1708.07747},
  archiveprefix = {arXiv}
}
""")
def fashion_mnist(
    data_dir: Folder, *, label: Label = None, scaling: ByPixel = "pixel", rows: RowSet = "all", samples: Size = None
) -> Dataset:
    """Fashion-MNIST, 70,000 pictures of clothing of 28x28; every pixel standardised over all of them."""
    images = read_known_images("fashion_mnist", data_dir, label, rows=rows)
    return build_image_dataset("fashion_mnist", _draw_images(images, samples), scaling)


@cite("""
@techreport{krizhevsky2009learning,
  author = {Krizhevsky, Alex},
  title = {Learning Multiple Layers of Features from Tiny Images},
  institution = {University of Toronto},
  year = {2009}
}
""")
def cifar10(
    data_dir: Folder, *, label: Label = None, scaling: ByChannel = "channel", rows: RowSet = "all", samples: Size = None
) -> Dataset:
    """CIFAR-10, 60,000 colour photographs of 32x32 in 10 classes."""
    images = read_known_images("cifar10", data_dir, label, rows=rows)
    return build_image_dataset("cifar10", _draw_images(images, samples), scaling)


@cite("krizhevsky2009learning")
def cifar100(
    data_dir: Folder, *, label: Label = None, scaling: ByChannel = "channel", rows: RowSet = "all", samples: Size = None
) -> Dataset:
    """CIFAR-100, 60,000 colour photographs of 32x32 in 100 classes; label=coarse_label for the 20 groups."""
    images = read_known_images("cifar100", data_dir, label, rows=rows)
    return build_image_dataset("cifar100", _draw_images(images, samples), scaling)


@cite(r"""
@inproceedings{cohen2017emnist,
  author = {Cohen, Gregory and Afshar, Saeed and Tapson, Jonathan and {van Schaik}, Andr{\'e}},
  title = {{EMNIST}: Extending {MNIST} to Handwritten Letters},
  booktitle = {International Joint Conference on Neural Networks (IJCNN)},
  year = {2017},
  eprint = {1702.05373},
  archiveprefix = {arXiv}
}
""")
def emnist(
    data_dir: Folder,
    *,
    split: EmnistSplit = "byclass",
    scaling: ByPixel = "unit",
    rows: RowSet = "all",
    samples: Size = None,
) -> Dataset:
    """EMNIST, handwritten digits and letters of 28x28: 814,255 in 62 classes, or 131,600 in 47 balanced ones."""
    return build_image_dataset("emnist", _draw_images(read_emnist(split, data_dir, rows), samples), scaling)


@cite(
    r"""
@misc{caldas2018leaf,
  author = {Caldas, Sebastian and Duddu, Sai Meher Karthik and Wu, Peter and Li, Tian and Kone{\v{c}}n{\'y},
    Jakub and McMahan, H. Brendan and Smith, Virginia and Talwalkar, Ameet},
  title = {{LEAF}: A Benchmark for Federated Settings},
  year = {2018},
  eprint = {1812.01097},
  archiveprefix = {arXiv}
}
""",
    "cohen2017emnist",
)
def femnist(
    data_dir: Folder, *, clients: Size = None, seed: int = 0, label: Label = "character", scaling: ByPixel = "unit"
) -> Dataset:
    """FEMNIST, handwritten digits and letters of 28x28 in 62 classes; each of some 3,600 writers is a client.

    `clients` is the number of writers to draw; by default all.
    """
    images = read_known_images("femnist", data_dir, label, owner="writer_id")
    if clients is not None:
        images = _draw_owners(images, clients, seed)
    return build_image_dataset("femnist", images, scaling)


@cite("""
@misc{le2015tiny,
  author = {Le, Ya and Yang, Xuan S.},
  title = {Tiny {ImageNet} Visual Recognition Challenge},
  howpublished = {Course project, CS 231N, Stanford University},
  year = {2015}
}
""")
def tiny_imagenet(
    data_dir: Folder, *, label: Label = None, scaling: Unfitted = "half", rows: RowSet = "train", samples: Size = None
) -> Dataset:
    """Tiny-ImageNet, 100,000 photographs of 64x64 in 200 classes, 500 of each; grey ones become coloured."""
    images = read_known_images("tiny_imagenet", data_dir, label, rows=rows)
    return build_image_dataset("tiny_imagenet", _draw_images(images, samples), scaling)


def _draw_images(images: Images, n: int | None) -> Images:
    """Draw n images at random, of each class in proportion to its size; None for all images."""
    if n is None:
        return images
    if n > len(images.y):
        raise ValueError(f"samples must be at most {len(images.y)}, got {n}")
    order = np.random.default_rng(0).permutation(len(images.y))
    depth = np.empty(len(order))  # share of an image's class that precedes it in the random order
    for k in range(len(images.classes)):
        members = order[images.y[order] == k]
        depth[members] = np.arange(len(members)) / max(1, len(members))
    drawn = np.sort(order[np.argsort(depth[order], kind="stable")[:n]])
    return images._replace(x=images.x[drawn], y=images.y[drawn], known_fingerprint="")


def _draw_owners(images: Images, n: int, seed: int) -> Images:
    """Draw n owners at random, and return their images."""
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if n > len(images.owners):
        raise ValueError(f"clients must be at most {len(images.owners)}, got {n}")
    assert images.owner is not None
    owner_numbers = np.sort(np.random.default_rng(seed).permutation(len(images.owners))[:n])
    mine = np.flatnonzero(np.isin(images.owner, owner_numbers))
    return images._replace(
        x=images.x[mine],
        y=images.y[mine],
        owner=np.searchsorted(owner_numbers, images.owner[mine]),
        owners=tuple(images.owners[k] for k in owner_numbers),
        known_fingerprint="",
    )


def build_image_dataset(name: str, images: Images, scaling: str) -> Dataset:
    """Make a data set of images; shift and scale turn bytes into the model's input, (x - shift) * scale."""
    shift, scale, note = _choose_scaling(scaling, images.x)
    return Dataset(
        name=name,
        x=images.x,
        y=images.y,
        classes=images.classes,
        shift=shift,
        scale=scale,
        owner=images.owner,
        owners=images.owners,
        notes=(*images.notes, *note),
        known_fingerprint=images.known_fingerprint,
    )


def _choose_scaling(name: str, x: Array) -> tuple[Array | None, Array, tuple[str, ...]]:
    """Return shift, scale and notes of a scaling of the bytes x."""
    if name == "pixel":  # deviation + 0.001 is pFedMe's and FedMCSA's protocol
        mean, std = _compute_moments(x)
        note = "Every pixel is standardised over all images, test images included, as in the papers."
        return mean.astype(np.float32), (1 / (std + 0.001)).astype(np.float32), (note,)
    if name == "channel":
        mean, std = (np.array(values, dtype=np.float64)[:, None, None] for values in (CIFAR_MEAN, CIFAR_STD))
        return (255 * mean).astype(np.float32), (1 / (255 * std)).astype(np.float32), ()
    if name == "half":  # Normalize(0.5, 0.5) of images from 0 to 1: FedAM's, FedCP's and PFLlib's protocol
        return np.full((1, 1, 1), 127.5, dtype=np.float32), np.full((1, 1, 1), 1 / 127.5, dtype=np.float32), ()
    return None, np.full((1, 1, 1), 1 / 255, dtype=np.float32), ()


def _compute_moments(x: Array, block: int = 2_000) -> tuple[Array, Array]:
    """Return mean and deviation of each pixel of bytes x, float64; a block stays in the processor's cache."""
    total = np.zeros(x.shape[1:], dtype=np.int64)
    squares = np.zeros(x.shape[1:], dtype=np.int64)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        total += part.sum(axis=0, dtype=np.uint32)
        square = np.multiply(part, part, dtype=np.uint16)  # 255^2 fits in 16 bits
        squares += square.sum(axis=0, dtype=np.uint32)
    mean = total / len(x)
    return mean, np.sqrt(np.maximum(squares / len(x) - mean * mean, 0))
