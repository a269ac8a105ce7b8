"""Write the folder of a real federation: a Flower app, scripts, and the data of a trial."""

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..core.errors import ConfigError, RunError
from ..core.options import describe_errors
from ..experiments.config import Experiment
from ..experiments.deploy.config import NODE_OPTIONS, SIMULATION_OPTIONS, DeploymentOptions, KitOptions
from ..experiments.load import load_options, parse_set
from ..experiments.output import check_run_folder

if TYPE_CHECKING:
    from ..data import Federation, Schema

Scalar = str | int | float | bool


DATA_PLACEHOLDER = "CHANGE ME: a table, or a folder with one file per client"


def deploy(space: Namespace, problems: list[str]) -> int:
    """Write the folder, after all was checked that can be checked without the nodes."""
    given = vars(space)
    server, kit = (
        _validate_options(DeploymentOptions, given, problems),
        _validate_options(KitOptions, given, problems),
    )
    mine = {key: value for key, value in given.items() if key in Experiment.model_fields}
    if "set" in mine:
        mine["set"] = parse_set(mine["set"])
    experiment, _ = load_options(
        kit.config if kit else None, mine, defaults={"algorithms": "local,fedmcsa"}, errors=problems
    )
    assert server is not None and kit is not None  # noqa: PT018 (else load_options has raised)
    for key in sorted(SIMULATION_OPTIONS & experiment.model_fields_set):
        if getattr(experiment, key) != Experiment.model_fields[key].default:
            raise ConfigError(f"{key}: this is for simulations; leave it out")
    if kit.out.is_dir() and any(kit.out.iterdir()):
        raise RunError(
            f"--out {kit.out}: the folder is not empty, and nothing is written over; give a new one"
        )
    check_run_folder(kit.out, "deploy")
    federation, schema = _data(experiment, server, kit, set(mine))
    if federation is not None:
        experiment.cohort_size(federation.n_clients)
        seed = federation.partition.get("seed")  # by which the evaluated clients are drawn
        experiment = experiment.model_copy(update={"split_seed": seed})
    config = make_run_config(experiment, server, schema)
    _check_models(config, schema)
    _write(kit, config, server.nodes, federation)
    return 0


def make_run_config(experiment: Experiment, server: DeploymentOptions, schema: "Schema") -> dict[str, Scalar]:
    """The flat values that server and nodes get, by hyphenated keys."""
    left_out = NODE_OPTIONS | SIMULATION_OPTIONS | {"set", "algorithms"}
    values: dict[str, Any] = {
        "algorithms": ",".join(experiment.algorithms),
        "set": "; ".join(f"{key}={value}" for key, value in experiment.set.items()),
        **experiment.model_dump(mode="json", exclude=left_out),
        "steps": experiment.local_steps,
        **server.model_dump(mode="json", exclude={"data_schema"}),
        "data_schema": schema.to_json(),
    }
    return {key.replace("_", "-"): value for key, value in values.items() if value is not None}


def _validate_options(schema: Any, given: Mapping[str, Any], problems: list[str]) -> Any:
    """The options of one schema; what is wrong with them goes into `problems`."""
    try:
        return schema(**{key: value for key, value in given.items() if key in schema.model_fields})
    except ValidationError as error:
        problems += describe_errors(error, lambda key: "--" + key.replace("_", "-"))
        return None


def _data(
    experiment: Experiment, server: DeploymentOptions, kit: KitOptions, given: set[str]
) -> "tuple[Federation | None, Schema]":
    """The data of a trial, if there is to be one, and the schema."""
    from ..data import Schema, infer_schema
    from ..experiments.plan import prepare_data

    if kit.schema_file:
        if "data" in given:
            raise ConfigError(
                "--schema-file and --data: give one, the schema of real nodes or the data of a trial"
            )
        return None, Schema.read(kit.schema_file)
    federation = prepare_data(experiment)
    if federation.n_clients < server.nodes:
        raise ConfigError(
            f"--nodes: got {server.nodes}, expected at most the {federation.n_clients} clients of the data"
        )
    return federation, infer_schema(federation)


def _check_models(config: Mapping[str, Scalar], schema: "Schema") -> None:
    """Build what every node will build."""
    from ..experiments.deploy import require_flower

    require_flower()
    from ..experiments.deploy.config import DeploymentPlan
    from ..experiments.deploy.node import build_trained_model

    plan = DeploymentPlan(config)
    for name, algorithm in plan.algorithms.items():
        card = plan.card(name, plan.experiment.seed, tuple(schema.input_shape), schema.classes)
        algorithm.personal.names(build_trained_model(algorithm, card))


def _write(kit: KitOptions, config: Mapping[str, Scalar], n: int, federation: "Federation | None") -> None:
    """Write the folder; in a trial, with files of its own clients for each node."""
    from ..analysis.tables import make_console
    from ..data import deal_clients, export_clients
    from ..experiments.deploy.kit import write_kit

    trial = federation is not None
    nodes = [{"name": f"node-{i}", "data": f"data/node-{i}" if trial else DATA_PLACEHOLDER} for i in range(n)]
    write_kit(
        kit.out,
        config=config,
        nodes=nodes,
        port=kit.port,
        proxy_port=kit.proxy_port,
        node_port=kit.node_port,
        results=str(config["run-folder"]),
    )
    if federation is not None:
        export_clients(federation, kit.out / "data", deal_clients(federation.n_clients, n))
    console = make_console()
    console.print(f"{kit.out} is ready for {n} nodes; {kit.out / 'README.md'} says how to start it.")
    if not trial:
        console.print(f"Say in {kit.out / 'nodes'} where each node has its data.")
