"""The typed experiment: one schema behind YAML files, the command line and the run folder."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .config import Settings
from .errors import ConfigError

# Where and how an experiment is computed; its numbers do not depend on these beyond rounding.
NOT_IDENTITY = frozenset({"data_dir", "save_partition", "engine", "device"})


class Experiment(Settings):
    """Everything that decides the numbers of a comparison: data, split, model, methods and settings."""

    data: str = Field(
        "digits", min_length=1, description="a data set by name, or your own .csv or .parquet table"
    )
    data_dir: Path | None = Field(
        None, description="folder with the data sets as Parquet, instead of a download"
    )
    client_column: str | None = Field(
        None, description="column of your table that names the client of each row"
    )
    target: str | None = Field(None, description="column of your table to predict")
    partition: str | None = Field(
        None,
        description="how samples are spread over clients: a name or a saved one (default: by the data)",
    )
    clients: Annotated[int, Field(ge=2)] | None = Field(
        None, description="number of clients (default: by the data)"
    )
    split_seed: Annotated[int, Field(ge=0)] | None = Field(
        None, description="seed of the split over clients and parts (default: by the partition)"
    )
    test: float = Field(0.25, gt=0, lt=1, description="share of each client's samples kept for the test")
    validation: float = Field(
        0.1, ge=0, lt=1, description="share of each client's other samples kept for validation"
    )
    small_clients: Literal["error", "drop"] = Field(
        "error", description="clients with too little data: refuse them, or leave them out"
    )
    save_partition: str | None = Field(
        None, description="save the partition under this name, for --partition"
    )
    model: str = Field("mlr", min_length=1, description="a model by name, or package.module:factory")
    algorithms: tuple[str, ...] = Field(
        ("local", "fedavg", "fedmcsa"), description="methods, separated by commas, or all"
    )
    set: dict[str, Any] = Field(
        {}, description="a hyper-parameter: option=value or name.option=value; repeatable"
    )
    seeds: Annotated[int, Field(ge=1)] = Field(1, description="runs with the seeds seed, seed+1, ...")

    @field_validator("algorithms", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        """Read "a, b" as two names; a name given twice counts once."""
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise ValueError("expected names such as local,fedavg")
        names = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
        if not names:
            raise ValueError("expected at least one name such as fedavg")
        return names

    @field_validator("set", mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        """Read {fedmcsa: {sigma: 50}} as {"fedmcsa.sigma": 50}."""
        if not isinstance(value, Mapping):
            raise ValueError("expected options such as {fedmcsa.sigma: 50} or {fedmcsa: {sigma: 50}}")
        flat: dict[str, Any] = {}
        for name, entry in value.items():
            if isinstance(entry, Mapping):
                flat |= {f"{name}.{option}": one for option, one in entry.items()}
            else:
                flat[str(name)] = entry
        return flat

    @property
    def hash(self) -> str:
        """Twelve hex digits that are equal for equal experiments, wherever they are computed."""
        identity = {key: one for key, one in self.model_dump(mode="json").items() if key not in NOT_IDENTITY}
        for key in (
            "data",
            "partition",
        ):  # a file's content is covered by the partition's hash, not its place
            identity[key] = identity[key] and Path(identity[key]).stem
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def settings(self, seed: int) -> Settings:
        """The training part of the experiment, with the seed of one run."""
        values = {name: getattr(self, name) for name in Settings.model_fields}
        return Settings(**values | {"seed": seed})

    def to_yaml(self) -> str:
        """The experiment as a YAML file that `--config` reads."""
        values = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        return f"# FedAttune experiment {self.hash}\n{values}"


class Output(BaseModel):
    """Where results go; not part of an experiment's identity."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path | None = Field(
        None, description="YAML file with any of these options; the command line wins"
    )
    out: Path | None = Field(
        None, description="run folder, absent or empty (default: runs/COMMAND-DATA-TIME)"
    )
    json_file: Path | None = Field(None, alias="json", description="also write the result to this file")
    resume: Path | None = Field(None, description="go on with the interrupted run in this folder")
    quiet: bool = Field(False, description="no progress, only the result")


