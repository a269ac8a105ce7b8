"""The deployment folder: its files, and what they do as processes on this machine with TLS and keys."""

import http.client
import inspect
import math
import os
import re
import signal
import ssl
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedattune import ConfigError
from fedattune.deploy.operate import programs
from fedattune.deploy.operate.kit import Scalar, write_kit
from flower.harness import Deployment, free_ports, nginx, ports, wait_until

TEXT = '{"method": "it\'s \\"x\\"",\n "rates": [0.1, 1e-05], "who": "Zoë \\\\ \x7f\t#"}'
"""What a configuration may hold as text: JSON of several lines, quotes, backslashes, control characters."""

NODES = [{"name": 'St. Mary\'s "north"'}, {"name": "b"}]

needs_nginx = pytest.mark.skipif(not nginx(), reason="nginx is not installed")


def echo_kit(folder: Path, **config: Scalar) -> Path:
    """A deployment of the echo app with two nodes on free ports."""
    write_kit(
        folder,
        config={"rounds": 2, "nodes": 2, "numbers": 10, "text": TEXT, **config},
        nodes=NODES,
        server_app="echo_app:server",
        client_app="echo_app:client",
        **ports(2),
    )
    return folder


def written(folder: Path, **changes: Any) -> Path:
    write_kit(folder, **{"config": {}, "nodes": [{}], **changes})
    return folder


# The files.


def test_the_app_and_the_nodes_hold_every_value_as_given(tmp_path: Path) -> None:
    config = {"text": TEXT, "rounds": 3, "lr": 1e-05, "big": 1e22, "on": True, "worst": -math.inf}
    folder = written(tmp_path / "a", config=config, nodes=[{"data": TEXT}, {"data": "x", "part": 1}])
    app = tomllib.loads((folder / "app/pyproject.toml").read_text(encoding="utf-8"))
    assert app["tool"]["flwr"]["app"]["config"] == config
    assert app["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "fedattune.deploy.server.server_app:app",
        "clientapp": "fedattune.deploy.node.client_app:app",
    }
    assert tomllib.loads((folder / "nodes/0.toml").read_text(encoding="utf-8")) == {"data": TEXT}
    assert tomllib.loads((folder / "nodes/1.toml").read_text(encoding="utf-8")) == {"data": "x", "part": 1}


def test_all_files_are_returned_and_scripts_can_be_run(tmp_path: Path) -> None:
    files = write_kit(tmp_path / "deep" / "kit", config={}, nodes=[{}, {}])
    assert sorted(files) == sorted(path for path in (tmp_path / "deep").rglob("*") if path.is_file())
    for file in files:
        executable = bool(file.stat().st_mode & stat.S_IXUSR)
        assert executable == (file.suffix == ".sh"), file
        text = file.read_text(encoding="utf-8")
        assert text.endswith("\n")
        assert "{{" not in text
        assert str(tmp_path) not in text  # it can be moved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": []}, "at least one node"),
        ({"port": 9100}, "different ports"),
        ({"node_port": 65536}, "between 1 and 65535"),
        ({"name": "My App"}, "lower-case words"),
        ({"config": {"a.b": 1}}, "keys of a Flower configuration"),
        ({"config": {"rate": 2**63}}, "rate: Flower's integers have 64 bits"),
        ({"config": {"rates": [1]}}, "rates must be text, a number, true or false, got list"),
        ({"nodes": [{"data": "\udc80"}]}, "no Unicode text"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        written(tmp_path / "kit", **changes)
    assert not (tmp_path / "kit").exists()


def test_a_deployment_is_not_overwritten(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ConfigError, match="holds a deployment already"):
        written(tmp_path)


def test_the_proxy_passes_on_what_a_node_with_a_key_calls_and_nothing_else(tmp_path: Path) -> None:
    client = pytest.importorskip("flwr.supernode.fleet_http_client")
    called = set(re.findall(r'"/v1/fleet/([a-z-]+)"', inspect.getsource(client)))
    conf = (written(tmp_path) / "nginx.conf").read_text(encoding="utf-8")
    locations = re.findall(r"^ *location (.*) {$", conf, re.MULTILINE)
    allowed = re.fullmatch(r"~ \^/v1/fleet/\(([a-z|-]+)\)\$", locations[0])
    assert locations[1:] == ["/"]
    assert allowed
    assert set(allowed[1].split("|")) == called - {"register-node", "unregister-node"}


# Certificates and keys.


def run_script(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / command[0]), *command[1:]], capture_output=True, text=True, check=False, timeout=30
    )


