"""`fedattune deploy`: write the folder of a deployment, check it, list its nodes, pause, resume or abort its run."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.output.tables import make_console
from ..core.errors import ConfigError, RunError
from ..deploy import require_flower
from ..deploy.config import (
    NODE_OPTIONS,
    RARE_KEYS,
    ROSTER,
    SIMULATION_OPTIONS,
    DeploymentOptions,
    DeploymentPlan,
    KitOptions,
    Scalar,
    list_node_rules,
)
from ..experiments.config import Experiment
from ..experiments.load import FOLDER_SOURCE, TABLE_SOURCE
from ..experiments.output import check_run_folder
from .doctor import print_findings
from .options import read_experiment, validate_options

if TYPE_CHECKING:
    from ..data import Federation, Schema

DATA_PLACEHOLDER = "CHANGE ME: a table, a folder with one file per client, or a folder of images"


def write(space: Namespace, problems: list[str]) -> int:
    """Write the folder of a deployment, after all checks that need no node."""
    from ..experiments.plan import settle_local_work

    server = validate_options(DeploymentOptions, space, problems)
    kit = validate_options(KitOptions, space, problems)
    experiment, _, overrides = read_experiment(space, problems)
    assert server and kit  # noqa: PT018 (else read_experiment has raised)
    for key in sorted(SIMULATION_OPTIONS & experiment.given):
        if experiment.get(key) != Experiment.flat_fields()[key].default:
            raise ConfigError(f"{key}: only a simulation has this option; leave it out")
    check_run_folder(kit.out)
    federation, data_schema = _load_data(experiment, server, kit, has_data="data" in overrides)
    experiment = settle_local_work(experiment, is_table=bool(data_schema.columns))
    if federation is not None:
        experiment.participation.cohort_size(federation.n_clients)
        seed = federation.partition.get("seed")  # it draws the evaluated clients
        experiment = experiment.model_copy(update={"split_seed": seed})
    config = make_run_config(experiment, server, data_schema)
    require_flower()
    from ..data.federated import FederationInfo
    from ..deploy.node.node import check_methods
    from ..training.setup import settle_optimizer

    plan = DeploymentPlan(config)
    settled = settle_optimizer(experiment, plan.algorithms.values(), experiment.model, plan.model_options)
    if settled is not experiment:
        config = make_run_config(settled, server, data_schema)
        plan = DeploymentPlan(config)
    kinds = {key: getattr(data_schema, key) for key in ("classes", "input_shape", "labels", "outputs")}
    check_methods(plan, FederationInfo("federation", names=(), counts=(), **kinds))
    _write_folder(kit, config, server.nodes, federation)
    return 0


def make_run_config(experiment: Experiment, server: DeploymentOptions, schema: "Schema") -> dict[str, Scalar]:
    """Make the configuration of the run: flat values for the server and the nodes, by keys with hyphens."""
    excluded = NODE_OPTIONS | SIMULATION_OPTIONS | {"set", "algorithms"}
    defaults = DeploymentOptions.model_fields
    excluded_server = {"data_schema"} | {key for key in RARE_KEYS if getattr(server, key) == defaults[key].default}
    # The data are in the nodes' files and in the schema already.
    of_data = {TABLE_SOURCE, FOLDER_SOURCE, "data", "partition", experiment.data, experiment.partition}
    options = (f"{key}={one}" for key, one in experiment.set.items() if key.rpartition(".")[0] not in of_data)
    values: dict[str, Any] = {
        "algorithms": ",".join(experiment.algorithms),
        "set": "; ".join(options),
        **experiment.to_keywords(mode="json", exclude=excluded),
        "steps": experiment.training.local_steps,
        **server.model_dump(mode="json", exclude=excluded_server),
        "data_schema": schema.to_json(),
    }
    return {key.replace("_", "-"): value for key, value in values.items() if value is not None}


def _load_data(
    experiment: Experiment, server: DeploymentOptions, kit: KitOptions, *, has_data: bool
) -> "tuple[Federation | None, Schema]":
    """Load the data of a trial, or only the schema of real nodes."""
    from ..data import Schema, infer_schema
    from ..experiments.plan import prepare_data

    if kit.schema_file:
        if has_data:
            raise ConfigError("--schema-file and --data: give one, the schema of real nodes or the data of a trial")
        return None, Schema.read(kit.schema_file)
    federation = prepare_data(experiment)
    if federation.n_clients < server.nodes:
        raise ConfigError(
            f"--nodes: got {server.nodes}, expected at most the {federation.n_clients} clients of the data"
        )
    return federation, infer_schema(federation)


def _write_folder(kit: KitOptions, config: Mapping[str, Scalar], n: int, federation: "Federation | None") -> None:
    from ..data import deal_clients, export_clients
    from ..deploy.operate.kit import write_kit

    is_trial = federation is not None
    data = "data/node-{}" if is_trial else DATA_PLACEHOLDER
    write_kit(
        kit.out,
        config=config,
        nodes=[{"name": f"node-{i}", "data": data.format(i), **list_node_rules(config, i)} for i in range(n)],
        port=kit.port,
        proxy_port=kit.proxy_port,
        node_port=kit.node_port,
        results=str(config["run-folder"]),
    )
    if federation is not None:
        export_clients(federation, kit.out / "data", deal_clients(federation.n_clients, n))
    console = make_console()
    console.print(f"{kit.out} is ready for {n} nodes; {kit.out / 'README.md'} says how to start it.")
    if "roster" in list_node_rules(config, 0) and not is_trial:
        console.print(f"The nodes' operators collect all public keys in {kit.out / ROSTER} among themselves.")
    if not is_trial:
        console.print(f"Write into {kit.out / 'nodes'} where each node has its data.")


def _find_folder(space: Namespace) -> Path:
    folder: Path = space.folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder that fedattune deploy write wrote")
    require_flower()
    return folder


def check(space: Namespace, _: Sequence[str]) -> int:
    """Check a written folder, and print what was found; the exit code is 1 if something is broken."""
    from ..deploy.operate.check import check_kit

    if broken := print_findings(check_kit(_find_folder(space))):
        print(f"{len(broken)} broken; the lines with -> say what to do.")
        return 1
    print("The deployment is ready as far as this machine can tell.")
    return 0


def print_nodes(space: Namespace, _: Sequence[str]) -> int:
    """Print the registered nodes, and those that were removed."""
    from ..deploy.operate.kit import list_nodes

    nodes = list_nodes(_find_folder(space))
    if not nodes:
        raise RunError("no node is registered; run ./register.sh")
    for node in nodes:
        since = f"{node.since:%Y-%m-%d %H:%M:%S %Z}".strip() if node.since else "unknown"
        print(f"{node.id:<20}  {node.name or '-':<20}  {node.status:<10}  since {since}  {node.fingerprint}")
    return 0


def request(space: Namespace, _: Sequence[str]) -> int:
    """Ask the run of a written folder to pause or to abort, or take the request back, as `space.action` says."""
    from ..deploy.operate.kit import find_run_folder
    from ..deploy.server.control import write_request

    folder = find_run_folder(_find_folder(space))
    write_request(folder, None if space.action == "resume" else space.action)
    print(
        {
            "pause": f"The run in {folder} ends after its current round, with everything saved; ./run.sh continues it.",
            "abort": f"The run in {folder} ends after its current round, and compares the methods that finished.",
            "resume": f"The run in {folder} has no request to stop; if it has ended, ./run.sh continues it.",
        }[space.action]
    )
    return 0
