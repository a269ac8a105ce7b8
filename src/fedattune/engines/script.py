"""Several local steps in one call, as TorchScript where that can be had.

A scripted loop does without Python from its first step to its last: it spends less on every operation, and does not
hold the interpreter's lock, so that groups of clients run side by side in threads. PyTorch calls its TorchScript
deprecated, without a successor that runs small operations without Python; the same loop runs unscripted, slower.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data.gather import gather

Samples = tuple[Tensor, Tensor | None, Tensor | None]
"""All samples as they are kept, and what is subtracted from them and multiplied with."""

Body = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
"""body(ready, moving, batch) -> moving."""


class Steps(nn.Module):
    """Takes local steps, each with a batch of its own."""

    def __init__(self, body: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.dtype = body, dtype

    def forward(
        self,
        first: int,
        last: int,
        ahead: int,
        ready: list[Tensor],
        moving: list[Tensor],
        samples: Samples,
        index: Tensor,
        labels: Tensor,
        weights: Tensor | None,
    ) -> list[Tensor]:
        """Take the steps `first` to `last` - 1; `index`, `labels`, `weights` (steps, ...) have all batches.

        Inputs are gathered for `ahead` steps at once. `weights` are there for batches with padding.
        """
        x, shift, scale = samples
        block = x
        for t in range(first, last):
            place = (t - first) % ahead
            if place == 0:
                block = gather(x, index[t : min(t + ahead, last)], shift, scale, self.dtype)
            batch = [block[place], labels[t]]
            if weights is not None:
                batch.append(weights[t])
            moving = self.body(ready, moving, batch)
        return moving


def scripted(body: Body, ready: list[Tensor], moving: list[Tensor], batch: list[Tensor]) -> Body:
    """The body as TorchScript; it is run once on these tensors, none of the lists may be empty.

    Raises:
        RuntimeError: it cannot be had.

    """
    with quiet():
        trace: Callable[..., Body] = torch.jit.trace
        return trace(body, (ready, moving, batch), check_trace=False, strict=False)


def looped(body: Body, dtype: torch.dtype) -> nn.Module:
    """The loop around a scripted body, scripted as well."""
    with quiet():
        steps: nn.Module = torch.jit.script(Steps(body, dtype))
    return steps


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that TorchScript is deprecated, and that a trace is of tensors like these alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
