"""Columns that name what several rows belong to, such as the patient of each visit.

Such a column is no number: 17 is no more than 16. And rows of one patient in both training and test make a model look
better than it is.
"""

import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

from ..types import Array
from .checks import CALLED_ID, find_missing, number_values

SUBJECTS = frozenset({
    "subject", "subj", "sub", "patient", "pat", "person", "persons", "participant", "respondent", "individual",
    "proband", "pupil", "student", "lecturer", "teacher", "customer", "client", "user", "member", "household",
    "family", "employee", "worker", "driver", "animal", "rater", "judge", "subjekt",
    "patientin", "teilnehmer", "schüler", "kunde", "haushalt", "pid", "sid", "uid", "mrn",
})  # fmt: skip
"""Words for what rows belong to."""
_COUNTED = frozenset({"animal", "family", "household", "member", "person", "persons"})
"""Those that also call a count, such as of persons in a household."""
_NUMBERING = frozenset({"id", "ids", "no", "nr", "num", "number", "code", "key", "identifier"})
_CODES = _NUMBERING | {"zip", "zipcode", "postcode", "plz", "fip", "fips", "cusip", "isin", "sku", "fcode", "idcode"}
"""Words for numbers that name something, and may have gaps between them."""
_ORDERED = frozenset({
    "age", "alter", "year", "yr", "jahr", "month", "monat", "day", "tag", "week", "woche", "hour", "stunde", "minute",
    "second", "date", "datum", "time", "zeit", "wave", "visit", "period", "quarter", "season", "round", "session",
    "semester", "term", "score", "grade", "rating", "rank", "count", "dose", "price", "amount", "size", "temperature",
    "temp", "weight", "height", "length", "width",
})  # fmt: skip
"""Words for numbers whose order counts, whatever their structure."""
MIN_NAMED, MIN_SUBJECTS = 10, 20
"""Smallest number of different values of a column that is called like a subject, and of any other."""
MAX_NAMED_ROWS = 100
"""Mean number of rows of one value, above which a column of less than MIN_SUBJECTS values is none of subjects."""
MIN_DENSITY = 0.5
"""Share of the numbers between smallest and largest that occur, if they number subjects."""
MAX_EVIDENCE, MAX_TESTS = 40, 200
"""Number of other columns that are looked at, and of columns that are looked at in this way."""
MIN_BETWEEN = 0.95
"""Minimum share of a column's variance between subjects, above which the column belongs to them, as sex does."""
MIN_JUMPS = 1.2
"""Mean square difference of successive subjects, in variances, which is 2 without an order and near 0 with one."""
MAX_LIKENESS = 0.95
"""Correlation with a column's codes above which another column is a copy of it, and no evidence."""
MIN_DIVIDED, MIN_DIVISIBLE = 4, 0.9
"""Subjects of a client that can be divided into parts, and the share of clients that must have so many."""
NUMBERING_SHARE = 0.99
"""Share of the pairs of client and value that are different, from which the values number each client's rows."""
CODE = re.compile(r"[^\W\d_]{0,4}[-_ .]?\d+")
"""A text that is a code, such as P017."""


def find_subjects(columns: Mapping[str, Array], target: Array, owner: Array | None) -> list[str]:
    """Find the columns that name what several rows belong to.

    Columns (n,) hold numbers, NaN where missing, or text, None where missing. `owner` is each row's client (n,). A
    column is one if it is called so and its values come back. Or other columns are constant within its values, but
    jump from one value to the next: an age group does not jump between ages. The values must be codes, or whole numbers
    without large gaps, unlike the income of a county. They may begin anew at each client.
    """
    candidates = {}
    for name, values in columns.items():
        codes = _find_codes(name, values)
        if codes is not None and (owner is None or not _is_nested(owner, codes)):
            candidates[name] = codes
    if not candidates:
        return []
    found, evidence, n_tests = [], _collect_evidence(columns, target), 0
    for name, codes in candidates.items():
        n = int(codes.max()) + 1
        if (is_called_subject(name, columns[name], n)) or (
            n >= MIN_SUBJECTS
            and not _ORDERED & set(_split(name))
            and _look_like_codes(name, columns[name], n)
            and (n_tests := n_tests + 1) <= MAX_TESTS
            and any(_owns_columns(_leave_out_copies(evidence, codes), *view) for view in _list_views(codes, owner))
        ):
            found.append(name)
    return found


