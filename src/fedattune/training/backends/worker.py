"""The far end of a spread cohort: what a site makes of the parcels it gets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.algorithm import Algorithm
from ...core.hardware import resolve_device
from ...core.io import flatten_tree
from ...core.params import Params
from ...core.payload import Payload, concatenate_payloads
from ...core.settings import Settings
from ...core.task import Task
from ...data import Federation
from ..client_state import Sender
from ..setup import apply_settings
from ..storage.rows import RowStorage, load_rows, row_bytes
from .base import TrainRequest
from .local import LocalBackend
from .message import WorkerMessage, unflatten_payload


def open_backend(
    algorithm: Algorithm,
    federation: Federation,
    model: nn.Module,
    settings: Settings,
    members: Sequence[int],
    folder: Path | None = None,
    lasts: int | None = None,
) -> LocalBackend:
    """A site with clients `members` of the federation, which has data for these alone.

    `model` is what is trained; rows of clients that are kept on disk are in `folder`. `lasts` is of `LocalBackend`.
    """
    where = resolve_device(settings)
    settings = settings.model_copy(update={"engine": "auto" if settings.engine == "ray" else settings.engine})
    algorithm = apply_settings(algorithm, settings)
    task = Task(model, settings.mixed_precision != "off").to(where, getattr(torch, settings.dtype))
    shares = bool(task.params.without(algorithm.personal.names(task.model)))
    return LocalBackend(
        algorithm,
        federation.to(where),
        task,
        settings,
        RowStorage.choose(settings, len(members), row_bytes(algorithm, task, {}), folder),
        members=torch.tensor(sorted(members), dtype=torch.int64, device=where),
        averages_buffers=shares and algorithm.bn_buffers == "average",
        lasts=lasts,
    )


def handle_message(site: LocalBackend, parcel: WorkerMessage) -> WorkerMessage:
    """Do what a parcel says, and return what is asked for.

    A parcel may carry answers to earlier uploads, which are taken first, and the common BatchNorm statistics.
    """
    head, parcel = parcel.head, parcel.to(site.members.device)
    if site.common:
        site.common = parcel.get("common")
    if held := head.get("held"):
        ids, payload = _make_id_tensor(held, site), parcel.payload("held")
        first = torch.tensor(head["first"], device=ids.device)
        site.clients.hold(ids, payload)
        if len(rows := (~first).nonzero().flatten()):
            common = parcel.get("then_common").rows(rows)
            site.clients.arrived(ids[rows], payload.rows(rows), common or None)
    return {
        "train": _handle_train,
        "evaluate": _handle_evaluate,
        "buffers": _handle_buffers,
        "models": _handle_models,
        "state": _handle_state,
    }[head["kind"]](site, parcel)


def _handle_train(site: LocalBackend, parcel: WorkerMessage) -> WorkerMessage:
    head = parcel.head
    ids, asked, away = (_make_id_tensor(head[key], site) for key in ("ids", "asked", "away"))
    order = TrainRequest(head["round"], ids, asked, away, head["learns"], head["evaluate"])
    payload = None if head["kept"] else parcel.payload("sent")
    reply = WorkerMessage({"kind": "trained", "round": order.round})
    if len(ids):
        report = site.train(order, payload, _make_sender(ids, payload))
        reply.head.update(
            ids=report.ids.tolist(),
            n_trained=report.n_trained,
            steps=report.steps,
            dropped=list(report.dropped),
        )
        if len(report.ids):
            reply.put("upload", report.upload)
            reply.put("buffers", report.buffers)
    else:
        reply.head.update(ids=[], n_trained=0, steps=0, dropped=[])
    if order.evaluate and len(site.evaluation.judged):
        others = _make_id_tensor(head["others"], site)
        known, both = _merge_payloads((ids, payload), (others, parcel.payload("others")))
        reply.put_scores(site.trained(order.round, _make_sender(known, both)))
    return reply


def _merge_payloads(
    one: tuple[Tensor, Payload | None], other: tuple[Tensor, Payload]
) -> tuple[Tensor, Payload | None]:
    """What was sent to two lots of clients, sorted."""
    if one[1] is None or not len(other[0]):
        return one
    if not len(one[0]):
        return other
    known, order = torch.cat([one[0], other[0]]).sort()
    return known, concatenate_payloads([one[1], other[1]]).rows(order)


def _handle_evaluate(site: LocalBackend, parcel: WorkerMessage) -> WorkerMessage:
    r, judged = parcel.head["round"], site.evaluation.judged
    w = parcel.get("w") if parcel.head["has_w"] else None
    mean = parcel.get("mean_buffers") if parcel.head["has_mean"] else None
    payload = None if parcel.head["kept"] else parcel.payload("sent")
    reply = WorkerMessage({"kind": "evaluated", "round": r})
    reply.put_scores(site.received(r, _make_sender(judged, payload), w, mean))
    return reply


def _handle_buffers(site: LocalBackend, _: WorkerMessage) -> WorkerMessage:
    reply = WorkerMessage({"kind": "buffers"})
    reply.tensors.update({f"total/{k}": v for k, v in site.evaluation.total_buffers().items()})
    return reply


def _handle_models(site: LocalBackend, _: WorkerMessage) -> WorkerMessage:
    reply = WorkerMessage({"kind": "models", "ids": site.evaluation.judged.tolist()})
    models, buffers = site.deployed
    reply.put("params", load_rows(models))
    reply.put("buffers", load_rows(buffers))
    return reply


def _handle_state(site: LocalBackend, parcel: WorkerMessage) -> WorkerMessage:
    """What lives on the clients; taken over first, where the parcel has it."""
    if parcel.head["load"]:
        load_state(site, parcel.get("state"))
        return WorkerMessage({"kind": "state"})
    state = {k: v for k, v in flatten_tree(export_state(site)).items() if not k.startswith("sent/")}
    return WorkerMessage({"kind": "state"}, {f"state/{k}": v for k, v in state.items()})


def export_state(site: LocalBackend) -> dict[str, Any]:
    """A nest of what lives on the clients; all but the common statistics, which come with every parcel."""
    tree = site.tree()
    del tree["common"]
    return {
        **tree,
        "memory": {k: load_rows(v) for k, v in tree["memory"].items()},
        "personal": load_rows(tree["personal"]),
        "buffers": load_rows(tree["buffers"]),
    }


def load_state(site: LocalBackend, state: Mapping[str, Tensor]) -> None:
    """Take over what `export_state` gave, by paths such as `memory/w/0.weight`."""
    clients = site.clients

    def part(name: str) -> Params:
        return Params({k.removeprefix(f"{name}/"): v for k, v in state.items() if k.startswith(f"{name}/")})

    rows = torch.arange(len(site.members), device=site.members.device)
    for key, stack in clients.memory.items():
        stack.put_rows(rows, part(f"memory/{key}"))
    clients.personal.put_rows(rows, part("personal"))
    clients.buffers.put_rows(rows, part("buffers"))
    clients.fresh = state["fresh"].clone()
    if sent := part("sent"):
        clients.hold(site.members, unflatten_payload(sent))


def _make_id_tensor(ids: list[int], site: LocalBackend) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=site.members.device)


def _make_sender(known: Tensor, payload: Payload | None) -> Sender:
    """What the server would send to some of the clients whose payloads came along."""

    def send(ids: Tensor) -> Payload:
        assert payload is not None  # it is asked for only where clients keep nothing
        return payload if torch.equal(ids, known) else payload.rows(torch.searchsorted(known, ids))

    return send
