"""Runs with other training losses: on both engines, with private gradients, and with the methods' own losses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fedattune
from cli_helpers import Done
from fedattune import ConfigError, Federation, Result
from fedattune.core.losses import make_loss
from fedattune.core.params import Params
from fedattune.core.settings import LossOptions, Settings
from fedattune.core.task import Task
from fedattune.training.safe_rate import compute_safe_rate, find_curvature
from federations import make_federation

pytestmark = pytest.mark.usefixtures("unmeasured")

RUN: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.1, "dtype": "float64"}
SMOOTH = {"label_smoothing": 0.2, "class_weights": "balanced"}
METHODS = ("fedavg", "ditto", "fedam", "attune", "pfedme", "fedfomo")


def fit(data: Federation, method: str, **settings: Any) -> Result:
    return fedattune.fit(data, method, "dnn", model_options={"hidden": 6}, **(RUN | settings))


@pytest.fixture(scope="module")
def uneven() -> Federation:
    return make_federation([23, 12, 30])


@pytest.fixture(scope="module")
def numbers() -> Federation:
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(n, 4, generator=generator) for n in (23, 12, 30)]
    return fedattune.federation_from([(one, one.sum(1) + 5.0) for one in x])


def assert_engines_agree(data: Federation, method: str, **settings: Any) -> Result:
    """Both engines give the same models, and other ones than the default loss."""
    one, other = (fit(data, method, engine=engine, **settings) for engine in ("sequential", "vectorized"))
    assert one.models.keys() == other.models.keys()
    for k, v in one.models.items():
        torch.testing.assert_close(other.models[k], v, rtol=1e-8, atol=1e-9)
    return one


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_agree_on_classes(method: str, uneven: Federation) -> None:
    smooth = assert_engines_agree(uneven, method, **SMOOTH)
    focal = assert_engines_agree(uneven, method, loss="focal")
    plain = fit(uneven, method)
    assert all(plain.models.keys() == one.models.keys() for one in (smooth, focal))
    for one in (smooth, focal):
        assert any(not torch.equal(one.models[k], v) for k, v in plain.models.items())


@pytest.mark.parametrize("method", ["fedavg", "attune", "pfedme"])
def test_both_engines_agree_on_numbers(method: str, numbers: Federation) -> None:
    results = [
        assert_engines_agree(numbers, method, **kind)
        for kind in ({"loss": "absolute"}, {"loss": "huber", "huber_delta": 0.5}, {})
    ]
    assert len({one.metrics["loss_uniform"] for one in results}) == 3


def test_fedrod_takes_the_loss_and_refuses_to_correct_classes_twice(uneven: Federation) -> None:
    assert_engines_agree(uneven, "fedrod", loss="focal")
    for settings in ({"class_weights": "balanced"}, {"label_smoothing": 0.1}):
        with pytest.raises(ConfigError, match="FedRoD's balanced softmax corrects for class counts already"):
            fit(uneven, "fedrod", **settings)


def test_fedlc_takes_the_loss_and_refuses_to_correct_classes_twice(uneven: Federation) -> None:
    assert_engines_agree(uneven, "fedlc", loss="focal")
    for settings in ({"class_weights": "balanced"}, {"label_smoothing": 0.1}):
        with pytest.raises(ConfigError, match="FedLC's logit calibration corrects for class counts already"):
            fit(uneven, "fedlc", **settings)


def test_one_step_is_the_gradient_of_pytorch() -> None:
    """One client, all rows in one batch: w - lr g with the gradient of nn.CrossEntropyLoss on the balanced weights."""
    data, lr = make_federation([40, 20]), 0.5
    one = {"rounds": 1, "steps": 1, "batch_size": 40, "dtype": "float64", "early_stopping": "off"}
    result = fedattune.fit(data, "local", "mlr", lr=lr, **one, **SMOOTH)
    rows = torch.as_tensor(data.part("train")[0])
    x, y = data.features(rows, torch.float64), data.y[rows]
    counts = torch.bincount(y, minlength=3)
    model = fedattune.fit(data, "local", "mlr", lr=1e-12, **one)
    start = {k: v[0].double().requires_grad_() for k, v in model.models.items()}
    weight, bias = start.values()
    loss = F.cross_entropy(x @ weight.T + bias, y, weight=len(y) / (3 * counts.double()), label_smoothing=0.2)
    for (k, v), g in zip(start.items(), torch.autograd.grad(loss, [*start.values()]), strict=True):
        torch.testing.assert_close(result.models[k][0], (v - lr * g).detach(), rtol=1e-6, atol=1e-8)


def test_the_default_is_the_run_without_options(uneven: Federation) -> None:
    """Equal weights of all classes are no weights; models are evaluated by the cross-entropy, always."""
    plain, equal = fit(uneven, "fedavg"), fit(uneven, "fedavg", class_weights=[2, 2, 2])
    gamma = fit(uneven, "fedavg", loss="focal", focal_gamma=0.0)
    for one in (equal, gamma):
        for k, v in plain.models.items():
            torch.testing.assert_close(one.models[k], v, rtol=1e-10, atol=1e-10)
        assert one.metrics["loss_uniform"] == pytest.approx(plain.metrics["loss_uniform"])


def test_rows_of_classes_that_training_lacks_have_a_loss(tmp_path: Path) -> None:
    """Adapting to test rows of a class without training rows: its weight is 1, not 0 / 0."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0] * 20 + [1] * 20)
    data = fedattune.federation_from([(x, y), (x, y)])
    rows = [torch.as_tensor(data.part("train")[0])[data.y[data.part("train")[0]] == 0].numpy() for _ in range(2)]
    only = replace(data, clients=[replace(one, train=mine) for one, mine in zip(data.clients, rows, strict=True)])
    result = fit(only, "perfedavg", options={"adapt_on": "test"}, class_weights="balanced")
    assert all(v.isfinite().all() for v in result.models.values())


