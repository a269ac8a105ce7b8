"""Splits by time: the oldest rows of a client train, its newest test; what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedattune
from cli_helpers import Done, refused
from fedattune import ConfigError, DataError
from fedattune.experiments.tuning import make_tuning_split

N = 80


def write_visits(path: Path, *, second_date: bool = False, n: int = N) -> Path:
    """Write visits of two clinics in an order of chance, one a day from 2024 on; `age` counts the days, too."""
    random = np.random.default_rng(3)
    days = random.permutation(n)
    lines = ["clinic,seen,age,score" + ",born" * second_date + ",ill"]
    for i, day in enumerate(days.tolist()):
        date = np.datetime64("2024-01-01") + day
        born = f",19{50 + i % 40}-02-03" * second_date
        lines.append(f"c{i % 2},{date},{day},{random.normal():.3f}{born},{'yn'[int(random.integers(2))]}")
    path.write_text("\n".join(lines))
    return path


def load(path: Path, **options: object) -> fedattune.Federation:
    return fedattune.load_federation(path, client_column="clinic", target="ill", **options)  # type: ignore[arg-type]


def read_days(path: Path) -> np.ndarray:
    return np.array([int(line.split(",")[2]) for line in path.read_text().splitlines()[1:]])


@pytest.mark.parametrize("column", [None, "seen", "age"])
def test_the_newest_rows_test_and_the_oldest_train(column: str | None, tmp_path: Path) -> None:
    path = write_visits(tmp_path / "t.csv")
    data, days = load(path, split="time", time_column=column, validation=0.2), read_days(path)
    assert data.partition["time_column"] == (column or "seen")
    for client in data.clients:
        assert (len(client.train), len(client.validation), len(client.test)) == (24, 6, 10)
        train, validation, test = (days[rows] for rows in (client.train, client.validation, client.test))
        assert train.max() < validation.min() < validation.max() < test.min()
    random = load(path, validation=0.2)
    assert "time_column" not in random.partition
    assert random.digest != data.digest


def test_tuning_chooses_by_the_newest_rows_that_are_not_tested(tmp_path: Path) -> None:
    path = write_visits(tmp_path / "t.csv")
    data, days = load(path, split="time"), read_days(path)
    for old, new in zip(data.clients, make_tuning_split([data], 0).clients, strict=True):
        assert days[new.train].max() < days[new.validation].min()
        assert days[new.validation].max() < days[new.test].min()
        assert new.test.tolist() == old.test.tolist()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"time_column": "seen"}, ConfigError, "--time-column seen goes only with --split time"),
        ({"split": "time", "time_column": "sen"}, DataError, "no column 'sen' of --time-column; did you mean"),
        ({"split": "time", "time_column": "clinic"}, DataError, "'clinic' of --time-column holds neither dates"),
        ({"split": "time", "split_number": 1}, ConfigError, "--split time has one split"),
        ({"split": "time", "stratify": True}, ConfigError, "do not go together"),
        ({"split": "tine"}, ConfigError, "split must be 'random' or 'time'"),
    ],
)
def test_refuses(options: dict[str, object], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        load(write_visits(tmp_path / "t.csv"), **options)


def test_the_only_date_column_is_the_default(tmp_path: Path) -> None:
    two = write_visits(tmp_path / "two.csv", second_date=True)
    with pytest.raises(ConfigError, match="has several columns of dates, 'seen', 'born'; name the column"):
        load(two, split="time")
    assert load(two, split="time", time_column="seen").partition["time_column"] == "seen"
    none = tmp_path / "none.csv"
    none.write_text("\n".join(["clinic,x,ill", *(f"c{i % 2},{i},{'yn'[i // 2 % 2]}" for i in range(40))]))
    with pytest.raises(ConfigError, match="has no column of dates; name the column"):
        load(none, split="time")
    with pytest.raises(ConfigError, match="--split time needs a table with a column of dates, and digits is none"):
        fedattune.load_federation("digits", split="time")


def test_commands_split_by_time(cli: Callable[..., Done], work: Path) -> None:
    """The whole way: `data show`, a comparison with baselines, its folder, resuming, and a saved partition."""
    write_visits(work / "t.csv")
    table = "--data t.csv --client-column clinic --target ill".split()  # noqa: SIM905
    done = cli("data", "show", *table, "--split", "time", "--save-partition", "by-time")
    assert done.code == 0, done.err
    assert "the test parts begin" in done.out
    run = [*table, "--algorithms", "local,fedavg", "--rounds", 2, "--quiet"]
    done = cli("compare", *run, "--split", "time", "--baseline", "sklearn", "--out", "run")
    assert done.code == 0, done.err
    assert "split: time\n" in (work / "run" / "experiment.yaml").read_text()
    assert '"time_column": "seen"' in (work / "run" / "partition.json").read_text()
    result = fedattune.read_runs(["run"]).results[0]
    days = read_days(work / "t.csv")
    tested = days[result.predictions["test"].sample]
    assert sorted(tested)[0] >= N // 2
    assert cli("compare", "--resume", "run", "--quiet").out.splitlines()[-2] == done.out.splitlines()[-2]
    saved = cli("compare", *run, "--partition", "by-time", "--out", "saved")
    assert saved.code == 0, saved.err
    digests = {fedattune.read_runs([name]).results[0].config["split"] for name in ("run", "saved")}
    assert len(digests) == 1
    refused(cli("compare", *run, "--split", "time", "--splits", 2, "--out", "two"), "--split time has one split")
    again = ["--partition", "by-time", "--split", "time", "--out", "x"]
    refused(cli("compare", *run, *again), "'by-time' fixes the parts of its clients")
