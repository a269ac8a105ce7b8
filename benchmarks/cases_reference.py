"""What scikit-learn makes of a table by itself: alone, with everybody's rows, and with the client as a feature.

Nothing here knows of FedAttune: the splits, the preparation and the choice of models are its own.
"""

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, stats
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, roc_auc_score, root_mean_squared_error
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, SplineTransformer, StandardScaler, TargetEncoder

from .cases_tables import Table

if TYPE_CHECKING:
    import pandas as pd

SPLITS = 10
MIN_SPLITS = 3
SECONDS = 50.0
"""Processor time after which a table gets no further split."""
TEST_SHARE = 0.25
MAX_CLIENTS = 150
"""Clients that are scored; everybody's rows train the pooled models."""
MAX_SLOPES = 20_000
"""Coefficients up to which the linear model gets slopes of each client."""
MIN_LEAF = 20
"""Rows of a leaf of scikit-learn's boosting: with fewer than twice as many, it predicts a constant."""
MANY_CLIENTS = 10
"""Minimum number of clients for an interval of the gain over clients; fewer have one over splits."""
WAYS = ("alone", "pooled", "with client")
KINDS = ("linear", "additive", "trees")
N_KNOTS = 6


@dataclass(frozen=True)
class Reference:
    """What scikit-learn reached.

    Attributes:
        metric: accuracy, AUC of imbalanced classes (mean over classes), or RMSE; means over clients.
        values: way to its mean.
        models: way to its best model.
        spread: standard deviation over splits of the mean alone; of a single split its standard error over clients.
        gain: of the better other way over alone; positive is better.
        interval: 95% interval of the gain.
    """

    rows: int
    clients: int
    metric: str
    values: dict[str, float]
    models: dict[str, str]
    spread: float
    gain: float
    interval: tuple[float, float]
    splits: int
    seconds: float

    @property
    def answer(self) -> str:
        """Yes if others' rows surely help, no if they surely harm, undecided otherwise."""
        if self.interval[0] > 0:
            return "yes"
        return "no" if self.interval[1] < 0 else "undecided"


def read_table(table: Table, frame: "pd.DataFrame") -> "tuple[pd.DataFrame, NDArray[Any], NDArray[np.str_]]":
    """Read the features, the target and the clients of a table's rows as a person who knows it would."""
    import pandas as pd

    frame = frame.dropna(subset=[table.client, table.target]).reset_index(drop=True)
    for column in table.text:
        frame[column] = pd.to_numeric(frame[column].str.replace(r"[^0-9.+-]", "", regex=True), errors="coerce")
    out = {table.client, table.target, table.group, *table.ignored}
    x = frame[[column for column in frame if column not in out]].copy()
    for column in list(x):
        values = x[column]
        if values.dtype.kind in "iuf" and column not in table.categories:
            continue
        if re.match(r"\d{4}-\d\d-\d\d", str(values.dropna().iloc[0])):
            day = pd.to_datetime(x.pop(column), format="ISO8601", errors="coerce", utc=True)
            x[f"{column} day"] = (day - day.min()).dt.days
            for part in ("month", "day_of_week", "hour"):
                x[f"{column} {part}"] = getattr(day.dt, part).astype(str)
        else:
            x[column] = values.astype(object).where(values.notna(), "missing").astype(str)
    y = frame[table.target].to_numpy() if table.is_number else frame[table.target].astype(str).to_numpy(dtype=str)
    return x, y, frame[table.client].astype(str).to_numpy(dtype=str)


def prepare(x: "pd.DataFrame", x_test: "pd.DataFrame", kind: str) -> list[Any]:
    """Prepare features of training and test rows by the training rows, for `linear` or `additive` models, or `trees`.

    Trees get them dense, without one-hot columns; additive models get splines of the numbers, too.
    """
    is_tree = kind == "trees"
    numbers = [column for column in x if x[column].dtype.kind in "iuf"]
    texts = [c for c in x if c not in numbers and x[c].nunique() > len(x) / 2 and x[c].str.count(" ").mean() > 3]
    names = [column for column in x if column not in {*numbers, *texts}]
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    hot = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=1500, min_frequency=2)
    imputer = SimpleImputer(strategy="median", keep_empty_features=True)
    splines = SplineTransformer(N_KNOTS, extrapolation="linear", include_bias=False)
    transformer = make_column_transformer(
        (imputer if is_tree else make_pipeline(imputer, StandardScaler()), numbers),
        *([(make_pipeline(imputer, splines), numbers)] if kind == "additive" and numbers and len(x) > 1 else []),
        (codes if is_tree else hot, names),
        *((TfidfVectorizer(max_features=300), column) for column in texts),
        sparse_threshold=0.0 if is_tree else 1.0,
    )
    both = [transformer.fit_transform(x), transformer.transform(x_test)]
    return both if is_tree else [sparse.csr_array(one) for one in both]


