"""Pretrained networks of Hugging Face: LoRA adapters, the head alone, or all weights are trained.

Frozen weights are constants. They are alike for all clients, so they are neither mixed, sent, counted nor saved: a
model's file names the pretrained network and holds the rest.
"""

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.citing import cite
from ..core.errors import ConfigError, ModelError, summarize_error
from ..core.options import Count
from ..data.tables.texts import require_transformers
from ..data.types import Shape

Tuning = Literal["lora", "head", "all"]
"""The weights that are trained: adapters and the head, the head alone, or all."""
PixelRange = Literal["unit", "half", "ready"]
"""Values of images that come in: 0 to 1, -1 to 1, or already as the pretrained network wants them."""
ACTIVATIONS_PER_UNIT = 16
"""Numbers that one hidden unit of one layer keeps for the gradient, roughly."""
MASK_TOLERANCE = 1e-4
"""Largest relative difference of outputs at which two forms of the attention mask count as the same."""


@cite(
    """
@inproceedings{wolf2020transformers,
  author = {Wolf, Thomas and Debut, Lysandre and Sanh, Victor and Chaumond, Julien and Delangue, Clement and
    Moi, Anthony and Cistac, Pierric and Rault, Tim and Louf, Rémi and Funtowicz, Morgan and Davison, Joe
    and Shleifer, Sam and von Platen, Patrick and Ma, Clara and Jernite, Yacine and Plu, Julien and Xu,
    Canwen and Le Scao, Teven and Gugger, Sylvain and Drame, Mariama and Lhoest, Quentin and Rush, Alexander
    M.},
  title = {Transformers: State-of-the-Art Natural Language Processing},
  booktitle = {Conference on Empirical Methods in Natural Language Processing: System Demonstrations},
  year = {2020},
  eprint = {1910.03771},
  archiveprefix = {arXiv}
}
""",
    """
@inproceedings{hu2022lora,
  author = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and
    Wang, Shean and Wang, Lu and Chen, Weizhu},
  title = {LoRA: Low-Rank Adaptation of Large Language Models},
  booktitle = {International Conference on Learning Representations (ICLR)},
  year = {2022},
  eprint = {2106.09685},
  archiveprefix = {arXiv}
}
""",
)
def hf(
    input_shape: Shape,
    n_classes: int,
    *,
    id: str | None = None,  # noqa: A002 (the name of the option)
    tuning: Tuning = "lora",
    rank: Count = 8,
    alpha: Count = 16,
    targets: str | None = None,
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None,
    pixels: PixelRange = "unit",
    size: Count | None = None,
    revision: str | None = None,
) -> nn.Module:
    """A pretrained network of Hugging Face transformers, by id or folder, with LoRA or head-only tuning.

    Sequences of token numbers get a network for texts, images one for images. The head is new, and its weights depend
    on the run's seed.

    Args:
        input_shape: (tokens,) of a text, or channels, height and width of an image.
        n_classes: number of classes; 1 for a number.
        id: id on the Hugging Face hub, or a folder that `save_pretrained` wrote.
        tuning: `lora` trains adapters and the head, `head` the head alone, `all` every weight.
        targets: ends of the names of the layers that get adapters, separated by commas; by default peft's choice for
            the network, or else all its linear layers.
        dropout: rate of all dropout layers; by default the network's own.
        pixels: values of the images that come in: `unit` (0 to 1), `half` (-1 to 1), or `ready` for the network.
        size: height and width to which images are resized; by default the network's own.

    Raises:
        ConfigError: the id is missing, or packages are.
        ModelError: the network cannot be loaded, or does not suit the data.
    """
    if id is None:
        raise ConfigError("hf needs a pretrained network: give --set hf.id=ID_OR_FOLDER")
    require_transformers("the model hf", *(["peft"] if tuning == "lora" else []))
    if len(input_shape) not in (1, 3):
        raise ModelError(f"hf: got samples of shape {input_shape}, expected token numbers (length,) or images")
    is_text = len(input_shape) == 1
    with _quiet_transformers():
        net, new = _load_network(id, revision, n_classes, is_text)
        _set_dropout(net, dropout)
        names = None if targets is None else [name.strip() for name in targets.split(",") if name.strip()]
        _choose_trained(net, new, tuning, rank, alpha, names)
    if is_text:
        return TextNetwork(net, input_shape[0])
    return ImageNetwork(net, input_shape, pixels, size, _read_normalization(id, revision))


