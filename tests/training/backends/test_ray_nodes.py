"""A local cluster of two nodes, of which one is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedattune[ray]'")

pytestmark = pytest.mark.deployed

from conformance.table import CASES
from fedattune import Federation, RunError, Settings
from fedattune.training.backends.ray import open_ray_backend
from fedattune.training.backends.ray.backend import RayTransport
from remote_runs import trained

NODE = {"num_cpus": 1, "object_store_memory": 200_000_000}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False}, shutdown_at_exit=False)
    cluster.add_node(**NODE)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_the_command_joins_a_cluster_by_address(nodes: Any, tmp_path: Path) -> None:
    line = "run --algorithm fedavg --data digits --clients 4 --rounds 2 --steps 2 --engine ray --ray-actors 2"
    done = subprocess.run(
        [sys.executable, "-m", "fedattune", *line.split(), "--ray-address", nodes.address, "--out", "o"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "fedavg" / "seed-0" / "result.json").exists()


def test_a_node_that_is_killed_in_a_round_ends_the_run_with_advice(
    nodes: Any, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    case = next(case for case in CASES if case.name == "ditto")
    settings = {"engine": "ray", "ray_actors": 2, "ray_address": nodes.address}
    there = RayTransport.exchange

    def exchange(self: RayTransport, groups: Any) -> Any:
        head = next(iter(groups[0].values())).head
        if (head["kind"], head.get("round")) == ("train", 3):
            node = nodes.list_all_nodes()[1]  # one of the two actors is there
            raylet = node.all_processes["raylet"][0].process.pid
            processes = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
            nodes.remove_node(node, allow_graceful=False)
            for pid in processes:  # with the machine go all its processes
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        return there(self, groups)

    monkeypatch.setattr(RayTransport, "exchange", exchange)
    with (
        pytest.raises(RunError, match=r"lost the actor .* \(train, round 3\): .*--resume"),
        open_ray_backend(Settings(**settings)) as make_backend,
    ):
        trained(case, ragged, make_backend, **settings)
    assert not ray.is_initialized()  # we have left the cluster, which goes on
