"""Modules of PyTorch that some engines cannot train: they train in another one, or are refused in one sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fedattune
from fedattune import ConfigError, Federation, ModelError
from fedattune.algorithms import ALGORITHMS
from fedattune.core.hardware import has_cpu_bfloat16
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


class Forward(nn.Module):
    """A linear model whose forward begins with something else."""

    def __init__(self, before: Any, **buffers: Tensor) -> None:
        super().__init__()
        self.before, self.layer = before, nn.Linear(64, 3)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.before(self, x.flatten(1)))


def subtract(_: nn.Module, x: Tensor) -> Tensor:
    x -= 1.0
    return x


@pytest.mark.parametrize("method", ["fedavg", "ditto", "pfedme", "ifca"])
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_model_may_write_over_its_inputs(engine: str, method: str, pictures: Federation) -> None:
    """Neither the kept inputs of the evaluation nor a batch that is used twice may change."""
    torch.manual_seed(0)
    model = Forward(lambda _, x: x - 1.0)
    scores = []
    for before in (model.before, subtract):
        model.before = before
        result = fedattune.fit(pictures, method, model, rounds=3, eval_every=1, steps=3, seed=1, engine=engine)
        scores.append((result.metrics, result.model("c0").state_dict()["layer.weight"]))
    assert scores[0][0] == scores[1][0]
    torch.testing.assert_close(scores[0][1], scores[1][1])


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.InstanceNorm1d(8, track_running_stats=True), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x).flatten(1))


def note_mean(module: nn.Module, x: Tensor) -> Tensor:
    if module.training:
        module.mean.lerp_(x.detach().mean(0), 0.1)
    return x - module.mean


MIXING = {
    "batch_norm": lambda: Forward(
        lambda module, x: batch_norm(x, module.mean, module.var, training=module.training),
        mean=torch.zeros(64),
        var=torch.ones(64),
    ),
    "mean": lambda: Forward(lambda _, x: x - x.mean(0)),
    "buffer": lambda: Forward(note_mean, mean=torch.zeros(64)),
    "InstanceNorm": Instances,
}


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("name", MIXING)
def test_a_forward_that_mixes_rows_sees_no_padding(name: str, engine: str) -> None:
    """Padding is the first row of the federation, which other clients must not see."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 30, 8, 8, generator=generator), torch.arange(30) % 3
    torch.manual_seed(0)
    model, states = MIXING[name](), []
    for first in (x[0], 5.0 + 3.0 * x[0]):
        data = fedattune.federation_from({"a": (first, y), "b": (x[1], y), "c": (x[2][:25], y[:25])})
        result = fedattune.fit(data, "local", model, rounds=1, epochs=2, batch_size=8, engine=engine)
        states.append(result.model("b").state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_among_the_buffers_is_no_divergence(value: float, pictures: Federation) -> None:
    mask = torch.full((64, 64), value).triu(1)
    model = Forward(lambda module, x: x @ torch.softmax(module.mask, 1), mask=mask)
    assert fedattune.fit(pictures, "fedavg", model, rounds=2).is_finished


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_complex_tensors_are_refused(kind: str, pictures: Federation) -> None:
    turn = torch.polar(torch.ones(32), torch.arange(32.0))
    model = Forward(
        lambda module, x: torch.view_as_real(torch.view_as_complex(x.view(-1, 32, 2)) * module.turn).flatten(1)
    )
    if kind == "buffer":
        model.register_buffer("turn", turn)
    else:
        model.turn = nn.Parameter(turn)
    with pytest.raises(ModelError, match=r"has complex tensors: turn; expected real ones; keep torch\.view_as_real"):
        fedattune.fit(pictures, "fedavg", model, rounds=1)
    advised = Forward(
        lambda module, x: torch.view_as_real(
            torch.view_as_complex(x.view(-1, 32, 2)) * torch.view_as_complex(module.turn)
        ).flatten(1),
        turn=torch.view_as_real(turn),
    )
    assert fedattune.fit(pictures, "fedavg", advised, rounds=1).is_finished


def shrink(module: nn.Module, x: Tensor) -> Tensor:
    module.layer.weight.data.mul_(0.9)
    return x


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_weights_that_a_forward_writes_over_stay_with_their_client(engine: str, pictures: Federation) -> None:
    """Neither the checks of the model nor its evaluation move the weights, nor another client's training."""
    torch.manual_seed(0)
    model, rows = Forward(shrink), [0, 2]
    before = model.layer.weight.detach().clone()
    untrained = fedattune.fit(pictures, "local", model, rounds=1, steps=1, lr=1e-30, engine=engine)
    assert torch.equal(model.layer.weight, before)
    weights = [untrained.model(f"c{i}").state_dict()["layer.weight"] for i in rows]
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], 0.9 * before)


def test_an_evaluation_does_not_write_over_the_model() -> None:
    """Embeddings with `max_norm` scale the rows that they look up, in evaluation, too."""
    tokens = torch.randint(0, 20, (3, 40, 6), generator=torch.Generator().manual_seed(0))
    data = fedattune.federation_from([(x, torch.arange(40) % 3) for x in tokens])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3))
    runs = [fedattune.fit(data, "fedavg", model, rounds=3, steps=2, eval_every=every) for every in (1, 3)]
    one, other = (tree_leaves(run.trained_server.state) for run in runs)
    assert all(map(torch.equal, one, other))


@pytest.mark.skipif(not has_cpu_bfloat16(), reason="the processor has no bfloat16 arithmetic")
def test_a_layer_without_a_rule_for_mixed_precision_is_refused(pictures: Federation) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    given: dict[str, Any] = {"rounds": 1, "mixed_precision": "bfloat16", "device": "cpu"}
    with pytest.raises(ModelError, match=r"cannot be trained by the vectorized engine with mixed .* use --engine auto"):
        fedattune.fit(pictures, "fedavg", model, engine="vectorized", **given)
    assert fedattune.fit(pictures, "fedavg", model, **given).is_finished
