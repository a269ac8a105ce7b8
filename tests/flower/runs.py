"""Runs over nodes in this process, and the same runs in the simulator."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import test_conformance
from fedattune import Federation, Result, fit
from fedattune.data import export_clients, infer_schema
from fedattune.deploy.node.client_app import make_client_app
from fedattune.deploy.server.server_app import run_server

from .certificates import write_node_keys
from .in_process import InProcessGrid

GROUPS = ([0, 3], [1, 2, 4], [5])

RUN = test_conformance.RUN | {"rounds": 3, "steps": 2}


def run_deployed(
    federation: Federation,
    folder: Path,
    *,
    lost: Any = lambda *_: False,
    custom: Any = None,
    make_grid: type[InProcessGrid] = InProcessGrid,
    groups: Sequence[Sequence[int]] = GROUPS,
    log_format: str = "text",
    own: Sequence[Mapping[str, Any]] = (),
    list_removed: Any = frozenset,
    **config: Any,
) -> list[Result]:
    """Run a deployment over nodes in this process, each with its data in files of its own; return the results."""
    if not (folder / "data").exists():
        export_clients(federation, folder / "data", groups)
    run_config = {
        "model": "dnn",
        "run-folder": str(folder / "run"),
        "nodes": len(groups),
        "poll": 0.001,
        "round-timeout": 0.05,
        "metrics-port": 0,  # tests run side by side
        "log-format": log_format,
        "data-schema": infer_schema(federation).to_json(),
        **{key.replace("_", "-"): value for key, value in (RUN | config).items()},
    }
    if run_config["model"] == "dnn":
        run_config["set"] = f"dnn.hidden=6; {run_config.get('set', '')}"
    nodes = [
        {
            "name": f"node-{i}",
            "data": str(folder / "data" / f"node-{i}"),
            "state": str(folder / f"state-{i}"),
            "log-format": log_format,
            **(own[i] if own else {}),
        }
        for i in range(len(groups))
    ]
    grid = make_grid(make_client_app(custom), nodes, run_config, lost)
    log: list[str] = []
    try:
        # In JSON, the server and the nodes print.
        return run_server(grid, run_config, custom, log.append if log_format == "text" else None, list_removed)
    finally:
        (folder / "log.txt").write_text("\n".join(log))


def run_secure(federation: Federation, folder: Path, *, rules: Mapping[str, Any] = {}, **config: Any) -> list[Result]:
    """Run a deployment with secure aggregation; `rules` are further keys for the configuration of every node."""
    groups = config.get("groups", GROUPS)
    keys = (
        [{"key": str(folder / f"keys/node-{i}"), "roster": str(folder / "keys/roster.pub")} for i in range(len(groups))]
        if (folder / "keys").exists()
        else write_node_keys(folder / "keys", len(groups))
    )
    own = [{"secure-aggregation": "required", **one, **rules} for one in keys]
    return run_deployed(federation, folder, own=own, secure_aggregation=True, **config)


def run_simulated(name: str, federation: Federation, options: Mapping[str, Any] = {}, **settings: Any) -> Result:
    """Run the same method in the simulator, as nodes do: the models of the last round, and the defence."""
    return fit(
        federation,
        name,
        "dnn",
        options=options,
        model_options={"hidden": 6},
        **(RUN | {"early_stopping": "off", "screening": "groups", "accept": "harmless"} | settings),
    )


def read_log(folder: Path) -> list[str]:
    """Read the sentences that the server logged in `run_deployed`."""
    return (folder / "log.txt").read_text().splitlines()


def find_models(folder: Path, name: str, seed: int = 0) -> dict[str, Path]:
    """Find the file of each client's model, which is on its node."""
    files = folder.glob(f"state-*/*/{name}/seed-{seed}/models/*.safetensors")
    return {file.stem.partition("-")[2]: file for file in files}
