"""Server rules around others: they send something more, and leave the rest to the rule inside."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, ServerUpdate, State, Traffic
from ..errors import ConfigError
from ..params import Params
from .average import change, shares


@dataclass(frozen=True)
class Around(ServerUpdate):
    """Does what the rule `inner` does; the base of rules that add to it.

    The state is that of `inner` with more names in it.
    """

    inner: ServerUpdate

    def init(self, w0: Params, n_clients: int) -> State:
        """The state of the rule inside."""
        return self.inner.init(w0, n_clients)

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """What the rule inside sends."""
        return self.inner.broadcast(state, ids)

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """What the rule inside makes of the uploads."""
        return {**state, **self.inner.aggregate(state, ids, sent, received, n)}

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices | None:
        """The matrices of the rule inside."""
        return self.inner.mixing(state, ids)

    def remarks(self, state: State, ids: Tensor) -> tuple[str, ...]:
        """What the rule inside has to say."""
        return self.inner.remarks(state, ids)

    def bytes_down(self, state: State, ids: Tensor, sent: Payload) -> Traffic:
        """As the rule inside counts them."""
        return self.inner.bytes_down(state, ids, sent)

    def bytes_up(self, state: State, ids: Tensor, received: Payload) -> Traffic:
        """As the rule inside counts them."""
        return self.inner.bytes_up(state, ids, received)

    def global_model(self, state: State) -> Params | None:
        """That of the rule inside."""
        return self.inner.global_model(state)

    def newcomer(self, state: State) -> Params:
        """The model that the rule inside has for a newcomer."""
        return self.inner.newcomer(state)

    def join(self, state: State, n: int) -> State:
        """What is added here has no row per client, so the rule inside knows all that grows."""
        return {**state, **self.inner.join(state, n)}

    def absorb(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """What the rule inside learns about newcomers; what is added here concerns everybody and stays."""
        return {**state, **self.inner.absorb(state, ids, sent, received, n)}


@dataclass(frozen=True)
class Displacement(Around):
    """Sends D = w^r - w^(r-1) too, by what the global model moved in the last round; zero at first.

    Source: IGFL (Huang et al., 2021), Algorithm 2, line 2. Around a rule that has no global model, D is the mean of
    the cohort's updates.
    """

    def init(self, w0: Params, n_clients: int) -> State:
        """Start with D = 0: w^(-1) is w^0."""
        return {**super().init(w0, n_clients), "D": w0.zeros()}

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """D goes to everybody alike."""
        return _with(super().broadcast(state, ids), "D", state, ids)

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Take the difference of the global models before and after."""
        new = super().aggregate(state, ids, sent, received, n)
        before, after = self.global_model(state), self.global_model(new)
        if before is None or after is None:
            return {**new, "D": change(shares(n, "uniform"), sent.params, received.params)}
        return {**new, "D": after - before}


@dataclass(frozen=True)
class Controls(Around):
    """Keeps and sends SCAFFOLD's c, for clients with `client.ControlVariates`.

    c <- c + (|S| / N) mean over the cohort S of (c_i^+ - c_i), for N clients. Source: SCAFFOLD (Karimireddy et
    al., 2020), equation 5.
    """

    def init(self, w0: Params, n_clients: int) -> State:
        """Start with c = 0."""
        return {**super().init(w0, n_clients), "c": w0.zeros(), "N": torch.tensor(n_clients)}

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The control variate c goes to everybody alike."""
        return _with(super().broadcast(state, ids), "c", state, ids)

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Add the changes that arrived.

        Raises:
            ConfigError: the clients have no control variates.

        """
        if "dc" not in received.extra:
            raise ConfigError(
                "Controls goes with clients that correct by ControlVariates, but these upload none"
            )
        changes = received.extra["dc"].map(lambda a: a.sum(0))
        c = cast(Params, state["c"]) + changes / int(cast(Tensor, state["N"]))
        return {**super().aggregate(state, ids, sent, received, n), "c": c}


def _with(payload: Payload, name: str, state: State, ids: Tensor) -> Payload:
    """The payload with `state[name]` in it, one row per client."""
    more = cast(Params, state[name]).repeat(len(ids))
    return payload._replace(extra={**payload.extra, name: more})
