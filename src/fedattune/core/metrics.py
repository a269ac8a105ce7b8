"""Measure predictions: the metrics that a verdict can be about, for one client or for all rows together.

A metric is computed from the true values of some rows and the model's outputs for them: logits (n, classes) for
classes, or one number (n, 1) in the unit of the target.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, list_some, summarize_error
from .own_code import check_new_name, is_reference, load_registered

MetricName = str
"""Name of a registered metric."""

Values = NDArray[np.float64]
Labels = NDArray[np.int64]

Measure = Callable[[NDArray[Any], Values], float]
"""Compute a metric of some rows from their true values (n,) and the outputs for them (n, classes) or (n, 1)."""

AnyMeasure = TypeVar("AnyMeasure", bound=Measure)


class Metric(NamedTuple):
    """A metric; see `register_metric`. `measure` gives NaN for rows that do not define it."""

    name: MetricName
    measure: Measure
    label: str
    is_higher_better: bool
    is_percent: bool
    is_for_classes: bool
    has_unit: bool = False

    @property
    def sign(self) -> int:
        """1 if larger values are better, else -1: a gain is `sign` times the difference."""
        return 1 if self.is_higher_better else -1

    @property
    def scale(self) -> float:
        """Factor from stored values to the values of tables."""
        return 100.0 if self.is_percent else 1.0

    @property
    def points(self) -> str:
        return "points" if self.is_percent else self.label

    def format(self, value: float) -> str:
        """Format a stored value for a sentence: 83.21%, or 4.12 with four significant digits."""
        return f"{100 * value:.2f}%" if self.is_percent else format_number(value)

    def format_gap(self, gap: float, *, signed: bool = False) -> str:
        """Format a difference of stored values with its unit."""
        number = self.scale * gap
        sign = "+" if signed else ""
        text = f"{number:{sign}.2f}" if self.is_percent else format_number(number, 3, sign)
        return f"{text} {self.points}"


def format_gain(value: float) -> str:
    """Format a gain with its sign, in points or in the unit of the metric."""
    if 100 <= abs(value) < 1e9:
        return f"{value:+,.0f}"
    return f"{value:+.2f}" if 0.1 <= abs(value) < 100 or not value else f"{value:+.3g}"


def format_interval(interval: tuple[float, float]) -> str:
    """Format an interval of a gain: +0.45 to +7.39."""
    return " to ".join(map(format_gain, interval))


def format_number(value: float, digits: int = 4, sign: str = "") -> str:
    """Format a number with significant digits, and whole numbers up to a billion with all of them: 14,562."""
    is_long = 10**digits <= abs(value) < 1e9
    return f"{value:{sign},.0f}" if is_long else f"{value:{sign},.{digits}g}"


CALIBRATION_BINS = 15
"""Bins of equal width of the calibration error, as in the paper and in most code."""

METRICS: dict[str, Metric] = {}
"""Name -> metric, in the order of tables."""


def register_metric(
    label: str, *, is_higher_better: bool, is_percent: bool = False, is_for_classes: bool = True, has_unit: bool = False
) -> Callable[[AnyMeasure], AnyMeasure]:
    """Register a function of true values (n,) and outputs (n, classes) or (n, 1) as the metric of its name.

    True values are class numbers, and outputs are logits. For a number, both have the unit of the target.

    Args:
        label: its name in tables.
        is_higher_better: whether larger values are better.
        is_percent: whether its values are fractions, of which tables show percent.
        is_for_classes: whether the target is a class, not a number.
        has_unit: whether its values have the unit of the target.

    Raises:
        ConfigError: the name is that of a metric of FedAttune.
    """

    def register(measure: AnyMeasure) -> AnyMeasure:
        name = measure.__name__
        check_new_name("metric", measure, METRICS[name].measure if name in METRICS else None)
        METRICS[name] = Metric(name, measure, label, is_higher_better, is_percent, is_for_classes, has_unit)
        return measure

    return register


def _list_metrics(*, is_for_classes: bool) -> list[str]:
    return [name for name, metric in METRICS.items() if metric.is_for_classes == is_for_classes]


def check_metric(name: str, *, is_regression: bool) -> Metric:
    """Return the metric with this name, or the custom metric that file.py:name refers to."""
    known = load_registered(name, "metric", METRICS) if is_reference(name) else METRICS.get(name)
    if known is None or known.is_for_classes == is_regression:
        kind = "a number" if is_regression else "a class"
        names = list_some(_list_metrics(is_for_classes=not is_regression), 20)
        raise ConfigError(
            f"metric: got {name!r}, expected one of {names}, as the target is {kind}; or a custom metric as "
            "file.py:metric"
        )
    return known


def compute_metrics(
    y: NDArray[np.generic], outputs: NDArray[Any], names: Sequence[str] | None = None
) -> dict[str, float]:
    """Compute metrics of some rows, by default all, from class numbers (n,) or target values (n,) of floats.

    A value is NaN where the rows do not define it, such as the AUC of rows of a single class.
    """
    is_for_classes = y.dtype.kind in "iu"
    y, outputs = y.astype(np.int64 if is_for_classes else np.float64), np.asarray(outputs, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # outputs of a model that diverged
        return {
            name: _measure(METRICS[name], y, outputs) if len(y) else float("nan")
            for name in (_list_metrics(is_for_classes=is_for_classes) if names is None else names)
        }


def _measure(metric: Metric, y: NDArray[Any], outputs: Values) -> float:
    try:
        return float(metric.measure(y, outputs))
    except Exception as error:
        raise ConfigError(
            f"metric {metric.name}: it fails on {len(y)} rows with outputs {outputs.shape}: {summarize_error(error)}; "
            "expected a function of true values (n,) and outputs (n, outputs) that returns one number, or NaN"
        ) from error


def try_metric(metric: Metric, n_classes: int) -> None:
    """Measure a few made-up rows, so that a broken custom metric is found before training.

    Args:
        metric: the metric.
        n_classes: number of classes; 0 if the target is a number.

    Raises:
        ConfigError: the metric fails, or returns no number.
    """
    n = 2 * max(2, n_classes)
    outputs = np.sin(np.arange(n * max(1, n_classes), dtype=np.float64)).reshape(n, -1)
    _measure(metric, np.arange(n) % n_classes if n_classes else np.linspace(-1.0, 1.0, n), outputs)


def compute_probabilities(logits: Values) -> Values:
    """Return the probabilities (n, classes) of logits (n, classes)."""
    from scipy.special import softmax

    probabilities: Values = softmax(np.asarray(logits, dtype=np.float64), axis=1)
    return probabilities


def compute_row_losses(y: NDArray[np.generic], outputs: Values, metric: str) -> Values:
    """Compute what each row adds to a metric that is a mean over rows, the smaller the better (n,).

    Log loss adds its terms, the metrics of numbers add squared errors (absolute ones for MAE), and all others count
    wrong classes.
    """
    outputs = np.asarray(outputs, dtype=np.float64)
    if not METRICS[metric].is_for_classes:
        errors: Values = outputs[:, 0] - y.astype(np.float64)
        return np.abs(errors) if metric == "mae" else errors**2
    if metric == "log_loss":
        return _compute_log_losses(y.astype(np.int64), outputs)
    return np.asarray(outputs.argmax(axis=1) != y, dtype=np.float64)


def _compute_log_losses(y: Labels, logits: Values) -> Values:
    from scipy.special import logsumexp

    losses: Values = logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]
    return losses


def _count_hits(y: Labels, logits: Values) -> tuple[Labels, Labels, Labels]:
    """Count, for each class, the right predictions, the rows, and the predictions (classes,)."""
    n_classes = logits.shape[1]
    pairs = np.bincount(n_classes * y + logits.argmax(axis=1), minlength=n_classes**2)
    confusion = pairs.reshape(n_classes, n_classes)
    return confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)


@register_metric("accuracy", is_higher_better=True, is_percent=True)
def accuracy(y: Labels, logits: Values) -> float:
    """Compute the share of rightly classified rows."""
    return float(_count_hits(y, logits)[0].sum() / len(y))


@register_metric("balanced accuracy", is_higher_better=True, is_percent=True)
def balanced_accuracy(y: Labels, logits: Values) -> float:
    """Compute the mean accuracy over the classes of the rows."""
    hits, rows, _ = _count_hits(y, logits)
    present = rows > 0
    return float((hits[present] / rows[present]).mean())


@register_metric("AUC", is_higher_better=True, is_percent=True)
def auc(y: Labels, logits: Values) -> float:
    """Compute the mean AUC of each class against all others: scikit-learn takes a hundred times as long.

    The AUC is the share of pairs of a row of the class and another row in which the first has the larger score.
    """
    classes = np.unique(y)
    if len(classes) < 2 or not np.isfinite(logits).all():
        return float("nan")
    scores = compute_probabilities(logits)
    if logits.shape[1] == 2:  # both classes have the same area; the difference keeps what a probability rounds off
        scores, classes = (logits[:, 1] - logits[:, 0])[:, None].repeat(2, axis=1), np.array([1])
    areas = []
    for label in classes:
        is_positive = y == label
        of_class, of_others = (np.sort(scores[chosen, label]) for chosen in (is_positive, ~is_positive))
        below, not_above = (np.searchsorted(of_others, of_class, side) for side in ("left", "right"))
        areas.append((below + not_above).sum() / (2 * len(of_class) * len(of_others)))
    return float(np.mean(areas))


@register_metric("macro F1", is_higher_better=True, is_percent=True)
def f1(y: Labels, logits: Values) -> float:
    """Compute the mean F1 over the classes of the rows and of the predictions."""
    hits, rows, columns = _count_hits(y, logits)
    seen = rows + columns > 0
    return float((2 * hits[seen] / (rows + columns)[seen]).mean())


@register_metric("log loss", is_higher_better=False)
def log_loss(y: Labels, logits: Values) -> float:
    """Compute the mean cross-entropy."""
    return float(_compute_log_losses(y, logits).mean())


@register_metric("calibration error", is_higher_better=False, is_percent=True)
def calibration_error(y: Labels, logits: Values) -> float:
    """Compute the expected calibration error: how far probabilities of predicted classes are from their accuracy.

    It is the mean over rows of |accuracy - mean probability| in the row's bin, of 15 bins of the largest probability.
    Source: Guo et al., On Calibration of Modern Neural Networks (ICML 2017), equation 3.
    """
    bins, gaps = find_calibration_gaps(y, logits)
    return float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(y))


def find_calibration_gaps(y: NDArray[np.generic], logits: Values) -> tuple[Labels, Values]:
    """Find the bin of each row (n,) by its largest probability, and 1 or 0 for right or wrong, minus this probability.

    The gap is NaN for a model that diverged.
    """
    confidence = compute_probabilities(logits).max(axis=1)
    bins = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1], confidence)  # a bin has its upper limit
    return bins, (logits.argmax(axis=1) == y) - confidence


def compute_recalls(y: NDArray[Any], logits: NDArray[Any]) -> Values:
    """Compute the share of each class's rows that are classified rightly (classes,); NaN for a class without rows."""
    hits, rows, _ = _count_hits(y, logits)
    return np.where(rows > 0, hits / np.maximum(rows, 1), np.nan)


@register_metric("R2", is_higher_better=True, is_for_classes=False)
def r2(y: Values, predicted: Values) -> float:
    """Compute the coefficient of determination; rows of one value have none."""
    spread = float(((y - y.mean()) ** 2).sum())
    return 1 - float(((predicted[:, 0] - y) ** 2).sum()) / spread if spread > 0 else float("nan")


@register_metric("MAE", is_higher_better=False, is_for_classes=False, has_unit=True)
def mae(y: Values, predicted: Values) -> float:
    """Compute the mean absolute error."""
    return float(np.abs(predicted[:, 0] - y).mean())


@register_metric("RMSE", is_higher_better=False, is_for_classes=False, has_unit=True)
def rmse(y: Values, predicted: Values) -> float:
    """Compute the root of the mean squared error."""
    return float(np.sqrt(((predicted[:, 0] - y) ** 2).mean()))
