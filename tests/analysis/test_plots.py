"""`fedattune plot`: what the figures show, their files, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

from crafted import ALL, LABELS, LATE, craft
from fedattune import read_runs
from fedattune.analysis.mixing import MixingAnalysis
from fedattune.analysis.output.plots import (
    CaptionedFigure,
    choose_line_styles,
    choose_scale,
    plot_clients,
    plot_curves,
    plot_heatmap,
    plot_traffic,
    save_figure,
    use_style,
)
from fedattune.cli import main

Said = pytest.CaptureFixture[str]
STARTS = {".pdf": b"%PDF", ".svg": b"<?xml", ".eps": b"%!PS-Adobe", ".png": b"\x89PNG"}


def refused(capsys: Said, *words: object) -> str:
    assert main(["plot", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err


def names_below(drawn: CaptionedFigure) -> list[str]:
    return [text.get_text() for text in drawn.figure.legends[0].get_texts()]


def test_curves_are_means_over_clients_and_seeds(comparison: Path) -> None:
    """Round 4 of the method: (7/10 + 12/20 + 5/10 + 19/40) / 4, and with 8/10 by the other seed."""
    runs = read_runs([comparison]).results
    with use_style():
        drawn = plot_curves(runs)
    axes = drawn.figure.axes[0]
    assert names_below(drawn) == ["local", "fedavg", "fedmcsa"]
    lines = {str(line.get_label()): line for line in axes.lines}
    assert lines["local"].get_linestyle() == "--"
    assert lines["local"].get_color() == "black"
    np.testing.assert_allclose(np.asarray(lines["fedmcsa"].get_xdata()), [2, 4])
    np.testing.assert_allclose(np.asarray(lines["fedmcsa"].get_ydata()), [50, 56.875 + 1.25])
    low, high = (side(axes.collections[2].get_paths()[0].vertices[:, 1]) for side in (np.min, np.max))
    assert (low, high) == pytest.approx((50, 56.875 + 2.5))  # the standard deviation over two seeds is 1.25
    assert "mean over 2 seeds, band: one standard deviation" in drawn.caption


def test_heatmap_is_in_the_order_of_labels_on_one_scale(tmp_path: Path) -> None:
    """a and c have like labels, and b and d: they are neighbours in rows and columns of every matrix."""
    labels = [LABELS[0], LABELS[2], LABELS[1], LABELS[3]]
    swapped = [0, 2, 1, 3]
    late = np.array(LATE)[np.ix_(swapped, swapped)].tolist()
    mixing = {2: (ALL, ALL, {"fc": late, "conv": np.eye(4).tolist()})}
    craft(tmp_path, "m", {2: (1, 1, 1, 1)}, mixing=mixing, labels=labels)
    mixing = MixingAnalysis(read_runs([tmp_path]).results[0])
    with use_style():
        figure = plot_heatmap(mixing).figure
    assert [axes.get_title() for axes in figure.axes[:3]] == ["conv", "fc", "label similarity"]
    assert figure.axes[3].get_ylabel() == "Weight"
    order = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset("ac"), frozenset("bd")}
    meshes = [axes.collections[0] for axes in figure.axes[:3]]
    place = ["abcd".index(name) for name in order]
    np.testing.assert_allclose(meshes[1].get_array(), np.array(late)[np.ix_(place, place)], rtol=1e-6)
    assert [mesh.get_clim() for mesh in meshes[:2]] == [(0, pytest.approx(0.4))] * 2
    similarity = mixing.similarity
    assert similarity is not None
    np.testing.assert_allclose(meshes[2].get_array(), similarity[np.ix_(place, place)])


def test_clients_are_dots_and_boxes_of_accuracy_and_gain(comparison: Path) -> None:
    runs = read_runs([comparison]).results
    with use_style():
        figure = plot_clients(runs).figure
        alone = plot_clients(runs[4:5]).figure
    accuracy, gain = figure.axes
    assert [text.get_text() for text in accuracy.get_yticklabels()] == ["local", "fedavg", "fedmcsa"]
    assert [text.get_text() for text in gain.get_yticklabels()] == ["fedavg", "fedmcsa"]
    dots = [
        np.asarray(line.get_xdata())
        for line in gain.lines
        if line.get_marker() == choose_line_styles(["x", "y"])["y"]["marker"]
    ]
    np.testing.assert_allclose(dots[0], [25, 10, 0, -2.5])
    assert len(alone.axes) == 1  # without local there are no gains


def test_bytes_are_stacked_by_layer_up_and_down(comparison: Path) -> None:
    """fedmcsa sent 300 and 100 up and was sent 300; fedavg sent 400 both ways."""
    runs = read_runs([comparison]).results
    with use_style():
        drawn = plot_traffic(runs)
    axes = drawn.figure.axes[0]
    ticks = [text.get_text() for text in axes.get_yticklabels()]
    assert ticks == ["fedavg  up", "down", "fedmcsa  up", "down"]
    bars = [(bars.get_label(), bar.get_x(), bar.get_width()) for bars in axes.containers for bar in bars]
    whole = [("conv", 0, 400)] * 2
    assert bars == [*whole, ("conv", 0, 100), ("fc", 100, 300), ("fc", 0, 300)]
    assert "nothing was sent by local" in drawn.caption


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [*((kind, ".pdf") for kind in ("curves", "heatmap", "clients", "bytes")), *(("curves", end) for end in STARTS)][1:],
)
def test_files_are_of_their_kind_and_the_same_each_time(
    comparison: Path, tmp_path: Path, capsys: Said, kind: str, suffix: str
) -> None:
    files = [tmp_path / name for name in (f"one{suffix}", f"two{suffix}")]
    for file in files:
        assert main(["plot", str(comparison), "--kind", kind, "-o", str(file)]) == 0
        said = capsys.readouterr()
        assert f"The figure is {file}" in said.out
        assert said.err == ""
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(STARTS[suffix])
    assert first == second
    assert b"CreationDate" not in first
    if suffix == ".svg":
        assert b"<text" in first
        assert b"dc:date" not in first
    if suffix == ".pdf":
        assert b"/Subtype /Type3" not in first


def test_options_of_curves_and_heatmaps(comparison: Path, tmp_path: Path, capsys: Said) -> None:
    out = tmp_path / "figure.svg"
    command = ["plot", str(comparison), "-o", str(out), "--algorithm", "fedmcsa", "--seed", "1"]
    assert main(command) == 0
    text = out.read_text()
    assert ">local<" in text  # what the method is compared with stays
    assert ">fedavg<" not in text
    assert "one seed" in capsys.readouterr().out
    assert main([*command, "--kind", "heatmap", "--round", "2", "--component", "fc.weight", "--width", "4"]) == 0
    assert "by fedmcsa, seed 1, round 2" in capsys.readouterr().out
    text = out.read_text()
    assert ">fc.weight<" in text
    assert ">fc.bias<" not in text
    assert 'width="288pt"' in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "figure.jpg"], "expected a file ending in .pdf, .svg, .eps, .png"),
        (["-o", "nowhere/figure.pdf"], "there is no folder nowhere"),
        (["--kind", "heat"], "--kind"),
        (
            ["--kind", "heatmap", "--round", "7"],
            "the 3 evaluated rounds from 2 to 4 have some; take one of the nearest, 2, 3, 4",
        ),
        (["--kind", "heatmap", "--component", "fc.weigh"], "did you mean 'fc.weight'? (known: fc.bias, fc.weight)"),
        (["--kind", "heatmap", "--algorithm", "fedavg"], "mixtures of their own; these do: fedmcsa"),
        (["--kind", "bytes", "--algorithm", "local"], "nothing was sent in these runs (local)"),
        (["--round", "4"], "--round is an option of --kind heatmap, not of --kind curves"),
        (["--kind", "clients", "--against", "bytes"], "--against is an option of --kind curves"),
        (["--algorithm", "fedmsca"], "did you mean 'fedmcsa'?"),
        (["--width", "0"], "--width"),
        (["--seed", "9"], "no run with seed 9 here; give one of the seeds 0, 1"),
    ],
)
def test_bad_input_is_one_sentence(
    comparison: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, comparison, *words)
    assert not (tmp_path / "figure.pdf").exists()


def test_without_matplotlib_it_says_what_to_install(
    comparison: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'fedattune[plot]'" in refused(capsys, comparison, "-o", tmp_path / "f.pdf")


def test_one_outlier_does_not_wash_out_the_heat_map() -> None:
    """One weight of 0.95, all else about 0.005: the others keep three quarters of the colours."""
    weights = np.full(20 * 19, 0.005)
    weights[::2] = 0.0025
    assert not choose_scale(weights, 20).is_broken
    weights[7] = 0.95
    scale = choose_scale(weights, 20)
    assert (scale.low, scale.end, scale.largest) == (0.0, 0.005, 0.95)
    norm = scale.make_norm()
    colours = norm(np.ma.masked_invalid([0.0, 0.0025, 0.005, 0.95, np.nan]))
    assert colours[:4].tolist() == pytest.approx([0, 0.375, 0.75, 1])
    assert colours.mask.tolist() == [False] * 4 + [True]


def test_names_with_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    names = ["$under_5_{$", "$5 to $10", r"$\frac$", "d"]
    clients = [{"id": name, "n_train": 9, "n_validation": 0, "n_test": 10} for name in names]
    craft(tmp_path, "m", {1: (1, 1, 1, 1)}, mixing={1: (ALL, ALL, {"fc": LATE})}, facts={"clients": clients})
    with use_style():
        figure = plot_heatmap(MixingAnalysis(read_runs([tmp_path]).results[0])).figure
    save_figure(figure, tmp_path / "f.svg")
    text = (tmp_path / "f.svg").read_text()
    assert all(f">{name}</text>" in text for name in names)


def test_legends_have_names_that_begin_with_an_underscore(tmp_path: Path) -> None:
    """Matplotlib would leave them out."""
    for name, layer in (("_mine", "_head"), ("fedavg", "body")):
        craft(tmp_path, name, {1: (5, 10, 5, 20)}, traffic={"up": {layer: 9}, "down": {}})
    runs = read_runs([tmp_path]).results
    with use_style():
        drawn = [plot_curves(runs), plot_traffic(runs)]
    assert [sorted(name.lstrip("\u200b") for name in names_below(one)) for one in drawn] == [
        ["_mine", "fedavg"],
        ["_head", "body"],
    ]
    assert save_figure(drawn[0].figure, tmp_path / "f.pdf")  # the font has the space before the name


def test_captions_do_not_call_splits_seeds(tmp_path: Path) -> None:
    for number in (0, 1):
        for seed in (0, 1):
            craft(tmp_path, "fedavg", {1: (5, 10, 5, 20)}, number=number, seed=seed)
    runs = read_runs([tmp_path]).results
    with use_style():
        captions = [plot_curves(runs).caption, plot_clients(runs).caption]
    assert all("mean over 4 runs (seeds and splits)" in caption for caption in captions)