def choose_group_column(subjects: Mapping[str, Array], owner: Array | None) -> str | None:
    """Choose the column with the fewest subjects of those whose subjects nearly all clients can divide into parts."""
    n_subjects = {}
    for name, values in subjects.items():
        if is_numbering(values, owner):
            continue
        is_known = ~find_missing(values)
        owners = np.zeros(len(values), dtype=np.int64) if owner is None else owner
        held: dict[int, set[object]] = {client: set() for client in owners.tolist()}
        for client, value in zip(owners[is_known].tolist(), values[is_known].tolist(), strict=True):
            held[client].add(value)
        if np.mean([len(one) >= MIN_DIVIDED for one in held.values()]) >= MIN_DIVISIBLE:
            n_subjects[name] = len(set(values[is_known].tolist()))
    return min(n_subjects, key=lambda name: n_subjects[name], default=None)


def is_numbering(values: Array, owner: Array | None) -> bool:
    """Tell whether values (n,) hardly come back at a client: they number its rows, anew at each client."""
    if owner is None:
        return False
    return len(set(zip(owner.tolist(), values.tolist(), strict=True))) >= NUMBERING_SHARE * len(values)


def is_called_subject(name: str, values: Array, n_different: int) -> bool:
    """Tell by its name whether a column (n,) with so many different values names subjects."""
    words = _split(name)
    plain = [word for word in words if word not in _NUMBERING]
    if len(plain) == 1 and plain[0] in SUBJECTS:
        if values.dtype == object and plain[0] == "subject" and not _are_codes(values):
            return False  # taught at a school
        is_sparse = len(values) <= MAX_NAMED_ROWS * n_different and plain[0] not in _COUNTED
        return n_different >= (MIN_NAMED if is_sparse else MIN_SUBJECTS)
    is_id = CALLED_ID.search(name) is not None
    return is_id and n_different >= MIN_SUBJECTS and not _ORDERED & set(plain)


