"""Check networks that methods train in place of the user's model: the split into body and head, and refusals."""

from typing import Any

import pytest
import torch
from torch import nn

import fedattune
from fedattune import Federation, ModelError
from fedattune.core.network import split_head

RUN: dict[str, Any] = {"rounds": 3, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "dtype": "float64"}
SPLIT = ["fedam", "fedcp", "feddbe", "fedgh", "fedpac", "fedproto", "fedrod", "knn_per", "moon"]


class HeadFirst(nn.Module):
    """A network whose head is not the last registered linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 3)
        self.features = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.features(x))
        return out


def test_the_head_is_the_linear_layer_that_makes_the_output() -> None:
    torch.manual_seed(0)
    model, x = HeadFirst().eval(), torch.randn(4, 5)
    body, head = split_head(model, x)
    assert torch.equal(head.weight, model.classifier.weight)
    assert head.weight is not model.classifier.weight
    assert torch.equal(body.eval()(x), model.features(x))
    assert isinstance(split_head(nn.Linear(5, 3), x)[0], nn.Identity)
    writing = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3))
    assert split_head(writing, x)[1].weight.shape == (3, 6)
    assert (x < 0).any()


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv1d(1, 1, 3), nn.Flatten()), "it has no nn.Linear layer"),
        (nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(1)), "'0' does not make its output"),
        (nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3).requires_grad_(False)), "'1' is frozen"),
    ],
)
def test_a_model_that_cannot_be_split_is_said(name: str, model: nn.Module, reason: str, ragged: Federation) -> None:
    data = ragged
    if "Conv1d" in str(model):
        data = fedattune.federation_from([(ragged.x[c.all][:, None], ragged.y[c.all]) for c in ragged.clients])
    with pytest.raises(ModelError, match=f"the model Sequential cannot be split into body and head.*{reason}"):
        fedattune.fit(data, name, model, **RUN)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("affine", ["average", "local"])
def test_batch_normalisation_in_the_body(name: str, affine: str, ragged: Federation) -> None:
    torch.manual_seed(0)
    model = HeadFirst()
    options = {"noise": False} if name == "fedcp" else {}
    results = [
        fedattune.fit(ragged, name, model, options=options, engine=e, bn_affine=affine, **RUN)
        for e in ("sequential", "vectorized")
    ]
    for a, b in ((results[0].models, results[1].models), (results[0].buffers, results[1].buffers)):
        assert max((a[k] - b[k]).abs().max().item() for k in a) < 1e-12
    mean = results[0].buffers["body.features.1.running_mean"]
    assert (mean[0] - mean[1]).abs().max() > 1e-6


@pytest.mark.parametrize("name", SPLIT)
def test_models_without_body_and_models_read_back(name: str, ragged: Federation, tmp_path: Any) -> None:
    """Logistic regression is all head; and a saved model predicts as it did."""
    result = fedattune.fit(ragged, name, "mlr", out=tmp_path / "run", **RUN)
    x = ragged.features(torch.arange(9), torch.float64)
    for number, file in enumerate(result.save_models(tmp_path / "models")):
        model = fedattune.load_model(file)
        assert model(x).shape == (9, 3)
        assert torch.equal(model(x), result.model(number)(x))
        assert torch.equal(model(x), fedattune.Result.load(tmp_path / "run").model(number)(x))


class Taught(nn.Module):
    """A user's model with names that FedAttune uses for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = nn.CrossEntropyLoss()
        self.has_batch_loss = True
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x * self.scale)
        return out


@pytest.mark.parametrize("name", ["fedavg", "fedlc", "pfedhn", "fedam", "fedcp", "fedrod"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_users_own_model_of_any_type(name: str, dtype: torch.dtype, ragged: Federation) -> None:
    """Attributes with names of our own, a parameter without dimensions, and double precision."""
    result = fedattune.fit(ragged, name, Taught().to(dtype), rounds=2, steps=2, dtype="float64")
    assert all(v.isfinite().all() for v in result.models.values())
