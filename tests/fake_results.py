"""Results that were never trained, with accuracies that a test has chosen."""

import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedattune import Settings
from fedattune.core.effect import Effect
from fedattune.core.metrics import METRICS, Metric


@dataclass
class Fake:
    """A result with these test accuracies per client."""

    algorithm: str
    accuracy: list[float]
    validation: float | None = 0.5
    evaluation_point: str = "trained"
    bytes_up: int = 260_000
    bytes_down: int = 0
    seconds: float = 12.34
    local_steps: float = 2000.0
    notes: list[str] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    facts: dict[str, Any] = field(default_factory=dict)
    best: float = 0.75
    reached: int | None = None
    global_accuracy: float | None = None
    joined: list[float] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    epsilon: float | None = None
    losses: list[float] = field(default_factory=list)
    split: int = 0
    seed: int = 0
    predictions: dict[str, Any] = field(default_factory=dict)
    validations: list[float] = field(default_factory=list)
    n_train: list[int] = field(default_factory=list)
    n_validation: list[int] = field(default_factory=list)
    is_regression: bool = False
    diverged: tuple[str, ...] = ()
    shares: bool = False
    fractions: dict[str, float] = field(default_factory=lambda: {"test": 0.25, "validation": 0.1})

    def __post_init__(self) -> None:
        self.kind = "number" if self.is_regression else "class"
        n = len(self.accuracy)
        sizes = zip(self.n_train or [90] * n, self.n_validation or [10] * n, strict=True)
        self.facts = {
            "weight_decay": 0.0,
            "classes": [] if self.is_regression else ["no", "yes"],
            "clients": [
                {"id": f"c{i}", "n_train": train, "n_validation": held, "n_test": 20}
                for i, (train, held) in enumerate(sizes)
            ],
            **self.facts,
        }
        self.config = {"partition": {"fractions": self.fractions}}

    def measure_clients(self, metric: str, part: str = "test") -> Any:
        """The accuracies as given for any metric; validation as given, NaN for a client without validation rows."""
        if part == "test":
            return np.array(self.accuracy, dtype=float)
        held = np.array([one["n_validation"] for one in self.facts["clients"]])
        values = self.validations or [np.nan if self.validation is None else self.validation] * len(held)
        return np.where(held > 0, np.array(values, dtype=float), np.nan)

    def measure_for_choice(self, metric: str) -> Any:
        return self.measure_clients(metric, "validation")

    @property
    def judged(self) -> dict[str, float]:
        return self.metrics

    @property
    def history(self) -> list[Any]:
        """Losses as given, else one that no other method has; a global model if all share it."""
        losses = self.losses or [float(zlib.crc32(self.algorithm.encode()))]
        points = [self.evaluation_point, *["global"] * self.shares]
        return [{"round": i + 1} | {one: {"loss_uniform": loss} for one in points} for i, loss in enumerate(losses)]

    @property
    def n_clients(self) -> int:
        return len(self.accuracy)

    @property
    def clients(self) -> list[Any]:
        return [SimpleNamespace(id=f"c{i}", trained=a, received=0.0) for i, a in enumerate(self.accuracy)]

    @property
    def final(self) -> dict[str, dict[str, float]]:
        return dict.fromkeys(("received", "trained"), self.metrics)

    @property
    def metrics(self) -> dict[str, float]:
        mean = float(np.mean(self.accuracy))
        keys = ("acc_uniform", "acc_pooled", "acc_std", "acc_worst10", "loss_uniform")
        return dict.fromkeys(keys, mean)

    @property
    def best_validation(self) -> dict[str, float] | None:
        return None if self.validation is None else {"acc_uniform": 0.7}

    @property
    def curve_metric(self) -> Metric:
        return METRICS["rmse" if self.is_regression else "accuracy"]

    def read_curve(self, metrics: dict[str, float], over: str = "uniform") -> float:
        return 100 * metrics[f"acc_{over}"]

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
