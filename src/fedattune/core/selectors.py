"""Select tensors of a model by module type or name, and group tensors into units of mixing."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .errors import ConfigError
from .params import find_component, find_layer

Unit = Literal["model", "layer", "tensor"]
"""Unit that shares one mixing matrix: the whole model, the tensors of a module, or each tensor."""


@dataclass(frozen=True)
class Selector(ABC):
    """Selects parameter tensors of a model."""

    @abstractmethod
    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the selected parameters, in the model's order."""


@dataclass(frozen=True)
class NoParameters(Selector):
    """No tensor."""

    def names(self, model: nn.Module) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class AllParameters(Selector):
    """Every tensor."""

    def names(self, model: nn.Module) -> tuple[str, ...]:
        return _names_under(model, [""])


@dataclass(frozen=True)
class Head(Selector):
    """The classifier: the last `nn.Linear` of the model, and the `layers` - 1 layers before it.

    `module` names another linear layer to end with.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> Head().names(model)
        ('2.weight', '2.bias')
    """

    layers: int = 1
    module: str | None = None

    def names(self, model: nn.Module) -> tuple[str, ...]:
        own = [k for k, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        linear = [k for k in own if isinstance(model.get_submodule(k), nn.Linear)]
        if self.module is not None and self.module not in linear:
            raise ConfigError(f"head: got {self.module!r}, expected a linear layer of the model: {', '.join(linear)}")
        if not linear or not self.layers:
            return ()
        end = own.index(self.module or linear[-1]) + 1
        return _names_under(model, own[max(0, end - self.layers) : end])


@dataclass(frozen=True)
class BatchNorms(Selector):
    """Scale and shift of all BatchNorm layers, by module type."""

    def names(self, model: nn.Module) -> tuple[str, ...]:
        return _names_under(model, [k for k, m in model.named_modules() if isinstance(m, _BatchNorm)])


@dataclass(frozen=True)
class AnyOf(Selector):
    """The union of several selections."""

    selectors: tuple[Selector, ...]

    def names(self, model: nn.Module) -> tuple[str, ...]:
        union = {name for selector in self.selectors for name in selector.names(model)}
        return tuple(name for name, _ in model.named_parameters() if name in union)


@dataclass(frozen=True)
class AllBut(Selector):
    """All tensors that another selector leaves out.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> AllBut(Head()).names(model)
        ('0.weight', '0.bias')
    """

    selector: Selector

    def names(self, model: nn.Module) -> tuple[str, ...]:
        left_out = self.selector.names(model)
        return tuple(name for name in AllParameters().names(model) if name not in left_out)


@dataclass(frozen=True)
class NamedParameters(Selector):
    """Modules or parameters by name.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> NamedParameters(("0.bias", "2")).names(model)
        ('0.bias', '2.weight', '2.bias')
    """

    modules: tuple[str, ...]

    def names(self, model: nn.Module) -> tuple[str, ...]:
        names = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
        missing = [m for m in self.modules if m not in names]
        if missing:
            raise ValueError(f"the model has no module or parameter {missing}; it has {sorted(names - {''})}")
        return _names_under(model, self.modules)


def _names_under(model: nn.Module, modules: Iterable[str]) -> tuple[str, ...]:
    roots = tuple(modules)
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and any(not root or name == root or name.startswith(root + ".") for root in roots)
    )


def group_names(names: Iterable[str], unit: Unit) -> dict[str, list[str]]:
    """Group the names of tensors that share one mixing matrix; return component -> its tensors."""
    if unit not in get_args(Unit):
        raise ConfigError(f"unit: got {unit!r}, expected {', '.join(get_args(Unit))}")
    out: dict[str, list[str]] = {}
    for name in names:
        key = {"model": "model", "layer": find_layer(name), "tensor": find_component(name)}[unit]
        out.setdefault(key, []).append(name)
    return out
