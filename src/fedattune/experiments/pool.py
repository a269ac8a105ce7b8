"""Runs in processes of their own: one is given to each, and another when it is done.

Processes are started afresh, not forked from this one, whose threads a fork would not survive. They share the data,
which is mapped from files, and hand back nothing but progress: results are in the runs' folders. They ignore
Ctrl-C, for this process tells them when to stop; they leave at once when this process is gone.

What a process does that trains runs for another one; that one's part is in `workers`.

Hand data over to other processes: small parts are copied, large arrays are mapped from files by all of them.
"""

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import DivergedError, RunError
from ..data.cache import find_mapped_file, open_mapped, save_mapped
from .job import Job, ProgressCallback, ShouldStop, WorkerKilledError

if TYPE_CHECKING:
    from ..training.context import Progress

MIN_FILE_BYTES = 1 << 16
"""Bytes from which an array goes into a file."""


SCRATCH_PREFIX = ".shared-"


@contextmanager
def scratch_folder(scratch: Path) -> Iterator[Path]:
    """A folder in `scratch` for the arrays of what is packed, as long as it is used; remains of a crash go."""
    scratch.mkdir(parents=True, exist_ok=True)
    for old in scratch.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pack(thing: Any, folder: Path) -> bytes:
    """Bytes from which another process of this machine makes the same thing, as long as `folder` is there.

    Large arrays that are mapped from a file already stay there; the others are written to `folder`, and tensors of
    this process then lie there too, instead of in memory once more.
    """
    buffer = io.BytesIO()
    _Packer(buffer, folder).dump(thing)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """What was packed."""
    return _Unpacker(io.BytesIO(packed)).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> tuple[str, bool] | None:
        """The file of a large array, and whether it is a tensor; None for all that is pickled as usual."""
        tensor = isinstance(obj, torch.Tensor)
        if tensor and (obj.device.type != "cpu" or not obj.is_contiguous() or obj.requires_grad):
            return None
        if not (tensor or isinstance(obj, np.ndarray)) or obj.nbytes < MIN_FILE_BYTES or obj.dtype == object:
            return None
        path = find_mapped_file(obj)
        if path is None:
            path = self._folder / f"{sum(1 for _ in self._folder.iterdir())}.npy"
            mapped = save_mapped(path, obj.numpy() if tensor else obj)
            if tensor:
                obj.set_(torch.from_numpy(mapped))
        return str(path), tensor


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, bool]) -> Any:
        """The array in a file."""
        path, tensor = pid
        array = open_mapped(Path(path))
        return torch.from_numpy(array) if tensor else array


JobMessage = tuple[int, int, dict[str, Any]]
"""A run's number, that of its data, and all else that makes a `Job`."""


def run_worker(pipe: Connection, threads: int, data: list[bytes]) -> None:
    """What a process does: train one run after another until there is none or nobody to give one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        pipe.send(("warning", (str(message), category, filename, lineno)))

    warnings.showwarning = show
    federations: dict[int, Any] = {}
    with suppress(EOFError, OSError):  # there is nobody left to work for
        while order := pipe.recv():
            _, number, described = order
            if number not in federations:
                federations = {number: unpack(data[number])}
            pipe.send(_train_job(Job(federation=federations[number], **described), pipe))


def _train_job(job: Job, pipe: Connection) -> tuple[str, Any]:
    def tell(progress: "Progress") -> None:
        pipe.send(("round", progress))

    try:
        result = job.train(tell, pipe.poll)  # whatever comes during a run means that it is to stop
    except DivergedError as error:
        return "failed", error
    except Exception as error:
        return "error", _picklable_error(error)
    return ("finished" if result.finished else "stopped"), None


def _picklable_error(error: Exception) -> Exception:
    """The error as it can be sent, with where it arose."""
    import pickle
    import traceback

    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in the process of a run:\n{where}")
    return error


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


POLL_S = 0.2
"""Seconds after which it is asked again whether to stop."""


OnEnd = Callable[[int, RunError | None], None]


def run_in_processes(
    jobs: Mapping[int, Job],
    n: int,
    threads: int,
    stop: ShouldStop,
    tell: Callable[[int], ProgressCallback],
    ended: OnEnd,
    scratch: Path,
) -> None:
    """Train the runs in `n` processes of `threads` threads; `ended` is told of each that finished or failed.

    Returns early where `stop` said yes, after the rounds that were under way.
    """
    with scratch_folder(scratch) as folder:
        known: dict[int, bytes] = {}
        for job in jobs.values():
            if id(job.federation) not in known:
                known[id(job.federation)] = pack(job.federation, folder)
        pool = _Pool(threads, list(known.values()))
        numbers = {key: number for number, key in enumerate(known)}
        waiting = [(i, numbers[id(job.federation)], _without_data(job)) for i, job in jobs.items()]
        try:
            _supervise_workers(pool, waiting, n, stop, tell, ended)
        finally:
            pool.end()


def _without_data(job: Job) -> dict[str, Any]:
    return {one.name: getattr(job, one.name) for one in fields(job) if one.name != "federation"}


def _supervise_workers(
    pool: "_Pool",
    waiting: list[JobMessage],
    n: int,
    stop: ShouldStop,
    tell: Callable[[int], ProgressCallback],
    ended: OnEnd,
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

    def give(self, order: JobMessage) -> None:
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
            return "gone", WorkerKilledError(_describe_exit(self.process.exitcode))
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
        context = _process_context()
        here, there = context.Pipe()
        process = context.Process(
            target=run_worker, args=(there, self.threads, self.data), name="fedattune-run"
        )
        with _worker_environment(self.threads):
            process.start()
        there.close()
        self.workers.append(_Worker(process, here))

    def ready(self) -> list[_Worker]:
        """Those that have something to say."""
        said = wait([worker.pipe for worker in self.workers], POLL_S)
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


def _process_context() -> Any:
    """Fresh processes; on Linux forked from a server that has only imported, so that import is paid for once."""
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    slow = [
        "fedattune.training.fit",
        "torch._dynamo",
    ]  # PyTorch loads the second when some of its functions are used
    context.set_forkserver_preload([name for name in slow if name in sys.modules])
    return context


@contextmanager
def _worker_environment(threads: int) -> Iterator[None]:
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


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        how = f"ended with exit code {code}"
    else:
        known = {int(one): one.name for one in signal.Signals}
        how = f"was killed by {known.get(-code, f'signal {-code}')}"
    return (
        f"the process that trained it {how}; systems that run out of memory do that: go on with --resume, "
        "with fewer --processes if need be"
    )
