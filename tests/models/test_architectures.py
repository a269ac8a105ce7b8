"""Check the papers' models by parameter counts and behaviour, and custom models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedattune
from fedattune import ConfigError, Federation, ModelError
from fedattune.models import build_model, check_model, make_model

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "count"),
    [
        ("mlr", (60,), 10, {}, 610),
        ("mlr", (1, 28, 28), 10, {}, 7_850),
        ("mlr", (3, 32, 32), 10, {}, 30_730),
        ("gam", (60,), 10, {}, (60 * 8 + 1) * 10),
        ("gam", (60,), 10, {"numbers": 3}, (60 + 3 * 7 + 1) * 10),
        ("dnn", (60,), 10, {"hidden": 20}, 1_430),
        ("dnn", (1, 28, 28), 10, {}, 79_510),
        ("dnn", (3, 32, 32), 10, {}, 308_310),
        ("cnn", (1, 28, 28), 10, {}, 582_026),
        ("cnn", (3, 32, 32), 10, {}, 878_538),
        ("cnn", (3, 32, 32), 100, {}, 924_708),
        ("cnn", (3, 64, 64), 200, {}, 5_694_600),
        ("lenet", (3, 32, 32), 10, {}, 121_182),
        ("lenet", (3, 32, 32), 100, {}, 128_832),
        ("lenet", (1, 28, 28), 62, {}, 90_242),
        ("lenet", (1, 28, 28), 10, {}, 85_822),
        ("lenet", (3, 32, 32), 10, {"batch_norm": True}, 121_182 + 96),
        ("lenet", (3, 32, 32), 10, {"conv1": 6, "conv2": 16}, 62_006),
        ("tf_cnn", (3, 32, 32), 10, {}, 122_570),
        ("mcmahan_cnn", (3, 24, 24), 10, {}, 1_068_298),
        ("mcmahan_cnn", (3, 32, 32), 10, {}, 1_756_426),
        ("mcmahan_cnn", (3, 32, 32), 10, {"lrn": True}, 1_756_426),
        ("reddi_cnn", (1, 28, 28), 62, {}, 1_206_590),
        ("digit_model", (3, 28, 28), 10, {}, 14_219_210),
        ("digit_model", (3, 32, 32), 10, {"batch_norm": "conv"}, 18_146_250),
        ("digit_model", (1, 28, 28), 10, {"batch_norm": "none"}, 14_210_378),
        ("resnet18", (3, 64, 64), 200, {}, 11_279_112),
        ("resnet18", (3, 32, 32), 10, {}, 11_181_642),
        # The stem has 3 x 3 x 3 x 64 weights instead of 3 x 7 x 7 x 64.
        ("resnet18", (3, 32, 32), 10, {"stem": "3x3"}, 11_181_642 - 3 * (49 - 9) * 64),
    ],
)
def test_parameter_counts(name: str, shape: Any, classes: int, options: Any, count: int) -> None:
    model = build_model(name, shape, classes, options)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


SMALLEST = {"cnn": 16, "lenet": 16, "tf_cnn": 18, "mcmahan_cnn": 4, "reddi_cnn": 6, "digit_model": 4}


def pictures(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pictures of three classes."""
    noise = torch.Generator().manual_seed(count)
    return torch.randn(count, 1, side, side, generator=noise), torch.arange(count) % 3


@pytest.mark.parametrize(
    ("name", "side", "options"),
    [
        ("gam", 3, {}),
        ("cnn", 16, {}),
        ("lenet", 16, {}),
        ("lenet", 16, {"batch_norm": True}),
        ("tf_cnn", 18, {}),
        ("mcmahan_cnn", 4, {}),
        ("mcmahan_cnn", 4, {"lrn": True}),
        ("reddi_cnn", 6, {"conv_dropout": 0, "fc_dropout": 0}),
        ("digit_model", 4, {}),
        ("digit_model", 4, {"batch_norm": "conv"}),
        ("digit_model", 4, {"batch_norm": "none"}),
        ("resnet18", 32, {"width": 4}),
        ("resnet18", 16, {"width": 4, "stem": "3x3"}),
    ],
)
def test_engines_train_every_network_alike(name: str, side: int, options: Any) -> None:
    """Two clients, one of whose batches is not full, for two steps in float64."""
    data = fedattune.federation_from([pictures(8, side), pictures(20, side)])
    run: dict[str, Any] = {"rounds": 1, "steps": 2, "batch_size": 10, "lr": 0.05, "dtype": "float64"}
    reference, together = (
        fedattune.fit(data, "fedavg", name, model_options=options, engine=e, **run)
        for e in ("sequential", "vectorized")
    )
    assert max((v - together.models[k]).abs().max().item() for k, v in reference.models.items()) < 1e-12
    assert reference.metrics["loss_uniform"] == pytest.approx(together.metrics["loss_uniform"], rel=1e-12)
    first = make_model(name, data, options=options).double().state_dict()
    assert all((v[0] - first[k]).abs().max() > 0 for k, v in reference.models.items())


