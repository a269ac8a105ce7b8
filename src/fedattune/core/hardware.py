"""Use the machine: device, cores, threads and memory."""

import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from heapq import heapreplace
from pathlib import Path

import psutil
import torch

from .errors import ConfigError
from .settings import Settings


@contextmanager
def seed_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's global generators of the CPU and of a GPU, or of all GPUs; restore them afterwards."""
    # Not torch.manual_seed: without CUDA, it records the stack of its caller, which takes 2 ms.
    gpus = range(torch.cuda.device_count()) if device is None else [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed) if device is None else torch.cuda.manual_seed(seed)
        yield


def count_parallel_groups(device: torch.device) -> int:
    """Count the groups of clients that can run at the same time: one per thread on a CPU, one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Let PyTorch use `number` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def balance(costs: Sequence[float], n: int) -> list[list[int]]:
    """Divide items among n groups of about equal cost: the largest first, each to the cheapest group."""
    groups: list[list[int]] = [[] for _ in range(n)]
    heap = [(0.0, 0, group) for group in range(n)]  # cost, number of items, group
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost, count, group = heap[0]
        groups[group].append(item)
        heapreplace(heap, (cost + costs[item], count + 1, group))
    return groups


def run_parallel(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks at the same time, one thread each; a single task gets all threads."""
    if len(tasks) < 2:
        for task in tasks:
            task()
        return
    with use_threads(1):
        others = [_pool().submit(torch.no_grad()(task)) for task in tasks[1:]]  # a new thread records gradients
        try:
            tasks[0]()
        finally:
            for other in others:
                other.exception()  # wait: no task may write after an error
        for other in others:
            other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fedattune")


@cache
def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, once.

    Updates of stacked parameters allocate megabytes in every step. By default, glibc returns the pages to the system
    and fetches new ones, which takes longer than the arithmetic (measured: three times as long on a small network).
    """
    if sys.platform != "linux":
        return
    # Blocks above 32 MiB go back to the system: kept, they would fragment into pieces too small to use again.
    m_trim_threshold, m_mmap_threshold, limit = -1, -3, 1 << 25
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_threshold, limit)
        libc.mallopt(m_trim_threshold, 1 << 30)


def check_device(settings: Settings) -> None:
    """Check that this machine has the device, and that the device has the arithmetic of `mixed_precision`."""
    execution = settings.execution
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but PyTorch finds no CUDA device here; use cpu or auto")
    if execution.mixed_precision == "off":
        return
    if execution.dtype != "float32":
        raise ConfigError(
            f"mixed_precision: {execution.mixed_precision} goes with dtype float32, got {execution.dtype}"
        )
    where = resolve_device(settings).type
    if not (torch.cuda.is_bf16_supported() if where == "cuda" else has_cpu_bfloat16()):
        raise ConfigError(
            f"mixed_precision: the {where} here has no {execution.mixed_precision} arithmetic; leave it off"
        )


def has_cpu_bfloat16() -> bool:
    """Tell whether the processor multiplies matrices in bfloat16."""
    return any(has_type for name, has_type in torch.cpu.get_capabilities().items() if "bf16" in name)


def resolve_device(settings: Settings) -> torch.device:
    """Return the device of the settings; `auto` prefers CUDA."""
    if settings.execution.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.execution.device)


def find_processor_name() -> str:
    """Return what tells a processor from others: its name, family and model, and the instructions that PyTorch uses.

    Virtual machines call processors of several generations by one name, such as AMD EPYC.
    """
    name, version = platform.processor() or platform.machine(), ""
    with suppress(OSError):
        text = CPUINFO_PATH.read_text(encoding="utf-8")
        facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
        name = facts.get("model name", name).strip()
        if "cpu family" in facts and "model" in facts:
            version = f"family {facts['cpu family']}, model {facts['model']}, "
    return f"{name} ({version}{torch.backends.cpu.get_cpu_capability()})"


CPUINFO_PATH = Path("/proc/cpuinfo")
CGROUP_PATH = Path("/sys/fs/cgroup")
"""Folder in which Linux states the limits of a container."""


def count_available_cores() -> int:
    """Count the cores that this process may use."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = (CGROUP_PATH / "cpu.max").read_text(encoding="ascii").split()  # "max" is no number
        n = min(n, max(1, int(quota) // int(period)))
    return n


class LoadMeter:
    """Measure how many cores other processes keep busy, from now on."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._others, self._wall = self._read()

    def count_busy_cores(self) -> float:
        """Return the cores that others kept busy, on average since the last call that looked far enough back.

        The system counts in hundredths of a second, so less than MIN_LOAD_SECONDS says little.
        """
        others, wall = self._read()
        busy = max(0.0, others - self._others) / max(MIN_LOAD_SECONDS, wall - self._wall)
        if wall - self._wall > MIN_LOAD_SECONDS:
            self._others, self._wall = others, wall
        return busy

    @staticmethod
    def _read() -> tuple[float, float]:
        """Return the processor seconds of all other processes, 0 if the system hides them, and the clock."""
        own, wall = time.process_time(), time.monotonic()
        with suppress(OSError, psutil.Error):
            times = psutil.cpu_times()._asdict()
            return sum(seconds for kind, seconds in times.items() if kind not in UNUSED_TIMES) - own, wall
        return 0.0, wall


MIN_LOAD_SECONDS = 0.2
"""Minimum time over which the load of other processes is measured."""

UNUSED_TIMES = {"idle", "iowait", "guest", "guest_nice"}
"""Times in which a core does nothing, or that are counted twice."""


def limit_to_memory(n: int) -> int:
    """Return the number of processes, at most `n`, that fit into memory if each needs this process's peak."""
    free = count_free_memory_bytes()
    return n if free is None else max(1, min(n, free // _peak_memory_bytes()))


def count_free_memory_bytes() -> int | None:
    """Return the free bytes of the machine or its container, whichever is less; None if the system is silent."""
    sizes = []
    with suppress(OSError, psutil.Error):
        sizes.append(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit, usage = (
            int((CGROUP_PATH / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current")
        )
        sizes.append(limit - usage)
    return min(sizes, default=None)


def _peak_memory_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    from resource import RUSAGE_SELF, getrusage

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
