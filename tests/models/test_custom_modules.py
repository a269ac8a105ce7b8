"""Modules of PyTorch that some engines cannot train: they train in another one, or are refused in one sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import fedattune
from fedattune import ConfigError, Federation, ModelError
from fedattune.algorithms import ALGORITHMS
from fedattune.core.task import Task
from fedattune.models import check_model

CHECKPOINTED = "layers that torch.func cannot differentiate: it trained with --engine sequential"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda z: torch.relu(self.layer(z)), x.flatten(1), use_reentrant=False))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x.abs().sum(2) > 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][0])


class Normed(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.layer, self.head = norm(nn.Linear(64, 16)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(x.flatten(1))))


@pytest.fixture(scope="module")
def pictures() -> Federation:
    generator = torch.Generator().manual_seed(0)
    rows = ((torch.randn(30, 8, 8, generator=generator), torch.arange(30) % 3) for _ in range(3))
    return fedattune.federation_from({f"c{i}": one for i, one in enumerate(rows)})


@pytest.mark.parametrize("model", [Checkpointed, Packed])
@pytest.mark.parametrize("rounds", [1, 6])
def test_what_torch_func_cannot_differentiate_runs_one_by_one(
    model: type[nn.Module], rounds: int, pictures: Federation
) -> None:
    result = fedattune.fit(pictures, "fedavg", model(), rounds=rounds)
    assert any(CHECKPOINTED in note for note in result.notes)
    given = fedattune.fit(pictures, "fedavg", model(), rounds=1, engine="sequential")
    assert not any(CHECKPOINTED in note for note in given.notes)
    with pytest.raises(ModelError, match="cannot be trained by the vectorized engine"):
        fedattune.fit(pictures, "fedavg", model(), rounds=1, engine="vectorized")
    with pytest.raises(ConfigError, match="gives no gradients of single rows"):
        fedattune.fit(pictures, "fedavg", model(), rounds=1, dp_record=8)


def test_attention_with_noise_on_rows(pictures: Federation) -> None:
    """Its dropout cannot be drawn for rows of several clients at once."""
    assert fedattune.fit(pictures, "fedavg", Attention(), rounds=2, dp_record=8).is_finished
    with pytest.raises(ModelError, match=r"cannot be trained by the vectorized engine.*use --engine auto"):
        fedattune.fit(pictures, "fedavg", Attention(), rounds=1, dp_record=8, engine="vectorized")


def test_predictions_of_attention_are_the_plain_ones(pictures: Federation) -> None:
    """PyTorch's fused prediction has no rule for `vmap`, and cuts off the padding that all rows of a batch share."""

    class Masked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            padding = torch.arange(8, device=x.device).expand(len(x), 8) >= 5
            return self.head((self.layer(x, src_key_padding_mask=padding) * ~padding[..., None]).sum(1) / 5)

    model = Masked()
    task = Task(model)
    x = pictures.features(torch.arange(4))
    model.eval()
    expected = model(x)  # a gradient is possible here, so PyTorch takes the plain way
    with torch.no_grad():
        torch.testing.assert_close(task.predict(task.params, task.buffers, x), expected)


def test_computed_weights(pictures: Federation) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = Normed(torch.nn.utils.weight_norm)
    with pytest.raises(ModelError, match=r"cannot be copied.*use torch\.nn\.utils\.parametrizations\.weight_norm"):
        fedattune.fit(pictures, "fedavg", old, rounds=1)
    new = Normed(torch.nn.utils.parametrizations.weight_norm)
    assert fedattune.fit(pictures, "fedavg", new, rounds=1).is_finished
    with pytest.raises(ModelError, match=r"it uses torch\.nn\.utils\.spectral_norm; use .*parametrizations"):
        fedattune.fit(pictures, "fedavg", Normed(torch.nn.utils.spectral_norm), rounds=1)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations_agree_between_engines(norm: str, pictures: Federation) -> None:
    """Where PyTorch would loop over the models of a batch and warn, they run one after the other."""
    torch.manual_seed(0)
    model = Normed(getattr(torch.nn.utils.parametrizations, norm))
    both = [
        fedattune.fit(pictures, "fedavg", model, rounds=2, steps=4, dtype="float64", engine=engine).model("c0")
        for engine in ("auto", "sequential")
    ]
    for one, other in zip(*(model.state_dict().values() for model in both), strict=True):
        torch.testing.assert_close(one, other)


def test_tokens_are_made_whole_by_the_model() -> None:
    data = fedattune.federation_from({c: (torch.randint(0, 9, (40, 5)).float(), torch.arange(40) % 2) for c in "ab"})
    embedding = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))
    with pytest.raises(ModelError, match=r"call x\.long\(\) before the embedding"):
        fedattune.fit(data, "fedavg", embedding, rounds=1)


def test_a_client_with_one_row_and_batchnorm_is_named() -> None:
    rows = {"big": 20, "tiny": 1, "small": 1}
    data = fedattune.federation_from(
        {
            name: {part: (torch.randn(k, 5), torch.arange(k) % 2) for part, k in (("train", n), ("test", 4))}
            for name, n in rows.items()
        }
    )
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(ModelError, match=r"2 clients have a single training row: tiny, small; .*--min-rows 5"):
        check_model(model, data)


def test_fit_in_the_old_order(pictures: Federation) -> None:
    with pytest.raises(ConfigError, match=r"fit takes the data before the method: fit\(data, \"fedavg\", model\)"):
        fedattune.fit("local", pictures)
    with pytest.raises(ConfigError, match="fit takes the data before the method"):
        fedattune.fit(ALGORITHMS["local"](), pictures, "mlr")
    with pytest.raises(AttributeError, match="'federation'; it is called federation_from now"):
        fedattune.federation  # noqa: B018
