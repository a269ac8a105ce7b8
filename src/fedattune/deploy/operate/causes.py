"""Name the likely cause when a node's program ends: Flower's own messages name a code, or nothing at all."""

import atexit
import importlib
import logging
import os
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

KEPT_LINES = 40

REFUSED = "[401] the server refused a call of this node"
"""Logged when Flower ends the node by a signal to itself, without a message or an error code."""

SIGNATURE = (
    "the server refused the node's signature (401). The likely cause is this machine's clock, which says {now} UTC: it "
    "may be 5 seconds ahead of the server's clock, and 305 behind; synchronise it, for instance by chronyd. Otherwise "
    "the key in keys/ is not the registered one, or was removed"
)
CAUSES = (
    (("Invalid SuperNode authentication", "401 Unauthorized", "[401]", "status code 401"), SIGNATURE),
    (
        ("code: 2004",),
        "the server refused the node (2004). Either its public key is not registered: send the file keys/node-N.pub to "
        "the operators of the server. Or the key is online already, or was until a crash less than a minute ago: then "
        "wait for a minute",
    ),
    (("code: 2001",), "the server needs a key, and the node showed none (2001): start the node by node.sh"),
    (
        ("certificate verify failed", "CERTIFICATE_VERIFY_FAILED"),
        "the node does not trust the server's certificate: get certificates/ca.crt from the operators of the server. "
        "If the certificate has expired or is not valid yet, look at this machine's clock first, which says {now} UTC",
    ),
)
"""Parts of Flower's messages, and what they mean; the first that is found counts."""


def explain_end(lines: Iterable[str]) -> str:
    """Explain why a node's program ended.

    Args:
        lines: its last messages.

    Returns:
        A sentence with the cure; empty if the messages say nothing known.

    """
    text = "\n".join(lines)
    for signs, sentence in CAUSES:
        if any(sign in text for sign in signs):
            return sentence.format(now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"))
    return ""


class _LastLines(logging.Handler):
    """Keep the last messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def explain_at_exit() -> None:
    """Print the explanation when this node's process ends, from what Flower logs until then."""
    last, log = _LastLines(), logging.getLogger("flwr")
    log.addHandler(last)

    def kill(process: int, number: int) -> None:
        log.error(REFUSED)
        os.kill(process, number)

    for name in ("flwr.supernode.fleet_http_connection", "flwr.supercore.retry.http_retry"):
        module: Any = importlib.import_module(name)
        module.os = SimpleNamespace(**{**vars(os), "kill": kill})

    def explain() -> None:
        if sentence := explain_end(last.lines):
            print(f"fedattune: {sentence}", flush=True)

    atexit.register(explain)
