"""Choose the fastest of several calls with the same result, by measuring them on this machine.

Which call is fastest depends on the processor and on the libraries behind PyTorch: on one, MKL multiplies matrices
twice as fast as oneDNN, on another oneDNN is three times as fast as MKL. A choice is measured at first use, in
milliseconds to a quarter of a second. It is kept in the cache folder under the processor's name and PyTorch's version,
so later runs choose alike: the calls differ by rounding. If other processes kept the machine busy, the next processes
measure again. FEDATTUNE_MEASURE=off makes the plain call everywhere.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from .hardware import LoadMeter, find_processor_name, use_threads
from .io import find_cache_folder, replace_atomically

MIN_GAIN = 1.15
"""Minimum ratio of the plain call's time to the time of a call that is chosen in its place."""

REPEATS, MIN_REPEATS = 5, 3
"""Times that each call is measured, and that a slow one is; the minimum counts: other processes only add to it."""

MAX_SECONDS = 0.15
"""Seconds after which a call counts as slow."""

MAX_MEASUREMENTS = 5
"""Processes that measure the same calls while others keep the machine busy; then the minimum of all times counts."""

MAX_BUSY_CORES = 0.25
"""Cores that other processes may keep busy while calls are measured for good."""

FILE_NAME = "choices.json"


class Choice(NamedTuple):
    """The fastest of some calls: its name (empty if nothing was to choose), and the minimum seconds of each call.

    `busy` counts the processes that measured while others kept the machine busy; 0 if the last one measured alone.
    """

    name: str
    seconds: dict[str, float]
    busy: int = 0

    @property
    def is_open(self) -> bool:
        return 0 < self.busy < MAX_MEASUREMENTS


def choose(
    what: str, sizes: Sequence[int], calls: Mapping[str, Callable[[], object]], min_gain: float = MIN_GAIN
) -> str:
    """Return the name of the fastest call on this machine; of the first, plain one unless another gains enough.

    All calls have the same result. Sizes between the same powers of two, and so many threads, share a choice.

    Args:
        min_gain: minimum ratio of the plain call's time to the time of a call that is chosen in its place.
    """
    judge = partial(_choose_fastest, min_gain=min_gain)
    return _find(what, sizes, calls, judge).name if is_allowed() else next(iter(calls))


def compare(what: str, sizes: Sequence[int], calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the minimum seconds of each call on this machine; nothing if calls may not be measured."""
    return _find(what, sizes, calls, lambda _: "").seconds if is_allowed() else {}


def choose_threads(what: str, sizes: Sequence[int], call: Callable[[], object], max_threads: int) -> int:
    """Return the number of threads with which the call is fastest on this machine: 1 or `max_threads`.

    Small operations wait longer for each other's threads than they work. If nothing may be measured, it is 1.
    """

    def run(threads: int) -> None:
        with use_threads(threads):
            call()

    calls = {"one thread": partial(run, 1), "all threads": partial(run, max_threads)}
    if max_threads > 1 and choose(f"{what} 1 or {max_threads} threads", sizes, calls) == "all threads":
        return max_threads
    return 1


def _find(
    what: str, sizes: Sequence[int], calls: Mapping[str, Callable[[], object]], judge: Callable[[dict[str, float]], str]
) -> Choice:
    key = f"{what} {'x'.join(str(1 << max(0, n - 1).bit_length()) for n in sizes)}, {torch.get_num_threads()} threads"
    known = _known()
    if _should_measure(known.get(key), key, calls):
        with _locks.setdefault(key, threading.Lock()):  # two groups of clients at the same time measure once
            if _should_measure(known.get(key), key, calls):
                known[key] = _renew(known.get(key), _measure(calls), judge)
                _measured_here.add(key)
                _save(key, known[key])
    return known[key]


def _should_measure(known: Choice | None, key: str, calls: Mapping[str, Callable[[], object]]) -> bool:
    """Tell whether the choice is new, has other calls, or was made on a busy machine by another process."""
    if known is None or known.seconds.keys() != calls.keys():
        return True
    return known.is_open and key not in _measured_here


def _renew(before: Choice | None, seconds: dict[str, float], judge: Callable[[dict[str, float]], str]) -> Choice:
    """Choose by new times; on a busy machine, what earlier processes measured counts as well."""
    if _load.count_busy_cores() <= MAX_BUSY_CORES:
        return Choice(judge(seconds), seconds)
    busy = 1
    if before and before.seconds.keys() == seconds.keys():
        busy = before.busy + 1
        seconds = {name: min(taken, before.seconds[name]) for name, taken in seconds.items()}
    return Choice(judge(seconds), seconds, busy)


def is_allowed() -> bool:
    """Return whether calls may be measured: FEDATTUNE_MEASURE is not `off`."""
    return os.environ.get("FEDATTUNE_MEASURE", "").lower() != "off"


def find_choices() -> dict[str, Choice]:
    """Return what was chosen on this machine so far, by operation and sizes."""
    return dict(_known()) if is_allowed() else {}


_load = LoadMeter()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_load.restart)  # a child's own processor time begins at 0


_measured_here: set[str] = set()
"""Choices that this process measured; it keeps them to its end, so that its rounds repeat."""

_locks: dict[str, threading.Lock] = {}
"""One per key, held while its calls are measured: a measured call may choose among other calls, also in threads."""


def _choose_fastest(seconds: dict[str, float], min_gain: float) -> str:
    plain, fastest = next(iter(seconds)), min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] * min_gain < seconds[plain] else plain


def _measure(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            if repeat:  # the first call prepares
                times[name].append(took)
        if repeat >= MIN_REPEATS and time.perf_counter() - begun > MAX_SECONDS:
            break
    return {name: min(taken) for name, taken in times.items()}


@cache
def describe_machine() -> str:
    """Describe what choices depend on: processor, cores, and PyTorch's version."""
    return f"{find_processor_name()}, {os.cpu_count()} cores, PyTorch {torch.__version__}"


def choices_path() -> Path | None:
    """Return the file of the choices; None if nothing is cached."""
    folder = find_cache_folder()
    return folder / FILE_NAME if folder else None


@cache
def _known() -> dict[str, Choice]:
    """Read the choices of this machine, once per process; none from a damaged file."""
    path = choices_path()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        mine = json.loads(path.read_text("utf-8"))[describe_machine()] if path else {}
        return {key: Choice(name, dict(seconds), *busy) for key, (name, seconds, *busy) in mine.items()}
    return {}


def _save(key: str, choice: Choice) -> None:
    """Keep a choice beside all others; a folder that cannot be written costs the measuring alone."""
    path = choices_path()
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        machine, everything, mine = describe_machine(), {}, {}
        with suppress(OSError, ValueError, TypeError):
            everything = dict(json.loads(path.read_text("utf-8")))
            mine = dict(everything.get(machine, {}))
        everything[machine] = {**mine, key: choice}
        with replace_atomically(path) as new:
            new.write_text(json.dumps(everything, indent=1) + "\n", "utf-8")
