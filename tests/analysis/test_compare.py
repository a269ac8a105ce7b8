"""Rows of methods, over clients and seeds."""

import pytest

from fake_results import LOCAL, Fake, results
from fedattune.analysis.rows import build_rows, rows_to_json


def test_rows_over_seeds() -> None:
    table = build_rows(
        results(
            Fake("local", LOCAL), Fake("local", LOCAL), Fake("m", [0.6, 0.6, 0.9, 0.7]), Fake("m", [0.6, 0.6, 0.7, 0.7])
        )
    )
    assert [row.algorithm for row in table] == ["local", "m"]
    assert table[0].better_than_local is None
    assert table[1].better_than_local == 0.5  # strictly better: clients 0 and 2
    assert table[1].mean == pytest.approx((0.675, 0.025))
    assert rows_to_json(table)[1]["mean"] == pytest.approx({"mean": 0.675, "std": 0.025})
