"""Show measurements: on the terminal, in JSON, and as rows of the table in docs/performance.md."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import Figures, Target

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
HEAD = "| case | floor | times the floor | missed targets | measured |\n|---|---|---|---|---|\n"


def sort_key(name: str) -> int:
    """Sort W2 before W10, and names without a number last; cases of one number keep their order."""
    number = re.match(r"W(\d+)", name)
    return int(number[1]) if number else 99


def format_seconds(value: float) -> str:
    """Format a time with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale or unit == "us":
            return f"{value / scale:.3g} {unit}"
    raise AssertionError


def format_quartiles(samples: Sequence[float]) -> str:
    """Format the quartiles of the samples, or the range of few samples."""
    low, high = min(samples), max(samples)
    if len(samples) > 3:
        low, _, high = statistics.quantiles(samples, n=4)
    return f"{format_seconds(low)} - {format_seconds(high)}"


def describe_target(figures: Figures, target: Target) -> str:
    """Describe a target and the measured value."""
    got = figures.reached(target)
    of = "" if target.of == "seconds" else f"{target.of} "
    unit = f"x {target.against}" if target.against else ""
    result = "not measured" if got is None else f"{got:.3g}, {'reached' if got <= target.at_most else 'missed'}"
    return f"{of}<= {target.at_most:.3g} {unit}".strip() + f": {result}"


def _rows(figures: Figures) -> list[tuple[str, str, str, str, str, str]]:
    """Return the columns of each way (way, median, quartiles, x floor, targets, peak memory), the roofline last."""
    rows = []
    ways = [*figures.seconds, *(w for w in (*figures.rss, *figures.values) if w not in figures.seconds)]
    for way in dict.fromkeys(ways):
        samples = figures.seconds.get(way, ())
        known = bool(samples) and figures.floor is not None and bool(figures.seconds.get(figures.floor))
        values = "; ".join(f"{name} {value:.4g}" for name, value in figures.values.get(way, {}).items())
        targets = "; ".join(describe_target(figures, target) for target in figures.targets if target.way == way)
        rows.append(
            (
                way,
                format_seconds(figures.median(way)) if samples else "",
                format_quartiles(samples) if samples else "",
                f"{figures.ratio(way, str(figures.floor)):.2f}" if known else "",
                "; ".join(part for part in (targets, values) if part),
                f"{figures.rss[way] / 1e6:,.0f}" if way in figures.rss else "",
            )
        )
    if figures.roofline:
        known = figures.floor in figures.seconds
        ratio = f"{figures.roofline / figures.median(str(figures.floor)):.3f}" if known else ""
        rows.append(("roofline", format_seconds(figures.roofline), "", ratio, "", ""))
    return rows


def show(console: Console, figures: Figures) -> None:
    """Print one case."""
    table = Table(title=f"{figures.name}: {figures.about}", title_justify="left")
    for column in ("way", "median", "quartiles", "x floor", "targets", "peak MB"):
        table.add_column(column, justify="left" if column in ("way", "targets") else "right", overflow="fold")
    for row in _rows(figures):
        table.add_row(*row)
    console.print(table)
    for way, why in figures.skipped.items():
        console.print(f"{way}: {why}")


def as_json(facts: Mapping[str, Any], measured: Sequence[Figures], skipped: Mapping[str, str]) -> str:
    """Return all measurements as JSON, including all samples."""
    cases = [
        {
            "name": f.name,
            "about": f.about,
            "floor": f.floor,
            "seconds": {way: list(samples) for way, samples in f.seconds.items()},
            "median": {way: f.median(way) for way, samples in f.seconds.items() if samples},
            "median_of_ratios": {
                way: f.ratio(way, f.floor)
                for way, samples in f.seconds.items()
                if samples and f.floor and f.seconds.get(f.floor)
            },
            "roofline": f.roofline or None,
            "peak_rss": dict(f.rss),
            "values": {way: dict(values) for way, values in f.values.items()},
            "targets": [{**asdict(t), "got": f.reached(t)} for t in f.targets],
            "skipped": dict(f.skipped),
        }
        for f in measured
    ]
    return json.dumps({**facts, "cases": cases, "skipped": dict(skipped)}, indent=1) + "\n"


def _summarize(figures: Figures, date: str) -> str:
    """Return one row of the docs: the floor's seconds, how long every way takes beside it, and missed targets."""
    ours = {target.way for target in figures.targets}
    ways = [way for way in figures.seconds if way != figures.floor and figures.seconds[way]]
    known = figures.floor is not None and bool(figures.seconds.get(figures.floor))
    floor = format_seconds(figures.median(str(figures.floor))) if known else ""
    if known:
        times = [f"{way} {figures.ratio(way, str(figures.floor)):.2f}" for way in ways]
    else:
        times = [f"{way} {format_seconds(figures.median(way))}" for way in ways]
    times = [f"**{text}**" if way in ours else text for way, text in zip(ways, times, strict=True)]
    got = {target: figures.reached(target) for target in figures.targets}
    missed = [t for t, value in got.items() if value is None or value > t.at_most]
    verdict = "; ".join(describe_target(figures, target) for target in missed)
    return f"| {figures.name} | {floor} | {', '.join(times)} | {verdict.replace(', missed', '')} | {date} |"


def write_docs(path: Path, facts: Mapping[str, Any], measured: Sequence[Figures]) -> None:
    """Replace the rows of the measured cases in this machine's table between the markers; other rows keep their dates.

    Raises:
        ValueError: the markers are missing.
    """
    text = path.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    tables, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {BEGIN} and {END}; put them where the tables belong")
    machines: dict[str, dict[str, str]] = {}
    for section in tables.split("### ")[1:]:
        machine, *lines = section.splitlines()
        found = ((re.match(r"\| (\S+) \|", line), line) for line in lines)
        machines[machine] = {name[1]: line for name, line in found if name and name[1] != "case"}
    place = facts["cpu"] if facts["device"] == "cpu" else facts["device"]
    rows = machines.setdefault(f"{place}, {facts['threads']} threads", {})
    rows |= {f.name: _summarize(f, facts["date"][:10]) for f in measured}
    body = "".join(
        f"### {machine}\n\n{HEAD}{''.join(one[name] + chr(10) for name in sorted(one, key=sort_key))}\n"
        for machine, one in machines.items()
    )
    path.write_text(f"{before}{BEGIN}\n\n{body}{END}{after}", "utf-8")
