"""Learned mixing in which every client keeps some layers of its own model."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..core import Payload, State, Traffic
from ..messages import traffic
from ..params import Params, as_slice
from ..select import groups
from .bank import mixed
from .learned import Learned, Rows


@dataclass(frozen=True)
class Retained(Learned):
    """Learned mixing whose `retain` components with the largest alpha_i^l[i] are the client's own, row e_i.

    Source: pFedLA (Ma et al., 2022), HeurpFedLA. Which components these are travels as flags; they themselves are not
    sent down, as the client has them, nor up without `upload_retained`. Their rows of the hypernetwork learn nothing.
    Of equal weights, those of the first components are retained.
    """

    per_client: ClassVar[tuple[str, ...]] = (*Learned.per_client, "retained")

    retain: int = 1
    upload_retained: bool = True

    def init(self, w0: Params, n_clients: int) -> State:
        """Learned mixing's state, and which components (N, L) each client retained when it last took part."""
        state = super().init(w0, n_clients)
        flags = cast(Tensor, state["seen"])[:, None].repeat(1, len(groups(w0, self.unit)))
        return {**state, "retained": flags}

    def alpha(self, z: Tensor, rows: Rows) -> Tensor:
        """The mixing weights (R, L, K), those of retained components one-hot."""
        alpha = super().alpha(z, rows)
        return _with_own(alpha, self._chosen(alpha, rows), rows)

    def _chosen(self, alpha: Tensor, rows: Rows) -> Tensor:
        """Which components (R, L) are retained under the weights alpha (R, L, K)."""
        weight = alpha.detach().gather(2, _own(alpha, rows))[:, :, 0]
        first = weight.sort(stable=True, dim=1, descending=True).indices[:, : self.retain]
        return torch.zeros_like(weight, dtype=torch.bool).scatter(1, first, True)

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The mixtures, and a flag per component that says whether the client goes on with its own."""
        rows, theta = self.rows(state, ids), cast(Params, state["theta"])
        alpha = super().alpha(self.logits(state, ids), rows)
        flags = self._chosen(alpha, rows)
        matrices = self._matrices(state, ids, _with_own(alpha, flags, rows))
        extra = {"retained": Params({c: flags[:, i] for i, c in enumerate(matrices.weights)})}
        return Payload(mixed(theta, self.unit, matrices), extra)

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """As learned mixing; of what clients retain, the bank keeps the old without `upload_retained`."""
        flags, theta = sent.extra["retained"], cast(Params, state["theta"])
        now = cast(Tensor, state["retained"]).index_copy(0, ids, torch.stack(list(flags.values()), 1))
        state = {**state, "retained": now}
        if self.upload_retained:
            return super().aggregate(state, ids, sent, received, n)
        self.learn(state, ids, sent.params, received.params)  # retained components have constant weights
        for component, names in groups(theta, self.unit).items():
            for name in names:
                one, new = theta.only([name]), received.params[name]
                keep = flags[component].view(-1, *[1] * (new.dim() - 1))
                one.put_rows(ids, Params({name: torch.where(keep, one.rows(as_slice(ids))[name], new)}))
        return self.heard_from(state, ids, n)

    def remarks(self, state: State, ids: Tensor) -> tuple[str, ...]:
        """Say so if nothing is left to be mixed."""
        components = len(groups(cast(Params, state["theta"]), self.unit))
        if self.retain < components:
            return ()
        return (
            f"retain={self.retain} keeps all of this model's components ({components}): this is training alone",
        )

    def bytes_down(self, state: State, ids: Tensor, sent: Payload) -> Traffic:
        """What is sent without the retained components."""
        flags = torch.stack(list(sent.extra["retained"].values()), 1)
        return sent.traffic() - self._traffic(state, flags)

    def bytes_up(self, state: State, ids: Tensor, received: Payload) -> Traffic:
        """What came back, without the retained components if these are not uploaded."""
        if self.upload_retained:
            return received.traffic()
        return received.traffic() - self._traffic(state, cast(Tensor, state["retained"])[ids])

    def _traffic(self, state: State, flags: Tensor) -> Traffic:
        """Bytes of the components whose flags (R, L) are set."""
        one, spared = cast(Params, state["theta"]).rows(0), Traffic()
        for names, times in zip(groups(one, self.unit).values(), flags.sum(0).tolist(), strict=True):
            spared += traffic(one.only(names), int(times))
        return spared


def _with_own(alpha: Tensor, flags: Tensor, rows: Rows) -> Tensor:
    """The weights alpha (R, L, K), where a flag (R, L) is set those of the own model alone."""
    own = torch.zeros_like(alpha).scatter_(2, _own(alpha, rows), 1.0)
    return torch.where(flags[:, :, None], own, alpha)


def _own(alpha: Tensor, rows: Rows) -> Tensor:
    """The place (R, L, 1) of each receiver's own model in alpha (R, L, K)."""
    return rows.own[:, None, None].expand(-1, alpha.shape[1], 1)
