"""The command: `python -m benchmarks [NAME ...]`."""

import argparse
import json
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from . import machine, show
from .measure import Case, Figures, Setting, Skip

DOCS = Path(__file__).parent.parent / "docs" / "performance.md"


def all_cases() -> list[Case]:
    """The cases of all modules of this package, W1 first."""
    folder = str(Path(__file__).parent)
    names = [m.name for m in pkgutil.iter_modules([folder]) if not m.name.startswith("_")]
    found = [case for name in names for case in getattr(import_module(f"benchmarks.{name}"), "CASES", ())]
    return sorted(found, key=lambda case: show.order(case.name))


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The cases called so, or whose name begins so before a hyphen; all without names.

    Raises:
        SystemExit: a name that no case has.

    """
    picked = [c for c in cases if not names or any(f"{c.name}-".startswith(f"{name}-") for name in names)]
    for name in names:
        if not any(f"{c.name}-".startswith(f"{name}-") for c in picked):
            raise SystemExit(f"no case is called {name!r}; there are: {', '.join(c.name for c in cases)}")
    return picked


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="cases, such as W1, W4-dnn (default: all)")
    add("--list", action="store_true", help="what there is")
    add(
        "--repeats",
        type=int,
        metavar="N",
        help="measured rounds of each way (default: each case's own number)",
    )
    add("--json", type=Path, metavar="FILE", help="write all samples, versions and the machine there")
    add("--quick", action="store_true", help="next to nothing of each, to see that it runs")
    add("--write-docs", action="store_true", help="put the figures into the table of docs/performance.md")
    add("--threads", type=int, metavar="N", help="cores for everybody (default: all)")
    add(
        "--no-memory",
        action="store_true",
        help="leave out each way's peak memory, which takes a process of its own",
    )
    add(
        "--alone", metavar="WAY", help=argparse.SUPPRESS
    )  # one way in a fresh process: prints its peak memory
    add("--device", default="cpu", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None, docs: Path = DOCS) -> int:
    """Measure what was asked for; 0 if that worked, whether or not targets are reached."""
    given = make_parser().parse_args(arguments)
    for option in ("repeats", "threads"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise SystemExit(f"--{option} must be at least 1, got {value}")
    cases = chosen(all_cases(), given.names)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if given.list:
        for case in cases:
            console.print(f"{case.name:<16} {case.about}", highlight=False, soft_wrap=True)
        return 0
    device = torch.device(given.device)
    threads = machine.set_threads(given.threads)
    if given.alone is not None:
        (case,) = cases
        case.run(Setting(quick=given.quick, repeats=2, device=device, only=given.alone))
        print(json.dumps({"rss": machine.peak_rss()}))
        return 0
    rates = machine.measure_rates(device, given.quick)
    facts = machine.facts(threads, device, rates)
    console.print(
        f"{facts['cpu']}, {threads} threads: matrix products {facts['gflops']:.0f} GFLOP/s, "
        f"copies {facts['copy_gb_per_s']:.1f} GB/s; load {' '.join(f'{v:.1f}' for v in facts['load'])}",
        highlight=False,
    )
    setting = Setting(given.quick, given.repeats, device, rates, not (given.no_memory or given.quick))
    measured: list[Figures] = []
    skipped: dict[str, str] = {}
    for case in cases:
        try:
            measured.append(case.run(setting))
        except Skip as skip:
            skipped[case.name] = str(skip)
            continue
        show.show(console, measured[-1])
        if given.json:  # after every case, so that a run that is broken off leaves what it has
            given.json.write_text(show.as_json(facts, measured, skipped), "utf-8")
        if given.write_docs:
            show.write_docs(docs, facts, measured)
    for why in dict.fromkeys(skipped.values()):
        names = [name for name, reason in skipped.items() if reason == why]
        console.print(f"Skipped {', '.join(names)}: {why}", highlight=False)
    if given.json:
        given.json.write_text(show.as_json(facts, measured, skipped), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
