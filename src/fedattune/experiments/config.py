"""Describe an experiment by one schema, which serves YAML files, the command line and the run folder."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ..core.metrics import METRICS, MetricName
from ..core.options import option
from ..core.own_code import get_short_name, is_reference, make_absolute, make_portable
from ..core.settings import MAX_CLIENTS, MAX_COUNT, SEED_LIMIT, Seed, Settings, SettingsKeywords
from ..data.splits import SplitKind
from ..data.types import Scaling

DATA_FIELDS = (
    "data", "data_dir", "client_column", "target", "group_column", "drop_columns", "missing", "normalize_names",
    "client_feature", "image_size", "partition", "clients", "split", "time_column", "split_seed", "test",
    "validation", "stratify", "small_clients", "min_rows", "scaling", "save_partition",
)  # fmt: skip
"""Fields that make a federation."""
NON_IDENTITY_FIELDS = {"data_dir", "save_partition", "rounds_to", "metric", "baseline", "budget"}
"""Fields that change no number of a run."""


FOLDER_OPTIONS = {"id", "tokens"}
"""Options that may name a folder."""
BaselineName = Literal["majority", "sklearn", "centralized"]


def flatten_options(options: Mapping[Any, Any]) -> dict[str, Any]:
    """Write `{fedmcsa: {sigma: 50}}` as `{"fedmcsa.sigma": 50}`."""
    flat: dict[str, Any] = {}
    for name, entry in options.items():
        if isinstance(entry, Mapping):
            flat |= {f"{get_short_name(str(name))}.{option}": value for option, value in entry.items()}
        else:
            owner, _, option = str(name).rpartition(".")
            flat[f"{get_short_name(owner)}.{option}" if is_reference(owner) else str(name)] = entry
    return flat


def split_words(value: object, expected: str) -> list[str]:
    """Read "a, b" as two words, and leave a list of words as it is."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"expected {expected}")
    return [part.strip() for part in parts]


def _join_names(value: Any) -> Any:
    """Write a list of columns as one text with commas between."""
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return ",".join(value) if is_list else value


class ExperimentKeywords(SettingsKeywords, total=False):
    """The options of `Experiment` that `compare` and `tune` take as keywords; the schema describes them."""

    data_dir: Path | str | None
    client_column: str | None
    target: str | Sequence[str] | None
    group_column: str | None
    drop_columns: str | None
    missing: Literal["impute", "drop"]
    normalize_names: bool
    client_feature: bool
    image_size: int | None
    partition: str | None
    clients: int | None
    split_seed: int | None
    split: SplitKind
    time_column: str | None
    test: float
    validation: float
    stratify: bool | None
    small_clients: Literal["auto", "error", "drop"]
    min_rows: int | None
    scaling: Scaling
    save_partition: str | None
    seeds: int
    splits: int
    metric: MetricName | None
    tune: int | None
    budget: str | None
    baseline: str | Sequence[BaselineName]
    rounds_to: float | None


