"""Baselines of a comparison, trained on the very same rows and splits as the methods.

The linear models are regularised: one strength for all clients, which validation rows of many clients choose, as they
choose the options of the methods. Boosting has the defaults of scikit-learn, which are what a practitioner tries first,
and takes a column of categories as such.
Refused: pipelines with a search of their own. They would choose by data that the methods do not see.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..analysis.compare import BASELINE, Baseline, Kind, average_weighted, read_baselines, weigh_tests
from ..core.errors import FedAttuneError
from ..core.metrics import METRICS, MetricName, compute_probabilities
from ..core.targets import NUMBER_KINDS, TargetKind
from ..runs.callbacks import OnRound
from ..runs.predictions import RowPredictions
from .plan import Plan, ShouldStop, StoppedError

if TYPE_CHECKING:
    from ..data import Federation
    from ..data.client_index import Client

Array = NDArray[Any]
PARTS = ("test", "validation")
BOOSTING_POOLED = "boosting pooled"
UNSEEN_LOGIT = -20.0
"""Logit of a class that a client's training rows lack: a probability of two in a billion."""
STRENGTHS = {"logistic": (0.01, 0.1, 1.0, 10.0), "ridge": (0.1, 1.0, 10.0, 100.0)}
"""Values of scikit-learn's C of logistic regression and alpha of ridge regression; validation rows choose."""
MAX_TUNED_ROWS = 100_000
"""Training rows of all clients above which the strength is 1: it hardly matters there, and each fit takes long."""
MAX_TUNED_CLIENTS = 300
"""Clients whose rows choose the strength for all."""
MAX_CLIENT_FEATURES = 200
"""Clients up to which a pooled model gets the client as a feature."""
N_TIMED, MAX_ALONE_S = 20, 30
"""Clients by which the time of boosting is estimated, and the seconds above which a budget leaves it out."""
MAX_BOOSTED_CATEGORIES = 255
"""Categories of a column that scikit-learn's boosting takes as such."""
MIN_BOOSTED_ROWS = 40
"""Training rows below which boosting cannot split: twice scikit-learn's minimum rows of a leaf."""
MIN_SKILL = 0.05
"""Minimum share of the variance of random rows that boosting explains for a comparison with the newest rows."""


@dataclass(frozen=True)
class SplitRows:
    """The rows of the evaluated clients of one split, by the clients' numbers `ids` (E,).

    `federation` lacks clients that join later; clients in `excluded` are never evaluated. With `has_client`, the inputs
    have one more column per client, which is 1 in its rows.
    """

    federation: "Federation"
    ids: Sequence[int]
    excluded: Collection[int] = ()
    has_client: bool = False

    def select(self, part: str) -> list[Array]:
        """Return the sample numbers of a part of each evaluated client."""
        lists = self.federation.part(cast(Any, part))
        return [np.asarray(lists[i]) for i in self.ids]

    def gather(self, samples: Array, owners: Array | None = None) -> tuple[Array, Array]:
        """Return the model's inputs, flat (n, F), and the targets (n,) of some samples.

        With `has_client`, `owners` (n,) are the numbers of the clients, as clients may share samples.
        """
        import torch

        index = torch.as_tensor(samples, device=self.federation.y.device)
        x = self.federation.features(index).float().cpu().numpy().reshape(len(samples), -1)
        if self.has_client:
            x = np.hstack([x, np.eye(len(self.federation.clients), dtype=x.dtype)[owners]])
        return x, self.federation.y[index].cpu().numpy()

    @cached_property
    def pooled(self) -> "SplitRows":
        """The same rows with the numbers of a table scaled by all training rows."""
        federation = self.federation.rescale()
        return self if federation is self.federation else replace(self, federation=federation)

    def pool(self) -> tuple[Array, Array]:
        """Return the training samples of all honest clients, also those that are not evaluated, and their clients."""
        lists = self.federation.part("train")
        ids = [i for i in range(len(lists)) if i not in self.excluded]
        return np.concatenate([np.asarray(lists[i]) for i in ids]), np.repeat(ids, lists.sizes[ids])


