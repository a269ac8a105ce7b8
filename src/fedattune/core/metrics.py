"""Measure predictions: the metrics that a verdict can be about, for one client or for all rows together.

A metric is computed from the true values of some rows and the model's outputs for them: logits (n, classes) for
classes, or one number (n, 1) in the unit of the target.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError

MetricName = Literal["accuracy", "balanced_accuracy", "auc", "log_loss", "f1", "r2", "mae", "rmse"]

Values = NDArray[np.float64]
Labels = NDArray[np.int64]


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: its name on the command line and in files.
        label: its name in tables.
        is_higher_better: whether larger values are better.
        is_percent: whether tables show percent, and differences are in points.
        is_for_classes: whether the target is a class, not a number.
        has_unit: whether its values have the unit of the target.

    """

    name: MetricName
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
        """The word behind a difference."""
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


def format_number(value: float, digits: int = 4, sign: str = "") -> str:
    """Format a number with significant digits, and numbers up to a billion without a power of ten: 14,562.

    Args:
        value: the number.
        digits: significant digits; whole numbers of more digits keep all.
        sign: "+" to show the sign of positive numbers too.

    """
    is_long = 10**digits <= abs(value) < 1e9
    return f"{value:{sign},.0f}" if is_long else f"{value:{sign},.{digits}g}"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy", True, True, True),
        Metric("balanced_accuracy", "balanced accuracy", True, True, True),
        Metric("auc", "AUC", True, True, True),
        Metric("f1", "macro F1", True, True, True),
        Metric("log_loss", "log loss", False, False, True),
        Metric("r2", "R2", True, False, False),
        Metric("mae", "MAE", False, False, False, True),
        Metric("rmse", "RMSE", False, False, False, True),
    )
}
"""Name -> metric."""

CLASS_METRICS = tuple(name for name, metric in METRICS.items() if metric.is_for_classes)
NUMBER_METRICS = tuple(name for name, metric in METRICS.items() if not metric.is_for_classes)


def check_metric(name: str, *, is_regression: bool) -> Metric:
    """Return the metric with this name.

    Raises:
        ConfigError: the metric does not suit the target.

    """
    names = NUMBER_METRICS if is_regression else CLASS_METRICS
    if name not in names:
        kind = "a number" if is_regression else "a class"
        raise ConfigError(
            f"metric: got {name!r}, expected one of {', '.join(names)}, as the target is {kind}"
        )
    return METRICS[name]


def compute_metrics(y: NDArray[np.generic], outputs: Values) -> dict[str, float]:
    """Compute all metrics of some rows.

    Args:
        y: class numbers (n,) of integers, or target values (n,) of floats.
        outputs: logits (n, classes), or predicted values (n, 1).

    Returns:
        Metric -> value; NaN where the rows do not define it, such as the AUC of rows of a single class.

    """
    if not len(y):
        return dict.fromkeys(CLASS_METRICS if y.dtype.kind in "iu" else NUMBER_METRICS, float("nan"))
    with np.errstate(invalid="ignore", over="ignore"):  # outputs of a model that diverged
        if y.dtype.kind in "iu":
            return _measure_classes(y.astype(np.int64), np.asarray(outputs, dtype=np.float64))
        return _measure_numbers(y.astype(np.float64), np.asarray(outputs, dtype=np.float64)[:, 0])


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
    if metric in NUMBER_METRICS:
        errors: Values = outputs[:, 0] - y.astype(np.float64)
        return np.abs(errors) if metric == "mae" else errors**2
    if metric == "log_loss":
        return _compute_log_losses(y.astype(np.int64), outputs)
    return np.asarray(outputs.argmax(axis=1) != y, dtype=np.float64)


def _compute_log_losses(y: Labels, logits: Values) -> Values:
    from scipy.special import logsumexp

    losses: Values = logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]
    return losses


def _measure_classes(y: Labels, logits: Values) -> dict[str, float]:
    """Compute the metrics of classes.

    Balanced accuracy, F1 and AUC are means over the classes of the rows; AUC takes each class against all others.
    """
    n_classes, predicted = logits.shape[1], logits.argmax(axis=1)
    confusion = np.bincount(n_classes * y + predicted, minlength=n_classes**2).reshape(n_classes, n_classes)
    hits, rows, columns = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    present, seen = rows > 0, rows + columns > 0
    return {
        "accuracy": float(hits.sum() / len(y)),
        "balanced_accuracy": float((hits[present] / rows[present]).mean()),
        "auc": _compute_auc(y, logits, np.flatnonzero(present)),
        "f1": float((2 * hits[seen] / (rows + columns)[seen]).mean()),
        "log_loss": float(_compute_log_losses(y, logits).mean()),
    }


def _compute_auc(y: Labels, logits: Values, classes: Labels) -> float:
    """Compute the mean AUC of each class against all others: scikit-learn takes a hundred times as long.

    The AUC is the share of pairs of a row of the class and another row in which the first has the larger score.
    """
    if len(classes) < 2 or not np.isfinite(logits).all():
        return float("nan")
    scores = compute_probabilities(logits)
    if (
        logits.shape[1] == 2
    ):  # both classes have the same area; the difference keeps what a probability rounds off
        scores, classes = (logits[:, 1] - logits[:, 0])[:, None].repeat(2, axis=1), np.array([1])
    areas = []
    for label in classes:
        is_positive = y == label
        of_class, of_others = (np.sort(scores[chosen, label]) for chosen in (is_positive, ~is_positive))
        below, not_above = (np.searchsorted(of_others, of_class, side) for side in ("left", "right"))
        areas.append((below + not_above).sum() / (2 * len(of_class) * len(of_others)))
    return float(np.mean(areas))


def _measure_numbers(y: Values, predicted: Values) -> dict[str, float]:
    """Compute the metrics of numbers; rows of one value have no R2."""
    errors = predicted - y
    spread = float(((y - y.mean()) ** 2).sum())
    return {
        "r2": 1 - float((errors**2).sum()) / spread if spread > 0 else float("nan"),
        "mae": float(np.abs(errors).mean()),
        "rmse": float(np.sqrt((errors**2).mean())),
    }
