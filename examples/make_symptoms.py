"""Make `symptoms.csv`: six made-up clinics whose patients have none, one or several of four conditions.

No patient in it is real. Each condition is a column of yes and no, and depends on other measurements in the north than
in the south.

Run by: python examples/make_symptoms.py
"""

import csv
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("symptoms.csv")
NUMBERS = ("age", "temperature", "crp", "oxygen", "glucose")
CONDITIONS = ("infection", "anaemia", "diabetes", "asthma")
CLINICS = {"north-1": 120, "north-2": 90, "north-3": 60, "south-1": 110, "south-2": 80, "south-3": 50}


def write(file: Path = FILE, seed: int = 5) -> None:
    """Draw all clinics from one seed and write the table."""
    random = np.random.default_rng(seed)
    common = random.normal(0, 1, (len(NUMBERS), len(CONDITIONS)))
    own = {region: random.normal(0, 1, common.shape) for region in ("north", "south")}
    centre, spread = np.array([54, 37.4, 30, 95, 6.2]), np.array([16, 0.8, 18, 2.5, 1.6])
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["clinic", *NUMBERS, *CONDITIONS])
        for clinic, size in CLINICS.items():
            weights = common + own[clinic.split("-")[0]]
            z = random.normal(size=(size, len(NUMBERS)))
            risk = z @ weights + np.array([-0.5, -1.5, -1.0, -1.2]) + random.normal(0, 0.8, (size, len(CONDITIONS)))
            for values, has in zip(centre + spread * z, risk > 0, strict=True):
                table.writerow([clinic, *(f"{value:.1f}" for value in values), *np.where(has, "yes", "no")])


if __name__ == "__main__":
    write()
