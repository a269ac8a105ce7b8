"""Measure FedAttune's speed and memory against floors."""

import argparse
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from fedattune.core.errors import FedAttuneError

from . import cases, cost, false_alarms, grid, machine, privacy, privacy_attacks, robustness, screening, show, verdict
from .measure import Case, Figures, Setting, Skip
from .options import read_count, read_device, read_output_file, run_command

DOCS = Path(__file__).parent.parent / "docs" / "performance.md"

TABLES: dict[str, Callable[[Sequence[str]], int]] = {
    "cases": cases.main,
    "cost": cost.main,
    "false-alarms": false_alarms.main,
    "grid": grid.main,
    "minorities": grid.run_minorities,
    "privacy": privacy.main,
    "privacy-attacks": privacy_attacks.main,
    "robustness": robustness.main,
    "screening": screening.main,
    "verdict": verdict.main,
}
"""Commands that measure accuracies, each with options of its own."""


def all_cases() -> list[Case]:
    """Find the cases of all modules of this package, W1 first."""
    folder = str(Path(__file__).parent)
    names = [m.name for m in pkgutil.iter_modules([folder]) if not m.name.startswith("_")]
    found = [case for name in names for case in getattr(import_module(f"benchmarks.{name}"), "CASES", ())]
    return sorted(found, key=lambda case: show.sort_key(case.name))


def select_cases(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Select the cases with these names, or whose names begin so before a hyphen; without names, all usual cases.

    Raises:
        SystemExit: no case has the name.
    """
    if not names:
        return [case for case in cases if not case.only_by_name]
    picked = [c for c in cases if any(f"{c.name}-".startswith(f"{name}-") for name in names)]
    for name in names:
        if not any(f"{c.name}-".startswith(f"{name}-") for c in picked):
            raise SystemExit(f"no case is called {name!r}; expected one of: {', '.join(c.name for c in cases)}")
    return picked


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    epilog = f"Other commands, each with --help: {', '.join(TABLES)}"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=epilog, allow_abbrev=False
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="cases, such as W1, W4-dnn (default: all)")
    add("--list", action="store_true", help="list the cases")
    add("--repeats", type=read_count, metavar="N", help="measured rounds of each way (default: depends on the case)")
    about = "write all samples, the versions and the machine to FILE"
    add("--json", type=read_output_file, metavar="FILE", help=about)
    add("--quick", action="store_true", help="do next to nothing, to test that the cases run")
    add("--write-docs", action="store_true", help="write the figures to the table of docs/performance.md")
    add("--threads", type=read_count, metavar="N", help="number of cores for all ways (default: all)")
    add("--no-memory", action="store_true", help="do not measure peak memory, which takes one process per way")
    add("--alone", metavar="WAY", help=argparse.SUPPRESS)  # run one way in a fresh process, and print its peak memory
    add("--device", type=read_device, default="cpu", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None, docs: Path = DOCS) -> int:
    """Measure the chosen cases; return 0 if that worked, whether or not targets are reached."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in TABLES:
        try:
            return TABLES[arguments[0]](arguments[1:])
        except FedAttuneError as error:
            raise SystemExit(str(error)) from error
    given = make_parser().parse_args(arguments)
    cases = select_cases(all_cases(), given.names)
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    if given.list:
        for case in cases:
            console.print(f"{case.name:<16} {case.about}", highlight=False, soft_wrap=True)
        return 0
    device = given.device
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
        if given.json:  # after every case, so that an interrupted run leaves its results
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
    run_command(main)
