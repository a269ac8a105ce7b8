"""Attackers in what is said about runs: apart, named, and never judged."""

from pathlib import Path

import numpy as np
import pytest

import fedattune
from fedattune import Result
from fedattune.analysis.mixing import MixingAnalysis
from fedattune.analysis.output.plots import plot_heatmap
from fedattune.analysis.output.report import build_mixing, render_report
from fedattune.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods that mix, and training alone, with two of six clients that lie."""
    out = tmp_path_factory.mktemp("attacked") / "o"
    done = main([
        "compare", "--data", "digits", "--partition", "iid", "--clients", "6", "--algorithms", "local,fedmcsa,fedamp",
        "--set", "fedmcsa.sigma=1", "--rounds", "2", "--attack", "label_flip", "--attackers", "2", "--out", str(out),
        "--processes", "1", "--quiet",
    ])  # fmt: skip
    assert done == 0
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> Result:
    return Result.load(folder / "fedmcsa" / "seed-0")


def test_a_mixture_has_a_share_of_attackers(run: Result) -> None:
    mixing = MixingAnalysis(run)
    assert len(mixing.names) == 4
    attackers = [int(number) for number in run.facts["attack"]["attackers"]]
    matrices = run.mixing.last()
    for position, shares in enumerate(mixing.shares):
        assert shares
        row = np.mean([matrix[run.eval_ids[position]] for matrix in matrices.values()], axis=0)
        assert shares.marked == pytest.approx(row[attackers].sum(), abs=1e-6)
        assert shares.marked > 0.01
        assert shares.own + shares.others + shares.marked == pytest.approx(1, abs=1e-4)
        assert shares.unseen == 0.0


def test_pictures_have_the_attackers_with_a_mark(run: Result) -> None:
    mixing = MixingAnalysis(run).include_marked()
    named = [f"{name} (attacks)" for name in run.facts["attack"]["attackers"].values()]
    assert mixing.names[4:] == named
    assert len(mixing.mean) == 6
    assert not np.isnan(mixing.mean).any()
    assert mixing.similarity is not None
    assert mixing.similarity.shape == (6, 6)
    figure = plot_heatmap(MixingAnalysis(run)).figure
    ticks = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
    assert set(named) <= set(ticks)
    data, _ = build_mixing({"fedmcsa": MixingAnalysis(run)}, 10**6)
    assert data["names"] == mixing.names
    assert data["clients"] == [0, 1, 2, 3, -1, -1]
    assert data["methods"]["fedmcsa"]["own"] == {one.name: one.own for one in MixingAnalysis(run).components}


def test_the_report_names_the_attackers(folder: Path) -> None:
    page = render_report(fedattune.read_runs([folder]))
    assert "2 of the 6 clients attack (--attack label_flip: they train on labels C-1-y)" in page


def test_explain_prints_the_share(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder), "--algorithm", "fedmcsa"]) == 0
    assert "attackers" in capsys.readouterr().out
    name = fedattune.read_runs([folder]).results[0].clients[0].id
    assert main(["explain", str(folder), "--algorithm", "fedmcsa", "--client", name]) == 0
    assert "attackers" in capsys.readouterr().out


def test_verdict_and_baselines_are_of_honest_clients(folder: Path) -> None:
    runs = fedattune.read_runs([folder])
    honest = {client.id for client in runs.results[0].clients}
    attackers = set(runs.results[0].facts["attack"]["attackers"].values())
    assert len(honest) == 4
    assert not honest & attackers
    assert runs.verdict.gains is None or len(runs.verdict.gains) == 4
    for baseline in runs.baselines:
        assert all(one.n_clients == 4 for one in baseline.predictions.values())
