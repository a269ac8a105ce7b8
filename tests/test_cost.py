"""The benchmark of a round's processor time: what it prints, and its errors."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import cost
from benchmarks.__main__ import main

import fedattune
from fedattune.core.errors import DataError


def find_no_data() -> fedattune.Federation:
    raise DataError("no such file")


def test_cost_compares_methods_with_fedavg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic = partial(fedattune.load_federation, "synthetic", options={"clients": 3})
    monkeypatch.setattr(cost, "PROBLEMS", {"elsewhere": (find_no_data, "dnn"), "synthetic, mlr": (synthetic, "mlr")})
    assert main(["cost", "--algorithms", "attune", "--repeats", "1", "--rounds", "3"]) == 0
    head, _, skipped, row = capsys.readouterr().out.splitlines()
    assert head == "| federation | fedavg ms | attune |"
    assert skipped == "elsewhere: skipped: no such file"
    assert row.startswith("| synthetic, mlr | ")


def test_cost_names_an_unknown_method() -> None:
    with pytest.raises(SystemExit, match="algorithms: 'atune' is unknown; expected some of: local, fedavg, "):
        cost.main(["--algorithms", "atune"])
