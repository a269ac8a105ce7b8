"""SCAFFOLD.

    @inproceedings{karimireddy2020scaffold,
      author = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank J. and
        Stich, Sebastian U. and Suresh, Ananda Theertha},
      title = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2020},
      eprint = {1910.06378},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   y <- y - lr (g(y) - c_i + c), K steps from w                                            (3)
             c_i <- I: the gradient at w over all training samples,  II: c_i - c + (w - y) / (K lr)  (4)
    server   w <- w + server_lr mean_S (y_i - w),  c <- c + (|S| / N) mean_S (change of c_i)         (5)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NotRequired, Self, TypedDict

import torch
from torch import Tensor

from ..client import SGD, Correction, LocalContext
from ..core.algorithm import Algorithm, ServerTraits, SumWeighting, change
from ..core.effect import Mechanism
from ..core.errors import ConfigError
from ..core.options import Positive
from ..core.params import Params, choose
from ..core.payload import Broadcast, LocalState, Payload
from ..server import Average
from ..server.average import Weighting
from ..server.wrapper import ServerWrapper, attach_extra
from .table import Family, method


@dataclass(frozen=True)
class ControlVariateCorrection(Correction):
    """Gradient of SCAFFOLD: g - c_i + c, with the control variates c of the server and c_i of the client.

    The client uploads the change of c_i (equations 3 and 4). Wrap the server rule in `ControlVariateWrapper`, which
    keeps and sends c. A client whose upload is not used takes plain steps and keeps its c_i: c could not
    follow.
    """

    option: Literal["I", "II"] = "II"

    required_extras: ClassVar[dict[str, str]] = {"c": "ControlVariateWrapper"}
    mechanism = Mechanism("steps", "steps without control variates", "FedAvg")
    suits_optimizers = False

    @property
    def needs_full_gradient(self) -> bool:
        return self.option == "I"

    def init_local_state(self, w0: Params) -> LocalState:
        return {"c": w0.zeros()}

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        """Return the corrected gradient; personal tensors stay uncorrected."""
        c = local.sent.extra["c"]
        corrected = Params({**g, **(g.only(c) - local.local_state["c"].only(c) + c)})
        return choose(local.context.is_uploaded, corrected, g)

    def finish(self, w: Params, local: LocalContext) -> tuple[dict[str, Params], LocalState]:
        c = local.sent.extra["c"]
        own = local.local_state["c"].only(c)
        if self.option == "I":
            new = local.full_gradient.only(c)
        else:
            new = own - c + (local.start - w).only(c) / (local.context.n_steps * local.context.lr)
        new = choose(local.context.is_uploaded, new, own)
        return {"dc": new - own}, {"c": Params({**local.local_state["c"], **new})}


class ControlState(TypedDict):
    """The entries beside those of the inner rule: c, and the number N of clients.

    With `keeps_own` also the c_i (N, ...) of all clients, and which of them count in c (N,).
    """

    c: Params
    N: Tensor
    own: NotRequired[Params]
    counts: NotRequired[Tensor]


@dataclass(frozen=True)
class ControlVariateWrapper(ServerWrapper[ControlState]):
    """Server rule of SCAFFOLD: keeps and sends c, the mean of all clients' control variates (equation 5).

    With `keeps_own`, the server keeps every c_i too, so that those of rejected clients can leave c.
    """

    keeps_own: bool = False

    @property
    def traits(self) -> ServerTraits:
        traits = super().traits
        more = ("own", "counts") if self.keeps_own else ()
        return replace(traits, more_per_client=(*traits.more_per_client, *more))

    def init(self, w0: Params, n_clients: int) -> ControlState:
        state = change(super().init(w0, n_clients), c=w0.zeros(), N=torch.tensor(n_clients))
        return (
            change(state, own=w0.zeros().copies(n_clients), counts=torch.ones(n_clients)) if self.keeps_own else state
        )

    def broadcast(self, state: ControlState, ids: Tensor) -> Broadcast:
        return attach_extra(super().broadcast(state, ids), "c", state["c"], ids)

    def aggregate(self, state: ControlState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> ControlState:
        if "dc" not in uploads.extra:
            raise ConfigError(
                "ControlVariateWrapper goes with clients that use ControlVariateCorrection; "
                "these clients upload no control variate"
            )
        state = change(state, **super().aggregate(state, ids, sent, uploads, n))
        dc = uploads.extra["dc"]
        if self.keeps_own:
            returned = ids[state["counts"][ids] == 0]
            state = change(_add_own(state, returned, 1), counts=state["counts"].index_fill(0, returned, 1))
            state = change(state, own=state["own"].put_rows(ids, state["own"].rows(ids) + dc))
        return change(state, c=state["c"] + dc.map(_sum) / int(state["N"]))

    def add_clients(self, state: ControlState, n_new: int) -> ControlState:
        """Let clients join whose c_i are 0: c is the mean over more clients."""
        before = int(state["N"])
        state = super().add_clients(state, n_new)
        state = change(state, c=state["c"] * (before / (before + n_new)), N=state["N"] + n_new)
        if not self.keeps_own:
            return state
        own = state["own"].map(lambda a: torch.cat([a, a.new_zeros(n_new, *a.shape[1:])]))
        return change(state, own=own, counts=torch.cat([state["counts"], state["counts"].new_ones(n_new)]))

    def prepare_discards(self) -> Self:
        return replace(super().prepare_discards(), keeps_own=True)

    def discard_uploads(self, state: ControlState, ids: Tensor) -> ControlState:
        state = super().discard_uploads(state, ids)
        if not self.keeps_own:
            return state
        counted = ids[state["counts"][ids] > 0]
        return change(_add_own(state, counted, -1), counts=state["counts"].index_fill(0, counted, 0))

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting] | None:
        inner = super().needed_sums
        return None if inner is None else {**inner, "dc": "sum"}


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0)


def _add_own(state: ControlState, ids: Tensor, sign: int) -> ControlState:
    """Add `sign` times the c_i of clients `ids` to c."""
    return change(state, c=state["c"] + sign / int(state["N"]) * state["own"].rows(ids).map(_sum))


@method(Family.GLOBAL, "one average and a control variate", "SGD corrected for the client's drift")
def scaffold(
    *, option: Literal["I", "II"] = "II", server_lr: Positive = 1.0, weighting: Weighting = "uniform"
) -> Algorithm:
    """One average; control variates remove the clients' drift from their steps.

    Source: Karimireddy et al. (2020), Algorithm 1 and equations 3 to 5.

    Args:
        option: new c_i: `I` takes the gradient at w over all training samples, in one more pass; `II` takes the mean
            gradient of the local steps.
        server_lr: step eta_g of the server; 1 replaces w by the average.
        weighting: weights in the average of models: `uniform`, as in the paper, or by training samples. The changes of
            all c_i count equally.
    """
    return Algorithm(
        SGD((ControlVariateCorrection(option),)),
        ControlVariateWrapper(Average(weighting, server_lr)),
        evaluation_point="received",
    )
