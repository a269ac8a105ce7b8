"""Training on several labels, several numbers, or a class for each position."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import ConfigError, DataError, Federation
from fedattune.analysis.rows import build_run_table
from fedattune.core.errors import ModelError
from fedattune.core.metrics import compute_metrics, list_metrics
from fedattune.core.targets import TargetKind

pytestmark = pytest.mark.usefixtures("unmeasured")


def make_several(kind: str, n: int = 40, clients: int = 4, **options: Any) -> Federation:
    """Clients whose targets are linear in six inputs."""
    torch.manual_seed(0)
    weights = torch.arange(18.0).reshape(6, 3).sin()
    data: dict[str, tuple[Tensor, Tensor]] = {}
    for u in range(clients):
        x = torch.randn(n, 6)
        z = x @ weights + 0.3 * u
        y = {"labels": z > 0, "numbers": z * torch.tensor([1.0, 10.0, 100.0]), "positions": (z > 0).long()}[kind]
        data[f"c{u}"] = x, y
    if kind == "positions":
        options |= {"target_type": "class"}  # zeros and ones in two dimensions would be labels
    return fedattune.federation_from(data, **options)


class Positions(nn.Module):
    """Two classes at each of three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x).view(-1, 2, 3)
        return scores


@pytest.mark.parametrize("kind", ["labels", "numbers", "positions"])
@pytest.mark.parametrize("method", ["fedavg", "fedamp"])
def test_engines_agree(kind: str, method: str) -> None:
    torch.manual_seed(1)
    data, model = make_several(kind), Positions() if kind == "positions" else "mlr"
    one, other = (
        fedattune.fit(data, method, model, rounds=3, lr=0.1, dtype="float64", engine=engine)
        for engine in ("sequential", "vectorized")
    )
    assert one.metrics == pytest.approx(other.metrics, rel=1e-6)
    assert one.history[0]["trained"]["loss_uniform"] > one.metrics["loss_uniform"]  # it learns
    key, name = ("rmse_pooled", "rmse") if kind == "numbers" else ("acc_pooled", one.curve_metric.name)
    assert one.predictions["test"].pooled[name] == pytest.approx(one.metrics[key], rel=1e-5)
    assert one.kind == kind


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_rows_stay_private_and_clients_join(kind: str) -> None:
    data = make_several(kind, targets=["a", "b", "c"])
    one, other = (
        fedattune.fit(data, "fedavg", "mlr", rounds=2, lr=0.2, dp_record=20.0, engine=engine)
        for engine in ("sequential", "vectorized")
    )
    assert one.metrics == pytest.approx(other.metrics, rel=1e-5)
    torch.manual_seed(3)
    x, y = torch.randn(30, 6), torch.randn(30, 3)
    joined = fedattune.personalize(one, {"new": (x, y > 0 if kind == "labels" else y)}, rounds=1)
    assert [client.id for client in joined.newcomers] == ["new"]
    with pytest.raises(DataError, match="got the targets a, b, z, expected a, b, c"):
        fedattune.personalize(one, make_several(kind, targets=["a", "b", "z"]), rounds=1)
    if kind == "labels":  # nobody at the new client has the first one
        rare = fedattune.personalize(one, {"new": (x, (y > 0) & torch.tensor([False, True, True]))}, rounds=1)
        assert [client.id for client in rare.newcomers] == ["new"]


def test_attune_mixes_probabilities_of_labels_and_several_numbers() -> None:
    for kind, key, best in (("labels", "label_accuracy", 0.75), ("numbers", "r2", 0.5)):
        data = make_several(kind)
        one, other = (
            fedattune.fit(data, "attune", "mlr", rounds=2, lr=0.3, engine=engine)
            for engine in ("sequential", "vectorized")
        )
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4)
        assert one.predictions["test"].pooled[key] > best


def test_the_result_says_which_labels_it_has(tmp_path: Path) -> None:
    data = make_several("labels", targets=["fever", "cough", "rash"])
    assert repr(data).endswith("3 labels)")
    assert any("3 labels, each true or false: fever, cough, rash" in note for note in data.notes)
    fedattune.fit(data, "fedavg", "mlr", rounds=2, out=tmp_path / "run")
    again = fedattune.Result.load(tmp_path / "run")
    assert (again.kind, again.facts["target_names"]) == ("labels", ["fever", "cough", "rash"])
    assert again.metrics["acc_uniform"] == pytest.approx(again.measure_clients("label_accuracy").mean())
    assert data.label_counts().sum(axis=0).tolist() == data.y.sum(0).tolist()