def test_a_custom_loss_trains_on_both_engines_and_is_resumed(uneven: Federation, tmp_path: Path) -> None:
    file = tmp_path / "own_training_loss.py"
    file.write_text(
        "import torch\n"
        "def margin(outputs, y):\n"
        "    return (1 + outputs - outputs.gather(1, y[:, None])).relu().square().sum(1)\n"
        "def branching(outputs, y):\n"
        "    losses = torch.nn.functional.cross_entropy(outputs, y, reduction='none')\n"
        "    return losses if float(losses.detach().sum()) > 0 else 2 * losses\n"
    )
    with pytest.raises(ConfigError, match="branching cannot be used by the vectorized engine"):
        fit(uneven, "fedavg", loss=f"{file}:branching", engine="vectorized")
    first = fit(uneven, "fedavg", loss=f"{file}:branching")
    assert first.metrics["loss_uniform"] == pytest.approx(fit(uneven, "fedavg").metrics["loss_uniform"])
    assert_engines_agree(uneven, "fedavg", loss=f"{file}:margin")
    fit(uneven, "fedavg", loss=f"{file}:margin", out=tmp_path / "run")
    again = fedattune.fit(
        uneven, "fedavg", "dnn", model_options={"hidden": 6}, out=tmp_path / "run", resume=True,
        **(RUN | {"loss": f"{file}:margin"}),
    )  # fmt: skip
    assert again.is_finished


@pytest.mark.parametrize(
    "settings", [{"loss": "focal"}, {"class_weights": "1,2,3", "label_smoothing": 0.1}], ids=["focal", "weights"]
)
def test_record_privacy_clips_the_gradient_of_each_row(settings: Any, uneven: Federation) -> None:
    """The sum over rows of weight * min(1, clip / norm) * gradient, and of one row the loss is in no batch's mean."""
    assert_engines_agree(uneven, "fedavg", dp_record_noise=0.5, **settings)
    loss = make_loss(Settings(**settings).loss, ("a", "b", "c"))
    task = Task(torch.nn.Linear(5, 3).double(), loss=loss)
    x, y = torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 2])
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) if "class_weights" in settings else None
    buffers = Params() if weights is None else Params({"class weights of the training loss": weights})
    got = task.clipped_gradient(task.params, buffers, (x, y, torch.full((4,), 0.5).double()), 1.5)
    want = task.params.zeros()
    for i in range(4):
        logits = torch.nn.functional.linear(
            x[i : i + 1], *(w := [v.clone().requires_grad_() for v in task.params.values()])
        )
        if weights is None:
            p = logits.softmax(1)[0, y[i]]
            one = -((1 - p) ** 2) * p.log()
        else:
            one = F.cross_entropy(logits, y[i : i + 1], weight=weights, label_smoothing=0.1, reduction="sum")
        g = torch.autograd.grad(one, w)
        norm = torch.cat([v.flatten() for v in g]).norm()
        for k, v in zip(want, g, strict=True):
            want[k] += 0.5 * v * min(1.0, 1.5 / float(norm))
    for k, v in want.items():
        torch.testing.assert_close(got[k], v)


