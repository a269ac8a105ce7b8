"""Samples that are whole numbers: they reach a model as int64 if it takes them, and else as float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import DataError, Federation, ModelError
from fedattune.data import Schema, infer_schema
from fedattune.data.tables.new_rows import read_rows
from fedattune.models.inputs import suit_inputs

VOCABULARY, LENGTH = 9, 5


class OneHot(nn.Module):
    """A model without an embedding that takes only int64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(VOCABULARY * LENGTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.one_hot(x, VOCABULARY).flatten(1).to(self.head.weight.dtype))


def embed(vocabulary: int = VOCABULARY) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 2))


@pytest.fixture(scope="module")
def tokens() -> Federation:
    generator = torch.Generator().manual_seed(0)
    clients = {c: torch.randint(0, VOCABULARY, (40, LENGTH), generator=generator) for c in "ab"}
    return fedattune.federation_from({c: (x.int(), torch.arange(40) % 2) for c, x in clients.items()})


def test_tokens_reach_the_model_as_they_are(tokens: Federation) -> None:
    assert tokens.x.dtype == torch.int64
    assert tokens.features(torch.tensor([[3, 0]])).equal(tokens.x[torch.tensor([[3, 0]])])
    assert infer_schema(tokens).input_type == "int64"
    for model in (embed(), OneHot()):
        assert suit_inputs(tokens, model) is tokens


@pytest.mark.parametrize(("algorithm", "make"), [("fedrep", embed), ("fedavg", OneHot)])
def test_engines_agree_on_tokens(algorithm: str, make: type[nn.Module], tokens: Federation) -> None:
    """Enough steps to be compiled. PyTorch's `one_hot` reads values, so it runs one client after the other."""
    model, settings = make(), {"rounds": 1, "steps": 64, "lr": 0.1, "dtype": "float64"}
    first, second = (
        fedattune.fit(tokens, algorithm, model, engine=engine, **settings).model("a")  # type: ignore[arg-type]
        for engine in ("sequential", "auto")
    )
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(next(first.parameters()), next(model.parameters()).double())


def test_rows_of_tokens_can_be_private(tokens: Federation) -> None:
    kwargs = {"rounds": 1, "steps": 2, "dp_record": 8.0, "dtype": "float64"}
    first, second = (
        fedattune.fit(tokens, "fedavg", embed(), engine=engine, **kwargs).model("a")  # type: ignore[arg-type]
        for engine in ("sequential", "auto")
    )
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_other_models_get_floats(tokens: Federation) -> None:
    """The same result as from the same numbers as floats."""
    torch.manual_seed(0)
    model = nn.Linear(LENGTH, 2)
    assert suit_inputs(tokens, model).x.dtype == torch.float32
    floats = fedattune.federation_from(
        {c: (tokens.x[40 * i : 40 * i + 40].float(), torch.arange(40) % 2) for i, c in enumerate("ab")}
    )
    results = [fedattune.fit(data, "fedavg", model, rounds=2) for data in (tokens, floats)]
    assert torch.equal(*(one.model("b").weight for one in results))


def test_clients_of_whole_and_other_numbers_share_floats() -> None:
    rows = {"a": torch.ones(8, 2, dtype=torch.int64), "b": torch.ones(8, 2) / 2}
    data = fedattune.federation_from({c: (x, torch.arange(8) % 2) for c, x in rows.items()})
    assert data.x.dtype == torch.float32
    assert data.x[-1].tolist() == [0.5, 0.5]


def test_a_token_outside_of_the_vocabulary_is_refused(tokens: Federation) -> None:
    """Also if only the largest token of all rows is outside."""
    rows = {c: torch.zeros(40, LENGTH, dtype=torch.int64) for c in "ab"}
    rows["b"][39, 4] = VOCABULARY
    data = fedattune.federation_from({c: (x, torch.arange(40) % 2) for c, x in rows.items()})
    with pytest.raises(
        ModelError, match=r"cannot take inputs of shape \(5,\) \(IndexError: .*; the token numbers .* 0 to 9$"
    ):
        fedattune.fit(data, "fedavg", embed(), rounds=1)
    assert fedattune.fit(data, "fedavg", embed(VOCABULARY + 1), rounds=1).is_finished


def build(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return embed()


def test_export_and_predict(tmp_path: Path, tokens: Federation) -> None:
    result = fedattune.fit(tokens, "fedavg", f"{__file__}:build", rounds=1)
    (file, *_) = result.save_models(tmp_path)
    header, rows = "a,b,c,d,e\n", "0,1,2,3,8\n8,8,8,8,8\n"
    table = tmp_path / "rows.csv"
    table.write_text(header + rows)
    model = result.model("a")
    expected = model(torch.tensor([[0, 1, 2, 3, 8], [8, 8, 8, 8, 8]])).softmax(1).detach().numpy()
    found = fedattune.predict(file, table, factory=f"{__file__}:build")
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-6)
    table.write_text(header + "0,1,2,3,0.5\n")
    with pytest.raises(DataError, match=r"column 'e' holds 0\.5 in data row 1, and the model takes whole numbers"):
        fedattune.predict(file, table, factory=f"{__file__}:build")


def test_large_whole_numbers_are_not_rounded(tmp_path: Path) -> None:
    """float32, in which other numbers are read, has no 2**24 + 1."""
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n16777217,1\n")
    rows = read_rows(table, Schema(classes=("x", "y"), input_shape=(2,), input_type="int64"), None)
    assert rows.x.tolist() == [[2**24 + 1, 1]]
    table.write_text("a,b\n1e300,1\n")
    with pytest.raises(DataError, match=r"holds 1e[+]300 in data row 1, and the model takes whole numbers below 2"):
        read_rows(table, Schema(classes=("x", "y"), input_shape=(2,), input_type="int64"), None)


def test_a_graph_takes_int64(tmp_path: Path, tokens: Federation) -> None:
    result = fedattune.fit(tokens, "fedavg", embed(), rounds=1)
    written = result.export("a", tmp_path / "a.pt2", "torch-export", embed())
    assert written.input.startswith("int64 (batch, 5)")
    assert written.max_difference < 1e-5
