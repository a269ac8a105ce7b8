"""A whole deployment in processes on this machine, by the scripts that users get."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

FOREIGN = ("FLWR_", "FEDATTUNE_PORT", "FEDATTUNE_SUPERLINK", "FEDATTUNE_NODE_PORT", "FEDATTUNE_STATE")
"""Variables that would change a deployment, and that a test takes from itself alone."""


@dataclass(frozen=True)
class Run:
    """What `run.sh` said, and its exit code."""

    code: int
    output: str
    seconds: float

    @property
    def status(self) -> str:
        """As Flower says it, `finished:completed` if all went well."""
        found = re.findall(r"^run \d+: (\S+)$", self.output, re.MULTILINE)
        return found[-1] if found else "not started"

    @property
    def completed(self) -> bool:
        return self.code == 0 and self.status == "finished:completed"


class Script:
    """A program in a process group of its own, with its output in a file."""

    def __init__(
        self, command: list[str], *, folder: Path, log: Path, env: Mapping[str, str], keeps: Sequence[str] = ()
    ) -> None:
        self.log = log
        # Of programs that the script runs in groups of their own.
        self.pids = [folder / "state" / name / "pid" for name in keeps]
        for file in self.pids:
            file.unlink(missing_ok=True)
        self.start = time.monotonic()
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            self.offset = file.tell()
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What it printed, of earlier programs with the same log nothing."""
        return self.log.read_bytes()[self.offset :].decode(errors="replace")

    def stop(self, timeout: float = 20) -> None:
        """End it as users do, by SIGTERM to the script; then kill what is left of its group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End it and everything that it started, as a power cut does."""
        kill_group(self.process.pid)  # first, so that it starts nothing again
        self.process.wait()
        for file in self.pids:
            with contextlib.suppress(FileNotFoundError, ValueError):
                kill_group(int(file.read_text()))

    def finish(self, timeout: float) -> Run:
        """Wait for its end."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -signal.SIGKILL
        return Run(code, self.output, time.monotonic() - self.start)


class Deployment:
    """The server, nodes and a proxy of the deployment in `folder`."""

    def __init__(
        self, folder: Path, *, nodes: int = 0, fast: bool = True, env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.nodes = nodes
        self.scripts: dict[str, Script] = {}
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        here = str(Path(__file__).parent)
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)},
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "FEDATTUNE_PAUSE": "1",
            **({"FEDATTUNE_POLL": "0.05", "FEDATTUNE_HEARTBEAT": "10"} if fast else {}),
            **(env or {}),
        }

    def __enter__(self) -> Self:
        try:
            if not (self.folder / "certificates").exists():
                self.call("certificates.sh")
            self.start_superlink()
            if self.nodes:
                self.call("register.sh")
                for node in range(self.nodes):
                    self.start_node(node, wait=False)
                for node in range(self.nodes):
                    self.wait_for_node(node)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop runs, nodes and proxy, then the server."""
        for name in sorted(self.scripts, key=lambda name: name == "superlink"):
            self.scripts.pop(name).stop()

    def start(
        self, name: str, *command: str, env: Mapping[str, str] | None = None, keeps: Sequence[str] = ()
    ) -> Script:
        """Start a program in the folder; its output goes to `logs/NAME`."""
        assert name not in self.scripts, f"{name} runs already"
        log = self.folder / "logs" / name
        environment = {**self.env, **(env or {})}
        script = Script(list(command), folder=self.folder, log=log, env=environment, keeps=keeps)
        self.scripts[name] = script
        return script

    def call(self, script: str, *arguments: str, timeout: float = 60) -> str:
        """Run a script to its end, and return what it printed."""
        done = subprocess.run(
            [str(self.folder / script), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{script} ended with code {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    # The server.

    def start_superlink(self) -> None:
        script = self.start("superlink", "./superlink.sh", keeps=("superlink", "superexec"))
        wait_until(lambda: "Uvicorn running on" in script.output, "SuperLink", script)

    def kill_superlink(self) -> None:
        """Kill the SuperLink's process; its script starts it again after `FEDATTUNE_PAUSE` seconds."""
        os.kill(self.pid("superlink"), signal.SIGKILL)

    # The nodes.

    def start_node(self, node: int, *, wait: bool = True, env: Mapping[str, str] | None = None) -> None:
        name = f"node-{node}"
        self.start(name, "./node.sh", str(node), env=env, keeps=(name,))
        if wait:
            self.wait_for_node(node)

    def wait_for_node(self, node: int, timeout: float = 90) -> None:
        """Until the node is online; after a kill the server refuses it for up to 60 seconds."""
        script = self.scripts[f"node-{node}"]
        wait_until(lambda: "SuperNode ID:" in script.output, f"node {node}", script, timeout)

    def stop_node(self, node: int) -> None:
        """Stop a node in order: it is offline at once."""
        self.scripts.pop(f"node-{node}").stop()

    def kill_node(self, node: int) -> None:
        """Kill a node with all its processes, supervision included, as a power cut does."""
        self.scripts.pop(f"node-{node}").kill()

    def crash_node(self, node: int) -> None:
        """Kill the node's process alone; its script starts it again, and `wait_for_node` waits for that."""
        script = self.scripts[f"node-{node}"]
        script.offset = script.log.stat().st_size
        os.kill(self.pid(f"node-{node}"), signal.SIGKILL)

    def start_proxy(self) -> None:
        """Start nginx on the kit's configuration; use nodes with `env=deployment.through_proxy`."""
        script = self.start("proxy", nginx(), "-p", str(self.folder), "-c", "nginx.conf")
        wait_until(lambda: listens(self.proxy_port), "nginx", script)

    @property
    def through_proxy(self) -> dict[str, str]:
        return {"FEDATTUNE_SUPERLINK": f"127.0.0.1:{self.proxy_port}"}

    @property
    def proxy_port(self) -> int:
        return self.port_in("nginx.conf", r"listen (\d+)")

    @property
    def port(self) -> int:
        """Of the SuperLink."""
        return self.port_in("common.sh", r"FEDATTUNE_PORT:=(\d+)")

    def port_in(self, file: str, pattern: str) -> int:
        found = re.search(pattern, (self.folder / file).read_text(encoding="utf-8"))
        assert found
        return int(found[1])

    def pid(self, name: str) -> int:
        """Of the program that a script keeps running, `superlink`, `superexec`, `node-0` and so on."""
        file = self.folder / "state" / name / "pid"
        script = self.scripts["superlink" if name == "superexec" else name]
        wait_until(lambda: file.exists() and bool(file.read_text()), f"the program {name}", script)
        return int(file.read_text())

    def log(self, name: str) -> str:
        """All that was printed by `superlink`, `node-0`, `proxy`, `run` and so on, in this folder's life."""
        file = self.folder / "logs" / name
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    # Runs.

    def start_run(self, *arguments: str, **config: object) -> Script:
        """Start a run, with other values for some keys of its configuration; `finish(timeout)` waits for its end."""
        values = [f"{key}={json.dumps(value)}" for key, value in config.items()]
        old = self.scripts.pop("run", None)
        if old:
            old.kill()
        more = [word for value in values for word in ("--run-config", value)]
        return self.start("run", "./run.sh", *more, *arguments)

    def run(self, *arguments: str, timeout: float = 120, **config: object) -> Run:
        """A run from beginning to end."""
        run = self.start_run(*arguments, **config).finish(timeout)
        self.scripts.pop("run")
        return run

    def wait_for(self, text: str, name: str = "run", timeout: float = 60) -> None:
        """Until a program has printed something, for instance `wait_for("round 1")`."""
        wait_until(lambda: text in self.scripts[name].output, f"{text!r} from {name}", self.scripts[name], timeout)


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def wait_until(true: Callable[[], bool], what: str, script: Script, timeout: float = 60) -> None:
    """Wait for something that `script` brings about."""
    end = time.monotonic() + timeout
    while not true():
        ended = script.process.poll()
        assert ended is None, f"{what}: ended with code {ended}:\n{script.output[-3000:]}"
        assert time.monotonic() < end, f"{what}: not within {timeout:.0f} s:\n{script.output[-3000:]}"
        time.sleep(0.05)


def ports(nodes: int) -> dict[str, int]:
    """Free ports for `write_kit`."""
    first = free_ports(2 + nodes)
    return {"port": first, "proxy_port": first + 1, "node_port": first + 2}


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on, outside the range for outgoing connections."""
    # Test processes run side by side; each looks from another place, so that they do not find the same ports.
    first = 10_000 + os.getpid() * 37 % 20_000
    for port in [*range(first, 30_000, count), *range(10_000, first, count)]:
        if not any(listens(port + step) for step in range(count)):
            return port
    raise AssertionError("no free ports")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def nginx() -> str:
    """Where nginx is, or an empty text."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin") or ""
