"""An experiment made ready: everything is built and checked before anything is trained or written."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choices import Assigned, Known, assign
from .errors import ConfigError, DataError, did_you_mean
from .experiment import Experiment
from .registry import build, lookup, options

if TYPE_CHECKING:
    from .core import Algorithm
    from .data import Dataset, Federation

TABLE_SUFFIXES = (".csv", ".parquet", ".pq")
TABLE = "table"  # name of the data source of a user's own file
OWN_OPTIONS = {"client_column", "target"}  # of the table, given by options of their own


@dataclass(frozen=True)
class Plan:
    """The data, the methods and the model of an experiment, checked against each other."""

    experiment: Experiment  # algorithms spelled out
    federation: "Federation"
    algorithms: Mapping[str, "Algorithm"]
    options: Mapping[str, Mapping[str, Any]]  # of each algorithm, those that were given
    model_options: Mapping[str, Any]


def is_table(data: str) -> bool:
    """Whether the data is a file of the user's own."""
    return data.lower().endswith(TABLE_SUFFIXES) or Path(data).is_file()


def prepare(experiment: Experiment) -> Plan:
    """Build all parts of the experiment and check that they fit together; nothing is written but caches.

    Raises:
        ConfigError, DataError, ModelError: they do not.
    """
    from .algorithms import ALGORITHMS
    from .models import make_model

    if experiment.algorithms == ("all",):
        experiment = experiment.model_copy(update={"algorithms": tuple(ALGORITHMS)})
    for name in experiment.algorithms:
        lookup("algorithm", name, ALGORITHMS)
    known: Known = {
        "algorithm": {name: _option_names(ALGORITHMS[name]) for name in experiment.algorithms},
        "model": {experiment.model: _model_options(experiment.model)},
    }
    _check_device(experiment)
    if experiment.partition:  # else known only after the data is loaded
        assign(experiment.set, {**known, **_known_data(experiment, experiment.partition)})
    dataset = load_dataset(experiment)
    chosen = assign(
        experiment.set,
        {**known, **_known_data(experiment, experiment.partition or dataset.default_partition)},
    )
    algorithms = {
        name: build(name, ALGORITHMS[name], chosen["algorithm"][name]) for name in experiment.algorithms
    }
    federation = federate_dataset(experiment, dataset, chosen)
    model_options = chosen["model"][experiment.model]
    make_model(experiment.model, federation, options=model_options, seed=experiment.seed)
    asked = experiment.cohort_size(federation.n_clients)
    if asked > federation.n_clients:
        raise ConfigError(
            f"--cohort {experiment.cohort} asks more clients per round than the {federation.n_clients} "
            "there are; give a smaller number, or a fraction such as 0.5"
        )
    return Plan(experiment, federation, algorithms, chosen["algorithm"], model_options)


def prepare_data(experiment: Experiment) -> "Federation":
    """Only the federation of the experiment; options of models and methods count where these were named."""
    known: Known = {}
    if experiment.set.keys() and {"algorithms", "model"} & experiment.model_fields_set:
        from .algorithms import ALGORITHMS

        names = tuple(ALGORITHMS) if experiment.algorithms == ("all",) else experiment.algorithms
        known = {
            "algorithm": {name: _option_names(lookup("algorithm", name, ALGORITHMS)) for name in names},
            "model": {experiment.model: _model_options(experiment.model)},
        }
    dataset = load_dataset(experiment)
    partition = experiment.partition or dataset.default_partition
    return federate_dataset(
        experiment, dataset, assign(experiment.set, {**known, **_known_data(experiment, partition)})
    )


def load_dataset(experiment: Experiment) -> "Dataset":
    """The samples, before they are divided."""
    from .data import load

    names = (TABLE if is_table(experiment.data) else experiment.data, "data", "")
    mine = _known_data(experiment, None)["data"]
    wanted = [option for known in mine.values() for option in known]
    keys = (
        (key.rpartition("."), value)
        for key, value in sorted(experiment.set.items(), key=lambda i: "." in i[0])
    )
    given = {option: value for (name, _, option), value in keys if name in names and option in wanted}
    return load(
        experiment.data,
        data_dir=experiment.data_dir,
        options=given,
        client_column=experiment.client_column,
        target=experiment.target,
    )


def federate_dataset(experiment: Experiment, dataset: "Dataset", chosen: Assigned) -> "Federation":
    """The samples divided among clients as the experiment says."""
    from .data import PARTITIONS, federate

    if experiment.save_partition in PARTITIONS:
        raise ConfigError(
            f"--save-partition {experiment.save_partition}: this is a built-in partition; choose another name"
        )
    name = experiment.partition or dataset.default_partition
    return federate(
        dataset,
        partition=name,
        options=chosen["partition"][name],
        clients=experiment.clients,
        test=experiment.test,
        validation=experiment.validation,
        seed=experiment.split_seed,
        small_clients=experiment.small_clients,
    )


def _option_names(factory: Callable[..., Any]) -> list[str]:
    return [option.name for option in options(factory)]


def _known_data(experiment: Experiment, partition: str | None) -> Known:
    """Options of the data source and the partition in use; a saved partition has none."""
    from .data import PARTITIONS, SOURCES, table

    if is_table(experiment.data):
        if not Path(experiment.data).is_file():
            raise DataError(f"there is no file {experiment.data}; give the path of a .csv or .parquet table")
        source = {TABLE: [name for name in _option_names(table) if name not in OWN_OPTIONS]}
    elif experiment.data in SOURCES:
        source = {experiment.data: _option_names(SOURCES[experiment.data])}
    else:
        hint = did_you_mean(experiment.data, SOURCES)
        raise ConfigError(f"unknown data {experiment.data!r}; {hint}, or a path ending in .csv or .parquet")
    split = (
        {partition: _option_names(PARTITIONS[partition]) if partition in PARTITIONS else []}
        if partition
        else {}
    )
    return {"data": source, "partition": split}


def _model_options(name: str) -> list[str]:
    """Options of the model's factory; none of one that cannot be found, which making it will say better."""
    from .models import MODELS

    if ":" not in name:
        return _option_names(lookup("model", name, MODELS))
    if os.getcwd() not in sys.path:  # as python -m does, so that a factory beside the user's data is found
        sys.path.append(os.getcwd())
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
        return list(inspect.signature(factory).parameters)[2:]  # after the input shape and number of classes
    except Exception:
        return []


def _check_device(experiment: Experiment) -> None:
    if experiment.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: PyTorch finds no CUDA device here; use --device auto or cpu")
