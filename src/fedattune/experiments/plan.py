"""An experiment made ready: everything is built and checked before anything is trained or written."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.compare import BASELINE
from ..core.errors import ConfigError, DataError, FedAttuneError, ModelError, did_you_mean
from ..core.options import build, list_options, look_up
from .config import Experiment
from .validate import (
    ALL_METHODS,
    AssignedOptions,
    KnownOptions,
    assign_options,
    expand_names,
    find_wrong_values,
)

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..data import Dataset, Federation

TABLE_SOURCE = "table"  # name of the data source of a user's own file


TABLE_COLUMN_OPTIONS = {"client_column", "target"}  # of the table, given by options of their own


@dataclass(frozen=True)
class Plan:
    """The data, the methods and the model of an experiment, checked against each other."""

    experiment: Experiment  # algorithms spelled out
    federation: "Federation"
    algorithms: Mapping[str, "Algorithm"]
    options: Mapping[str, Mapping[str, Any]]  # of each algorithm, those that were given
    model_options: Mapping[str, Any]


def make_plan(experiment: Experiment, federation: "Federation | None" = None) -> Plan:
    """Build all parts of the experiment and check that they fit together; nothing is written but caches.

    `federation` is the experiment's data, if they are there already.

    Raises:
        ConfigError, DataError, ModelError: they do not.
    """
    from ..algorithms import ALGORITHMS
    from ..models import make_model
    from ..training.setup import build_trained_module, hold_out_newcomers

    experiment = _expand_algorithms(experiment)
    known = _known_options(experiment, methods=True)
    if federation is None:
        dataset = load_dataset(experiment, known)
        chosen = _assign_all(experiment, known, dataset.default_partition)
    else:
        chosen = _assign_all(experiment, known, str(federation.partition["name"]))
    problems: list[str] = []
    algorithms = {}
    for name in experiment.algorithms:
        with _collect_errors(problems):
            algorithms[name] = build(name, ALGORITHMS[name], chosen["algorithm"][name])
    with _collect_errors(problems):
        federation = federation or federate_dataset(experiment, dataset, chosen)
        hold_out_newcomers(federation, experiment)
    if problems or federation is None:
        raise ConfigError("; ".join(problems))
    model_options = chosen["model"][experiment.model]
    module = make_model(
        experiment.model,
        federation,
        options=model_options,
        seed=experiment.seed,
        batch_size=experiment.batch_size,
        engine=experiment.engine,
    )
    for name, algorithm in algorithms.items():
        with _collect_errors(problems):
            try:
                build_trained_module(algorithm, module, federation, experiment.seed)
            except FedAttuneError as error:
                raise type(error)(f"{name}: {error}") from error
    if problems:
        raise ModelError("; ".join(problems))
    return Plan(experiment, federation, algorithms, chosen["algorithm"], model_options)


def prepare_command(command: str, experiment: Experiment) -> tuple[Experiment, list[str]]:
    """Fit the algorithms to the command: `run` trains one method, and `compare` needs the baseline.

    Returns:
        The experiment and the notes about what was changed.

    Raises:
        ConfigError: `run` was given several methods.

    """
    names = experiment.algorithms
    if command == "run" and (len(names) > 1 or ALL_METHODS in names):
        raise ConfigError(
            f"run trains one algorithm, got {', '.join(names)}; use fedattune compare for several"
        )
    if command == "run" or {BASELINE, ALL_METHODS} & set(names):
        return experiment, []
    with_baseline = experiment.model_copy(update={"algorithms": (BASELINE, *names)})
    return with_baseline, [f"{BASELINE} was added, for the others are compared with it."]


def prepare_data(experiment: Experiment) -> "Federation":
    """Only the federation of the experiment; options of models and methods count where these were named."""
    named = bool({"algorithms", "model"} & experiment.model_fields_set)
    experiment = _expand_algorithms(experiment)
    known = _known_options(experiment, methods=bool(experiment.set) and named)
    dataset = load_dataset(experiment, known)
    return federate_dataset(experiment, dataset, _assign_all(experiment, known, dataset.default_partition))


def load_dataset(experiment: Experiment, known: KnownOptions) -> "Dataset":
    """The samples, before they are divided."""
    from ..data import load_data

    ((source, wanted),) = known["data"].items()
    names = (source, "data", "")
    keys = (
        (key.rpartition("."), value)
        for key, value in sorted(experiment.set.items(), key=lambda i: "." in i[0])
    )
    given = {option: value for (name, _, option), value in keys if name in names and option in wanted}
    if experiment.clients and "clients" in wanted and experiment.partition in (None, "by_column"):
        given.setdefault("clients", experiment.clients)  # the source makes its clients: that many
    return load_data(
        experiment.data,
        data_dir=experiment.data_dir,
        options=given,
        client_column=experiment.client_column,
        target=experiment.target,
    )


def federate_dataset(experiment: Experiment, dataset: "Dataset", chosen: AssignedOptions) -> "Federation":
    """The samples divided among clients as the experiment says."""
    from ..data import federate

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
        stratify=experiment.stratify,
    )


@contextmanager
def _collect_errors(problems: list[str]) -> Iterator[None]:
    """Put an error's message into `problems`, to be reported with those of the other parts."""
    try:
        yield
    except FedAttuneError as error:
        problems.append(str(error))


