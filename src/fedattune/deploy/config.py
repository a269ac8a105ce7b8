"""Options of a deployment, and the configuration of its runs, which Flower carries as flat values."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from ..algorithms import ALGORITHMS
from ..core.algorithm import Algorithm
from ..core.checks import Finding, note, ok
from ..core.errors import ConfigError, suggest_name
from ..core.options import Count, StrictSchema, build, describe_errors, list_options, look_up
from ..core.own_code import find_file, is_reference, make_portable
from ..core.settings import LARGEST_UPDATE, SIMULATION_SETTINGS, Settings
from ..core.targets import describe_several
from ..data.federated import Federation, FederationInfo
from ..data.schema import Schema
from ..experiments.config import Experiment
from ..experiments.load import assign_options, expand_names, list_model_options, parse_set
from ..models import complete_options
from .logs import LogFormat
from .secagg import LEAST_THRESHOLD, count_threshold
from .secagg.methods import check_run

NODE_OPTIONS = {
    "data", "data_dir", "client_column", "target", "partition", "clients", "small_clients", "scaling",
    "drop_columns", "image_size", "missing", "stratify", "split", "time_column",
    "save_partition", "rounds_to",
}  # fmt: skip
"""Options of an experiment that each node decides for itself."""

SIMULATION_OPTIONS = {*SIMULATION_SETTINGS, "splits", "metric", "tune", "baseline"}
"""Options that only a simulation has."""

ROSTER = "nodes/roster.pub"
"""File with the public keys of all nodes, relative to a deployment's folder."""

COMMON_OPTIONS = ("nodes", "schema_file", "port", "node_port", "run_folder", "round_timeout", "secure_aggregation")
"""Options of a deployment that `--help` shows."""

RARE_KEYS = {"metrics_port", "log_format", "secure_aggregation", "secure_bits", "secure_clip"}
"""Options of the server that a written deployment names only if they differ from the defaults."""

Scalar = str | int | float | bool
"""A value of a run's or a node's configuration, as Flower carries it."""


class DeploymentOptions(StrictSchema):
    """Options of the server."""

    model_config = ConfigDict(extra="forbid")

    nodes: Count = Field(2, description="number of nodes; the first round waits for all of them")
    run_folder: Path = Field(Path("runs/deployment"), description="the server's folder for the run")
    start_timeout: float = Field(
        600, gt=0, le=1e7, description="seconds to wait for nodes, at the start and whenever none is online"
    )
    round_timeout: float = Field(
        300, gt=0, le=1e6, description="seconds to wait for a node's reply; later replies are ignored"
    )
    largest_update: float = Field(
        LARGEST_UPDATE, gt=1, description="reject an update whose L2 norm is this many times the usual norm"
    )
    poll: float = Field(0.5, gt=0, description="seconds between checks for replies")
    metrics_port: int = Field(
        9300, ge=0, le=65535, description="port of /metrics (Prometheus) and /healthz on the server's loopback; 0: none"
    )
    log_format: LogFormat = Field("text", description="format of the server's log: text, or one JSON object per line")
    secure_aggregation: bool = Field(
        False,
        description="let the server learn sums over nodes only, for methods whose server averages; from 3 nodes on",
    )
    secure_bits: int = Field(24, ge=1, le=40, description="binary places of the summed values, of 64 binary digits")
    secure_clip: float = Field(
        4096, gt=0, le=2.0**30, description="largest absolute value of an upload that can be summed"
    )
    data_schema: Schema | None = Field(
        None, exclude=True, description="schema of all nodes' data (JSON); default: the schema that the nodes report"
    )


class KitOptions(StrictSchema):
    """Options of the folder of a deployment."""

    model_config = ConfigDict(extra="forbid")

    out: Path = Field(Path("deployment"), description="folder to write; missing or empty")
    schema_file: Path | None = Field(
        None, description="JSON or YAML file with the schema of all nodes' data, for a deployment without trial data"
    )
    config: Path | None = Field(
        None,
        description="YAML file of an experiment, such as experiment.yaml of a run; options of the command line win",
    )
    port: Count = Field(8443, description="port of the SuperLink, on loopback")
    proxy_port: Count = Field(9443, description="port of the proxy for nodes on other machines")
    node_port: Count = Field(9100, description="first of the nodes' own ports, on loopback")


