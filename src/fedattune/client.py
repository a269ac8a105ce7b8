"""Client rules that most papers share: local SGD with corrections of its gradient, and a base to wrap another rule."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor

from .core.algorithm import (
    ClientUpdate,
    Encoding,
    Finished,
    LocalPlan,
    Probe,
    Probing,
    Resting,
    RowWeighing,
    StepChanges,
    StepMeasuring,
    Substituting,
    pick_newest,
)
from .core.effect import Mechanism
from .core.errors import ConfigError
from .core.optimizers import PLAIN, Optimizer
from .core.params import Params, clip_norm, squared_norm
from .core.payload import Batch, Grad, LocalState, Loss, Payload, RoundContext

StartPoint = Literal["sent", "newest", "own"]
"""Start of local training: the model that was `sent`; the `newest` of that model and the client's own last model; or
always its `own` last model."""

_Value = TypeVar("_Value")
_Addable = TypeVar("_Addable", Tensor, Params)


class RunningMean(NamedTuple, Generic[_Value]):
    """The mean over the `n` probed samples so far (a scalar tensor); zero before the first batch."""

    value: _Value
    n: Tensor


def add_to_mean(mean: RunningMean[_Addable], batch: Batch, new: _Addable) -> RunningMean[_Addable]:
    """Return the running mean after one more batch, whose own mean is `new`."""
    x, _, *weight = batch
    n_batch = weight[0].sum() if weight else torch.full_like(mean.n, len(x))
    n = mean.n + n_batch
    return RunningMean(mean.value + (new - mean.value) * (n_batch / n), n)


def score_models(models: Params, n: int, batch: Batch, loss: Loss) -> Tensor:
    """Return the losses (n,) of a stack of n models over a batch."""
    # One by one: some models cannot run as a batch of models.
    return torch.stack([loss(models.rows(i), batch) for i in range(n)])


class LocalContext(NamedTuple):
    """A correction's view of local training.

    Attributes:
        start: the model at the start of local training.
        sent: the last payload that the client received.
        local_state: the client's state before local training.
        full_gradient: the gradient at `start` over all training samples, if a correction needs it.
        context: the client's view of the round.
    """

    start: Params
    sent: Payload
    local_state: LocalState
    full_gradient: Params
    context: RoundContext


@dataclass(frozen=True)
class Correction(ABC):
    """A change of local SGD's gradient."""

    @property
    def required_extras(self) -> dict[str, str]:
        """Extras of the payload that the correction needs; see `LocalPlan`."""
        return {}

    @property
    def needs_full_gradient(self) -> bool:
        """True if the correction uses the gradient at the start over all training samples."""
        return False

    @property
    def suits_optimizers(self) -> bool:
        """False if the correction holds for plain SGD alone, such as one that divides a change of w by the rate."""
        return True

    @property
    def mechanism(self) -> Mechanism:
        """The correction as a mechanism of its method, which changes the local steps."""
        name = type(self).__name__
        return Mechanism("steps", f"steps without {name}", f"one without {name}")

    def init_local_state(self, w0: Params) -> LocalState:
        """Return the correction's part of the client's first state."""
        return {}

    @abstractmethod
    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        """Return the corrected gradient at w, from the gradient g."""

    def finish(self, w: Params, local: LocalContext) -> tuple[dict[str, Params], LocalState]:
        """Return extras to upload and changes of the local state, after training ended at w."""
        return {}, {}


@dataclass(frozen=True)
class Proximal(Correction):
    """The gradient of mu/2 ||w - anchor||^2; the anchor is the model that was last sent."""

    mu: float

    mechanism = Mechanism("steps", "steps without the proximal term", "one without the proximal term")

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        return g + self.mu * (w - local.sent.params)


@dataclass(frozen=True)
class Optimizing(ClientUpdate):
    """Base of client rules whose local steps are an optimizer's, given their gradient.

    A rule begins and keeps the state of `optimizer` beside its model: entries `w` and `optimizer` of its carry.

    Attributes:
        optimizer: makes the local steps; plain SGD unless the run has another one.
    """

    optimizer: Optimizer = field(default=PLAIN, kw_only=True, repr=False)

    trained_parts: ClassVar[tuple[str, ...]] = ("",)
    """Beginnings of the names of the tensors that the optimizer moves."""

    @property
    def own_steps(self) -> str | None:
        """The part of the rule that holds for plain SGD alone, or None."""
        return None if self.optimizer == PLAIN else "momentum of its own"

    def with_optimizer(self, optimizer: Optimizer) -> Self:
        """Return the rule with another optimizer."""
        return replace(self, optimizer=optimizer)

    def select_trained(self, w: Params) -> Params:
        """Return the tensors that the optimizer moves."""
        return w.only(k for k in w if k.startswith(self.trained_parts))

    def init_local_state(self, w0: Params) -> LocalState:
        return self.optimizer.init_local_state(self.select_trained(w0))

    def step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> Any:
        w, g = self.select_trained(carry.w), self.select_trained(grad(carry.w, batch))
        trained, optimizer = self.optimizer.step(w, g, carry.optimizer, context.lr)
        return carry._replace(w=Params({**carry.w, **trained}), optimizer=optimizer)


