"""Several clients on quadratics of their own, and a server, without data: every number can be worked out."""

from typing import Any

import torch
from torch import Tensor

from fedattune import Algorithm, Params, Payload
from fedattune.core.payload import LocalState, ServerState
from oracles.quadratic import params, run


def stack(models: list[Params]) -> Params:
    """One stack of models."""
    return Params({k: torch.stack([m[k] for m in models]) for k in models[0]})


class Clients:
    """N clients with a gradient function each, their memories, and the server's state."""

    def __init__(self, algorithm: Algorithm, gradients: list[Any], w0: Tensor) -> None:
        self.algorithm, self.gradients = algorithm, gradients
        self.state: ServerState = algorithm.server.init(params(w0), len(gradients))
        self.memory: list[LocalState] = [algorithm.client.init_local_state(params(w0)) for _ in gradients]
        self.round = 0
        self.updates = Params()

    def play(self, lr: float, steps: int, ids: list[int] | None = None) -> Tensor:
        """One round of clients `ids` (all unless given); the global model after it."""
        who = torch.arange(len(self.gradients)) if ids is None else torch.tensor(ids)
        self.round += 1
        sent = self.algorithm.server.broadcast(self.state, who).payload
        uploads = []
        for row, client in enumerate(who.tolist()):
            mine = sent.rows(row)
            upload, self.memory[client] = run(
                self.algorithm.client,
                self.gradients[client],
                steps,
                lr,
                mine.params["w"],
                extra=mine.extra,
                memory=self.memory[client],
                cohort=len(who),
                round_=self.round,
            )
            uploads.append(upload)
        received = Payload(
            stack([u.params for u in uploads]),
            {key: stack([u.extra[key] for u in uploads]) for key in uploads[0].extra},
        )
        self.updates = received.params - sent.params
        counts = torch.ones(len(who), dtype=torch.int64)
        self.state = self.algorithm.server.aggregate(self.state, who, sent, received, counts)
        return self.w

    @property
    def w(self) -> Tensor:
        w = self.algorithm.server.global_model(self.state)
        assert w is not None
        return w["w"]

    def kept(self, name: str) -> Tensor:
        """What all clients keep under `name` (N, d)."""
        return torch.stack([memory[name]["w"] for memory in self.memory])


def pull(curvature: float, target: Tensor) -> Any:
    """Gradient of curvature / 2 ||w - target||^2."""
    return lambda w, batch: params(curvature * (w["w"] - target))


def push(g: Tensor) -> Any:
    """The same gradient everywhere."""
    return lambda w, batch: params(g)
