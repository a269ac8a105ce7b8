"""Parameter counts of the papers' models (specification 8), and models of the user's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedattune import ConfigError, Federation, ModelError
from fedattune.models import build_model, check_model, make_model
from fedattune.select import Everything, Head, Named, Nothing, groups


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "count"),
    [
        ("mlr", (60,), 10, {}, 610),
        ("mlr", (1, 28, 28), 10, {}, 7_850),
        ("mlr", (3, 32, 32), 10, {}, 30_730),
        ("dnn", (60,), 10, {"hidden": 20}, 1_430),
        ("dnn", (1, 28, 28), 10, {}, 79_510),
        ("dnn", (3, 32, 32), 10, {}, 308_310),
        ("cnn", (1, 28, 28), 10, {}, 582_026),
        ("cnn", (3, 32, 32), 10, {}, 878_538),
        ("cnn", (3, 32, 32), 100, {}, 924_708),
        ("cnn", (3, 64, 64), 200, {}, 5_694_600),
    ],
)
def test_parameter_counts(name: str, shape: Any, classes: int, options: Any, count: int) -> None:
    model = build_model(name, shape, classes, options)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_the_seed_alone_decides_the_initial_weights(ragged: Federation) -> None:
    torch.manual_seed(1)
    a = make_model("dnn", ragged, seed=3)
    torch.manual_seed(2)
    b, c = make_model("dnn", ragged, seed=3), make_model("dnn", ragged, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_models_that_do_not_fit_are_refused(ragged: Federation) -> None:
    with pytest.raises(ConfigError, match="expected images"):
        make_model("cnn", ragged)
    with pytest.raises(ConfigError, match="too small"):
        build_model("cnn", (1, 8, 8), 10, {})
    with pytest.raises(ConfigError, match=r"hidden.*greater than or equal to 1"):
        build_model("dnn", (5,), 3, {"hidden": 0})
    with pytest.raises(ModelError, match="no parameters to train"):
        check_model(nn.Flatten(), ragged)
    with pytest.raises(ModelError, match="cannot take inputs of shape"):
        check_model(nn.Conv2d(1, 3, 3), ragged)


def test_a_factory_of_the_users_own(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ":": "cannot import ''",
        ".a:b": "cannot import '.a'",
        "my_nets:text": "returned str",
        "my_nets:nothing": "has no function 'nothing'",
        "no_such_module:net": "cannot import 'no_such_module'",
    }.items():
        with pytest.raises(ModelError, match=message):
            make_model(path, ragged)


def test_selectors_go_by_module_type() -> None:
    model = nn.Sequential(
        nn.Linear(5, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Softmax(1)
    )
    assert Head().names(model) == ("2.1.weight", "2.1.bias")
    assert Head().names(nn.Conv2d(1, 1, 1)) == ()
    assert Nothing().names(model) == ()
    assert len(Everything().names(model)) == 6
    assert Named(("2", "0.bias")).names(model) == (
        "0.bias",
        "2.0.weight",
        "2.0.bias",
        "2.1.weight",
        "2.1.bias",
    )
    with pytest.raises(ValueError, match="no module or parameter"):
        Named(("head",)).names(model)


def test_units_of_mixing() -> None:
    names = ["a.weight", "a.bias", "b.c.weight", "scale"]
    assert groups(names, "model") == {"model": names}
    assert groups(names, "layer") == {"a": names[:2], "b.c": names[2:3], "scale": ["scale"]}
    assert groups(names, "tensor") == {n: [n] for n in names}
