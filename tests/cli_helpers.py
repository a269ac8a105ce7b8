"""Helpers of tests that run the command."""

import csv
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[1] / "src"


# Slow enough to be hit in the middle, and with clients that miss rounds.
SLOW_LINE = "compare --algorithms local,fedmcsa --rounds 40 --steps 10 --clients 6 --cohort 3"
SLOW = SLOW_LINE.split()


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def hospital_rows(n_hospitals: int = 12, seed: int = 0) -> list[dict[str, object]]:
    """Made-up patients: hospitals of different sizes, numbers and categories, some values missing."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for h in range(n_hospitals):
        for _ in range(24 + 9 * h):
            age, pressure = rng.gauss(50 + h, 12), rng.gauss(120, 15)
            smoker = rng.choice(["yes", "no", "former"])
            risk = 0.05 * (age - 55) + 0.03 * (pressure - 120) + (1.0 if smoker == "yes" else 0.0)
            rows.append(
                {
                    "hospital": f"H{h:02d}",
                    "age": f"{age:.1f}",
                    "pressure": "" if rng.random() < 0.05 else f"{pressure:.1f}",
                    "smoker": smoker,
                    "outcome": "ill" if risk + rng.gauss(0, 0.5) > 0.3 else "well",
                }
            )
    return rows


def write_csv(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def numbers(path: Path) -> Any:
    """A result file without what depends on the clock."""

    def without_seconds(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_seconds(one) for key, one in value.items() if key != "seconds"}
        return [without_seconds(one) for one in value] if isinstance(value, list) else value

    return without_seconds(json.loads(path.read_text()))


def environment() -> dict[str, str]:
    """The environment of a command in a process of its own."""
    return os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def files(work: Path) -> list[str]:
    return sorted(str(path) for path in work.rglob("*") if "__pycache__" not in path.parts)


def refused(done: Done, said: str) -> None:
    assert done.code == 2
    assert done.err.startswith("fedattune: error: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    assert done.out == ""
    assert said in done.err


def wait_for(running: "subprocess.Popen[str]", text: str) -> None:
    assert running.stderr is not None
    for line in running.stderr:
        if text in line:
            return
    raise AssertionError(f"{text} was never said")
