"""Write a method outside the package: a robust average of the body, and a personal classifier.

Run by: python examples/own_algorithm.py, or
fedattune compare --model dnn --algorithms fedavg,examples/own_algorithm.py:robust
"""

from dataclasses import dataclass

import torch

import fedattune
from fedattune import Algorithm, ServerUpdate
from fedattune.client import SGD
from fedattune.core.selectors import Head


@dataclass(frozen=True)
class TrimmedMean(ServerUpdate):
    """One shared model: per weight, the mean without the `cut` smallest and largest values of the cohort."""

    cut: int = 2

    def init(self, w0, n_clients):
        return {"w": w0}

    def aggregate(self, state, ids, sent, uploads, n):
        inner = slice(self.cut, len(ids) - self.cut)
        return {"w": uploads.params.map(lambda a: torch.sort(a, 0).values[inner].mean(0))}


def robust(*, cut: int = 2) -> Algorithm:
    return Algorithm(client=SGD(), server=TrimmedMean(cut), personal=Head())


if __name__ == "__main__":
    data = fedattune.load_federation("digits", partition="dirichlet", clients=20)
    options = {"rounds": 20, "lr": 0.05, "eval_every": 20, "options": {"dnn.hidden": 32}}
    print(fedattune.compare(data, ["local", "fedavg", f"{__file__}:robust"], "dnn", **options))