def train_baselines(
    plan: Plan, out: Path, should_stop: ShouldStop, show: Callable[[str], None] = lambda _: None
) -> list[Baseline]:
    """Train the baselines of an experiment that its folder lacks, on every split."""
    for federation in plan.federations:
        split = int(federation.partition.get("split", 0))
        done = {one.name for one in read_baselines([out]) if one.split == split}
        rows = _find_rows(plan, federation)
        spent: dict[str, float | None] = {}
        for name, kind, predict in _list_baselines(plan, rows, spent):
            if name in done:
                continue
            if should_stop():
                raise StoppedError(f"stopped before the baseline {name}")
            show(f"baseline {name}" + f" on split {split}" * (len(plan.federations) > 1))
            started = time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                predictions = predict(should_stop)
            if not predictions:
                show(f"baseline {name} is left out: it would take more than {MAX_ALONE_S} seconds on each split")
                continue
            told = [str(one.message) for one in caught if type(one.message).__name__ == "ConvergenceWarning"]
            notes = tuple(sorted({f"{name}: {one.splitlines()[0]}" for one in told}))
            seconds = time.perf_counter() - started
            Baseline(name, kind, split, federation.digest, seconds, predictions, notes, spent.get(name)).save(out)
    return read_baselines([out])


def _find_rows(plan: Plan, federation: "Federation") -> SplitRows:
    """Find the rows of the clients that an experiment evaluates."""
    from ..training.sampling import sample_eval_ids
    from ..training.setup import hold_out_newcomers
    from ..training.uploads.adversary import sample_attackers

    training, _ = hold_out_newcomers(federation, plan.experiment)
    excluded = sample_attackers(plan.experiment, training)
    return SplitRows(training, sample_eval_ids(plan.experiment, training, excluded).tolist(), excluded)


def score_newest(plan: Plan, baselines: Sequence[Baseline], show: Callable[[str], None]) -> tuple[str, float] | None:
    """Train boosting on everybody's oldest rows; return the date column and the metric on the newest if far worse.

    Far worse: its metric is worse than on the first random split, whose parts share their days, and it surely explains
    less than half as large a share of the variance. None without one column of dates, or if the rows stay in groups.
    """
    schema = plan.federation.schema
    if plan.federate is None or schema is None or len(schema.dates) != 1 or plan.federation.groups is not None:
        return None
    try:
        federation = plan.federate(0, plan.experiment.scaling, "time")
    except FedAttuneError:  # another column of dates is no feature, or too few clients have dates
        return None
    show(f"{BOOSTING_POOLED} on the newest rows")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        boosting = by_part(partial(_fit_boosting, categories=_Categories.find(federation)), federation.kind)
        predictions = _fit_pooled(_find_rows(plan, federation), boosting)
    both = [next(one for one in baselines if one.name == BOOSTING_POOLED and one.split == 0)]
    both.append(replace(both[0], predictions=predictions))
    (skill, error), (late, late_error) = (_measure_skill(one.predictions["test"]) for one in both)
    metric = METRICS[cast(MetricName, plan.metric)]
    random, newest = (average_weighted(one.measure_clients(metric.name), weigh_tests([one])) for one in both)
    explains_less = skill - 2 * error > MIN_SKILL and late + 2 * np.hypot(late_error, error / 2) < skill / 2
    is_worse = explains_less and metric.sign * (random - newest) > 0
    return (str(federation.partition["time_column"]), newest) if is_worse else None


def _measure_skill(rows: RowPredictions) -> tuple[float, float]:
    """Return the share of the rows' variance that predictions explain (of classes: the Brier skill), and its error."""
    from scipy.special import expit

    outputs = rows.outputs.astype(np.float64)
    if rows.kind == "class":
        y, predicted = np.eye(outputs.shape[1])[rows.y], compute_probabilities(outputs)
    else:
        y = rows.y.astype(np.float64).reshape(len(outputs), -1)
        predicted = expit(outputs) if rows.kind == "labels" else outputs
    errors, spread = (((y - one) ** 2).sum(axis=1) for one in (predicted, y.mean(axis=0)))
    variance = max(float(spread.mean()), 1e-12)
    share = float(errors.mean()) / variance
    return 1 - share, float((errors - share * spread).std() / len(y) ** 0.5 / variance)


Predict = Callable[[ShouldStop], dict[str, RowPredictions]]


