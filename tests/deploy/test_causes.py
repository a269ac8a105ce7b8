"""A sentence with the cause when a node's program ends."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="a node is a program of Flower")

from fedattune.deploy.operate.programs import KEPT_LINES, REFUSED, explain_end


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["Exit Code: 305", "[code: 2004] Failed to activate SuperNode"], "public key is not registered"),
        (["[code: 2001] SuperNode authentication is enabled"], "the node showed none"),
        (["HTTP 401: Invalid SuperNode authentication"], "clock, which says 2"),
        (["[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: expired"], "certificates/ca.crt"),
        ([REFUSED, "SuperNode terminated gracefully."], "signature"),
        (["SuperNode terminated gracefully."], ""),
        (["Starting Flower SuperNode"], ""),
        ([], ""),
    ],
)
def test_the_cause_of_an_end(lines: list[str], cause: str) -> None:
    found = explain_end(lines)
    assert (cause in found) if cause else not found


def test_it_is_printed_at_the_end_of_the_process() -> None:
    """From Flower's logger, and from its last lines only."""
    script = f"""
import logging
from fedattune.deploy.operate.programs import explain_at_exit
explain_at_exit()
log = logging.getLogger("flwr")
log.error("[code: 2001] long ago")
for number in range({KEPT_LINES}):
    log.error("[code: 2004] Failed to activate SuperNode %d", number)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("fedattune: the server refused the node (2004)")
