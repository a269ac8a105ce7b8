"""Check the selectors of personal tensors and of mixed components."""

import pytest
from torch import nn

from fedattune.core.selectors import AllParameters, Head, NamedParameters, NoParameters, group_names


def test_selectors_go_by_module_type() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Softmax(1))
    assert Head().names(model) == ("2.1.weight", "2.1.bias")
    assert Head().names(nn.Conv2d(1, 1, 1)) == ()
    assert NoParameters().names(model) == ()
    assert len(AllParameters().names(model)) == 6
    assert NamedParameters(("2", "0.bias")).names(model) == (
        "0.bias",
        "2.0.weight",
        "2.0.bias",
        "2.1.weight",
        "2.1.bias",
    )
    with pytest.raises(ValueError, match="no module or parameter"):
        NamedParameters(("head",)).names(model)


def test_units_of_mixing() -> None:
    names = ["a.weight", "a.bias", "b.c.weight", "scale"]
    assert group_names(names, "model") == {"model": names}
    assert group_names(names, "layer") == {"a": names[:2], "b.c": names[2:3], "scale": ["scale"]}
    assert group_names(names, "tensor") == {n: [n] for n in names}