class _Carry(NamedTuple):
    w: Params
    start: Params
    sent: Payload
    local_state: LocalState
    full_gradient: RunningMean[Params]
    optimizer: LocalState

    def make_local_context(self, context: RoundContext) -> LocalContext:
        return LocalContext(self.start, self.sent, self.local_state, self.full_gradient.value, context)


@dataclass(frozen=True)
class SGD(Optimizing, Probing, StepMeasuring):
    """Local SGD: w <- w - lr g(w; batch), or the step of another optimizer.

    Attributes:
        corrections: change the gradient, one after the other.
        start: the model that training starts from.
        clip: maximum norm of the corrected gradient; None for no limit.
    """

    corrections: tuple[Correction, ...] = ()
    start: StartPoint = "sent"
    clip: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.corrections, tuple) or not all(isinstance(c, Correction) for c in self.corrections):
            raise ConfigError(f"SGD: corrections: got {self.corrections!r}, expected a tuple such as (Proximal(0.1),)")

    @property
    def plan(self) -> LocalPlan:
        extras = {extra: server for c in self.corrections for extra, server in c.required_extras.items()}
        return LocalPlan(extras=extras, probe=Probe() if self._probes else None)

    @property
    def own_steps(self) -> str | None:
        unsuited = (type(c).__name__ for c in self.corrections if not c.suits_optimizers)
        return next(unsuited, super().own_steps)

    @property
    def _probes(self) -> bool:
        return any(c.needs_full_gradient for c in self.corrections)

    def init_local_state(self, w0: Params) -> LocalState:
        new_state = self.optimizer.init_local_state(w0)
        if self.start != "sent":
            new_state["own"] = w0
        for correction in self.corrections:
            new_state |= correction.init_local_state(w0)
        return new_state

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        w = self.received_model(sent, local_state, fresh)
        full_gradient = RunningMean(w.zeros() if self._probes else Params(), torch.zeros_like(context.n_steps))
        return _Carry(w, w, sent, local_state, full_gradient, self.optimizer.begin(w, local_state))

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        return carry._replace(full_gradient=add_to_mean(carry.full_gradient, batch, grad(carry.start, batch)))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        g = grad(carry.w, batch)
        for correct in self.corrections:
            g = correct(g, carry.w, carry.make_local_context(context))
        if self.clip is not None:
            g = clip_norm(g, self.clip)
        w, optimizer = self.optimizer.step(carry.w, g, carry.optimizer, context.lr)
        return carry._replace(w=w, optimizer=optimizer)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return tuple(correction.mechanism for correction in self.corrections)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        """Measure the change of the gradient by each correction."""
        g = grad(carry.w, batch, statistics=False)
        norms = []
        for correct in self.corrections:
            corrected = correct(g, carry.w, carry.make_local_context(context))
            norms.append((squared_norm(corrected - g), squared_norm(g)))
            g = corrected
        return tuple(norms)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        extra: dict[str, Params] = {}
        new_state = {**local_state, **self.optimizer.keep(carry.optimizer)}
        for correction in self.corrections:
            extras, changes = correction.finish(carry.w, carry.make_local_context(context))
            extra |= extras
            new_state |= changes
        if self.start != "sent":
            new_state["own"] = carry.w
        return Payload(carry.w, extra), new_state

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        if self.start == "own":
            return local_state["own"]
        return pick_newest(sent.params, local_state["own"], fresh) if self.start == "newest" else sent.params


class PartTraining:
    """Mark client rules that train the method's personal tensors and the other tensors in separate phases.

    `personal_names` of their context are these tensors alone, without BatchNorm layers that `bn_affine` keeps too.
    """


class PartCarry(NamedTuple):
    """The model, and the state of the optimizer."""

    w: Params
    optimizer: LocalState


