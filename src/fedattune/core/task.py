"""Turn a model and its loss into pure functions of parameters and buffers."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .errors import ModelError, summarize_error
from .gradient import differentiate, sum_clipped, take_gradient
from .hardware import seed_rng
from .losses import CLASS_WEIGHTS, DEFAULT_LOSS, TrainingLoss
from .network import MethodModule
from .params import Params
from .payload import Batch
from .targets import TargetKind

MAX_ACTIVATIONS = 1 << 27
"""Activations of one call that predicts with a large model: half a gigabyte."""

SAMPLE_GRADIENT_BYTES = 1 << 24
"""Bytes of the gradients of single samples that one client keeps at a time."""

SAME_OUTPUTS = 1e-4
"""Share of the largest output up to which outputs differ by rounding."""


def trainable_params(model: nn.Module) -> Params:
    """Return the parameters that training may change; frozen parameters stay in the model, alike for all clients."""
    return Params({k: v.detach() for k, v in model.named_parameters() if v.requires_grad})


def count_activations(model: nn.Module) -> int:
    """Return the numbers that a model keeps for each input value in training, if it declares them; else 1.

    Pretrained networks do: their activations take far more memory than their inputs and trained weights.
    """
    return max(int(getattr(m, "activations_per_value", 1)) for m in model.modules())


def limit_samples(model: nn.Module, max_samples: int, input_values: int) -> int:
    """Return how many samples one call may predict, so that large activations fit into memory."""
    activations = count_activations(model)
    if activations == 1:
        return max_samples
    return max(1, min(max_samples, MAX_ACTIVATIONS // (activations * max(1, input_values))))


class _Caller(nn.Module):
    """Call functions with a model, while `functional_call` gives it other values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model)


