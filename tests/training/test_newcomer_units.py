"""Newcomers' numbers and targets are in the scale of the run that they join, not in their own."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


@pytest.mark.parametrize("schedule", [{"lr_warmup": 1000}, {"lr_schedule": "step", "lr_step_size": 1}])
def test_newcomers_train_at_the_full_rate(schedule: dict[str, Any], ragged: Federation) -> None:
    """With `local`, they have nothing of the run: the schedule of its rounds changes nothing."""
    run = {"rounds": 3, "held_out": 2, "join_rounds": 3, "lr": 0.1}
    plain, scheduled = (fedattune.fit(ragged, "local", "mlr", **run, **more) for more in ({}, schedule))
    assert scheduled.newcomers == plain.newcomers
    assert any(one.received != one.trained for one in plain.newcomers)


def table(path: Path, random: np.random.Generator, shift: float, sites: str, columns: str = "ab") -> Federation:
    with path.open("w", newline="") as file:
        write = csv.writer(file).writerow
        write(["site", *columns, "ill"])
        for site in sites * 60:
            row = {"a": random.normal(shift), "b": random.normal()}
            write([site, *(row[name] for name in columns), "yes" if row["a"] > 1 else "no"])
    return fedattune.load_federation(path, client_column="site", target="ill")


def test_columns_of_a_table_are_scaled_as_those_of_the_run(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    run = fedattune.fit(table(tmp_path / "old.csv", random, 1, "abcd"), "fedavg", "mlr", rounds=40, lr=0.5)
    joined = fedattune.personalize(run, table(tmp_path / "new.csv", random, 2, "ef"), rounds=1)
    assert min(one.received for one in joined.newcomers) > 0.85
    renamed = tmp_path / "renamed.csv"
    renamed.write_text((tmp_path / "new.csv").read_text().replace("ill", "answer", 1))
    data = fedattune.load_federation(renamed, client_column="site", target="answer")
    assert len(fedattune.personalize(run, data, rounds=1).newcomers) == 2
    swapped = table(tmp_path / "swapped.csv", random, 2, "ef", columns="ba")
    message = r"expected numbers \('a', 'b'\), got \('b', 'a'\); .* give the columns in the order of the run's table"
    with pytest.raises(fedattune.DataError, match=message):
        fedattune.personalize(run, swapped, rounds=1)
