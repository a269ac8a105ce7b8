"""The character network of LEAF: its size, its layer, and that it learns on every engine."""

import csv
import random
from typing import Any

import pytest
import torch
from torch import nn

import fedattune
from fedattune import Federation
from fedattune.core.task import Task
from fedattune.models.architectures import LstmLayer

SENTENCES = ("the cat sat on a mat ", "my dog ran up a hill ")


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Four speakers with one of two sentences each: ten characters decide the next one."""
    file, draw = tmp_path_factory.mktemp("speakers") / "speakers.csv", random.Random(0)
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out)
        table.writerow(["speaker", "text", "next"])
        for speaker in range(4):
            text = SENTENCES[speaker % 2] * 3
            for _ in range(40):
                at = draw.randrange(len(text) - 10)
                table.writerow([speaker, text[at : at + 10], text[at + 10]])
    options = {"tokens": "characters", "max_tokens": 10}
    return fedattune.load_federation(file, client_column="speaker", target="next", options=options)


def test_the_layer_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    ours, theirs = LstmLayer(3, 5), nn.LSTM(3, 5, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input_weight)
        theirs.weight_hh_l0.copy_(ours.hidden_weight)
        theirs.bias_ih_l0.copy_(ours.bias)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(4, 7, 3)
    torch.testing.assert_close(ours(x), theirs(x)[0], rtol=0, atol=1e-6)  # rounding of float32
    assert ours.bias[5:10].tolist() == [1.0] * 5  # forget gates


@pytest.mark.parametrize("engine", ["auto", "sequential", "vectorized"])
def test_it_runs_on_every_engine(engine: Any, speakers: Federation) -> None:
    options = {"hidden": 6, "layers": 1}
    runs = [
        fedattune.fit(
            speakers, "fedmcsa", "char_lstm", model_options=options, rounds=2, steps=3, dtype="float64", engine=one
        )
        for one in (engine, "sequential")
    ]  # fmt: skip
    for name, value in runs[0].models.items():
        torch.testing.assert_close(value, runs[1].models[name], rtol=0, atol=1e-10)  # rounding of float64
    assert Task(runs[0].model(0)).find_vectorization_error((speakers.x[:3].double(), speakers.y[:3])) is None
