"""What lives on the clients between rounds: memory, personal tensors, buffers, and what they were last sent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from .core import Algorithm, Memory, Payload, State
from .engines import Inputs, Trained
from .params import Params
from .rooms import Room, Stack, picked
from .task import Task

ModelRule = Callable[[Payload, Memory, Tensor], Params]

FIRST_AT_ONCE = 1000
"""Clients whose first payload is made together where payloads are kept on disk."""


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

    memory: dict[str, Stack]
    personal: Stack
    buffers: Stack
    sent: Payload | None
    fresh: Tensor
    names: list[str]
    common: Params

    @classmethod
    def start(
        cls,
        algorithm: Algorithm,
        task: Task,
        server: State,
        everyone: Tensor,
        room: Room,
        *,
        averaged: Iterable[str] = (),
        own_buffers: Params | None = None,
    ) -> "ClientStates":
        """All clients before the first round; they hold the initial model.

        Buffers `averaged` are shared; `own_buffers` (N, ...) differ between clients.
        """
        w0 = task.params
        own, first = own_buffers or Params(), task.buffers
        if own:
            first = Params({**first, **own.rows(0)})
        return cls(
            memory={k: room.stack(f"clients/memory/{k}", v) for k, v in algorithm.client.memory(w0).items()},
            personal=room.stack("clients/personal", w0.only(algorithm.personal.names(task.model))),
            buffers=room.stack("clients/buffers", first, own),
            sent=_first_payloads(algorithm, server, everyone, room),
            fresh=torch.zeros(len(everyone), dtype=torch.bool, device=everyone.device),
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
        if self.common:
            self.buffers.only(self.common).put_rows(ids, self.common.repeat(len(ids)))

    def average_buffers(self, uploaded: Params, n: Tensor) -> None:
        """Make the weighted mean of what the cohort uploaded (C, ...) the common statistics; n (C,) samples."""
        p = n.double() / n.sum()
        self.common = Params(
            {k: torch.tensordot(p.to(v.dtype), uploaded[k], 1) for k, v in self.common.items()}
        )

    def held_buffers(self, ids: Tensor) -> Params:
        """The buffers (E, ...) that clients `ids` hold."""
        return picked(self.buffers, ids, len(self.fresh))

    def received_buffers(self, ids: Tensor) -> Params:
        """Buffers (E, ...) of clients `ids` if all were sent the common ones now; under `reply`, those they hold."""
        if not self.common or self.sent is not None:
            return self.held_buffers(ids)
        return Params({**self.held_buffers(ids), **self.common.repeat(len(ids))})

    def inputs(self, ids: Tensor, payload: Payload, heard: Tensor) -> Inputs:
        """What clients `ids` start training from when `payload` is the last they were sent; `heard` is of `Job`."""
        return Inputs(
            self._whole(payload, self.personal.rows(ids)),
            {k: v.rows(ids) for k, v in self.memory.items()},
            self.buffers.rows(ids),
            self.fresh[ids],
            heard,
        )

    def _whole(self, payload: Payload, own: Params) -> Payload:
        """The payload with the parameters that never left the clients."""
        return payload._replace(
            params=Params({k: own[k] if k in own else payload.params[k] for k in self.names})
        )

    def keep(self, ids: Tensor, trained: Trained) -> None:
        """Store what training left on clients `ids`."""
        for k, v in self.memory.items():
            v.put_rows(ids, trained.memory[k])
        self.personal.put_rows(ids, trained.upload.params)
        self.buffers.put_rows(ids, trained.buffers)
        self.fresh[ids] = False

    def models(self, rule: ModelRule, ids: Tensor, broadcast: Callable[[Tensor], Payload]) -> Params:
        """The model (E, ...) that `rule` gives clients `ids`; `broadcast` is asked where nothing was kept."""
        n = len(self.fresh)
        if self.sent is not None:
            sent = Payload(
                picked(self.sent.params, ids, n), {k: picked(v, ids, n) for k, v in self.sent.extra.items()}
            )
            fresh = self.fresh[ids]
        else:
            sent, fresh = broadcast(ids), torch.ones_like(ids, dtype=torch.bool)
        if not self.memory and not self.personal:
            return rule(sent, {}, fresh)  # one model for all stays one model
        memory = {k: picked(v, ids, n) for k, v in self.memory.items()}
        models: Params = vmap(rule)(self._whole(sent, picked(self.personal, ids, n)), memory, fresh)
        return models


def owned(stack: Params) -> Params:
    """A copy whose rows can be written one by one."""
    return stack.map(lambda a: a.clone(memory_format=torch.contiguous_format))


def _first_payloads(algorithm: Algorithm, server: State, everyone: Tensor, room: Room) -> Payload | None:
    """What each client was sent before the first round, where that is kept."""
    if algorithm.participation.receive != "reply":
        return None
    if not room.disk:
        first = algorithm.server.broadcast(server, everyone)
        return Payload(owned(first.params), {k: owned(v) for k, v in first.extra.items()})
    one = algorithm.server.broadcast(server, everyone[:1]).rows(0)
    sent = Payload(
        cast(Params, room.stack("clients/sent/params", one.params)),
        {k: cast(Params, room.stack(f"clients/sent/extra/{k}", v)) for k, v in one.extra.items()},
    )
    stretches: list[Tensor] = list(everyone.split(FIRST_AT_ONCE))  # type: ignore[no-untyped-call]
    differ = 0
    for number, ids in enumerate([stretches[-1], *stretches[:-1]]):
        payload = algorithm.server.broadcast(server, ids)
        differ += _put_other(sent.params, one.params, ids, payload.params)
        for k, v in sent.extra.items():
            differ += _put_other(v, one.extra[k], ids, payload.extra[k])
        # A rule draws something for each client, or sends all the same at first: of 2,000, one would have shown.
        if number == 1 and not differ:
            break
    return sent


def _put_other(stack: Stack, first: Params, ids: Tensor, rows: Params) -> int:
    """Write those rows that differ from the first one, as equal ones take no space; how many these are."""
    other = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for k, v in rows.items():
        other |= (v != first[k]).reshape(len(ids), -1).any(1)
    if other.any():
        stack.put_rows(ids[other], rows.rows(other.nonzero().flatten()))
    return int(other.sum())