def test_hat_functions_are_one_at_their_centre_and_sum_to_one_between_them() -> None:
    x = torch.tensor([[0.5, -1.25, 1.0], [0.1, 3.0, 0.0]])
    model = build_model("gam", (3,), 1, {"numbers": 2})
    assert isinstance(model, nn.Sequential)
    out = model[:2](x)
    assert torch.equal(out[:, :3], x)
    hats = out[:, 3:].unflatten(1, (2, 7))
    assert hats[0].tolist() == [[0, 0, 0, 0, 1, 0, 0], [0.5, 0.5, 0, 0, 0, 0, 0]]
    assert hats.sum(-1).flatten().tolist() == pytest.approx([1, 1, 1, 0])  # beyond the hats, curves are straight


def test_the_numbers_of_a_table_get_curves_and_its_categories_none(tmp_path: Path) -> None:
    rows = [f"{'ab'[i % 2]},{i},{'xyz'[i % 3]},{'no' if i % 4 else 'yes'}" for i in range(60)]
    (tmp_path / "t.csv").write_text("ward,n,side,outcome\n" + "\n".join(rows) + "\n")
    data = fedattune.load_federation(tmp_path / "t.csv", client_column="ward", target="outcome")
    result = fedattune.fit(data, "fedavg", "gam", rounds=1, out=tmp_path / "run")
    assert result.config["model_options"] == {"numbers": 1}
    assert result.n_parameters == (4 + 7 + 1) * 2
    model = fedattune.Result.load(tmp_path / "run").model("a")
    assert model(data.x[:3].float()).shape == (3, 2)


def test_an_additive_model_learns_curves_that_a_linear_model_cannot() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=random)
    y = (x[:, 0] ** 2 > 1).long()
    data = fedattune.federation_from([(x[:200], y[:200]), (x[200:], y[200:])])
    linear, curved = (
        fedattune.fit(data, "fedavg", name, rounds=20, lr=0.5).metrics["acc_uniform"] for name in ("mlr", "gam")
    )
    assert linear < 0.75
    assert curved > 0.9


def test_local_response_normalisation_is_tensorflows() -> None:
    """Inner channels of 64 equal channels of value 2 see 9; the first channel sees itself and 4 more."""
    model = build_model("mcmahan_cnn", (3, 32, 32), 10, {"lrn": True})
    assert isinstance(model, nn.Sequential)
    lrn = [m for m in model if isinstance(m, nn.LocalResponseNorm)]
    assert len(lrn) == 2
    out = lrn[0](torch.full((1, 64, 1, 1), 2.0)).flatten()
    for channel, seen in [(0, 5), (4, 9), (32, 9), (63, 5)]:
        assert out[channel].item() == pytest.approx(2 / (1 + 0.001 / 9 * seen * 4) ** 0.75, rel=1e-6)


def test_the_seed_alone_decides_the_initial_weights(ragged: Federation) -> None:
    torch.manual_seed(1)
    a = make_model("dnn", ragged, seed=3)
    torch.manual_seed(2)
    b, c = make_model("dnn", ragged, seed=3), make_model("dnn", ragged, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_models_that_do_not_fit_are_refused(ragged: Federation) -> None:
    for name in [*SMALLEST, "resnet18"]:
        with pytest.raises(ConfigError, match=rf"{name}: .*inputs of shape \(5,\); expected images"):
            make_model(name, ragged)
    with pytest.raises(ConfigError, match=r"stem.*'7x7' or '3x3', got '5x5'"):
        build_model("resnet18", (1, 8, 8), 10, {"stem": "5x5"})
    with pytest.raises(ConfigError, match=r"fc_dropout.*less than 1, got 1"):
        build_model("reddi_cnn", (1, 8, 8), 10, {"fc_dropout": 1})
    with pytest.raises(ConfigError, match=r"hidden.*greater than or equal to 1"):
        build_model("dnn", (5,), 3, {"hidden": 0})
    with pytest.raises(ModelError, match="no parameters to train"):
        check_model(nn.Flatten(), ragged)
    with pytest.raises(ModelError, match="cannot take inputs of shape"):
        check_model(nn.Conv2d(1, 3, 3), ragged)


def test_a_factory_of_the_users_own(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, n_classes, *, width=4):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], width), nn.Linear(width, n_classes))\n"
        "def fixed():\n    return nn.Linear(5, 3)\n"
        "def broken(input_shape, n_classes):\n    raise OSError('no disk')\n"
        "def leaves():\n    raise SystemExit(3)\n"
        "def lazy():\n    return nn.LazyLinear(3)\n"
        "def text(input_shape, n_classes):\n    return 'net'\n"
    )
    (tmp_path / "wrong_syntax.py").write_text("def net(:")
    monkeypatch.chdir(tmp_path)
    assert make_model("my_nets:net", ragged, options={"width": 7})[0].out_features == 7  # type: ignore[index]
    assert isinstance(make_model("my_nets:fixed", ragged), nn.Linear)
    for path, message in {
        "my_nets:broken": "failed: OSError: no disk",
        "my_nets:leaves": "failed: SystemExit: 3",
        "my_nets:lazy": "lazy layers",
        "wrong_syntax:net": "cannot import 'wrong_syntax'.*SyntaxError",
        ":": "expected file.py:function or package.module:function",
        ".a:b": "cannot import '.a'",
        "my_nets:text": "returned str",
        "my_nets:nothing": "has no function 'nothing'",
        "no_such_module:net": "cannot import 'no_such_module'",
    }.items():
        with pytest.raises(ModelError, match=message):
            make_model(path, ragged)
