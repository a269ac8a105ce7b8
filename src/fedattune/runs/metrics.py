"""The numbers of a run: per client and round, over clients, and the summaries that papers report."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ..core.effect import Effect, Mechanism
from ..core.errors import ConfigError
from ..core.io import replace_nonfinite
from ..core.metrics import CURVE_METRICS, METRICS, Metric, MetricName
from ..core.settings import Settings
from ..core.targets import KIND_WORDS, TargetKind
from ..data.types import TargetScale
from .predictions import FOR_CHOICE, RowPredictions
from .stopping import StoppingRule, pick_by_others
from .store import MixingLog, RoundRecord, RunStore


@dataclass(frozen=True)
class ClientResult:
    """The result of one client.

    Attributes:
        id: name of the client.
        n_train: its training samples, and `n_test` its test samples.
        received: its test accuracy after the communication of its judged round, and `trained` after the local training
            before it; its RMSE if the target is a number.
    """

    id: str
    n_train: int
    n_test: int
    received: float | None
    trained: float | None


@dataclass(frozen=True)
class NewcomerResult:
    """The test accuracies of a client that joined after training; RMSE if the target is a number."""

    id: str
    n_train: int
    n_test: int
    received: float  # with the model that the server has for it
    trained: float  # after local rounds of its own from there
    local: float  # after training alone, from the initial model, for as many steps


Metrics = dict[str, float]
"""acc_uniform, acc_pooled, acc_std, acc_worst10, loss_uniform; accuracies are fractions.

If the target is a number: rmse_uniform, rmse_pooled, rmse_std and rmse_worst10 in its unit, and loss_uniform.
"""

JsonDict = dict[str, Any]
MERGED_NAME = "all clients together"
"""Name of the client that stands for all where the server learns sums only."""
ABSURD_RATIO = 1e3
"""Ratio of a model's error to the error of a constant above which its training counts as diverged."""


def score_clients(
    n: NDArray[np.int64], correct: NDArray[np.int64], loss: NDArray[np.float64], *, deviation: float | None = None
) -> NDArray[np.float64]:
    """Compute what curves show of each client (N,): its accuracy, or its RMSE in the unit of the target.

    The scores are samples n (at least one), correctly classified samples, and sum of the losses, (N,) each. If the
    target is a number, losses are squared errors in deviations of the target, and `deviation` is given.
    """
    return correct / n if deviation is None else deviation * np.sqrt(loss / n)


def measure_scores(metric: MetricName, scores: NDArray[np.float64], deviation: float | None) -> NDArray[np.float64]:
    """Compute a metric of each client (N,) from its scores; NaN for metrics that need more than scores."""
    n, correct, loss = scores
    with np.errstate(invalid="ignore", divide="ignore"):
        if metric in CURVE_METRICS.values() and METRICS[metric].is_for_classes == (deviation is None):
            return score_clients(n, correct, loss, deviation=deviation)
        if metric == "log_loss" and deviation is None:
            return cast(NDArray[np.float64], loss / n)
    return np.full(len(n), np.nan)


def find_diverged(
    scores: NDArray[np.float64], n_classes: int, constant: NDArray[np.float64] | float = 1.0
) -> NDArray[np.bool_]:
    """Find the clients (E,) whose error is not finite, or above ABSURD_RATIO times the error of a constant.

    Args:
        scores: samples, right predictions and sums of losses of each client (3, E); without samples, nothing is found.
        n_classes: number of classes; 2 for labels, 0 if the target is a number.
        constant: mean loss of a constant (E,), in squared deviations, if the target is a number.
    """
    n, _, loss = scores
    limit = ABSURD_RATIO * np.log(max(2, n_classes)) if n_classes else ABSURD_RATIO**2 * np.maximum(constant, 1.0)
    return np.asarray((n > 0) & ~(loss <= limit * n))


def summarize_scores(
    n: NDArray[np.int64], correct: NDArray[np.int64], loss: NDArray[np.float64], *, deviation: float | None = None
) -> Metrics:
    """Summarise the scores of clients, as for `score_clients`; clients without samples are left out.

    `acc_uniform` weighs every client alike, `acc_pooled` every sample. `acc_std` is the population standard deviation
    over clients, `acc_worst10` the mean over the worst tenth of the clients (at least one). With a deviation, the same
    of the RMSE: `rmse_uniform` and so on.
    """
    has = n > 0
    n, correct, loss = n[has], correct[has], loss[has]
    name, best_last = ("acc", 1) if deviation is None else ("rmse", -1)
    with np.errstate(invalid="ignore", over="ignore"):  # the spread of infinite errors is not a number
        values = score_clients(n, correct, loss, deviation=deviation)
        worst = np.sort(values)[::best_last][: max(1, round(0.1 * len(n)))]
        pooled = score_clients(n.sum(), correct.sum(), loss.sum(), deviation=deviation)
        return {
            f"{name}_uniform": float(values.mean()),
            f"{name}_pooled": float(pooled),
            f"{name}_std": float(values.std()),
            f"{name}_worst10": float(worst.mean()),
            "loss_uniform": float((loss / n).mean()),
        }