def make_models(*, is_number: bool) -> dict[str, Any]:
    """Make the models of which each way takes the best; the first word of a name is its preparation."""
    names = ("linear", "additive")
    if is_number:
        ridges = {f"{name} {alpha:g}": Ridge(alpha=alpha) for name in names for alpha in (0.3, 3, 30, 300)}
        return {"constant": DummyRegressor(), **ridges, "trees": HistGradientBoostingRegressor(random_state=0)}
    logistics = {f"{name} {c:g}": LogisticRegression(C=c, max_iter=200) for name in names for c in (0.01, 0.1, 1)}
    constant = DummyClassifier(strategy="prior")
    return {"constant": constant, **logistics, "trees": HistGradientBoostingClassifier(random_state=0)}


def get_kind(model: str) -> str:
    """Return the preparation of a model; the constant takes any."""
    kind = model.split(maxsplit=1)[0]
    return kind if kind in KINDS else "linear"


def choose_metric(y: NDArray[Any], *, is_number: bool) -> str:
    """Choose the metric: accuracy says little where one class has three quarters of the rows."""
    if is_number:
        return "rmse"
    counts = np.unique(y, return_counts=True)[1]
    if counts.max() < 0.75 * counts.sum():
        return "accuracy"
    return "auc"


def split_rows(clients: NDArray[Any], groups: NDArray[Any], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw test rows: a quarter of each client's groups, at least one, none of a client with a single group."""
    is_test = np.zeros(len(clients), bool)
    order = np.argsort(clients, kind="stable")
    starts = np.flatnonzero(np.r_[True, clients[order][1:] != clients[order][:-1]])
    for rows in np.split(order, starts[1:]):
        own = rng.permutation(np.unique(groups[rows]))
        n_test = max(1, round(TEST_SHARE * len(own))) if len(own) > 1 else 0
        is_test[rows] = np.isin(groups[rows], own[:n_test])
    return is_test


def take_newest(clients: NDArray[Any], times: NDArray[Any]) -> NDArray[np.bool_]:
    """Take the newest quarter of each client's rows as test rows."""
    is_test = np.zeros(len(clients), bool)
    for one in np.unique(clients):
        rows = np.flatnonzero(clients == one)
        is_test[rows[np.argsort(times[rows], kind="stable")][len(rows) - round(TEST_SHARE * len(rows)) :]] = True
    return is_test


def fit_predict(model: Any, x: Any, y: NDArray[Any], x_test: Any, *, is_number: bool) -> NDArray[Any]:
    """Fit a model; return numbers (n,), or probabilities of the sorted classes that `y` has, in a frame of all."""
    if not is_number and len(set(y)) == 1:
        model = DummyClassifier(strategy="prior")
    model.fit(x, y)
    return model.predict(x_test) if is_number else model.predict_proba(x_test)


def score_rows(metric: str, y: NDArray[Any], output: NDArray[Any], own: NDArray[Any]) -> float:
    """Score a client's test rows; NaN if the metric is not defined. `own` are the classes of the output's columns."""
    if metric == "rmse":
        return float(root_mean_squared_error(y, output))
    if metric == "accuracy":
        return float(accuracy_score(y, own[output.argmax(axis=1)]))
    share = dict(zip(own, output.T, strict=True))
    known = [one for one in np.unique(y) if (y != one).any()]
    areas = [roc_auc_score(y == one, share.get(one, np.zeros(len(y)))) for one in known]
    return float(np.mean(areas)) if areas else float("nan")


def with_slopes(x: Any, codes: NDArray[Any], n: int) -> Any:
    """Append to sparse features (n_rows, d) the one-hot of `n` clients and, if these are not too many, the products."""
    rows, width = np.arange(len(codes)), x.shape[1]
    blocks = [x, sparse.coo_array((np.ones(len(codes)), (rows, codes)), (len(codes), n))]
    if width * n <= MAX_SLOPES:
        own = sparse.coo_array(x)
        blocks.append(
            sparse.coo_array((own.data, (own.row, codes[own.row] * width + own.col)), (len(codes), width * n))
        )
    return sparse.hstack(blocks, format="csr")


def measure(
    table: Table, frame: "pd.DataFrame", *, splits: int = SPLITS, seconds: float = SECONDS, on_newest: bool = False
) -> Reference:
    """Measure all ways on random splits, at least three, as many as the time allows; or on the newest rows."""
    import pandas as pd

    began = time.process_time()
    x, y, clients = read_table(table, frame)
    known = frame.dropna(subset=[table.client, table.target])
    group_of = known[table.group].astype(str).to_numpy(dtype=str) if table.group else np.arange(len(y))
    times = pd.to_datetime(known[table.time], format="ISO8601", utc=True).to_numpy() if table.time else group_of
    n_rows, names = len(y), np.unique(clients)
    rng = np.random.default_rng(0)
    scored = np.sort(rng.choice(names, min(MAX_CLIENTS, len(names)), replace=False))
    metric = choose_metric(y, is_number=table.is_number)
    scores: dict[tuple[str, str], list[NDArray[Any]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)  # unknown categories, columns without values
        for done in range(1 if on_newest else splits):
            if done >= MIN_SPLITS and (time.process_time() - began) * (done + 1) / done > seconds:
                break
            is_test = take_newest(clients, times) if on_newest else split_rows(clients, group_of, rng)
            for way, name, values in _measure_split(table, metric, x, y, clients, is_test, scored):
                scores.setdefault((way, name), []).append(values)
    seconds = time.process_time() - began
    return summarize(metric, {k: np.array(v) for k, v in scores.items()}, n_rows, len(names), seconds)


def _measure_split(
    table: Table,
    metric: str,
    x: "pd.DataFrame",
    y: NDArray[Any],
    clients: NDArray[Any],
    is_test: NDArray[np.bool_],
    scored: NDArray[Any],
) -> Iterator[tuple[str, str, NDArray[Any]]]:
    train, tests = np.flatnonzero(~is_test), [np.flatnonzero(is_test & (clients == one)) for one in scored]
    test = np.concatenate(tests)
    ends = np.cumsum([0, *map(len, tests)])
    is_number = table.is_number

    def score(outputs: NDArray[Any], own: NDArray[Any], k: int) -> float:
        return score_rows(metric, y[tests[k]], outputs, own) if len(tests[k]) else float("nan")

    alone: dict[str, list[float]] = {name: [] for name in make_models(is_number=is_number)}
    for k, one in enumerate(scored):
        rows = train[clients[train] == one]
        if not len(rows) or not len(tests[k]):
            for values in alone.values():
                values.append(float("nan"))
            continue
        splits_nowhere = len(rows) < 2 * MIN_LEAF
        own_inputs = {
            kind: prepare(x.iloc[rows], x.iloc[tests[k]], kind)
            for kind in KINDS
            if not (kind == "trees" and splits_nowhere)
        }
        for name, model in make_models(is_number=is_number).items():
            if name == "trees" and splits_nowhere:
                alone[name].append(alone["constant"][-1])
                continue
            train_x, test_x = own_inputs[get_kind(name)]
            output = fit_predict(model, train_x, y[rows], test_x, is_number=is_number)
            alone[name].append(score(output, np.unique(y[rows]), k))
    for name, values in alone.items():
        yield "alone", name, np.array(values)

    pooled = {kind: prepare(x.iloc[train], x.iloc[test], kind) for kind in KINDS}
    names, codes = np.unique(clients, return_inverse=True)
    encoder = TargetEncoder(cv=KFold(5, shuffle=True, random_state=0))
    means = [encoder.fit_transform(clients[train][:, None], y[train]), encoder.transform(clients[test][:, None])]
    named = {
        kind: [with_slopes(one, codes[rows], len(names)) for one, rows in zip(pooled[kind], (train, test), strict=True)]
        for kind in ("linear", "additive")
    }
    named["trees"] = [np.hstack(pair) for pair in zip(pooled["trees"], means, strict=True)]
    inputs = {"pooled": pooled, "with client": named}
    own = np.unique(y[train])
    for name, model in make_models(is_number=is_number).items():
        for way in WAYS[1:]:
            train_x, test_x = inputs[way][get_kind(name)]
            output = fit_predict(model, train_x, y[train], test_x, is_number=is_number)
            yield way, name, np.array([score(output[ends[k] : ends[k + 1]], own, k) for k in range(len(scored))])


def summarize(
    metric: str, scores: dict[tuple[str, str], NDArray[Any]], rows: int, clients: int, seconds: float
) -> Reference:
    """Summarize the scores (S, N) of each way and model."""
    sign = -1 if metric == "rmse" else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a client without a defined score
        means = {key: sign * float(np.nanmean(np.nanmean(one, axis=0))) for key, one in scores.items()}
        # Each way takes its best model by all splits. That flatters all ways alike.
        best = {way: max((key for key in means if key[0] == way), key=means.__getitem__) for way in WAYS}
        other = max(best["pooled"], best["with client"], key=means.__getitem__)
        alone = scores[best["alone"]]
        gains = sign * (scores[other] - alone)
        by_client, by_split = np.nanmean(gains, axis=0), np.nanmean(gains, axis=1)
        by_what = alone[0] / len(alone[0]) ** 0.5 if len(alone) == 1 else np.nanmean(alone, axis=1)
        spread = float(np.nanstd(by_what, ddof=1))
    values = {way: sign * means[key] for way, key in best.items()}
    models = {way: name for way, (_, name) in best.items()}
    by_client = by_client[np.isfinite(by_client)]
    n_splits = len(alone)
    if len(by_client) >= MANY_CLIENTS:
        error, freedom = by_client.std(ddof=1) / len(by_client) ** 0.5, len(by_client) - 1
    else:  # Nadeau and Bengio's correction for splits that share rows
        error, freedom = by_split.std(ddof=1) * (1 / n_splits + TEST_SHARE / (1 - TEST_SHARE)) ** 0.5, n_splits - 1
    gain, margin = float(by_client.mean()), float(stats.t.ppf(0.975, freedom) * error)
    return Reference(
        rows, clients, metric, values, models, spread, gain, (gain - margin, gain + margin), n_splits, seconds
    )
