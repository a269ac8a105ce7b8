"""Make `hospitals.csv`: twelve made-up hospitals whose patients differ in kind, number and risk.

No patient in it is real. Hospitals belong to three groups of four (city, region, children's); in every group the
same measurements weigh differently for the outcome, as they may where patients and treatment differ.

Run by: python examples/make_hospitals.py
"""

import csv
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("hospitals.csv")
NUMBERS = ("age", "pulse", "systolic", "temperature", "lactate", "crp", "sodium")
CENTRES = {"city": (61, 84, 128, 37.1), "region": (68, 80, 135, 37.0), "children": (8, 105, 104, 37.5)}
COMMON = np.array([0.5, 0.4, -0.5, 0.3, 0.9, 0.6, -0.2])
SIZES = (500, 380, 210, 90, 420, 260, 140, 70, 300, 180, 110, 60)


def write(file: Path = FILE, seed: int = 2) -> None:
    """Draw all hospitals from one seed and write the table."""
    random = np.random.default_rng(seed)
    weights = {group: COMMON + random.normal(0, 0.9, len(NUMBERS)) for group in CENTRES}
    emergency_risk = {"city": 1.2, "region": -0.6, "children": 0.3}
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["hospital", *NUMBERS, "sex", "admission", "ward", "outcome"])
        for number, size in enumerate(SIZES):
            group = list(CENTRES)[number // 4]
            age, pulse, systolic, temperature = CENTRES[group]
            centre = np.array([age, pulse, systolic, temperature, 1.8, 40, 139]) * random.normal(1, 0.01, 7)
            spread = np.array([age / 4, 14, 17, 0.7, 0.9, 22, 3.5])
            z = random.normal(size=(size, len(NUMBERS)))
            values = centre + spread * z
            values[:, 0] = values[:, 0].clip(0, 100)
            values[:, 4:6] = values[:, 4:6].clip(0.2, None)
            emergency = random.random(size) < 0.55
            risk = 1.3 * z @ weights[group] + emergency_risk[group] * emergency + random.normal(0, 0.6, size)
            missing = random.random((size, len(NUMBERS))) < np.array([0, 0.01, 0.01, 0.02, 0.15, 0.1, 0.05])
            for i in range(size):
                numbers = [
                    "" if missing[i, k] else f"{values[i, k]:.{1 if k in (3, 4) else 0}f}" for k in range(len(NUMBERS))
                ]
                sex = random.choice(["f", "m"])
                ward = random.choice(["surgery", "medicine", "intensive", ""], p=[0.35, 0.45, 0.17, 0.03])
                admission = "emergency" if emergency[i] else "planned"
                outcome = "complication" if risk[i] > 0.3 else "recovered"
                table.writerow([f"H{number + 1:02}", *numbers, sex, admission, ward, outcome])


if __name__ == "__main__":
    write()
    print(f"wrote {FILE.name}: {sum(SIZES)} patients of {len(SIZES)} hospitals")