def is_in_last_tenth(round_: int, rounds: int) -> bool:
    """Return whether a round is in the last tenth of all rounds, which has at least one round."""
    return round_ > rounds - max(1, round(0.1 * rounds))


def reaches(entry: Metrics, accuracy: float) -> bool:
    """Return whether the mean over clients is at least `accuracy`."""
    # A mean of fractions that is 0.9 on paper may be 0.8999999999999999 in memory.
    return entry["acc_uniform"] >= accuracy - 1e-9


def build_history(store: RunStore, names: Mapping[int, str], deviation: float | None = None) -> list[JsonDict]:
    """List the evaluated rounds: metrics at both points on both parts, traffic and time so far, and missing clients.

    `diverged` and `absent` name clients since the evaluation before. Methods with one global model also have `global`.
    """
    points: dict[tuple[int, str], dict[str, Metrics]] = {}
    for part in ("test", "validation"):
        for round_, point, (n, correct, loss) in store.scores(part):
            metrics = points.setdefault((round_, part), {})
            metrics[point] = summarize_scores(n, correct, loss, deviation=deviation)
    entries: list[JsonDict] = []
    diverged, absent = set[int](), set[int]()
    for record in store.rounds():
        diverged.update(record.diverged)
        absent.update(record.absent)
        if (test := points.get((record.round, "test"))) is not None:
            entry = {
                "round": record.round,
                "received": test.get("received"),
                "trained": test.get("trained"),
                "validation": points.get((record.round, "validation")),
                "bytes": {"up": record.bytes_up, "down": record.bytes_down},
                "seconds": record.seconds,
                "diverged": [names[i] for i in sorted(diverged)],
                "absent": [names[i] for i in sorted(absent)],
            }
            entries.append(entry | ({"global": test["global"]} if "global" in test else {}))
            diverged.clear()
            absent.clear()
    return entries


Point = Literal["received", "trained"]
"""Point of a round at which models are evaluated: after the communication, or after the local training."""
Part = Literal["test", "validation"]


