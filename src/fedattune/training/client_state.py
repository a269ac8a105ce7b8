"""What lives on the clients between rounds: memory, personal tensors, buffers, and what they were last sent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from ..core.algorithm import Algorithm
from ..core.params import Params
from ..core.payload import LocalState, Payload
from ..core.task import Task
from .engine import ClientInputs, ClientOutputs
from .storage.rows import RowStack, RowStorage, pick_rows

ModelRule = Callable[[Payload, LocalState, Tensor], Params]


Sender = Callable[[Tensor], Payload]
"""What the server sends to clients with these numbers now, one row each."""


FIRST_PAYLOADS_CHUNK = 1000
"""Clients whose first payload is made together where payloads are kept on disk."""


@dataclass
class ClientStates:
    """The state of the M clients of one place, one row per client on every tensor.

    Attributes:
        members: (M,) their numbers among all N clients, sorted; clients are named by these numbers.
        memory: what the client rule keeps.
        personal: the parameters that never leave a client.
        buffers: the model's buffers (running statistics), which stay on the client.
        sent: the last payload each client was sent; kept only where the server answers uploads (`reply`).
        fresh: (M,) whether that payload arrived since the client last trained.
        names: the model's parameters in their order.
        common: the averaged BatchNorm statistics that clients are sent; empty where these stay local.
        room: where rows are kept.

    """

    members: Tensor
    memory: dict[str, RowStack]
    personal: RowStack
    buffers: RowStack
    sent: Payload | None
    fresh: Tensor
    names: list[str]
    common: Params
    room: RowStorage

    @classmethod
    def start(
        cls,
        algorithm: Algorithm,
        task: Task,
        send: Sender | None,
        members: Tensor,
        room: RowStorage,
        *,
        averaged: Iterable[str] = (),
        own_buffers: Params | None = None,
    ) -> "ClientStates":
        """Clients `members` (M,) before the first round; they hold the initial model.

        Buffers `averaged` are shared; `own_buffers` (M, ...) differ between clients. Without `send`, the first
        payloads are to come by `hold`.
        """
        w0 = task.params
        own, first = own_buffers or Params(), task.buffers
        if own:
            first = Params({**first, **own.rows(0)})
        keeps = send is not None and algorithm.participation.receive == "reply"
        return cls(
            members=members,
            memory={
                k: room.allocate(f"clients/memory/{k}", v)
                for k, v in algorithm.client.init_local_state(w0).items()
            },
            personal=room.allocate("clients/personal", w0.only(algorithm.personal.names(task.model))),
            buffers=room.allocate("clients/buffers", first, own),
            sent=_make_first_payloads(send, members, room) if send and keeps else None,
            fresh=torch.zeros(len(members), dtype=torch.bool, device=members.device),
            names=list(w0),
            common=task.buffers.only(averaged),
            room=room,
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

    def at(self, ids: Tensor) -> Tensor:
        """The rows of clients `ids`."""
        return ids if self._are_all else torch.searchsorted(self.members, ids)

    @cached_property
    def _are_all(self) -> bool:
        """Whether a client's number is its row."""
        return int(self.members[-1]) == len(self.members) - 1

    def hold(self, ids: Tensor, payload: Payload) -> None:
        """Let clients `ids` keep what they are sent until it is replaced."""
        if self.sent is None:
            self.sent = _allocate_payloads(payload.rows(0), self.room)
        self.sent.params.put_rows(self.at(ids), payload.params)
        for k, v in self.sent.extra.items():
            v.put_rows(self.at(ids), payload.extra[k])

    def arrived(self, ids: Tensor, payload: Payload, common: Params | None = None) -> None:
        """Note what clients `ids` were sent; `common` are the common statistics of each, if they were others then."""
        if self.sent is not None:
            self.hold(ids, payload)
        rows = self.at(ids)
        self.fresh[rows] = True
        if self.common:
            self.buffers.only(self.common).put_rows(rows, common or self.common.repeat(len(ids)))

    def held_buffers(self, ids: Tensor) -> Params:
        """The buffers (E, ...) that clients `ids` hold."""
        return pick_rows(self.buffers, self.at(ids), len(self.fresh))

    def received_buffers(self, ids: Tensor) -> Params:
        """Buffers (E, ...) of clients `ids` if all were sent the common ones now; under `reply`, those they hold."""
        if not self.common or self.sent is not None:
            return self.held_buffers(ids)
        return Params({**self.held_buffers(ids), **self.common.repeat(len(ids))})

    def inputs(self, ids: Tensor, payload: Payload, is_uploaded: Tensor) -> ClientInputs:
        """Collect the start of training for clients `ids`; `payload` is the last one they were sent."""
        rows = self.at(ids)
        return ClientInputs(
            self._whole(payload, self.personal.rows(rows)),
            {k: v.rows(rows) for k, v in self.memory.items()},
            self.buffers.rows(rows),
            self.fresh[rows],
            is_uploaded,
        )

    def _whole(self, payload: Payload, own: Params) -> Payload:
        """The payload with the parameters that never left the clients."""
        return payload._replace(
            params=Params({k: own[k] if k in own else payload.params[k] for k in self.names})
        )

    def keep(self, ids: Tensor, trained: ClientOutputs) -> None:
        """Store what training left on clients `ids`."""
        rows = self.at(ids)
        for k, v in self.memory.items():
            v.put_rows(rows, trained.local_state[k])
        self.personal.put_rows(rows, trained.upload.params)
        self.buffers.put_rows(rows, trained.buffers)
        self.fresh[rows] = False

    def models(self, rule: ModelRule, ids: Tensor, send: Sender) -> Params:
        """The model (E, ...) that `rule` gives clients `ids`; `send` is asked where nothing was kept."""
        n, rows = len(self.fresh), self.at(ids)
        if self.sent is not None:
            sent = Payload(
                pick_rows(self.sent.params, rows, n),
                {k: pick_rows(v, rows, n) for k, v in self.sent.extra.items()},
            )
            fresh = self.fresh[rows]
        else:
            sent, fresh = send(ids), torch.ones_like(ids, dtype=torch.bool)
        if not self.memory and not self.personal:
            return rule(sent, {}, fresh)  # one model for all stays one model
        memory = {k: pick_rows(v, rows, n) for k, v in self.memory.items()}
        models: Params = vmap(rule)(self._whole(sent, pick_rows(self.personal, rows, n)), memory, fresh)
        return models


