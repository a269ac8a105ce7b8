"""Compare the answers to public tables, with no option but the two columns, with scikit-learn beside them.

    python -m benchmarks cases
    python -m benchmarks cases heart ames --folder /data/tables --budget 2m
    python -m benchmarks cases --reference
    python -m benchmarks cases flights --newest

Every table is written to a folder once; `fedattune compare` gets the file, the client column and the target. What
scikit-learn reaches alone, with everybody's rows and with the client as a feature is measured by another program, and
kept in the folder. The two agree if both or neither see a sure gain from others' rows, and what FedAttune recommends is
no worse than the best model alone by more than chance.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cases_reference import Reference, measure
from .cases_tables import PACKAGES, TABLES, Table

TIME_LIMIT = 900
"""Seconds after which a comparison counts as failed."""
HEAD = (
    "table", "rows", "clients", "metric", "answer", "value", "scikit-learn", "alone", "pooled", "with client", "agree",
    "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What FedAttune said.

    Attributes:
        answer: yes, no, undecided, or failed.
        method: what it recommends: a method, or the best way alone.
        value: mean over clients of the recommended way, in the unit of the metric; NaN if unknown.
        text: the verdict's sentence, or the error.
        interval: 95% interval of the gain that decides, in points or in the unit of the metric.
    """

    answer: str
    method: str
    metric: str
    value: float
    text: str
    seconds: float
    interval: tuple[float, float] | None = None


def compare(table: Table, file: Path, out: Path, options: Sequence[str]) -> Answer:
    """Run `fedattune compare` on a table as a person without any knowledge would, and read its answer."""
    shutil.rmtree(out, ignore_errors=True)
    columns = ["--client-column", table.client, "--target", table.target]
    command = [sys.executable, "-m", "fedattune", "compare", "--data", str(file), *columns, "--quiet", "-o", str(out)]
    command += options
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return Answer("failed", "", "", float("nan"), f"no answer within {TIME_LIMIT} s", TIME_LIMIT)
    seconds = time.perf_counter() - began
    Path(f"{out}.log").write_text(done.stdout + done.stderr, "utf-8")
    if raw := [line for line in done.stderr.splitlines() if "Warning:" in line]:
        print(f"{file.stem}: {raw[0]}", file=sys.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Answer("failed", "", "", float("nan"), last, seconds)
    return read_answer(json.loads((out / "result.json").read_text("utf-8")), seconds)


def read_answer(result: dict[str, Any], seconds: float) -> Answer:
    """Read the answer from a `result.json`."""
    text, said, rows = result["verdict"], result["decision"], {row["algorithm"]: row for row in result["table"]}
    method = said["method"] if said["answer"] == "yes" else said["reference"]
    interval = tuple(said["interval"]) if said["interval"] else None
    return Answer(said["answer"], method, said["metric"], rows[method]["mean"]["mean"], text, seconds, interval)


def judge(answer: Answer, reference: Reference) -> str:
    """Say whether the two agree, and otherwise why not."""
    if answer.answer == "failed":
        return f"failed: {answer.text}"
    if answer.metric != reference.metric:
        return f"another metric, {answer.metric}"
    sign = -1 if answer.metric == "rmse" else 1
    gap, chance = sign * (answer.value - reference.values["alone"]), 2 * reference.spread
    said = []
    if (answer.answer == "yes") != (reference.answer == "yes"):
        # A personal method may gain where one model of all rows does not.
        is_shown = answer.answer == "yes" and reference.answer == "undecided" and gap > chance
        said = [] if is_shown else ["no such gain" if answer.answer == "yes" else "a gain is missed"]
    if not gap >= -chance:
        said.append("worse than alone")
    return "no: " + ", ".join(said) if said else "yes"


def show(name: str, answer: Answer | None, reference: Reference) -> str:
    """Show a table's row in Markdown."""
    scale, digits = (1, 4) if reference.metric == "rmse" else (100, 1)

    def write(value: float) -> str:
        return f"{value:.{digits}g}" if scale == 1 else f"{scale * value:.{digits}f}"

    low, high = (write(end) for end in reference.interval)
    ours = ["", ""]
    if answer:
        interval = f" ({' to '.join(write(end / scale) for end in answer.interval)})" if answer.interval else ""
        ours = [f"{answer.answer.replace('_', ' ')}, `{answer.method}`{interval}", write(answer.value)]
    cells = [
        name,
        f"{reference.rows:,}",
        f"{reference.clients:,}",
        "RMSE" if scale == 1 else "AUC %" if reference.metric == "auc" else "accuracy %",
        *ours,
        f"{reference.answer} ({low} to {high})",
        *(write(value) for value in reference.values.values()),
        *([judge(answer, reference), f"{answer.seconds:.0f}"] if answer else ["", ""]),
    ]
    return f"| {' | '.join(cells)} |"


def make_reference(name: str, file: Path, kept: Path, *, on_newest: bool) -> Reference:
    """Measure what scikit-learn reaches, or read what was kept of it."""
    import pandas as pd

    known = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    key = f"{name}, newest rows" if on_newest else name
    if key not in known:
        frame = pd.read_csv(file, low_memory=False, lineterminator="\n")
        known[key] = asdict(measure(TABLES[name], frame, on_newest=on_newest))
        kept.write_text(json.dumps(known, indent=1), "utf-8")
    return Reference(**{**known[key], "interval": tuple(known[key]["interval"])})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row; return 1 if an answer disagrees."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cases",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"tables (default: all): {', '.join(TABLES)}")
    add(
        "--folder",
        type=Path,
        default=Path("tables"),
        help="where tables, runs and references go (default: %(default)s)",
    )
    add("--budget", metavar="TIME", help="budget of each comparison (default: that of the command)")
    add(
        "--newest",
        action="store_true",
        help="test both on the newest rows of each client (--split time), where a table has dates",
    )
    add("--reference", action="store_true", help="measure scikit-learn only")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in TABLES]:
        raise SystemExit(f"no table is called {unknown[0]!r}; expected some of: {', '.join(TABLES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given.folder.mkdir(parents=True, exist_ok=True)
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|", flush=True)
    has_failed = False
    options = [*(["--budget", given.budget] if given.budget else []), *(["--split", "time"] if given.newest else [])]
    for name in given.names or TABLES:
        table = TABLES[name]
        if given.newest and not table.time:
            print(f"Skipped {name}: it has no dates, or too few clients for one split", file=sys.stderr)
            continue
        try:
            file = table.write(given.folder, name)
        except ImportError as error:
            print(f"Skipped {name}: {error}; {PACKAGES}", file=sys.stderr)
            continue
        reference = make_reference(name, file, given.folder / "reference.json", on_newest=given.newest)
        answer = None
        if not given.reference:
            run = f"{name}-newest" if given.newest else name
            answer = compare(table, file, given.folder / "runs" / run, options)
            has_failed |= judge(answer, reference) != "yes"
        print(show(name, answer, reference), flush=True)
    return int(has_failed)