def test_scripts_say_what_is_missing(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for command, message in (
        (["superlink.sh"], "run ./certificates.sh first"),
        (["node.sh"], "which nodes?"),
        (["node.sh", "7"], "no nodes/7.toml"),
        (["node.sh", "0"], "run ./certificates.sh key 0"),
        (["register.sh"], "no public key in keys/"),
        (["certificates.sh", "--help"], "usage:"),
    ):
        said = run_script(folder, *command)
        assert said.returncode == 1
        assert message in said.stderr


@pytest.mark.parametrize("name", ["St Mary", "b&c"])
def test_a_key_whose_name_cannot_be_removed_again_is_not_registered(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "keys").mkdir()
    (folder / "flwr.sh").write_text('#!/bin/sh\necho "$@" >> called\n')
    (folder / "keys/node-0.pub").touch()
    said = run_script(folder, "register.sh")
    assert (said.returncode, said.stdout) == (0, "node-0 is registered\n"), said.stderr
    (folder / "called").unlink()
    (folder / "keys/node-0.pub").rename(folder / f"keys/{name}.pub")
    said = run_script(folder, "register.sh")
    assert said.returncode == 1
    assert f"the name '{name}' has other characters than" in said.stderr
    assert f"rename keys/{name}.pub" in said.stderr
    assert not (folder / "called").exists()


# Processes.


def refused(deployment: Deployment, attempts: dict[str, tuple[str, str, list[str]]]) -> None:
    """Nodes beside the scripts, side by side, with other options; each ends with its message and the cause."""
    first = free_ports(len(attempts))
    for number, (name, (_, _, options)) in enumerate(attempts.items()):
        address = ["--superlink", f"127.0.0.1:{deployment.port}", "--port", str(first + number)]
        deployment.start(name, sys.executable, "-m", programs.__name__, "flower-supernode", *address, *options)
    for name, (message, cause, _) in attempts.items():
        ended = deployment.scripts[name].finish(60)
        assert ended.code == 1, ended.output
        assert message in ended.output
        assert cause in ended.output.replace("\n", " ")


@pytest.mark.deployed
def test_a_run_outlives_the_superlink_and_strangers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    folder = echo_kit(tmp_path / "kit")
    with Deployment(folder, nodes=2) as deployment:
        deployment.call("register.sh")  # again: nothing to do
        unknown = run_script(folder, "run.sh", "--attach", "12345")
        assert unknown.returncode == 1
        assert "no run 12345, or the SuperLink does not answer" in unknown.stderr
        assert not list((folder / "state/cli").glob("shown.*"))

        run = deployment.start_run(rounds=4)
        deployment.wait_for("round 0:")
        deployment.kill_superlink()
        ended = run.finish(120)
        assert ended.completed, ended.output
        assert f"results: {folder}/runs" in ended.output
        log = deployment.call("flwr.sh", "log", re.findall(r"^run (\d+)", ended.output)[0], "--show")
        assert f"text: {TEXT!a}" in log
        said = sorted(f"{node['name']} in node-{index}" for index, node in enumerate(NODES))
        assert f"round 3: {said}" in log

        stranger = tmp_path / "stranger"
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", stranger], check=True)
        other = written(tmp_path / "other") / "certificates/ca.crt"
        assert run_script(tmp_path / "other", "certificates.sh").returncode == 0
        ca = ["--root-certificates", "certificates/ca.crt"]
        key = "--auth-supernode-private-key"
        refused(
            deployment,
            {
                "unregistered": (
                    "[code: 2004] Failed to activate SuperNode",
                    "its public key is not registered",
                    [*ca, key, str(stranger)],
                ),
                "no-key": ("[code: 2001] SuperNode authentication is enabled", "the server needs a key", ca),
                "twice": (
                    "[code: 2004] Failed to activate SuperNode",
                    "the key is online already",
                    [*ca, key, "keys/node-0"],
                ),
                "wrong-ca": (
                    "certificate verify failed",
                    "does not trust the server's certificate",
                    ["--root-certificates", str(other), key, "keys/node-0"],
                ),
            },
        )

        # A clock that is ahead ends a node, by Flower without an error.
        skewed = [sys.executable, str(Path(__file__).parents[1] / "flower/skewed_node.py"), "8"]
        address = ["--superlink", f"127.0.0.1:{deployment.port}", "--port", str(free_ports(1))]
        deployment.stop_node(1)
        deployment.start("skewed", *skewed, *address, *ca, key, "keys/node-1")
        assert "this machine's clock" in deployment.scripts["skewed"].finish(60).output
        deployment.start_node(1)

        # As Ctrl-C, `kill %1` and shells do; the node goes in order, so it can come back at once.
        node = deployment.scripts["node-1"].process
        os.killpg(node.pid, signal.SIGTERM)
        assert node.wait(20) == 0
        deployment.stop_node(1)
        deployment.start_node(1)
        assert "Exit Code: 305" not in deployment.scripts["node-1"].output

        running = [deployment.pid(name) for name in ("superlink", "superexec", "node-0", "node-1")]
        assert all(alive(pid) for pid in running)
    assert not any(alive(pid) for pid in running)


@pytest.mark.deployed
def test_a_run_that_fails_is_told_by_the_exit_code(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    with Deployment(echo_kit(tmp_path)) as deployment:
        unknown = deployment.run(no_such_key=1)
        assert (unknown.code, unknown.status) == (1, "not started")
        assert "the run was not started" in unknown.output
        failed = deployment.run(text="fail")
        assert (failed.code, failed.status) == (1, "finished:failed"), failed.output


@pytest.mark.deployed
@needs_nginx
def test_nodes_work_through_the_proxy_and_nothing_else_does(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    folder = echo_kit(tmp_path / "written").rename(tmp_path / "used elsewhere")
    with Deployment(folder) as deployment:
        deployment.call("register.sh")
        deployment.start_proxy()
        for node in (0, 1):
            deployment.start_node(node, wait=False, env=deployment.through_proxy)
        for node in (0, 1):
            deployment.wait_for_node(node)
        run = deployment.run(rounds=1, numbers=3_000_000)  # three pieces
        assert run.completed, run.output

        # The command line works at the SuperLink, and not at the proxy.
        assert "finished:completed" in deployment.call("flwr.sh", "list", "--format", "json")
        deployment.env["FEDATTUNE_PORT"] = str(deployment.proxy_port)
        said = deployment.start("list", "./flwr.sh", "list").finish(60)
        assert said.code == 1
        assert "404 Not Found" in said.output

        trusted = ssl.create_default_context(cafile=folder / "certificates/ca.crt")
        for method, path, direct, proxied in (
            ("POST", "/v1/control/list-runs", 200, 404),
            ("POST", "/v1/control/start-run", 500, 404),
            ("POST", "/v1/runtime/acquire-task", 200, 404),
            ("POST", "/v1/fleet/pull-messages", 401, 401),
            ("POST", "/v1/fleet/register-node", 401, 404),
            ("POST", "/v1/fleet/../control/list-runs", 404, 404),
            ("POST", "/v1/fleet/pull-messages/../../control/list-runs", 404, 404),
            ("POST", "/v1/fleet/%2e%2e/control/list-runs", 404, 404),
            ("POST", "/v1/fleet/..%2fcontrol/list-runs", 404, 404),
            ("POST", "//v1/control/list-runs", 404, 404),
            ("POST", "/v1/control/list-runs?x=/v1/fleet/pull-messages", 200, 404),
            ("GET", "/v1/fleet/pull-messages", 405, 403),
            ("GET", "/docs", 200, 404),
            ("GET", "/", 404, 404),
        ):
            assert answer(deployment.port, trusted, method, path) == direct, (method, path)
            assert answer(deployment.proxy_port, trusted, method, path) == proxied, (method, path)


def answer(port: int, trusted: ssl.SSLContext, method: str, path: str) -> int:
    """The status for a path sent as it is, dots and all."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusted, timeout=30)
    try:
        connection.request(method, path, headers={"content-type": "application/protobuf"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.deployed
def test_a_node_that_crashed_is_started_again(tmp_path: Path) -> None:
    """Without a server the node's program only tries to connect; what is tested is `node.sh`."""
    pytest.importorskip("flwr")
    deployment = Deployment(echo_kit(tmp_path), env={"FEDATTUNE_PAUSE": "0.1"})
    try:
        deployment.call("certificates.sh")
        deployment.start_node(0, wait=False)
        script = deployment.scripts["node-0"]
        wait_until(lambda: "retrying" in script.output, "a first attempt", script)
        first = deployment.pid("node-0")
        deployment.crash_node(0)
        wait_until(lambda: deployment.pid("node-0") != first, "another process", script)
        assert "node-0 ended with code 137; it restarts in 0.1 seconds" in script.output
        second = deployment.pid("node-0")
        deployment.stop_node(0)
        assert script.process.returncode == 0  # by SIGTERM, and not killed
        assert not alive(second)
    finally:
        deployment.stop()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