@pytest.mark.parametrize("settings", [SMOOTH, {"loss": "focal"}], ids=["smooth", "focal"])
def test_bfloat16_is_cast_before_the_loss(settings: Any) -> None:
    """Logits of bfloat16 give the loss of the same numbers in float32."""
    loss = make_loss(Settings(**settings).loss, ("a", "b", "c"))
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = logits, torch.tensor([0, 1, 2, 2, 1, 0])
    weights = torch.tensor([1.0, 2.0, 0.5]) if loss.has_class_weights else None
    got = loss.bind(weights)(logits, batch)
    assert got.dtype == torch.float32
    assert got == loss.bind(weights)(logits.float(), batch)


def test_record_privacy_refuses_balanced_weights(uneven: Federation) -> None:
    with pytest.raises(ConfigError, match="balanced class weights follow from the exact number of rows"):
        fit(uneven, "fedavg", dp_record_noise=0.5, class_weights="balanced")


def test_the_command_line_and_yaml_take_the_loss(cli: Callable[..., Done]) -> None:
    words = ("run", "--data", "digits", "--clients", 4, "--rounds", 1, "--steps", 1, "--quiet", "--algorithm", "fedavg")
    Path("e.yaml").write_text("loss: focal\nfocal_gamma: 1\nclass_weights: {'0': 2, '1': 1}\n")
    assert "class_weights: none is for 2, 3, 4, 5, 6 and 3 more, expected" in cli(*words, "--config", "e.yaml").err
    assert "loss: got huber, and the target is a class" in cli(*words, "--loss", "huber").err
    done = cli(*words, "--config", "e.yaml", "--class-weights", "balanced", "--out", "o")
    assert done.code == 0, done.err
    (config,) = Path("o").glob("**/config.json")
    stored = Result.load(config.parent).settings.loss
    assert (stored.name, stored.focal_gamma, stored.class_weights) == ("focal", 1.0, "balanced")


def test_a_run_of_before_had_the_default(uneven: Federation, tmp_path: Path) -> None:
    """A folder whose config lacks the new settings is resumed with their defaults, and with no others."""
    from fedattune.core.io import read_json, write_json
    from fedattune.runs.folder import RunFolder

    fit(uneven, "fedavg", out=tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    config = read_json(folder.config)
    older = {k: v for k, v in config.items() if k not in LossOptions.model_fields and k != "loss"}
    folder.result.unlink()
    write_json(folder.config, older)
    folder.seal_start()
    assert RunFolder.open(tmp_path / "run", config, resume=True).read_config() == older
    with pytest.raises(fedattune.RunError, match="loss was 'auto' and is 'focal'"):
        RunFolder.open(tmp_path / "run", config | {"loss": "focal"}, resume=True)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
def test_the_curvature_of_the_focal_loss_is_its_largest(gamma: float) -> None:
    """No second derivative at random logits is above it, and some come near."""
    options = LossOptions(loss="focal", focal_gamma=gamma)  # type: ignore[call-arg]
    rows = make_loss(options, ("a", "b", "c")).sample_losses
    logits = 2 * torch.randn(600, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    second = torch.func.jacrev(torch.func.jacrev(lambda z: rows(z[None], torch.tensor([0]))[0]))
    hessian = torch.func.vmap(second)(logits)
    largest = float(torch.linalg.eigvalsh(hessian).max())
    assert (
        0.9 * find_curvature(options, is_for_classes=True)
        < largest
        < find_curvature(options, is_for_classes=True) + 1e-5
    )


def test_the_safe_rate_knows_the_loss(uneven: Federation, numbers: Federation) -> None:
    plain, of_numbers = compute_safe_rate(uneven, 8), compute_safe_rate(numbers, 8)
    weighted = compute_safe_rate(uneven, 8, Settings(class_weights="balanced").loss)
    assert weighted == compute_safe_rate(uneven, 1) < plain
    assert compute_safe_rate(uneven, 8, Settings(label_smoothing=0.1).loss) == plain
    assert compute_safe_rate(uneven, 8, Settings(loss="focal").loss) == pytest.approx(plain * 0.5 / 0.99238, rel=1e-4)
    assert compute_safe_rate(numbers, 8, Settings(loss="huber").loss) == 2 * of_numbers
    assert compute_safe_rate(numbers, 8, Settings(loss="absolute").loss) == of_numbers
