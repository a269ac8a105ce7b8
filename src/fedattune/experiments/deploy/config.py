"""The options of a real federation: what its server is told about nodes, and what is written for it.

What a deployed run is told, read from the flat values that Flower carries.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from ...core.algorithm import Algorithm
from ...core.errors import ConfigError, suggest_name
from ...core.options import Count, StrictSchema, build, describe_errors, list_options, look_up
from ...core.settings import RAY_DEFAULTS, Settings
from ...data.schema import Schema
from ..config import Experiment
from ..load import parse_set
from ..validate import assign_options, expand_names

NODE_OPTIONS = {
    "data", "data_dir", "client_column", "target", "partition", "clients", "small_clients", "stratify",
    "save_partition", "rounds_to",
}  # fmt: skip
"""Options of an experiment that are no business of the server."""


SIMULATION_OPTIONS = {"held_out", "join_rounds", "engine", "client_state", *RAY_DEFAULTS}
"""Settings of a simulation alone."""


class DeploymentOptions(StrictSchema):
    """How the server deals with nodes."""

    model_config = ConfigDict(extra="forbid")

    nodes: Count = Field(2, description="nodes, which are all waited for before the first round")
    run_folder: Path = Field(Path("runs/deployment"), description="the server's folder of the run")
    start_timeout: float = Field(
        600, gt=0, le=1e7, description="seconds to wait for nodes: at the start, and whenever none is online"
    )
    round_timeout: float = Field(
        300, gt=0, le=1e6, description="seconds that a node has to answer; later answers are not taken"
    )
    largest_update: float = Field(
        100,
        gt=1,
        description="refuse uploads that are this many times as far from what was sent as usual",
    )
    poll: float = Field(0.5, gt=0, description="seconds between looks for answers")
    data_schema: Schema | None = Field(
        None, exclude=True, description="what all nodes agree on (JSON); default: that of the nodes"
    )


class KitOptions(StrictSchema):
    """What the folder of a deployment is made from."""

    model_config = ConfigDict(extra="forbid")

    out: Path = Field(Path("deployment"), description="the folder to write, absent or empty")
    schema_file: Path | None = Field(
        None, description="JSON or YAML file with what all nodes agree on, in place of data of a trial"
    )
    config: Path | None = Field(
        None,
        description="YAML file of an experiment, such as experiment.yaml of a run; the command line wins",
    )
    port: Count = Field(8443, description="port of the SuperLink, on loopback")
    proxy_port: Count = Field(9443, description="port of the proxy that nodes elsewhere connect to")
    node_port: Count = Field(9100, description="the first of the nodes' own ports, on loopback")


Scalar = str | int | float | bool


class DeploymentPlan:
    """A run configuration, read: `experiment` and `deployment`, and the methods with their options.

    `own` are methods of the user's own by name, in addition to those that FedAttune knows.

    Raises:
        ConfigError: unknown keys or impossible values, all of them in one message.

    """

    def __init__(self, run_config: Mapping[str, Scalar], own: Mapping[str, Algorithm] | None = None) -> None:
        problems: list[str] = []
        mine: dict[str, Any] = {}
        values: dict[str, Any] = {}
        known = (
            Experiment.model_fields.keys() - NODE_OPTIONS - SIMULATION_OPTIONS
        ) | DeploymentOptions.model_fields.keys()
        for key, value in run_config.items():
            name = {"algorithm": "algorithms"}.get(key, key.replace("-", "_"))
            if name in mine or name in values:
                problems.append(f"{name} is given twice, once as {key!r}")
            elif name not in known:
                hint = suggest_name(name, known)
                problems.append(f"unknown key {key!r}{', ' if hint else ''}{hint}")
            else:
                (mine if name in DeploymentOptions.model_fields else values)[name] = value
        if isinstance(values.get("set"), str):
            values["set"] = parse_set(item for item in values["set"].split(";") if item.strip())
        if isinstance(mine.get("data_schema"), str):
            mine["data_schema"] = Schema.from_json(mine["data_schema"]) if mine["data_schema"] else None
        found: dict[str, Any] = {}
        for schema, given in ((Experiment, values), (DeploymentOptions, mine)):
            try:
                found[schema.__name__] = schema(**given)
            except ValidationError as error:
                problems += describe_errors(error, lambda key: key.replace("_", "-"))
        if problems:
            raise ConfigError("run configuration: " + "; ".join(problems))
        self.experiment: Experiment = found["Experiment"]
        self.deployment: DeploymentOptions = found["DeploymentOptions"]
        self._own = dict(own or {})
        self._choose()

    def _choose(self) -> None:
        from ...algorithms import ALGORITHMS
        from ..validate import model_option_names

        names = expand_names(self.experiment.algorithms, ALGORITHMS | self._own)
        factories = {name: look_up("algorithm", name, ALGORITHMS) for name in names if name not in self._own}
        known = {
            "algorithm": {name: [o.name for o in list_options(make)] for name, make in factories.items()},
            "model": {self.experiment.model: model_option_names(self.experiment.model)},
        }
        chosen = assign_options(self.experiment.set, known)
        self.options = {name: chosen["algorithm"].get(name, {}) for name in names}
        self.model_options = chosen["model"][self.experiment.model]
        self.algorithms = {
            name: self._own[name] if name in self._own else build(name, factories[name], self.options[name])
            for name in names
        }

    def settings(self, seed: int) -> Settings:
        """The training settings of the run with a seed."""
        return self.experiment.settings(seed)

    @property
    def seeds(self) -> range:
        """The seeds of the runs of each method."""
        return range(self.experiment.seed, self.experiment.seed + self.experiment.seeds)

    def card(self, name: str, seed: int, shape: tuple[int, ...], classes: tuple[str, ...]) -> dict[str, Any]:
        """What is needed to build the model of a run: see `personal_models`."""
        return {
            "model": self.experiment.model,
            "model_options": dict(self.model_options),
            "algorithm": name,
            "options": dict(self.options[name]),
            "seed": seed,
            "input_shape": list(shape),
            "classes": list(classes),
        }