class PlainAttention(TorchFunctionMode):
    """Keep attention layers from the fused prediction of PyTorch.

    `vmap` has no rule for it, and with a padding mask it cuts off what is padding in the whole batch.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class ModelTraits(NamedTuple):
    """Effects of a forward pass beside its outputs; see `Task.inspect`.

    Attributes:
        mixes_rows: in training, the outputs for a row, or buffers, depend on the other rows of the batch.
        writes_inputs: it writes over its inputs.
        writes_values: in evaluation, it writes over parameters or buffers.
    """

    mixes_rows: bool = False
    writes_inputs: bool = False
    writes_values: bool = False


class _Pass(NamedTuple):
    """One forward pass: what depends on the first row, and whether it wrote over inputs or over other tensors."""

    results: list[Tensor]
    writes_inputs: bool
    writes_values: bool


@dataclass(frozen=True)
class Task:
    """The model to train as a stateless function; buffers are passed in and out."""

    model: nn.Module
    mixed_precision: bool = False  # train with matrix products and convolutions in bfloat16
    loss: TrainingLoss = DEFAULT_LOSS  # of training; models are evaluated by `compute_loss`
    params: Params = field(init=False)
    buffers: Params = field(init=False)
    traits: ModelTraits | None = field(init=False, default=None)  # None before `inspect`

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", trainable_params(self.model).map(torch.clone))
        object.__setattr__(self, "buffers", Params({k: v.detach().clone() for k, v in self.model.named_buffers()}))

    def to(self, device: torch.device, dtype: torch.dtype) -> "Task":
        """Move all tensors to a device, and floating-point tensors to a type."""
        return Task(self.model.to(device=device, dtype=dtype), self.mixed_precision, self.loss)

    def twin(self) -> "Task":
        """Copy the task and its module, but not the tensors, so that two threads can run it at the same time."""
        same = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        other = copy.copy(self)
        object.__setattr__(other, "model", copy.deepcopy(self.model, same))
        return other

    @property
    def has_batch_statistics(self) -> bool:
        """True if the model normalises over the batch, or mixes its rows; padding would then change the result."""
        own = isinstance(self.model, MethodModule) and self.model.has_batch_loss
        return own or (self.traits or ModelTraits()).mixes_rows or any(map(_keeps_statistics, self.model.modules()))

    @property
    def writes_inputs(self) -> bool:
        """True if the model writes over its inputs, so that nobody can use them after it."""
        return self.traits is not None and self.traits.writes_inputs

    def inspect(self, x: Tensor) -> None:
        """Find out at the first call what the model does with a batch (B, ...), by a few passes of copies.

        A layer is known by its type, but not what a `forward` does.
        """
        if self.traits is not None:
            return
        if len(x) == 1 or torch.equal(x, x[:1].expand_as(x)):
            x = torch.cat([x[:1], torch.zeros_like(x[:1])])
        training, predicting = (self._try_pass(x, is_training=is_training) for is_training in (True, False))
        traits = ModelTraits(
            training is not None and not self.has_batch_statistics and self._mixes_rows(x),
            any(one is not None and one.writes_inputs for one in (training, predicting)),
            predicting is not None and predicting.writes_values,
        )
        object.__setattr__(self, "traits", traits)

    def _mixes_rows(self, x: Tensor) -> bool:
        """Tell whether the first row has other outputs, or buffers other values, with other rows beside it."""
        batches = (x, x[:1].expand_as(x), x)
        passes = [self._try_pass(batch, is_training=True, drops_out=False) for batch in batches]
        first, alone, again = (None if one is None else one.results for one in passes)
        if first is None or alone is None or again is None:
            return False
        return _differ(first, alone) and not _differ(first, again)  # else it never gives the same twice

    def _try_pass(self, x: Tensor, *, is_training: bool, drops_out: bool = True) -> _Pass | None:
        """Run a copy of the module once on copies of all tensors, each time with the same random numbers.

        Without dropout: how many numbers its layers draw may depend on other rows, as in packed sequences.
        """
        given, x, n = x, x.clone(), len(x)
        old, values = self.params | self.buffers, {k: v.clone() for k, v in (self.params | self.buffers).items()}
        states = random.getstate(), np.random.get_state()
        try:
            model = self.twin().model.train(is_training)  # numbers that a module counts stay as they are
            for layer in () if drops_out else model.modules():
                if isinstance(layer, _DropoutNd):
                    layer.eval()
                elif isinstance(layer, nn.RNNBase):
                    layer.dropout = 0.0
            with torch.no_grad(), seed_rng(0, x.device), PlainAttention():
                outputs = functional_call(model, values, (x,))
        except Exception:  # where it matters, the checks of the model say why
            return None
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        rows = [t[0] for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.dim() and len(t) == n]
        return _Pass(
            [*rows, *(values[k] for k in self.buffers)],
            _is_written(x, given),
            any(_is_written(v, old[k]) for k, v in values.items()),
        )

    @property
    def bn_statistics(self) -> tuple[str, ...]:
        """Names of the running means and variances of BatchNorm layers, by module type."""
        return tuple(
            f"{name}.{key}" if name else key
            for name, module in self.model.named_modules()
            if isinstance(module, _BatchNorm)
            for key in ("running_mean", "running_var")
            if getattr(module, key) is not None
        )

    @property
    def has_convolutions(self) -> bool:
        """True if the model has convolutions; a CPU runs them fastest one client at a time."""
        return any(isinstance(m, nn.modules.conv._ConvNd) for m in self.model.modules())

    @property
    def activations_per_value(self) -> int:
        return count_activations(self.model)

    @property
    def is_fastest_alone(self) -> bool:
        """True if a CPU trains clients fastest one at a time: with convolutions, and in pretrained networks."""
        return self.has_convolutions or self.activations_per_value > 1

    def limit_samples(self, max_samples: int, input_values: int) -> int:
        return limit_samples(self.model, max_samples, input_values)

    def predict(self, params: Params, buffers: Params, x: Tensor) -> Tensor:
        """Return logits (B, classes) in evaluation mode."""
        values = params | buffers
        values.pop(CLASS_WEIGHTS, None)
        out: Tensor = self._call(self.model, values, x.clone() if self.writes_inputs else x)
        return out

    def call_with(self, params: Params, buffers: Params, function: Callable[[nn.Module], None]) -> None:
        """Call a function with the model in evaluation mode, which holds these values during the call.

        For several predictions of one client: to put the values into the model takes longer than a small prediction.
        """
        self._call(_Caller(self.model), {f"model.{name}": v for name, v in (params | buffers).items()}, function)

    def _call(self, module: nn.Module, values: dict[str, Tensor], argument: Any) -> Any:
        self.model.eval()
        if self.traits is not None and self.traits.writes_values:  # a prediction must not change the model
            values = {name: v.clone() for name, v in values.items()}
        with PlainAttention() if self._has_attention else nullcontext():
            return functional_call(module, values, (argument,))

    @cached_property
    def _has_attention(self) -> bool:
        return any(isinstance(m, nn.MultiheadAttention) for m in self.model.modules())

    def gradient(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient of the mean loss in training mode, and new buffers after it; works under `vmap`."""
        self.model.train()
        return differentiate(self._loss, params, buffers, batch)

    def clipped_gradient(self, params: Params, buffers: Params, batch: Batch, clip: float) -> Params:
        """Return the weighted sum of the samples' gradients, each clipped to the norm `clip`; works under `vmap`."""
        self.model.train()
        loss = partial(self._loss, is_mean=False)
        return sum_clipped(loss, params, buffers, batch, clip, self.samples_at_once)

    @property
    def samples_at_once(self) -> int:
        """Samples whose single gradients fit into `SAMPLE_GRADIENT_BYTES`, at least one."""
        return max(1, SAMPLE_GRADIENT_BYTES // max(1, self.params.nbytes()))

    def eager_gradient(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Params]:
        """Return what `gradient` returns, by plain autograd outside function transforms.

        A breakpoint in the model sees plain tensors.
        """
        if any(torch._C._functorch.is_functorch_wrapped_tensor(v) for v in (*params.values(), *batch)):
            return self.gradient(params, buffers, batch)
        self.model.train()
        with torch.enable_grad():
            w = params.map(lambda v: v.detach().requires_grad_())
            loss, changed = self._loss(w, buffers, batch)
            g = take_gradient(loss, w)
        return g, changed.map(torch.Tensor.detach)

    def _loss(self, w: Params, buffers: Params, batch: Batch, *, is_mean: bool = True) -> tuple[Tensor, Params]:
        # Modules write buffers in place; a copy keeps this a pure function.
        changed = buffers.map(torch.clone)
        state = {**w, **changed}
        loss = self.loss.bind(state.pop(CLASS_WEIGHTS, None), is_mean=is_mean)
        device = batch[0].device.type
        x = batch[0].clone() if self.writes_inputs else batch[0]
        with torch.autocast(device, torch.bfloat16, cache_enabled=False) if self.mixed_precision else nullcontext():
            output = functional_call(self.model, state, (x,))
            if isinstance(self.model, MethodModule):
                return self.model.objective(output, batch, loss), changed
            return loss(output, batch), changed

    def find_vectorization_error(self, batch: Batch, clip: float | None = None) -> str | None:
        """Return the reason why models cannot train as one batch of models, or None; `clip` as in the next method."""
        params = self.params.map(torch.clone)  # for a model may write over its weights
        two = (params.repeat(2), self.buffers.copies(2), tuple(t.expand(2, *t.shape) for t in batch))
        each = vmap(partial(self._try_gradient, clip=clip), randomness="different")
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                each(*two)  # some layers have a batched gradient and no batched prediction
                vmap(self.predict, randomness="different")(two[0], two[1], two[2][0])
        except Exception as error:
            return summarize_error(error)
        return None

    def find_gradient_error(self, batch: Batch, clip: float | None = None, *, is_eager: bool = False) -> str | None:
        """Return the reason why the model has no gradient on a batch, or None.

        Args:
            batch: inputs and targets.
            clip: norm to which the gradients of single samples are clipped, with differential privacy of rows.
            is_eager: whether plain autograd takes the gradient, as in the sequential engine.
        """
        gradient = self.eager_gradient if is_eager and clip is None else partial(self._try_gradient, clip=clip)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                # Copies, for a model may write over its weights.
                gradient(self.params.map(torch.clone), self.buffers, batch)
        except Exception as error:
            return summarize_error(error)
        return None

    def _try_gradient(self, params: Params, buffers: Params, batch: Batch, clip: float | None) -> Params:
        if clip is None:
            return self.gradient(params, buffers, batch)[0]
        x, y = batch
        like = next(iter(params.values()))
        return self.clipped_gradient(params, buffers, (x, y, like.new_ones(len(y))), clip)

    def _advise(self, x: Tensor, error: Exception) -> str:
        """Say what may help a model that fails on inputs x; nothing where that is unknown."""
        if isinstance(error, TypeError) and any(name in str(error) for name in ("'padding_mask'", "'lengths'")):
            return "; for sequences of unequal length, give fedattune.WithPadding(model)"
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in self.model.modules()):
            return ""
        if x.is_floating_point():
            return "; give whole numbers (int64), or call x.long() before the embedding"
        return f"; the token numbers of the data go from {int(x.min())} to {int(x.max())}"

    def check(self, x: Tensor, output_shape: tuple[int, ...], kind: TargetKind = "class") -> None:
        """Run the model once on `x` (B, ...).

        Raises:
            ModelError: its outputs are not (B, *output_shape): a score per class or label, or the predicted numbers.
        """
        name = type(self.model).__name__
        try:
            with torch.no_grad():
                out = self.predict(self.params.map(torch.clone), self.buffers.map(torch.clone), x)
        except Exception as error:
            raise ModelError(
                f"the model {name} does not fit the data: it cannot take inputs of shape "
                f"{tuple(x.shape[1:])} ({summarize_error(error)}){self._advise(x, error)}"
            ) from error
        if not isinstance(out, Tensor) or out.shape != (len(x), *output_shape):
            got = tuple(out.shape[1:]) if isinstance(out, Tensor) else type(out).__name__
            raise ModelError(
                f"the model {name} does not fit the data: expected {_describe_outputs(output_shape, kind)}, got {got}"
            )


def _keeps_statistics(module: nn.Module) -> bool:
    """Tell whether a layer computes its outputs, or running statistics, from a whole batch."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)


def _is_written(tensor: Tensor, before: Tensor) -> bool:
    """Tell whether a copy of `before` was written over; `tensor.data` leaves the version as it is."""
    return tensor._version > 0 or not torch.equal(tensor, before)


def _differ(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Tell whether tensors differ by more than rounding."""
    for one, other in zip(some, others, strict=True):
        scale = float(one.double().abs().nan_to_num(0, 0, 0).amax()) if one.numel() else 0.0
        rounding = SAME_OUTPUTS * scale
        if one.shape != other.shape or not torch.allclose(one.double(), other.double(), 0, rounding, equal_nan=True):
            return True
    return False


def _describe_outputs(shape: tuple[int, ...], kind: TargetKind) -> str:
    """Say what a model must predict for one sample."""
    n = shape[0]
    return {
        "class": f"{n} scores per sample (one per class)",
        "number": f"{n} number per sample (the target)",
        "labels": f"{n} scores per sample (one per label, as logits)",
        "numbers": f"{n} numbers per sample",
        "positions": f"scores of shape {shape} per sample ({n} classes at each position)",
    }[kind]