class PretrainedNetwork(nn.Module):
    """A pretrained network behind the interface of all models: a tensor in, logits (B, classes) out."""

    activations_per_value: int
    """Numbers that training keeps for each input value; see `Task.activations_per_value`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.pretrained = net

    @abstractmethod
    def check_inputs(self, x: Tensor) -> None:
        """Refuse inputs (B, ...) that the network would misread."""


class TextNetwork(PretrainedNetwork):
    """Token numbers (B, length), below 0 where there is no token, to logits (B, classes)."""

    def __init__(self, net: nn.Module, length: int) -> None:
        super().__init__(net)
        config = cast(Any, net).config
        self.vocabulary = int(config.vocab_size)
        longest = getattr(config, "max_position_embeddings", None)
        skipped = [
            m.padding_idx
            for name, m in net.named_modules()
            if name.endswith("position_embeddings") and isinstance(m, nn.Embedding) and m.padding_idx is not None
        ]
        if isinstance(longest, int) and skipped:  # RoBERTa counts positions from the one after the padding's
            longest -= max(skipped) + 1
        if isinstance(longest, int) and length > longest:
            raise ModelError(
                f"hf: got {length} inputs for each sample, and the network takes at most {longest} tokens; read a text "
                f"column with --set table.tokens=ID_OR_FOLDER and --set table.max_tokens={longest} or less"
            )
        self.padding = config.pad_token_id
        self.has_square_mask = False
        self.activations_per_value = _count_activations(config, length)
        self.has_square_mask = self._accepts_square_mask(length)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.long()
        is_token = ids >= 0
        mask = is_token.long()
        if self.has_square_mask:
            # In this form transformers does not look at the mask's values, so that vmap and graphs are possible.
            min_value = torch.finfo(self._dtype).min
            mask = torch.zeros_like(ids, dtype=self._dtype).masked_fill(~is_token, min_value)[:, None, None, :]
            mask = mask.expand(-1, 1, ids.shape[1], -1)
        ids = torch.where(is_token, ids, self.padding)
        return cast(Tensor, self.pretrained(input_ids=ids, attention_mask=mask).logits)

    def check_inputs(self, x: Tensor) -> None:
        if bool((x != x.round()).any()):
            raise ModelError(
                "hf: got fractions, expected token numbers; read a text column with --set table.tokens=ID_OR_FOLDER"
            )
        if int(x.max()) >= self.vocabulary:
            raise ModelError(
                f"hf: got token {int(x.max())}, but the network knows {self.vocabulary:,} tokens; give the network's "
                "own tokenizer as --set table.tokens=ID_OR_FOLDER"
            )

    @property
    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.pretrained.parameters() if p.is_floating_point())

    def _accepts_square_mask(self, length: int) -> bool:
        """Tell whether the network gives the same outputs with a mask (B, 1, length, length); causal ones do not."""
        n = min(length, 6)
        x = torch.randint(0, self.vocabulary, (2, n), generator=torch.Generator().manual_seed(0))
        x[0, n // 2 + 1 :] = -1
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                expected = self(x)
                self.has_square_mask = True
                largest = float((self(x) - expected).abs().max())
            return largest <= MASK_TOLERANCE * float(expected.abs().max())
        except Exception:  # many networks take no such mask
            return False
        finally:
            self.train(was_training)


class ImageNetwork(PretrainedNetwork):
    """Images (B, channels, height, width) to logits (B, classes); images are resized and normalised before."""

    def __init__(
        self, net: nn.Module, input_shape: Shape, pixels: PixelRange, size: int | None, normalization: dict[str, Any]
    ) -> None:
        super().__init__(net)
        config = cast(Any, net).config
        self.pixels = pixels
        self.channels = int(getattr(config, "num_channels", 3))
        if input_shape[0] not in (1, self.channels):
            raise ModelError(f"hf: got images of {input_shape[0]} channels, and the network takes {self.channels}")
        self.size = _choose_size(config, normalization, input_shape, size)
        self.mean, self.deviation = (
            nn.Parameter(torch.tensor(one or [0.5] * self.channels).view(-1, 1, 1), requires_grad=False)
            for one in map(normalization.get, ("image_mean", "image_std"))
        )
        values = max(1, math.prod(input_shape))
        patch = getattr(config, "patch_size", None)
        area = self.size[0] * self.size[1]
        if isinstance(patch, int):
            tokens = area // patch**2 + 1
            self.activations_per_value = max(1, tokens * _count_activations(config, tokens) // values)
        else:
            self.activations_per_value = max(1, 64 * self.channels * area // values)

    def forward(self, x: Tensor) -> Tensor:
        if self.pixels == "half":
            x = (x + 1) / 2
        if x.shape[1] < self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        if x.shape[-2:] != self.size:
            x = functional.interpolate(x, self.size, mode="bilinear", align_corners=False)
        if self.pixels != "ready":
            x = (x - self.mean) / self.deviation
        return cast(Tensor, self.pretrained(pixel_values=x).logits)

    def check_inputs(self, x: Tensor) -> None:
        low, high = {"unit": (0, 1), "half": (-1, 1)}.get(self.pixels, (-math.inf, math.inf))
        if not low - 1e-3 <= float(x.min()) <= float(x.max()) <= high + 1e-3:
            raise ModelError(
                f"hf: got images with values from {float(x.min()):.3g} to {float(x.max()):.3g}, expected {low} to "
                f"{high}; scale them with --set data.scaling=unit, or say what they are with --set hf.pixels=half or "
                "ready"
            )


def _load_network(
    name: str, revision: str | None, n_classes: int, is_text: bool
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Load a network with a new head for `n_classes` outputs; return its new weights too, which need training."""
    import transformers

    kind = "AutoModelForSequenceClassification" if is_text else "AutoModelForImageClassification"
    try:
        config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        config.num_labels = n_classes
        if is_text and config.pad_token_id is None:
            config.pad_token_id = _choose_padding(config)
        net, report = getattr(transformers, kind).from_pretrained(
            name,
            config=config,
            revision=revision,
            dtype=torch.float32,
            trust_remote_code=False,  # else the library may ask to run code of the hub
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises many kinds
        raise ModelError(
            f"hf: the network {name!r} cannot be loaded for {'texts' if is_text else 'images'} "
            f"({summarize_error(error)}); give an id of the Hugging Face hub or a folder that save_pretrained wrote"
        ) from error
    return net, [net.get_parameter(key) for key in report["missing_keys"] if key in dict(net.named_parameters())]


def _choose_padding(config: Any) -> int:
    """Choose the token that fills texts of a network without one for padding: the end of text, which no text has.

    The mask hides it, but such a network predicts from the last token that is another one.
    """
    end = getattr(config, "eos_token_id", None)
    end = end[0] if isinstance(end, list) and end else end
    return end if isinstance(end, int) and 0 <= end < int(config.vocab_size) else 0


def _count_activations(config: Any, length: int) -> int:
    """Estimate the numbers that training keeps for each token."""
    hidden = int(getattr(config, "hidden_size", 256) or 256)
    layers = int(getattr(config, "num_hidden_layers", 12) or 12)
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    return layers * (ACTIVATIONS_PER_UNIT * hidden + 3 * heads * length)


def _choose_size(config: Any, normalization: dict[str, Any], input_shape: Shape, size: int | None) -> tuple[int, int]:
    """Choose height and width of the images that the network gets."""
    if size is not None:
        return size, size
    known = getattr(config, "image_size", None) or normalization.get("crop_size") or normalization.get("size")
    if isinstance(known, dict):
        side = known.get("shortest_edge")
        known = (known.get("height", side), known.get("width", side))
    if isinstance(known, int):
        known = (known, known)
    if isinstance(known, list | tuple) and len(known) == 2 and all(isinstance(one, int) for one in known):
        return int(known[0]), int(known[1])
    return input_shape[1], input_shape[2]


def _read_normalization(name: str, revision: str | None) -> dict[str, Any]:
    """Read how a network wants its images; a folder without this file wants mean and deviation 0.5."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        return dict(ImageProcessingMixin.get_image_processor_dict(name, revision=revision)[0])
    except Exception:  # OSError where there is none
        return {}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the library's reports about new heads and its progress bars."""
    from transformers.utils import logging as library_logging

    bars: Any = library_logging  # its functions have no types
    logger = logging.getLogger("transformers")
    level = logger.level
    had_bar = bars.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bar:
            bars.enable_progress_bar()


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


def _choose_trained(
    net: nn.Module, new: list[nn.Parameter], tuning: Tuning, rank: int, alpha: int, targets: list[str] | None
) -> None:
    """Freeze all weights that are not trained, and add adapters to the layers whose names end in `targets`."""
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


def _add_adapters(backbone: nn.Module, trained: set[int], rank: int, alpha: int, targets: list[str] | None) -> None:
    """Put LoRA adapters into a backbone, beside its frozen layers; layers with a weight of `trained` need none."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    kind = cast(Any, backbone).config.model_type
    frozen = {
        name: module
        for name, module in backbone.named_modules()
        if not any(id(parameter) in trained for parameter in module.parameters(recurse=False))
    }
    linear = {k: one for k, one in frozen.items() if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D"}
    suitable = linear or {k: one for k, one in frozen.items() if isinstance(one, nn.Conv2d)}
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    chosen = targets or known or sorted(suitable)
    modules = [name for name in suitable if any(f".{name}".endswith(f".{end}") for end in chosen)]
    if not modules:
        ends = sorted({name.rpartition(".")[2] for name in suitable})
        raise ConfigError(f"hf.targets: no layer ends in {', '.join(chosen)}; the network has {', '.join(ends)}")
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
        if not isinstance(module, _BatchNorm):
            for name, buffer in list(module.named_buffers(recurse=False)):
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _set_dropout(net: nn.Module, rate: float | None) -> None:
    """Set the rate of all dropout layers, and of those that attention draws by itself."""
    if rate is None:
        return
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)
