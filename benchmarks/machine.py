"""Measure and describe the machine: versions, FLOP/s, bytes/s, peak memory, fresh processes."""

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedattune.core.hardware import find_processor_name


class Rates(NamedTuple):
    """Measured rates: floating-point operations and bytes (read and written) per second."""

    flops: float
    bytes: float

    def roofline(self, flops: float, bytes_: float) -> float:
        """Return the least seconds for so much work; 0 if the rates are unknown."""
        return max(flops / self.flops, bytes_ / self.bytes) if self.flops else 0.0


UNKNOWN = Rates(0.0, 0.0)


def measure_rates(device: torch.device, quick: bool = False) -> Rates:
    """Measure a large float32 matrix product, and a copy larger than the caches, with this process's threads."""
    n, size = (64, 1 << 16) if quick else (4096, 1 << 28) if device.type == "cuda" else (3072, 1 << 27)
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    out = torch.empty_like(a)
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    gemm = _seconds(lambda: torch.mm(a, b, out=out), device)
    copy = _seconds(lambda: target.copy_(source), device)
    return Rates(2 * n**3 / gemm, 8 * size / copy)


def _seconds(run: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """Return the median seconds after two warm-up rounds."""
    took = []
    for _ in range(rounds + 2):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def set_threads(n: int | None) -> int:
    """Let this process and its children use `n` cores (None: all available), and return their number.

    The process is bound to as many cores, since XLA's thread pool has no other setting.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        n = min(n or len(cores), len(cores))
        if n < len(cores):
            os.sched_setaffinity(0, cores[:n])
    n = n or os.cpu_count() or 1
    torch.set_num_threads(n)
    return n


def facts(threads: int, device: torch.device, rates: Rates) -> dict[str, Any]:
    """Describe when, where and with which versions the measurements were made."""
    packages = ("torch", "numpy", "jax", "jaxlib", "fedattune")
    return {
        "date": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": find_processor_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "threads": threads,
        "load": list(os.getloadavg()),
        "system": platform.platform(),
        "versions": {"python": platform.python_version()} | {p: v for p in packages if (v := _version(p))},
        "gflops": rates.flops / 1e9,
        "copy_gb_per_s": rates.bytes / 1e9,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")  # ru_maxrss is inherited over exec, so it may be the parent's
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text("utf-8")) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def fresh(module: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m module arguments` in a fresh process, and parse the JSON object in its last line.

    Raises:
        RuntimeError: the process failed; the message has its output.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if "" in sys.path:
        environment["PYTHONPATH"] = os.getcwd() + os.pathsep + environment["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode or not done.stdout.strip():
        said = (done.stderr or done.stdout)[-2000:]
        raise RuntimeError(f"{module} {' '.join(arguments)} ended with {done.returncode}: {said}")
    last: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return last
