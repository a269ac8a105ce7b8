"""The folder of a deployment: the Flower app, and scripts that start its server, its nodes and a run.

The scripts find every file beside themselves, so the folder can be moved and copied. Programs come from PATH.
"""

import base64
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..._version import __version__
from ...core.errors import ConfigError, RunError
from ...core.io import write_text
from .. import FLOWER_VERSIONS
from ..config import DeploymentOptions, Scalar

MONITORING = "monitoring"
"""Folder of the files for Prometheus and Grafana; a deployment without metrics has none."""

APP_FILE = "app/pyproject.toml"
"""The Flower app of a deployment, with the configuration of its runs."""

CONFIG_KEYS = ("tool", "flwr", "app", "config")
"""Keys on the way to the configuration of the run in the Flower app."""

SERVER_APP = "fedattune.deploy.server.server_app:app"
"""The server's component of a Flower app without methods of one's own."""

SCRIPTS = ("common", "certificates", "superlink", "register", "node", "run", "flwr", "nodes")
SERVICES = ("superlink", "superexec", "proxy", "node@")
TEMPLATES = {
    "README.md": "README.md",
    "app/pyproject.toml": "app.toml",  # tools would take a template called pyproject.toml for a project
    **{f"{name}.sh": f"{name}.sh" for name in SCRIPTS},
    **{name: name for name in ("nginx.conf", "Dockerfile", "compose.yaml")},
    **{f"{MONITORING}/{name}": name for name in ("prometheus.yml", "alerts.yml", "grafana.json")},
    "systemd/README.md": "systemd/README.md",
    **{f"systemd/fedattune-{name}.service": f"systemd/fedattune-{name}.service" for name in SERVICES},
}
"""Files of every deployment, and their templates. `nodes/0.toml` and so on are added."""


def write_kit(
    folder: Path,
    *,
    config: Mapping[str, Scalar],
    nodes: Sequence[Mapping[str, Scalar]],
    port: int = 8443,
    proxy_port: int = 9443,
    node_port: int = 9100,
    name: str = "fedattune-app",
    results: str = "runs",
    server_app: str = SERVER_APP,
    client_app: str = "fedattune.deploy.node.client_app:app",
) -> list[Path]:
    """Write a deployment into a folder; return its files, which are never overwritten.

    Args:
        config: configuration of the run. Server and clients read it as `context.run_config`.
        nodes: one configuration per node. The node's client reads it as `context.node_config`.
        proxy_port: port of the proxy, without the control API, for nodes on other machines.
        node_port: node `n` talks to its own client processes at `node_port + n`, on loopback.
        results: the server's folder of results, relative to `folder`; services may write there.
    """
    if not nodes:
        raise ConfigError("a deployment needs at least one node")
    ports = [port, proxy_port, *range(node_port, node_port + len(nodes))]
    if min(ports) < 1 or max(ports) > 65535:
        raise ConfigError(f"ports are between 1 and 65535, got {min(ports)} to {max(ports)}")
    if len(set(ports)) < len(ports):
        raise ConfigError(
            f"the SuperLink ({port}), the proxy ({proxy_port}) and {len(nodes)} nodes (from {node_port}) "
            "need different ports"
        )
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(f"a Flower app's name is lower-case words with hyphens between, got {name!r}")
    values = {
        "config": _to_toml(config),
        "nodes": len(nodes),
        "with_data": [n for n, node in enumerate(nodes) if node.get("data") == f"data/node-{n}"],
        "port": port,
        "proxy_port": proxy_port,
        "node_port": node_port,
        "name": name,
        "results_top": _find_top(results),
        "server_app": server_app,
        "client_app": client_app,
        "version": __version__,
        "flower": FLOWER_VERSIONS,
        "roster": next((node["roster"] for node in nodes if "roster" in node), ""),
        "metrics_port": config.get("metrics-port", DeploymentOptions.model_fields["metrics_port"].default),
    }
    texts = {
        path: _render(template, values)
        for path, template in TEMPLATES.items()
        if values["metrics_port"] or not path.startswith(f"{MONITORING}/")
    }
    texts |= {
        f"nodes/{n}.toml": f"# Configuration of node {n}; paths are relative to the folder above.\n{_to_toml(node)}"
        for n, node in enumerate(nodes)
    }
    if existing := sorted(path for path in texts if (folder / path).exists()):
        raise ConfigError(
            f"{folder} holds a deployment already ({existing[0]} is there); choose another folder or remove it"
        )
    # Neither nginx nor systemd makes its folders, and Docker would make them for root only.
    states = ("superlink", "superexec", "cli", *(f"node-{n}" for n in range(len(nodes))))
    for inner in (_find_top(results), *(f"state/{state}" for state in states)):
        (folder / inner).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
        if file.suffix == ".sh":
            file.chmod(0o755)
    return [folder / path for path in texts]


def _find_top(results: str) -> str:
    """Find the folder in which the server needs to write results: the first one in the deployment's folder."""
    path = Path(results)
    return results if path.is_absolute() or ".." in path.parts or not path.parts else path.parts[0]


def _render(template: str, values: Mapping[str, object]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedattune.deploy"),
        autoescape=False,  # noqa: S701 (scripts, not HTML)
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _to_toml(values: Mapping[str, Scalar]) -> str:
    """Render one `key = value` per line, with only what both TOML and Flower's protocol can carry."""
    import tomli_w

    for key, value in values.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
            raise ConfigError(f"keys of a Flower configuration are letters, digits, - and _, got {key!r}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key} must be text, a number, true or false, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{key}: Flower's integers have 64 bits, got {value}")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError(f"{key}: {value!r} is no Unicode text")
    return tomli_w.dumps(values)


def _find_file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise RunError(
            f"{folder} holds no deployment: no {folder / name}; give the folder that fedattune deploy write wrote"
        )
    return folder / name


def read_app(folder: Path) -> dict[str, Any]:
    """Read the Flower app of a deployment."""
    file = _find_file(folder, APP_FILE)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}; fix it") from error


