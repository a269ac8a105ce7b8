"""Small federations that every test can afford."""

import numpy as np
import torch

import fedattune
from fedattune import Federation
from fedattune.data import ClientIndex, RaggedIndex


def make_federation(sizes: list[int], *, features: int = 5, classes: int = 3, seed: int = 0) -> Federation:
    """Clients of different sizes; every other one labels its samples by another rule."""
    generator = torch.Generator().manual_seed(seed)
    rules = [torch.randn(features, classes, generator=generator) for _ in range(2)]
    clients = []
    for number, size in enumerate(sizes):
        x = torch.randn(size, features, generator=generator)
        y = (x @ rules[number % 2]).argmax(1)
        y[:classes] = torch.arange(classes)  # every client knows every class
        clients.append((x, y))
    return fedattune.federation_from(clients)


def many(n: int, size: int = 6) -> Federation:
    """Make n clients whose samples are stretches of 500 shared ones, six to train and three to test."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(500, 5, generator=generator), torch.arange(500) % 3
    starts = np.arange(n, dtype=np.int32)[:, None] * 7

    def lists(first: int, count: int) -> RaggedIndex:
        return RaggedIndex(((starts + np.arange(first, first + count)) % 500).reshape(-1), np.arange(n + 1) * count)

    return Federation(
        "many", x, y, ("a", "b", "c"), ClientIndex(lists(0, size), lists(0, 0), lists(size, 3)), source="many"
    )
