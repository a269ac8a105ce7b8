"""L2GD's local loop: SGD on the own model, drawn to the clients' mean when the server says so."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Job, Memory, Payload
from ..params import Params
from .sgd import SGD, Start


@dataclass(frozen=True)
class Contraction(SGD):
    """x <- keep x + (1 - keep) mean before the local steps, once for every averaging that the server numbers.

    For servers that send `extra["average"]` with `keep` and `number` (`server.Coin`). Source: L2GD (Hanzely and
    Richtárik, 2020), Algorithm 1.
    """

    start: Start = "own"

    @property
    def needs(self) -> dict[str, str]:
        """What the coin said."""
        return {"average": "Coin"}

    def memory(self, w0: Params) -> Memory:
        """The own model, and the number of the last averaging it took part in."""
        like = next(iter(w0.values()))
        return {**super().memory(w0), "done": Params(number=like.new_zeros(()))}

    def finish(self, carry: object, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload and keep the trained model."""
        upload, kept = super().finish(carry, sent, memory, job)  # type: ignore[arg-type]
        return upload, {**kept, "done": sent.extra["average"].only(["number"])}

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The own model after the averaging, if there is a new one."""
        average = sent.extra["average"]
        new = average["number"] > memory["done"]["number"]
        keep = torch.where(new, average["keep"], torch.ones_like(average["keep"]))
        return keep * memory["own"] + (1 - keep) * sent.params

    def resting_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The own model."""
        return memory["own"]
