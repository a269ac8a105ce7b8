"""Results that were never trained, with accuracies that a test has chosen."""

import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedattune import Settings
from fedattune.core.effect import Effect


@dataclass
class Fake:
    """A result with these test accuracies per client."""

    algorithm: str
    accuracy: list[float]
    validation: float | None = 0.5
    headline: str = "trained"
    bytes_up: int = 260_000
    bytes_down: int = 0
    seconds: float = 12.34
    local_steps: float = 2000.0
    notes: list[str] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    facts: dict[str, float] = field(default_factory=lambda: {"weight_decay": 0.0})
    best: float = 0.75
    reached: int | None = None
    global_accuracy: float | None = None
    joined: list[float] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def history(self) -> list[Any]:
        """Losses as given, else one that no other method has."""
        losses = self.losses or [float(zlib.crc32(self.algorithm.encode()))]
        return [{"round": i + 1, self.headline: {"loss_uniform": loss}} for i, loss in enumerate(losses)]

    @property
    def n_clients(self) -> int:
        return len(self.accuracy)

    @property
    def clients(self) -> list[Any]:
        return [SimpleNamespace(id=f"c{i}", trained=a, received=0.0) for i, a in enumerate(self.accuracy)]

    @property
    def metrics(self) -> dict[str, float]:
        mean = float(np.mean(self.accuracy))
        keys = ("acc_uniform", "acc_pooled", "acc_std", "acc_worst10", "loss_uniform")
        return dict.fromkeys(keys, mean)

    @property
    def best_validation(self) -> dict[str, float] | None:
        return None if self.validation is None else {"acc_uniform": 0.7}

    @property
    def bmta(self) -> dict[str, dict[str, float]]:
        return {"uniform": {"accuracy": self.best, "round": 3}, "pooled": {"accuracy": 0.77, "round": 4}}

    @property
    def mean_last_10pct(self) -> dict[str, float]:
        return {"acc_uniform": 0.66}

    @property
    def newcomers(self) -> list[Any]:
        return [SimpleNamespace(trained=a, received=a / 2) for a in self.joined]

    def rounds_to(self, accuracy: float) -> int | None:
        assert accuracy == 0.9
        return self.reached


def results(*fakes: Fake) -> Any:
    return list(fakes)


LOCAL = [0.5, 0.6, 0.7, 0.8]
EIGHT = LOCAL * 2
