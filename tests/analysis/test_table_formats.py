"""The table of methods as LaTeX and Markdown, and tidy tables of numbers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fake_results import LOCAL, Fake, results
from fedattune import ConfigError, read_runs
from fedattune.analysis.compare import MeanStd
from fedattune.analysis.output.formats import fill_cells, latex, markdown, select_columns
from fedattune.analysis.rows import build_rows

TWO = [
    Fake(name, [level + 0.02 * seed] * 4, seed=seed)
    for name, level in (("local", 0.5), ("pfedme_mcsa", 0.6), ("a&b", 0.55))
    for seed in (0, 1)
]


def test_latex_has_booktabs_escaped_names_deviations_and_the_best_in_bold() -> None:
    lines = latex(
        SimpleNamespace(rows=build_rows(results(*TWO)), rounds_to=None), "accuracy,worst 10%,> local"
    ).splitlines()
    assert lines[0].startswith("% needs \\usepackage{booktabs}")
    assert lines[2:4] == [r"\begin{tabular}{lrrr}", r"\toprule"]
    assert lines[4] == r"method & accuracy (\%) & worst 10\% & $>$ local \\"
    assert lines[6] == r"local & $51.00 \pm 1.0$ & $51.00 \pm 1.0$ & -- \\"
    assert lines[7] == r"pfedme\_mcsa & $\mathbf{61.00} \pm 1.0$ & $\mathbf{61.00} \pm 1.0$ & 100\% \\"
    assert lines[8] == r"a\&b & $56.00 \pm 1.0$ & $56.00 \pm 1.0$ & 100\% \\"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert all(line.startswith("%") or "%" not in line.replace(r"\%", "") for line in lines)


def test_markdown_escapes_and_aligns() -> None:
    text = markdown(SimpleNamespace(rows=build_rows(results(*TWO), 0.9), rounds_to=0.9), None)
    head, rule, *_ = text.splitlines()
    assert head.startswith(r"| method | accuracy % | gain | 95% interval | worst 10% | \> local |")
    assert head.endswith("| rounds to 90% |")
    assert rule.startswith("|---|---:|---:|")
    assert r"| pfedme\_mcsa | **61.00 ±1.0** |" in text
    assert text.endswith("Bold: best method.\n")


def test_the_best_is_the_lowest_of_an_error_and_baselines_are_never_bold() -> None:
    from dataclasses import replace

    first, second = build_rows(results(Fake("a", LOCAL), Fake("b", LOCAL)))
    lines = [
        replace(row, metric="rmse", mean=MeanStd(value, 0.0), point=point)
        for row, value, point in ((first, 3.0, "trained"), (second, 2.0, "trained"), (second, 1.0, "-"))
    ]
    (columns,) = select_columns(lines, None, "RMSE")
    assert [cells[0][1] for _, cells in fill_cells(lines, columns)] == [False, True, False]
    equal = [replace(row, mean=MeanStd(2.0, 0.0)) for row in lines]
    assert not any(cells[0][1] for _, cells in fill_cells(equal, columns))


def test_the_best_rmse_of_a_global_model_is_the_lowest() -> None:
    from dataclasses import replace

    first, second = build_rows(results(Fake("a", LOCAL, global_accuracy=0.5), Fake("b", LOCAL, global_accuracy=0.5)))
    lines = [
        replace(row, metric="rmse", global_accuracy=MeanStd(value, 0.0)) for row, value in ((first, 5.0), (second, 1.0))
    ]
    (columns,) = select_columns(lines, None, "global")
    assert [cells[0][1] for _, cells in fill_cells(lines, columns)] == [False, True]
    accuracies = [replace(row, metric="auc") for row in lines]
    assert [cells[0][1] for _, cells in fill_cells(accuracies, columns)] == [True, False]


def test_a_tidy_table_has_one_row_per_method_seed_and_split(comparison: Path) -> None:
    runs = read_runs([comparison])
    table = runs.to_table()
    rows = table.to_pylist()
    assert [(row["method"], row["seed"], row["split"]) for row in rows[:4]] == [
        (run.algorithm, run.seed, run.split) for run in runs.results[:4]
    ]
    assert len(rows) == len(runs.results) + len(runs.baselines)
    for row, run in zip(rows, runs.results, strict=False):
        assert row["mean"] == pytest.approx(run.metrics["acc_uniform"])
        assert row["accuracy"] == row["mean"]
        assert (row["bytes_up"], row["lr"], row["clients"]) == (run.bytes_up, run.settings.training.lr, run.n_clients)
    means = {row.algorithm: row.mean for row in runs.rows}
    mine = [row["mean"] for row in rows if row["method"] == "fedmcsa"]
    assert means["fedmcsa"] is not None
    assert np.mean(mine) == pytest.approx(means["fedmcsa"].mean)
    assert np.std(mine) == pytest.approx(means["fedmcsa"].std)


def test_data_frames_have_numbers(comparison: Path) -> None:
    pytest.importorskip("pandas")
    runs = read_runs([comparison])
    frame = runs.to_pandas()
    assert frame.groupby("method")["mean"].count()["local"] == 2
    assert frame["mean"].dtype == float
    assert set(runs.to_pandas(clients=True)["client"]) == {client.id for client in runs.results[0].clients}


def test_missing_pandas_is_one_sentence(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedattune\[pandas\]'"):
        read_runs([comparison]).to_pandas()