@dataclass(frozen=True)
class PartSGD(Optimizing, PartTraining):
    """Local SGD of one part of the model: of the tensors that are `personal`, or of those that are `shared`."""

    part: Literal["personal", "shared"] = "shared"

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> PartCarry:
        return PartCarry(sent.params, self.optimizer.begin(sent.params, local_state))

    def step(self, carry: PartCarry, batch: Batch, grad: Grad, context: RoundContext) -> PartCarry:
        new: PartCarry = super().step(carry, batch, grad, context)
        # The frozen part is put back, since weight decay of an optimizer moves tensors without a gradient too.
        return new._replace(w=Params({**new.w, **carry.w.only(self.select_frozen(carry.w, context))}))

    def select_frozen(self, w: Params, context: RoundContext) -> list[str]:
        """Return the names of the tensors that stay as received."""
        return [name for name in w if (name in context.personal_names) == (self.part == "shared")]

    def finish(self, carry: PartCarry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        return Payload(carry.w), {**local_state, **self.optimizer.keep(carry.optimizer)}


@dataclass(frozen=True)
class ClientWrapper(Encoding, Probing, Resting, Substituting, StepMeasuring):
    """Base of rules that extend the rule `inner`; by itself, it forwards everything to `inner`.

    A wrapper whose carry or local state differs from that of `inner` overrides every method that reads it.
    """

    inner: ClientUpdate

    @property
    def plan(self) -> LocalPlan:
        return self.inner.plan

    def init_local_state(self, w0: Params) -> LocalState:
        return self.inner.init_local_state(w0)

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Any:
        return self.inner.begin(sent, local_state, fresh, context)

    def probe_passes(self, local_state: LocalState) -> Tensor:
        inner = self.inner
        return inner.probe_passes(local_state) if isinstance(inner, Probing) else torch.zeros(())

    def probe(self, carry: Any, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> Any:
        inner = self.inner
        return inner.probe(carry, batch, grad, loss, context) if isinstance(inner, Probing) else carry

    def step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> Any:
        return self.inner.step(carry, batch, grad, context)

    def finish(self, carry: Any, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        return self.inner.finish(carry, sent, local_state, context)

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return self.inner.received_model(sent, local_state, fresh)

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return self.inner.trained_model(upload, local_state)

    def own_model(self, upload: Payload, local_state: LocalState) -> Params:
        return self.inner.own_model(upload, local_state) if isinstance(self.inner, Encoding) else upload.params

    def find_base(self, sent: Payload, accepted: Payload) -> Payload:
        return self.inner.find_base(sent, accepted) if isinstance(self.inner, Encoding) else accepted

    def report_distrust(self, upload: Payload, distrusts: Tensor) -> Payload:
        return self.inner.report_distrust(upload, distrusts) if isinstance(self.inner, Encoding) else upload

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return find_resting_model(self.inner)(sent, local_state, fresh)

    def offered_model(self, sent: Payload) -> Params:
        return self.inner.offered_model(sent) if isinstance(self.inner, Substituting) else sent.params

    def substitute(self, sent: Payload, own: Params) -> Payload:
        inner = self.inner
        return inner.substitute(sent, own) if isinstance(inner, Substituting) else sent._replace(params=own)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return self.inner.mechanisms if isinstance(self.inner, StepMeasuring) else ()

    def measure_step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        inner = self.inner
        return inner.measure_step(carry, batch, grad, context) if isinstance(inner, StepMeasuring) else ()


def _unwrap(rule: ClientUpdate) -> ClientUpdate:
    while isinstance(rule, ClientWrapper):
        rule = rule.inner
    return rule


def set_optimizer(rule: ClientUpdate, optimizer: Optimizer) -> ClientUpdate:
    """Return a client rule whose local steps an optimizer makes.

    Raises:
        ConfigError: the rule defines its own step.
    """
    if isinstance(rule, ClientWrapper):
        return replace(rule, inner=set_optimizer(rule.inner, optimizer))
    if isinstance(rule, Optimizing) and rule.optimizer == optimizer:
        return rule  # clients that join after training have the rule of the run
    if own := find_own_steps(rule):
        raise ConfigError(
            f"optimizer: the method has local steps of its own ({own}); leave optimizer and momentum out for it, or "
            "take methods whose clients run SGD, such as fedavg, ditto or attune"
        )
    return cast(Optimizing, rule).with_optimizer(optimizer)


def find_own_steps(rule: ClientUpdate) -> str | None:
    """Return the part of a client rule that holds for plain SGD alone, or None if the rule takes every optimizer."""
    rule = _unwrap(rule)
    return rule.own_steps if isinstance(rule, Optimizing) else type(rule).__name__


def find_optimizer(rule: ClientUpdate) -> Optimizer:
    """Return the optimizer of a client rule, restarted; plain SGD if the rule has local steps of its own."""
    rule = _unwrap(rule)
    return rule.optimizer.restart() if isinstance(rule, Optimizing) else PLAIN


def list_correction_entries(rule: ClientUpdate, w0: Params) -> tuple[str, ...]:
    """Return the entries of the local state that corrections keep: they must fit what the server learned."""
    rule = _unwrap(rule)
    return tuple(k for c in rule.corrections for k in c.init_local_state(w0)) if isinstance(rule, SGD) else ()


def find_row_weighing(rule: ClientUpdate) -> RowWeighing | None:
    """Return the rule, or what it wraps, if it sets parameters by validation rows."""
    rule = _unwrap(rule)
    return rule if isinstance(rule, RowWeighing) else None


def trains_parts(rule: ClientUpdate) -> bool:
    """Tell whether a client rule, or what it wraps, is a `PartTraining`."""
    return isinstance(_unwrap(rule), PartTraining)


def find_resting_model(rule: ClientUpdate) -> Callable[[Payload, LocalState, Tensor], Params]:
    """Return the function that gives a rule's model in rounds in which a client does not train."""
    return rule.resting_model if isinstance(rule, Resting) else rule.received_model
