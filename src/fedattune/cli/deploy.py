"""Write the folder of a real federation: a Flower app, scripts, and the data of a trial."""

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..checked import explain
from ..deployment import LEFT_TO_NODES, SIMULATED, Deployment, Kit
from ..errors import ConfigError, RunError
from ..experiment import Experiment, load_options, parse_set
from ..output import check_out

if TYPE_CHECKING:
    from ..data import Federation, Schema

Scalar = str | int | float | bool
TO_BE_FILLED_IN = "CHANGE ME: a table, or a folder with one file per client"


def deploy(space: Namespace, problems: list[str]) -> int:
    """Write the folder, after all was checked that can be checked without the nodes."""
    given = vars(space)
    server, kit = _checked(Deployment, given, problems), _checked(Kit, given, problems)
    mine = {key: value for key, value in given.items() if key in Experiment.model_fields}
    if "set" in mine:
        mine["set"] = parse_set(mine["set"])
    experiment, _ = load_options(
        kit.config if kit else None, mine, defaults={"algorithms": "local,fedmcsa"}, errors=problems
    )
    assert server is not None and kit is not None  # noqa: PT018 (else load_options has raised)
    for key in sorted(SIMULATED & experiment.model_fields_set):
        if getattr(experiment, key) != Experiment.model_fields[key].default:
            raise ConfigError(f"{key}: this is for simulations; leave it out")
    if kit.out.is_dir() and any(kit.out.iterdir()):
        raise RunError(
            f"--out {kit.out}: the folder is not empty, and nothing is written over; give a new one"
        )
    check_out(kit.out, "deploy")
    federation, schema = _data(experiment, server, kit, set(mine))
    if federation is not None:
        experiment.cohort_size(federation.n_clients)
        seed = federation.partition.get("seed")  # by which the evaluated clients are drawn
        experiment = experiment.model_copy(update={"split_seed": seed})
    config = run_config(experiment, server, schema)
    _try_out(config, schema)
    _write(kit, config, server.nodes, federation)
    return 0


def run_config(experiment: Experiment, server: Deployment, schema: "Schema") -> dict[str, Scalar]:
    """The flat values that server and nodes get, by hyphenated keys."""
    left_out = LEFT_TO_NODES | SIMULATED | {"set", "algorithms"}
    values: dict[str, Any] = {
        "algorithms": ",".join(experiment.algorithms),
        "set": "; ".join(f"{key}={value}" for key, value in experiment.set.items()),
        **experiment.model_dump(mode="json", exclude=left_out),
        "steps": experiment.local_steps,
        **server.model_dump(mode="json", exclude={"data_schema"}),
        "data_schema": schema.to_json(),
    }
    return {key.replace("_", "-"): value for key, value in values.items() if value is not None}


def _checked(schema: Any, given: Mapping[str, Any], problems: list[str]) -> Any:
    """The options of one schema; what is wrong with them goes into `problems`."""
    try:
        return schema(**{key: value for key, value in given.items() if key in schema.model_fields})
    except ValidationError as error:
        problems += explain(error, lambda key: "--" + key.replace("_", "-"))
        return None


def _data(
    experiment: Experiment, server: Deployment, kit: Kit, given: set[str]
) -> "tuple[Federation | None, Schema]":
    """The data of a trial, if there is to be one, and the schema."""
    from ..data import Schema
    from .plan import prepare_data

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
    return federation, Schema.of(federation)


def _try_out(config: Mapping[str, Scalar], schema: "Schema") -> None:
    """Build what every node will build."""
    from ..flower import require_flower

    require_flower()
    from ..flower.host import trained_module
    from ..flower.options import Plan

    plan = Plan(config)
    for name, algorithm in plan.algorithms.items():
        card = plan.card(name, plan.experiment.seed, tuple(schema.input_shape), schema.classes)
        algorithm.personal.names(trained_module(algorithm, card))


def _write(kit: Kit, config: Mapping[str, Scalar], n: int, federation: "Federation | None") -> None:
    """Write the folder; in a trial, with files of its own clients for each node."""
    from ..data import divided, export_clients
    from ..flower.kit import write_kit
    from ..text import make_console

    trial = federation is not None
    nodes = [{"name": f"node-{i}", "data": f"data/node-{i}" if trial else TO_BE_FILLED_IN} for i in range(n)]
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
        export_clients(federation, kit.out / "data", divided(federation.n_clients, n))
    console = make_console()
    console.print(f"{kit.out} is ready for {n} nodes; {kit.out / 'README.md'} says how to start it.")
    if not trial:
        console.print(f"Say in {kit.out / 'nodes'} where each node has its data.")
