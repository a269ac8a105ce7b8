"""Server rules around others: they send something more, and leave the rest to the rule inside."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ..core.algorithm import ServerUpdate
from ..core.params import Params
from ..core.payload import Broadcast, Payload, ServerState, Traffic


@dataclass(frozen=True)
class ServerWrapper(ServerUpdate):
    """Does what the rule `inner` does; the base of rules that add to it.

    The state is that of `inner` with more names in it.
    """

    inner: ServerUpdate

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """The state of the rule inside."""
        return self.inner.init(w0, n_clients)

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """What the rule inside sends."""
        return self.inner.broadcast(state, ids)

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """What the rule inside makes of the uploads."""
        return {**state, **self.inner.aggregate(state, ids, sent, received, n)}

    def warnings(self, state: ServerState, ids: Tensor) -> tuple[str, ...]:
        """What the rule inside has to say."""
        return self.inner.warnings(state, ids)

    def bytes_down(self, state: ServerState, ids: Tensor, sent: Payload) -> Traffic:
        """As the rule inside counts them."""
        return self.inner.bytes_down(state, ids, sent)

    def bytes_up(self, state: ServerState, ids: Tensor, received: Payload) -> Traffic:
        """As the rule inside counts them."""
        return self.inner.bytes_up(state, ids, received)

    def global_model(self, state: ServerState) -> Params | None:
        """That of the rule inside."""
        return self.inner.global_model(state)

    def newcomer_model(self, state: ServerState) -> Params:
        """The model that the rule inside has for a newcomer."""
        return self.inner.newcomer_model(state)

    def add_clients(self, state: ServerState, n: int) -> ServerState:
        """What is added here has no row per client, so the rule inside knows all that grows."""
        return {**state, **self.inner.add_clients(state, n)}

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """What the rule inside learns about newcomers; what is added here concerns everybody and stays."""
        return {**state, **self.inner.aggregate_newcomers(state, ids, sent, received, n)}


def attach_extra(sent: Broadcast, name: str, state: ServerState, ids: Tensor) -> Broadcast:
    """Add `state[name]` to a broadcast, one row per client."""
    more = cast(Params, state[name]).repeat(len(ids))
    payload = sent.payload._replace(extra={**sent.payload.extra, name: more})
    return sent._replace(payload=payload)
