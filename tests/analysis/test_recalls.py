"""Recall by class and the worst client, in results and tables."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedattune
from cli_helpers import Done
from fedattune import Result
from fedattune.analysis.compare import average_weighted, weigh_tests
from fedattune.analysis.output.tables import make_console, print_methods
from fedattune.analysis.rows import build_rows, build_run_table, rows_to_json
from fedattune.core.metrics import METRICS
from federations import make_federation


@pytest.fixture(scope="module")
def results() -> list[Result]:
    data = make_federation([40, 30, 50])
    return [fedattune.fit(data, name, rounds=2, steps=5, lr=0.5) for name in ("local", "fedavg")]


def test_recall_counts_the_test_rows_of_all_clients(results: list[Result]) -> None:
    for result in results:
        rows = result.predictions["test"]
        right, y = rows.outputs.argmax(1) == rows.y, rows.y
        assert list(result.recall) == result.facts["classes"] == ["0", "1", "2"]
        assert list(result.recall.values()) == pytest.approx([right[y == k].mean() for k in range(3)])
        assert result.to_json()["recall"] == result.recall


def test_tables_have_recall_and_the_worst_client(results: list[Result]) -> None:
    rows = build_rows(results)
    for row, result in zip(rows, results, strict=True):
        assert row.recall == pytest.approx(result.recall)
        assert row.worst is not None
        assert row.worst.mean == result.measure_clients("accuracy").min()
        errors = result.measure_clients("calibration_error")
        assert row.metrics["calibration_error"] == pytest.approx(average_weighted(errors, weigh_tests(results)))
    assert rows_to_json(rows)[0]["recall"] == rows[0].recall
    table = build_run_table(results).to_pylist()
    assert [row["recall 1"] for row in table] == [row.recall["1"] for row in rows]
    assert [row["worst"] for row in table] == [row.worst.mean for row in rows if row.worst]
    file = io.StringIO()
    print_methods(rows, make_console(file), columns="worst,recall")
    head, _, first, *_ = filter(None, file.getvalue().splitlines())
    assert head.split() == ["method", "worst", "recall"]
    assert first.endswith(", ".join(f"{name} {100 * share:.1f}" for name, share in rows[0].recall.items()))


def test_of_many_classes_the_lowest_are_shown(results: list[Result]) -> None:
    shares = {f"c{i}": i / 20 for i in reversed(range(12))}
    file = io.StringIO()
    print_methods([replace(build_rows(results)[0], recall=shares)], make_console(file), columns="recall")
    assert "c0 0.0, c1 5.0, " in file.getvalue()
    assert "c9 45.0" in file.getvalue()
    assert "c10" not in file.getvalue()


def test_a_number_has_no_recall() -> None:
    x = [np.linspace(0, 1, n)[:, None] for n in (20, 30)]
    data = fedattune.federation_from([(one, one[:, 0] + 2) for one in x])
    result = fedattune.fit(data, "fedavg", rounds=1)
    assert result.recall == {}
    (row,) = build_rows([result])
    assert row.recall == {}
    assert row.worst is not None
    assert row.worst.mean == result.measure_clients("rmse").max()
    for metric in ("auc", "rsme"):
        with pytest.raises(KeyError, match=f"metric: got '{metric}', expected one of r2, mae, rmse, as"):
            result.measure_clients(metric)


def test_a_broken_metric_is_named_before_training(cli: Callable[..., Done]) -> None:
    Path("broken.py").write_text(
        "from fedattune import register_metric\n"
        "@register_metric('mine', is_higher_better=True)\n"
        "def broken_mean(y, logits):\n"
        "    return logits.mean(axis=1)\n"
    )
    Path("e.yaml").write_text("data: digits\nclients: 5\nmetric: broken.py:broken_mean\n")
    words = ("--data", "digits", "--clients", 5, "--quiet")
    for command in (
        ("compare", *words, "--metric", "broken.py:broken_mean"),
        ("compare", "--config", "e.yaml", "--quiet", "--allow-code", "broken.py:broken_mean"),
    ):
        done = cli(*command, "--out", "o")
        assert done.code == 2
        assert "metric broken_mean: it fails on 20 rows with outputs (20, 10): TypeError" in done.err
        assert not Path("o").exists()
    del METRICS["broken_mean"]
