"""The far end of a remote backend: a worker answers the server's messages with a local backend of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.algorithm import Algorithm
from ...core.io import flatten_tree
from ...core.params import select_prefix
from ...core.payload import Payload, concatenate_payloads
from ...core.settings import RAY_DEFAULTS, Settings
from ...data import Federation
from ...runs.rows import RowStorage, count_row_bytes, load_rows
from ..clients.state import PayloadFactory
from ..setup import make_run_context
from .base import TrainRequest
from .local import LocalBackend
from .message import WorkerMessage, join_messages, split_message, unflatten_payload


def open_backend(
    algorithm: Algorithm,
    federation: Federation,
    model: nn.Module,
    settings: Settings,
    client_ids: Sequence[int],
    *,
    is_one_message: bool = False,
) -> LocalBackend:
    """Make the backend of some clients of a federation, which has an entry for all and data for these."""
    if settings.execution.ray:
        settings = settings.replace(engine="auto", **RAY_DEFAULTS)
    context = make_run_context(algorithm, federation, model, settings)
    size = count_row_bytes(context.algorithm, context.task, {})
    return LocalBackend(
        context,
        RowStorage.choose(settings, len(client_ids), size, None),
        client_ids=torch.tensor(sorted(client_ids), dtype=torch.int64, device=context.device),
        is_one_message=is_one_message,
    )


def handle_message(backend: LocalBackend, message: WorkerMessage) -> WorkerMessage:
    """Do what a message says, and return the reply.

    A message may carry answers to earlier uploads, which are taken first, and the averaged BatchNorm statistics. The
    reply to several messages in one has as many parts.
    """
    if message.head["kind"] == "several":
        return join_messages([handle_message(backend, part) for part in split_message(message)])
    head, message = message.head, message.to(backend.client_ids.device)
    if backend.statistics:
        backend.statistics = message.get("statistics")
    if pending := head.get("pending"):
        ids, payload = _make_id_tensor(pending, backend), message.payload("pending")
        is_first = torch.tensor(head["pending_first"], device=ids.device)
        backend.client_states.store_payload(ids, payload)
        if len(rows := (~is_first).nonzero().flatten()):
            statistics = message.get("pending_statistics").rows(rows)
            backend.client_states.receive(ids[rows], payload.rows(rows), statistics or None)
    return {
        "train": _handle_train,
        "evaluate": _handle_evaluate,
        "buffers": _handle_buffers,
        "keep": _handle_keep,
        "measure": _handle_measure,
        "models": _handle_models,
        "state": _handle_state,
    }[head["kind"]](backend, message)


def _handle_train(backend: LocalBackend, message: WorkerMessage) -> WorkerMessage:
    head = message.head
    ids, cohort, dropouts = (_make_id_tensor(head[key], backend) for key in ("ids", "cohort", "dropouts"))
    request = TrainRequest(head["round"], ids, cohort, dropouts, head["update_server"], head["should_evaluate"])
    payload = None if head["replies_immediately"] else message.payload("sent")
    reply = WorkerMessage(
        {"kind": "trained", "round": request.round, "ids": [], "n_trained": 0, "steps": 0, "diverged": []}
    )
    backend.round = request.round
    if len(ids):
        result = backend.train(request, payload, _make_payload_factory(ids, payload))
        reply.head.update(
            ids=result.ids.tolist(), n_trained=result.n_trained, steps=result.steps, diverged=list(result.diverged)
        )
        if result.alone:
            reply.head.update(refused=list(result.refused), alone=list(result.alone))
        if len(result.ids):
            reply.put("upload", result.upload)
            reply.put("buffers", result.buffers)
    if request.should_evaluate and len(backend.evaluation.eval_ids):
        resting = _make_id_tensor(head["resting"], backend)
        payload_ids, payloads = _merge_payloads((ids, payload), (resting, message.payload("resting")))
        reply.put_scores(backend.evaluate_trained(_make_payload_factory(payload_ids, payloads)))
    return reply


def _merge_payloads(one: tuple[Tensor, Payload | None], other: tuple[Tensor, Payload]) -> tuple[Tensor, Payload | None]:
    if one[1] is None or not len(other[0]):
        return one
    if not len(one[0]):
        return other
    ids, order = torch.cat([one[0], other[0]]).sort()
    return ids, concatenate_payloads([one[1], other[1]]).rows(order)


def _handle_evaluate(backend: LocalBackend, message: WorkerMessage) -> WorkerMessage:
    head, eval_ids = message.head, backend.evaluation.eval_ids
    w = message.get("w") if head["has_w"] else None
    mean_buffers = message.get("mean_buffers") if head["has_mean"] else None
    payload = None if head["replies_immediately"] else message.payload("sent")
    reply = WorkerMessage({"kind": "evaluated", "round": head["round"]})
    scores = backend.evaluate_received(head["round"], _make_payload_factory(eval_ids, payload), w, mean_buffers)
    reply.put_scores(scores)
    return reply


def _handle_buffers(backend: LocalBackend, _: WorkerMessage) -> WorkerMessage:
    reply = WorkerMessage({"kind": "buffers"})
    reply.tensors.update({f"total/{k}": v for k, v in backend.evaluation.total_buffers().items()})
    return reply


def _handle_keep(backend: LocalBackend, message: WorkerMessage) -> WorkerMessage:
    backend.keep_models(_make_id_tensor(message.head["ids"], backend))
    return WorkerMessage({"kind": "kept"})


def _handle_measure(backend: LocalBackend, message: WorkerMessage) -> WorkerMessage:
    head, ids = message.head, _make_id_tensor(message.head["ids"], backend)
    payload = None if head["replies_immediately"] else message.payload("sent")
    measured = backend.measure_clients(head["round"], ids, _make_payload_factory(ids, payload))
    effects = [
        [client, [[*effect.mechanism, effect.value] for effect in each]]
        for client, each in zip(head["ids"], measured, strict=True)
    ]
    return WorkerMessage({"kind": "measured", "round": head["round"], "effects": effects})


def _handle_models(backend: LocalBackend, _: WorkerMessage) -> WorkerMessage:
    reply = WorkerMessage({"kind": "models", "ids": backend.evaluation.eval_ids.tolist()})
    models, buffers = backend.evaluated_models
    reply.put("params", load_rows(models))
    reply.put("buffers", load_rows(buffers))
    return reply


def _handle_state(backend: LocalBackend, message: WorkerMessage) -> WorkerMessage:
    """Take over the state of the clients if the message has it; send it otherwise."""
    if message.head["load"]:
        load_state(backend, message.get("state"))
        return WorkerMessage({"kind": "state"})
    state = {k: v for k, v in flatten_tree(export_state(backend)).items() if not k.startswith("sent/")}
    return WorkerMessage({"kind": "state"}, {f"state/{k}": v for k, v in state.items()})


def export_state(backend: LocalBackend) -> dict[str, Any]:
    """Return the state of the clients as a nest of dicts, without the statistics, which every message brings."""
    tree = backend.state_tree()
    del tree["statistics"]
    for part in ("local_state", "memory", "kept"):
        tree[part] = {k: v if isinstance(v, Tensor) else load_rows(v) for k, v in tree[part].items()}
    return tree | {part: load_rows(tree[part]) for part in ("personal", "buffers")}


def load_state(backend: LocalBackend, state: Mapping[str, Tensor]) -> None:
    """Take over the state that `export_state` gave, by paths such as `local_state/w/0.weight`."""
    client_states = backend.client_states
    rows = torch.arange(len(backend.client_ids), device=backend.client_ids.device)
    for part, stacks in (("local_state", client_states.local_state), ("memory", client_states.memory)):
        for key, stack in stacks.items():
            stack.put_rows(rows, select_prefix(state, f"{part}/{key}/"))
    client_states.personal.put_rows(rows, select_prefix(state, "personal/"))
    client_states.buffers.put_rows(rows, select_prefix(state, "buffers/"))
    client_states.fresh = state["fresh"].clone()
    backend.load_kept(select_prefix(state, "kept/"))
    if sent := select_prefix(state, "sent/"):
        client_states.store_payload(backend.client_ids, unflatten_payload(sent))


def _make_id_tensor(ids: list[int], backend: LocalBackend) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=backend.client_ids.device)


def _make_payload_factory(payload_ids: Tensor, payload: Payload | None) -> PayloadFactory:
    """Make the payload factory of the clients whose payloads came with a message."""

    def make_payload(ids: Tensor) -> Payload:
        assert payload is not None  # it is asked for only if clients keep no payloads
        return payload if torch.equal(ids, payload_ids) else payload.rows(torch.searchsorted(payload_ids, ids))

    return make_payload
