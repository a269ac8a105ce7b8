"""Building a federation from a data set and a partition."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import ConfigError, DataError, list_some
from ..core.options import check_options, list_options
from ..core.own_code import get_short_name, is_reference
from ..core.targets import KIND_WORDS, NUMBER_KINDS
from .client_index import PARTS, Client, ClientIndex
from .dataset import Dataset, describe_target_kind, scale_target
from .federated import Federation
from .manifest import check_manifest, check_saved_partition, load_manifest
from .partitions import (
    CLASS_PARTITIONS,
    DEFAULT_CLIENTS,
    DEFAULT_SEEDS,
    PARTITIONS,
    STRATIFIED,
    divide_samples,
    find_partition,
)
from .schema import describe_target
from .sources import SOURCES, is_image_folder, is_table, load_data, resolve_source_name
from .splits import (
    MAX_CLIENTS_IN_NOTE,
    SmallClients,
    SplitKind,
    check_fractions,
    check_two_clients,
    describe_cuts,
    describe_groups,
    leave_out_timeless,
    read_times,
    select_usable_clients,
    split_parts,
    suggest_min_rows,
)
from .tables.file import list_columns
from .tables.scaling import SCALING_NOTES
from .types import Array, Scaling


def partition_dataset(
    dataset: Dataset,
    *,
    partition: str | None = None,
    options: Mapping[str, Any] | None = None,
    clients: int | None = None,
    test: float = 0.25,
    validation: float = 0.1,
    seed: int | None = None,
    small_clients: SmallClients = "auto",
    min_rows: int | None = None,
    stratify: bool | None = None,
    split: SplitKind = "random",
    time_column: str | None = None,
    split_number: int = 0,
    scaling: Scaling = "auto",
    min_clients: int = 2,
) -> Federation:
    """Divide a data set among clients; for the arguments, see `load_federation`.

    Args:
        options: options of the partition.
        min_clients: minimum number of clients; a node of a real federation may have a single one.

    Raises:
        ConfigError: an unknown partition, or options that do not fit it.
        DataError: the data cannot be divided so.
    """
    name = partition or dataset.default_partition
    if name not in PARTITIONS and not is_reference(name):
        if split_number or split != "random" or time_column or min_rows is not None:
            raise ConfigError(
                f"the saved partition {name!r} fixes the parts of its clients, so there is one split; leave the "
                "split and min_rows out"
            )
        return _federate_saved(dataset, name, options, clients, scaling)
    if split == "time" and dataset.found_groups is not None:
        dataset = replace(dataset, groups=None)  # the rows of a group may be older and newer than the cut
    checked = check_options(get_short_name(name), find_partition(name), options or {})
    seed = DEFAULT_SEEDS.get(name, 0) if seed is None else seed
    check_fractions(test, validation, seed)
    is_stratified = dataset.kind == "class" and (name in STRATIFIED if stratify is None else stratify)
    times = read_times(dataset, split, time_column, is_stratified=is_stratified, split_number=split_number)
    names, keys = _find_names_and_keys(dataset, name, clients)
    if dataset.kind != "class" and name in CLASS_PARTITIONS:
        raise ConfigError(
            f"the partition {name} divides samples by class, and the target of {dataset.name} is "
            f"{KIND_WORDS[dataset.kind]}; take iid, or clients of the data's own"
        )
    rows = divide_samples(name, keys, len(names), seed, checked)
    rows, time_notes = leave_out_timeless(rows, times)
    if small_clients == "auto":
        small_clients = "drop" if name == "by_column" else "error"
    if min_rows is not None and min_rows < 1:
        raise ConfigError(f"min_rows must be at least 1, got {min_rows}")
    parts = [
        split_parts(
            mine,
            test=test,
            validation=validation,
            seed=seed,
            client=u,
            labels=dataset.y[mine] if is_stratified else None,
            split_number=split_number,
            times=None if times is None else times.values[mine],
            groups=None if dataset.groups is None else dataset.groups[mine],
        )
        for u, mine in enumerate(rows)
    ]
    sizes = [(len(train), len(held_out), len(tests)) for train, held_out, tests in parts]
    usable, notes = select_usable_clients(dataset, names, rows, sizes, small_clients, min_clients, min_rows)
    members = [Client(names[u], *parts[u]) for u in usable]
    if name == "by_column" and min_rows is None:
        notes += suggest_min_rows(members)
    notes += describe_groups(dataset, members)
    description: dict[str, Any] = {
        "name": get_short_name(name),
        "options": checked,
        "clients": len(names),
        "seed": seed,
        "fractions": {"test": test, "validation": validation},
    }
    description |= {"stratified": True} if is_stratified else {}
    description |= {"split": split_number} if split_number else {}
    description |= {"grouped": True} if dataset.groups is not None else {}
    description |= {"min_rows": min_rows} if min_rows is not None else {}
    if times is not None:
        description["time_column"] = times.column
        time_notes += describe_cuts(dataset, times, members)
    return _assemble(dataset, ClientIndex.from_clients(members), description, (*notes, *time_notes), scaling)


def _find_names_and_keys(dataset: Dataset, partition: str, clients: int | None) -> tuple[tuple[str, ...], Array]:
    """Return the names of the clients, and the keys (n,) to divide by: labels, or natural clients."""
    if partition == "by_column":
        if dataset.owner is None:
            raise DataError(
                f"{dataset.name} has no clients of its own; take another partition, such as dirichlet or iid"
            )
        if clients not in (None, len(dataset.owners)):
            raise ConfigError(
                f"{dataset.name} has {len(dataset.owners)} clients of its own, got {clients} as the number of clients; "
                "leave the number out, or take another partition, such as dirichlet"
            )
        return dataset.owners, dataset.owner
    n = DEFAULT_CLIENTS.get(partition, dataset.default_clients) if clients is None else clients
    if n < 1:
        raise ConfigError(f"clients must be at least 1, got {n}")
    return tuple(str(u) for u in range(n)), dataset.y


def _federate_saved(
    dataset: Dataset, name: str, options: Mapping[str, Any] | None, clients: int | None, scaling: Scaling
) -> Federation:
    check_saved_partition(name)
    if options:
        raise ConfigError(f"the saved partition {name!r} takes no options, got {', '.join(options)}")
    federation = restore_federation(dataset, load_manifest(name))
    if clients not in (None, federation.n_clients):
        raise ConfigError(
            f"the saved partition {name!r} has {federation.n_clients} clients, not {clients}; leave the number out"
        )
    saved = federation.partition.get("scaling", "client")
    if dataset.encode is not None and scaling not in ("auto", saved):
        raise ConfigError(f"the saved partition {name!r} has the scaling {saved}, not {scaling}; leave --scaling out")
    return federation


def restore_federation(dataset: Dataset, manifest: Mapping[str, Any]) -> Federation:
    """Build the federation that a manifest describes, with its exact training, validation and test parts.

    Raises:
        DataError: the manifest is broken, or describes other data.
    """
    checked = check_manifest(dict(manifest))
    about = checked["data"]
    if about["fingerprint"] != dataset.fingerprint:
        raise DataError(
            f"the partition was made for {about['name']!r} with {about['n']} samples (fingerprint "
            f"{about['fingerprint'][:12]}), not for {dataset.name!r} with {len(dataset.y)} samples "
            f"(fingerprint {dataset.fingerprint[:12]}); load the same data, or make a new partition"
        )
    if not checked["partition"].get("grouped"):
        dataset = replace(dataset, groups=None)
    check_two_clients(dataset.name, [entry["name"] for entry in checked["clients"]])
    members = ClientIndex.from_clients(
        Client(entry["name"], *(np.array(entry[part], dtype=np.int64) for part in PARTS))
        for entry in checked["clients"]
    )
    note = "A saved partition fixes the clients and their training, validation and test parts."
    scaling = checked["partition"].get("scaling", "client")
    return _assemble(dataset, members, checked["partition"], (note,), scaling)


def _assemble(
    dataset: Dataset, members: ClientIndex, partition: Mapping[str, Any], notes: tuple[str, ...], scaling: Scaling
) -> Federation:
    """Build the federation; features of a table are fitted on each client's training part."""
    y, target_scale, schema = dataset.y, None, dataset.schema
    notes = (*notes, *describe_target_kind(dataset))
    if dataset.kind in NUMBER_KINDS:
        y, target_scale = scale_target(y, [client.train for client in members])
        schema = schema and schema.model_copy(update=describe_target(target_scale))
    x, preparation = dataset.x, dict[str, Array]()
    if dataset.encode is not None:
        rows = [client.all for client in members]
        joint = np.concatenate(rows)
        if len(np.unique(joint)) < len(joint):
            raise DataError(
                f"{dataset.name}: clients that share rows cannot be used, because the "
                "features are fitted per client; give each row to one client"
            )
        chosen: Scaling = "federated" if scaling == "auto" else scaling
        x, constants, borrowed = dataset.encode([client.train for client in members], rows, chosen)
        preparation = dict(zip(members.names, constants, strict=True))
        if dataset.schema and dataset.schema.numbers:
            notes = (
                *notes,
                SCALING_NOTES[chosen],
                *_describe_borrowed(dataset.schema.numbers, members.names, borrowed),
            )
        if chosen != "client":
            partition = {**partition, "scaling": chosen}
    return Federation(
        name=dataset.name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=dataset.classes,
        clients=members,
        shift=None if dataset.shift is None else torch.from_numpy(dataset.shift),
        scale=None if dataset.scale is None else torch.from_numpy(dataset.scale),
        partition=partition,
        notes=(*dataset.notes, *notes),
        source=dataset.fingerprint,
        schema=schema,
        preparation=preparation,
        target_scale=target_scale,
        groups=dataset.groups,
        labels=dataset.labels,
        outputs=dataset.outputs,
    )


