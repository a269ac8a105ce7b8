"""Free text as inputs of a model: hashed words, or token numbers.

Hashed words need no vocabulary, so clients share nothing of their texts. TF-IDF weights are not offered: they count in
how many texts of all clients a word occurs, which tells of these texts. A row of token numbers has as many tokens as
the table option `max_tokens` says, and -1 where there is none. They travel as float32, which is exact below 2**24.
"""

import re
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...core.errors import ConfigError, DataError, summarize_error
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
    return np.asarray(vectorizer.transform(["" if one is None else str(one) for one in values.tolist()]).toarray())


NO_TOKEN = -1
"""The number that fills the rest of a row."""
DEFAULT_MAX_TOKENS = 64
CHARACTERS = "characters"
"""The value of the table option `tokens` that reads one token per character."""
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare. The list is fixed, so clients share nothing of their texts."""
N_CHARACTERS = len(ALPHABET) + 1
"""Number of different tokens of characters; token 0 stands for all characters outside ALPHABET."""
MAX_TOKEN_NUMBER = 1 << 24
"""Smallest number above which float32 skips whole numbers."""


def encode_texts(values: Array, tokenizer: str, length: int) -> Array:
    """Return the token numbers of texts (n,), None where missing; float32 (n, length), NO_TOKEN where there is none.

    Of a text that is too long, a tokenizer keeps the beginning. Characters keep the end, and stand at the end of the
    row, because a recurrent network predicts from the last one.
    """
    texts = ["" if value is None else str(value) for value in values.tolist()]
    out = np.full((len(texts), length), NO_TOKEN, dtype=np.float32)
    if tokenizer == CHARACTERS:
        number = {character: k for k, character in enumerate(ALPHABET, 1)}
        for row, text in zip(out, texts, strict=True):
            if text:
                last = [number.get(character, 0) for character in text[-length:]]
                row[-len(last) :] = last
        return out
    loaded = _load_tokenizer(tokenizer)
    if len(loaded) > MAX_TOKEN_NUMBER:
        raise DataError(f"the tokenizer {tokenizer!r} has {len(loaded):,} tokens, at most 2**24 can be used")
    encoded = loaded(texts, truncation=True, max_length=length, padding=False)["input_ids"] if texts else []
    for row, tokens in zip(out, encoded, strict=True):
        row[: len(tokens)] = tokens
    return out


def require_transformers(why: str, *more: str) -> None:
    """Check that the packages for pretrained models are installed."""
    missing = [name for name in ("transformers", *more) if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{why} needs {' and '.join(missing)}: pip install 'fedattune[hf]'")


@lru_cache(maxsize=4)
def _load_tokenizer(name: str) -> Any:
    """Load a tokenizer of the Hugging Face hub, or of a folder that `save_pretrained` wrote."""
    require_transformers(f"the tokenizer {name!r}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        raise ConfigError(
            f"the tokenizer {name!r} cannot be loaded ({summarize_error(error)}); give an id of the Hugging Face hub, "
            "a folder that save_pretrained wrote, or characters"
        ) from error