class DeploymentPlan:
    """The configuration of a run, checked.

    Args:
        run_config: flat values, by keys with hyphens; the message of an error names all that are wrong.
        custom_algorithms: your own methods by name, in addition to FedAttune's.

    Attributes:
        digest: SHA-256 of the values; server and nodes have the same, as Flower sends all of them the same values.
    """

    def __init__(
        self, run_config: Mapping[str, Scalar], custom_algorithms: Mapping[str, Algorithm] | None = None
    ) -> None:
        custom = dict(custom_algorithms or {})
        self.experiment, self.deployment = _parse(run_config)
        self.digest = hashlib.sha256(json.dumps(dict(run_config), sort_keys=True, default=str).encode()).hexdigest()
        names = expand_names(self.experiment.algorithms, ALGORITHMS | custom)
        model = self.experiment.model
        # Custom code that nodes cannot find is refused.
        for name in names:
            if is_reference(name):
                raise ConfigError(
                    f"{make_portable(name)}: a deployment takes a method of your own only in Python, by "
                    "make_server_app and make_client_app with custom_algorithms"
                )
        for code, what in ((model, "factory"), (self.experiment.loss.name, "loss")):
            if find_file(code):
                raise ConfigError(
                    f"{make_portable(code)}: nodes have no such file; write package.module:{what}, and install the "
                    "module at the server and at every node"
                )
        factories = {name: look_up("algorithm", name, ALGORITHMS) for name in names if name not in custom}
        known_options = {
            "algorithm": {name: [o.name for o in list_options(make)] for name, make in factories.items()},
            "model": {model: list_model_options(model)},
        }
        assignment = assign_options(self.experiment.set, known_options)
        self.options = {name: assignment["algorithm"].get(name, {}) for name in names}
        self.model_options = complete_options(model, assignment["model"][model], self.deployment.data_schema)
        self.algorithms = {
            name: custom[name] if name in custom else build(name, factories[name], self.options[name]) for name in names
        }
        if self.deployment.secure_aggregation:
            check_run(self.algorithms, self.deployment.nodes, self.experiment)

    def settings(self, seed: int) -> Settings:
        """Return the training settings of the run with a seed.

        Nodes keep the models of the last round. They refuse harmful ones, unless to know who refuses would tell what
        is private.
        """
        settings = self.experiment.settings(seed).replace(early_stopping="off")
        is_private = self.deployment.secure_aggregation or settings.privacy.client is not None
        if settings.defence.accept == "auto":
            settings = settings.replace(accept="always" if is_private else "harmless")
        return settings

    @property
    def seeds(self) -> range:
        return range(self.experiment.seed, self.experiment.seed + self.experiment.seeds)

    def describe(self) -> Iterator[Finding]:
        """Describe methods, rounds and schema for a check of the deployment."""
        yield ok("configuration", f"{', '.join(self.algorithms)}, {self.experiment.rounds} rounds")
        if self.deployment.secure_aggregation:
            n = self.deployment.nodes
            found = f"the server learns sums over {n} nodes; each node's own rules say how many are enough"
            yield ok("secure aggregation", found)
        schema = self.deployment.data_schema
        if schema is None:
            yield note("schema", "none", "write data-schema, so that nodes cannot disagree")
        else:
            what = f"{len(schema.columns)} columns" if schema.columns else f"inputs of {schema.input_shape}"
            yield ok("schema", f"{what}, {len(schema.classes)} classes")

    def card(self, name: str, seed: int, data: Federation | FederationInfo | Schema) -> dict[str, Any]:
        """Make the card of a run's model, from which it can be built: see `fedattune.models.files`."""
        return {
            "model": self.experiment.model,
            "model_options": dict(self.model_options),
            "algorithm": name,
            "options": dict(self.options[name]),
            "seed": seed,
            "input_shape": list(data.input_shape),
            "classes": list(data.classes),
            **describe_several(data.kind, data.labels, data.outputs),
        }


def _parse(run_config: Mapping[str, Scalar]) -> tuple[Experiment, DeploymentOptions]:
    problems: list[str] = []
    values: dict[str, Any] = {}
    allowed_keys = Experiment.flat_fields().keys() - NODE_OPTIONS - SIMULATION_OPTIONS
    allowed_keys |= DeploymentOptions.model_fields.keys()
    for key, value in run_config.items():
        name = {"algorithm": "algorithms"}.get(key, key.replace("-", "_"))
        if name in values:
            problems.append(f"{name} is given twice, once as {key!r}")
        elif name in SIMULATION_OPTIONS - allowed_keys:
            problems.append(f"{key} is for simulations: try it with fedattune run or compare; leave it out here")
        elif name not in allowed_keys:
            hint = suggest_name(name, allowed_keys)
            problems.append(f"unknown key {key!r}{', ' if hint else ''}{hint}")
        else:
            values[name] = value
    if isinstance(values.get("set"), str):
        values["set"] = parse_set(item for item in values["set"].split(";") if item.strip())
    if isinstance(text := values.get("data_schema"), str):
        values["data_schema"] = Schema.from_json(text) if text else None
    parts: list[Any] = []
    for schema, fields in ((Experiment, Experiment.flat_fields()), (DeploymentOptions, DeploymentOptions.model_fields)):
        try:
            parts.append(schema(**{k: v for k, v in values.items() if k in fields}))
        except ValidationError as error:
            problems += describe_errors(error, lambda key: key.replace("_", "-"))
    if problems:
        raise ConfigError("run configuration: " + "; ".join(problems))
    return parts[0], parts[1]


def list_node_rules(run_config: Mapping[str, Scalar], node: int) -> dict[str, Scalar]:
    """List the rules that a run needs in the configuration of a node, whose operator can make them stricter."""
    if not run_config.get("secure-aggregation"):
        return {}
    # So many that the server gains nothing by a session of a few nodes, most of which collude with it.
    least = count_threshold(LEAST_THRESHOLD, int(run_config["nodes"]))
    rules: dict[str, Scalar] = {"key": f"keys/node-{node}", "roster": ROSTER, "secure-aggregation": "required"}
    return {**rules, "min-participants": least}