def _split(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[^\W\d_]?[^\W\d_A-Z]+|[A-Z]+", name)]


def _find_codes(name: str, values: Array) -> Array | None:
    """Number the different values (n,) in their order; None if they cannot name subjects. Gaps are -1."""
    is_gap = find_missing(values)
    present = values[~is_gap]
    if len(present) < max(2 * MIN_NAMED, 0.9 * len(values)):
        return None
    if values.dtype == object:
        texts = sorted(set(present.tolist()))  # as a NumPy array, each would take as much as the longest
        inner, n_different = number_values(present, texts), len(texts)
    elif values.dtype.kind == "b" or not np.isfinite(present).all() or (present != np.floor(present)).any():
        return None
    else:
        different, inner = np.unique(present, return_inverse=True)
        n_different = len(different)
    if not MIN_NAMED <= n_different < len(present):
        return None
    times = np.bincount(inner)
    if times[times > 1].sum() < len(present) / 2 and not is_called_subject(name, values, n_different):
        return None
    codes = np.full(len(values), -1)
    codes[~is_gap] = inner
    return codes


def _is_nested(owner: Array, codes: Array) -> bool:
    """Tell whether each client has one value only, so that the column names clients."""
    pairs = np.unique(np.stack([owner, codes]), axis=1)
    return bool(pairs.shape[1] <= owner.max() + 1)


def _are_codes(values: Array) -> bool:
    texts = {value for value in values.tolist() if value is not None}
    return sum(CODE.fullmatch(text) is not None for text in texts) >= 0.95 * len(texts)


def _look_like_codes(name: str, values: Array, n_different: int) -> bool:
    """Tell whether values (n,) are codes, or whole numbers one after the other, but for some gaps, and no years."""
    if values.dtype == object:
        return _are_codes(values)
    low, high = np.nanmin(values), np.nanmax(values)
    if low >= 1800 and high <= 2100:
        return False
    step = np.gcd.reduce((values[np.isfinite(values)] - low).astype(np.int64))
    is_code = any(word in _CODES or word.endswith("id") for word in _split(name))
    return is_code or n_different >= MIN_DENSITY * ((high - low) / max(1, int(step)) + 1)


def _collect_evidence(columns: Mapping[str, Array], target: Array) -> Array:
    """Return what may belong to a subject, standardised (n, E): numbers, and whether a text is its most frequent."""
    out: list[Array] = []
    for values in [*list(columns.values())[:MAX_EVIDENCE], target]:
        if values.dtype == object:
            counts = Counter(values.tolist())
            x = (values == max(counts, key=lambda one: counts[one])).astype(np.float64)
        else:
            x = values.astype(np.float64)
        if not np.isfinite(x).any():
            continue
        x = np.where(np.isfinite(x), x, np.mean(x, where=np.isfinite(x)))
        if (deviation := x.std()) > 1e-9 * (np.abs(x).max() + 1e-300):
            out.append((x - x.mean()) / deviation)
    return np.stack(out, axis=1) if out else np.zeros((len(target), 0))


def _leave_out_copies(evidence: Array, codes: Array) -> Array:
    """Return the evidence (n, E') without the column of the codes (n,) and its copies: all are constant within it."""
    x = np.where(codes < 0, np.mean(codes, where=codes >= 0), codes)
    x = (x - x.mean()) / max(1e-300, x.std())
    kept: Array = evidence[:, np.abs(x @ evidence) < MAX_LIKENESS * len(x)]
    return kept


def _list_views(codes: Array, owner: Array | None) -> list[tuple[Array, Array | None]]:
    """List the ways to number subjects: in the whole table, and anew at each client."""
    if owner is None:
        return [(codes, None)]
    return [(codes, None), (np.where(codes < 0, -1, owner * (codes.max() + 1) + codes), owner)]


def _owns_columns(evidence: Array, codes: Array, owner: Array | None) -> bool:
    """Tell whether columns of the evidence (n, E) are constant within the subjects (n,), and jump between them."""
    if owner is not None:  # what is constant within a client belongs to the client
        means = np.stack([np.bincount(owner, weights=x) for x in evidence.T], axis=1) if evidence.size else evidence
        evidence = evidence - (means / np.bincount(owner)[:, None])[owner]
    _, inner, times = np.unique(codes, return_inverse=True, return_counts=True)
    rows = np.flatnonzero((codes >= 0) & (times[inner] > 1))
    if len(rows) < len(codes) / 2:
        return False
    rows = rows[np.argsort(codes[rows], kind="stable")]
    x = evidence[rows]
    starts = np.flatnonzero(np.diff(codes[rows], prepend=-2))
    n = len(starts)
    if n < MIN_SUBJECTS or not x.shape[1]:
        return False
    sizes = np.diff(starts, append=len(rows))[:, None]
    means = np.add.reduceat(x, starts) / sizes
    total = ((x - x.mean(axis=0)) ** 2).sum(axis=0) / (len(rows) - 1)
    within = ((x - np.repeat(means, sizes[:, 0], axis=0)) ** 2).sum(axis=0) / max(1, len(rows) - n)
    centred = means - means.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        is_owned = within <= (1 - MIN_BETWEEN) * total
        jumps = (np.diff(means, axis=0) ** 2).sum(axis=0) / (centred**2).sum(axis=0)
        n_different = (centred**2).sum(axis=0) ** 2 / (centred**4).sum(axis=0)  # subjects unlike the others
        n_owned = int((is_owned & (total > 1e-9) & (jumps >= MIN_JUMPS) & (n_different >= 5)).sum())
    return n_owned >= (1 if n >= 50 else 2)
