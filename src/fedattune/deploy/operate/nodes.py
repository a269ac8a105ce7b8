"""The nodes that a SuperLink knows, with the names under which they were registered."""

import os
import re
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ...core.errors import RunError


class KnownNode(NamedTuple):
    """A registered node.

    Attributes:
        id: Flower's number of the node.
        name: the name under which the node was registered; empty if it has none.
        status: registered, online or offline.
        since: when the status began; None if Flower does not say.

    """

    id: int
    name: str
    status: str
    since: datetime | None


def read_port(folder: Path) -> int:
    """Read the port of the SuperLink of a deployment: of the environment, or else of `common.sh`.

    Raises:
        RunError: the folder holds no deployment, or the port is no number.

    """
    file = folder / "common.sh"
    if not file.is_file():
        raise RunError(
            f"{folder} holds no deployment: no {file}; give the folder that fedattune deploy wrote"
        )
    found = re.search(r"FEDATTUNE_PORT:=(\d+)", file.read_text(encoding="utf-8"))
    text = os.environ.get("FEDATTUNE_PORT") or (found[1] if found else "")
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII):
        raise RunError(f"FEDATTUNE_PORT: got {text!r}, expected the port of the SuperLink; fix {file}")
    return int(text)


def list_nodes(folder: Path) -> list[KnownNode]:
    """List the registered nodes of a deployment.

    Args:
        folder: the folder that `fedattune deploy` wrote.

    Raises:
        RunError: the folder holds no deployment, or its SuperLink does not answer.

    """
    import httpx
    from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control import ControlHttpClient

    address, authority = f"127.0.0.1:{read_port(folder)}", folder / "certificates" / "ca.crt"
    try:
        client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[CliClientHttpInterceptor()],
        )
    except OSError as error:
        raise RunError(f"{authority}: {error.strerror or error}; run ./certificates.sh first") from error
    try:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    except httpx.HTTPError as error:
        raise RunError(
            f"the SuperLink at {address} does not answer ({type(error).__name__}); start ./superlink.sh, and look "
            "at its log"
        ) from error
    finally:
        client.close()
    known = []
    for node in nodes:
        since = {
            "online": node.last_activated_at,
            "offline": node.last_deactivated_at,
            "registered": node.registered_at,
        }
        if node.status in since:
            text = since[node.status]
            known.append(
                KnownNode(
                    node.node_id, node.name, node.status, datetime.fromisoformat(text) if text else None
                )
            )
    return sorted(known, key=lambda one: (one.name, one.id))
