"""Flower's own programs with shorter pauses, and with apps that are forked from a process that has imported PyTorch.

In Flower, a node asks for work every three seconds and starts a process for each message, which imports PyTorch again.
Here the same code runs: only its pauses are shorter, and the process is a fork. A fork ends after its message, so it
returns all its memory. A server waits three minutes for the rest of an upload; here it waits one. Flower has no setting
for any of these; the names that this module replaces are those of `FLOWER_VERSIONS`, and other versions are refused.

    python -m fedattune.deploy.operate.programs flower-supernode ARGUMENTS

Variables of the environment set the pauses:

    FEDATTUNE_POLL       seconds between a node's questions for work, at most (default 0.5)
    FEDATTUNE_HEARTBEAT  seconds between a node's signs of life, 10 to 60 (default 30). The server takes a node for
                         online until twice this time after its last sign
    FEDATTUNE_IMPORTS    further modules to import before the first fork, separated by commas: those of your own app
"""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from ...core.errors import ConfigError
from .. import check_flower_version

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
    """Explain why a node's program ended, with the cure; empty if the messages say nothing known."""
    text = "\n".join(lines)
    for signs, sentence in CAUSES:
        if any(sign in text for sign in signs):
            return sentence.format(now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"))
    return ""


def explain_at_exit() -> None:
    """Print the explanation when this node's process ends, from the last messages that Flower logs until then."""
    lines, log, handler = deque[str](maxlen=KEPT_LINES), logging.getLogger("flwr"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)

    def kill(process: int, number: int) -> None:
        log.error(REFUSED)
        os.kill(process, number)

    for name in ("flwr.supernode.fleet_http_connection", "flwr.supercore.retry.http_retry"):
        module: Any = importlib.import_module(name)
        module.os = SimpleNamespace(**{**vars(os), "kill": kill})

    def explain() -> None:
        if sentence := explain_end(lines):
            print(f"fedattune: {sentence}", flush=True)

    atexit.register(explain)


COMMANDS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
    "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
}
"""Flower's commands, and where they are."""

APP_IMPORTS = (
    "flwr.supernode.runtime.run_clientapp",
    "fedattune.algorithms",
    "fedattune.deploy.node.client_app",
    "fedattune.engine.vectorized",
    "torch.fx",
    "torch.func",
)
"""Modules that the app of a node imports."""

READY = "fedattune: imported all modules of the app"
"""Printed before the first fork."""

DEFAULT_POLL_S = 0.5
DEFAULT_HEARTBEAT_S = 30
TASK_POLL_S = 0.2
"""Seconds between the looks of a node's programs for each other's messages; they ask their own machine only."""
UPLOAD_TTL_S = 60
"""Seconds after which the SuperLink gives up a node's upload: the time for each object, of at most 5 MiB."""


def main(command: str, arguments: Sequence[str]) -> Any:
    """Run one of Flower's commands in this process."""
    check_flower_version()
    sys.argv = [command, *arguments]
    if command == "flower-superlink":
        _shorten_uploads()
    else:
        _shorten_pauses(_read_seconds("FEDATTUNE_POLL", DEFAULT_POLL_S, 0.01, 60))
    if command == "flower-supernode":
        explain_at_exit()
    if command == "flower-superexec":
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(TASK_POLL_S))
        _fork_apps()
    module, function = COMMANDS[command]
    return getattr(importlib.import_module(module), function)()


def _read_seconds(name: str, default: float, min_seconds: float, max_seconds: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not min_seconds <= seconds <= max_seconds:
        raise ConfigError(f"{name}: got {text!r}, expected seconds between {min_seconds:g} and {max_seconds:g}")
    return seconds


def _shorten_uploads() -> None:
    """Replace the time after which the SuperLink gives up an upload: a node that ends in the middle holds its round."""
    constants: Any = importlib.import_module("flwr.supercore.constant")
    constants.OBJECT_PUSH_SESSION_TTL_SECONDS = UPLOAD_TTL_S


def _shorten_pauses(poll: float) -> None:
    """Replace Flower's constants and sleeps, before other modules of Flower take their values."""
    constants: Any = importlib.import_module("flwr.supercore.constant")
    constants.PULL_INITIAL_BACKOFF = TASK_POLL_S
    constants.PULL_BACKOFF_CAP = min(4 * poll, constants.PULL_BACKOFF_CAP)
    heartbeat = _read_seconds("FEDATTUNE_HEARTBEAT", DEFAULT_HEARTBEAT_S, 10, 60)
    common: Any = importlib.import_module("flwr.common.constant")
    common.HEARTBEAT_DEFAULT_INTERVAL = round(heartbeat)
    node: Any = importlib.import_module("flwr.supernode.start_client_internal")
    node.time = _limit_sleeps(time, poll)
    node.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _start_program})


def _limit_sleeps(module: ModuleType, max_seconds: float) -> SimpleNamespace:
    """Return the module `time` with sleeps of at most `max_seconds`; waits for a reply on this machine are shorter."""

    def sleep(seconds: float) -> None:
        module.sleep(min(seconds, max_seconds if seconds > 1 else TASK_POLL_S))

    return SimpleNamespace(**{**vars(module), "sleep": sleep})


def _start_program(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __spec__.name, *command])  # noqa: S603 (Flower made the command)


def _fork_apps() -> None:
    """Let Flower's executor fork this process instead of starting programs, once it has imported what apps need."""
    executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    executor.subprocess = SimpleNamespace(Popen=_fork, DEVNULL=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    own = filter(None, (name.strip() for name in os.environ.get("FEDATTUNE_IMPORTS", "").split(",")))
    for name in (*APP_IMPORTS, *own):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"FEDATTUNE_IMPORTS: {name} cannot be imported: {error}") from error
    gc.collect()
    gc.freeze()  # collections in a fork would copy the pages of all objects that are here now
    print(READY, flush=True)


def _fork(arguments: Sequence[str], stdout: int | None = None, stderr: int | None = None) -> None:
    """Run one of Flower's commands in a fork of this process, in place of `Popen`."""
    command, *rest = arguments
    importlib.import_module(COMMANDS[command][0])
    if not os.fork():
        _run_fork(command, rest, [number for number, to in ((1, stdout), (2, stderr)) if to == subprocess.DEVNULL])


def _run_fork(command: str, arguments: Sequence[str], silent: Sequence[int]) -> NoReturn:
    """Run a command as a process of its own would, and end without the parent's clean-up."""
    code = 1
    with contextlib.suppress(BaseException):
        from flwr.supercore.exit import exit_handler

        exit_handler.registered_exit_handlers.clear()
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in silent:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            main(command, arguments)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()):
        measured.stop()
        measured.save()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m {__spec__.name} COMMAND ARGUMENTS; commands: {shlex.join(COMMANDS)}")
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except ConfigError as error:
        sys.exit(f"fedattune: error: {error}")
