"""A problem on which a method that mixes models must act: clients of two groups with opposite tasks."""

import torch

import fedattune
from fedattune import Federation

GROUP = 4
"""Clients of each group: the first ones have one task, the rest the other."""


def two_groups(seed: int = 0) -> Federation:
    """Make eight clients with the same inputs and rule, of which the last four flip their labels.

    The mean of all models knows nothing, and a client's 45 training samples alone give a poorer model than the samples
    of its group.
    """
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(10, generator=generator)
    clients = []
    for number in range(2 * GROUP):
        x = torch.randn(60, 10, generator=generator)
        y = (x @ rule > 0).long()
        clients.append((x, y if number < GROUP else 1 - y))
    return fedattune.federation(clients)
