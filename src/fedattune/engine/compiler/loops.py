"""Run several compiled steps in one call: as a loop, or on a GPU as replays of one CUDA graph.

Small models of a few clients keep a GPU busy for less time than Python takes to launch their operations.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...data.federated import gather


class StepBatches(NamedTuple):
    """The batches of several steps.

    Attributes:
        x: all samples as stored, from which a step gathers its own.
        shift, scale: what is subtracted from samples, then multiplied with them.
        rows: sample numbers of all batches (steps, ...).
        moves: moves of all samples (steps, ...), for images that are augmented.
        labels: labels of all batches (steps, ...).
        weights: weights of all batches (steps, ...), for batches with padding.
        noise: noise of the steps of one call (its steps, ...), for private gradients.
    """

    x: Tensor
    shift: Tensor | None
    scale: Tensor | None
    rows: Tensor
    moves: Tensor | None
    labels: Tensor
    weights: Tensor | None
    noise: Tensor | None


StepBody = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
"""body(ready, moving, batch) -> moving."""


class StepLoop(nn.Module):
    """Run local steps, each with its own batch."""

    def __init__(self, body: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.dtype = body, dtype

    def forward(
        self, first: int, last: int, ready: list[Tensor], moving: list[Tensor], batches: StepBatches
    ) -> list[Tensor]:
        """Run the steps `first` to `last` - 1; return the moving leaves after the last one."""
        x, shift, scale, rows, moves, labels, weights, noise = batches
        for t in range(first, last):
            moved = None if moves is None else moves[t]
            batch = [gather(x, rows[t], shift, scale, self.dtype, moved), labels[t]]
            if weights is not None:
                batch.append(weights[t])
            if noise is not None:
                batch.append(noise[t - first])
            moving = self.body(ready, moving, batch)
        return moving


MAX_GRAPHS = 16
"""Graphs that stay in memory; a dropped one is captured again when it is needed."""


class _CapturedStep(NamedTuple):
    """A graph of one step, and the memory that it reads and writes.

    `key` is what the graph holds for: where the samples lie, and the layouts of all other tensors. `batch` are sample
    numbers, labels, and weights and noise if there are any; moves follow the sample numbers.
    """

    key: tuple[Any, ...]
    graph: torch.cuda.CUDAGraph
    ready: list[Tensor]
    moving: list[Tensor]
    batch: list[Tensor]


class GraphLoop(nn.Module):
    """Run local steps as `StepLoop` does, from a graph that is captured at the first call with tensors like these.

    If an operation waits for the GPU, or memory is short, no graph can be captured. Then Python runs the steps.
    """

    _in_memory: ClassVar[list["weakref.ref[GraphLoop]"]] = []

    def __init__(self, body: StepBody, dtype: torch.dtype) -> None:
        super().__init__()
        self._body, self._dtype = body, dtype
        self._captured: _CapturedStep | None = None
        self._can_capture = True

    def forward(
        self, first: int, last: int, ready: list[Tensor], moving: list[Tensor], batches: StepBatches
    ) -> list[Tensor]:
        """Run the steps `first` to `last` - 1; the next call writes over the leaves that are returned."""
        samples, noise = batches[:3], batches.noise

        def batch(t: int) -> list[Tensor]:
            one = [of_all[t] for of_all in batches[3:7] if of_all is not None]
            return one if noise is None else [*one, noise[t - first]]

        places = tuple(None if t is None else t.data_ptr() for t in samples)
        key = places, *(tensor_layouts(group) for group in (ready, moving, batch(first)))
        if self._can_capture and (self._captured is None or self._captured.key != key):
            self._captured = None  # before the next one takes memory
            try:
                self._captured = self._capture(key, ready, moving, batches, batch(first))
            except RuntimeError:
                self._can_capture = False
        if self._captured is None:
            loop: Any = StepLoop(self._body, self._dtype)
            moved: list[Tensor] = loop(first, last, ready, moving, batches)
            return moved
        step = self._captured
        for target, source in zip((*step.ready, *step.moving), (*ready, *moving), strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        for t in range(first, last):
            torch._foreach_copy_(step.batch, batch(t))
            step.graph.replay()
        return list(step.moving)

    def _capture(
        self, key: tuple[Any, ...], ready: list[Tensor], moving: list[Tensor], batches: StepBatches, batch: list[Tensor]
    ) -> _CapturedStep:
        self._make_room()
        ready, moving, batch = ([t.clone() for t in group] for group in (ready, moving, batch))
        owned = {t.untyped_storage().data_ptr() for t in moving}
        x, shift, scale = batches[:3]
        has_moves = batches.moves is not None

        def run() -> None:
            inputs = gather(x, batch[0], shift, scale, self._dtype, batch[1] if has_moves else None)
            new = self._body(ready, list(moving), [inputs, *batch[1 + has_moves :]])
            # A result in the memory of another leaf must be read before that leaf is written.
            new = [t.clone() if t.untyped_storage().data_ptr() in owned else t for t in new]
            torch._foreach_copy_(moving, new)

        stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        now = torch.cuda.current_stream(x.device)
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            run()  # libraries allocate their workspaces in a first call
        now.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The outer context restores the stream: after a failed capture, the inner one does not.
        with torch.cuda.stream(now), torch.cuda.graph(graph, stream=stream):
            run()
        return _CapturedStep(key, graph, ready, moving, batch)

    def _make_room(self) -> None:
        """Drop the oldest graphs of this process; a graph holds the activations of a step."""
        kept = [loop for ref in GraphLoop._in_memory if (loop := ref()) is not None and loop is not self]
        for loop in kept[: max(0, len(kept) - MAX_GRAPHS + 1)]:
            loop._captured = None
        GraphLoop._in_memory[:] = [weakref.ref(loop) for loop in [*kept, self][-MAX_GRAPHS:]]


def tensor_layouts(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the shape, strides and type of each tensor."""
    return tuple((t.shape, t.stride(), t.dtype) for t in tensors)
