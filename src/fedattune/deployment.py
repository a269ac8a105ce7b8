"""The options of a real federation: what its server is told about nodes, and what is written for it."""

from pathlib import Path

from pydantic import ConfigDict, Field

from .checked import Checked
from .config import OF_RAY, Number
from .data.schema import Schema

LEFT_TO_NODES = {
    "data", "data_dir", "client_column", "target", "partition", "clients", "small_clients", "stratify",
    "save_partition", "rounds_to",
}  # fmt: skip
"""Options of an experiment that are no business of the server."""

SIMULATED = {"held_out", "join_rounds", "engine", "client_state", *OF_RAY}
"""Settings of a simulation alone."""


class Deployment(Checked):
    """How the server deals with nodes."""

    model_config = ConfigDict(extra="forbid")

    nodes: Number = Field(2, description="nodes, which are all waited for before the first round")
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
        None, description="what all nodes agree on (JSON); default: that of the nodes"
    )


class Kit(Checked):
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
    port: Number = Field(8443, description="port of the SuperLink, on loopback")
    proxy_port: Number = Field(9443, description="port of the proxy that nodes elsewhere connect to")
    node_port: Number = Field(9100, description="the first of the nodes' own ports, on loopback")
