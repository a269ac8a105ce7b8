"""Columns that a careful reader would ask about: ids, and columns that give the target away."""

import re
from collections.abc import Mapping

import numpy as np

from ..types import Array

MAX_AUDIT_ROWS = 5_000
MAX_AUDIT_COLUMNS = 200
"""Rows and columns that are looked at, so that large tables load fast."""
REVEALING_SCORE = 0.95
"""Balanced accuracy, or R2, of one column alone from which on it is called revealing."""
MIN_COUNTED_ROWS = 100
ID_PATTERN = re.compile(
    r"(^|[_\W])(id|index|idx|no|nr|number|key|row|rownames?)$|^(unnamed.*|rownames?)$", re.IGNORECASE
)


def is_index(name: str, values: Array) -> bool:
    """Tell whether a column of numbers (n,) counts or names the rows.

    Its whole numbers are all different, and it is called so; or it counts MIN_COUNTED_ROWS rows one by one.
    """
    if len(values) < 3 or not np.isfinite(values).all() or (values != np.floor(values)).any():
        return False
    if len(np.unique(values)) < len(values):
        return False
    is_count = len(values) >= MIN_COUNTED_ROWS and bool((np.diff(values) == 1).all())
    return is_count or ID_PATTERN.search(name) is not None


def find_revealing(columns: Mapping[str, Array], y: Array) -> dict[str, float]:
    """Find the columns that predict the target nearly perfectly alone.

    Args:
        columns: name -> numbers or codes of categories (n,), NaN where missing.
        y: class numbers (n,) of integers, or the target (n,) of floats.

    Returns:
        Name -> cross-validated balanced accuracy, or R2.

    """
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    rows = np.random.default_rng(0).permutation(len(y))[:MAX_AUDIT_ROWS]
    is_classes = y.dtype.kind in "iu"
    target = y[rows]
    if is_classes and np.bincount(target)[np.unique(target)].min() < 6:
        return {}  # too few rows of a class to check
    model, scoring = (
        (DecisionTreeClassifier(max_depth=4, random_state=0), "balanced_accuracy")
        if is_classes
        else (DecisionTreeRegressor(max_depth=8, random_state=0), "r2")
    )
    found = {}
    for name, values in list(columns.items())[:MAX_AUDIT_COLUMNS]:
        x = np.nan_to_num(values[rows].astype(np.float64), nan=-1e9)[:, None]
        score = float(cross_val_score(model, x, target, cv=3, scoring=scoring).mean())
        if score >= REVEALING_SCORE:
            found[name] = score
    return found
