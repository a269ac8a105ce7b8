"""What the machine offers: memory that stays with the process, and cores to run groups of clients side by side."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

WORTH_ALL_CORES = 2_000_000
"""Parameters times samples, or clients, from which on operations gain from being divided over the cores."""


@contextmanager
def noise(seed: int, device: torch.device) -> Iterator[None]:
    """Draw what layers draw by themselves from `seed`, and leave the generators as they were."""
    # Not torch.manual_seed: without CUDA, it notes the stack of its caller for later, at 2 ms a time.
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(on_gpu):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


def cores(device: torch.device) -> int:
    """Groups of clients that can run at the same time: PyTorch's threads on a CPU, one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let PyTorch use so many threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks at the same time, each with one of PyTorch's threads; a single one with all of them."""
    if len(tasks) < 2:
        for task in tasks:
            task()
        return
    with threads(1):
        others = [_pool().submit(_without_gradients, task) for task in tasks[1:]]
        try:
            tasks[0]()
        finally:
            for other in others:
                other.exception()  # nobody may go on writing
        for other in others:
            other.result()


def _without_gradients(task: Callable[[], None]) -> None:
    with torch.no_grad():  # a thread begins with gradients on
        task()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fedattune")


@cache
def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, once.

    Updates of stacked parameters allocate megabytes at every step; by default glibc returns them to the system
    and faults in fresh pages each time, which cost more than the arithmetic (measured: 3x on a small network).
    """
    if sys.platform != "linux":
        return
    # More than 32 MiB it returns in any case, and should: kept in pieces, gigabytes are soon too few for the next.
    m_trim_threshold, m_mmap_threshold, limit = -1, -3, 1 << 25
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_threshold, limit)
        libc.mallopt(m_trim_threshold, 1 << 30)