def _expand_algorithms(experiment: Experiment) -> Experiment:
    from ..algorithms import ALGORITHMS

    return experiment.model_copy(update={"algorithms": expand_names(experiment.algorithms, ALGORITHMS)})


def _known_options(experiment: Experiment, *, methods: bool) -> KnownOptions:
    """Options of everything in use that is known before the data is loaded.

    Raises:
        ConfigError: unknown names and options, all of them in one message.
    """
    from ..algorithms import ALGORITHMS
    from ..data import PARTITIONS

    problems: list[str] = []
    known: dict[str, dict[str, list[str]]] = {}
    if methods:
        from ..core.hardware import check_device
        from ..training.backends.ray import check_ray

        for name in experiment.algorithms:
            with _collect_errors(problems):
                found = _option_names(look_up("algorithm", name, ALGORITHMS))
                known.setdefault("algorithm", {})[name] = found
        with _collect_errors(problems):
            known["model"] = {experiment.model: model_option_names(experiment.model)}
        with _collect_errors(problems):
            check_device(experiment)
        with _collect_errors(problems):
            check_ray(experiment)
    with _collect_errors(problems):
        known["data"] = _data_option_names(experiment.data)
    if experiment.partition:
        with _collect_errors(problems):
            known["partition"] = {experiment.partition: _partition_option_names(experiment.partition)}
    if experiment.save_partition in PARTITIONS:
        problems.append(
            f"--save-partition {experiment.save_partition}: this is a built-in partition; choose another name"
        )
    names = {name for group in known.values() for name in group}
    complete = experiment.partition and not problems  # else an option may belong to what is not known
    sure = {
        key: value for key, value in experiment.set.items() if complete or key.rpartition(".")[0] in names
    }
    with _collect_errors(problems):
        assign_options(sure, known)
    if problems:  # else values are checked when the methods are built, together with what needs the data
        for name in known.get("algorithm", {}):
            problems += find_wrong_values(name, ALGORITHMS[name], experiment.set)
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return known


def _assign_all(experiment: Experiment, known: KnownOptions, default: str) -> AssignedOptions:
    """The options given, shared out; only the loaded data knows its `default` partition."""
    partition = experiment.partition or default
    return assign_options(
        experiment.set, {**known, "partition": {partition: _partition_option_names(partition)}}
    )


def _option_names(factory: Callable[..., Any]) -> list[str]:
    return [option.name for option in list_options(factory)]


def _data_option_names(data: str) -> dict[str, list[str]]:
    from ..data import SOURCES, is_table, load_table, resolve_source_name

    if not is_table(data):
        name = resolve_source_name(data)
        return {name: _option_names(SOURCES[name])}
    if not Path(data).is_file():
        raise DataError(f"there is no file {data}; give the path of a .csv or .parquet table")
    return {TABLE_SOURCE: [name for name in _option_names(load_table) if name not in TABLE_COLUMN_OPTIONS]}


def _partition_option_names(name: str) -> list[str]:
    """Options of a partition; a saved one has none."""
    from ..data import PARTITIONS, list_partitions
    from ..data.manifest import resolve_manifest_path

    if name in PARTITIONS:
        return _option_names(PARTITIONS[name])
    if not resolve_manifest_path(name).exists():
        known = did_you_mean(name, [*PARTITIONS, *list_partitions()])
        raise ConfigError(f"unknown partition {name!r}, and no such file; {known}")
    return []


def model_option_names(name: str) -> list[str]:
    """Options of the model's factory: of one of the user's, all after the input shape and number of classes."""
    from ..models import MODELS, find_factory

    factory = find_factory(name)
    if name in MODELS:
        return _option_names(factory)
    try:
        return list(inspect.signature(factory).parameters)[2:]
    except (TypeError, ValueError):  # a factory written in C
        return []