def _describe_borrowed(numbers: Sequence[str], names: Sequence[str], borrowed: Array) -> list[str]:
    """Name the columns whose deviation some clients took from all clients, by `borrowed` (N, K)."""
    columns = [numbers[k] for k in np.flatnonzero(borrowed.any(axis=0)).tolist()]
    if not columns:
        return []
    clients = [names[u] for u in np.flatnonzero(borrowed.any(axis=1)).tolist()]
    return [
        f"{len(clients)} of {len(names)} clients ({list_some(clients, MAX_CLIENTS_IN_NOTE)}) have too few different "
        f"values in {list_columns(columns)} and take the deviation of all clients there."
    ]


def load_federation(
    data: str | Path = "digits",
    *,
    partition: str | None = None,
    clients: int | None = None,
    data_dir: Path | str | None = None,
    client_column: str | None = None,
    target: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    partition_options: Mapping[str, Any] | None = None,
    test: float = 0.25,
    validation: float = 0.1,
    seed: int | None = None,
    small_clients: SmallClients = "auto",
    min_rows: int | None = None,
    stratify: bool | None = None,
    scaling: Scaling = "auto",
    split: SplitKind = "random",
    time_column: str | None = None,
    split_number: int = 0,
) -> Federation:
    """Load data by name, from a table file or from a folder of images, and divide it among clients.

    Args:
        data: name of the data, or path of a table or of a folder of images.
        partition: name of a partition, or of a saved one; "file.py:function" names your own. By default the data's
            own clients, or `dirichlet`.
        clients: number of clients; by default the number that suits the data.
        data_dir: folder to look in for image sets.
        client_column: column of a table that names each row's client.
        target: column of a table to predict, or several: labels of two values each, or numbers.
        options: options of the data.
        partition_options: options of the partition.
        test: fraction of a client's samples for testing.
        validation: fraction of a client's training samples for validation.
        seed: seed of the partition and of the split into parts.
        small_clients: "error" names clients that are too small in an error, "drop" leaves them out, "auto" leaves out
            clients of the data's own.
        min_rows: leave out clients with fewer samples; by default those without a sample to train and one to test.
        stratify: whether each part of a client has the same share of every class; by default the partition decides.
        scaling: rows whose constants standardise the numbers of a table: "federated", which is "auto" (all training
            rows, from shared counts, sums and sums of squares), "client" (each client's own training rows), "global"
            (all training rows in one place).
        split: what decides the part of a sample: `random`, or `time`, where a client's oldest rows are for training
            and its newest ones for testing.
        time_column: column of dates or numbers of a table with the age of rows; by default the only date column.
        split_number: number of a random split; each has the same clients with other parts.

    Raises:
        ConfigError: unknown names, or options that do not fit.
        DataError: the data cannot be found, read or divided so.

    Examples:
        >>> data = load_federation("digits", partition="dirichlet", clients=4)
        >>> data
        Federation('digits', 4 clients, 1797 samples, 10 classes)
        >>> int(data.label_counts().sum()), len(data.clients[0].train) > len(data.clients[0].test)
        (1797, True)
    """
    source_options = dict(options or {})
    if clients is not None and partition in (None, "by_column") and not (is_table(data) or is_image_folder(data)):
        source = SOURCES[resolve_source_name(str(data))]
        if any(option.name == "clients" for option in list_options(source)):
            source_options.setdefault("clients", clients)  # the source makes clients: let it make that many
    if target is not None and not isinstance(target, str):
        target = ",".join(target)
    dataset = load_data(data, data_dir=data_dir, options=source_options, client_column=client_column, target=target)
    return partition_dataset(
        dataset,
        partition=partition,
        options=partition_options,
        clients=clients,
        test=test,
        validation=validation,
        seed=seed,
        small_clients=small_clients,
        min_rows=min_rows,
        stratify=stratify,
        scaling=scaling,
        split=split,
        time_column=time_column,
        split_number=split_number,
    )