class Experiment(Settings):
    """All choices that decide the numbers of a comparison: data, split, model, methods and settings.

    `rounds_to` decides no number; it is a field so that it is stored with the run.
    """

    data: str = option(
        "name of a data set, your own .csv, .parquet or .xlsx table, or a folder of images", "digits", min_length=1
    )
    data_dir: Path | None = option("folder with the files of the data sets, instead of a download")
    client_column: str | None = option("column of your table that names each row's client")
    target: Annotated[str | None, BeforeValidator(_join_names)] = option(
        "column of your table to predict; several, separated by commas, are labels (yes or no) or numbers"
    )
    group_column: str | None = option(
        "column of your table whose equal values stay in one part, such as the patient of several visits; by default "
        "a column that looks like one; off: none"
    )
    drop_columns: str | None = option("columns of your table to leave out, separated by commas")
    missing: Literal["impute", "drop"] = option(
        "rows of your table that lack a feature: fill the gaps, or drop the rows", "impute"
    )
    normalize_names: bool = option(
        "take clients, classes and categories of your table for one if their names differ only in case or blanks", False
    )
    client_feature: bool = option("give the client's name to the model, as one more category of your table", False)
    image_size: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = option(
        "resize the images of your folder to this width and height, in pixels (default: all must have one size)"
    )
    partition: str | None = option(
        "division of the samples into clients: built-in, saved, or file.py:function (default: by the data)"
    )
    clients: Annotated[int, Field(ge=2, le=MAX_CLIENTS)] | None = option("number of clients (default: by the data)")
    split_seed: Seed | None = option("seed of the division into clients and parts (default: by the partition)")
    split: SplitKind = option(
        "what decides a sample's part: chance, or time (a client's oldest rows train, its newest test)", "random"
    )
    time_column: str | None = option(
        "column of your table, dates or numbers, that --split time follows (default: the only date column)"
    )
    test: float = option("share of each client's samples for the test", 0.25, gt=0, lt=1)
    validation: float = option("share of each client's other samples for validation", 0.1, ge=0, lt=1)
    stratify: bool | None = option("same share of each class in all parts of a client (default: by the partition)")
    small_clients: Literal["auto", "error", "drop"] = option(
        "clients with too little data: stop with an error, or drop them (default: drop clients of the data's own)",
        "auto",
    )
    min_rows: Annotated[int, Field(ge=2, le=MAX_COUNT)] | None = option(
        "leave out clients with fewer rows (default: keep every client that has a row to train and one to test)"
    )
    scaling: Scaling = option(
        "rows that standardise the numbers of a table: all training rows by shared sums (federated), each client's own "
        "(client), or all in one place (global); auto: federated",
        "auto",
    )
    save_partition: str | None = option("save the partition under this name, for --partition")
    model: str = option("name of a model, or your own: file.py:factory or package.module:factory", "mlr", min_length=1)
    algorithms: tuple[str, ...] = option(
        "methods, separated by commas, your own as file.py:factory, or all",
        ("local", "fedavg", "fedavg_ft", "fedmcsa", "attune"),
    )
    set: dict[str, Any] = option(
        "option of a method, model or data set: option=value or name.option=value; repeatable", {}
    )
    seeds: Annotated[int, Field(ge=1, le=MAX_COUNT)] = option("runs with the seeds seed, seed+1, ...", 1)
    splits: Annotated[int, Field(ge=1, le=1000)] = option(
        "random divisions of each client's samples into parts; all methods train on each", 1
    )
    metric: MetricName | None = option(
        "metric of the verdict: "
        f"{', '.join(METRICS)}, or file.py:metric (default: accuracy, AUC or balanced accuracy if one class dominates, "
        "RMSE if the target is a number)"
    )
    tune: Annotated[int, Field(ge=1, le=1000)] | None = option(
        "budget of tuning, in full runs for each method: learning rate and own options by validation data "
        "(default: no tuning)"
    )
    budget: str | None = option(
        "time in which compare decides how much to train, such as 5m: model, tuning, rounds, splits; off: train once "
        "as told (default: 5m for tables and small data, unless an option says how much to train)"
    )
    baseline: tuple[BaselineName, ...] = option(
        "what else to compare with, separated by commas: majority (most frequent class, or mean), sklearn "
        "(regression and boosting, alone and pooled), centralized (the model on all rows)",
        ("majority",),
    )
    rounds_to: float | None = option(
        "show the first round that reaches this mean test accuracy, such as 0.9", gt=0, le=1
    )

    def __init__(self, **flat: Any) -> None:
        super().__init__(**flat)

    @field_validator("seeds")
    @classmethod
    def _check_last_seed(cls, seeds: int, info: ValidationInfo) -> int:
        if info.data.get("seed", 0) + seeds > SEED_LIMIT:
            raise ValueError(f"the last seed, seed + seeds - 1, should be less than {SEED_LIMIT}")
        return seeds

    @field_validator("baseline", mode="before")
    @classmethod
    def _split_baselines(cls, value: object) -> object:
        """Split names; the baseline that costs nothing is always there."""
        return tuple(dict.fromkeys(["majority", *split_words(value, "names such as sklearn,centralized")]))

    @field_validator("algorithms", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Split names; a repeated name counts once."""
        names = tuple(dict.fromkeys(filter(None, split_words(value, "names such as local,fedavg"))))
        if not names:
            raise ValueError("expected at least one name such as fedavg")
        return tuple(make_absolute(name) for name in names)

    @field_validator("model", "partition", "metric")
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        """Let a run find the user's file again when it is resumed from another folder."""
        return value and make_absolute(value)

    @field_validator("set", mode="before")
    @classmethod
    def _flatten_set(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            raise ValueError("expected options such as {fedmcsa.sigma: 50} or {fedmcsa: {sigma: 50}}")
        options = flatten_options(value)
        # Folders of pretrained networks are found again when the run is resumed from another folder.
        for key in options:
            if key.rpartition(".")[2] in FOLDER_OPTIONS and Path(str(options[key])).is_dir():
                options[key] = str(Path(str(options[key])).resolve())
        return options

    @property
    def hash(self) -> str:
        """Twelve hex digits; equal experiments have equal digits on every machine."""
        from ..runs.folder import RESUMABLE_SETTINGS

        excluded = NON_IDENTITY_FIELDS | RESUMABLE_SETTINGS
        if self.tune or self.budget not in (None, "off"):  # the metric chooses
            excluded = excluded - {"metric", "budget"}
        identity = self.to_keywords(mode="json", exclude=excluded)
        for key in ("data", "partition"):  # the hash of the partition covers the content of a file
            identity[key] = identity[key] and Path(identity[key]).stem
        identity["model"] = make_portable(self.model)
        if identity.get("metric"):
            identity["metric"] = make_portable(identity["metric"])
        identity["algorithms"] = [make_portable(name) for name in self.algorithms]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def settings(self, seed: int) -> Settings:
        """Return the settings of one training run, with its seed."""
        given = {name: self.get(name) for name in self.given & Settings.flat_fields().keys()}
        return Settings(**given | {"seed": seed})

    def to_yaml(self) -> str:
        """Write the experiment as a YAML file for `--config`."""
        values = yaml.safe_dump(self.to_keywords(mode="json"), sort_keys=False, allow_unicode=True)
        return f"# FedAttune experiment {self.hash}\n{values}"
