"""Move one global model by an optimizer, which takes the mean update for a descent direction."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import Measurable, ServerUpdate, SumsOnly, SumWeighting
from ..core.effect import Effect, Mechanism
from ..core.params import Params, squared_norm
from ..core.payload import MixingMatrices, Payload
from .average import Weighting, client_weights, mean_update

OPTIMIZER = Mechanism("updates", "the clients' mean updates", "FedAvg")


@dataclass(frozen=True)
class ServerOptimizer(ServerUpdate[dict[str, Any]], SumsOnly, Measurable):
    """w <- w + server_lr * direction, from the mean update D = sum_i p_i (upload_i - sent_i) and moments."""

    weighting: Weighting = "uniform"
    server_lr: float = 1.0

    @abstractmethod
    def init_moments(self, w0: Params) -> dict[str, Params]:
        """Return the moments before the first round, by name."""

    @abstractmethod
    def direction(self, mean: Params, moments: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        """Return the direction and the new moments, from the mean update D."""

    def init(self, w0: Params, n_clients: int) -> dict[str, Any]:
        return {"w": w0, **self.init_moments(w0), "effect": torch.zeros((), dtype=torch.float64)}

    def aggregate(
        self, state: dict[str, Any], ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> dict[str, Any]:
        mean = mean_update(client_weights(n, self.weighting), sent.params, uploads.params)
        step, moments = self.direction(mean, state)
        update = self.server_lr * step
        effect = (squared_norm(update - mean) / squared_norm(mean).clamp_min(1e-30)).sqrt()
        return {"w": state["w"] + update, **moments, "effect": effect.double().cpu()}

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting]:
        """The mean of the models; all clients are sent the same one."""
        return {"params": self.weighting}

    def measure_effects(self, state: dict[str, Any], mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        return (Effect(OPTIMIZER, float(state["effect"])),)
