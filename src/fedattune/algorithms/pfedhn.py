"""pFedHN.

    @inproceedings{shamsian2021personalized,
      author = {Shamsian, Aviv and Navon, Aviv and Fetaya, Ethan and Chechik, Gal},
      title = {Personalized Federated Learning using Hypernetworks},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2021},
      eprint = {2103.04628},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    server   theta_i = h(v_i; phi)
    client   theta~_i <- theta_i, then SGD with momentum, gradients clipped to a norm
    server   (phi, v_i) <- optimizer step with the gradient (d theta_i / d(phi, v_i))^T (theta_i - theta~_i)
    used as  theta_i

The paper has one client per round: `--cohort 1`. With a larger cohort, the server generates all models at the start of
the round. Then it takes one step per client, with the theta_i of the current phi.
"""

from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from ..client import SGD
from ..core.algorithm import Algorithm, Joinable, Measurable
from ..core.effect import Effect, Mechanism
from ..core.optimizers import GradientDescent
from ..core.options import Count, NonNegative, Positive
from ..core.params import Params, add_prefix, clip_norm, select_prefix, squared_norm
from ..core.payload import Broadcast, MixingMatrices, Payload
from ..server.hypernetwork import apply_trunk, draw_linear, draw_normal, draw_trunk
from .table import Family, method

GENERATION = Mechanism("models", "their mean", "one model for all clients")

MEASURED_CLIENTS = 64
"""Clients whose generated models are compared."""


class PFedHNState(TypedDict):
    """The hypernetwork with all embeddings, and its velocity."""

    phi: Params
    velocity: Params


