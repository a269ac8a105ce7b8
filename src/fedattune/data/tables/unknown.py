"""Categories of new rows that a model did not meet in training."""

import numpy as np

from ...core.errors import list_some
from ..schema import MISSING_CATEGORY, OTHER_CATEGORY, Names
from ..types import Array
from .checks import find_missing


def take_unknown(name: str, raw: Array, texts: Array, categories: Names) -> tuple[Array, list[str]]:
    """Give unknown categories the place that training gave them, and say so.

    They count as `other` if training grouped its rare categories, or else as `missing` if training had that. In any
    other column they stay as they are, and all inputs of the column become 0.

    Args:
        name: name of the column.
        raw: text (n,), None where missing.
        texts: the text (n,) with `other` in place of unknown categories, if training had that.
        categories: the categories of training.

    Returns:
        The text (n,), and notes.

    """
    is_gap = find_missing(raw)
    strange = sorted(set(raw[~is_gap].tolist()) - set(categories))
    has_missing = MISSING_CATEGORY in categories
    if OTHER_CATEGORY in categories:
        fate = f"count as {OTHER_CATEGORY!r}, as in training"
    elif has_missing:
        fate = f"count as {MISSING_CATEGORY!r}"
        texts = np.array([None if one in strange else one for one in texts.tolist()], dtype=object)
    else:
        fate = "count as none of the known categories, which training never had; look at their predictions with care"
    notes = []
    if strange:
        n_rows = sum(one in strange for one in raw.tolist())
        notes.append(
            f"column {name!r} holds {list_some([repr(one) for one in strange], 3)} in {n_rows} of {len(raw)} rows, "
            f"no category of the model (known: {', '.join(categories)}); such rows {fate}"
        )
    if is_gap.any() and not has_missing:
        notes.append(
            f"column {name!r} lacks {int(is_gap.sum())} of {len(raw)} values, though none was missing in training; "
            f"such rows {fate}"
        )
    return texts, notes
