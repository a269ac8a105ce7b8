"""Run jobs in worker processes, which map the data from files and send back only progress and warnings.

Results are in the runs' folders. Each worker is a `ProcessPoolExecutor` of its own: one executor for all would end
every run when one worker is killed. Workers start fresh, because PyTorch's threads do not survive a fork. They ignore
Ctrl-C and SIGTERM, because the parent tells them when to stop, and exit as soon as the parent is gone.

Refused: loky, which joblib brings. If one of its workers is killed, all runs end with `TerminatedWorkerError`, and the
second worker starts in 1.5 s, where a fork of a server that has imported PyTorch takes 0.03 s. Pipes for progress, the
request to stop, and the files of arrays would stay as they are.
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
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import DivergedError, RunError, summarize_error
from ..core.own_code import find_file, load_file
from ..data.cache import find_mapped_file, open_mapped, save_mapped
from .plan import Job, ProgressCallback, ShouldStop, WorkerKilledError

MIN_FILE_BYTES = 1 << 16
"""Size from which an array goes into a file."""
FOLDER_PREFIX = ".shared-"


@contextmanager
def make_shared_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for shared arrays in `parent`, and remove it afterwards; remove leftovers of a crash first."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f"{FOLDER_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def pack(thing: Any, folder: Path) -> bytes:
    """Pickle an object for `unpack` in other processes of this machine, with its large arrays in files.

    An array that is mapped from a file already stays there. Other large arrays are written to `folder`, which must
    exist as long as the bytes are used. Tensors of this process are mapped from it from then on, so that memory
    holds them once.
    """
    buffer = io.BytesIO()
    _Packer(buffer, folder).dump(thing)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Restore an object that `pack` pickled."""
    return _Unpacker(io.BytesIO(packed)).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> tuple[str, bool] | None:
        """Return the file of a large array and whether it is a tensor; None for an object to pickle as usual."""
        is_tensor = isinstance(obj, torch.Tensor)
        if is_tensor and (obj.device.type != "cpu" or not obj.is_contiguous() or obj.requires_grad):
            return None
        is_array = is_tensor or isinstance(obj, np.ndarray)
        if not is_array or obj.nbytes < MIN_FILE_BYTES or obj.dtype == object:
            return None
        path = find_mapped_file(obj)
        if path is None:
            path = self._folder / f"{sum(1 for _ in self._folder.iterdir())}.npy"
            mapped = save_mapped(path, obj.numpy() if is_tensor else obj)
            if is_tensor:
                obj.set_(torch.from_numpy(mapped))
        return str(path), is_tensor


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, bool]) -> Any:
        path, is_tensor = pid
        array = open_mapped(Path(path))
        return torch.from_numpy(array) if is_tensor else array


POLL_S = 0.05
"""Seconds between two looks at whether to stop and whether a run has ended."""


def run_in_processes(
    jobs: Mapping[int, Job],
    n_processes: int,
    threads: int,
    should_stop: ShouldStop,
    get_callback: Callable[[int], ProgressCallback],
    on_end: Callable[[int, RunError | None], None],
    scratch: Path,
) -> None:
    """Train jobs in worker processes; return early, after the current rounds, when a stop is requested.

    `on_end` receives the number of each job that finished, or that failed with the error.
    """
    with make_shared_folder(scratch) as folder:
        federations = {id(job.federation): job.federation for job in jobs.values()}
        data = [pack(federation, folder) for federation in federations.values()]
        sources = (find_file(job.source) for job in jobs.values() if job.source)
        own_files = list(dict.fromkeys(file for file in sources if file))
        positions = {key: position for position, key in enumerate(federations)}
        waiting = [(i, positions[id(job.federation)], job) for i, job in jobs.items()]
        idle: list[_Worker] = []
        busy: list[_Worker] = []
        shown_warnings: dict[Any, Any] = {}
        is_stopping = False
        try:
            while busy or (waiting and not is_stopping):
                while waiting and len(busy) < n_processes and not is_stopping:
                    busy.append(idle.pop() if idle else _Worker(threads, data, own_files))
                    busy[-1].submit(*waiting.pop(0))
                if not is_stopping and should_stop():
                    is_stopping = True
                    for worker in busy:
                        with suppress(OSError):  # a worker that is gone is found by its future
                            worker.pipe.send(None)
                wait([worker.pipe for worker in busy], POLL_S)
                for worker in tuple(busy):
                    has_ended = worker.future.done()  # before reading: all messages are in the pipe by then
                    worker.relay_messages(get_callback(worker.job), shown_warnings)
                    if not has_ended:
                        continue
                    error = worker.find_error()
                    busy.remove(worker)
                    if isinstance(error, WorkerKilledError):
                        worker.close()
                    else:
                        idle.append(worker)
                    if error or worker.future.result():
                        on_end(worker.job, error)
        finally:
            for worker in [*busy, *idle]:
                worker.close()


