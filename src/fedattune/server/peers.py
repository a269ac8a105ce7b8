"""Models of other clients, sent for the receiver to choose from."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..core import Payload, State, Traffic
from ..messages import traffic
from ..params import Params
from .bank import Bank


@dataclass(frozen=True)
class Peers(Bank):
    """Client i is sent the last uploads of `models` - 1 others; those that helped it most before, or any.

    Source: FedFomo (Zhang et al., 2021), section 3. With probability epsilon they are drawn at random, otherwise
    they are those of the largest affinity P[i, :], ties broken at random; epsilon is epsilon - epsilon_decay t after
    t rounds, until it is 0. A client reports how much each of them helps, which is added to P. Its own last upload
    is one of its `models` candidates too; it is in `Payload.params` and does not travel, as the client has it.
    """

    models: int = 5
    epsilon: float = 0.3
    epsilon_decay: float = 0.05

    def init(self, w0: Params, n_clients: int) -> State:
        """The bank, whose models all can be sent from the start, the affinities P (N, N), and what draws."""
        state = super().init(w0, n_clients)
        everybody = torch.ones_like(cast(Tensor, state["in_pool"]))
        return {
            **state,
            "in_pool": everybody,
            "P": torch.zeros(n_clients, n_clients, dtype=torch.float64, device=everybody.device),
            "seed": torch.randint(1 << 62, ()),
            "round": torch.zeros((), dtype=torch.int64),
        }

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The own last upload, and those of others with their numbers (R, M - 1)."""
        theta, chosen = cast(Params, state["theta"]), self._chosen(state, ids)
        return Payload(theta.rows(ids), {"peers": theta.rows(chosen), "numbers": Params(peer=chosen)})

    def _chosen(self, state: State, ids: Tensor) -> Tensor:
        """Whose models (R, M - 1) clients `ids` are sent; depends on the state and the client alone."""
        seed, t = int(cast(Tensor, state["seed"])), int(cast(Tensor, state["round"]))
        members = cast(Tensor, state["in_pool"]).nonzero().flatten().cpu().numpy()
        most = min(self.models, len(members)) - 1
        # What differs by less is taken for equal, so that rounding decides nothing.
        affinity = np.round(cast(Tensor, state["P"])[ids].cpu().numpy(), 6)
        chosen = []
        for row, i in enumerate(ids.tolist()):
            rng = np.random.default_rng([seed, t, i])
            others = rng.permutation(members[members != i])
            if rng.random() >= self.epsilon - self.epsilon_decay * t:
                others = others[np.argsort(-affinity[row, others], kind="stable")]
            chosen.append(others[:most])
        return torch.from_numpy(np.stack(chosen)).to(ids.device)

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep what came back, and add what clients found to their affinities (written in place)."""
        peers, found = sent.extra["numbers"]["peer"], received.extra["affinity"]["a"]
        P = cast(Tensor, state["P"])
        P.index_put_((ids[:, None].expand_as(peers), peers), found.to(P.dtype), accumulate=True)
        return {**super().aggregate(state, ids, sent, received, n), "P": P, "round": state["round"] + 1}

    def bytes_down(self, state: State, ids: Tensor, sent: Payload) -> Traffic:
        """What is sent without the own model."""
        return sent.traffic() - traffic(sent.params)

    def join(self, state: State, n: int) -> State:
        """The state with `n` more clients, who know nothing yet of whom to ask."""
        P = cast(Tensor, state["P"])
        return {**super().join(state, n), "P": torch.nn.functional.pad(P, (0, n, 0, n))}
