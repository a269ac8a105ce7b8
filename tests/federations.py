"""Small federations that every test can afford."""

import torch

import fedattune
from fedattune import Federation


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
    return fedattune.federation(clients)
