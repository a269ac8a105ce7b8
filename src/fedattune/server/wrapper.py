"""Wrap a server rule, to send an extra beside its payload, or to ask for abilities that it may lack."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from ..core.algorithm import (
    Advisory,
    Branching,
    Discardable,
    Joinable,
    Measurable,
    Quarantining,
    ServerTraits,
    ServerUpdate,
    Skippable,
    StateT,
    Storing,
    SumsOnly,
    SumWeighting,
    TrafficCounting,
    append_clients,
    change,
    find_needed_sums,
    find_shared_model,
)
from ..core.effect import Effect
from ..core.params import Params
from ..core.payload import Broadcast, MixingMatrices, Payload, Traffic


@dataclass(frozen=True)
class ServerWrapper(
    Joinable[StateT],
    SumsOnly,
    Measurable,
    Branching,
    Storing,
    Discardable,
    Skippable,
    Quarantining,
    TrafficCounting,
    Advisory,
):
    """Base of rules that extend the rule `inner`; by itself, it forwards everything to `inner`.

    What `inner` lacks does nothing. The state is the state of `inner` with more entries. These have no row per client.
    """

    inner: ServerUpdate[Any]

    @property
    def traits(self) -> ServerTraits:
        return self.inner.traits

    def init(self, w0: Params, n_clients: int) -> StateT:
        state: StateT = self.inner.init(w0, n_clients)
        return state

    def broadcast(self, state: StateT, ids: Tensor) -> Broadcast:
        return self.inner.broadcast(state, ids)

    def aggregate(self, state: StateT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StateT:
        return change(state, **self.inner.aggregate(state, ids, sent, uploads, n))

    def global_model(self, state: StateT) -> Params | None:
        return self.inner.global_model(state)

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting] | None:
        return find_needed_sums(self.inner)

    def measure_effects(self, state: StateT, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        return self.inner.measure_effects(state, mixing) if isinstance(self.inner, Measurable) else ()

    def newcomer_model(self, state: StateT) -> Params:
        inner = self.inner
        return inner.newcomer_model(state) if isinstance(inner, Joinable) else find_shared_model(state)

    def add_clients(self, state: StateT, n_new: int) -> StateT:
        if isinstance(self.inner, Joinable):
            return change(state, **self.inner.add_clients(state, n_new))
        return change(state, **append_clients(self.inner, state, self.newcomer_model(state), n_new))

    def aggregate_newcomers(self, state: StateT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StateT:
        if not isinstance(self.inner, Joinable):
            return state
        return change(state, **self.inner.aggregate_newcomers(state, ids, sent, uploads, n))

    def find_start(self, sent: Payload, uploads: Payload) -> Params:
        """Return the models from which clients started; by default the model of their payload."""
        return self.inner.find_start(sent, uploads) if isinstance(self.inner, Branching) else sent.params

    def find_stored(self, state: StateT, ids: Tensor) -> Params:
        """Return the stored uploads of clients `ids`; nothing if `inner` stores none."""
        return self.inner.find_stored(state, ids) if isinstance(self.inner, Storing) else Params()

    def prepare_discards(self) -> Self:
        return replace(self, inner=self.inner.prepare_discards()) if isinstance(self.inner, Discardable) else self

    def discard_uploads(self, state: StateT, ids: Tensor) -> StateT:
        inner = self.inner
        return change(state, **inner.discard_uploads(state, ids)) if isinstance(inner, Discardable) else state

    def skip_round(self, state: StateT) -> StateT:
        return change(state, **self.inner.skip_round(state)) if isinstance(self.inner, Skippable) else state

    @property
    def can_quarantine(self) -> bool:
        """True if `inner` can, or what it wraps."""
        inner = self.inner
        return inner.can_quarantine if isinstance(inner, ServerWrapper) else isinstance(inner, Quarantining)

    def quarantine(self, state: StateT, ids: Tensor) -> StateT:
        inner = self.inner
        return change(state, **inner.quarantine(state, ids)) if isinstance(inner, Quarantining) else state

    def bytes_down(self, state: StateT, ids: Tensor, sent: Payload) -> Traffic:
        inner = self.inner
        return inner.bytes_down(state, ids, sent) if isinstance(inner, TrafficCounting) else sent.traffic()

    def bytes_up(self, state: StateT, ids: Tensor, uploads: Payload) -> Traffic:
        inner = self.inner
        return inner.bytes_up(state, ids, uploads) if isinstance(inner, TrafficCounting) else uploads.traffic()

    def warnings(self, state: StateT, ids: Tensor) -> tuple[str, ...]:
        return self.inner.warnings(state, ids) if isinstance(self.inner, Advisory) else ()


def attach_extra(broadcast: Broadcast, name: str, value: Params, ids: Tensor) -> Broadcast:
    """Add an extra to the payload of a broadcast: the same for all clients `ids` (R,)."""
    payload = broadcast.payload
    return broadcast._replace(payload=payload._replace(extra={**payload.extra, name: value.repeat(len(ids))}))
