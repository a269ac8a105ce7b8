"""Checks that a node is ready, against a small server with certificates of its own."""

import importlib.metadata
import ssl
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from data.nodes import csv, rows
from fedattune import ConfigError
from fedattune.core.checks import Finding
from fedattune.data import Schema
from fedattune.deploy import FLOWER_VERSIONS
from fedattune.deploy.operate import check as deploy_check
from fedattune.deploy.operate import programs
from fedattune.deploy.operate.check import check_node
from flower.certificates import write_certificate

SCHEMA = Schema(classes=("n", "y"), numbers=("age",), categories={"sex": ("f", "m")}, target="ill")


def write_key(file: Path, key: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    file.chmod(0o600)


class Server:
    """An HTTPS server whose clock is `ahead` seconds ahead."""

    def __init__(self, certificate: Path) -> None:
        self.ahead = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_error(404)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(datetime.now(UTC).timestamp() + outer.ahead)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.http.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        """The address that the node uses."""
        return f"localhost:{self.http.server_port}"

    def stop(self) -> None:
        """Stop it."""
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_certificate(tmp_path / "certificates")
    one = Server(tmp_path / "certificates" / "server.pem")
    yield one
    one.stop()


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node that is ready but for the server."""
    csv(tmp_path / "ward.csv", rows(40))
    write_certificate(tmp_path / "certificates")
    write_key(tmp_path / "keys" / "node-0", ec.generate_private_key(ec.SECP384R1()))
    (tmp_path / "schema.yaml").write_text(SCHEMA.to_yaml())
    file = tmp_path / "nodes" / "0.toml"
    file.parent.mkdir()
    file.write_text('data = "ward.csv"\nname = "a"\n')
    return file


def check(node: Path, **options: Any) -> list[Finding]:
    return check_node(node, schema_file=node.parents[1] / "schema.yaml", **options)


def broken(findings: list[Finding]) -> list[str]:
    return [f"{one.name}: {one.value} -> {one.advice}" for one in findings if one.state == "broken"]


def only(findings: list[Finding]) -> str:
    (one,) = broken(findings)
    return one


def test_a_node_is_ready(node: Path, server: Server) -> None:
    found = check(node, superlink=server.address)
    assert [one.name for one in found if one.state != "ok"] == []
    names = {one.name for one in found}
    assert names == {
        "FedAttune", "Flower", "rules", "data", "key", "authority", "server", "certificate", "clock", "state",
    }  # fmt: skip
    assert [one for one in check(node) if one.state == "note"] == [
        Finding("server", "note", "not checked", "give --superlink HOST:PORT")
    ]


def test_configurations_that_cannot_be(node: Path) -> None:
    node.write_text('data = "ward.csv"\nnam = "a"\nconsent = "maybe"\n')
    text = "\n".join(broken(check(node)))
    assert "unknown key 'nam'; did you mean 'name'?" in text
    assert "consent: " in text
    node.write_text('name = "a"\n')
    assert "has no data" in only(check(node))
    node.write_text("name = \n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        check(node)
    with pytest.raises(ConfigError, match="cannot read the node's configuration"):
        check(node.with_name("1.toml"))


def test_the_schema_of_the_deployment_is_found(node: Path) -> None:
    app = node.parents[1] / "app" / "pyproject.toml"
    app.parent.mkdir()
    app.write_text(f"[tool.flwr.app.config]\ndata-schema = '{SCHEMA.to_json()}'\ntest = 0.2\n")
    assert broken(check_node(node)) == []
    csv(node.parents[1] / "ward.csv", ["a,20,q,n", *rows(20)])
    assert "holds 'q'" in only(check_node(node))
    app.unlink()
    notes = [one.name for one in check_node(node) if one.state == "note"]
    assert notes == ["schema", "server"]


APP = """[tool.flwr.app.config]
algorithms = "local,fedmcsa"
rounds = 3
model = "dnn"
"""


def write_app(node: Path, text: str) -> Path:
    file = node.parents[1] / "app" / "pyproject.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def test_rules_that_refuse_the_run(node: Path) -> None:
    write_app(node, APP)
    node.write_text('data = "ward.csv"\nname = "a"\nmethods = "fedavgg"\nmax-rounds = 1\n')
    found = broken(check(node))
    assert len(found) == 3
    assert "the method 'local', and this node allows only fedavgg" in found[0]
    assert "the method 'fedmcsa', and this node allows only fedavgg" in found[1]
    assert "asks for 3 rounds, and this node allows 1" in found[2]
    node.write_text('data = "ward.csv"\nname = "a"\nmethods = "fedmcsa, local"\nmax-rounds = 3\n')
    assert broken(check(node)) == []


def test_keys(node: Path) -> None:
    key = node.parents[1] / "keys" / "node-0"
    key.chmod(0o644)
    assert "(mode 644, expected 600) -> chmod 600" in only(check(node))
    write_key(key, ed25519.Ed25519PrivateKey.generate())
    assert "Ed25519PrivateKey, expected one on a NIST curve such as P-384" in only(check(node))
    for curve in (ec.SECP256R1(), ec.SECP521R1()):  # Flower accepts them, too
        write_key(key, ec.generate_private_key(curve))
        assert broken(check(node)) == []
    key.write_text("no key")
    assert "is no private key" in only(check(node))
    key.unlink()
    assert "./certificates.sh key" in only(check(node))


def test_authorities(node: Path) -> None:
    folder = node.parents[1] / "certificates"
    write_certificate(folder, days=10)
    (note,) = (one for one in check(node) if one.name == "authority")
    assert note.state == "note"
    assert "in 9 days" in note.value
    write_certificate(folder, days=-1)
    assert "has expired on" in only(check(node))
    expired = (folder / "ca.crt").read_bytes()
    write_certificate(folder)
    bundle = expired + (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes(bundle)
    (authority,) = (one for one in check(node) if one.name == "authority")
    assert authority.state == "ok"
    (folder / "ca.crt").write_text("no certificate")
    assert "holds no certificate" in only(check(node))
    (folder / "ca.crt").unlink()
    assert "cannot read" in only(check(node))


def test_a_server_that_cannot_be_reached(node: Path, server: Server) -> None:
    address = server.address
    found = check(node, superlink=address.replace("localhost", "127.0.0.1"))
    assert "but its certificate: IP address mismatch" in only(found)
    assert "use an address that the certificate names" in only(found)
    found = check(node, superlink=address.replace(str(server.http.server_port), "1"))
    assert "localhost:1 cannot be reached: ConnectError" in only(found)
    write_certificate(node.parents[1] / "certificates")  # another authority
    assert "get certificates/ca.crt" in only(check(node, superlink=address))


@pytest.mark.parametrize(("ahead", "words"), [(-8, "ahead of the server's"), (400, "behind the server's")])
def test_clocks_that_flower_refuses(ahead: float, words: str, node: Path, server: Server) -> None:
    server.ahead = ahead
    found = only(check(node, superlink=server.address))
    assert words in found
    assert "at most 5 s ahead and 305 s behind" in found


def test_the_accepted_skew_is_flowers() -> None:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    assert SYSTEM_TIME_TOLERANCE == deploy_check.MAX_AHEAD_S
    assert TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE == deploy_check.MAX_BEHIND_S


def test_another_version_of_flower(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.30.0")
    found = "Flower: Flower 1.30.0 is installed, expected >=1.40,<1.43; pip install 'flwr>=1.40,<1.43'"
    assert only(check(node)).startswith(found)
    with pytest.raises(ConfigError, match=r"Flower 1\.30\.0 is installed"):
        programs.main("flower-supernode", [])


def test_the_package_asks_for_the_versions_that_are_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"flwr{FLOWER_VERSIONS}" in project["optional-dependencies"]["flower"]
