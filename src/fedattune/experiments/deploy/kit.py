"""Write a deployment folder: the Flower app, and scripts that start its server, its nodes and a run.

The scripts find everything beside themselves, so the folder can be moved and copied; programs come from PATH.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..._version import __version__
from ...core.errors import ConfigError
from ...core.io import write_text

Scalar = str | int | float | bool
"""What Flower carries as a value of a run's or a node's configuration."""


TEMPLATES = {
    "README.md": "README.md",
    "app/pyproject.toml": "app.toml",  # a template of that name would be taken for a project by tools
    "common.sh": "common.sh",
    "certificates.sh": "certificates.sh",
    "superlink.sh": "superlink.sh",
    "register.sh": "register.sh",
    "node.sh": "node.sh",
    "run.sh": "run.sh",
    "flwr.sh": "flwr.sh",
    "nginx.conf": "nginx.conf",
    "Dockerfile": "Dockerfile",
    "compose.yaml": "compose.yaml",
}
"""Files of every deployment and their templates; `nodes/0.toml` and so on come on top."""


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
    server_app: str = "fedattune.experiments.deploy.server_app:app",
    client_app: str = "fedattune.experiments.deploy.client_app:app",
) -> list[Path]:
    """Write a deployment into `folder`, and return the files.

    Args:
        folder: made if missing; files in it are never overwritten.
        config: the run's configuration, which server and clients read as `context.run_config`.
        nodes: one configuration per node, which its client reads as `context.node_config`.
        port: of the SuperLink, on loopback; the control API is there.
        proxy_port: of the proxy, for nodes on other machines; the control API is not there.
        node_port: node `n` talks to its own client processes at `node_port + n`, on loopback.
        name: of the Flower app.
        results: where the server puts results, relative to the folder; only named to the user.
        server_app: the server's part, as `module:attribute`; the module is installed where it runs.
        client_app: the nodes' part.

    Raises:
        ConfigError: a value that Flower cannot carry, clashing ports, no node, or files that are there already.
    """
    _check_ports(port, proxy_port, node_port, len(nodes))
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(f"a Flower app's name is lower-case words with hyphens between, got {name!r}")
    texts = {
        path: _render(
            template,
            config=_toml(config),
            nodes=len(nodes),
            with_data=[n for n, node in enumerate(nodes) if node.get("data") == f"data/node-{n}"],
            port=port,
            proxy_port=proxy_port,
            node_port=node_port,
            name=name,
            results=results,
            server_app=server_app,
            client_app=client_app,
            version=__version__,
        )
        for path, template in TEMPLATES.items()
    }
    texts |= {
        f"nodes/{index}.toml": f"# What node {index} is told; paths are relative to the folder above.\n{_toml(node)}"
        for index, node in enumerate(nodes)
    }
    if there := sorted(path for path in texts if (folder / path).exists()):
        raise ConfigError(
            f"{folder} holds a deployment already ({there[0]} is there); choose another folder or remove it"
        )
    written = []
    # Neither does nginx make its folder, nor would Docker make those of nodes so that a node may write there.
    for index in range(len(nodes)):
        (folder / "state" / f"node-{index}").mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
        if file.suffix == ".sh":
            file.chmod(0o755)
        written.append(file)
    return written


def _check_ports(port: int, proxy_port: int, node_port: int, nodes: int) -> None:
    if not nodes:
        raise ConfigError("a deployment needs at least one node")
    taken = [port, proxy_port, *range(node_port, node_port + nodes)]
    if min(taken) < 1 or max(taken) > 65535:
        raise ConfigError(f"ports are between 1 and 65535, got {min(taken)} to {max(taken)}")
    if len(set(taken)) < len(taken):
        raise ConfigError(
            f"the SuperLink ({port}), the proxy ({proxy_port}) and {nodes} nodes (from {node_port}) "
            "need different ports"
        )


def _render(template: str, **values: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedattune.experiments.deploy"),
        autoescape=False,  # noqa: S701 (scripts, not HTML)
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _toml(values: Mapping[str, Scalar]) -> str:
    """One `key = value` a line; only what both TOML and Flower's protocol can say."""
    return "".join(f"{_key(key)} = {_value(key, value)}\n" for key, value in values.items())


def _key(key: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        raise ConfigError(f"keys of a Flower configuration are letters, digits, - and _, got {key!r}")
    return key


def _value(key: str, value: Scalar) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() if not -(2**63) <= value < 2**63:
            raise ConfigError(f"{key}: Flower's integers have 64 bits, got {value}")
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else f"{value}"
        case str():
            return _string(key, value)
    raise ConfigError(f"{key} must be text, a number, true or false, got {type(value).__name__}")


def _string(key: str, text: str) -> str:
    """A string of JSON, which is one of TOML but for the character DEL."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}: {text!r} is no Unicode text") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