def _list_baselines(plan: Plan, rows: SplitRows, spent: dict[str, float | None]) -> Iterator[tuple[str, Kind, Predict]]:
    """List the baselines with what fits them; `spent` receives the epsilon of one that trains with noise."""
    kind = rows.federation.kind
    is_regression = kind in NUMBER_KINDS
    constant = _fit_constant_positions if kind == "positions" else by_part(_fit_constant, kind)
    yield "mean" if is_regression else "majority", "alone", lambda stop: _fit_each(rows, constant, stop)
    if "sklearn" in plan.experiment.baseline:
        first, fit = ("ridge", _fit_ridge) if is_regression else ("logistic", _fit_logistic)
        is_large = len(rows.pool()[0]) > MAX_TUNED_ROWS
        strengths = (1.0,) if is_large else STRENGTHS[first]
        linear = [by_part(partial(fit, strength=strength), kind) for strength in strengths]
        yield f"{first} alone", "alone", lambda stop: _tune_each(rows, linear, stop)
        is_hurried = plan.experiment.budget not in (None, "off")
        boosting = by_part(partial(_fit_boosting, categories=_Categories.find(rows.federation)), kind)
        yield "boosting alone", "alone", lambda stop: _fit_each(rows, boosting, stop, is_hurried=is_hurried)
        yield f"{first} pooled", "pooled", lambda _: _tune_pooled(rows, linear)
        if len(rows.federation.clients) <= MAX_CLIENT_FEATURES:
            named = replace(rows, has_client=True)
            yield f"{first} pooled+client", "pooled", lambda _: _tune_pooled(named, linear)
        yield BOOSTING_POOLED, "pooled", lambda _: _fit_pooled(rows, boosting)
    if "centralized" in plan.experiment.baseline:
        yield "centralized", "pooled", lambda stop: _train_centralized(plan, rows, stop, spent)


Fitted = Callable[[Array], Array]
"""Maps inputs (n, F) to outputs (n, classes) or (n, 1)."""
Fit = Callable[[Array, Array, int], Fitted]
"""Fits inputs (n, F) and targets (n,); takes the number of classes too, 0 for a number."""


def by_part(fit: Fit, kind: TargetKind) -> Fit:
    """Return a fit of several labels or numbers (n, parts), each by a model of its own; else the same fit."""
    if kind not in ("labels", "numbers"):
        return fit

    def fit_parts(x: Array, y: Array, _: int) -> Fitted:
        if kind == "numbers":
            each = [fit(x, part, 0) for part in y.T]
            return lambda new: np.hstack([fitted(new) for fitted in each])
        each = [fit(x, part.astype(np.int64), 2) for part in y.T]
        return lambda new: np.stack([np.diff(fitted(new), axis=1)[:, 0] for fitted in each], axis=1)

    return fit_parts


