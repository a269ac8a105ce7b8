"""pFedLA and HeurpFedLA.

    @inproceedings{ma2022layer,
      author = {Ma, Xiaosong and Zhang, Jie and Guo, Song and Xu, Wenchao},
      title = {Layer-Wised Model Aggregation for Personalized Federated Learning},
      booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
      year = {2022},
      eprint = {2205.03993},
      archiveprefix = {arXiv}
    }

Rules:

    server   theta_bar_i,l = sum_k alpha_i^l[k] theta_k,l for every layer l, alpha_i = HN_i(v_i; psi_i);
             HeurpFedLA: theta_bar_i,l = theta_i,l for the `retain` layers with the largest alpha_i^l[i]
    client   theta_i <- theta_bar_i, then SGD
    server   G_i = theta_bar_i - theta_i,  dL/d(v_i, psi_i) = (d theta_bar_i / d(v_i, psi_i))^T G_i,
             v_i <- v_i - hn_lr dL/dv_i,  psi_i <- psi_i - hn_lr dL/dpsi_i
             `normalised`: N G_i,l / s_l^2 in place of G_i,l,  s_l^2 = mean_k ||theta_k,l - mean_j theta_j,l||^2
    used as  theta_bar_i

For a client that trained alone (docs/robustness.md), the stored theta_i takes the place of theta_bar_i in G_i.

Our source is a text of the paper without formulas, so equations have no numbers. The text does not describe the
hypernetwork. As in public code, v_i has 100 values, and HN_i has three linear layers of 100 with ReLU and one linear
head per layer of the model. Public code uses -G_i, which ascends, and `relu_sum`. The division by s_l^2 is our own: as
in normalised least mean squares, it makes steps independent of the scale of models, learning rates and layers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from ..client import SGD
from ..core.algorithm import (
    Advisory,
    Algorithm,
    Finished,
    LocalPlan,
    PerClient,
    ServerTraits,
    Storing,
    TrafficCounting,
    change,
)
from ..core.dense import column_blocks, linear
from ..core.options import Count, Positive
from ..core.params import Params, as_slice
from ..core.payload import Broadcast, LocalState, MixingMatrices, Payload, RoundContext, Traffic, count_traffic
from ..core.selectors import Unit, group_names
from ..server import hypernetwork as hn
from ..server.mixing import QuarantineState, QuarantineStore
from ..server.products import flatten, mix, sum_variances
from .table import Family, method


@dataclass(frozen=True)
class HeurPFedLAClient(SGD):
    """Client rule of HeurpFedLA: SGD from the received model, with the client's own retained components.

    The flags of `HeurPFedLAServer` name these components; both rules need the same `unit`.
    """

    unit: Unit = "layer"

    @property
    def plan(self) -> LocalPlan:
        plan = super().plan
        return replace(plan, extras={**plan.extras, "retained": "HeurPFedLAServer"})

    def init_local_state(self, w0: Params) -> LocalState:
        return {"last": w0, **super().init_local_state(w0)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Any:
        return super().begin(self._restore_retained(sent, local_state), local_state, fresh, context)

    def finish(self, carry: Any, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        upload, new_state = super().finish(carry, sent, local_state, context)
        return upload, {**new_state, "last": upload.params}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return super().received_model(self._restore_retained(sent, local_state), local_state, fresh)

    def _restore_retained(self, sent: Payload, local_state: LocalState) -> Payload:
        flags, own = sent.extra["retained"], local_state["last"]
        whole = Params(sent.params)
        for component, names in group_names(whole, self.unit).items():
            if component in flags:
                whole |= {k: torch.where(flags[component], own[k], whole[k]) for k in names}
        return sent._replace(params=Params(whole))


Norm = Literal["softmax", "relu_sum"]
Step = Literal["normalised", "gradient"]

BLOCK_WEIGHTS, BLOCK_WEIGHTS_ON_GPU = 1 << 22, 1 << 28
"""Values of hypernetworks to copy at a time. On a GPU, a call costs more than the copy."""

MIN_WEIGHT = 1e-6
"""Added to every weight of `relu_sum`, so that no row is zero."""

MIN_SQUARE = 1e-30
"""Minimum s_l^2; equal models teach nothing."""


class PFedLAState(QuarantineState):
    """The store, and a hypernetwork per client, which weighs the models of all."""

    hypernetworks: Params


PFedLAT = TypeVar("PFedLAT", bound=PFedLAState)


@dataclass(frozen=True)
class PFedLAServer(QuarantineStore[PFedLAT], Storing):
    """Server rule of pFedLA: sends sum_k alpha_i^l[k] theta_l[k] to client i, where alpha_i = HN_i(v_i; psi_i).

    HN_i has three linear layers with ReLU and a linear head per component, normalised over the K stored models. G_i,
    the client's start minus its upload, stands for the gradient of the client's loss. So d loss / d alpha_i^l[k] is
    <theta_l[k], G_i,l> over the models before aggregation. HN_i takes one step per round. Options: see `pfedla`.
    """

    unit: Unit = "layer"
    hn_lr: float = 5e-3
    hn_step: Step = "normalised"
    embedding: int = 100
    hidden: int = 100
    norm: Norm = "softmax"

    def init(self, w0: Params, n_clients: int) -> PFedLAT:
        state = super().init(w0, n_clients)
        everybody = torch.ones_like(state["in_pool"])
        return change(state, in_pool=everybody, hypernetworks=self._draw(w0, n_clients, n_clients))

    def _draw(self, w0: Params, n: int, outputs: int) -> Params:
        like = next(iter(w0.values()), torch.zeros(()))  # nothing at all may be shared
        heads = hn.draw_linear(self.hidden, (len(group_names(w0, self.unit)), outputs), like, (n,)).zeros()
        if self.norm == "relu_sum":
            heads["weight"] = hn.draw_uniform(0, 1, heads["weight"].shape, like)
        return hn.draw_stack((self.embedding, *[self.hidden] * 3), heads)

    def allowed(self, state: PFedLAT, ids: Tensor) -> Tensor:
        """Return which models (R, K) clients `ids` may receive: their own and, unless in quarantine, the pool's."""
        is_quarantined = state["quarantined"][ids, None]
        return (self.find_pool(state) & ~is_quarantined).scatter(1, ids[:, None], True)

    def logits(self, state: PFedLAT, ids: Tensor) -> Tensor:
        """Return the outputs (R, L, K) of the hypernetworks of clients `ids`, before normalisation."""
        networks = state["hypernetworks"]
        blocks = [networks.rows(as_slice(block)) for block in self._blocks(state, ids)]
        return torch.cat([hn.apply_stack(rows) for rows in blocks])

    def alpha(self, z: Tensor, ids: Tensor, allowed: Tensor) -> Tensor:
        """Return mixing weights (R, L, K) from the outputs of the hypernetworks; only `allowed` (R, K) models count."""
        allowed = allowed[:, None]
        if self.norm == "softmax":
            return torch.softmax(z.masked_fill(~allowed, -torch.inf), 2)
        positive = (z.relu() + MIN_WEIGHT) * allowed
        return positive / positive.sum(2, keepdim=True)

    def broadcast(self, state: PFedLAT, ids: Tensor) -> Broadcast:
        return self._mix(state, ids, self.alpha(self.logits(state, ids), ids, self.allowed(state, ids)))

    def _mix(self, state: PFedLAT, ids: Tensor, alpha: Tensor) -> Broadcast:
        """Mix models by the weights alpha (R, L, K); gather one tensor of the stored models at a time."""
        theta = state["theta"]
        components = group_names(theta, self.unit)
        weights = {component: alpha[:, i] for i, component in enumerate(components)}
        new = {
            name: mix(weights[component], theta.only([name]).rows(slice(None))[name])
            for component, names in components.items()
            for name in names
        }
        columns = torch.arange(alpha.shape[2], device=ids.device)
        mixing = MixingMatrices(ids, columns, weights)
        return Broadcast(Payload(Params({name: new[name] for name in theta})), mixing)

    def aggregate(self, state: PFedLAT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> PFedLAT:
        self.learn(state, ids, sent.params, uploads.params)
        return super().aggregate(state, ids, sent, uploads, n)

    def find_stored(self, state: PFedLAT, ids: Tensor) -> Params:
        stored: Params = state["theta"].rows(as_slice(ids))
        return stored

    def discard_uploads(self, state: PFedLAT, ids: Tensor) -> PFedLAT:
        """Put the mean of the other models in place of the uploads of clients `ids`."""
        return self.forget(state, ids)

    def learn(self, state: PFedLAT, ids: Tensor, sent: Params, uploads: Params) -> None:
        """Take a step of the hypernetworks of clients `ids`, from the models `sent` and `uploads`."""
        if not state["theta"]:
            return
        stack, blocks = state["hypernetworks"], self._blocks(state, ids)
        grads = torch.split(self._grad_alpha(state, sent, uploads), [len(block) for block in blocks])
        for block, gradient in zip(blocks, grads, strict=True):
            to_alpha = partial(self.alpha, ids=block, allowed=self.allowed(state, block))
            hn.descend_rows(stack, block, to_alpha, gradient, self.hn_lr)

    def _blocks(self, state: PFedLAT, ids: Tensor) -> tuple[Tensor, ...]:
        """Split the clients, so that copies of their hypernetworks stay small."""
        components = group_names(state["theta"], self.unit)
        head_weights = len(components) * len(state["n"]) * self.hidden
        max_weights = BLOCK_WEIGHTS if ids.device.type == "cpu" else BLOCK_WEIGHTS_ON_GPU
        return torch.split(ids, max(1, max_weights // max(1, head_weights)))

    def _grad_alpha(self, state: PFedLAT, sent: Params, uploads: Params) -> Tensor:
        """Return the gradient (R, L, K) of R clients' losses by their mixing weights: <theta_l[k], G_i,l>.

        `normalised` divides it by s_l^2 / K, so that the scale of the models (of those not in quarantine) cancels out.
        """
        counted = (~state["quarantined"]).nonzero().flatten()
        theta = state["theta"]
        components = group_names(theta, self.unit)
        like = next(iter(sent.values()))
        out = like.new_zeros(len(like), len(components), len(state["n"]))
        squares = like.new_zeros(len(components), 1)  # s_l^2
        for i, name in ((i, name) for i, names in enumerate(components.values()) for name in names):
            models = flatten(theta.only([name]).rows(slice(None))[name])
            before, after = flatten(sent[name]), flatten(uploads[name])
            for c in column_blocks(len(models) + len(like), models.shape[1], models.device):
                # Rows of alpha sum to 1, so a shift of all models changes nothing but the rounding errors.
                shifted = models[:, c] - models[:1, c]
                out[:, i] += linear(before[:, c] - after[:, c], shifted)
                squares[i] += sum_variances(shifted if len(counted) == len(shifted) else shifted[counted])
        if self.hn_step == "normalised":
            out.mul_(len(counted)).div_(squares.clamp_min_(MIN_SQUARE))
        return out

    def add_clients(self, state: PFedLAT, n_new: int) -> PFedLAT:
        """Return the state with `n_new` more clients, which weigh all earlier models and their own."""
        larger, w0 = super().add_clients(state, n_new), self.newcomer_model(state)
        old = state["hypernetworks"]
        new = self._draw(w0, n_new, len(larger["n"]))
        # Earlier clients weigh the same models as before: the new outputs are not allowed to them.
        return change(larger, hypernetworks=hn.append_networks(old, new))


class HeurPFedLAState(PFedLAState):
    """The state of pFedLA, and flags (N, L) of the components that each client retained last."""

    retained: PerClient[Tensor]


@dataclass(frozen=True)
class HeurPFedLAServer(PFedLAServer[HeurPFedLAState], TrafficCounting, Advisory):
    """Server rule of HeurpFedLA: the `retain` components with the largest alpha_i^l[i] are the client's own.

    Flags tell the client its retained components. These do not travel down, nor up without `upload_retained`, and their
    rows of the hypernetwork learn nothing. The first components win ties.
    """

    retain: int = 1
    upload_retained: bool = True

    traits = ServerTraits(HeurPFedLAState)

    def init(self, w0: Params, n_clients: int) -> HeurPFedLAState:
        state = super().init(w0, n_clients)
        flags = state["has_uploaded"][:, None].repeat(1, len(group_names(w0, self.unit)))
        return change(state, retained=flags)

    def alpha(self, z: Tensor, ids: Tensor, allowed: Tensor) -> Tensor:
        alpha = super().alpha(z, ids, allowed)
        return _with_own(alpha, self._choose(alpha, ids), ids)

    def _choose(self, alpha: Tensor, ids: Tensor) -> Tensor:
        """Return flags (R, L) of the components to retain under the weights alpha (R, L, K)."""
        weight = alpha.detach()[torch.arange(len(ids), device=ids.device), :, ids]
        first = weight.sort(stable=True, dim=1, descending=True).indices[:, : self.retain]
        return torch.zeros_like(weight, dtype=torch.bool).scatter(1, first, True)

    def broadcast(self, state: HeurPFedLAState, ids: Tensor) -> Broadcast:
        alpha = super().alpha(self.logits(state, ids), ids, self.allowed(state, ids))
        flags = self._choose(alpha, ids)
        payload, mixing = self._mix(state, ids, _with_own(alpha, flags, ids))
        components = group_names(payload.params, self.unit)
        extra = {"retained": Params({c: flags[:, i] for i, c in enumerate(components)})}
        return Broadcast(payload._replace(extra=extra), mixing)

    def aggregate(
        self, state: HeurPFedLAState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> HeurPFedLAState:
        """Aggregate as pFedLA; without `upload_retained`, keep the stored retained components."""
        flags, theta = sent.extra["retained"], state["theta"]
        now = state["retained"].index_copy(0, ids, torch.stack(list(flags.values()), 1))
        state = change(state, retained=now)
        if self.upload_retained:
            return super().aggregate(state, ids, sent, uploads, n)
        self.learn(state, ids, sent.params, uploads.params)  # retained components have constant weights
        for component, names in group_names(theta, self.unit).items():
            for name in names:
                one, new = theta.only([name]), uploads.params[name]
                keep = flags[component].view(-1, *[1] * (new.dim() - 1))
                one.put_rows(ids, Params({name: torch.where(keep, one.rows(as_slice(ids))[name], new)}))
        return self.mark_uploaded(state, ids, n)

    def warnings(self, state: HeurPFedLAState, ids: Tensor) -> tuple[str, ...]:
        components = len(group_names(state["theta"], self.unit))
        note = f"retain={self.retain} keeps all of this model's components ({components}): this is training alone"
        return (note,) if self.retain >= components else ()

    def bytes_down(self, state: HeurPFedLAState, ids: Tensor, sent: Payload) -> Traffic:
        flags = torch.stack(list(sent.extra["retained"].values()), 1)
        return sent.traffic() - self._traffic(state, flags)

    def bytes_up(self, state: HeurPFedLAState, ids: Tensor, uploads: Payload) -> Traffic:
        traffic, retained = uploads.traffic(), state["retained"][ids]
        return traffic if self.upload_retained else traffic - self._traffic(state, retained)

    def _traffic(self, state: HeurPFedLAState, flags: Tensor) -> Traffic:
        one, traffic = state["theta"].rows(0), Traffic()
        for names, times in zip(group_names(one, self.unit).values(), flags.sum(0).tolist(), strict=True):
            traffic += count_traffic(one.only(names), int(times))
        return traffic


def _with_own(alpha: Tensor, flags: Tensor, ids: Tensor) -> Tensor:
    """Replace the weights alpha (R, L, K) by the own model alone where a flag (R, L) is set."""
    own = torch.nn.functional.one_hot(ids, alpha.shape[2])[:, None].to(alpha.dtype)
    return torch.where(flags[:, :, None], own, alpha)


@method(
    Family.MIXTURE, "a mixture per client and layer, by learned weights", "SGD", tune={"hn_lr": (0.001, 0.005, 0.02)}
)
def pfedla(
    *,
    hn_lr: Positive = 5e-3,
    hn_step: Step = "normalised",
    embedding: Count = 100,
    hidden: Count = 100,
    norm: Norm = "softmax",
    unit: Unit = "layer",
) -> Algorithm:
    """Every layer of a client's model is mixed by weights that the client's own hypernetwork learns.

    Source: Ma et al. (2022).

    Args:
        hn_lr: learning rate of v_i and psi_i.
        hn_step: `normalised` divides the gradient of a layer by the spread of the layer's uploads, so alpha moves on
            any model and data; `gradient` is the paper's step, which leaves alpha near 1 / N at small `hn_lr`.
        embedding: length of v_i.
        hidden: width of the linear layers of HN_i.
        norm: `softmax` of zero heads, so that alpha starts at 1 / N; or `relu_sum` of heads from U(0, 1), as in public
            code.
        unit: part of the model with mixing weights of its own: the whole `model`, a `layer`, or a `tensor`.
    """
    return Algorithm(SGD(), PFedLAServer(unit, hn_lr, hn_step, embedding, hidden, norm), evaluation_point="received")


@method(
    Family.MIXTURE,
    "as pFedLA, without retained layers",
    "SGD; retains the layers that are mostly its own",
    tune={"hn_lr": (0.001, 0.005, 0.02)},
)
def heurpfedla(
    *,
    retain: Annotated[int, Field(ge=0, le=1_000_000)] = 1,
    upload_retained: bool = True,
    hn_lr: Positive = 5e-3,
    hn_step: Step = "normalised",
    embedding: Count = 100,
    hidden: Count = 100,
    norm: Norm = "softmax",
    unit: Unit = "layer",
) -> Algorithm:
    """Learned mixing as in pFedLA; clients retain the layers that are mostly their own, and are not sent them.

    Args:
        retain: number k of layers, or other `unit`s, that each client retains; 0 is pFedLA. See `pfedla` for the rest.
        upload_retained: whether clients upload their retained layers; the text does not say.
    """
    return Algorithm(
        HeurPFedLAClient(unit=unit),
        HeurPFedLAServer(unit, hn_lr, hn_step, embedding, hidden, norm, retain, upload_retained),
        evaluation_point="received",
    )
