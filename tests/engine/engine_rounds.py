"""Networks, federations and rounds for tests of the engine."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedattune
from fedattune import Federation, Payload
from fedattune.core.task import Task
from fedattune.engine.base import ClientInputs, ClientOutputs, Engine
from fedattune.engine.batches import LocalTraining

NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)),
    "conv": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    ),
}

EACH = {"wide": {"is_serial": False}, "serial": {"is_serial": True}}


def make_clients(sizes: list[int]) -> Federation:
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation_from(
        [(torch.rand(n, 1, 8, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]
    )


def train_round(engine: Engine, task: Task, n: int, rule: Any, **work: Any) -> ClientOutputs:
    yes = torch.ones(n, dtype=torch.bool)
    inputs = ClientInputs(Payload(task.params.repeat(n)), {}, task.buffers.copies(n), yes, yes)
    todo = {"seed": 0, "stream": 1, "round": 1, "lr": 0.05, "batch_size": 8, "weight_decay": 0.01} | work
    return engine.train(rule, torch.arange(n), inputs, LocalTraining(**todo))


class Watch(TorchDispatchMode):
    """Counts operations, and notes the largest tensor that one made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations[str(func)] += 1
        if isinstance(out, Tensor) and not any(r.alias_info for r in func._schema.returns):
            self.largest = max(self.largest, out.numel())
        return out