def find_run_folder(folder: Path) -> Path:
    """Find the run folder of a deployment; any other folder is taken for a run folder itself."""
    if not (folder / APP_FILE).is_file():
        return folder
    config = find_run_config(read_app(folder), folder / APP_FILE)
    return folder / str(config.get("run-folder", "runs/deployment"))


def find_run_config(app: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Find the configuration of the run in a Flower app; empty if there is none."""
    found: Any = app
    for depth, key in enumerate(CONFIG_KEYS, start=1):
        found = found.get(key, {})
        if not isinstance(found, dict):
            raise ConfigError(
                f"{file}: {'.'.join(CONFIG_KEYS[:depth])} is {found!r:.40}, expected the table "
                f"[{'.'.join(CONFIG_KEYS)}] with keys such as rounds = 10"
            )
    return dict(found)


def find_server_app(app: Mapping[str, Any]) -> str:
    """Find the server's component of a Flower app, such as `yours:server`; empty if there is none."""
    found: Any = app
    for key in (*CONFIG_KEYS[:-1], "components", "serverapp"):
        found = found.get(key, "") if isinstance(found, dict) else ""
    return str(found)


class KnownNode(NamedTuple):
    """A node of the SuperLink: Flower's number, its name if it has one, and its status since a time, if that is known.

    The status is registered, online, offline or removed. The fingerprint of its key is that of `ssh-keygen -l`.
    """

    id: int
    name: str
    status: str
    since: datetime | None
    fingerprint: str


def read_port(folder: Path) -> int:
    """Read the port of the SuperLink of a deployment: of the environment, or else of `common.sh`."""
    file = _find_file(folder, "common.sh")
    found = re.search(r"FEDATTUNE_PORT:=(\d+)", file.read_text(encoding="utf-8"))
    text = os.environ.get("FEDATTUNE_PORT") or (found[1] if found else "")
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII):
        raise RunError(f"FEDATTUNE_PORT: got {text!r}, expected the port of the SuperLink; fix {file}")
    return int(text)


@contextmanager
def keep_loopback_direct() -> Iterator[None]:
    """Let HTTP clients that are made meanwhile call loopback without the company's proxy, as `common.sh` does."""
    before = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    company = before["no_proxy"] or before["NO_PROXY"]
    hosts = ",".join(filter(None, ("127.0.0.1", "localhost", company)))
    os.environ.update(dict.fromkeys(before, hosts))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _open_control(folder: Path) -> Iterator[Any]:
    """Open Flower's client for the SuperLink of a deployment; raise `RunError` if it does not answer."""
    import httpx
    from flwr.supercore.control import ControlHttpClient

    address, authority = f"127.0.0.1:{read_port(folder)}", folder / "certificates" / "ca.crt"
    try:
        with keep_loopback_direct():
            client = ControlHttpClient.from_server_address(
                server_address=address, insecure=False, root_certificates=authority.read_bytes(), interceptors=[]
            )
    except OSError as error:
        raise RunError(f"{authority}: {error.strerror or error}; run ./certificates.sh first") from error
    try:
        yield client
    except httpx.HTTPError as error:
        raise RunError(
            f"the SuperLink at {address} does not answer ({type(error).__name__}); start ./superlink.sh, and look "
            "at its log"
        ) from error
    finally:
        client.close()


STATUSES = {
    "online": ("online", "last_activated_at"),
    "offline": ("offline", "last_deactivated_at"),
    "registered": ("registered", "registered_at"),
    "unregistered": ("removed", "unregistered_at"),
}
"""Flower's status of a node -> ours, and the field of the time since when."""


def list_nodes(folder: Path) -> list[KnownNode]:
    """List the nodes of a deployment, with those that were removed; without its SuperLink, raise `RunError`."""
    from flwr.proto.control_pb2 import ListNodesRequest

    with _open_control(folder) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    known = []
    for node in nodes:
        if node.status in STATUSES:
            status, field = STATUSES[node.status]
            text = getattr(node, field)
            since = datetime.fromisoformat(text) if text else None
            known.append(KnownNode(node.node_id, node.name, status, since, _compute_fingerprint(node.public_key)))
    return sorted(known, key=lambda one: (one.name, one.id))


def _compute_fingerprint(key: bytes) -> str:
    """Compute the fingerprint of a public key as OpenSSH does; empty for another kind of key."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, ssh_key_fingerprint

    try:
        digest = ssh_key_fingerprint(load_pem_public_key(key), SHA256())  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return ""
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def list_removed(folder: Path) -> frozenset[int]:
    """List Flower's numbers of the nodes with removed keys; none where there is no deployment or no SuperLink."""
    try:
        return frozenset(node.id for node in list_nodes(folder) if node.status == "removed")
    except Exception:  # whatever Flower raises, a run goes on
        return frozenset()


def find_results(folder: Path, run: int) -> Path:
    """Find the folder to which a run of a deployment writes its results: that of `--run-config`, or else of the app."""
    from flwr.proto.control_pb2 import ListRunsRequest

    with _open_control(folder) as client:
        runs = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
    overrides = runs[run].override_config if run in runs else {}
    return folder / overrides["run-folder"].string if "run-folder" in overrides else find_run_folder(folder)
