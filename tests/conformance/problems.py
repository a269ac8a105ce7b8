"""Small problems on which the mechanism of a method must act and must help."""

import torch

import fedattune
from fedattune import Federation


def two_heads(seed: int = 0) -> Federation:
    """Samples whose right head differs: half of a client's samples follow a rule of all, half a rule of its own.

    A sample shows its kind k of four and a mark. Without the mark its class is k, with the mark (k + shift) modulo 4,
    where the shift is the client's. A linear model with one division of features for all samples of a client cannot
    follow both rules: it reaches little more than one half. Six clients train on 100 samples each.
    """
    kinds, width, train, test = 4, 64, 100, 100
    generator = torch.Generator().manual_seed(seed)
    *directions, mark = torch.linalg.qr(torch.randn(width, kinds + 1, generator=generator))[0].T
    clients = []
    for i in range(6):
        kind = torch.randint(kinds, (train + test,), generator=generator)
        marked = torch.randint(2, (train + test,), generator=generator)
        x = 4 * (torch.stack(directions)[kind] + (2.0 * marked - 1)[:, None] * mark)
        x += 0.2 * torch.randn(x.shape, generator=generator)
        y = (kind + marked * (1 + i % (kinds - 1))) % kinds
        clients.append({"train": (x[:train], y[:train]), "test": (x[train:], y[train:])})
    return fedattune.federation(clients)
