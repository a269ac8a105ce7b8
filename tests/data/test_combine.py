"""Federations taken apart and put together again."""

import numpy as np
import torch

from data.small_sets import images
from fedattune import Federation
from fedattune.data import partition_dataset
from fedattune.data.client_index import PARTS
from fedattune.data.federated import select_samples


def same_client(one: Federation, u: int, other: Federation, v: int) -> None:
    """Compare the samples and labels of every part, in their order."""
    for part in PARTS:
        rows, others = (torch.from_numpy(fed.part(part)[k]) for fed, k in ((one, u), (other, v)))
        assert torch.equal(one.x[rows], other.x[others])
        assert torch.equal(one.y[rows], other.y[others])


def test_selected_samples_leave_the_numbers_of_the_clients():
    whole = partition_dataset(images(), partition="iid", clients=5)
    part = select_samples(whole, np.array([1, 4]))
    assert part.n_clients == 5
    assert len(part.y) == 80
    assert part.sizes("train").tolist() == [0, 27, 0, 0, 27]
    for u in (1, 4):
        same_client(part, u, whole, u)
