"""Run the app of a folder in Flower's simulation runtime: python simulate.py FOLDER NODES, as `flwr run` does.

`flwr run` itself needs a SuperLink, and `flwr.simulation.run_simulation` reads no configuration.
"""

import sys
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.common.config import get_fused_config_from_dir
from flwr.simulation.run_simulation import EventType, _run_simulation
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


def simulate(folder: Path, nodes: int) -> None:
    """Run the app, whose nodes share one core."""
    sys.path.insert(0, str(folder))
    run = Run.create_empty(run_id=1)
    run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    _run_simulation(
        nodes,
        EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app_attr="digits_app.client_app:app",
        server_app_attr="digits_app.server_app:app",
        server_app_context=Context(1, 0, {}, RecordDict(), get_fused_config_from_dir(folder, {})),
        app_dir=str(folder),
        run=run,
        is_app=True,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}},
    )


if __name__ == "__main__":
    simulate(Path(sys.argv[1]), int(sys.argv[2]))
