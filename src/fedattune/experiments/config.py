"""The typed experiment: one schema behind YAML files, the command line and the run folder."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from ..core.errors import ConfigError, suggest_name
from ..core.io import read_scalar, read_yaml
from ..core.options import describe_errors
from ..core.settings import MAX_CLIENTS, MAX_COUNT, SEED_LIMIT, Seed, Settings
from .output import OutputOptions
from .validate import find_wrong_choices

NON_IDENTITY_FIELDS = {
    "data_dir",
    "save_partition",
    "rounds_to",
}  # where files are, and what is said of the numbers


COMMAND_LINE_ONLY = {
    "resume": "goes on with the experiment as it was begun",
    "config": "names such a file itself",
}


class Experiment(Settings):
    """Everything that decides the numbers of a comparison: data, split, model, methods and settings.

    `rounds_to` only adds a number; it is here so that it is kept with the run.
    """

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
    clients: Annotated[int, Field(ge=2, le=MAX_CLIENTS)] | None = Field(
        None, description="number of clients (default: by the data)"
    )
    split_seed: Seed | None = Field(
        None, description="seed of the split over clients and parts (default: by the partition)"
    )
    test: float = Field(0.25, gt=0, lt=1, description="share of each client's samples kept for the test")
    validation: float = Field(
        0.1, ge=0, lt=1, description="share of each client's other samples kept for validation"
    )
    stratify: bool | None = Field(
        None,
        description="give every part of a client the same share of each class (default: by the partition)",
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
    seeds: Annotated[int, Field(ge=1, le=MAX_COUNT)] = Field(
        1, description="runs with the seeds seed, seed+1, ..."
    )
    rounds_to: float | None = Field(
        None,
        gt=0,
        le=1,
        description="mean test accuracy, such as 0.9: add a column with the first round that reaches it",
    )

    @field_validator("seeds")
    @classmethod
    def _seeds_that_can_be(cls, seeds: int, info: ValidationInfo) -> int:
        if info.data.get("seed", 0) + seeds > SEED_LIMIT:
            raise ValueError(f"the last seed, seed + seeds - 1, should be less than {SEED_LIMIT}")
        return seeds

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
        from ..training.storage.folder import RESUMABLE_SETTINGS

        identity = self.model_dump(mode="json", exclude=NON_IDENTITY_FIELDS | RESUMABLE_SETTINGS)
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


def parse_set(items: Iterable[str]) -> dict[str, Any]:
    """Read `name.option=value` items of the command line; values are YAML scalars.

    Raises:
        ConfigError: items without a name or a value, all of them in one message.
    """
    given: dict[str, Any] = {}
    wrong = []
    for item in items:
        key, equals, value = item.partition("=")
        if not key.strip() or not equals:
            wrong.append(item)
        else:
            given[key.strip()] = read_scalar(value)
    if wrong:
        raise ConfigError(
            f"--set {', '.join(wrong)}: expected option=value or name.option=value, such as fedmcsa.sigma=50"
        )
    return given


def _canonical_key(key: str) -> str:
    name = key.replace("-", "_")
    return {"algorithm": "algorithms", "json": "json_file"}.get(name, name)


def _read_options(path: Path, errors: list[str]) -> dict[str, Any]:
    """The options in the file; unknown and repeated ones are put into `errors`."""
    known = Experiment.model_fields.keys() | OutputOptions.model_fields.keys()
    values: dict[str, Any] = {}
    for key, value in read_yaml(path).items():
        name = _canonical_key(key)
        if name in COMMAND_LINE_ONLY:
            errors.append(f"{path}: {key} cannot be given in a file, for it {COMMAND_LINE_ONLY[name]}")
        elif name not in known:
            hint = suggest_name(name, known)
            errors.append(f"{path}: unknown key {key!r}{', ' if hint else ''}{hint}")
        elif name in values:
            errors.append(f"{path}: the key {key!r} is given twice")
        else:
            values[name] = value
    return values


def _flatten_options(options: Mapping[str, Any]) -> dict[str, Any]:
    flat = Experiment._flat(options)
    return flat if isinstance(flat, dict) else dict(options)


def _is_replaced(owner: str, in_file: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the file's options of `owner` have gone because the command line chose another in its place."""

    def named(values: Mapping[str, Any]) -> set[str]:
        chosen = [values.get(key) for key in ("data", "partition", "model", "algorithms")]
        parts = [part for one in chosen for part in (one if isinstance(one, list | tuple) else [one])]
        return {word.strip() for part in parts if isinstance(part, str) for word in part.split(",")}

    return bool(owner) and owner in named(in_file) and owner not in named({**in_file, **given})


def load_experiment(
    path: Path | None, overrides: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
) -> Experiment:
    """The experiment of a YAML file and of options given, which win over the file.

    Raises:
        ConfigError: unknown keys and impossible values, all of them in one message.
    """
    return load_options(path, overrides, defaults=defaults)[0]


def load_options(
    path: Path | None,
    overrides: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    errors: Iterable[str] = (),
) -> tuple[Experiment, OutputOptions]:
    """The experiment and the output options of a YAML file and the command line, which wins over the file.

    `errors` found before are reported together with those found here.

    Raises:
        ConfigError: unknown keys and impossible values, all of them in one message.
    """
    problems = list(errors)
    given = {_canonical_key(key): value for key, value in overrides.items()}
    in_file = _read_options(path, problems) if path else {}
    if ("steps" in given) != ("epochs" in given):  # the command line's unit of work replaces the file's
        in_file.pop("epochs" if "steps" in given else "steps", None)
    if isinstance(given.get("set"), Mapping) and isinstance(in_file.get("set"), Mapping):
        kept = Experiment._flat(in_file["set"])
        assert isinstance(kept, dict)
        bare = {key for key in given["set"] if "." not in key}
        given["set"] = {k: v for k, v in kept.items() if k.rpartition(".")[2] not in bare} | dict(
            given["set"]
        )
    values = {_canonical_key(key): value for key, value in (defaults or {}).items()} | in_file | given
    if isinstance(values.get("set"), Mapping):
        typed = overrides.get("set") or {}
        values["set"] = {
            key: value
            for key, value in _flatten_options(values["set"]).items()
            if key in typed or not _is_replaced(key.rpartition(".")[0], in_file, given)
        }

    def where(key: str) -> str:
        name = "json" if key == "json_file" else key
        option = "--" + name.replace("_", "-")
        return option if key in given or key not in in_file else f"{path}: {name}"

    def unknown(key: str) -> str:
        hint = suggest_name(key, Experiment.model_fields)
        return f"unknown option {where(key)}{', ' if hint else ''}{hint}"

    to_output = {key: values.pop(key) for key in OutputOptions.model_fields if key in values}
    found: dict[type[Experiment | OutputOptions], Any] = {}
    for schema, mine in ((Experiment, values), (OutputOptions, to_output)):
        try:
            found[schema] = schema(**mine)
        except ValidationError as error:
            problems += describe_errors(error, where, unknown)
    if problems:
        raise ConfigError("; ".join(dict.fromkeys([*problems, *find_wrong_choices(values)])))
    return found[Experiment], found[OutputOptions]
