"""FedAM's and FedCP's local loop: personal body and head and the attention learn, the global parts are frozen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Batch, ClientUpdate, Grad, Job, Memory, Payload
from ..networks.separation import Vector, client_vector
from ..params import Params

LEARNS = ("body.", "head.", "attention.")


@dataclass(frozen=True)
class Separated(ClientUpdate):
    """Trains E_p, H_p and A of `networks.Separation`; uploads E_p, A, and a mixture of both heads.

    Attributes:
        reset: E_p starts from E_g in every round; else it goes on from where it was.
        head_mix: the uploaded head is (1 - c) H_g + c H_p; mixed here, so that H_p itself never leaves.
        vector: see `client_vector`.
        random_first: in the client's first round its vector is that of the initial network.

    """

    reset: bool = True
    head_mix: float = 0.5
    vector: Vector = "sum"
    random_first: bool = False

    def memory(self, w0: Params) -> Memory:
        """E_g and H_g as last received, for the trained model; and whether the client has trained."""
        kept: Memory = {"received": w0.only(k for k in w0 if k.startswith("global_"))}
        if self.random_first:
            kept["trained"] = Params(rounds=torch.zeros_like(w0["context"][0]))
        return kept

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor, job: Job) -> Params:
        """Start from the received model."""
        return self.received_model(sent, memory, fresh)

    def step(self, carry: Params, batch: Batch, grad: Grad, job: Job) -> Params:
        """One gradient step of the parts that learn."""
        g = grad(carry, batch)
        return Params({k: v - job.lr * g[k] if k.startswith(LEARNS) else v for k, v in carry.items()})

    def finish(self, carry: Params, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload E_p in place of E_g and the mixed head in place of H_g."""
        w, c = carry, self.head_mix
        upload = {}
        for k, v in w.items():
            if k.startswith("global_body."):
                upload[k] = w[k.removeprefix("global_")]
            elif k.startswith("global_head."):
                upload[k] = (1 - c) * v + c * w[k.removeprefix("global_")]
            else:
                upload[k] = v
        kept: Memory = {"received": w.only(memory["received"])}
        if self.random_first:
            kept["trained"] = memory["trained"] + 1
        return Payload(Params(upload)), kept

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The global parts with the client's own, and its vector from its head."""
        w = sent.params
        v = client_vector(self.vector, w["head.weight"], w["global_head.weight"])
        if self.random_first:
            v = torch.where(memory["trained"]["rounds"] > 0, v, w["context"])
        new = Params({**w, "context": v})
        if self.reset:
            new.update({k: w["global_" + k] for k in w if k.startswith("body.")})
        return new

    def trained_model(self, upload: Payload, memory: Memory) -> Params:
        """What was trained, with the global parts as they were received."""
        return Params({**upload.params, **memory["received"]})
