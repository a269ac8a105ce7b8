"""FedGH.

    @inproceedings{yi2023fedgh,
      author = {Yi, Liping and Wang, Gang and Liu, Xiaoguang and Shi, Zhuan and Yu, Han},
      title = {{FedGH}: Heterogeneous Federated Learning with Generalized Global Header},
      booktitle = {ACM International Conference on Multimedia (MM)},
      year = {2023},
      eprint = {2303.13137},
      archiveprefix = {arXiv}
    }

The features are f_k(x), which the classifier ("header") gets, and R_kj is the representation of class j:

    client   head <- h, then SGD on (f_k, head) together
             R_kj <- the mean of f_k over all samples of class j in its local steps
    server   server_epochs times, for each client k of the cohort:
             h <- h - server_lr grad mean_j CE(h(R_kj), j), over the classes j that client k has
    used as  (f_k, h)

Neither bodies nor trained heads travel.
"""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from ..core.algorithm import (
    Algorithm,
    Encoding,
    Finished,
    Measurable,
    ServerTraits,
    ServerUpdate,
    TrafficCounting,
    change,
)
from ..core.effect import Effect, Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.options import Count, Positive
from ..core.params import Params, squared_norm
from ..core.payload import Batch, LocalState, MixingMatrices, Payload, RoundContext, Traffic, count_traffic
from ..core.selectors import NamedParameters
from .prototypes import (
    READERS,
    ReadingCarry,
    ReadingClient,
    divide,
    encode_classes,
    make_readers,
    read_features,
    select_head,
)
from .table import Family, method


class ReadingModule(MethodModule):
    """Predicts head(body(x)); in training, client rules read the features of each class; see `read_features`."""

    has_batch_loss = True

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.sums, self.counts = make_readers(head)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return logits (B, C); in training also the features (B, f), and what reads them."""
        features = self.body(x)
        logits: Tensor = self.head(features)
        return (logits, features, self.sums, self.counts) if self.training else logits

    def objective(self, output: tuple[Tensor, ...], batch: Batch, loss: LossFunction) -> Tensor:
        logits, f, sums, counts = output
        return loss(logits, batch) + read_features(f, encode_classes(batch[1], counts), sums, counts)


@dataclass(frozen=True)
class ReadingNetwork(Network):
    """Adds the parameters by which clients read features."""

    class_need = "FedGH has a representation of each class"

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return ReadingModule(*split_head(model, x))


@dataclass(frozen=True)
class RepresentationClient(ReadingClient, Encoding):
    """Client rule of FedGH: trains its body under the received head, and the head; uploads representations.

    Its trained head stays with it. In the place of the head, it sends back what it received.
    """

    def init_local_state(self, w0: Params) -> LocalState:
        return {"head": select_head(w0), **super().init_local_state(w0)}

    def finish(self, carry: ReadingCarry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        representations = Params(means=divide(carry.sums, carry.counts), known=(carry.counts > 0).to(carry.counts))
        upload = Payload(Params({**carry.w, **select_head(sent.params)}), {"representations": representations})
        return upload, {"head": select_head(carry.w), **self.optimizer.keep(carry.optimizer)}

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return Params({**upload.params, **local_state["head"]})

    def find_base(self, sent: Payload, accepted: Payload) -> Payload:
        return sent  # not the own head, which does not travel


class HeadState(TypedDict):
    """The global head, and the initial one."""

    w: Params
    first: Params


INITIAL_HEAD = Mechanism("weights", "the initial head", "one whose clients start every round with the initial head")


@dataclass(frozen=True)
class HeadTraining(ServerUpdate[HeadState], Measurable, TrafficCounting):
    """Server rule of FedGH: trains a global head on the representations of the cohort, one step per client."""

    lr: float
    epochs: int

    traits = ServerTraits(HeadState)

    def init(self, w0: Params, n_clients: int) -> HeadState:
        return {"w": w0, "first": w0}

    def aggregate(self, state: HeadState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> HeadState:
        h, representations = state["w"], uploads.extra["representations"]
        for _ in range(self.epochs):
            for means, known in zip(representations["means"], representations["known"], strict=True):
                h = h - self.lr * compute_head_gradient(h, means, known)
        return change(state, w=h)

    def measure_effects(self, state: HeadState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the distance of the head from the initial one."""
        moved, first = (float(squared_norm(one)) for one in (state["w"] - state["first"], state["first"]))
        return (Effect(INITIAL_HEAD, (moved / max(first, 1e-12)) ** 0.5),)

    def bytes_up(self, state: HeadState, ids: Tensor, uploads: Payload) -> Traffic:
        """Count the representations; the server has the head that it sent."""
        return uploads.traffic() - count_traffic(uploads.params)


def compute_head_gradient(h: Params, means: Tensor, known: Tensor) -> Params:
    """Return the gradient of the mean cross-entropy of the representations (C, f) of the `known` (C,) classes."""
    logits = means @ h["head.weight"].T + h.get("head.bias", 0)
    has_one = known > 0.5  # privacy may add noise
    errors = (logits.softmax(1) - torch.eye(len(known)).to(logits)) * has_one[:, None] / has_one.sum().clamp_min(1)
    return Params({k: errors.sum(0) if k == "head.bias" else errors.T @ means for k in h})


@method(
    Family.PERSONAL_LAYERS,
    "a head that it trains on the mean features of each class",
    "SGD with a personal body",
    tune={"server_lr": (0.01, 0.1, 1.0)},
)
def fedgh(*, server_lr: Positive = 0.1, server_epochs: Count = 1) -> Algorithm:
    """Personal bodies under a shared head, which the server trains on the clients' mean features of each class.

    Source: Yi et al. (2023).

    Args:
        server_lr: learning rate of the head on the server.
        server_epochs: passes of the server over the representations in a round; the paper takes one.
    """
    return Algorithm(
        RepresentationClient(),
        HeadTraining(server_lr, server_epochs),
        personal=NamedParameters(("body", *READERS)),
        network=ReadingNetwork(),
        evaluation_point="received",
        notes=("fedgh: of a class with one row, a client sends the features of that row",),
    )