def copy_rows(stack: Params) -> Params:
    """A copy whose rows can be written one by one."""
    return stack.map(lambda a: a.clone(memory_format=torch.contiguous_format))


def _make_first_payloads(send: Sender, members: Tensor, room: RowStorage) -> Payload:
    """What each client was sent before the first round."""
    if not room.disk:
        first = send(members)
        return Payload(copy_rows(first.params), {k: copy_rows(v) for k, v in first.extra.items()})
    one = send(members[:1]).rows(0)
    sent = _allocate_payloads(one, room)
    numbers = torch.arange(len(members), device=members.device)
    stretches: list[Tensor] = list(numbers.split(FIRST_PAYLOADS_CHUNK))  # type: ignore[no-untyped-call]
    differ = 0
    for number, rows in enumerate([stretches[-1], *stretches[:-1]]):
        payload = send(members[rows])
        differ += _write_differing_rows(sent.params, one.params, rows, payload.params)
        for k, v in sent.extra.items():
            differ += _write_differing_rows(v, one.extra[k], rows, payload.extra[k])
        # A rule draws something for each client, or sends all the same at first: of 2,000, one would have shown.
        if number == 1 and not differ:
            break
    return sent


def _allocate_payloads(one: Payload, room: RowStorage) -> Payload:
    """Room for a payload of each client, that of `one` at first."""
    return Payload(
        cast(Params, room.allocate("clients/sent/params", one.params)),
        {k: cast(Params, room.allocate(f"clients/sent/extra/{k}", v)) for k, v in one.extra.items()},
    )


def _write_differing_rows(stack: RowStack, first: Params, at: Tensor, rows: Params) -> int:
    """Write those rows that differ from the first one, as equal ones take no space; how many these are."""
    other = torch.zeros(len(at), dtype=torch.bool, device=at.device)
    for k, v in rows.items():
        other |= (v != first[k]).reshape(len(at), -1).any(1)
    if other.any():
        stack.put_rows(at[other], rows.rows(other.nonzero().flatten()))
    return int(other.sum())