def near(name: str, known: Iterable[str]) -> str:
    """Say which of many known names is nearest, if any is."""
    found = get_close_matches(name, sorted(known), n=1)
    return f", did you mean {found[0]!r}?" if found else ""


def parse_set(items: Iterable[str]) -> dict[str, Any]:
    """Read `name.option=value` items of the command line; values are YAML scalars.

    Raises:
        ConfigError: an item without a name or a value.
    """
    given: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key.strip() or not equals:
            raise ConfigError(
                f"--set {item}: expected option=value or name.option=value, such as fedmcsa.sigma=50"
            )
        try:
            given[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            given[key.strip()] = value
    return given


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, keys as written.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else f": {error}"
        raise ConfigError(f"{path} is not valid YAML{where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold keys with values such as 'rounds: 50', got a {type(content).__name__}"
        )
    return {str(key): value for key, value in content.items()}


def _canonical(key: str) -> str:
    name = key.replace("-", "_")
    return "algorithms" if name == "algorithm" else name


def _from_file(path: Path, errors: list[str]) -> dict[str, Any]:
    """The experiment's keys in the file; unknown and repeated ones are put into `errors`."""
    values: dict[str, Any] = {}
    for key, value in read_yaml(path).items():
        name = _canonical(key)
        if name not in Experiment.model_fields:
            errors.append(f"{path}: unknown key {key!r}{near(name, Experiment.model_fields)}")
        elif name in values:
            errors.append(f"{path}: the key {key!r} is given twice")
        else:
            values[name] = value
    return values


def load_experiment(
    path: Path | None,
    overrides: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    errors: Iterable[str] = (),
) -> Experiment:
    """The experiment of a YAML file and the command line, which wins over the file.

    `errors` found before are reported together with those found here.

    Raises:
        ConfigError: unknown keys and impossible values, all of them in one message.
    """
    problems = list(errors)
    values = {_canonical(key): value for key, value in (defaults or {}).items()}
    given = {_canonical(key): value for key, value in overrides.items()}
    in_file = _from_file(path, problems) if path else {}
    if ("steps" in given) != ("epochs" in given):  # the command line's unit of work replaces the file's
        in_file.pop("epochs" if "steps" in given else "steps", None)
    if isinstance(given.get("set"), Mapping) and isinstance(in_file.get("set"), Mapping):
        kept = Experiment._flat(in_file["set"])
        assert isinstance(kept, dict)
        bare = {key for key in given["set"] if "." not in key}
        given["set"] = {k: v for k, v in kept.items() if k.rpartition(".")[2] not in bare} | dict(
            given["set"]
        )
    values |= in_file | given
    try:
        experiment = Experiment(**values)
    except ValidationError as error:
        problems += _explain(error, path, in_file, given)
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return experiment


def _explain(
    error: ValidationError, path: Path | None, in_file: Mapping[str, Any], given: Mapping[str, Any]
) -> list[str]:
    """One phrase per wrong key: where it was given, what is wrong, what was got."""
    phrases: dict[str, str] = {}
    for one in error.errors():
        key = str(one["loc"][0]) if one["loc"] else ""
        reason = one["msg"].removeprefix("Value error, ")
        reason = reason[:1].lower() + reason[1:]
        option = "--" + key.replace("_", "-")
        if not key:
            phrases.setdefault(key, reason)
        elif one["type"] == "extra_forbidden":
            phrases.setdefault(key, f"unknown option {option}{near(key, Experiment.model_fields)}")
        else:
            where = option if key in given or key not in in_file else f"{path}: {key}"
            phrases.setdefault(key, f"{where}: {reason}, got {one['input']!r}")
    return list(phrases.values())
