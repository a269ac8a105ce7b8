"""Sequences of unequal length: padded once for all clients, and models that are told what is padding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import DataError, Federation, ModelError, WithPadding, pad_sequences

F = 3


class Recurrent(nn.Module):
    """The state of a GRU after the last step of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(F, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states = self.layer(x)[0]
        last = (lengths - 1)[:, None, None].expand(-1, 1, states.shape[2])
        return self.head(states.gather(1, last).squeeze(1))


class Packed(Recurrent):
    """The same by PyTorch's packing."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(F + 1, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(F + 1, 2)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        h = self.layer(nn.functional.pad(x, (0, 1)), src_key_padding_mask=padding_mask)
        return self.head(h.masked_fill(padding_mask[..., None], 0).sum(1))


class Bag(nn.Module):
    """The mean of embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, padding_mask: Tensor, lengths: Tensor) -> Tensor:
        h = self.table(x).masked_fill(padding_mask[..., None], 0).sum(1)
        return self.head(h / lengths[:, None])


def draw(make: Callable[[int], Tensor]) -> Federation:
    torch.manual_seed(0)
    clients = {"a": [make(i % 5 + 1) for i in range(20)], "b": [make(i % 3 + 1) for i in range(20)]}
    return fedattune.federation_from({c: (x, torch.arange(20) % 2) for c, x in clients.items()})


@pytest.fixture(scope="module")
def features() -> Federation:
    return draw(lambda n: torch.randn(n, F))


@pytest.fixture(scope="module")
def tokens() -> Federation:
    return draw(lambda n: torch.randint(0, 9, (n,)))


def test_all_clients_are_padded_to_the_longest(features: Federation, tokens: Federation) -> None:
    assert features.x.shape == (40, 5, F + 1)
    assert features.x[20:, 3:].eq(0).all()  # the longest of client b has three steps
    assert features.x[:, :, -1].sum(1)[:6].tolist() == [1, 2, 3, 4, 5, 1]
    assert tokens.x.shape == (40, 5)
    assert tokens.x.dtype == torch.int64
    assert (tokens.x >= 0).sum(1)[:6].tolist() == [1, 2, 3, 4, 5, 1]
    assert "Sequences of 1 to 5 steps are padded with -1; fedattune.WithPadding(model)" in " ".join(tokens.notes)


def test_a_client_may_have_sequences_of_one_length() -> None:
    y = torch.arange(8) % 2
    rows = {"one": torch.ones(8, 2, F), "more": [torch.ones(i + 1, F) for i in range(8)]}
    data = fedattune.federation_from({c: (x, y) for c, x in rows.items()})
    assert data.x[:8, :, -1].sum(1).tolist() == [2.0] * 8
    series = fedattune.federation_from({c: ([torch.ones(i + 1) for i in range(8)], y) for c in "ab"})
    assert series.x.shape == (16, 8, 2)


@pytest.mark.parametrize("make", [Recurrent, Packed, Attention])
def test_padding_does_not_change_a_prediction(make: type[nn.Module]) -> None:
    """Each sequence alone, without padding, gives the same logits."""
    torch.manual_seed(1)
    model, sequences = WithPadding(make()), [torch.randn(n, F) for n in (4, 1, 3)]
    together = model(pad_sequences(sequences))
    alone = torch.cat([model(pad_sequences([one])) for one in sequences])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("make", [Recurrent, Packed, Attention, Bag])
def test_engines_agree(make: type[nn.Module], features: Federation, tokens: Federation) -> None:
    data = tokens if make is Bag else features
    torch.manual_seed(0)
    model = WithPadding(make())
    first, second = (
        fedattune.fit(data, "fedper", model, rounds=1, steps=3, dtype="float64", engine=engine).model("a")  # type: ignore[arg-type]
        for engine in ("sequential", "auto")
    )
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(next(first.parameters()), next(model.parameters()).double())


def test_export(features: Federation, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithPadding(Attention())
    result = fedattune.fit(features, "fedavg", model, rounds=1, steps=1)
    result.export("a", tmp_path / "a.safetensors", module=model)
    loaded = fedattune.load_model(tmp_path / "a.safetensors", model)
    x = pad_sequences([torch.ones(7, F), torch.ones(2, F)])  # longer than in training
    torch.testing.assert_close(loaded(x), result.model("a")(x))


def test_mistakes(features: Federation) -> None:
    with pytest.raises(ModelError, match=r"; for sequences of unequal length, give fedattune\.WithPadding\(model\)"):
        fedattune.fit(features, "fedavg", Attention(), rounds=1)
    y = torch.arange(3) % 2
    with pytest.raises(ModelError, match="the forward of the model Linear takes input, expected an argument padding_"):
        WithPadding(nn.Linear(3, 2))
    with pytest.raises(DataError, match="client 'a': sequence 1 is empty; leave it out"):
        fedattune.federation_from({"a": ([torch.ones(2, F), torch.ones(0, F), torch.ones(1, F)], y)})
    with pytest.raises(DataError, match="client 'a': sequence 2 has a token number below 0"):
        fedattune.federation_from({"a": ([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([-1])], y)})
    with pytest.raises(DataError, match="client 'a': sequence 0 holds NaN"):
        fedattune.federation_from({"a": ([torch.full((2,), torch.nan), torch.ones(1), torch.ones(1)], y)})
    with pytest.raises(DataError, match=r"steps of shape \(2,\), others of \(3,\); all need the same number"):
        fedattune.federation_from({"a": ([torch.ones(k, 2) for k in (1, 2, 2)], y), "b": (torch.ones(3, 2, 3), y)})


class LastToken(nn.Module):
    """The last token of each text."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x.gather(1, (lengths - 1)[:, None])


def test_characters_of_a_table_come_first() -> None:
    rows = torch.tensor([[-1.0, -1, 5, 6], [7, 8, 9, 2], [3, 4, -1, -1], [-1, -1, -1, -1]])  # left and right
    model = WithPadding(LastToken())
    assert model(rows).tolist() == [[6], [2], [4], [0]]
    assert torch.func.vmap(model)(rows[None]).tolist() == [[[6], [2], [4], [0]]]