def _tune_each(rows: SplitRows, candidates: Sequence[Fit], should_stop: ShouldStop) -> dict[str, RowPredictions]:
    """Fit each client's rows by the candidate that is best at some of the clients."""
    if len(candidates) == 1:
        return _fit_each(rows, candidates[0], should_stop)
    some = replace(rows, ids=rows.ids[:: -(-len(rows.ids) // MAX_TUNED_CLIENTS)])
    tried = [_fit_each(some, one, should_stop) for one in candidates]
    best = _find_best(tried)
    return tried[best] if len(some.ids) == len(rows.ids) else _fit_each(rows, candidates[best], should_stop)


def _tune_pooled(rows: SplitRows, candidates: Sequence[Fit]) -> dict[str, RowPredictions]:
    tried = [_fit_pooled(rows, one) for one in candidates]
    return tried[_find_best(tried)]


def _find_best(tried: Sequence[dict[str, RowPredictions]]) -> int:
    """Return the position of the smallest loss on all validation rows; without any, the one in the middle."""
    if "validation" not in tried[0]:
        return len(tried) // 2

    def measure(i: int) -> float:
        part = tried[i]["validation"]
        return part.pooled["rmse" if part.is_regression else "log_loss"]

    return min(range(len(tried)), key=measure)


def _fit_each(
    rows: SplitRows, fit: Fit, should_stop: ShouldStop, *, is_hurried: bool = False
) -> dict[str, RowPredictions]:
    """Fit each client's rows; in a hurry, none if the first clients show that all would take longer than MAX_ALONE_S.

    Predictions without any part say so.
    """
    started = time.perf_counter()
    outputs: dict[str, list[Array]] = {part: [] for part in PARTS}
    samples = {part: rows.select(part) for part in PARTS}
    for i, train in enumerate(rows.select("train")):
        if should_stop():
            raise StoppedError("stopped in a baseline")
        if is_hurried and i == N_TIMED and (time.perf_counter() - started) / i * len(rows.ids) > MAX_ALONE_S:
            return {}
        fitted = fit(*rows.gather(train), len(rows.federation.classes))
        for part in PARTS:
            if len(samples[part][i]):
                outputs[part].append(fitted(rows.gather(samples[part][i])[0]))
    return _collect(rows, outputs)


def _fit_pooled(rows: SplitRows, fit: Fit) -> dict[str, RowPredictions]:
    """Fit everybody's rows, scaled alike: scaling by client would hide how the clients differ."""
    rows = rows.pooled
    fitted = fit(*rows.gather(*rows.pool()), len(rows.federation.classes))
    outputs: dict[str, list[Array]] = {part: [] for part in PARTS}
    for part, each in outputs.items():
        samples = rows.select(part)
        if any(map(len, samples)):
            owners = np.repeat(rows.ids, [len(one) for one in samples])
            each.append(fitted(rows.gather(np.concatenate(samples), owners)[0]))
    return _collect(rows, outputs)


def _collect(rows: SplitRows, outputs: dict[str, list[Array]]) -> dict[str, RowPredictions]:
    """Concatenate the outputs of all clients, in the unit of the target."""
    predictions = {}
    scale = rows.federation.target_scale
    for part, each in outputs.items():
        samples = rows.select(part)
        sizes = [len(one) for one in samples]
        if not sum(sizes):
            continue
        values = np.concatenate(each).astype(np.float64)
        y = replace(rows, has_client=False).gather(np.concatenate(samples))[1]
        if scale is not None and rows.federation.kind == "number":  # several stay in deviations
            values, y = scale.restore(values), scale.restore(y)
        predictions[part] = RowPredictions(
            np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
            np.concatenate(samples).astype(np.int64),
            y.astype(np.float64) if scale is not None else y,
            values.astype(np.float32),
            len(sizes),
        )
    return predictions


def _fit_constant(_: Array, y: Array, n_classes: int) -> Fitted:
    if not n_classes:
        return lambda new: np.full((len(new), 1), float(y.mean()))
    counts = np.bincount(y, minlength=n_classes)
    logits = np.where(counts > 0, np.log(np.maximum(counts, 1) / len(y)), UNSEEN_LOGIT)
    return lambda new: np.tile(logits, (len(new), 1))


def _fit_constant_positions(_: Array, y: Array, n_classes: int) -> Fitted:
    """Predict the shares of the classes among all positions."""
    logits = _fit_constant(y, y[y >= 0], n_classes)(y[:1])[0]
    shape = (1, n_classes, *(1 for _ in y.shape[1:]))
    return lambda new: np.broadcast_to(logits.reshape(shape), (len(new), n_classes, *y.shape[1:]))


def _fit_logistic(x: Array, y: Array, n_classes: int, strength: float) -> Fitted:
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < 2:
        return _fit_constant(x, y, n_classes)
    return _wrap_classifier(_scale(LogisticRegression(C=strength, max_iter=1000)).fit(x, y), n_classes)


def _fit_ridge(x: Array, y: Array, _: int, strength: float) -> Fitted:
    from sklearn.linear_model import Ridge

    model = _scale(Ridge(alpha=strength)).fit(x, y)
    return lambda new: np.asarray(model.predict(new)).reshape(-1, 1)


def _scale(model: Any) -> Any:
    """Let a linear model scale its own training rows: a client alone differs less than all clients together."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model)


@dataclass(frozen=True)
class _Categories:
    """The categories among the inputs: from position `start`, a block of 0 and 1 for each column, of these `sizes`.

    Boosting takes a block as one column: with 200 categories, in a ninth of the time.
    """

    start: int = 0
    sizes: tuple[int, ...] = ()

    @classmethod
    def find(cls, federation: "Federation") -> "_Categories":
        schema = federation.schema
        if schema is None:
            return cls()
        sizes = tuple(map(len, schema.categories.values()))
        return cls(len(schema.numbers) + len(schema.flagged), sizes)

    @property
    def n_merged(self) -> int:
        """The number of columns of categories, which are the first ones of `merge`."""
        return sum(size <= MAX_BOOSTED_CATEGORIES for size in self.sizes)

    def merge(self, x: Array) -> Array:
        """Return inputs (n, F) with each block as one column, NaN where it has no 1; blocks with too many stay."""
        ends = self.start + np.cumsum((0, *self.sizes))
        blocks = [x[:, a:b] for a, b in pairwise(ends)]
        merged = [one for one in blocks if one.shape[1] <= MAX_BOOSTED_CATEGORIES]
        numbers = [np.where(one.any(1), one.argmax(1), np.nan).astype(x.dtype)[:, None] for one in merged]
        large = [one for one in blocks if one.shape[1] > MAX_BOOSTED_CATEGORIES]
        return np.hstack([*numbers, *large, x[:, : self.start], x[:, ends[-1] :]])


def _fit_boosting(x: Array, y: Array, n_classes: int, categories: _Categories) -> Fitted:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if len(y) < MIN_BOOSTED_ROWS or (n_classes and len(np.unique(y)) < 2):
        return _fit_constant(x, y, n_classes)
    kind = HistGradientBoostingClassifier if n_classes else HistGradientBoostingRegressor
    # Beyond 10,000 rows, scikit-learn sets aside rows of each class to stop early, and fails if a class has one row.
    has_lone = n_classes and np.unique(y, return_counts=True)[1].min() < 2
    stopping = False if has_lone else "auto"
    model = kind(random_state=0, categorical_features=range(categories.n_merged), early_stopping=stopping)
    model.fit(categories.merge(x), y)
    if n_classes:
        predict = _wrap_classifier(model, n_classes)
        return lambda new: predict(categories.merge(new))
    return lambda new: np.asarray(model.predict(categories.merge(new))).reshape(-1, 1)


def _wrap_classifier(model: Any, n_classes: int) -> Fitted:
    """Return the log probabilities of all classes; classes that the training rows lack are nearly impossible."""

    def predict(new: Array) -> Array:
        logits = np.full((len(new), n_classes), UNSEEN_LOGIT)
        with np.errstate(divide="ignore"):
            logits[:, model.classes_] = np.maximum(np.log(model.predict_proba(new)), UNSEEN_LOGIT)
        return logits

    return predict


def _train_centralized(
    plan: Plan, rows: SplitRows, should_stop: ShouldStop, spent: dict[str, float | None]
) -> dict[str, RowPredictions]:
    """Train the model on everybody's rows in one place: one epoch in a round, unless the experiment gives epochs."""
    from ..core.settings import RAY_DEFAULTS, ROBUST_DEFAULTS, UNDISTURBED
    from ..data.client_index import Client, ClientIndex
    from ..training.fit import fit

    rows = rows.pooled
    experiment, federation = plan.experiment, rows.federation
    evaluated = {part: np.concatenate(rows.select(part)).astype(np.int64) for part in PARTS}
    everybody = Client("everybody", rows.pool()[0], evaluated["validation"], evaluated["test"])
    samples = everybody.all
    if len(np.unique(samples)) < len(samples):  # clients share samples, of which one client holds no sample twice
        federation, everybody = _copy_samples(federation, everybody)
    changed: dict[str, Any] = {**UNDISTURBED, **RAY_DEFAULTS, **ROBUST_DEFAULTS, "engine": "auto", "accept": "always"}
    changed |= {"steps": None, "epochs": experiment.training.epochs or 1}
    if BASELINE in plan.tuned:  # the same rate as for the model on a client's own rows
        changed["lr"] = plan.tuned[BASELINE].lr
    result = fit(
        replace(federation, clients=ClientIndex.from_clients([everybody])),
        "local",
        experiment.model,
        model_options=plan.model_options,
        settings=experiment.settings(experiment.seed).replace(**changed),
        callbacks=[OnRound(lambda _: should_stop())],
    )
    if not result.is_finished:
        raise StoppedError("stopped in the baseline centralized")
    spent["centralized"] = result.epsilon
    predictions = {}
    for part, one in result.predictions.items():
        sizes = [len(each) for each in rows.select(part)]
        owner = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
        predictions[part] = replace(one, client=owner, sample=evaluated[part], n_clients=len(sizes))
    return predictions


def _copy_samples(federation: "Federation", client: "Client") -> "tuple[Federation, Client]":
    """Return a federation with a copy of every sample that a client holds more than once, and the client there."""
    import torch

    from ..data.client_index import Client
    from ..data.on_disk import RowsOnDisk

    index = torch.as_tensor(client.all, device=federation.device)
    x = federation.x.select(index) if isinstance(federation.x, RowsOnDisk) else federation.x[index]
    groups = None if federation.groups is None else federation.groups[client.all]
    ends = np.cumsum([len(client.train), len(client.validation)])
    copied = Client(client.name, *np.split(np.arange(len(index)), ends))
    return replace(federation, x=x, y=federation.y[index], groups=groups, clients=[copied], source=""), copied
