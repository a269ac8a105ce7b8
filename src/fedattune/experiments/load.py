"""Load an experiment, check its names, give each option to its owner, and report all mistakes in one message."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.errors import ConfigError, DataError, FedAttuneError, did_you_mean, suggest_name
from ..core.io import read_scalar, read_yaml
from ..core.options import check_options, describe_errors, list_options, write_option
from ..core.own_code import confirm_references, get_short_name, is_reference, list_references, load_function
from .config import Experiment, flatten_options
from .output import OutputOptions

COMMAND_LINE_ONLY = {
    "resume": "continues an experiment with its own options",
    "config": "names such a file itself",
    "allow_code": "says that you know the code that a file names",
}
"""Options that a file cannot hold, and why."""


def parse_set(items: Iterable[str]) -> dict[str, Any]:
    """Read `name.option=value` items of the command line; values are YAML scalars."""
    pairs = [(item, *item.partition("=")) for item in items]
    if wrong := [item for item, key, equals, _ in pairs if not key.strip() or not equals]:
        raise ConfigError(
            f"--set {', '.join(wrong)}: expected option=value or name.option=value, such as fedmcsa.sigma=50"
        )
    return {key.strip(): read_scalar(value) for _, key, _, value in pairs}


def load_experiment(path: Path | None, overrides: Mapping[str, Any]) -> Experiment:
    """Load an experiment; see `load_options`."""
    return load_options(path, overrides)[0]


def load_options(
    path: Path | None,
    overrides: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    errors: Iterable[str] = (),
) -> tuple[Experiment, OutputOptions]:
    """Load an experiment and its output options from a YAML file, which wins over defaults, and the command line.

    One error reports all unknown keys and wrong values. Code that only the file names is refused.
    """
    problems = list(errors)
    overrides = {_canonical_key(key): value for key, value in overrides.items()}
    in_file = _read_file(path, problems) if path else {}
    if ("steps" in overrides) != ("epochs" in overrides):
        # The command line's unit of work replaces the file's.
        in_file.pop("epochs" if "steps" in overrides else "steps", None)
    values = {_canonical_key(key): value for key, value in (defaults or {}).items()} | in_file | overrides
    if isinstance(in_file.get("set"), Mapping):
        set_overrides = overrides.get("set", {})
        bare = {key for key in set_overrides if "." not in key}
        set_in_file = {
            key: value
            for key, value in flatten_options(in_file["set"]).items()
            if key.rpartition(".")[2] not in bare and not _is_replaced(key, in_file, overrides)
        }
        values["set"] = set_in_file | set_overrides

    def locate(key: str) -> str:
        name = "json" if key == "json_file" else key
        is_in_file = key in in_file and key not in overrides
        return f"{path}: {name}" if is_in_file else write_option(name)

    def report_unknown(key: str) -> str:
        hint = suggest_name(key, Experiment.flat_fields())
        return f"unknown option {locate(key)}{', ' if hint else ''}{hint}"

    if path:
        from_file = {key: value for key, value in in_file.items() if key not in overrides}
        allowed = _validate(OutputOptions, {"allow_code": overrides.get("allow_code", ())})[0]
        named = [*list_references(overrides), *(allowed.allow_code if allowed else ())]
        confirm_references(list_references(from_file), named, path)
    for_output = {key: values.pop(key) for key in OutputOptions.model_fields if key in values}
    experiment, wrong = _validate(Experiment, values)
    output, wrong_output = _validate(OutputOptions, for_output)
    for error in filter(None, (wrong, wrong_output)):
        problems += describe_errors(error, locate, report_unknown)
    if experiment and output and not problems:
        return experiment, output
    if wrong:
        bad = {one["loc"][0] for one in wrong.errors()}
        if bad & {"algorithms", "model", "data", "partition"}:
            bad.add("set")  # whose options may belong to a name that is not known
        experiment, _ = _validate(Experiment, {key: value for key, value in values.items() if key not in bad})
    if experiment:
        find_known_options(experiment, methods=True, problems=problems)
    raise ConfigError("; ".join(dict.fromkeys(problems)))


def _validate(schema: Any, values: Mapping[str, Any]) -> tuple[Any, ValidationError | None]:
    try:
        return schema(**values), None
    except ValidationError as error:
        return None, error


def _canonical_key(key: str) -> str:
    name = key.replace("-", "_")
    return {"algorithm": "algorithms", "json": "json_file"}.get(name, name)


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read the options in a file; add unknown and repeated keys to `problems`."""
    allowed_keys = Experiment.flat_fields().keys() | OutputOptions.model_fields.keys()
    values: dict[str, Any] = {}
    for key, value in read_yaml(path).items():
        name = _canonical_key(key)
        if name in COMMAND_LINE_ONLY:
            problems.append(f"{path}: {key} stands only on the command line: --{name} {COMMAND_LINE_ONLY[name]}")
        elif name not in allowed_keys:
            hint = suggest_name(name, allowed_keys)
            problems.append(f"{path}: unknown key {key!r}{', ' if hint else ''}{hint}")
        elif name in values:
            problems.append(f"{path}: the key {key!r} is given twice")
        else:
            values[name] = value
    return values


