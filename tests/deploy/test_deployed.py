"""FedAttune in real processes with TLS and keys: the simulator's numbers, and what is left of them when things fail."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")


from fedattune import Federation, Result, fit, load_model
from fedattune.cli import main
from fedattune.deploy.operate import programs
from fedattune.deploy.operate.audit import AuditLog
from fedattune.deploy.secagg.session import STEPS
from fedattune.experiments.config import Experiment
from fedattune.experiments.plan import prepare_data
from flower.harness import Deployment, ports, wait_until

pytestmark = [pytest.mark.deployed, pytest.mark.timeout(600)]  # processes take long where others work beside them


METHODS = ("local", "fedavg", "fedmcsa", "fedrep", "pfedla", "scaffold")
Weights = Mapping[str, torch.Tensor]
DATA: dict[str, Any] = {"data": "digits", "partition": "dirichlet", "clients": 6}
RUN: dict[str, Any] = {"steps": 3, "batch_size": 16, "lr": 0.1}

# Each message is a process; most of its time would be these imports.
IMPORTS = (
    "fedattune.deploy.node.client_app",
    "fedattune.deploy.server.server_app",
    "fedattune.algorithms",
    "fedattune.experiments.session",
    "fedattune.analysis.compare",
    "fedattune.analysis.output.report",
    "fedattune.analysis.verdict",
)


class Trial(Deployment):
    """What `fedattune deploy write` writes for a trial on this machine, its nodes ready to work."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        faults: Sequence[str] = (),
        seconds: float = 0,
        server_app: str = "fedattune.deploy.server.server_app:app",
        **options: Any,
    ) -> None:
        self.options = {"model": "dnn", "set": "dnn.hidden=6", **DATA, **RUN, **options}
        words = {"nodes": nodes, "out": folder, "poll": 0.05, **ports(nodes), **self.options}
        flags = [f"--{k.replace('_', '-')}{'' if v is True else f'={v}'}" for k, v in words.items()]
        assert main(["deploy", "write", *flags]) == 0
        apps = {"server.server_app": server_app, **({"node.client_app": "faulty_app:app"} if faults else {})}
        for name, replacement in apps.items():
            _replace_text(folder / "app/pyproject.toml", f"fedattune.deploy.{name}:app", replacement)
        for node, fault in enumerate(faults):
            with (folder / f"nodes/{node}.toml").open("a", encoding="utf-8") as config:
                config.write(f'fault = "{fault}"\n')
        more = {"FEDATTUNE_IMPORTS": ",".join(IMPORTS), "FAULTY_SECONDS": str(seconds)}
        super().__init__(folder, nodes=nodes, env=more)

    def wait_for_node(self, node: int, timeout: float = 90) -> None:
        super().wait_for_node(node, timeout)
        self.wait_for(programs.READY, f"node-{node}", timeout)

    def server_app(self) -> int:
        """The process id of the run that is going on."""
        children: list[int] = []
        wait_until(
            lambda: bool(children.extend(children_of(self.pid("superexec"))) or children),
            "the server app",
            self.scripts["superlink"],
        )
        return children[0]

    def result(self, method: str) -> Result:
        return Result.load(self.folder / "runs/deployment" / method / "seed-0")

    def until(self, file: str) -> None:
        """Wait for a file of the server."""
        run = self.scripts["run"]
        wait_until(lambda: (self.folder / file).exists(), file, run, 200)

    def rounds_kept(self, node: int) -> list[int]:
        """The rounds of which a node has its clients' states."""
        files = self.folder.glob(f"state/node-{node}/*/*/seed-0/rounds/*.safetensors")
        return sorted(int(file.stem) for file in files)


