"""What a process does that trains runs for another one; that one's part is in `workers`."""

import multiprocessing
import os
import signal
import threading
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ..errors import DivergedError
from .jobs import Job
from .shared import unpack

if TYPE_CHECKING:
    from ..trainer import Progress

Order = tuple[int, int, dict[str, Any]]
"""A run's number, that of its data, and all else that makes a `Job`."""


def work(pipe: Connection, threads: int, data: list[bytes]) -> None:
    """What a process does: train one run after another until there is none or nobody to give one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
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
            pipe.send(_train(Job(federation=federations[number], **described), pipe))


def _train(job: Job, pipe: Connection) -> tuple[str, Any]:
    def tell(progress: "Progress") -> None:
        pipe.send(("round", progress))

    try:
        result = job.train(tell, pipe.poll)  # whatever comes during a run means that it is to stop
    except DivergedError as error:
        return "failed", error
    except Exception as error:
        return "error", _portable(error)
    return ("finished" if result.finished else "stopped"), None


def _portable(error: Exception) -> Exception:
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


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