def _is_replaced(key: str, in_file: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Tell whether the command line replaced the owner of this option in the file, such as the model."""

    def list_names(values: Mapping[str, Any]) -> set[str]:
        entries = [values.get(key) for key in ("data", "partition", "model", "algorithms")]
        parts = [part for one in entries for part in (one if isinstance(one, list | tuple) else [one])]
        words = {word.strip() for part in parts if isinstance(part, str) for word in part.split(",")}
        return words | {get_short_name(word) for word in words}

    owner = key.rpartition(".")[0]
    return bool(owner) and owner in list_names(in_file) and owner not in list_names({**in_file, **overrides})


# --- names and options of an experiment --------------------------------------------------------------

ALL_METHODS = "all"
TABLE_SOURCE = "table"
"""Name of the data source that reads a table from a file."""
TABLE_COLUMN_OPTIONS = {
    "client_column", "target", "group_column", "drop_columns", "missing", "normalize_names", "client_feature",
}  # fmt: skip
"""Options of that source that the experiment has as fields."""
FOLDER_SOURCE = "folder"
"""Name of the data source that reads a folder of images."""
IMAGE_SIZE = "image_size"
"""Option of that source that the experiment has as a field."""
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


def find_known_options(experiment: Experiment, *, methods: bool, problems: list[str] | None = None) -> KnownOptions:
    """Find the options of everything that the experiment names; the data need not be loaded for this.

    `methods` looks at the methods, the model and the hardware too. `problems` receives unknown names and options, and,
    if there are any, wrong values of the methods' options; without it, they are raised.
    """
    is_raised = problems is None
    problems = [] if problems is None else problems
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
            f"{write_option('save_partition')} {experiment.save_partition}: this is a built-in partition; choose "
            "another name"
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
    if is_raised and problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return known_options


def assign_options(
    options: Mapping[str, Any], known_options: KnownOptions, problems: list[str] | None = None
) -> AssignedOptions:
    """Give `option: value` and `name.option: value` to their owners; the second form wins.

    An option without a name goes to every algorithm in use that has it. `model.`, `partition.` and `data.` are names,
    too. `problems` receives options that nothing in use has, or that could belong to two kinds of thing.
    """
    errors, flag = list[str](), write_option("set")
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
            errors.append(f"{flag} {key}: nothing called {prefix!r} is used here; {hint}")
        elif not owners:
            lacks = f"{prefix} has no" if prefix else "nothing used here has an"
            hint = did_you_mean(option, {one for _, _, own in matches for one in own})
            errors.append(f"{flag} {key}: {lacks} option {option!r}; {hint}")
        elif not prefix and len({kind for kind, _ in owners}) > 1:
            ways = " or ".join(f"{get_short_name(name)}.{option}" for _, name in owners)
            errors.append(f"{flag} {key}: {option!r} could mean several things; write {ways}")
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
    from ..data import SOURCES, is_image_folder, is_table, load_image_folder, load_table, resolve_source_name
    from ..data.sources import check_folder

    if is_image_folder(data):
        check_folder(data)
        return {FOLDER_SOURCE: {*_list_option_names(load_image_folder)} - {IMAGE_SIZE}}
    if not is_table(data):
        name = resolve_source_name(data)
        return {name: _list_option_names(SOURCES[name])}
    if not Path(data).is_file():
        raise DataError(f"there is no file {data}; give the path of a .csv or .parquet table")
    return {TABLE_SOURCE: {*_list_option_names(load_table)} - TABLE_COLUMN_OPTIONS}


def _list_option_names(factory: Callable[..., Any]) -> list[str]:
    return [option.name for option in list_options(factory)]
