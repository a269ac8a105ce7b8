"""Training that diverges: the run is readable, names its clients, and says no number that JSON lacks."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedattune
from fedattune import Federation, Result, RunError, TensorBoard
from fedattune.data import ClientIndex, RaggedIndex
from fedattune.data.types import TargetScale
from fedattune.runs.metrics import find_diverged
from fedattune.training.safe_rate import compute_safe_rate


def make_numbers(sizes: list[int], n_inputs: int, *, classes: int = 0, scale: float = 1.0) -> Federation:
    """Clients with heavy tails (t with 3 degrees of freedom); the inputs of the first one are multiplied by `scale`."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, size=(sum(sizes), n_inputs))
    x = (x - x.mean(0)) / x.std(0)
    y = x @ rng.normal(size=n_inputs) / n_inputs**0.5 + rng.normal(size=len(x))
    x[: sizes[0]] *= scale
    target = torch.tensor(y > 0).long() if classes else torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    starts, cuts = np.cumsum([0, *sizes]), ((0.0, 0.6), (0.6, 0.8), (0.8, 1.0))
    parts = [
        RaggedIndex.from_lists(
            [np.arange(start + round(a * n), start + round(b * n)) for start, n in zip(starts, sizes, strict=False)]
        )
        for a, b in cuts
    ]
    names = tuple("ab"[:classes])
    scaling = None if classes else TargetScale(0.0, 1.0)
    x32 = torch.tensor(x, dtype=torch.float32)
    index = ClientIndex(*parts, names=[f"c{i}" for i in range(len(sizes))])
    return Federation("tails", x32, target, names, index, source="tails", target_scale=scaling)


def read_json(file: Path) -> object:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    return json.loads(file.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("early_stopping", ["loss", "off"])
def test_a_diverged_run_is_read_and_names_its_clients(early_stopping: str, tmp_path: Path) -> None:
    """One client's inputs are a thousand times as large: its errors pass all bounds while the weights are finite."""
    data = make_numbers([40, 40, 40], 5, scale=1e3)
    result = fedattune.fit(
        data, "local", rounds=3, lr=0.02, steps=3, out=tmp_path, early_stopping=early_stopping,
        callbacks=[TensorBoard(tmp_path / "events")],
    )  # fmt: skip
    assert result.diverged == ("c0",)
    content = read_json(tmp_path / "result.json")
    assert isinstance(content, dict)
    assert content["diverged"] == ["c0"]
    again = Result.load(tmp_path)
    assert again.diverged == result.diverged
    assert again.metrics.keys() == result.metrics.keys()
    (note,) = [note for note in result.notes if "1,000 times a constant's" in note]
    assert "on, the test error of 1 client (c0) is not finite" in note
    assert "lower the learning rate (lr is 0.02)" in note


def test_infinite_errors_are_no_numbers_of_json(tmp_path: Path) -> None:
    """Weights near the largest float: they are finite, and all predictions are not."""
    data = make_numbers([40, 40], 5, scale=1e30)
    with warnings.catch_warnings(action="error"):
        result = fedattune.fit(data, "local", rounds=2, lr=1e-3, steps=1, out=tmp_path, early_stopping="off")
    assert "c0" in result.diverged
    read_json(tmp_path / "result.json")


def test_a_diverged_model_is_not_exported(tmp_path: Path) -> None:
    """The advice is not the format that was asked for."""
    result = fedattune.fit(make_numbers([40, 40], 5), "local", rounds=1)
    broken = replace(result, models=result.models.map(lambda v: v * torch.inf))
    for kind, suffix in (("safetensors", "safetensors"), ("torch-export", "pt2")):
        with pytest.raises(RunError, match="gives values that are not finite, so its training diverged"):
            broken.export("c0", tmp_path / f"m.{suffix}", kind)
    assert not list(tmp_path.iterdir())


def test_absurd_errors_by_hand() -> None:
    """Classes: a mean loss above 1000 ln 2 = 693; numbers: a mean square above a million constants."""
    scores = np.array([[2, 2, 2, 0], [0, 0, 0, 0], [2 * 692.0, 2 * 694.0, np.nan, np.inf]])
    assert find_diverged(scores, 2).tolist() == [False, True, True, False]
    scores = np.array([[2, 2, 2, 2], [0, 0, 0, 0], [2 * 0.9e6, 2 * 1.1e6, 2 * 1.1e6, np.inf]])
    assert find_diverged(scores, 0, np.array([1.0, 1.0, 2.0, 1.0])).tolist() == [False, True, False, True]


def test_the_safe_rate_by_hand() -> None:
    """One input of 3 and a bias: beta = lambda = 10, so m / (2 (10 + 10 (m - 1))) = 1/20; 4 times that for classes."""
    x, index = torch.full((6, 1), 3.0), [RaggedIndex.from_lists([np.arange(6)]), *[RaggedIndex.from_lists([[]])] * 2]
    numbers = Federation(
        "a", x, torch.zeros(6), (), ClientIndex(*index), source="a", target_scale=TargetScale(0.0, 1.0)
    )
    assert compute_safe_rate(numbers, 4) == pytest.approx(1 / 20)
    assert compute_safe_rate(numbers, 1) == pytest.approx(1 / 20)
    classes = Federation("a", x, torch.zeros(6).long(), ("a", "b"), ClientIndex(*index), source="a")
    assert compute_safe_rate(classes, 4) == pytest.approx(4 / 20)


@pytest.mark.parametrize("classes", [0, 2])
@pytest.mark.parametrize("name", ["local", "fedavg", "fedmcsa"])
def test_the_safe_rate_does_not_diverge(name: str, classes: int) -> None:
    data = make_numbers([5, 5, 5, 60, 200], 300, classes=classes)
    rate = compute_safe_rate(data, 20)
    result = fedattune.fit(data, name, rounds=30, lr=rate, early_stopping="off")
    losses = [entry[result.evaluation_point]["loss_uniform"] for entry in result.history]
    assert not result.diverged
    assert max(losses) < 3
    if not classes and name == "local":  # and it is no hundred times too small
        far = fedattune.fit(data, name, rounds=30, lr=20 * rate, early_stopping="off")
        assert far.diverged
