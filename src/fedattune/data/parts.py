"""Each client's training, validation and test part."""

import numpy as np

from ..errors import ConfigError, DataError
from .dataset import Index


def split(
    indices: Index, *, test: float = 0.25, validation: float = 0.1, seed: int, client: int
) -> tuple[Index, Index, Index]:
    """Shuffle one client's indices and cut them into training, validation and test part.

    floor((1 - test) n) samples are for training, of which floor(validation * that) at the end for validation.

    Raises:
        DataError: the training or the test part would be empty.

    """
    order = np.random.default_rng([seed, client]).permutation(indices)
    n_train, n_validation, n_test = part_sizes(len(order), test, validation)
    if not n_train or not n_test:
        raise DataError(
            f"client {client} has {len(order)} samples, too few for a training and a test part; "
            'leave such clients out with --small-clients drop (small_clients="drop")'
        )
    cut = n_train + n_validation
    return order[:n_train], order[n_train:cut], order[cut:]


def part_sizes(n: int, test: float, validation: float) -> tuple[int, int, int]:
    """How many of n samples are for training, validation and testing."""
    kept = int((1 - test) * n + 1e-9)  # floor; without the addend 0.7 * 10 could become 6
    n_validation = int(validation * kept + 1e-9)
    return kept - n_validation, n_validation, n - kept


def check_fractions(test: float, validation: float, seed: int) -> None:
    """Refuse fractions and seeds that cannot be.

    Raises:
        ConfigError: they cannot.

    """
    if not 0 < test < 1:
        raise ConfigError(f"test must be a fraction above 0 and below 1, got {test}")
    if not 0 <= validation < 1:
        raise ConfigError(f"validation must be a fraction of at least 0 and below 1, got {validation}")
    if seed < 0:
        raise ConfigError(f"the partition's seed must be 0 or more, got {seed}")