@dataclass(frozen=True, eq=False, repr=False)
class RunMetrics:
    """Everything about a run except its models.

    Attributes:
        config: all that defines the run.
        facts: facts about model, clients and notes.
        store: scores, traffic and mixing matrices of all rounds.
        is_finished: whether all rounds are done.
        predictions: part (test or validation) -> outputs of the judged models for its rows; `choice` has outputs for
            validation rows as in `measure_for_choice`. Empty before the end of the run, and where the clients are
            elsewhere.
    """

    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    store: RunStore
    is_finished: bool = True
    predictions: Mapping[str, RowPredictions] = field(default_factory=dict)

    def __repr__(self) -> str:
        key = self._curve_key
        name = "RMSE" if self.is_regression else "accuracy"
        mean = f", mean {name} {self.metrics[key]:.4f}" if self.metrics else ""
        state = "" if self.is_finished else f" of {self.config['rounds']}, not finished"
        return f"Result({self.algorithm!r}, {self.n_clients} clients, round {self.rounds}{state}{mean})"

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.config["algorithm"])

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run."""
        return Settings(**{k: v for k, v in self.config.items() if k in Settings.flat_fields()})

    @property
    def seed(self) -> int:
        """The seed of initial model, cohorts and batches."""
        return int(self.config["seed"])

    @property
    def split(self) -> int:
        """The number of the split into training, validation and test parts; 0 is the first one."""
        return int(self.config.get("partition", {}).get("split", 0))

    @property
    def evaluation_point(self) -> Point:
        """The point at which the method's paper evaluates."""
        return cast(Point, self.facts["evaluation_point"])

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of this result should know."""
        return list(self.facts["notes"])

    @property
    def effects(self) -> list[Effect]:
        """The effects of the method's mechanisms, at the end of the run; empty for methods without a mechanism."""
        measured = self.facts.get("effects", ())
        is_known = [value is not None and np.isfinite(value) for *_, value in measured]  # unknown of diverged models
        return [Effect(Mechanism(*words), value) for *words, value in itertools.compress(measured, is_known)]

    @property
    def reports(self) -> dict[str, JsonDict]:
        """The reports of the steps and features that a run uses, such as differential privacy: name -> facts."""
        return dict(self.facts.get("reports", {}))

    @property
    def epsilon(self) -> float | None:
        """The largest epsilon in the reports, of a client or a row; None without differential privacy or a bound."""
        stated: list[Any] = [one.get("largest", one["epsilon"]) for one in self.reports.values() if "epsilon" in one]
        spent = [one for value in stated for one in (value if isinstance(value, list) else [value])]
        return None if not spent or None in spent else float(max(spent))

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
        return cast(Sequence[int], self.facts.get("numbers", range(len(self.facts["clients"]))))

    @property
    def newcomers(self) -> list[NewcomerResult]:
        """Clients that joined after training; none unless clients were held out."""

        def restore(one: JsonDict) -> JsonDict:
            return {k: np.inf if v is None else v for k, v in one.items()}  # JSON has no infinite errors

        return [NewcomerResult(**restore(one)) for one in self.facts.get("newcomers", ())]

    @property
    def is_regression(self) -> bool:
        """True if the target is a number, or several."""
        return self.facts.get("target_scale") is not None

    @property
    def target_deviation(self) -> float | None:
        """The factor from the model's errors to those of tables, if the target is a number: its deviation.

        It is 1 for several numbers, whose errors stay in deviations.
        """
        scale = self.facts.get("target_scale")
        return None if scale is None else TargetScale.from_json(scale).error_unit

    @property
    def kind(self) -> TargetKind:
        """The kind of target: "class", "number", "labels", "numbers" or "positions"."""
        return cast(TargetKind, self.facts.get("target_kind", "number" if self.is_regression else "class"))

    @property
    def curve_metric(self) -> Metric:
        """The metric of curves over rounds: accuracy, of labels or positions too, or RMSE of numbers."""
        return METRICS[CURVE_METRICS[self.kind]]

    def read_curve(self, metrics: Mapping[str, float], over: str = "uniform") -> float:
        """Return the value of a curve at one evaluation: accuracy in percent, or RMSE in the unit of the target."""
        return self.curve_metric.scale * metrics[self._curve_key.replace("uniform", over)]

    @property
    def _curve_key(self) -> str:
        return "rmse_uniform" if self.is_regression else "acc_uniform"

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
        """The history without rounds that have no score at the evaluation point, as all nodes were absent."""
        return [entry for entry in self.history if entry[self.evaluation_point]]

    @property
    def final(self) -> dict[Point, Metrics | None]:
        """Test metrics at the last evaluation, at both points."""
        last = self.history[-1] if self.history else {}
        return {"received": last.get("received"), "trained": last.get("trained")}

    @property
    def metrics(self) -> Metrics:
        """Test metrics of the judged models, at the evaluation point; empty before the first evaluation.

        These are the models that a result keeps and exports. `final` has the numbers of the last evaluation.
        """
        return self.judged

    @property
    def best_test(self) -> JsonDict | None:
        """Test metrics of the round with the best mean on test data: an optimistic number that papers report."""
        return self._best(lambda entry: float(entry[self.evaluation_point][self._curve_key]), self._scored)

    @property
    def bmta(self) -> JsonDict | None:
        """FedMCSA's best mean test accuracy and its round: an optimistic number, because test data choose the round.

        {"uniform": {"accuracy", "round"}, "pooled": {"accuracy", "round"}}: the maximum over the evaluated rounds of
        the mean over clients, and of the mean over samples, at the evaluation point. Each has the first round that
        reaches it. None if the target is a number.
        """
        if not self._scored or self.is_regression:
            return None
        maxima = {}
        for mean in ("uniform", "pooled"):
            reached = [entry[self.evaluation_point][f"acc_{mean}"] for entry in self._scored]
            best = int(np.argmax(reached))
            maxima[mean] = {"accuracy": reached[best], "round": self._scored[best]["round"]}
        return maxima

    def rounds_to(self, accuracy: float) -> int | None:
        """Find the first evaluated round whose mean test accuracy reaches `accuracy`, a fraction; None if none does.

        The mean is taken over clients at the evaluation point.

        Raises:
            ConfigError: `accuracy` is no fraction, or the target is a number.
        """
        if self.is_regression:
            raise ConfigError(f"rounds_to counts the rounds to an accuracy, and the target is {KIND_WORDS[self.kind]}")
        if not 0 < accuracy <= 1:
            raise ConfigError(f"rounds_to needs a fraction above 0 and at most 1, such as 0.9, got {accuracy:g}")
        reached = (e["round"] for e in self._scored if reaches(e[self.evaluation_point], accuracy))
        return next(reached, None)

    @property
    def global_accuracy(self) -> float | None:
        """Accuracy (or RMSE) of the one global model on all test parts together, at the last evaluation, if any."""
        key = self._curve_key.replace("uniform", "pooled")
        return next((float(e["global"][key]) for e in reversed(self.history) if "global" in e), None)

    @property
    def best_validation(self) -> JsonDict | None:
        """Test metrics of the round with the best mean on validation data; None without validation data."""
        if not self.history or not self.history[-1]["validation"]:
            return None
        entries = [e for e in self._scored if e["validation"] and e["validation"].get(self.evaluation_point)]
        return self._best(lambda entry: float(entry["validation"][self.evaluation_point][self._curve_key]), entries)

    @property
    def mean_last_10pct(self) -> Metrics | None:
        """Test metrics averaged over the evaluations in the last tenth of the rounds."""
        late = [e[self.evaluation_point] for e in self._late()]
        return {key: float(np.mean([e[key] for e in late])) for key in late[0]} if late else None

    @property
    def validation(self) -> float | None:
        """Validation accuracy (or RMSE) at the evaluation point, for choosing between methods.

        The mean over clients, averaged over the last tenth of the rounds: small validation parts make it jump.
        """
        late = [e["validation"].get(self.evaluation_point) for e in self._late() if e["validation"]]
        values = [one[self._curve_key] for one in late if one]
        return float(np.mean(values)) if values else None

    @cached_property
    def clients(self) -> list[ClientResult]:
        """The results of all evaluated clients in the rounds of their judged models."""

        def measure(point: Point) -> list[float | None]:
            scores = self._read_judged("test", point)
            has = scores[0] > 0
            values = np.full(len(has), np.nan)
            with np.errstate(invalid="ignore"):
                values[has] = score_clients(*scores[:, has], deviation=self.target_deviation)
            return [float(value) if one else None for value, one in zip(values, has, strict=True)]

        each = zip(self.facts["clients"], measure("received"), measure("trained"), strict=True)
        return [ClientResult(one["id"], one["n_train"], one["n_test"], *values) for one, *values in each]

    @cached_property
    def judged_rounds(self) -> NDArray[np.int64]:
        """The round of each evaluated client's judged model (E,): chosen by validation data, or the last one."""
        stopping = StoppingRule(self.facts.get("early_stopping", "off"))
        if stopping.by != "off":
            stopping.add_rounds(self.store.scores("validation"), self.evaluation_point)
        last = self.history[-1]["round"] if self.history else 0
        return stopping.rounds if len(stopping.rounds) else np.full(len(self.eval_ids), last)

    def judged_scores(self, part: Part) -> NDArray[np.float64]:
        """Read the scores of the judged models on one part: samples, right predictions, sum of losses (3, E).

        Clients without samples have zeros, and clients that were never evaluated have NaN.
        """
        return self._read_judged(part, self.evaluation_point)

    def _read_judged(self, part: Part, point: Point) -> NDArray[np.float64]:
        if self.facts.get("early_stopping", "off") == "off":  # nodes of a deployment may be absent at times
            return self.store.last_scores(part, point, self.eval_ids)
        scores, rounds = np.full((3, len(self.eval_ids)), np.nan), self.judged_rounds
        for round_, scored_point, values in self.store.scores(part):
            if scored_point == point and (is_judged := rounds == round_).any():
                scores[:, is_judged] = values[:, is_judged]
        return scores

    @cached_property
    def diverged(self) -> tuple[str, ...]:
        """The ids of the clients whose judged model diverged.

        Its error is not finite or above ABSURD_RATIO times a constant's, or the client's training diverged in every
        round up to the judged one, so that its model is the initial one.
        """
        found = np.zeros(len(self.eval_ids), dtype=np.bool_)
        for part in ("test", "validation"):
            constant = np.ones(len(self.eval_ids))
            if self.is_regression and (rows := self.predictions.get(part)) is not None:
                scale = TargetScale.from_json(self.facts["target_scale"])
                is_one = self.kind == "number"  # several are in deviations already
                errors = ((rows.y - scale.mean) / scale.deviation) ** 2 if is_one else (rows.y**2).mean(axis=1)
                constant = np.bincount(rows.client, errors, rows.n_clients) / np.maximum(rows.sizes, 1)
            n_classes = 2 if self.kind == "labels" else len(self.facts.get("classes", ()))
            found |= find_diverged(self.judged_scores(part), n_classes, constant)
        failures = np.zeros(len(self.eval_ids), dtype=np.int64)
        position = {number: i for i, number in enumerate(self.eval_ids)}
        for record in self._records:
            hit = [position[i] for i in record.diverged if i in position]
            failures[hit] += record.round <= self.judged_rounds[hit]
        found |= (failures > 0) & (failures >= self.judged_rounds)
        return tuple(client["id"] for client, one in zip(self.facts["clients"], found, strict=True) if one)

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
            return predictions.measure_clients(metric)
        return measure_scores(metric, self.judged_scores(part), self.target_deviation)

    @property
    def recall(self) -> dict[str, float]:
        """Share of each class's or label's test rows that the judged models classify rightly; NaN without rows.

        Empty if the target is a number, and without predictions, as before the end of a run and in deployments.
        """
        if self.is_regression or (predictions := self.predictions.get("test")) is None:
            return {}
        return dict(zip(self.label_names, predictions.recalls.tolist(), strict=True))

    @property
    def label_names(self) -> list[str]:
        """Names of the classes, or of the labels of a target that has several; none for numbers."""
        several = self.facts["target_names"] if self.kind == "labels" else []
        return [*self.facts.get("classes", ()), *several]

    def measure_for_choice(self, metric: MetricName) -> NDArray[np.float64]:
        """Measure validation rows for the choice between methods: a value for each evaluated client (E,).

        A client's own rows choose its judged round, which flatters this round. So this is of the round that the other
        clients' rows choose. Without predictions, as for `measure_clients`, only accuracy, log loss and RMSE are known
        of it. Other metrics are then of the judged models.
        """
        if (rows := self.predictions.get(FOR_CHOICE)) is not None:
            return rows.measure_clients(metric)
        if (scores := self._scores_by_others) is not None:
            values = measure_scores(metric, scores, self.target_deviation)
            if np.isfinite(values).any():
                return values
        return self.measure_clients(metric, "validation")

    @cached_property
    def _scores_by_others(self) -> NDArray[np.float64] | None:
        scores = [v for _, point, v in self.store.scores("validation") if point == self.evaluation_point]
        return pick_by_others(scores, self.facts.get("early_stopping", "off"))

    @property
    def mixing(self) -> MixingLog:
        """The mixing matrices: round -> component -> (N, N) matrix, rows receive from columns.

        Of many clients, `mixing.among(round)` has the rows and columns of the clients that took part.
        """
        return self.store.mixing(self.n_clients)

    def to_json(self) -> JsonDict:
        """Return the run as plain JSON values; accuracies are fractions, and numbers that are not finite are None."""
        content = {
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "rounds": self.rounds,
            "n_parameters": self.n_parameters,
            "seconds": self.seconds,
            "bytes": {"up": self.bytes_up, "down": self.bytes_down},
            "local_steps": self.local_steps,
            "evaluation_point": self.evaluation_point,
            "final": self.final,
            "judged": self.judged,
            "metrics": {part: one.pooled for part, one in self.predictions.items() if part != FOR_CHOICE},
            "recall": self.recall,
            "best_test": self.best_test,
            "bmta": self.bmta,
            "best_validation": self.best_validation,
            "mean_last_10pct": self.mean_last_10pct,
            "global_accuracy": self.global_accuracy,
            "history": self.history,
            "clients": [vars(c) for c in self.clients],
            "diverged": list(self.diverged),
            "newcomers": [vars(c) for c in self.newcomers],
            "effects": [{**effect.mechanism._asdict(), "value": effect.value} for effect in self.effects],
            **{key: value for key, value in self.facts.items() if key == "client_scalars"},
            "reports": self.reports,
            "notes": self.notes,
            "finished": self.is_finished,
        }
        return dict(replace_nonfinite(content))

    def _late(self) -> list[JsonDict]:
        return [e for e in self._scored if is_in_last_tenth(e["round"], self.rounds)]

    def _best(self, key: Callable[[JsonDict], float], entries: Sequence[JsonDict]) -> JsonDict | None:
        if not entries:
            return None
        values = [self.curve_metric.sign * key(entry) for entry in entries]
        best = entries[int(np.argmax(np.nan_to_num(values, nan=-np.inf, posinf=np.inf, neginf=-np.inf)))]
        return {**best[self.evaluation_point], "round": best["round"]}