class _Worker:
    """A worker process, the pipe to it, and its current job."""

    def __init__(self, threads: int, data: list[bytes], own_files: list[Path]) -> None:
        context = _get_context()
        self.pipe, far_end = context.Pipe()
        self._executor = ProcessPoolExecutor(1, context, _start_worker, (far_end, threads, data, own_files))
        before = multiprocessing.active_children()
        with _block_interrupts():
            self.future: Future[Any] = self._executor.submit(os.getpid)  # starts the process
        (self._process,) = set(multiprocessing.active_children()) - set(before)
        far_end.close()
        self.job = -1

    def submit(self, i: int, position: int, job: Job) -> None:
        """Start to train job number `i`, whose federation is at this position in the list of data."""
        without_data = {one.name: getattr(job, one.name) for one in fields(job) if one.name != "federation"}
        self.job = i
        self.future = self._executor.submit(_train_job, position, without_data)

    def relay_messages(self, on_progress: ProgressCallback, shown_warnings: dict[Any, Any]) -> None:
        """Pass on the progress that has arrived, and repeat each warning once."""
        while message := self._receive():
            kind, content = message
            if kind == "progress":
                on_progress(content)
            else:
                text, category, file, line = content
                warnings.warn_explicit(text, category, file, line, registry=shown_warnings)

    def _receive(self) -> tuple[str, Any] | None:
        with suppress(EOFError, OSError):
            return self.pipe.recv() if self.pipe.poll() else None
        return None

    def find_error(self) -> RunError | None:
        """Return how the job failed, if it did; raise any other error of the worker."""
        error = self.future.exception()
        if isinstance(error, BrokenProcessPool):
            self._executor.shutdown()  # waits for the process, so that its exit code is known
            return WorkerKilledError(_describe_exit(self._process.exitcode))
        if error is None or isinstance(error, DivergedError):
            return error
        raise error

    def close(self) -> None:
        """End the process, at once if it trains; the run folder keeps its last checkpoint."""
        if not self.future.done():
            self._process.kill()
        self._executor.shutdown()
        self.pipe.close()


def _get_context() -> Any:
    """Return the way to start processes; on Linux, fork them from a server that imports PyTorch once."""
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedattune.training.fit"])
    return context


@contextmanager
def _block_interrupts() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _describe_exit(code: int | None) -> str:
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        names = {int(one): one.name for one in signal.Signals}
        how = f"was killed by {names.get(-code, f'signal {-code}')}"
    return (
        f"the process that trained it {how}; a system does this when memory runs out: continue with --resume, "
        "and with fewer --processes if it happens again"
    )


# ---- in the worker process ----

_state: dict[str, Any] = {}
"""State of this worker process: its pipe, the packed data, the current federation, and the event to stop."""


def _start_worker(pipe: Connection, threads: int, data: list[bytes], own_files: list[Path]) -> None:
    """Prepare a worker process; jobs may hold objects from custom code."""
    import torch

    for file in own_files:
        load_file(file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    _state.update(pipe=pipe, data=data, federations={}, stop=threading.Event())
    threading.Thread(target=_listen, args=(pipe, _state["stop"]), daemon=True).start()
    warnings.showwarning = _send_warning


def _listen(pipe: Connection, stop: threading.Event) -> None:
    """Wait for the request to stop, and exit when the parent is gone."""
    with suppress(EOFError, OSError):
        pipe.recv()
        stop.set()
        pipe.recv()  # nothing more is sent: this returns when the parent is gone
    os._exit(1)


def _send_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    _state["pipe"].send(("warning", (str(message), category, filename, lineno)))


def _train_job(position: int, without_data: dict[str, Any]) -> bool:
    pipe, federations = _state["pipe"], _state["federations"]
    if position not in federations:
        federations.clear()
        federations[position] = unpack(_state["data"][position])
    job = Job(federation=federations[position], **without_data)
    try:
        result = job.train(lambda progress: pipe.send(("progress", progress)), _state["stop"].is_set)
    except Exception as error:
        if can_cross_processes(error):
            raise
        raise RuntimeError(summarize_error(error)) from error
    return result.is_finished


def can_cross_processes(error: Exception) -> bool:
    """Return whether an error survives pickling; an error that does not would break the executor, without its cause."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 (the bytes are of this process)
    except Exception:
        return False
