"""Flower's commands without their pauses, for tests only: the same code, and sleeps of 0.2 seconds at most.

A message takes Flower about six seconds: a node asks for work every 3 s, and starts a process for each message. Here it
asks five times a second, and the process is forked from one that has imported everything.

Started as `python quick.py flower-supernode ARGUMENTS`; `install` makes a folder of such commands for PATH. What
QUICK_IMPORTS names, separated by commas, is imported before the first fork; then `READY` is printed.
"""

import contextlib
import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

COMMANDS = {
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
    "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
}

READY = "imported what apps need"

SLEEPERS = ("flwr.supernode.start_client_internal", "flwr.superlink.grid.http_grid")


def install(folder: Path) -> Path:
    """Make a folder to put first in PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for command in COMMANDS:
        file = folder / command
        words = shlex.join([sys.executable, str(Path(__file__).resolve()), command])
        file.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        file.chmod(0o755)
    return folder


def main(command: str) -> Any:
    constants: Any = importlib.import_module("flwr.supercore.constant")
    constants.PULL_INITIAL_BACKOFF = 0.05  # seconds; before the other modules take its value of 1
    constants.PULL_BACKOFF_CAP = 0.4  # of 10
    # A node that was killed is taken for alive for two of these; it is the least that Flower allows, and usually 30.
    importlib.import_module("flwr.common.constant").HEARTBEAT_DEFAULT_INTERVAL = 10  # type: ignore[attr-defined]
    for name in SLEEPERS:
        module: Any = importlib.import_module(name)
        module.time = brisk(time)
    if command == "flower-superexec":
        executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
        executor.subprocess = SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
        for name in filter(None, os.environ.get("QUICK_IMPORTS", "").split(",")):
            importlib.import_module(name)
        print(READY, flush=True)
    module_name, function = COMMANDS[command]
    return getattr(importlib.import_module(module_name), function)()


def brisk(module: ModuleType) -> SimpleNamespace:
    """The module `time` whose sleeps are short."""
    return SimpleNamespace(**{**vars(module), "sleep": lambda seconds: time.sleep(min(seconds, 0.2))})


def fork(args: list[str], stdout: int | None = None, stderr: int | None = None) -> None:
    """As `Popen` for Flower's own commands, by a fork of this process."""
    command, *rest = args
    importlib.import_module(COMMANDS[command][0])
    if os.fork():
        return
    code = 1
    with contextlib.suppress(BaseException):
        from flwr.supercore.exit import exit_handler

        exit_handler.registered_exit_handlers.clear()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, wanted in ((1, stdout), (2, stderr)):
            if wanted == subprocess.DEVNULL:
                os.dup2(os.open(os.devnull, os.O_WRONLY), target)
        sys.argv = [command, *rest]
        code = 0
        try:
            main(command)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()):
        measured.stop()
        measured.save()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    command = sys.argv.pop(1)
    sys.argv[0] = command
    sys.exit(main(command))
