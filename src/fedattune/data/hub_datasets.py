"""Federations of data that the library `datasets` of Hugging Face holds, which need not be installed."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import ConfigError, DataError, did_you_mean
from .dataset import Dataset
from .items import read_items
from .tables import load_table
from .tables.checks import TargetType
from .types import Array


class HubData(NamedTuple):
    """Rows of all clients, with each row's client, and the columns to predict and to predict from."""

    rows: Any  # datasets.Dataset
    owner: Array  # number of each row's client, (n,)
    owners: tuple[str, ...]
    target: str
    features: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        """True if each feature is one number, category or text, so that the rows are those of a table."""
        return all(type(self.rows.features[name]).__name__ in ("Value", "ClassLabel") for name in self.features)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, if the target's column has them."""
        names = getattr(self.rows.features[self.target], "names", None)
        return None if names is None else tuple(names)

    def read_table(self, name: str, target_type: TargetType) -> Dataset:
        """Read the rows as a table, whose numbers, categories, dates and texts become features."""
        from pyarrow import array, parquet

        client = "client"
        while client in (self.target, *self.features):
            client += "_"
        plain = self.rows.select_columns([*self.features, self.target]).with_format("arrow")[:]
        for column in (*self.features, self.target):
            if names := getattr(self.rows.features[column], "names", None):
                place = plain.column_names.index(column)
                texts = [None if k is None or k < 0 else names[k] for k in plain.column(column).to_pylist()]
                plain = plain.set_column(place, column, array(texts, "string"))
        plain = plain.append_column(client, array([self.owners[u] for u in self.owner.tolist()], "string"))
        with TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            parquet.write_table(plain.replace_schema_metadata(None), path)
            try:
                read = load_table(
                    path,
                    client_column=client,
                    target=self.target,
                    features=list(self.features),
                    target_type=target_type,
                )
            except DataError as error:
                raise DataError(str(error).replace(str(path), name)) from error
        return replace(read, name=name)

    def read_clients(self) -> dict[str, tuple[Array, Array]]:
        """Read samples and targets of each client, where a feature is an image or an array."""
        if len(self.features) > 1:
            raise ConfigError(
                f"features: a column of images or arrays must be the only one, got {', '.join(self.features)}; choose "
                "one with features=['COLUMN']"
            )
        (feature,) = self.features
        rows = self.rows
        if type(rows.features[feature]).__name__ == "Image" and rows.format["type"] != "custom":
            rows = rows.with_format(None)  # NumPy's format has channels last, and both NumPy's and PyTorch's have bytes

        def get(i: int) -> tuple[Any, Any]:
            row = rows[i]
            return row[feature], row[self.target]

        x, y = read_items(f"column {feature!r}", len(rows), get)
        return {name: (x[self.owner == u], y[self.owner == u]) for u, name in enumerate(self.owners)}


def find_hub_data(
    clients: Any, client_column: str | None, target: str | None, features: Sequence[str] | None
) -> HubData | None:
    """Return the rows and columns of `datasets.Dataset` objects: one with a client column, or one per client.

    Return None for other objects. The target is by default the only column of class labels, and features are all other
    columns.

    Raises:
        ConfigError: columns that are not there, or options that do not go together.
    """
    library = sys.modules.get("datasets")  # who has such data has loaded it
    if not hasattr(library, "concatenate_datasets"):  # a module of the user may have the name
        library = None
    kind, kind_of_parts = (getattr(library, name, ()) for name in ("Dataset", "DatasetDict"))
    streams = tuple(filter(None, (getattr(library, f"Iterable{name}", None) for name in ("Dataset", "DatasetDict"))))
    by_name = dict(enumerate(clients)) if isinstance(clients, list | tuple) else clients
    each = list(by_name.values()) if isinstance(by_name, Mapping) else [clients]
    if isinstance(clients, streams) or any(isinstance(one, streams) for one in each):
        raise ConfigError("an IterableDataset cannot be divided into parts; load it without streaming=True")
    if isinstance(clients, kind_of_parts):
        raise ConfigError(
            f"a DatasetDict has parts ({', '.join(clients)}), not clients; give one of them, or "
            "datasets.concatenate_datasets(list(data.values())), which is divided anew"
        )
    if any(isinstance(one, kind_of_parts) for one in each):
        raise ConfigError(
            "a client is a DatasetDict, expected a datasets.Dataset; give datasets.concatenate_datasets(list("
            "data.values())), which is divided anew"
        )
    given = {"client_column": client_column, "target": target, "features": features}
    if not each or not all(isinstance(one, kind) for one in each):
        if needless := [key for key, value in given.items() if value is not None]:
            raise ConfigError(f"{' and '.join(needless)} goes only with a datasets.Dataset; leave it out")
        return None
    first = each[0]
    for key, value in given.items():
        for column in value if key == "features" and value is not None else [value]:
            if column is not None and column not in first.column_names:
                raise ConfigError(
                    f"{key}: there is no column {column!r}; {did_you_mean(str(column), first.column_names)}"
                )
    if isinstance(by_name, Mapping):
        if client_column is not None:
            raise ConfigError("client_column: each datasets.Dataset is a client already; leave it out")
        labels = tuple(map(str, by_name))
        different = [name for name, one in zip(labels, each, strict=True) if one.features != first.features]
        if different:
            raise DataError(
                f"client {different[0]!r} has columns of other names or types than {labels[0]!r}; cast them to the "
                "same features"
            )
        assert library is not None
        rows = library.concatenate_datasets(each)
        owner, owners = np.repeat(np.arange(len(each)), [len(one) for one in each]), labels
    elif client_column is None:
        raise ConfigError("client_column is missing: name the column with each row's client")
    else:
        names = getattr(first.features[client_column], "names", None)
        given_clients = list(first.with_format(None)[client_column])
        is_named = [one is not None and not (names and one < 0) for one in given_clients]
        if not all(is_named):
            raise DataError(
                f"client_column: row {is_named.index(False)} has no client in {client_column!r}; fill it in, or leave "
                "such rows out with dataset.filter"
            )
        rows, (found, owner) = first, np.unique([str(one) for one in given_clients], return_inverse=True)
        owners = tuple(names[int(k)] if names else k for k in found.tolist())
    target = target or _find_target(rows, client_column)
    rest = tuple(name for name in rows.column_names if name not in (client_column, target))
    chosen = tuple(features) if features is not None else rest
    if not chosen or {target, client_column} & set(chosen):
        raise ConfigError(f"features: expected some of {', '.join(rest) or 'other columns'}, got {', '.join(chosen)}")
    return HubData(rows, owner, owners, target, chosen)


def _find_target(rows: Any, client_column: str | None) -> str:
    labels = [name for name, one in rows.features.items() if hasattr(one, "names") and name != client_column]
    if len(labels) != 1:
        raise ConfigError(f"target is missing: name the column to predict, one of {', '.join(rows.column_names)}")
    return str(labels[0])
