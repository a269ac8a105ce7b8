"""Measure predictions: the metrics that a verdict can be about, for one client or for all rows together.

A metric is computed from the true values of some rows and the model's outputs for them. These are class numbers (n,)
with logits (n, classes), or one number (n,) with (n, 1) in the unit of the target. Several labels are bool (n, L) with
logits (n, L); several numbers (n, M) with (n, M) are in deviations of each; classes of positions are (n, *positions)
with logits (n, classes, *positions).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, list_some, summarize_error
from .own_code import check_new_name, is_reference, load_registered
from .targets import IGNORED, KIND_WORDS, NUMBER_KINDS, TargetKind, find_kind

if TYPE_CHECKING:
    import torch

MetricName = str
"""Name of a registered metric."""

Values = NDArray[np.float64]
Labels = NDArray[np.int64]

Measure = Callable[[NDArray[Any], Values], float]
"""Compute a metric of some rows from their true values (n, ...) and the outputs for them (n, ...)."""

AnyMeasure = TypeVar("AnyMeasure", bound=Measure)


class Metric(NamedTuple):
    """A metric; see `register_metric`. `measure` gives NaN for rows that do not define it."""

    name: MetricName
    measure: Measure
    label: str
    is_higher_better: bool
    is_percent: bool
    kinds: tuple[TargetKind, ...]
    has_unit: bool = False

    @property
    def is_for_classes(self) -> bool:
        """True if the target is classes or labels, not numbers."""
        return not set(self.kinds) & set(NUMBER_KINDS)

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
    label: str,
    *,
    is_higher_better: bool,
    is_percent: bool = False,
    is_for_classes: bool = True,
    has_unit: bool = False,
    kinds: Sequence[TargetKind] | None = None,
) -> Callable[[AnyMeasure], AnyMeasure]:
    """Register a function of true values (n,) and outputs (n, classes) or (n, 1) as the metric of its name.

    True values are class numbers, and outputs are logits. For a number, both have the unit of the target. For the
    shapes of other targets, see the module.

    Args:
        label: its name in tables.
        is_higher_better: whether larger values are better.
        is_percent: whether its values are fractions, of which tables show percent.
        is_for_classes: whether the target is a class, not a number.
        has_unit: whether its values have the unit of the target.
        kinds: the targets that it measures: "class", "number", "labels", "numbers", "positions". By default "class",
            or "number" if it is not for classes.

    Raises:
        ConfigError: the name is that of a metric of FedAttune.
    """

    def register(measure: AnyMeasure) -> AnyMeasure:
        name = measure.__name__
        check_new_name("metric", measure, METRICS[name].measure if name in METRICS else None)
        of_one: tuple[TargetKind, ...] = ("class",) if is_for_classes else ("number",)
        METRICS[name] = Metric(
            name, measure, label, is_higher_better, is_percent, of_one if kinds is None else tuple(kinds), has_unit
        )
        return measure

    return register


def list_metrics(kind: TargetKind) -> list[str]:
    """List the names of the metrics for a kind of target."""
    return [name for name, metric in METRICS.items() if kind in metric.kinds]


CURVE_METRICS: dict[TargetKind, MetricName] = {
    "class": "accuracy",
    "number": "rmse",
    "labels": "label_accuracy",
    "numbers": "rmse",
    "positions": "position_accuracy",
}
"""Kind of target -> the metric that scores of every round give."""


def check_metric(name: str, kind: TargetKind) -> Metric:
    """Return the metric with this name, or the custom metric that file.py:name refers to."""
    known = load_registered(name, "metric", METRICS) if is_reference(name) else METRICS.get(name)
    if known is None or kind not in known.kinds:
        names = list_some(list_metrics(kind), 20)
        raise ConfigError(
            f"metric: got {name!r}, expected one of {names}, as the target is {KIND_WORDS[kind]}; or a custom metric "
            "as file.py:metric"
        )
    return known


def compute_metrics(
    y: NDArray[np.generic], outputs: NDArray[Any], names: Sequence[str] | None = None
) -> dict[str, float]:
    """Compute metrics of some rows, by default all for the kind of target that y is; see `find_kind`.

    A value is NaN where the rows do not define it, such as the AUC of rows of a single class.
    """
    kind = find_kind(y)
    if kind != "labels":
        y = y.astype(np.float64 if kind in NUMBER_KINDS else np.int64)
    outputs = np.asarray(outputs, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # outputs of a model that diverged
        return {
            name: _measure(METRICS[name], y, outputs) if len(y) else float("nan")
            for name in (list_metrics(kind) if names is None else names)
        }


def _measure(metric: Metric, y: NDArray[Any], outputs: Values) -> float:
    try:
        return float(metric.measure(y, outputs))
    except Exception as error:
        raise ConfigError(
            f"metric {metric.name}: it fails on {len(y)} rows with outputs {outputs.shape}: {summarize_error(error)}; "
            "expected a function of true values (n,) and outputs (n, outputs) that returns one number, or NaN"
        ) from error


def try_metric(metric: Metric, kind: TargetKind, output_shape: tuple[int, ...]) -> None:
    """Measure a few made-up rows, so that a broken custom metric is found before training.

    Args:
        metric: the metric.
        kind: kind of the target.
        output_shape: shape of the outputs for one row.

    Raises:
        ConfigError: the metric fails, or returns no number.
    """
    n = 2 * max(2, output_shape[0])
    outputs = np.sin(np.arange(n * prod(output_shape), dtype=np.float64)).reshape(n, *output_shape)
    y: dict[TargetKind, NDArray[Any]] = {
        "class": np.arange(n) % output_shape[0],
        "number": np.linspace(-1.0, 1.0, n),
        "labels": outputs > 0.2,
        "numbers": np.cos(outputs),
        "positions": np.arange(n * prod(output_shape[1:])).reshape(n, *output_shape[1:]) % output_shape[0],
    }
    _measure(metric, y[kind], outputs)


def compute_probabilities(logits: Values) -> Values:
    """Return the probabilities (n, classes) of logits (n, classes)."""
    probabilities: Values = _to_tensor(logits).softmax(1).numpy()
    return probabilities


def _to_tensor(logits: Values) -> "torch.Tensor":
    import torch  # ten times as fast as scipy.special

    return torch.tensor(np.ascontiguousarray(logits, dtype=np.float64), device="cpu")


def compute_row_losses(y: NDArray[np.generic], outputs: Values, metric: str) -> Values:
    """Compute what each row adds to a metric that is a mean over rows, the smaller the better (n,).

    Log loss adds its terms, the metrics of numbers add squared errors (absolute ones for MAE), and all others count
    wrong classes, or the share of wrong labels or positions.
    """
    outputs = np.asarray(outputs, dtype=np.float64)
    if not METRICS[metric].is_for_classes:
        errors = _by_number(outputs) - _by_number(y.astype(np.float64))
        losses: Values = (np.abs(errors) if metric == "mae" else errors**2).mean(axis=0)
        return losses
    if metric == "log_loss":
        return _compute_log_losses(y, outputs)
    if y.dtype == np.bool_:
        return np.asarray(((outputs > 0) != y).mean(axis=1))
    if y.ndim > 1:
        return _average_positions(outputs.argmax(axis=1) != y, y)
    return np.asarray(outputs.argmax(axis=1) != y, dtype=np.float64)


def _compute_log_losses(y: NDArray[Any], logits: Values) -> Values:
    """Compute the cross-entropy of each row (n,); of several labels or positions, it is their mean."""
    losses: Values
    if y.dtype == np.bool_:
        losses = np.logaddexp(0, np.where(y, -logits, logits)).mean(axis=1)
        return losses
    if y.ndim > 1:
        own = np.take_along_axis(logits, np.maximum(y, 0)[:, None], axis=1)[:, 0]
        return _average_positions(_to_tensor(logits).logsumexp(1).numpy() - own, y)
    losses = _to_tensor(logits).logsumexp(1).numpy() - logits[np.arange(len(y)), y]
    return losses


def _average_positions(values: NDArray[Any], y: NDArray[Any]) -> Values:
    """Return the mean of each row (n,) over the positions that count; 0 where none does."""
    counted = (y != IGNORED).reshape(len(y), -1)
    sums: Values = (values.reshape(len(y), -1) * counted).sum(axis=1) / np.maximum(counted.sum(axis=1), 1)
    return sums


def _count_hits(y: Labels, logits: Values) -> tuple[Labels, Labels, Labels]:
    """Count, for each class, the right predictions, the rows, and the predictions (classes,)."""
    return _count_pairs(y, logits.argmax(axis=1), logits.shape[1])


def _count_positions(y: Labels, logits: Values) -> tuple[Labels, Labels, Labels]:
    """Count what `_count_hits` counts over all positions that are not ignored."""
    counted = y != IGNORED
    return _count_pairs(y[counted], logits.argmax(axis=1)[counted], logits.shape[1])


def _count_pairs(y: Labels, predicted: Labels, n_classes: int) -> tuple[Labels, Labels, Labels]:
    pairs = np.bincount(n_classes * y + predicted, minlength=n_classes**2)
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
    return float(np.mean([_compute_area(scores[:, label], y == label) for label in classes]))


def _compute_area(scores: Values, is_positive: NDArray[np.bool_]) -> float:
    """Return the share of pairs of a positive row and another one (n,) in which the first has the larger score."""
    of_class, of_others = (np.sort(scores[chosen]) for chosen in (is_positive, ~is_positive))
    below, not_above = (np.searchsorted(of_others, of_class, side) for side in ("left", "right"))
    return float((below + not_above).sum() / (2 * len(of_class) * len(of_others)))


@register_metric("macro F1", is_higher_better=True, is_percent=True)
def f1(y: Labels, logits: Values) -> float:
    """Compute the mean F1 over the classes of the rows and of the predictions."""
    hits, rows, columns = _count_hits(y, logits)
    seen = rows + columns > 0
    return float((2 * hits[seen] / (rows + columns)[seen]).mean())


@register_metric("log loss", is_higher_better=False, kinds=("class", "labels", "positions"))
def log_loss(y: NDArray[Any], logits: Values) -> float:
    """Compute the mean cross-entropy; of labels, it is binary."""
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
    """Compute the share of each class's rows or positions that are classified rightly (classes,).

    Of several labels, it is the share of a label's rows that are predicted to have it (L,). NaN for a class or label
    without rows.
    """
    if y.dtype == np.bool_:
        hits, rows = ((logits > 0) & y).sum(axis=0), y.sum(axis=0)
    elif y.ndim > 1:
        hits, rows, _ = _count_positions(y, logits)
    else:
        hits, rows, _ = _count_hits(y, logits)
    return np.where(rows > 0, hits / np.maximum(rows, 1), np.nan)


@register_metric("R2", is_higher_better=True, kinds=NUMBER_KINDS)
def r2(y: Values, predicted: Values) -> float:
    """Compute the coefficient of determination; rows of one value have none. Of several numbers, it is the mean."""
    truth = _by_number(y)
    errors, spread = (((one - truth) ** 2).sum(axis=1) for one in (_by_number(predicted), truth.mean(axis=1)[:, None]))
    return float((1 - errors / spread).mean()) if (spread > 0).all() else float("nan")


@register_metric("MAE", is_higher_better=False, has_unit=True, kinds=NUMBER_KINDS)
def mae(y: Values, predicted: Values) -> float:
    """Compute the mean absolute error; of several numbers in deviations of each."""
    return float(np.abs(_by_number(predicted) - _by_number(y)).mean())


@register_metric("RMSE", is_higher_better=False, has_unit=True, kinds=NUMBER_KINDS)
def rmse(y: Values, predicted: Values) -> float:
    """Compute the root of the mean squared error; of several numbers in deviations of each."""
    return float(np.sqrt(((_by_number(predicted) - _by_number(y)) ** 2).mean()))


def _by_number(values: Values) -> Values:
    """Return values (n,) or (n, M) as one contiguous row for each number, (M, n)."""
    return np.ascontiguousarray(values.reshape(len(values), -1).T)


def _count_labels(y: NDArray[np.bool_], logits: Values) -> tuple[Labels, Labels]:
    """Count, for each label (L,), the rows that rightly have it, and its rows plus its predictions."""
    predicted = logits > 0
    return (predicted & y).sum(axis=0), y.sum(axis=0) + predicted.sum(axis=0)


@register_metric("label accuracy", is_higher_better=True, is_percent=True, kinds=("labels",))
def label_accuracy(y: NDArray[np.bool_], logits: Values) -> float:
    """Compute the share of right labels: 1 minus the Hamming loss."""
    return float(((logits > 0) == y).mean())


@register_metric("subset accuracy", is_higher_better=True, is_percent=True, kinds=("labels",))
def subset_accuracy(y: NDArray[np.bool_], logits: Values) -> float:
    """Compute the share of rows of which all labels are right."""
    return float(((logits > 0) == y).all(axis=1).mean())


@register_metric("micro F1", is_higher_better=True, is_percent=True, kinds=("labels",))
def micro_f1(y: NDArray[np.bool_], logits: Values) -> float:
    """Compute the F1 of all labels together; rows without any label, true or predicted, have none."""
    hits, both = _count_labels(y, logits)
    return float(2 * hits.sum() / both.sum()) if both.sum() else float("nan")


@register_metric("macro F1 of labels", is_higher_better=True, is_percent=True, kinds=("labels",))
def macro_f1(y: NDArray[np.bool_], logits: Values) -> float:
    """Compute the mean F1 over the labels that some row has or is predicted to have."""
    hits, both = _count_labels(y, logits)
    seen = both > 0
    return float((2 * hits[seen] / both[seen]).mean()) if seen.any() else float("nan")


@register_metric("macro AUC of labels", is_higher_better=True, is_percent=True, kinds=("labels",))
def macro_auc(y: NDArray[np.bool_], logits: Values) -> float:
    """Compute the mean AUC over the labels that some rows have and others lack."""
    several = np.flatnonzero(y.any(axis=0) & ~y.all(axis=0))
    if not len(several) or not np.isfinite(logits).all():
        return float("nan")
    return float(np.mean([_compute_area(logits[:, label], y[:, label]) for label in several]))


@register_metric("position accuracy", is_higher_better=True, is_percent=True, kinds=("positions",))
def position_accuracy(y: Labels, logits: Values) -> float:
    """Compute the share of positions whose class is right, such as the pixel accuracy."""
    counted = y != IGNORED
    return float((logits.argmax(axis=1) == y)[counted].mean()) if counted.any() else float("nan")


@register_metric("mean IoU", is_higher_better=True, is_percent=True, kinds=("positions",))
def mean_iou(y: Labels, logits: Values) -> float:
    """Compute the mean intersection over union, over the classes of positions that are there or predicted."""
    hits, rows, predicted = _count_positions(y, logits)
    union = rows + predicted - hits
    seen = union > 0
    return float((hits[seen] / union[seen]).mean()) if seen.any() else float("nan")
