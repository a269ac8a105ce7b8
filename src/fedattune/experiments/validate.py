"""Check the names and options of an experiment, and give every `--set` option to its owner."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, DataError, FedAttuneError, did_you_mean
from ..core.options import check_options, list_options
from ..core.own_code import get_short_name, is_reference, load_function
from .config import Experiment

ALL_METHODS = "all"

TABLE_SOURCE = "table"
"""Name of the data source that reads a table from a file."""

TABLE_COLUMN_OPTIONS = {"client_column", "target", "drop_columns", "missing"}
"""Options of that source that the experiment has as fields."""

KnownOptions = Mapping[str, Mapping[str, Collection[str]]]
"""Kind -> name in use -> its options."""

AssignedOptions = dict[str, dict[str, dict[str, Any]]]
"""Kind -> name in use -> option -> value."""


@contextmanager
def collect_errors(problems: list[str]) -> Iterator[None]:
    """Add the message of an error to `problems`, so that one message can report them all."""
    try:
        yield
    except FedAttuneError as error:
        problems.append(str(error))


def expand_names(names: Iterable[str], all_names: Collection[str]) -> tuple[str, ...]:
    """List each name once, with `all_names` in the place of `all`."""
    return tuple(dict.fromkeys(one for name in names for one in (all_names if name == ALL_METHODS else (name,))))


def find_known_options(experiment: Experiment, *, methods: bool, problems: list[str]) -> KnownOptions:
    """Find the options of everything that the experiment names; the data need not be loaded for this.

    `methods` looks at the methods, the model and the hardware too. `problems` receives unknown names and options, and,
    if there are any, wrong values of the methods' options.
    """
    from ..algorithms import ALGORITHMS
    from ..algorithms.own import check_distinct_names, find_method
    from ..data import PARTITIONS

    known_options: dict[str, dict[str, Collection[str]]] = {}
    if methods:
        from ..core.hardware import check_device
        from ..training.backends.ray import check_ray
        from ..training.uploads.pipeline import check_upload_steps

        names = expand_names(experiment.algorithms, ALGORITHMS)
        with collect_errors(problems):
            check_distinct_names(names)
        for name in names:
            with collect_errors(problems):
                factory = find_method(name)
                known_options.setdefault("algorithm", {})[name] = _list_option_names(factory)
        with collect_errors(problems):
            known_options["model"] = {experiment.model: list_model_options(experiment.model)}
        for check in (check_device, check_ray, check_upload_steps):
            with collect_errors(problems):
                check(experiment)
    with collect_errors(problems):
        known_options["data"] = _list_data_options(experiment.data)
    if experiment.partition:
        with collect_errors(problems):
            known_options["partition"] = {experiment.partition: list_partition_options(experiment.partition)}
    if experiment.save_partition in PARTITIONS:
        problems.append(
            f"--save-partition {experiment.save_partition}: this is a built-in partition; choose another name"
        )
    owners = {get_short_name(name) for group in known_options.values() for name in group}
    all_known = experiment.partition and not problems  # otherwise an option may belong to an unknown name
    sure = {k: v for k, v in experiment.set.items() if all_known or k.rpartition(".")[0] in owners}
    assign_options(sure, known_options, problems)
    if problems:  # otherwise building the methods checks the values
        assignment = assign_options(experiment.set, known_options, [])
        for name, values in assignment.get("algorithm", {}).items():
            with collect_errors(problems):
                check_options(get_short_name(name), find_method(name), values)
    return known_options


def assign_options(
    options: Mapping[str, Any], known_options: KnownOptions, problems: list[str] | None = None
) -> AssignedOptions:
    """Give `option: value` and `name.option: value` to their owners; the second form wins.

    An option without a name goes to every algorithm in use that has it. `model.`, `partition.` and `data.` are names,
    too. `problems` receives options that nothing in use has, or that could belong to two kinds of thing.
    """
    errors: list[str] = []
    assignment: AssignedOptions = {kind: {name: {} for name in names} for kind, names in known_options.items()}
    candidates = [(kind, name, own) for kind, group in known_options.items() for name, own in group.items()]
    for key, value in sorted(options.items(), key=lambda item: "." in item[0]):
        prefix, _, option = key.rpartition(".")
        matches = [
            (kind, name, own)
            for kind, name, own in candidates
            if prefix in ("", name, get_short_name(name)) or prefix == kind != "algorithm"
        ]
        owners = [(kind, name) for kind, name, own in matches if option in own]
        if prefix and not matches:
            hint = did_you_mean(prefix, [get_short_name(name) for _, name, _ in candidates])
            errors.append(f"--set {key}: nothing called {prefix!r} is used here; {hint}")
        elif not owners:
            lacks = f"{prefix} has no" if prefix else "nothing used here has an"
            hint = did_you_mean(option, {one for _, _, own in matches for one in own})
            errors.append(f"--set {key}: {lacks} option {option!r}; {hint}")
        elif not prefix and len({kind for kind, _ in owners}) > 1:
            ways = " or ".join(f"{get_short_name(name)}.{option}" for _, name in owners)
            errors.append(f"--set {key}: {option!r} could mean several things; write {ways}")
        for kind, name in owners:
            assignment[kind][name][option] = value
    if problems is not None:
        problems += errors
    elif errors:
        raise ConfigError("; ".join(errors))
    return assignment


def list_partition_options(name: str) -> list[str]:
    """List the options of a partition; a saved one has none."""
    from ..data import PARTITIONS
    from ..data.manifest import check_saved_partition

    if is_reference(name):
        return _list_option_names(load_function(name, "the partition"))
    if name in PARTITIONS:
        return _list_option_names(PARTITIONS[name])
    check_saved_partition(name)
    return []


def list_model_options(name: str) -> list[str]:
    """List the options of a model's factory; a user's factory takes the input shape and the classes before them."""
    from ..models import MODELS, find_factory

    factory = find_factory(name)
    if name in MODELS:
        return _list_option_names(factory)
    try:
        return list(inspect.signature(factory).parameters)[2:]
    except (TypeError, ValueError):  # a factory written in C
        return []


def _list_data_options(data: str) -> dict[str, Collection[str]]:
    from ..data import SOURCES, is_table, load_table, resolve_source_name

    if not is_table(data):
        name = resolve_source_name(data)
        return {name: _list_option_names(SOURCES[name])}
    if not Path(data).is_file():
        raise DataError(f"there is no file {data}; give the path of a .csv or .parquet table")
    return {TABLE_SOURCE: {*_list_option_names(load_table)} - TABLE_COLUMN_OPTIONS}


def _list_option_names(factory: Callable[..., Any]) -> list[str]:
    return [option.name for option in list_options(factory)]