@pytest.mark.parametrize("kind", ["labels", "numbers", "positions"])
def test_tables_have_every_metric_of_the_target(kind: TargetKind) -> None:
    model = Positions() if kind == "positions" else "mlr"
    runs = [fedattune.fit(make_several(kind), name, model, rounds=2, lr=0.2) for name in ("local", "fedavg")]
    (_, row), names = build_run_table(runs).to_pylist(), list_metrics(kind)
    assert row["metric"] == runs[0].curve_metric.name
    rows = runs[1].predictions["test"]
    for name in names:
        values = rows.measure_clients(name)
        alone = [
            compute_metrics(rows.y[rows.rows(i)], rows.outputs[rows.rows(i)], [name])[name]
            for i in range(rows.n_clients)
        ]
        assert values.tolist() == pytest.approx(alone, nan_ok=True)
        assert row[name] == pytest.approx(np.nanmean(values))


def test_several_numbers_are_learnt_in_deviations_of_each() -> None:
    data = make_several("numbers", targets=["a", "b", "c"])
    train = torch.cat([data.y[torch.from_numpy(client.train)] for client in data.clients]).double()
    torch.testing.assert_close(train.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std(0, correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert data.target_scale is not None
    deviation = data.target_scale.deviation
    assert isinstance(deviation, tuple)
    assert deviation[2] > 50 > deviation[0]
    restored = data.target_scale.restore(data.y.numpy())
    assert restored.std(axis=0)[2] == pytest.approx(deviation[2], rel=0.1)


def test_zeros_and_ones_in_columns_are_labels_unless_the_user_says_otherwise() -> None:
    x, y = torch.randn(20, 2), (torch.arange(60).reshape(20, 3) % 2).float()
    build = fedattune.federation_from
    found = build([(x, y), (x, y)])
    assert found.kind == "labels"
    assert any("target_type='number'" in note for note in found.notes)
    assert build([(x, y), (x, y)], target_type="number").kind == "numbers"
    assert build([(x, y.long()), (x, y.long())]).kind == "labels"
    positions = build([(x, y.long()), (x, y.long())], target_type="class")
    assert (positions.kind, positions.output_shape) == ("positions", (2, 3))
    assert build([(x, y.long()), (x, y.long())], classes=["no", "yes"]).kind == "positions"


def test_wrong_targets_are_refused_in_one_sentence() -> None:
    x, y = torch.randn(20, 2), torch.arange(60).reshape(20, 3) % 2 == 0
    build = fedattune.federation_from
    with pytest.raises(DataError, match=r"client '1' has targets of shape \(2,\), client '0' \(3,\)"):
        build([(x, y), (x, y[:, :2])])
    with pytest.raises(DataError, match=r"client '1': label '0' of sample 3 is 5.0, expected true or false"):
        build([(x, y.float()), (x, torch.where(torch.arange(20)[:, None] == 3, 5.0, y.float()))], target_type="label")
    with pytest.raises(ConfigError, match="targets: got 2 names for 3 labels; give each one its own name"):
        build([(x, y), (x, y)], targets=["a", "b"])
    with pytest.raises(ConfigError, match=r"several labels, which are no classes; give their names as targets"):
        build([(x, y), (x, y)], classes=["a", "b", "c"])
    with pytest.raises(DataError, match="label '0' is true in all rows"):
        build([(x, y | torch.tensor([True, False, False]))] * 2)
    numbers = torch.randn(20, 2)
    numbers[2, 1] = torch.nan
    with pytest.raises(DataError, match="client '0': target 'b' of sample 2 is nan, expected a finite number"):
        build([(x, numbers), (x, numbers)], targets=["a", "b"])
    with pytest.raises(DataError, match="sample 0 has the class 7 at a position, expected whole numbers from 0 to 1"):
        build([(x, y.long() * 7)] * 2, classes=["no", "yes"])
    with pytest.raises(ModelError, match=r"expected 3 scores per sample \(one per label, as logits\), got \(2,\)"):
        fedattune.fit(build([(x, y), (x, y)]), "fedavg", nn.Linear(2, 2), rounds=1)


def test_targets_that_are_easily_mistaken_are_told() -> None:
    x, masks = torch.randn(20, 2, 3), torch.arange(120).reshape(20, 2, 3)
    build = fedattune.federation_from
    for wrong in (masks % 2 == 0, masks / 2):
        with pytest.raises(DataError, match=r"got \(40, 2, 3\); for a class of each position, give target_type="):
            build([(x, wrong)] * 2)
    with pytest.raises(DataError, match="sample 0 has the class nan at a position"):
        build([(x, torch.full((20, 2), torch.nan))] * 2, target_type="class")
    with pytest.raises(DataError, match=r"are 2 different numbers up to 255; number the classes from 0 and write -100"):
        build([(x, masks % 2 * 255)] * 2)
    borders = build([(x, torch.where(masks % 7 == 0, 255, masks % 21))] * 2)
    assert borders.notes == (
        "The classes of positions are 19 different numbers up to 255; write -100 where a position does not count.",
    )
    counts = build([(x, masks[:, 0])] * 2)
    assert counts.kind == "positions"
    assert counts.notes[0].endswith(
        "taken as a class for each position; to predict numbers, give target_type='number'."
    )


def test_metrics_of_outputs_that_are_too_many_are_not_called_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedattune.runs.predictions.MAX_OUTPUTS", 100)
    code = tmp_path / "net.py"
    code.write_text(
        "from torch import nn\ndef net(shape, n): return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)))\n"
    )
    compared = fedattune.compare(make_several("positions"), ["fedavg"], f"{code}:net", rounds=1, metric="mean_iou")
    assert "outputs for test rows, which are not stored above 50 million numbers" in compared.verdict.text
    assert "--metric position_accuracy" in compared.verdict.text


def test_methods_and_attacks_that_need_classes_say_so() -> None:
    labels = make_several("labels")
    with pytest.raises(ConfigError, match="it needs classes, and the target is several labels: FedRoD"):
        fedattune.fit(labels, "fedrod", "mlr", rounds=1)
    with pytest.raises(ConfigError, match="attack: label_shift needs classes, and the target is several labels"):
        fedattune.fit(labels, "fedavg", "mlr", rounds=1, attack="label_shift")
    result = fedattune.fit(labels, "fedavg", "mlr", rounds=2, lr=0.1, attack="label_flip", screening="on")
    assert "target_kind" in result.facts
    with pytest.raises(ConfigError, match="it trains a network of its own, which predicts one class for a sample"):
        fedattune.fit(make_several("positions"), "attune", Positions(), rounds=1)


def test_classes_of_positions_are_compared_and_their_models_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    code = tmp_path / "net.py"
    code.write_text("from torch import nn\ndef net(shape, n_classes): return nn.Conv2d(1, n_classes, 3, padding=1)\n")
    clients = {}
    for u in range(3):
        x = torch.randn(24, 1, 5, 5)
        y = (x[:, 0] > 0).long()
        y[:, :, 4] = -100
        clients[f"c{u}"] = x, y
    data = fedattune.federation_from(clients, classes=["background", "organ"])
    assert data.heterogeneity()["samples_max"] == 24
    model = f"{code}:net"
    study = fedattune.compare(
        data,
        ["fedavg"],
        model,
        rounds=3,
        lr=1.0,
        baseline="majority",
        metric="mean_iou",
        out=tmp_path / "study",
        quiet=True,
    )
    result = next(one for one in study.results if one.algorithm == "fedavg")
    assert result.kind == "positions"
    assert set(result.recall) == {"background", "organ"}
    file = result.save_models(tmp_path / "models")[0]
    assert fedattune.load_model(file, factory=model)(torch.zeros(1, 1, 5, 5)).shape == (1, 2, 5, 5)
    with pytest.raises(ConfigError, match="baseline sklearn: its models predict no class for each position"):
        fedattune.compare(data, ["fedavg"], model, rounds=1, baseline="sklearn", out=tmp_path / "other")


def test_images_whose_positions_have_classes_do_not_move() -> None:
    x, y = torch.randn(12, 1, 4, 4), torch.randint(0, 2, (12, 4, 4))
    net = nn.Conv2d(1, 2, 1)
    with pytest.raises(ConfigError, match="the classes of their positions would stay in place"):
        fedattune.fit(fedattune.federation_from([(x, y), (x, y)]), "fedavg", net, rounds=1, augment="flip")
