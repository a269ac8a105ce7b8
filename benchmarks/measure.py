"""Measure cases: several ways to do the same work, with targets.

`python -m benchmarks` finds every module of this package that has a tuple `CASES`. A case has a name, a description
of one line, and a function `run(setting) -> Figures`. (`python -m benchmarks W1` runs the cases named W1 or `W1-...`.)
Most cases describe a `Workload` and hand it to `measure`:

    def run(setting: Setting) -> Figures:
        stack = torch.randn(10 if setting.quick else 1000, 100_000, device=setting.device)
        workload = Workload(
            "W7-mcsa-100k",
            "MCSA over 1,000 clients of 100k parameters",
            ways={"floor": lambda r: plain(stack), "fedattune": lambda r: ours(stack)},
            targets=(Target("fedattune", "roofline", 1 / 0.6), Target("fedattune", "floor", 1.0)),
            flops=4 * n * n * p,
            bytes=8 * n * p,
            check=lambda results: assert_close(results["floor"], results["fedattune"]),
        )
        return measure(workload, setting)

    CASES = (Case("W7-mcsa-100k", "MCSA over 1,000 clients of 100k parameters", run),)

A case that measures by itself (for example fresh processes, by `machine.fresh`) fills in `Figures` directly: seconds
per way, peak memory, and further numbers in `values`. With `--quick` (`setting.quick`), which the tests use, the work
must be tiny.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import machine

REST_S = 0.03
"""Seconds in which threads without work fall asleep."""

Way = Callable[[int], Any]
"""Does one round, given its number; the workload's `check` gets the result."""

Maker = Callable[[], Way]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """The user's options, and the rates of the machine.

    Attributes:
        quick: do next to nothing (for tests): tiny sizes, one round.
        repeats: measured rounds per way; None: the workload's own number.
        device: device of the tensors.
        rates: measured FLOP/s and bytes/s; see `machine.measure_rates`.
        memory: whether to measure each way's peak memory in a process of its own.
        only: build and run this way alone (in the process that measures its memory).
    """

    quick: bool = False
    repeats: int | None = None
    device: torch.device = CPU
    rates: machine.Rates = machine.UNKNOWN
    memory: bool = False
    only: str | None = None


@dataclass(frozen=True)
class Target:
    """An upper bound: `way` may have `at_most` times the value of `against`, or `at_most` itself if `against` is empty.

    `of` names the compared value: `seconds` (median), `rss` (peak bytes), or a name in `Figures.values`. `against`
    may be "roofline".
    """

    way: str
    against: str
    at_most: float
    of: str = "seconds"


@dataclass(frozen=True)
class Workload:
    """The same work done in several ways.

    Attributes:
        name, about: name and description of the case.
        ways: name -> a function of the round's number that does one round. Preparation is not measured if `lazily`
            makes it on first use.
        floor: the way that all others are compared with.
        targets: upper bounds.
        flops, bytes: least operations and bytes of one round, for the roofline; 0 for no roofline.
        repeats, warmup: measured rounds per way, and rounds before these.
        check: gets the results of all ways in round 0, and raises if they differ.
        skipped: ways that cannot run here, each with a reason.
    """

    name: str
    about: str
    ways: Mapping[str, Way]
    floor: str = "floor"
    targets: Sequence[Target] = ()
    flops: float = 0.0
    bytes: float = 0.0
    repeats: int = 9
    warmup: int = 2
    check: Callable[[dict[str, Any]], None] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """Measurements of one case.

    Attributes:
        seconds: way -> seconds of each measured round. If `paired`, the i-th rounds of all ways ran side by side.
        rss: way -> peak resident bytes of a process that did nothing else.
        values: further numbers, way -> name -> value; names end with their unit ("disk MB").
        roofline: least seconds by the machine's measured rates; 0 if unknown.
    """

    name: str
    about: str
    seconds: Mapping[str, Sequence[float]]
    floor: str | None = "floor"
    targets: Sequence[Target] = ()
    roofline: float = 0.0
    rss: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False

    def median(self, way: str) -> float:
        """Return the median seconds of a round, or of the roofline."""
        return self.roofline if way == "roofline" else statistics.median(self.seconds[way])

    def ratio(self, way: str, against: str) -> float:
        """Return the time of one way over another: the median over paired rounds, else the ratio of medians."""
        if self.paired and against in self.seconds:
            pairs = zip(self.seconds[way], self.seconds[against], strict=True)
            return statistics.median(a / b for a, b in pairs)
        return self.median(way) / self.median(against)

    def reached(self, target: Target) -> float | None:
        """Return the value to compare with a target's `at_most`; None if it was not measured."""
        if target.of == "seconds":
            known = {k for k, v in self.seconds.items() if v} | ({"roofline"} if self.roofline else set())
            if target.way not in known or target.against not in known | {""}:
                return None
            return self.ratio(target.way, target.against) if target.against else self.median(target.way)
        table = self.rss if target.of == "rss" else {k: v[target.of] for k, v in self.values.items() if target.of in v}
        if target.way not in table or (target.against and target.against not in table):
            return None
        return float(table[target.way]) / (float(table[target.against]) if target.against else 1.0)


