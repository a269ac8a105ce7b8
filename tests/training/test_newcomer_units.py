"""Newcomers' numbers and targets are in the scale of the run that they join, not in their own."""

import csv
from pathlib import Path

import numpy as np

import fedattune
from fedattune import Federation


def measured(random: np.random.Generator, n_clients: int, shift: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Make clients whose target is 50 plus 15 times the first feature, which lies about `shift`."""
    xs = [random.normal(shift, 1, (60, 4)).astype(np.float32) for _ in range(n_clients)]
    return {f"c{i}": (x, 50 + 15 * x[:, 0]) for i, x in enumerate(xs)}


def test_a_target_that_is_a_number_is_in_the_unit_of_the_run() -> None:
    random = np.random.default_rng(0)
    run = fedattune.fit(fedattune.federation_from(measured(random, 4, 0)), "fedavg", "mlr", rounds=40, lr=0.1)
    new = measured(random, 2, 1)  # another mean: the newcomers' own scale would be off by a deviation
    for data in (new, fedattune.federation_from(new)):
        joined = fedattune.personalize(run, data, rounds=1)
        assert max(one.received for one in joined.newcomers) < 0.5  # of a deviation of 15


def table(path: Path, random: np.random.Generator, shift: float, sites: str) -> Federation:
    with path.open("w", newline="") as file:
        write = csv.writer(file).writerow
        write(["site", "a", "b", "ill"])
        for site in sites * 60:
            a = random.normal(shift)
            write([site, a, random.normal(), "yes" if a > 1 else "no"])
    return fedattune.load_federation(path, client_column="site", target="ill")


def test_columns_of_a_table_are_scaled_as_those_of_the_run(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    run = fedattune.fit(table(tmp_path / "old.csv", random, 1, "abcd"), "fedavg", "mlr", rounds=40, lr=0.5)
    joined = fedattune.personalize(run, table(tmp_path / "new.csv", random, 2, "ef"), rounds=1)
    assert min(one.received for one in joined.newcomers) > 0.85
