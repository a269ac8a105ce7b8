"""Free text in tables: hashed words, which need no vocabulary, so that clients share nothing of their texts.

TF-IDF weights are not offered: they count in how many texts of all clients a word occurs, which tells of these texts.
"""

import re

import numpy as np

from ..types import Array

DEFAULT_TEXT_FEATURES = 256
"""Inputs that the words of a text column are hashed to."""
MIN_WORDS = 3.0
"""Mean number of words above which a text column is free text."""


def is_free_text(values: Array) -> bool:
    """Tell whether texts (n,), None where missing, are sentences, not names."""
    words = [len(re.findall(r"\w+", value)) for value in values.tolist() if value is not None]
    return bool(words) and float(np.mean(words)) >= MIN_WORDS


def hash_texts(values: Array, n_features: int) -> Array:
    """Return the hashed words and pairs of words of texts (n,) as unit vectors, float32 (n, n_features).

    A missing text, and one without words, is a vector of zeros.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=n_features, ngram_range=(1, 2), dtype=np.float32)
    hashed: Array = vectorizer.transform(
        ["" if value is None else str(value) for value in values.tolist()]
    ).toarray()
    return hashed
