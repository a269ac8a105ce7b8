"""The check of a written deployment."""

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import ConfigError
from fedattune.deploy.operate.check import check_kit
from fedattune.deploy.operate.kit import find_run_folder, write_kit
from flower.certificates import write_certificate
from flower.harness import ports

CONFIG = {"algorithms": "fedavg", "model": "dnn", "data-schema": '{"classes": ["a", "b"], "input_shape": [3]}'}


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    folder = tmp_path / "kit"
    nodes = [{"data": "a.csv"}, {"data": "CHANGE ME"}]
    write_kit(folder, config=CONFIG, nodes=nodes, results="runs", **ports(2))
    subprocess.run([folder / "certificates.sh"], check=True, capture_output=True)
    return folder


def found(folder: Path) -> dict[str, tuple[str, str]]:
    return {one.name: (one.state, f"{one.value}; {one.advice}") for one in check_kit(folder)}


def test_a_good_deployment_has_nothing_broken(kit: Path) -> None:
    states = {name: state for name, (state, _) in found(kit).items()}
    assert "broken" not in states.values(), found(kit)
    assert {name for name, state in states.items() if state == "note"} == {"nodes/1.toml", "SuperLink"}
    assert {"server certificate", "authority", "names", "chain", "server key", "keys", "port"} <= states.keys()


def replace(old: str, new: str) -> Callable[[Path], None]:
    def change(kit: Path) -> None:
        file = kit / "app/pyproject.toml"
        file.write_text(file.read_text().replace(old, new))

    return change


def other_certificates(*files: str) -> Callable[[Path], None]:
    """Take files of another authority."""

    def change(kit: Path) -> None:
        old = {file: (kit / "certificates" / file).read_bytes() for file in ("ca.crt", "server.pem", "server.key")}
        subprocess.run(["rm", "-r", kit / "certificates"], check=True)
        subprocess.run([kit / "certificates.sh"], check=True, capture_output=True)
        for file in old.keys() - set(files):
            (kit / "certificates" / file).write_bytes(old[file])

    return change


def same_key(kit: Path) -> None:
    (kit / "keys/node-1.pub").write_bytes((kit / "keys/node-0.pub").read_bytes())


def trial_data(kit: Path) -> None:
    (kit / "nodes/0.toml").write_text('data = "data/node-0"\n')


@pytest.mark.parametrize(
    ("spoil", "name", "text"),
    [
        (replace('"fedavg"', '"fedavgg"'), "configuration", "did you mean 'fedavg'"),
        (replace("flwr>=1.40,<1.43", "flwr==1.0.0"), "app", "the app needs ==1.0.0; pip install 'flwr==1.0.0', or"),
        (replace("flwr>=1.40,<1.43", "click"), "app", "it names no version of Flower; write flwr>=1.40,<1.43 into app"),
        (other_certificates("ca.crt"), "chain", "no authority in ca.crt signed server.pem"),
        (other_certificates("server.key"), "server key", "server.key is of another certificate"),
        (lambda kit: (kit / "certificates/ca.crt").write_text("x"), "certificates", "replace the file"),
        (lambda kit: (kit / "keys/node-0").chmod(0o644), "keys/node-0", "other users may read node-0 (mode 644"),
        (lambda kit: (kit / "keys/node-0.pub").write_text("x"), "keys/node-0.pub", "no public key that Flower"),
        (same_key, "keys/node-1.pub", "the same key as node-0.pub"),
        (lambda kit: (kit / "nodes/0.toml").write_text("data ="), "nodes/0.toml", "fix the file"),
        (lambda kit: (kit / "keys/node-1.pub").unlink(), "keys", "1 public keys for 2 nodes; get the others"),
        (lambda kit: (kit / "keys/x.pub").mkdir(), "keys/x.pub", "no public key that Flower"),
        (trial_data, "nodes/0.toml", "the trial's data in data/node-0 are missing"),
        (replace("[tool.flwr.app.config]", "[tool.other]"), "configuration", "no table [tool.flwr.app.config]"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named_with_its_cure(
    kit: Path, spoil: Callable[[Path], object], name: str, text: str
) -> None:
    spoil(kit)
    state, message = found(kit)[name]
    assert state == "broken"
    assert text in message


def test_a_method_of_ones_own_is_a_note(kit: Path) -> None:
    replace('"fedavg"', '"local,mine"')(kit)
    assert found(kit)["configuration"][0] == "broken"
    replace("fedattune.deploy.server.server_app:app", "yours:server")(kit)
    replace("[tool.flwr.app.config]", "[tool.flwr.app.config]\nnodes = 3")(kit)
    state, message = found(kit)["configuration"]
    assert state == "note"
    assert "was not checked with yours:server, and FedAttune alone says: unknown algorithm 'mine'" in message
    assert "2 public keys for 3 nodes" in found(kit)["keys"][1]  # the number of nodes is known all the same


@pytest.mark.parametrize("text", ["tool = 3", "project = 3\n[tool.flwr.app]\nconfig = 3", "[tool]\nflwr = [1]"])
def test_an_app_that_is_no_table(text: str, kit: Path) -> None:
    (kit / "app/pyproject.toml").write_text(text)
    state, message = found(kit)["configuration"]
    assert state == "broken"
    assert "expected the table [tool.flwr.app.config]" in message
    with pytest.raises(ConfigError, match=r"app/pyproject\.toml: tool.* expected the table"):
        find_run_folder(kit)


def expired(kit: Path) -> bytes:
    """Make a certificate of an authority that has expired."""
    write_certificate(kit / "old", days=-1)
    return (kit / "old" / "ca.crt").read_bytes()


def test_a_port_that_another_program_has_is_broken(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("FEDATTUNE_PORT", str(other.getsockname()[1]))
        monkeypatch.setattr("httpx.Client.send", refuse)
        assert found(kit)["port"][0] == "broken"


def refuse(*_: object, **__: object) -> None:
    import httpx

    raise httpx.ConnectError("refused")
