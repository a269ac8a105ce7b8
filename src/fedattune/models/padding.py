"""Tell a model what is padding in sequences of unequal length."""

import inspect
from typing import cast

import torch
from torch import Tensor, nn

from ..core.errors import ModelError

ARGUMENTS = ("padding_mask", "lengths")
"""Names of the arguments that a model's `forward` may take beside x."""


class WithPadding(nn.Module):
    """A model of sequences of unequal length, which `federation_from` and `pad_sequences` have padded.

    It calls `model(x, padding_mask=...)`, `model(x, lengths=...)`, or both, as the model's `forward` names them. Here x
    is token numbers (B, length), int64, with 0 for padding, or features (B, length, F) with zeros for padding;
    `padding_mask` (B, length), bool, is True at padding, as `src_key_padding_mask` of PyTorch; `lengths` (B,), int64,
    are at least 1.

    Args:
        model: the model.

    Raises:
        ModelError: the model's `forward` takes neither `padding_mask` nor `lengths`.

    Examples:
        >>> import torch
        >>> class Mean(nn.Module):
        ...     def forward(self, x, lengths):
        ...         return x.sum(1) / lengths[:, None]
        >>> from fedattune import pad_sequences
        >>> WithPadding(Mean())(pad_sequences([torch.tensor([1.0, 2.0]), torch.tensor([4.0])])).tolist()
        [[1.5], [4.0]]
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parameters = inspect.signature(model.forward).parameters
        self.model = model
        self.arguments = tuple(name for name in ARGUMENTS if name in parameters)
        if not self.arguments:
            raise ModelError(
                f"the forward of the model {type(model).__name__} takes {', '.join(parameters) or 'nothing'}, expected "
                "an argument padding_mask or lengths beside x; name one so"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output for padded sequences (B, length), or (B, length, F + 1)."""
        if x.dim() == 2:  # token numbers; those of a table are floating-point numbers
            tokens = x.long()
            if x.is_floating_point() and "lengths" in self.arguments:
                tokens = _move_to_front(tokens)
            padding_mask, x = tokens < 0, tokens.clamp_min(0)
        else:
            padding_mask, x = x[..., -1] == 0, x[..., :-1]
        found = {"padding_mask": padding_mask, "lengths": (~padding_mask).sum(1).clamp_min(1)}
        return cast(Tensor, self.model(x, **{name: found[name] for name in self.arguments}))


def _move_to_front(tokens: Tensor) -> Tensor:
    """Move padding before the tokens (B, length) behind them: characters of a table stand at the end of their row."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    first = (tokens >= 0).long().argmax(1, keepdim=True)
    return tokens.gather(1, (places + first) % tokens.shape[1])
