"""What several tests of the command share."""

import csv
import json
import random
from pathlib import Path
from typing import Any, NamedTuple


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
