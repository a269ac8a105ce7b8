"""Columns that a careful reader would ask about: ids, and columns that give the target away."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..types import Array

MAX_AUDIT_ROWS = 5_000
MAX_AUDIT_COLUMNS = 200
"""Rows and columns that are looked at, so that large tables load fast."""
REVEALING_SCORE = 0.95
"""Balanced accuracy, or R2, of one column alone, above which it is called revealing."""
MIN_COUNTED_ROWS = 100
MIN_CLASS_ROWS = 6
"""Rows below which a class is left out of the check."""
MIN_ID_SHARE = 0.5
"""Share of different numbers above which a column that is called an id is one."""
CALLED_ID = re.compile(r"(^|[_\W])(id|ID|Id)$|[a-z](ID|Id)$")
ID_PATTERN = re.compile(
    r"(^|[_\W])(id|index|idx|no|nr|number|key|row|rownames?)$|^(unnamed.*|rownames?)$", re.IGNORECASE
)


def is_index(name: str, values: Array) -> bool:
    """Tell whether a column of numbers (n,) counts or names the rows.

    Its whole numbers are all different, and it is called so; or it counts MIN_COUNTED_ROWS rows one by one. An id may
    come back, such as a patient's at each visit.
    """
    if len(values) < 3 or not np.isfinite(values).all() or (values != np.floor(values)).any():
        return False
    n_different = len(np.unique(values))
    if n_different < len(values):
        return CALLED_ID.search(name) is not None and n_different > MIN_ID_SHARE * len(values)
    is_count = len(values) >= MIN_COUNTED_ROWS and bool((np.diff(values) == 1).all())
    return is_count or ID_PATTERN.search(name) is not None or CALLED_ID.search(name) is not None


class Finding(NamedTuple):
    """The prediction of the target from one column alone.

    Attributes:
        score: cross-validated balanced accuracy, or R2.
        label: number of the class that the column tells from all others; None if it tells the whole target.

    """

    score: float
    label: int | None


def find_revealing(columns: Mapping[str, Array], y: Array) -> dict[str, Finding]:
    """Find the columns that predict the target, or one of its classes, nearly perfectly alone.

    Args:
        columns: name -> numbers or codes of categories (n,), NaN where missing.
        y: class numbers (n,) of integers, or the target (n,) of floats.

    """
    rows = np.random.default_rng(0).permutation(len(y))[:MAX_AUDIT_ROWS]
    is_classes = y.dtype.kind in "iu"
    target = y[rows]
    if is_classes:
        labels, times = np.unique(target, return_counts=True)
        is_frequent = times[np.searchsorted(labels, target)] >= MIN_CLASS_ROWS
        rows, target = rows[is_frequent], target[is_frequent]
        if (times >= MIN_CLASS_ROWS).sum() < 2:
            return {}
    found = {}
    for name, values in list(columns.items())[:MAX_AUDIT_COLUMNS]:
        x = np.nan_to_num(values[rows].astype(np.float64), nan=-1e9)[:, None]
        finding = _score_classes(x, target) if is_classes else Finding(_score_numbers(x, target), None)
        if finding.score >= REVEALING_SCORE:
            found[name] = finding
    return found


def _score_numbers(x: Array, y: Array) -> float:
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeRegressor

    model = DecisionTreeRegressor(max_depth=8, random_state=0)
    return float(cross_val_score(model, x, y, cv=3, scoring="r2").mean())


def _score_classes(x: Array, y: Array) -> Finding:
    """Score the prediction of all classes, or, if that is poor, of the class that is told best from the others."""
    from sklearn.model_selection import cross_val_predict
    from sklearn.tree import DecisionTreeClassifier

    guess = cross_val_predict(DecisionTreeClassifier(max_depth=4, random_state=0), x, y, cv=3)
    labels = np.unique(y)
    recall = np.array([(guess[y == label] == label).mean() for label in labels])
    specificity = np.array([(guess[y != label] != label).mean() for label in labels])
    each = (recall + specificity) / 2
    best = int(each.argmax())
    if recall.mean() >= REVEALING_SCORE or len(labels) == 2:
        return Finding(float(recall.mean()), None)
    return Finding(float(each[best]), int(labels[best]))
