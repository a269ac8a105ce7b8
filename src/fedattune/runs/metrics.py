"""The numbers of a run: per client and round, over clients, and the summaries that papers report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..core.metrics import MetricName
from .client_results import ClientResult
from .history import (
    JsonDict,
    Metrics,
    average_metrics,
    build_history,
    is_in_last_tenth,
    measure_scores,
    reaches,
    replace_nonfinite,
    score_clients,
    summarize_scores,
)
from .predictions import RowPredictions
from .run_facts import Point, RunFacts
from .stopping import StoppingRule, pick_by_others
from .storage.mixing_log import MixingLog
from .storage.store import RoundRecord, RunStore

Part = Literal["test", "validation"]


@dataclass(frozen=True, eq=False, repr=False)
class RunMetrics(RunFacts):
    """Everything about a run except its models.

    Attributes:
        store: scores, traffic and mixing matrices of all rounds.
        is_finished: whether all rounds are done.
        predictions: part (test or validation) -> outputs of the judged models for its rows; empty before the end of
            the run, and where the clients are elsewhere.

    """

    store: RunStore
    is_finished: bool = True
    predictions: Mapping[str, RowPredictions] = field(default_factory=dict)

    def __repr__(self) -> str:
        key = self._curve_key
        name = "RMSE" if self.is_regression else "accuracy"
        mean = f", mean {name} {self.metrics[key]:.4f}" if self.metrics else ""
        state = "" if self.is_finished else f" of {self.config['rounds']}, not finished"
        return f"Result({self.algorithm!r}, {self.n_clients} clients, round {self.rounds}{state}{mean})"

    @cached_property
    def _records(self) -> list[RoundRecord]:
        return self.store.rounds()

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return self._records[-1].round

    @property
    def seconds(self) -> float:
        """Wall-clock time of all rounds with their evaluations."""
        return self._records[-1].seconds

    @property
    def bytes_up(self) -> int:
        """Bytes that all clients sent together."""
        return self._records[-1].bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that all clients were sent together."""
        return self._records[-1].bytes_down

    @property
    def local_steps(self) -> float:
        """Local steps per client, on average."""
        return self._records[-1].steps / self.n_clients

    @cached_property
    def history(self) -> list[JsonDict]:
        """The evaluated rounds: test metrics at both points, validation metrics, bytes and seconds so far."""
        ids = [client["id"] for client in self.facts["clients"]]
        missing = {int(number): name for number, name in self.facts.get("missing", {}).items()}
        names = {**missing, **dict(zip(self.eval_ids, ids, strict=True))}
        return build_history(self.store, names, self.target_deviation)

    @cached_property
    def _scored(self) -> list[JsonDict]:
        """The entries of the history with scores at the headline point: the nodes of a deployment may all be absent."""
        return [entry for entry in self.history if entry[self.headline]]

    @property
    def final(self) -> dict[Point, Metrics | None]:
        """Test metrics at the last evaluation, at both points."""
        last = self.history[-1] if self.history else {}
        return {"received": last.get("received"), "trained": last.get("trained")}

    @property
    def metrics(self) -> Metrics:
        """Test metrics at the last evaluation, at the headline point."""
        return self.final[self.headline] or {}

    @property
    def best_test(self) -> JsonDict | None:
        """Test metrics of the round with the best mean on test data: an optimistic number that papers report."""
        return self._best(lambda entry: float(entry[self.headline][self._curve_key]), self._scored)

    @property
    def bmta(self) -> JsonDict | None:
        """FedMCSA's best mean test accuracy and its round: an optimistic number, because test data choose the round.

        {"uniform": {"accuracy", "round"}, "pooled": {"accuracy", "round"}}: the maximum over the evaluated rounds of
        the mean over clients, and of the mean over samples, at the headline point. Each has the first round that
        reaches it. None if the target is a number.
        """
        if not self._scored or self.is_regression:
            return None
        maxima = {}
        for mean in ("uniform", "pooled"):
            reached = [entry[self.headline][f"acc_{mean}"] for entry in self._scored]
            best = int(np.argmax(reached))
            maxima[mean] = {"accuracy": reached[best], "round": self._scored[best]["round"]}
        return maxima

    def rounds_to(self, accuracy: float) -> int | None:
        """Find the first evaluated round whose mean test accuracy reaches `accuracy`, a fraction; None if none does.

        The mean is taken over clients at the headline point.

        Raises:
            ConfigError: `accuracy` is no fraction, or the target is a number.

        """
        if self.is_regression:
            raise ConfigError("rounds_to counts the rounds to an accuracy, and the target is a number")
        if not 0 < accuracy <= 1:
            raise ConfigError(
                f"rounds_to needs a fraction above 0 and at most 1, such as 0.9, got {accuracy:g}"
            )
        reached = (e["round"] for e in self._scored if reaches(e[self.headline], accuracy))
        return next(reached, None)

    @property
    def global_accuracy(self) -> float | None:
        """Accuracy (or RMSE) of the one global model on all test parts together, at the last evaluation, if any."""
        key = "rmse_pooled" if self.is_regression else "acc_pooled"
        return next((float(e["global"][key]) for e in reversed(self.history) if "global" in e), None)

    @property
    def best_validation(self) -> JsonDict | None:
        """Test metrics of the round with the best mean on validation data; None without validation data."""
        if not self.history or not self.history[-1]["validation"]:
            return None
        entries = [e for e in self._scored if e["validation"] and e["validation"].get(self.headline)]
        return self._best(lambda entry: float(entry["validation"][self.headline][self._curve_key]), entries)

    @property
    def mean_last_10pct(self) -> Metrics | None:
        """Test metrics averaged over the evaluations in the last tenth of the rounds."""
        late = [e[self.headline] for e in self._late()]
        return average_metrics(late) if late else None

    @property
    def validation(self) -> float | None:
        """Validation accuracy (or RMSE) at the headline point, for choosing between methods.

        The mean over clients, averaged over the last tenth of the rounds: small validation parts make it jump.
        """
        late = [e["validation"].get(self.headline) for e in self._late() if e["validation"]]
        values = [one[self._curve_key] for one in late if one]
        return float(np.mean(values)) if values else None

    @cached_property
    def clients(self) -> list[ClientResult]:
        """The results of all evaluated clients at the last evaluation."""
        last = {
            key: float(score_clients(*(np.array(value) for value in scores), deviation=self.target_deviation))
            for key, scores in self.store.last_scores("test").items()
            if scores[0]
        }
        return [
            ClientResult(
                client["id"],
                client["n_train"],
                client["n_test"],
                *(last.get((number, point)) for point in ("received", "trained")),
            )
            for number, client in zip(self.eval_ids, self.facts["clients"], strict=True)
        ]

    @cached_property
    def judged_rounds(self) -> NDArray[np.int64]:
        """The round of each evaluated client's judged model (E,): chosen by validation data, or the last one."""
        stopping = StoppingRule(self.facts.get("early_stopping", "off"))
        if stopping.by != "off":
            stopping.add_rounds(self.store.scores("validation"), self.headline)
        last = self.history[-1]["round"] if self.history else 0
        return stopping.rounds if len(stopping.rounds) else np.full(len(self.eval_ids), last)

    def judged_scores(self, part: Part) -> NDArray[np.float64]:
        """Read the scores of the judged models on one part: samples, right predictions, sum of losses (3, E).

        Clients without samples have zeros, and clients that were never evaluated have NaN.
        """
        scores, rounds = np.full((3, len(self.eval_ids)), np.nan), self.judged_rounds
        if self.facts.get("early_stopping", "off") == "off":  # nodes of a deployment may be absent at times
            last = self.store.last_scores(part)
            for i, number in enumerate(self.eval_ids):
                scores[:, i] = last.get((number, self.headline), np.nan)
            return scores
        for round_, point, values in self.store.scores(part):
            if point == self.headline and (is_judged := rounds == round_).any():
                scores[:, is_judged] = values[:, is_judged]
        return scores

    @cached_property
    def judged(self) -> Metrics:
        """Test metrics of the judged models; empty before the first evaluation."""
        scores = self.judged_scores("test")
        has = np.isfinite(scores[0]) & (scores[0] > 0)
        return summarize_scores(*scores[:, has], deviation=self.target_deviation) if has.any() else {}

    def measure_clients(self, metric: MetricName, part: Part = "test") -> NDArray[np.float64]:
        """Measure the judged models on one part: a value for each evaluated client (E,).

        NaN where a client's rows do not define the metric. Without predictions, as before the end of a run and in
        deployments, only accuracy, log loss and RMSE are known.
        """
        if (predictions := self.predictions.get(part)) is not None:
            return predictions.by_client[metric]
        return measure_scores(metric, self.judged_scores(part), self.target_deviation)

    def measure_for_choice(self, metric: MetricName) -> NDArray[np.float64]:
        """Measure validation rows for the choice between methods: a value for each evaluated client (E,).

        A client's own rows choose its judged round, which flatters this round. So accuracy, log loss and RMSE are of
        the round that the other clients' rows choose. Other metrics are not known of every round, so they are of the
        judged models.
        """
        if (scores := self._scores_by_others) is not None:
            values = measure_scores(metric, scores, self.target_deviation)
            if np.isfinite(values).any():
                return values
        return self.measure_clients(metric, "validation")

    @cached_property
    def _scores_by_others(self) -> NDArray[np.float64] | None:
        scores = [v for _, point, v in self.store.scores("validation") if point == self.headline]
        return pick_by_others(scores, self.facts.get("early_stopping", "off"))

    @property
    def mixing(self) -> MixingLog:
        """The mixing matrices: round -> component -> (N, N) matrix, rows receive from columns.

        Of many clients, `mixing.among(round)` has the rows and columns of the clients that took part.
        """
        return self.store.mixing(self.n_clients)

    def to_json(self) -> JsonDict:
        """Return the run as plain JSON values; accuracies are fractions, and a loss that is not finite is None."""
        content = {
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "rounds": self.rounds,
            "n_parameters": self.n_parameters,
            "seconds": self.seconds,
            "bytes": {"up": self.bytes_up, "down": self.bytes_down},
            "local_steps": self.local_steps,
            "headline": self.headline,
            "final": self.final,
            "judged": self.judged,
            "metrics": {part: one.pooled for part, one in self.predictions.items()},
            "best_test": self.best_test,
            "bmta": self.bmta,
            "best_validation": self.best_validation,
            "mean_last_10pct": self.mean_last_10pct,
            "global_accuracy": self.global_accuracy,
            "history": self.history,
            "clients": [vars(c) for c in self.clients],
            "newcomers": [vars(c) for c in self.newcomers],
            "effects": [{**effect.mechanism._asdict(), "value": effect.value} for effect in self.effects],
            **{key: value for key, value in self.facts.items() if key == "client_scalars"},
            **({} if self.client_privacy is None else {"client_privacy": self.client_privacy}),
            **({} if self.record_privacy is None else {"record_privacy": self.record_privacy}),
            "notes": self.notes,
            "finished": self.is_finished,
        }
        return {key: replace_nonfinite(value) for key, value in content.items()}

    def _late(self) -> list[JsonDict]:
        """The evaluations in the last tenth of the rounds."""
        return [e for e in self._scored if is_in_last_tenth(e["round"], self.rounds)]

    def _best(self, key: Callable[[JsonDict], float], entries: Sequence[JsonDict]) -> JsonDict | None:
        if not entries:
            return None
        best = max(entries, key=lambda entry: self.curve_metric.sign * key(entry))
        return {**best[self.headline], "round": best["round"]}
