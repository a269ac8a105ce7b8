"""A company's proxy in the environment, as hospitals have it: the node's way to the server, but never for loopback."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import RunError
from fedattune.core.checks import Finding
from fedattune.deploy.operate.check import check_node
from fedattune.deploy.operate.kit import list_nodes, write_kit
from flower.certificates import write_certificate
from flower.harness import free_ports, ports


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The first line of every request to a proxy, which answers none."""
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                client, _ = server.accept()
                with client:
                    if not (line := client.recv(1000).decode().partition("\r\n")[0]):
                        return
                    lines.append(line)

        thread = threading.Thread(target=answer)
        thread.start()
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, "http://{}:{}".format(*server.getsockname()))
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield lines
        socket.create_connection(server.getsockname()).close()
        thread.join(10)


def write_deployment(folder: Path) -> Path:
    write_kit(folder, config={}, nodes=[{"data": "ward.csv", "name": "a"}], **ports(1))
    write_certificate(folder / "certificates")
    return folder


def test_the_superlink_is_called_without_the_proxy(asked: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not answer"):
        list_nodes(write_deployment(tmp_path))
    assert not asked


def check_server(folder: Path, superlink: str) -> Finding:
    (found,) = (one for one in check_node(folder / "nodes/0.toml", superlink=superlink) if one.name == "server")
    return found


def test_a_node_is_checked_on_its_own_way_to_the_server(asked: list[str], tmp_path: Path) -> None:
    folder = write_deployment(tmp_path)
    assert check_server(folder, f"localhost:{free_ports(1)}").state == "broken"
    assert not asked
    assert check_server(folder, "fed.example.org:9443").state == "broken"
    assert asked == ["CONNECT fed.example.org:9443 HTTP/1.1"]


@pytest.mark.parametrize(
    ("company", "exceptions"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "intranet"}, "127.0.0.1,localhost,intranet"),
        ({"no_proxy": "lan", "NO_PROXY": "intranet"}, "127.0.0.1,localhost,lan"),  # as Python and curl read them
    ],
)
def test_scripts_leave_loopback_out(company: Mapping[str, str], exceptions: str, tmp_path: Path) -> None:
    folder = write_deployment(tmp_path)
    environment = {"PATH": os.environ["PATH"], **company}
    command = ["/bin/sh", "-c", ". ./common.sh; env"]
    said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert {f"no_proxy={exceptions}", f"NO_PROXY={exceptions}"} <= set(said.stdout.splitlines())
