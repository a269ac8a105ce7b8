"""Which tensors of a model: selectors by module type or name, and the units of mixing."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

Unit = Literal["model", "layer", "tensor"]


@dataclass(frozen=True)
class Selector(ABC):
    """Chooses parameter tensors of a model."""

    @abstractmethod
    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the chosen parameters, in the model's order."""


@dataclass(frozen=True)
class Nothing(Selector):
    """No tensor."""

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Nothing at all."""
        return ()


@dataclass(frozen=True)
class Everything(Selector):
    """Every tensor."""

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """All trainable parameters."""
        return _under(model, [""])


@dataclass(frozen=True)
class Head(Selector):
    """The last `nn.Linear` of the model: its classifier."""

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Weight and bias of the last linear layer; nothing if there is none."""
        heads = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        return _under(model, heads[-1:])


@dataclass(frozen=True)
class Named(Selector):
    """The modules or parameters of the given names, e.g. `Named("features.0", "classifier")`."""

    modules: tuple[str, ...]

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """All parameters under the named modules.

        Raises:
            ValueError: a name that the model does not have.

        """
        known = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
        missing = [m for m in self.modules if m not in known]
        if missing:
            raise ValueError(f"the model has no module or parameter {missing}; it has {sorted(known - {''})}")
        return _under(model, self.modules)


def _under(model: nn.Module, modules: Iterable[str]) -> tuple[str, ...]:
    roots = tuple(modules)
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and any(not root or name == root or name.startswith(root + ".") for root in roots)
    )


def groups(names: Iterable[str], unit: Unit) -> dict[str, list[str]]:
    """Tensor names that share one mixing matrix: all (`model`), those of a module (`layer`), or each alone."""
    out: dict[str, list[str]] = {}
    for name in names:
        key = {"model": "model", "layer": name.rpartition(".")[0] or name, "tensor": name}[unit]
        out.setdefault(key, []).append(name)
    return out
