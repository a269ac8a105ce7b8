"""Runs in processes of their own: one is given to each, and another when it is done.

Processes are started afresh, not forked from this one, whose threads a fork would not survive. They share the data,
which is mapped from files, and hand back nothing but progress: results are in the runs' folders. They ignore
Ctrl-C, for this process tells them when to stop; they leave at once when this process is gone.
"""

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import RunError
from .jobs import Job, KilledError, Stop
from .progress import Tell
from .shared import pack, packing
from .worker import Order, work

PATIENCE = 0.2
"""Seconds after which it is asked again whether to stop."""

Ended = Callable[[int, RunError | None], None]


def run(
    jobs: Mapping[int, Job],
    n: int,
    threads: int,
    stop: Stop,
    tell: Callable[[int], Tell],
    ended: Ended,
    scratch: Path,
) -> None:
    """Train the runs in `n` processes of `threads` threads; `ended` is told of each that finished or failed.

    Returns early where `stop` said yes, after the rounds that were under way.
    """
    with packing(scratch) as folder:
        known: dict[int, bytes] = {}
        for job in jobs.values():
            if id(job.federation) not in known:
                known[id(job.federation)] = pack(job.federation, folder)
        pool = _Pool(threads, list(known.values()))
        numbers = {key: number for number, key in enumerate(known)}
        waiting = [(i, numbers[id(job.federation)], _without_data(job)) for i, job in jobs.items()]
        try:
            _supervise(pool, waiting, n, stop, tell, ended)
        finally:
            pool.end()


def _without_data(job: Job) -> dict[str, Any]:
    return {one.name: getattr(job, one.name) for one in fields(job) if one.name != "federation"}


def _supervise(
    pool: "_Pool",
    waiting: list[Order],
    n: int,
    stop: Stop,
    tell: Callable[[int], Tell],
    ended: Ended,
) -> None:
    asked = False
    while pool.workers or (waiting and not asked):
        while waiting and not asked and len(pool.workers) < n:
            pool.start()
            pool.workers[-1].give(waiting.pop(0))
        if not asked and stop():
            asked = True
            for worker in pool.workers:
                worker.leave()
        for worker in pool.ready():
            kind, what = worker.receive()
            if kind == "round":
                tell(worker.run)(what)
                continue
            if kind == "warning":
                message, category, file, line = what
                warnings.warn_explicit(message, category, file, line, registry=pool.warned)
                continue
            if kind == "gone" or asked or not waiting:
                pool.remove(worker)
            if kind == "error":
                raise what
            run_ = worker.run
            if kind != "gone" and worker in pool.workers:
                worker.give(waiting.pop(0))
            if kind != "stopped":
                ended(run_, what)


@dataclass(eq=False)
class _Worker:
    """One process, as this one sees it."""

    process: BaseProcess
    pipe: Connection
    run: int = -1

    def give(self, order: Order) -> None:
        """Give it a run."""
        self.run = order[0]
        with suppress(OSError):  # it is gone already, which is found when it is listened to
            self.pipe.send(order)

    def leave(self) -> None:
        """Ask it to stop after the round, and to leave."""
        with suppress(OSError):
            self.pipe.send(None)

    def receive(self) -> tuple[str, Any]:
        """What it has to say: its kind, and more."""
        try:
            kind, what = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return "gone", KilledError(_how_it_ended(self.process.exitcode))
        return kind, what


@dataclass
class _Pool:
    """The processes that there are."""

    threads: int
    data: list[bytes]
    workers: list[_Worker] = field(default_factory=list)
    warned: dict[Any, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Start one more."""
        context = _context()
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, self.threads, self.data), name="fedattune-run")
        with _for_a_worker(self.threads):
            process.start()
        there.close()
        self.workers.append(_Worker(process, here))

    def ready(self) -> list[_Worker]:
        """Those that have something to say."""
        said = wait([worker.pipe for worker in self.workers], PATIENCE)
        return [worker for worker in self.workers if worker.pipe in said]

    def remove(self, worker: _Worker) -> None:
        """Let it go."""
        worker.leave()
        worker.pipe.close()
        worker.process.join()
        self.workers.remove(worker)

    def end(self) -> None:
        """End at once what is still running."""
        for worker in self.workers:
            worker.process.kill()
        while self.workers:
            self.remove(self.workers[-1])


def _context() -> Any:
    """Fresh processes; on Linux forked from a server that has only imported, so that import is paid for once."""
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    slow = [
        "fedattune.trainer",
        "torch._dynamo",
    ]  # PyTorch loads the second when some of its functions are used
    context.set_forkserver_preload([name for name in slow if name in sys.modules])
    return context


@contextmanager
def _for_a_worker(threads: int) -> Iterator[None]:
    """What a new process inherits: so many threads, which must stand before PyTorch's import, and no Ctrl-C."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    resource_tracker.ensure_running()  # here, for it lets Ctrl-C through again when it starts
    blocks = hasattr(signal, "pthread_sigmask")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else set()
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        how = f"ended with exit code {code}"
    else:
        known = {int(one): one.name for one in signal.Signals}
        how = f"was killed by {known.get(-code, f'signal {-code}')}"
    return (
        f"the process that trained it {how}; systems that run out of memory do that: go on with --resume, "
        "with fewer --processes if need be"
    )
