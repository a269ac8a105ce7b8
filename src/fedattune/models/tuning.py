"""Choose the weights of a pretrained network that are trained: adapters and the head, the head alone, or all."""

from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import ConfigError, ModelError

Tuning = Literal["lora", "head", "all"]
"""The weights that are trained: adapters and the head, the head alone, or all."""


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with constants in place of statistics, for a network whose weights are frozen."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: nn.Parameter | None
    running_var: nn.Parameter | None

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(norm, name)
            constant = None if value is None else nn.Parameter(value.detach().clone(), requires_grad=False)
            self.register_parameter(name, constant)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of pretraining, in training too."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )


def choose_trained(
    net: nn.Module,
    new: list[nn.Parameter],
    tuning: Tuning,
    rank: int,
    alpha: int,
    targets: list[str] | None,
) -> None:
    """Freeze all weights that are not trained, and add adapters.

    Args:
        net: the network.
        new: weights that were not in the pretrained network's files.
        tuning: the weights to train.
        rank: rank of the adapters.
        alpha: the adapters are scaled by alpha / rank.
        targets: ends of the names of layers that get adapters; None lets peft choose.
    """
    prefix = str(cast(Any, net).base_model_prefix)
    backbone = getattr(net, prefix, None)
    if not isinstance(backbone, nn.Module):
        raise ModelError(f"hf: {type(net).__name__} has no part {prefix!r} before its head")
    if tuning != "all":
        net.requires_grad_(False)
        _freeze_norms(net)
        if tuning == "lora":
            _add_adapters(backbone, {id(one) for one in new}, rank, alpha, targets)
        for name, parameter in net.named_parameters():
            if not name.startswith(f"{prefix}."):
                parameter.requires_grad_(True)
        for parameter in new:
            parameter.requires_grad_(True)
    elif targets is not None:
        raise ConfigError("hf: targets go with tuning=lora only")
    _freeze_buffers(net)


def _add_adapters(
    backbone: nn.Module, trained: set[int], rank: int, alpha: int, targets: list[str] | None
) -> None:
    """Put LoRA adapters into a backbone, beside its frozen layers; layers with a weight of `trained` need none."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    kind = cast(Any, backbone).config.model_type
    frozen = {
        name: module
        for name, module in backbone.named_modules()
        if not any(id(parameter) in trained for parameter in module.parameters(recurse=False))
    }
    suitable = {
        name: module
        for name, module in frozen.items()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    } or {name: module for name, module in frozen.items() if isinstance(module, nn.Conv2d)}
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    chosen = targets or known or sorted(suitable)
    modules = [name for name in suitable if any(f".{name}".endswith(f".{end}") for end in chosen)]
    if not modules:
        ends = sorted({name.rpartition(".")[2] for name in suitable})
        raise ConfigError(
            f"hf.targets: no layer ends in {', '.join(chosen)}; the network has {', '.join(ends)}"
        )
    is_transposed = any(type(suitable[name]).__name__ == "Conv1D" for name in modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, fan_in_fan_out=is_transposed)
    inject_adapter_in_model(config, backbone)


def _freeze_norms(net: nn.Module) -> None:
    """Replace batch normalisation by its constants."""
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(module, name, FrozenBatchNorm(child))


def _freeze_buffers(net: nn.Module) -> None:
    """Turn buffers into frozen parameters, because buffers are kept per client; batch statistics stay buffers."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            continue
        for name, buffer in list(module.named_buffers(recurse=False)):
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def set_dropout(net: nn.Module, rate: float | None) -> None:
    """Set the rate of all dropout layers, and of those that attention draws by itself."""
    if rate is None:
        return
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)
