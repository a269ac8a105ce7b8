"""Write a method outside the package: a robust average of the body, and a personal classifier.

Run by: python examples/own_algorithm.py
"""

from dataclasses import dataclass

import torch

import fedattune
from fedattune import Algorithm, Broadcast, Payload, ServerUpdate
from fedattune.client import SGD
from fedattune.core.selectors import Head


@dataclass(frozen=True)
class TrimmedMean(ServerUpdate):
    """One shared model: per weight, the mean without the `cut` smallest and largest values of the cohort."""

    cut: int = 2

    def init(self, w0, n_clients):
        return {"w": w0}

    def broadcast(self, state, ids):
        return Broadcast(Payload(state["w"].repeat(len(ids))))

    def aggregate(self, state, ids, sent, uploads, n):
        inner = slice(self.cut, len(ids) - self.cut)
        return {"w": uploads.params.map(lambda a: torch.sort(a, 0).values[inner].mean(0))}


data = fedattune.load_federation("digits", partition="dirichlet", clients=20)
robust = Algorithm(client=SGD(), server=TrimmedMean(cut=2), personal=Head())
for method in ("local", "fedavg", robust):
    result = fedattune.fit(
        method, data, "dnn", model_options={"hidden": 32}, rounds=20, lr=0.05, eval_every=20
    )
    name = method if isinstance(method, str) else "own"
    print(f"{name:8} mean {result.metrics['acc_uniform']:.4f}  worst 10% {result.metrics['acc_worst10']:.4f}")