def _replace_text(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def models_below(folder: Path, method: str) -> dict[str, Weights]:
    """The weights of each client's model, which is on its node."""
    files = folder.glob(f"state/node-*/*/{method}/seed-0/models/*.safetensors")
    return {file.stem.partition("-")[2]: load_model(file).state_dict() for file in files}


def children_of(parent: int) -> Iterable[int]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            yield int(file.parent.name)


def simulated(method: str, federation: Federation, **settings: Any) -> Result:
    defence = {"screening": "groups", "accept": "harmless"}  # the default of deployments
    return fit(federation, method, "dnn", model_options={"hidden": 6}, **(RUN | defence | settings))


def same_run(expected: Result, got: Result) -> None:
    for a, b in zip(expected.history, got.history, strict=True):
        assert a["bytes"] == b["bytes"]
        for point in ("received", "trained", "global"):
            assert (a.get(point) is None) == (b.get(point) is None), point
            if a.get(point):
                assert b[point] == pytest.approx(a[point], abs=1e-5)
    assert (got.bytes_up, got.bytes_down) == (expected.bytes_up, expected.bytes_down)


def same_models(expected: Callable[[str], Weights], got: Mapping[str, Weights]) -> None:
    for client, state in got.items():
        for name, value in expected(client).items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


def test_the_numbers_are_the_simulators(tmp_path: Path) -> None:
    federation = prepare_data(Experiment(**DATA))
    algorithms = ",".join(METHODS)
    with Trial(tmp_path / "trial", 2, algorithms=algorithms, rounds=2, eval_every=2) as trial:
        run = trial.run(timeout=200)
        assert run.completed, run.output
        for method in METHODS:
            whole = simulated(method, federation, rounds=2, eval_every=2)
            same_run(whole, trial.result(method))
            models = models_below(trial.folder, method)
            assert sorted(models) == list("012345")
            same_models(lambda client, whole=whole: whole.model(client).state_dict(), models)


def test_a_run_outlives_its_server(tmp_path: Path) -> None:
    federation = prepare_data(Experiment(**DATA))
    with Trial(tmp_path / "trial", 2, algorithms="fedrep,scaffold", rounds=3, eval_every=3) as trial:
        # The SuperLink goes and comes back, and the run goes on; then its app goes, and another one goes on from there.
        first = trial.start_run()
        # Flower delivers a message at most once, so one that is on its way at the kill may be lost.
        for node in ("node-0", "node-1"):
            trial.wait_for("ROUND 2]", node)
            wait_until(
                lambda node=node: "Received successfully" in trial.log(node).partition("ROUND 2]")[2],
                "the message of round 2",
                trial.scripts[node],
            )
        trial.kill_superlink()
        trial.until("runs/deployment/scaffold/seed-0/checkpoints/000001.safetensors")
        os.kill(trial.server_app(), signal.SIGKILL)
        first.kill()
        # The SuperLink would find out by itself after a minute.
        trial.call("flwr.sh", "stop", re.findall(r"^run (\d+)", first.output, re.MULTILINE)[0])
        second = trial.run()
        assert second.completed, second.output
        assert "scaffold, seed 0: continuing after round" in second.output
        for method in ("fedrep", "scaffold"):
            result = trial.result(method)
            same_run(simulated(method, federation, rounds=3, eval_every=3), result)
            assert not result.store.faults()


def test_a_node_that_is_killed_is_missed_and_comes_back(tmp_path: Path) -> None:
    # So that rounds are left when it comes back, another node waits for it from round 5 on.
    faults = (",".join(f"linger@{r}" for r in range(5, 10)), "", "")
    options = {"algorithms": "fedrep", "rounds": 9, "eval_every": 9, "round_timeout": 15}
    with Trial(tmp_path / "trial", 3, faults=faults, seconds=7, **options) as trial:
        run = trial.start_run()
        trial.until("runs/deployment/fedrep/seed-0/checkpoints/000002.safetensors")
        trial.kill_node(2)
        had = trial.rounds_kept(2)[-1]
        trial.start_node(2)  # it is refused until the server takes the old session for ended
        (trial.folder / "state/go").touch()
        ended = run.finish(120)
        assert ended.completed, ended.output
        result = trial.result("fedrep")
        missed = "node 'node-2' sent no reply within 15 seconds"
        assert f"round 3: {missed}" in ended.output
        assert any(re.search(f"fedrep: rounds? 3.* without 2, 5: {missed}", note) for note in result.notes)
        faults = result.store.faults()
        missing = [r for r, who, _ in faults if who in (2, 5)]  # those of the node
        assert missing[0] == 3
        assert missing[-1] < 9  # it uploads again
        assert had in (2, 3)
        assert trial.rounds_kept(2)[-1] == 9
        # It remembered what the server takes it to, and its log has no gap where it was killed.
        assert not list((trial.folder / "state/node-2").glob("error*.log"))
        assert AuditLog(trial.folder / "state/node-2").verify() is None


FAULTS = ("", "late@2", "nan@2", "shape@2,stale@3,version@4", "huge@3")


def test_a_run_outlives_new_certificates_and_new_keys(tmp_path: Path) -> None:
    # A message that is on its way when the SuperLink is killed may be lost, which costs `round_timeout`.
    options = {"algorithms": "fedrep", "rounds": 40, "eval_every": 40, "round_timeout": 40}
    # So that rounds are left when node 1 comes back, node 0 waits for it from round 30 on.
    faults = (",".join(f"linger@{r}" for r in range(30, 40)), "")
    with Trial(tmp_path / "trial", 2, server_app="lossy_server:app", faults=faults, seconds=30, **options) as trial:
        first = trial.start_run()
        trial.wait_for("round 1 of 40")
        trial.call("certificates.sh", "renew")
        trained = first.output.count(" of 40")
        wait_until(lambda: first.output.count(" of 40") > trained + 2, "rounds after the restart", first, 200)
        before = trial.call("nodes.sh")
        for file in ("keys/node-1", "keys/node-1.pub"):
            (trial.folder / file).rename(tmp_path / Path(file).name)
        trial.call("certificates.sh", "key", "1")
        rotation = trial.start("rotation", "./nodes.sh", "rotate", "node-1", "keys/node-1.pub")
        wait_until(lambda: "restart its ./node.sh" in rotation.output, "the new key", rotation)
        trial.stop_node(1)
        trial.start_node(1)
        assert trial.scripts.pop("rotation").finish(60).code == 0
        trial.wait_for("Sending: query", "node-1")
        (trial.folder / "state/go").touch()
        after = trial.call("nodes.sh")
        ids = [
            {line.split()[1]: line.split()[0] for line in text.splitlines() if "removed" not in line}
            for text in (before, after)
        ]
        assert ids[0]["node-0"] == ids[1]["node-0"]
        assert ids[0]["node-1"] != ids[1]["node-1"]
        ended = first.finish(200)
        assert ended.completed, ended.output
        faults = trial.result("fedrep").store.faults()
        assert max((r for r, _, _ in faults), default=0) < 40  # the node with the new key trains again
        assert "ObjectPushError" in ended.output  # and the objects were pushed again


def test_a_node_that_is_added_joins_the_run_and_a_pause_keeps_it(tmp_path: Path) -> None:
    with Trial(tmp_path / "trial", 3, algorithms="fedmcsa", rounds=40, eval_every=40) as trial:
        trial.stop_node(2)
        trial.call("nodes.sh", "remove", "node-2")
        for file in ("keys/node-2", "keys/node-2.pub"):
            (trial.folder / file).rename(tmp_path / Path(file).name)
        run = trial.start_run(nodes=2)
        trial.until("runs/deployment/fedmcsa/seed-0/checkpoints/000002.safetensors")
        trial.call("certificates.sh", "key", "2")
        trial.call("nodes.sh", "add", "keys/node-2.pub", "node-2")
        trial.start_node(2)
        wait_until(lambda: "continuing after round" in run.output, "the new node", run, 60)
        assert "node 'node-2' joins" in run.output
        assert main(["deploy", "pause", str(trial.folder)]) == 0
        ended = run.finish(60)
        assert ended.completed, ended.output
        assert "the run is paused and everything is saved" in ended.output
        ended = trial.run(timeout=200, nodes=2)
        assert ended.completed, ended.output
        assert "6 clients at 3 nodes" in ended.output
    result = trial.result("fedmcsa")
    assert len(result.clients) == 6
    assert all(one.trained is not None for one in result.clients)
    assert any("clients joined after round" in note for note in result.notes)
    assert not result.store.faults()
    assert len(models_below(trial.folder, "fedmcsa")) == 6


def test_secure_sums_survive_a_killed_node(tmp_path: Path) -> None:
    options = {"clients": 10, "algorithms": "fedavg", "rounds": 5, "eval_every": 5, "round_timeout": 30}
    with Trial(tmp_path / "trial", 5, secure_aggregation=True, **options) as trial:
        run = trial.start_run()
        trial.until("runs/deployment/fedavg/seed-0/checkpoints/000002.safetensors")
        trial.kill_node(4)
        ended = run.finish(400)
        assert ended.completed, ended.output
    result = trial.result("fedavg")
    lost = {r for r, _, _ in result.store.faults()}
    assert lost
    assert min(lost) > 2
    assert all("node 'node-4'" in why for _, _, why in result.store.faults())
    assert "no sum" not in ended.output
    # The server stored one client that stands for all; the nodes that are left have their clients' models.
    assert [one.id for one in result.clients] == ["all clients together"]
    assert len(models_below(trial.folder, "fedavg")) == 8
    for node in range(4):
        log = AuditLog(trial.folder / f"state/node-{node}")
        assert log.verify() is None
        left = {one["kind"] for one in log.read() if one["direction"] == "out"}
        assert left == {"hello", *(f"secure-{step}" for step in STEPS)}
        assert not list((trial.folder / f"state/node-{node}").rglob("secure-session.json"))


def test_a_node_that_is_removed_during_a_run_is_named_so_everywhere(tmp_path: Path) -> None:
    with Trial(tmp_path / "trial", 3, algorithms="fedavg", rounds=30, eval_every=30) as trial:
        run = trial.start_run(**{"run-folder": "runs/other"})
        trial.until("runs/other/fedavg/seed-0/checkpoints/000002.safetensors")
        trial.call("nodes.sh", "remove", "node-2")
        ended = run.finish(200)
        assert ended.completed, ended.output
        assert f"results: {trial.folder}/runs/other\n" in ended.output
        said = subprocess.run(
            [trial.folder / "register.sh"], env=trial.env, capture_output=True, text=True, check=False, timeout=200
        )
        assert said.returncode == 1
        assert said.stdout.split("\n") == ["node-0 is registered", "node-1 is registered", ""]
        assert "node-2 is not registered: its key was removed, and the server never takes a removed key" in said.stderr
        assert "run ./certificates.sh key N" in said.stderr
    faults = Result.load(trial.folder / "runs/other/fedavg/seed-0").store.faults()
    assert {why for r, _, why in faults if r == 30} == {"node 'node-2' was removed"}
