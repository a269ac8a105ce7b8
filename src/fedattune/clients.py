"""What lives on the clients between rounds: memory, personal tensors, buffers, and what they were last sent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from .core import Algorithm, Memory, Payload, State
from .engines import Inputs, Trained
from .engines.base import take
from .params import Params
from .task import Task

ModelRule = Callable[[Payload, Memory, Tensor], Params]


@dataclass
class ClientStates:
    """The state of all N clients, one row per client on every tensor.

    Attributes:
        memory: what the client rule keeps.
        personal: the parameters that never leave a client.
        buffers: the model's buffers (running statistics), which stay on the client.
        sent: the last payload each client was sent; kept only where the server answers uploads (`reply`).
        fresh: (N,) whether that payload arrived since the client last trained.
        names: the model's parameters in their order.
        common: the averaged BatchNorm statistics that clients are sent; empty where these stay local.

    """

    memory: Memory
    personal: Params
    buffers: Params
    sent: Payload | None
    fresh: Tensor
    names: list[str]
    common: Params

    @classmethod
    def start(
        cls, algorithm: Algorithm, task: Task, server: State, everyone: Tensor, averaged: Iterable[str] = ()
    ) -> "ClientStates":
        """All clients before the first round; they hold the initial model. Buffers `averaged` are shared."""
        n, w0 = len(everyone), task.params
        sent = None
        if algorithm.participation.receive == "reply":
            first = algorithm.server.broadcast(server, everyone)
            sent = Payload(owned(first.params), {k: owned(v) for k, v in first.extra.items()})
        return cls(
            memory={k: v.copies(n) for k, v in algorithm.client.memory(w0).items()},
            personal=w0.only(algorithm.personal.names(task.model)).copies(n),
            buffers=task.buffers.copies(n),
            sent=sent,
            fresh=torch.zeros(n, dtype=torch.bool, device=everyone.device),
            names=list(w0),
            common=task.buffers.only(averaged),
        )

    def tree(self) -> dict[str, Any]:
        """Everything as a nest of dicts, for a checkpoint."""
        sent = {} if self.sent is None else {"params": self.sent.params, "extra": self.sent.extra}
        return {
            "memory": self.memory,
            "personal": self.personal,
            "buffers": self.buffers,
            "sent": sent,
            "fresh": self.fresh,
            "common": self.common,
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.memory, self.personal, self.buffers = tree["memory"], tree["personal"], tree["buffers"]
        self.fresh, self.common = tree["fresh"], tree["common"]
        if self.sent is not None:
            self.sent = Payload(tree["sent"]["params"], tree["sent"]["extra"])

    def arrived(self, ids: Tensor, payload: Payload) -> None:
        """Note what clients `ids` were sent."""
        if self.sent is not None:
            self.sent.params.put_rows(ids, payload.params)
            for k, v in self.sent.extra.items():
                v.put_rows(ids, payload.extra[k])
        self.fresh[ids] = True
        self.buffers.only(self.common).put_rows(ids, self.common.repeat(len(ids)))

    def average_buffers(self, uploaded: Params, n: Tensor) -> None:
        """Make the weighted mean of what the cohort uploaded (C, ...) the common statistics; n (C,) samples."""
        p = n.double() / n.sum()
        self.common = Params(
            {k: torch.tensordot(p.to(v.dtype), uploaded[k], 1) for k, v in self.common.items()}
        )

    def received_buffers(self) -> Params:
        """Every client's buffers (N, ...) if all were sent the common ones now; under `reply`, those they hold."""
        if not self.common or self.sent is not None:
            return self.buffers
        return Params({**self.buffers, **self.common.repeat(len(self.fresh))})

    def inputs(self, ids: Tensor, payload: Payload, heard: Tensor) -> Inputs:
        """What clients `ids` start training from when `payload` is the last they were sent; `heard` is of `Job`."""
        own = self.personal.rows(ids)
        whole = Params({k: own[k] if k in own else payload.params[k] for k in self.names})
        return Inputs(
            payload._replace(params=whole),
            take(self.memory, ids),
            self.buffers.rows(ids),
            self.fresh[ids],
            heard,
        )

    def keep(self, ids: Tensor, trained: Trained) -> None:
        """Store what training left on clients `ids`."""
        for k, v in self.memory.items():
            v.put_rows(ids, trained.memory[k])
        self.personal.put_rows(ids, trained.upload.params)
        self.buffers.put_rows(ids, trained.buffers)
        self.fresh[ids] = False

    def models(self, rule: ModelRule, everyone: Tensor, broadcast: Callable[[], Payload]) -> Params:
        """The model (N, ...) that `rule` gives every client; `broadcast` is asked where nothing was kept."""
        if self.sent is not None:
            sent, fresh = self.sent, self.fresh
        else:
            sent, fresh = broadcast(), torch.ones_like(self.fresh)
        if not self.memory and not self.personal:
            return rule(sent, {}, fresh)  # one model for all stays one model
        models: Params = vmap(rule)(self.inputs(everyone, sent, fresh).sent, self.memory, fresh)
        return models


def owned(stack: Params) -> Params:
    """A copy whose rows can be written one by one."""
    return stack.map(lambda a: a.clone(memory_format=torch.contiguous_format))