@dataclass(frozen=True)
class Case:
    """A case of `python -m benchmarks NAME`; without names, all cases run that are not `only_by_name`."""

    name: str
    about: str
    run: Callable[[Setting], Figures]
    only_by_name: bool = False


class Skip(Exception):  # noqa: N818 (it is no error)
    """A case that cannot run here; the message gives the reason."""


def lazily(make: Maker) -> Way:
    """Make a way on its first call, which is never in a measured round."""
    made: list[Way] = []

    def run(round_: int) -> Any:
        if not made:
            made.append(make())
        return made[0](round_)

    return run


def measure(workload: Workload, setting: Setting) -> Figures:
    """Run all ways round by round, side by side, so that a busy machine slows all of them alike."""
    ways = {k: v for k, v in workload.ways.items() if setting.only in (None, k)}
    repeats = setting.repeats or (1 if setting.quick else workload.repeats)
    peaks = _peaks(workload, setting)  # first: afterwards this process holds the memory that these processes need
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    results: dict[str, Any] = {}
    for r in range((1 if setting.quick else workload.warmup) + repeats):
        turn = r % max(1, len(names))  # rotate, so that no way always follows the same way
        for name in names[turn:] + names[:turn]:
            took, result = timed(ways[name], r, setting)
            seconds[name].append(took)
            if r == 0:
                results[name] = result
            del result
        if r == 0 and workload.check and setting.only is None:
            workload.check(results)
        if r == 0:
            results.clear()
    return Figures(
        workload.name,
        workload.about,
        {name: times[-repeats:] for name, times in seconds.items()},
        floor=workload.floor,
        targets=tuple(workload.targets),
        roofline=setting.rates.roofline(workload.flops, workload.bytes),
        rss=peaks,
        skipped=dict(workload.skipped),
        paired=True,
    )


def timed(way: Way, round_: int, setting: Setting) -> tuple[float, Any]:
    """Run one round, and return its seconds, including pending work of a GPU, and its result."""
    device = setting.device
    machine.wait(device)
    # The threads of the way before wait for more work, on the cores that this way needs. The main thread stays busy, as
    # in a run.
    until = time.perf_counter() + (REST_S if device.type == "cpu" and not setting.quick else 0.0)
    while time.perf_counter() < until:
        pass
    start = time.perf_counter()
    result = way(round_)
    machine.wait(device)
    return time.perf_counter() - start, result


def _peaks(workload: Workload, setting: Setting) -> dict[str, int]:
    if not setting.memory or setting.only is not None:
        return {}
    more = ["--device", str(setting.device), *(["--quick"] if setting.quick else [])]
    return {way: int(machine.fresh("benchmarks", workload.name, "--alone", way, *more)["rss"]) for way in workload.ways}
