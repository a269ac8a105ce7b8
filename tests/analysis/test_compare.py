"""Rows of methods, over clients and seeds."""

import pytest

from fake_results import LOCAL, Fake, results
from fedattune.analysis.compare import build_rows, rows_to_json
from fedattune.core.effect import ONE_MIXTURE, OWN_MODEL, Effect, Mechanism


def test_rows_over_seeds() -> None:
    table = build_rows(
        results(
            Fake("local", LOCAL),
            Fake("local", LOCAL),
            Fake("m", [0.6, 0.6, 0.9, 0.7]),
            Fake("m", [0.6, 0.6, 0.7, 0.7]),
        )
    )
    assert [row.algorithm for row in table] == ["local", "m"]
    assert table[0].better_than_local is None
    assert table[1].better_than_local == 0.5  # strictly better: clients 0 and 2
    assert table[1].mean == pytest.approx((0.675, 0.025))
    assert rows_to_json(table)[1]["mean"] == pytest.approx({"mean": 0.675, "std": 0.025})


def test_effects_are_the_nearest_reference_of_each_part_averaged_over_seeds() -> None:
    steps = Mechanism("steps", "steps without the term", "one without the term")
    runs = [
        Fake("m", LOCAL, effects=[Effect(ONE_MIXTURE, near), Effect(OWN_MODEL, 0.8), Effect(steps, 2.0)])
        for near in (0.1, 0.3)
    ]
    none, row = build_rows(results(Fake("local", LOCAL), *runs))
    assert none.effects == {}
    assert row.effects == pytest.approx({"weights": 0.2, "steps": 2.0})
    assert rows_to_json([row])[0]["effects"] == row.effects
