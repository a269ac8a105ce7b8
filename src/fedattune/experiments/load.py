"""Load an experiment from a YAML file and the command line, and report all mistakes in one message."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.errors import ConfigError, suggest_name
from ..core.io import read_scalar, read_yaml
from ..core.options import describe_errors
from ..core.own_code import confirm_references, get_short_name, list_references
from .config import Experiment, flatten_options
from .output import OutputOptions
from .validate import find_known_options

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


def load_experiment(
    path: Path | None, overrides: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
) -> Experiment:
    """Load an experiment; see `load_options`."""
    return load_options(path, overrides, defaults=defaults)[0]


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
        option = "--" + name.replace("_", "-")
        return option if key in overrides or key not in in_file else f"{path}: {name}"

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
    for error in (wrong, wrong_output):
        problems += describe_errors(error, locate, report_unknown) if error else []
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
