"""How everything here is measured: cases, ways of doing the same work, targets, and the figures that come out.

Every module of this package that has a tuple `CASES` is found by `python -m benchmarks`. A case has a name (`W1-mlr`;
`python -m benchmarks W1` runs all whose name is W1 or begins with `W1-`), one line on what is done, and a function
`run(setting) -> Figures`. Most cases describe a `Workload` and hand it to `measure`:

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

A case that measures by itself (fresh processes, say by `machine.fresh`) fills in `Figures` directly: seconds per way,
peak memory, and further numbers in `values`. `--quick` (`setting.quick`) must make the work next to nothing: it is what
the tests run.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import machine

Way = Callable[[int], Any]
"""Does one round, given its number; what it returns goes to the workload's `check`."""

Maker = Callable[[], Way]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """What the user asked for, and what the machine can do.

    Attributes:
        quick: do next to nothing (for tests): tiny sizes, one round.
        repeats: measured rounds per way; None leaves it to the workload.
        device: where tensors go.
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
    """At most: `way` may have `at_most` times what `against` has, or `at_most` itself where that is empty.

    `of` says what is compared: `seconds` (median), `rss` (peak bytes), or a name in `Figures.values`. `against` may
    be "roofline".
    """

    way: str
    against: str
    at_most: float
    of: str = "seconds"


@dataclass(frozen=True)
class Workload:
    """The same work done in several ways.

    Attributes:
        name, about: those of the case.
        ways: name -> a function of the round's number that does one round. Preparation is not measured if it is
            made on first use by `lazily`.
        floor: the way that all are compared with.
        targets: what is asked for.
        flops, bytes: what one round must compute and move at least, for the roofline; 0 where it says nothing.
        repeats, warmup: measured rounds per way, and rounds before these.
        check: gets what each way returned in round 0, and raises if they did not compute the same.
        skipped: ways that cannot be run here, each with a sentence on why.

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
    """What was measured.

    Attributes:
        seconds: way -> seconds of each measured round. Where `paired`, the i-th rounds of all ways ran side by side.
        rss: way -> peak resident bytes of a process that did nothing else.
        values: further numbers, way -> name -> value; names end with their unit ("disk MB").
        roofline: seconds that the machine's measured rates allow at best; 0 if unknown.

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
        """Median seconds of a round; of "roofline", what the machine allows."""
        return self.roofline if way == "roofline" else statistics.median(self.seconds[way])

    def ratio(self, way: str, against: str) -> float:
        """Time of one way over that of another: the median over rounds that ran side by side, else of medians."""
        if self.paired and against in self.seconds:
            pairs = zip(self.seconds[way], self.seconds[against], strict=True)
            return statistics.median(a / b for a, b in pairs)
        return self.median(way) / self.median(against)

    def reached(self, target: Target) -> float | None:
        """What a target's `at_most` is held against; None if it was not measured."""
        if target.of == "seconds":
            known = {k for k, v in self.seconds.items() if v} | ({"roofline"} if self.roofline else set())
            if target.way not in known or target.against not in known | {""}:
                return None
            return self.ratio(target.way, target.against) if target.against else self.median(target.way)
        table = (
            self.rss
            if target.of == "rss"
            else {k: v[target.of] for k, v in self.values.items() if target.of in v}
        )
        if target.way not in table or (target.against and target.against not in table):
            return None
        return float(table[target.way]) / (float(table[target.against]) if target.against else 1.0)


@dataclass(frozen=True)
class Case:
    """One thing to measure, as `python -m benchmarks NAME` knows it."""

    name: str
    about: str
    run: Callable[[Setting], Figures]


class Skip(Exception):  # noqa: N818 (it is no error)
    """A case that cannot be run here; the message says why."""


def lazily(make: Maker) -> Way:
    """A way that is made by `make` when it is first called, which is never in a measured round."""
    made: list[Way] = []

    def run(round_: int) -> Any:
        if not made:
            made.append(make())
        return made[0](round_)

    return run


def measure(workload: Workload, setting: Setting) -> Figures:
    """Run all ways round by round, side by side, so that a busy machine harms all alike."""
    ways = {k: v for k, v in workload.ways.items() if setting.only in (None, k)}
    repeats = setting.repeats or (1 if setting.quick else workload.repeats)
    peaks = _peaks(workload, setting)  # first: afterwards this process holds what those need
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    results: dict[str, Any] = {}
    for r in range((1 if setting.quick else workload.warmup) + repeats):
        turn = r % max(1, len(names))  # nobody always runs in the wake of the same neighbour
        for name in names[turn:] + names[:turn]:
            took, result = timed(ways[name], r, setting.device)
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


def timed(way: Way, round_: int, device: torch.device) -> tuple[float, Any]:
    """Seconds of one round, with all that was left to a GPU, and what it returned."""
    machine.wait(device)
    start = time.perf_counter()
    result = way(round_)
    machine.wait(device)
    return time.perf_counter() - start, result


def _peaks(workload: Workload, setting: Setting) -> dict[str, int]:
    if not setting.memory or setting.only is not None:
        return {}
    more = ["--device", str(setting.device), *(["--quick"] if setting.quick else [])]
    return {
        way: int(machine.fresh("benchmarks", workload.name, "--alone", way, *more)["rss"])
        for way in workload.ways
    }
