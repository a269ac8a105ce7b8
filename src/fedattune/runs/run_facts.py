"""The facts of a run: all that is known of it without the numbers of its rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..core.effect import Effect, Mechanism
from ..core.metrics import METRICS, Metric
from ..core.settings import Settings
from .client_results import NewcomerResult
from .history import JsonDict

Point = Literal["received", "trained"]
"""Point of a round at which models are evaluated: after the communication, or after the local training."""


@dataclass(frozen=True, eq=False, repr=False)
class RunFacts:
    """The settings of a run, and the facts about its clients, model and notes.

    Attributes:
        config: all that defines the run.
        facts: facts about model, clients and notes.

    """

    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.config["algorithm"])

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return Settings(**{k: v for k, v in self.config.items() if k in Settings.model_fields})

    @property
    def seed(self) -> int:
        """The seed of initial model, cohorts and batches."""
        return int(self.config["seed"])

    @property
    def split(self) -> int:
        """The number of the split into training, validation and test parts; 0 is the first one."""
        return int(self.config.get("partition", {}).get("split", 0))

    @property
    def headline(self) -> Point:
        """The point at which the method's paper evaluates."""
        point: Point = self.facts["headline"]
        return point

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of this result should know."""
        return list(self.facts["notes"])

    @property
    def effects(self) -> list[Effect]:
        """The effects of the method's mechanisms, at the end of the run; empty for methods without a mechanism."""
        measured = self.facts.get("effects", ())
        return [Effect(Mechanism(part, like, same), value) for part, like, same, value in measured]

    @property
    def client_privacy(self) -> JsonDict | None:
        """Differential privacy of whole clients: epsilon, delta, mechanism and more; None without it."""
        return self.facts.get("client_privacy")

    @property
    def record_privacy(self) -> JsonDict | None:
        """Differential privacy of training rows: an epsilon and a noise multiplier per client; None without it."""
        return self.facts.get("record_privacy")

    @property
    def epsilon(self) -> float | None:
        """Epsilon that the run has spent for each client, or for a row of the worst client; None without noise."""
        if self.client_privacy is not None or self.record_privacy is None:
            return None if self.client_privacy is None else self.client_privacy["epsilon"]
        spent = self.record_privacy["epsilon"]
        return None if None in spent else max(spent)

    @property
    def n_parameters(self) -> int:
        """Parameters of one client's model."""
        return int(self.facts["n_parameters"])

    @property
    def n_clients(self) -> int:
        """Number of clients that took part; `clients` has the evaluated ones."""
        return int(self.facts.get("population", len(self.facts["clients"])))

    @property
    def eval_ids(self) -> Sequence[int]:
        """The numbers of the evaluated clients."""
        ids: Sequence[int] = self.facts.get("numbers", range(len(self.facts["clients"])))
        return ids

    @property
    def newcomers(self) -> list[NewcomerResult]:
        """Clients that joined after training; none unless clients were held out."""
        return [NewcomerResult(**one) for one in self.facts.get("newcomers", ())]

    @property
    def is_regression(self) -> bool:
        """True if the target is a number."""
        return self.facts.get("target_scale") is not None

    @property
    def target_deviation(self) -> float | None:
        """The standard deviation that is one unit of the model's outputs, if the target is a number."""
        scale = self.facts.get("target_scale")
        return None if scale is None else float(scale["deviation"])

    @property
    def curve_metric(self) -> Metric:
        """The metric of curves over rounds: accuracy, or RMSE of a target that is a number."""
        return METRICS["rmse" if self.is_regression else "accuracy"]

    def read_curve(self, metrics: Mapping[str, float], over: str = "uniform") -> float:
        """Return the value of a curve at one evaluation: accuracy in percent, or RMSE in the unit of the target.

        Args:
            metrics: the metrics of an evaluation.
            over: uniform (mean over clients), pooled, or worst10.

        """
        name = "rmse" if self.is_regression else "acc"
        return self.curve_metric.scale * metrics[f"{name}_{over}"]

    @property
    def _curve_key(self) -> str:
        return "rmse_uniform" if self.is_regression else "acc_uniform"
