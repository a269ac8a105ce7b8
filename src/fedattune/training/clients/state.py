"""The state of clients between rounds: local state, personal tensors, buffers, the last payloads, and kept models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from ...core.params import Params, copy_dense
from ...core.payload import Payload
from ...engine.base import ClientInputs, ClientOutputs
from ...runs.context import RunContext
from ...runs.rows import RowStack, RowStorage, pick_rows
from .acceptance import Judge, ModelRule

PayloadFactory = Callable[[Tensor], Payload]
"""Gives the payload that the server would send to clients with these numbers now, one row each."""

FIRST_PAYLOADS_CHUNK = 1000
"""Clients whose first payload is made together if payloads are kept on disk."""


@dataclass
class ClientStates:
    """The state of the M clients of one backend, one row per client on every tensor.

    Attributes:
        client_ids: (M,) their numbers among all N clients, sorted; clients are named by these numbers.
        local_state: the local state of the client rule, by name.
        personal: the parameters that never leave a client.
        buffers: the model's buffers (running statistics), which stay on the client.
        sent: the last payload of each client; kept only if the server answers uploads (`answer`).
        fresh: (M,) whether that payload arrived since the client last trained.
        names: the model's parameters in their order.
        statistics: the averaged BatchNorm statistics that clients are sent; empty if these stay local.
        storage: where rows are kept.
        memory: what upload steps remember of each client, by step.
        judge: decides which payloads clients refuse; None if they accept all.
    """

    client_ids: Tensor
    local_state: dict[str, RowStack]
    personal: RowStack
    buffers: RowStack
    sent: Payload | None
    fresh: Tensor
    names: list[str]
    statistics: Params
    storage: RowStorage
    memory: dict[str, RowStack] = field(default_factory=dict)
    judge: Judge | None = None

    @classmethod
    def start(
        cls,
        context: RunContext,
        client_ids: Tensor,
        storage: RowStorage,
        *,
        make_payload: PayloadFactory | None = None,
        own_buffers: Params | None = None,
        memory: Mapping[str, Params] | None = None,
    ) -> "ClientStates":
        """Make the state before the first round, in which clients hold the initial model.

        Without `make_payload`, the first payloads come later by `store_payload`. `own_buffers` (M, ...) differ between
        clients.
        """
        algorithm, task = context.algorithm, context.task
        own, first = own_buffers or Params(), task.buffers
        if own:
            first = Params({**first, **own.rows(0)})
        local_state = algorithm.client.init_local_state(task.params)
        personal = task.params.only(algorithm.personal.names(task.model))
        return cls(
            client_ids=client_ids,
            local_state={k: storage.allocate(f"clients/local_state/{k}", v) for k, v in local_state.items()},
            personal=storage.allocate("clients/personal", personal),
            buffers=storage.allocate("clients/buffers", first, own),
            sent=_make_first_payloads(make_payload, client_ids, storage)
            if make_payload and context.replies_immediately
            else None,
            fresh=torch.zeros(len(client_ids), dtype=torch.bool, device=client_ids.device),
            names=list(task.params),
            statistics=context.initial_statistics,
            storage=storage,
            memory={k: storage.allocate(f"clients/memory/{k}", v) for k, v in (memory or {}).items()},
        )

    def state_tree(self) -> dict[str, Any]:
        return {
            "local_state": self.local_state,
            "memory": self.memory,
            "personal": self.personal,
            "buffers": self.buffers,
            "sent": {} if self.sent is None else self.sent._asdict(),
            "fresh": self.fresh,
            "statistics": self.statistics,
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        self.local_state, self.personal, self.buffers = tree["local_state"], tree["personal"], tree["buffers"]
        self.memory = tree["memory"]
        self.fresh, self.statistics = tree["fresh"], tree["statistics"]
        if self.sent is not None:
            self.sent = Payload(**tree["sent"])

    def rows_of(self, ids: Tensor) -> Tensor:
        return ids if self._are_all else torch.searchsorted(self.client_ids, ids)

    @cached_property
    def _are_all(self) -> bool:
        return int(self.client_ids[-1]) == len(self.client_ids) - 1

    def store_payload(self, ids: Tensor, payload: Payload) -> None:
        if self.sent is None:
            self.sent = _allocate_payloads(payload.rows(0), self.storage)
        put_payload_rows(self.sent, self.rows_of(ids), payload)

    def receive(self, ids: Tensor, payload: Payload, statistics: Params | None = None) -> None:
        """Give clients `ids` a payload, with the averaged BatchNorm statistics, or older ones that came with it."""
        if self.sent is not None:
            self.store_payload(ids, payload)
        rows = self.rows_of(ids)
        self.fresh[rows] = True
        if self.statistics:
            self.buffers.only(self.statistics).put_rows(rows, statistics or self.statistics.repeat(len(ids)))

    def held_buffers(self, ids: Tensor) -> Params:
        return pick_rows(self.buffers, self.rows_of(ids), len(self.fresh))

    def received_buffers(self, ids: Tensor) -> Params:
        """Return the buffers (E, ...) of clients `ids` as if all had received the current averaged statistics.

        A server that answers uploads sends them to the cohort alone: then these are the buffers that clients hold.
        """
        if not self.statistics or self.sent is not None:
            return self.held_buffers(ids)
        return Params({**self.held_buffers(ids), **self.statistics.repeat(len(ids))})

    def training_inputs(
        self, ids: Tensor, payload: Payload, is_uploaded: Tensor, fresh: Tensor | None = None
    ) -> ClientInputs:
        """Return the state from which clients `ids` (C,) start training.

        `fresh` (C,) says whether the payload is new to the client; by default as the client received it.
        """
        rows = self.rows_of(ids)
        inputs = ClientInputs(
            self._add_personal(payload, self.personal.rows(rows)),
            {k: v.rows(rows) for k, v in self.local_state.items()},
            self.buffers.rows(rows),
            self.fresh[rows] if fresh is None else fresh,
            is_uploaded,
        )
        return self.judge.decide(ids, inputs) if self.judge else inputs

    def _add_personal(self, payload: Payload, own: Params) -> Payload:
        """Return the payload with the parameters that never left the clients."""
        return payload._replace(params=Params({k: own[k] if k in own else payload.params[k] for k in self.names}))

    def store_trained(self, ids: Tensor, trained: ClientOutputs) -> None:
        rows = self.rows_of(ids)
        for k, v in self.local_state.items():
            v.put_rows(rows, trained.local_state[k])
        self.personal.put_rows(rows, trained.upload.params)
        self.buffers.put_rows(rows, trained.buffers)
        self.fresh[rows] = False

    def models(self, rule: ModelRule, ids: Tensor, make_payload: PayloadFactory) -> Params:
        """Return the models (E, ...) that a rule gives clients `ids` (E,); `make_payload` if they keep none."""
        n, rows = len(self.fresh), self.rows_of(ids)
        if self.sent is not None:
            sent, fresh = self.sent.map(lambda part: pick_rows(part, rows, n)), self.fresh[rows]
        else:
            sent, fresh = make_payload(ids), torch.ones_like(ids, dtype=torch.bool)
        if not self.local_state and not self.personal:
            return rule(sent, {}, fresh)  # one model for all stays one model
        local_state = {k: pick_rows(v, rows, n) for k, v in self.local_state.items()}
        whole = self._add_personal(sent, pick_rows(self.personal, rows, n))
        if self.judge:
            inputs = ClientInputs(whole, local_state, self.received_buffers(ids), fresh, torch.zeros_like(fresh))
            return self.judge.choose_models(rule, ids, inputs)
        models: Params = vmap(rule)(whole, local_state, fresh)
        return models


@dataclass
class KeptModels:
    """The kept models and buffers (M, ...) of the clients of a backend; nothing if no model is to be kept.

    Until a client's model `is_kept` (M,), its row is the initial model.
    """

    params: RowStack
    buffers: RowStack
    is_kept: Tensor

    @classmethod
    def start(cls, context: RunContext, storage: RowStorage, name: str = "kept", *, is_on: bool = True) -> "KeptModels":
        is_kept = torch.zeros(storage.n, dtype=torch.bool, device=context.device)
        if context.early_stopping == "off" or not is_on:
            return cls(Params(), Params(), is_kept)
        return cls(
            storage.allocate(f"clients/{name}/params", context.task.params),
            storage.allocate(f"clients/{name}/buffers", context.task.buffers),
            is_kept,
        )

    def put(self, rows: Tensor, params: Params, buffers: Params) -> None:
        self.params.put_rows(rows, params)
        self.buffers.put_rows(rows, buffers)
        self.is_kept[rows] = True

    def state_tree(self) -> dict[str, Any]:
        return {"params": self.params, "buffers": self.buffers, "is_kept": self.is_kept}

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        self.params, self.buffers, self.is_kept = tree["params"], tree["buffers"], tree["is_kept"]


def to_cpu(stack: RowStack) -> RowStack:
    """Return a stack in main memory; clients that share a model go on sharing it."""

    def move(value: Tensor) -> Tensor:
        is_shared = len(value) > 1 and not value.stride(0)
        return value[:1].cpu().expand_as(value) if is_shared else value.cpu()

    return stack.map(move) if isinstance(stack, Params) else stack


def put_payload_rows(stack: Payload, rows: Tensor, new: Payload) -> None:
    """Write the payloads `new` in place of some rows of a stack of payloads."""
    stack.params.put_rows(rows, new.params)
    for key, part in stack.extra.items():
        part.put_rows(rows, new.extra[key])


def _make_first_payloads(make_payload: PayloadFactory, client_ids: Tensor, storage: RowStorage) -> Payload:
    if not storage.is_on_disk:
        return make_payload(client_ids).map(lambda part: part.map(copy_dense))
    one = make_payload(client_ids[:1]).rows(0)
    sent = _allocate_payloads(one, storage)
    rows = torch.arange(len(client_ids), device=client_ids.device)
    chunks: list[Tensor] = list(rows.split(FIRST_PAYLOADS_CHUNK))  # type: ignore[no-untyped-call]
    n_different = 0
    for number, chunk in enumerate([chunks[-1], *chunks[:-1]]):
        payload = make_payload(client_ids[chunk])
        n_different += _write_differing_rows(sent.params, one.params, chunk, payload.params)
        for k, v in sent.extra.items():
            n_different += _write_differing_rows(v, one.extra[k], chunk, payload.extra[k])
        # A rule draws something for each client, or sends all the same at first: of 2,000, one would have shown.
        if number == 1 and not n_different:
            break
    return sent


def _allocate_payloads(one: Payload, storage: RowStorage) -> Payload:
    """Make room for a payload of each client, which is `one` at first."""
    return Payload(
        cast(Params, storage.allocate("clients/sent/params", one.params)),
        {k: cast(Params, storage.allocate(f"clients/sent/extra/{k}", v)) for k, v in one.extra.items()},
    )


def _write_differing_rows(stack: RowStack, first: Params, at: Tensor, rows: Params) -> int:
    differs = torch.zeros(len(at), dtype=torch.bool, device=at.device)
    for k, v in rows.items():
        differs |= (v != first[k]).reshape(len(at), -1).any(1)
    if differs.any():
        stack.put_rows(at[differs], rows.rows(differs.nonzero().flatten()))
    return int(differs.sum())
