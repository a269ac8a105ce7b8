"""The far end of a spread cohort: what a site makes of the parcels it gets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .clients import Send
from .cohorts import device
from .config import Settings
from .core import Algorithm, Payload
from .data import Federation
from .messages import joined
from .params import Params
from .place import Order
from .rooms import Room, in_memory, row_bytes
from .site import Site
from .starting import fitted
from .task import Task
from .wire import Parcel, flat, payload_of


def open_site(
    algorithm: Algorithm,
    federation: Federation,
    model: nn.Module,
    settings: Settings,
    members: Sequence[int],
    folder: Path | None = None,
    lasts: int | None = None,
) -> Site:
    """A site with clients `members` of the federation, which has data for these alone.

    `model` is what is trained; rows of clients that are kept on disk are in `folder`. `lasts` is of `Site`.
    """
    where = device(settings)
    settings = settings.model_copy(update={"engine": "auto" if settings.engine == "ray" else settings.engine})
    algorithm = fitted(algorithm, settings)
    task = Task(model, settings.mixed_precision != "off").to(where, getattr(torch, settings.dtype))
    shares = bool(task.params.without(algorithm.personal.names(task.model)))
    return Site(
        algorithm,
        federation.to(where),
        task,
        settings,
        Room.choose(settings, len(members), row_bytes(algorithm, task, {}), folder),
        members=torch.tensor(sorted(members), dtype=torch.int64, device=where),
        averages_buffers=shares and algorithm.bn_buffers == "average",
        lasts=lasts,
    )


def serve(site: Site, parcel: Parcel) -> Parcel:
    """Do what a parcel says, and return what is asked for.

    A parcel may carry answers to earlier uploads, which are taken first, and the common BatchNorm statistics.
    """
    head, parcel = parcel.head, parcel.to(site.members.device)
    if site.common:
        site.common = parcel.get("common")
    if held := head.get("held"):
        ids, payload = _numbers(held, site), parcel.payload("held")
        first = torch.tensor(head["first"], device=ids.device)
        site.clients.hold(ids, payload)
        if len(rows := (~first).nonzero().flatten()):
            common = parcel.get("then_common").rows(rows)
            site.clients.arrived(ids[rows], payload.rows(rows), common or None)
    return {"train": _train, "evaluate": _evaluate, "buffers": _buffers, "models": _models, "state": _state}[
        head["kind"]
    ](site, parcel)


def _train(site: Site, parcel: Parcel) -> Parcel:
    head = parcel.head
    ids, asked, away = (_numbers(head[key], site) for key in ("ids", "asked", "away"))
    order = Order(head["round"], ids, asked, away, head["learns"], head["evaluate"])
    payload = None if head["kept"] else parcel.payload("sent")
    reply = Parcel({"kind": "trained", "round": order.round})
    if len(ids):
        report = site.train(order, payload, _sender(ids, payload))
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
        others = _numbers(head["others"], site)
        known, both = _together((ids, payload), (others, parcel.payload("others")))
        reply.put_scores(site.trained(order.round, _sender(known, both)))
    return reply


def _together(
    one: tuple[Tensor, Payload | None], other: tuple[Tensor, Payload]
) -> tuple[Tensor, Payload | None]:
    """What was sent to two lots of clients, sorted."""
    if one[1] is None or not len(other[0]):
        return one
    if not len(one[0]):
        return other
    known, order = torch.cat([one[0], other[0]]).sort()
    return known, joined([one[1], other[1]]).rows(order)


def _evaluate(site: Site, parcel: Parcel) -> Parcel:
    r, judged = parcel.head["round"], site.evaluation.judged
    w = parcel.get("w") if parcel.head["has_w"] else None
    mean = parcel.get("mean_buffers") if parcel.head["has_mean"] else None
    payload = None if parcel.head["kept"] else parcel.payload("sent")
    reply = Parcel({"kind": "evaluated", "round": r})
    reply.put_scores(site.received(r, _sender(judged, payload), w, mean))
    return reply


def _buffers(site: Site, _: Parcel) -> Parcel:
    reply = Parcel({"kind": "buffers"})
    reply.tensors.update({f"total/{k}": v for k, v in site.evaluation.total_buffers().items()})
    return reply


def _models(site: Site, _: Parcel) -> Parcel:
    reply = Parcel({"kind": "models", "ids": site.evaluation.judged.tolist()})
    models, buffers = site.deployed
    reply.put("params", in_memory(models))
    reply.put("buffers", in_memory(buffers))
    return reply


def _state(site: Site, parcel: Parcel) -> Parcel:
    """What lives on the clients; taken over first, where the parcel has it."""
    if parcel.head["load"]:
        take_state(site, parcel.get("state"))
        return Parcel({"kind": "state"})
    state = {k: v for k, v in flat(state_of(site)).items() if not k.startswith("sent/")}
    return Parcel({"kind": "state"}, {f"state/{k}": v for k, v in state.items()})


def state_of(site: Site) -> dict[str, Any]:
    """A nest of what lives on the clients; all but the common statistics, which come with every parcel."""
    tree = site.tree()
    del tree["common"]
    return {
        **tree,
        "memory": {k: in_memory(v) for k, v in tree["memory"].items()},
        "personal": in_memory(tree["personal"]),
        "buffers": in_memory(tree["buffers"]),
    }


def take_state(site: Site, state: Mapping[str, Tensor]) -> None:
    """Take over what `state_of` gave, by paths such as `memory/w/0.weight`."""
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
        clients.hold(site.members, payload_of(sent))


def _numbers(ids: list[int], site: Site) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=site.members.device)


def _sender(known: Tensor, payload: Payload | None) -> Send:
    """What the server would send to some of the clients whose payloads came along."""

    def send(ids: Tensor) -> Payload:
        assert payload is not None  # it is asked for only where clients keep nothing
        return payload if torch.equal(ids, known) else payload.rows(torch.searchsorted(known, ids))

    return send