@dataclass(frozen=True)
class PFedHNServer(Joinable[PFedHNState], Measurable):
    """Server rule of pFedHN: sends theta_i = h(v_i; phi); phi and v_i follow J^T (theta_i - upload).

    The server generates all models of a cohort at once. Then it takes one optimizer step per upload, with the Jacobian
    J and the theta_i of the current phi. h has a linear layer, `depth` times ReLU and a linear layer, all `hidden`
    wide, and one linear head per tensor of the model. v_i has `embedding` values, by default 1 + N / 4, rounded down.
    The optimizer is SGD with momentum, weight decay, and gradients clipped to a norm.
    """

    embedding: int | None = None
    hidden: int = 100
    depth: int = 3
    hn_lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 1e-3
    clip: float = 50.0

    def init(self, w0: Params, n_clients: int) -> PFedHNState:
        like = next(iter(w0.values()))
        width = self._find_width(n_clients)
        v = draw_normal((n_clients, width), like)
        layers = draw_trunk((width, *[self.hidden] * (1 + self.depth)), like)
        heads = {name: draw_linear(self.hidden, w.shape, like) for name, w in w0.items()}
        phi = Params({"embedding": v, **add_prefix("trunk.", layers)})
        for key in ("weight", "bias"):
            phi |= add_prefix(f"{key}.", Params({name: head[key] for name, head in heads.items()}))
        return {"phi": Params(phi), "velocity": Params(phi).zeros()}

    def _find_width(self, n_clients: int) -> int:
        return self.embedding or int(1 + n_clients / 4)

    def broadcast(self, state: PFedHNState, ids: Tensor) -> Broadcast:
        phi = state["phi"]
        return Broadcast(Payload(generate_models(phi, phi["embedding"][ids])))

    def aggregate(self, state: PFedHNState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> PFedHNState:
        for row, client in enumerate(ids.tolist()):
            state = self._step(state, client, uploads.params.rows(row))
        return state

    def _step(self, state: PFedHNState, client: int, trained: Params) -> PFedHNState:
        old = state["phi"]
        with torch.enable_grad():
            phi = old.map(lambda a: a.detach().requires_grad_())
            model = generate_models(phi, phi["embedding"][client : client + 1]).rows(0)
            # Generated again: the steps of earlier clients changed phi since the broadcast.
            difference = list((model - trained).map(torch.detach).values())
            values = torch.autograd.grad(list(model.values()), list(phi.values()), difference)
        # phi has `hidden` times the model's values: each pass over it, and each copy, costs.
        g = clip_norm(Params(zip(phi, values, strict=True)), self.clip)
        g = g.map(lambda a, b: a.add_(b, alpha=self.weight_decay), old)
        velocity = g.map(lambda a, b: a.add_(b, alpha=self.momentum), state["velocity"])
        return {"phi": old.map(lambda a, b: torch.sub(a, b, alpha=self.hn_lr), velocity), "velocity": velocity}

    def measure_effects(self, state: PFedHNState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        phi = state["phi"]
        models = generate_models(phi, phi["embedding"][:MEASURED_CLIENTS])
        mean = models.map(lambda a: a.mean(0))
        spread = squared_norm(models - mean) / len(phi["embedding"][:MEASURED_CLIENTS])
        return (Effect(GENERATION, float((spread / squared_norm(mean).clamp_min(1e-30)).sqrt())),)

    def newcomer_model(self, state: PFedHNState) -> Params:
        phi = state["phi"]
        return generate_models(phi, phi["embedding"].mean(0, keepdim=True)).rows(0)

    def add_clients(self, state: PFedHNState, n_new: int) -> PFedHNState:
        """Return the state with the mean embedding for each of `n_new` more clients.

        The embeddings have the width for all clients, so that the state fits that of a run with as many from the start.
        Their new values, and the weights of these, are 0: then they stay 0, and the models are those of the old width.
        """
        n, width = state["phi"]["embedding"].shape
        n_more = self._find_width(n + n_new) - width

        def enlarge(params: Params, rows: Tensor) -> Params:
            v, first = torch.cat([params["embedding"], rows.expand(n_new, -1)]), params["trunk.0.weight"]
            wider = {"embedding": pad(v, (0, n_more)), "trunk.0.weight": pad(first, (0, n_more))}
            return Params({**params, **wider})

        phi, velocity = state["phi"], state["velocity"]
        mean = phi["embedding"].mean(0, keepdim=True)
        return {"phi": enlarge(phi, mean), "velocity": enlarge(velocity, torch.zeros_like(mean))}

    def aggregate_newcomers(
        self, state: PFedHNState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> PFedHNState:
        """Take steps of the newcomers' embeddings; everything else stays."""
        for row, client in enumerate(ids.tolist()):
            after = self._step(state, client, uploads.params.rows(row))
            state = {
                "phi": _with_row(state["phi"], after["phi"], client),
                "velocity": _with_row(state["velocity"], after["velocity"], client),
            }
        return state


def generate_models(phi: Params, v: Tensor) -> Params:
    """Generate models (R, ...) from the embeddings `v` (R, E) by the hypernetwork `phi`."""
    h = apply_trunk(select_prefix(phi, "trunk."), v)
    bias = select_prefix(phi, "bias.")
    return select_prefix(phi, "weight.").map(lambda w, b: torch.tensordot(h, w, ([1], [-1])) + b, bias)


def _with_row(old: Params, new: Params, client: int) -> Params:
    v = old["embedding"].clone()
    v[client] = new["embedding"][client]
    return Params({**old, "embedding": v})


@method(
    Family.GENERATED,
    "a model per client, generated by a hypernetwork",
    "SGD with momentum",
    tune={"hn_lr": (0.003, 0.01, 0.03)},
)
def pfedhn(
    *,
    embedding: Count | None = None,
    hidden: Count = 100,
    depth: Annotated[int, Field(ge=0, le=100)] = 3,
    hn_lr: Positive = 1e-2,
    hn_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    hn_weight_decay: NonNegative = 1e-3,
    hn_clip: Positive = 50.0,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    clip: Positive = 50.0,
    weight_decay: NonNegative | None = None,
) -> Algorithm:
    """One hypernetwork generates every client's model from an embedding of the client.

    Source: Shamsian et al. (2021), Algorithm 1; the defaults are the public code's.

    Args:
        embedding: length of v_i; None takes 1 + N / 4, rounded down, for N clients.
        hidden: width of the linear layers of h.
        depth: number of linear layers of h between the first layer and the heads.
        hn_lr: learning rate of the server's optimizer.
        hn_momentum: momentum of the server's optimizer.
        hn_weight_decay: l2 coefficient of the server's optimizer, for phi and all embeddings.
        hn_clip: maximum norm of the server's gradient, before weight decay.
        momentum: momentum of the client's SGD, from zero in every round.
        clip: maximum norm of the client's gradient, with weight decay.
        weight_decay: l2 coefficient of the client; None takes the run's coefficient if there is one, else 5e-5.
    """
    return Algorithm(
        SGD(clip=clip, optimizer=GradientDescent(momentum=momentum)),
        PFedHNServer(embedding, hidden, depth, hn_lr, hn_momentum, hn_weight_decay, hn_clip),
        evaluation_point="received",
        weight_decay=weight_decay,
        default_weight_decay=5e-5,
    )
