"""Wrap a server rule, to send an extra beside its payload."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ..core.algorithm import ServerUpdate, SumWeighting, find_needed_sums
from ..core.effect import Effect
from ..core.params import Params
from ..core.payload import Broadcast, MixingMatrices, Payload, ServerState, Traffic


@dataclass(frozen=True)
class ServerWrapper(ServerUpdate):
    """Base of rules that extend the rule `inner`; by itself, it forwards every method to `inner`.

    The state is the state of `inner` with more entries. These have no row per client.
    """

    inner: ServerUpdate

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """Return the state of `inner`."""
        return self.inner.init(w0, n_clients)

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Return the broadcast of `inner`."""
        return self.inner.broadcast(state, ids)

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Return the state after the aggregation of `inner`."""
        return {**state, **self.inner.aggregate(state, ids, sent, uploads, n)}

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting] | None:
        """The sums that `inner` needs."""
        return find_needed_sums(self.inner)

    @property
    def sends_models(self) -> bool:
        """True if `inner` sends models."""
        return self.inner.sends_models

    def skip_round(self, state: ServerState) -> ServerState:
        """Return the state after a round without uploads, which `inner` skips."""
        return {**state, **self.inner.skip_round(state)}

    def discard_uploads(self, state: ServerState, ids: Tensor) -> ServerState:
        """Return the state after `inner` discarded uploads."""
        return {**state, **self.inner.discard_uploads(state, ids)}

    @property
    def can_quarantine(self) -> bool:
        """True if `inner` can."""
        return self.inner.can_quarantine

    def quarantine(self, state: ServerState, ids: Tensor) -> ServerState:
        """Return the state after `inner` quarantined clients."""
        return {**state, **self.inner.quarantine(state, ids)}

    def warnings(self, state: ServerState, ids: Tensor) -> tuple[str, ...]:
        """Return the warnings of `inner`."""
        return self.inner.warnings(state, ids)

    def measure_effects(self, state: ServerState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the mechanisms of `inner`."""
        return self.inner.measure_effects(state, mixing)

    def bytes_down(self, state: ServerState, ids: Tensor, sent: Payload) -> Traffic:
        """Count as `inner` does."""
        return self.inner.bytes_down(state, ids, sent)

    def bytes_up(self, state: ServerState, ids: Tensor, uploads: Payload) -> Traffic:
        """Count as `inner` does."""
        return self.inner.bytes_up(state, ids, uploads)

    def global_model(self, state: ServerState) -> Params | None:
        """Return the global model of `inner`."""
        return self.inner.global_model(state)

    def newcomer_model(self, state: ServerState) -> Params:
        """Return the first model of a newcomer under `inner`."""
        return self.inner.newcomer_model(state)

    def add_clients(self, state: ServerState, n_new: int) -> ServerState:
        """Return the state of `inner` with `n_new` more clients."""
        return {**state, **self.inner.add_clients(state, n_new)}

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Return the state after `inner` took in newcomers; the entries of the wrapper stay."""
        return {**state, **self.inner.aggregate_newcomers(state, ids, sent, uploads, n)}


def attach_extra(broadcast: Broadcast, name: str, state: ServerState, ids: Tensor) -> Broadcast:
    """Add an extra to the payload of a broadcast, one row per client.

    Args:
        broadcast: the broadcast.
        name: name of the extra, and of its entry in the state.
        state: the state of the server.
        ids: (R,) the receiving clients.

    """
    more = cast(Params, state[name]).repeat(len(ids))
    payload = broadcast.payload
    return broadcast._replace(payload=payload._replace(extra={**payload.extra, name: more}))
