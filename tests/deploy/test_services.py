"""The deployment's units of systemd and containers: they run the tested scripts or their commands, and see little."""

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedattune.deploy.operate.kit import write_kit
from fedattune.deploy.operate.programs import COMMANDS

PORTS: dict[str, Any] = {"port": 7443, "proxy_port": 7555, "node_port": 7100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A deployment with three nodes; only the first has trial data."""
    nodes = [{"data": "data/node-0"}, {"data": "CHANGE ME"}, {"data": "CHANGE ME"}]
    write_kit(tmp_path / "kit", config={}, nodes=nodes, results="runs/deployment", **PORTS)
    return tmp_path / "kit"


# Units.


def join_lines(file: Path) -> str:
    return re.sub(r"\\\n\s*", "", file.read_text(encoding="utf-8"))


def unit(folder: Path, name: str) -> dict[str, list[str]]:
    """All values of each key of a unit; a template unit is that of node 2."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in join_lines(folder / f"systemd/fedattune-{name}.service").splitlines():
        if line and line[0] not in "#[":
            key, value = line.split("=", 1)
            found[key].append(value.replace("%i", "2"))
    return found


def script_command(folder: Path, script: str, name: str) -> list[str]:
    """The command that a script keeps running, for node 2."""
    (command,) = re.findall(rf"^ *keep {name} (.*) &$", join_lines(folder / script), re.MULTILINE)
    common = (folder / "common.sh").read_text(encoding="utf-8")
    (flower,) = re.findall(r'^flower="(.*)"$', common, re.MULTILINE)
    for variable, value in {
        "$((FEDATTUNE_NODE_PORT + node))": str(PORTS["node_port"] + 2),
        "$FEDATTUNE_PORT": str(PORTS["port"]),
        "$flower": flower,
        "$node": "2",
    }.items():
        command = command.replace(variable, value)
    return shlex.split(command)


@pytest.mark.parametrize(
    ("name", "script", "kept"),
    [
        ("superlink", "superlink.sh", "superlink"),
        ("superexec", "superlink.sh", "superexec"),
        ("node@", "node.sh", '"node-[$]node"'),
    ],
)
def test_a_unit_runs_the_command_of_the_script(folder: Path, name: str, script: str, kept: str) -> None:
    (start,) = unit(folder, name)["ExecStart"]
    command = shlex.split(start)
    if command[:2] == ["/bin/sh", "-c"]:  # systemd cannot add up
        text = command[2].removeprefix("exec ").replace(f"$$(({PORTS['node_port']} + 2))", "7102")
        command = shlex.split(text.replace("$$", "$"))
    command[0] = command[0].removeprefix("/usr/local/lib/fedattune/bin/")
    assert command == script_command(folder, script, kept)
    assert command[0] == "python3"
    assert command[3] in COMMANDS


@pytest.mark.parametrize("name", ["superlink", "superexec", "proxy", "node@"])
def test_a_unit_writes_only_into_its_own_state(folder: Path, name: str) -> None:
    values = unit(folder, name)
    assert values["User"] == ["fedattune"]
    assert values["ProtectSystem"] == ["strict"]
    assert values["NoNewPrivileges"] == values["PrivateTmp"] == ["yes"]
    assert values["CapabilityBoundingSet"] == [""]
    assert values["UMask"] == ["0077"]
    assert values["Restart"] == ["always"]
    assert values["KillMode"] == ["mixed"]
    writable = " ".join(values["ReadWritePaths"] + values["BindPaths"]).split()
    assert (
        writable
        == {
            "superlink": ["/srv/fedattune/state/superlink"],
            "superexec": ["/srv/fedattune/state/superexec", "/srv/fedattune/runs"],
            "proxy": [],
            "node@": ["/srv/fedattune/state/node-2"],
        }[name]
    )
    for path in writable:
        assert (folder / path.removeprefix("/srv/fedattune/")).stat().st_mode & 0o777 == 0o700
    # The programs that compute cannot have it: a convolution writes machine code.
    assert bool(values["MemoryDenyWriteExecute"]) == (name in {"superlink", "proxy"})
    if name in {"superlink", "superexec"}:  # nobody on the network, and no way out
        assert values["IPAddressDeny"] == ["any"]
        assert values["IPAddressAllow"] == ["localhost"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_units(folder: Path, tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    for file in (folder / "systemd").glob("*.service"):
        # The programs are not installed on this machine.
        text = re.sub(r"^(ExecStart(Pre)?=)\S+", r"\1/bin/true", file.read_text("utf-8"), flags=re.MULTILINE)
        (units / file.name.replace("@", "@2")).write_text(text, encoding="utf-8")
    files = sorted(map(str, units.iterdir()))
    assert len(files) == 4
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    for one in files:
        rated = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", one],
            capture_output=True,
            text=True,
            check=False,
        )
        assert rated.returncode == 0, rated.stdout.splitlines()[-1]


# Containers.


def services(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((folder / "compose.yaml").read_text("utf-8"))["services"]
    return found


def mounts(service: dict[str, Any], *, read_only: bool) -> set[str]:
    """The mounted paths of the folder; each is in the container where it is in the folder."""
    for one in service["volumes"]:
        assert one["type"] == "bind"
        assert not one["bind"]["create_host_path"]  # Docker would make a folder for root in place of a file
        assert one["target"] == "/deployment/" + one["source"].removeprefix("./")
    return {one["source"].removeprefix("./") for one in service["volumes"] if one.get("read_only", False) == read_only}


def test_compose_has_a_service_for_each_node_and_publishes_nothing(folder: Path) -> None:
    composed = services(folder)
    assert set(composed) == {"superlink", "register", "proxy", "node-0", "node-1", "node-2"}
    assert composed["node-2"]["environment"]["FEDATTUNE_SUPERLINK"] == "superlink:7555"
    for name in ("proxy", "register"):  # the SuperLink's control API is on loopback
        assert composed[name]["network_mode"] == "service:superlink"
    whole = yaml.safe_load((folder / "compose.yaml").read_text("utf-8"))
    assert whole["networks"] == {"federation": {"internal": True}}
    assert not any(service.get("ports") for service in composed.values())


def test_containers_have_no_rights(folder: Path) -> None:
    for name, service in services(folder).items():
        assert service["user"] == "${FEDATTUNE_USER:-1000:1000}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert service["pids_limit"]
        assert service["logging"]["options"]["max-size"]
        assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
        if name != "register":
            assert service["healthcheck"]["test"][0] == "CMD"


def test_containers_see_only_what_they_need(folder: Path) -> None:
    composed = services(folder)
    assert mounts(composed["node-0"], read_only=True) == {
        "common.sh",
        "node.sh",
        "certificates/ca.crt",
        "keys/node-0",
        "nodes/0.toml",
        "data/node-0",
    }
    assert "data/node-1" not in mounts(composed["node-1"], read_only=True)
    assert mounts(composed["node-1"], read_only=False) == {"state/node-1"}
    server = mounts(composed["superlink"], read_only=True)
    assert mounts(composed["superlink"], read_only=False) == {"state/superlink", "state/superexec", "state/cli", "runs"}
    assert {path for path in server if path.startswith("keys/")} == {f"keys/node-{n}.pub" for n in range(3)}
    assert not any("ca.key" in path for path in server | mounts(composed["proxy"], read_only=True))
    assert mounts(composed["proxy"], read_only=False) == set()
    made_later = re.compile(r"certificates/|keys/|data/")
    for name, service in composed.items():
        for path in mounts(service, read_only=True) | mounts(service, read_only=False):
            assert made_later.match(path) or (folder / path).exists(), (name, path)
        command = service["command"][0].removeprefix("./")
        assert command == "nginx" or command in mounts(service, read_only=True)
