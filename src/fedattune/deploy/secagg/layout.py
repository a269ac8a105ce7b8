"""Lay out a node's replies as one vector of fixed-point numbers, and read the sum as means and scores."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import SumWeighting
from ...core.params import Params
from ...core.payload import Payload
from ...engine.base import EvalPart, Scores
from ...training.backends.message import WorkerMessage, flatten_payload, unflatten_payload
from ...training.clients.evaluation import PointScores
from . import ClipRangeError, ImpossibleSumError, SessionMismatchError
from .ring import LOSS_BITS, MAX_COUNT, MAX_LOSS, Fixed, dequantize, find_weight_limit, quantize, quantize_loss
from .session import Block, Session, SessionPart, canonical

COUNTS = ("clients", "samples", "trained", "steps", "diverged")
"""Counts at the beginning of each upload: clients and samples in the sums, clients that trained, steps, diverged."""

SCORED: Mapping[str, tuple[tuple[str, EvalPart], ...]] = {
    "train": (("trained", "test"), ("trained", "validation")),
    "evaluate": (
        ("received", "test"),
        ("received", "validation"),
        ("global", "test"),
        ("trained", "test"),
        ("trained", "validation"),
    ),
}
"""Kind of a message -> points and parts whose scores are summed; what is not scored is zero."""

SCORE_NUMBERS = 4
"""Numbers of each score: clients with samples, samples, right predictions, sum of losses."""

NOBODY_NAMED = "at least one node departs from the protocol, and a sum does not tell which"

MAX_LOSS_FIXED = quantize_loss(MAX_LOSS)
"""Largest sum of losses of one node, as it is summed."""

COMMON_KEYS = ("kind", "round", "update_server", "should_evaluate", "has_w", "has_mean", "replies_immediately")
"""Keys of a message's head that are the same for all nodes."""


def list_tensors(upload: Payload, buffers: Params) -> dict[str, Tensor]:
    """List the tensors of uploads by one flat name each, in the order in which they are summed."""
    tensors = flatten_payload(upload) | {f"buffers/{name}": value for name, value in buffers.items()}
    return dict(sorted(tensors.items()))


def find_weighting(name: str, sums: Mapping[str, SumWeighting]) -> SumWeighting:
    """Return the weighting of a tensor by its flat name."""
    top, _, rest = name.partition("/")
    part = rest.partition("/")[0] if top == "extra" else top
    if part not in sums:
        raise SessionMismatchError(f"clients upload {part!r}, and the server rule states no sum for it")
    return sums[part]


def plan_blocks(part: int, kind: str, n_values: int, *, has_scores: bool) -> list[Block]:
    """List the blocks of one part of a session."""
    blocks = [Block(part=part, what="upload", length=len(COUNTS) + n_values)] if kind == "train" else []
    if has_scores:
        blocks.append(Block(part=part, what="scores", length=SCORE_NUMBERS * len(SCORED[kind])))
    return blocks


def digest_model(message: WorkerMessage) -> str:
    """Return the SHA-256 of what a message asks of all clients alike, with the one model that all are sent.

    A server that sends one client another model could tell its upload from the sum.
    """
    head = {key: message.head.get(key) for key in COMMON_KEYS}
    rows: dict[str, Tensor] = {}
    for key, value in message.tensors.items():
        top, _, rest = key.partition("/")
        name, row = key, value
        if top in ("sent", "resting"):
            if not len(value):
                continue
            name, row = f"payload/{rest}", value[0]
            if not torch.equal(value, row.expand_as(value)):
                raise SessionMismatchError("the server sends the clients of this node different models")
        if name in rows and not torch.equal(rows[name], row):
            raise SessionMismatchError("the server sends the clients of this node different models")
        rows[name] = row
    hasher = hashlib.sha256(canonical(head))
    for name, row in sorted(rows.items()):
        dense = row.detach().cpu().contiguous()
        hasher.update(canonical([name, str(dense.dtype), list(dense.shape)]))
        hasher.update(dense.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def pack_upload(
    reply: WorkerMessage, n_train: Tensor, sums: Mapping[str, SumWeighting], session: Session, length: int
) -> Fixed:
    """Sum the uploads of a node's own clients, as fixed-point numbers."""
    head = reply.head
    samples = n_train[torch.tensor(head["ids"], dtype=torch.int64)].to("cpu", torch.int64).numpy()
    counts = [len(samples), int(samples.sum()), head["n_trained"], head["steps"], len(head["diverged"])]
    limit = find_weight_limit(session.bits, session.clip, session.nodes)
    if min(counts) < 0 or min(samples, default=1) < 1:
        raise ClipRangeError(
            f"the node's counts are {dict(zip(COUNTS, counts, strict=True))}, expected none below 0, and a sample of "
            "each client at least"
        )
    if max(counts[:2]) > limit or max(counts) > MAX_COUNT:
        raise ClipRangeError(
            f"the node's clients have {max(counts[:2]):,} training samples, and the sum has room for {limit:,}; lower "
            "secure-bits or secure-clip in the run's configuration"
        )
    values = [np.array(counts, dtype=np.int64)]
    weights = {"samples": samples, "uniform": np.ones_like(samples), "sum": np.ones_like(samples)}
    if len(samples):
        for name, rows in list_tensors(reply.payload("upload"), reply.get("buffers")).items():
            weight = weights[find_weighting(name, sums)]
            stack = rows.detach().cpu().double().reshape(len(samples), -1).numpy()
            values.append(weight @ quantize(stack, session.bits, session.clip))
    packed = np.concatenate(values)
    if not len(samples):
        packed = np.concatenate([packed, np.zeros(max(0, length - len(packed)), dtype=np.int64)])
    if len(packed) != length:
        raise SessionMismatchError(f"an upload has {len(packed)} numbers, and the session {length}")
    return packed


def unpack_upload(
    total: Fixed, sums: Mapping[str, SumWeighting], bits: int, upload: Payload, buffers: Params, n: int
) -> tuple[dict[str, int], Payload, Params]:
    """Read the sum of all uploads: the sums of `COUNTS`; one row of the mean, or of what `sum` asks for; one row of the
    means of BatchNorm statistics.
    """
    counts = dict(zip(COUNTS, total[: len(COUNTS)].tolist(), strict=True))
    divisors = {"samples": counts["samples"], "uniform": counts["clients"], "sum": n}
    flat: dict[str, Tensor] = {}
    start = len(COUNTS)
    for name, like in list_tensors(upload, buffers).items():
        values = dequantize(total[start : start + like.numel()], bits)
        values = values / max(1, divisors[find_weighting(name, sums)])
        flat[name] = torch.from_numpy(values).to(like).reshape(1, *like.shape)
        start += like.numel()
    own = Params({name: flat.pop(f"buffers/{name}") for name in buffers})
    return counts, unflatten_payload(flat), own


def check_upload(
    total: Fixed,
    sums: Mapping[str, SumWeighting],
    session: Session,
    tensors: Mapping[str, Tensor],
    sizes: Sequence[int],
    n_trained: int,
) -> None:
    """Check that a sum of uploads can be one of clients that keep to the protocol, or raise `ImpossibleSumError`.

    Args:
        tensors: those of one upload by their flat names, in their order.
        sizes: training samples of each client that could upload.
        n_trained: clients that could train.
    """
    counts = dict(zip(COUNTS, total[: len(COUNTS)].tolist(), strict=True))
    n, ordered = counts["clients"], sorted(sizes)
    _check_range("number of clients", n, 0, len(sizes))
    _check_range("number of training samples", counts["samples"], sum(ordered[:n]), sum(ordered[len(sizes) - n :]))
    _check_range("number of clients that trained", counts["trained"], n, n_trained)
    _check_range("number of clients that diverged", counts["diverged"], 0, n_trained - counts["trained"])
    _check_range("number of steps", counts["steps"], 0, MAX_COUNT * session.nodes)
    largest = int(quantize(np.array([session.clip]), session.bits, session.clip)[0])
    divisors = {"samples": counts["samples"], "uniform": n, "sum": n}
    start = len(COUNTS)
    for name, like in tensors.items():
        values, divisor = total[start : start + like.numel()], divisors[find_weighting(name, sums)]
        start += like.numel()
        worst = max(int(values.max(initial=0)), -int(values.min(initial=0)))
        if worst > divisor * largest:
            mean = math.ldexp(worst, -session.bits) / max(1, divisor)
            raise ImpossibleSumError(
                f"the mean of {name} over {n} clients has the absolute value {mean:.4g}, expected {session.clip:g} at "
                f"most (secure-clip): {NOBODY_NAMED}"
            )


def _check_range(what: str, found: int, least: int, most: int) -> None:
    if not least <= found <= most:
        raise ImpossibleSumError(f"the {what} is {found:,} in the sum, expected {least:,} to {most:,}: {NOBODY_NAMED}")


def pack_scores(reply: WorkerMessage, kind: str) -> Fixed:
    """Sum the scores of a node's own clients."""
    found = {(one.point, one.part): one.scores for one in reply.scores()}
    numbers: list[int] = []
    for key in SCORED[kind]:
        if key in found:
            n, correct, loss = found[key]
            total = [int((n > 0).sum()), int(n.sum()), round(float(correct.sum()))]
            numbers += [*(min(one, MAX_COUNT) for one in total), quantize_loss(float(loss.sum()))]
        else:
            numbers += [0] * SCORE_NUMBERS
    return np.array(numbers, dtype=np.int64)


def check_scores(total: Fixed, kind: str, sizes: Mapping[EvalPart, Sequence[int]]) -> None:
    """Check that sums of scores can be those of some clients, or raise `ImpossibleSumError`.

    Args:
        sizes: part -> samples of each client that could be scored.
    """
    rows = total.reshape(-1, SCORE_NUMBERS).tolist()
    for (point, part), (clients, n, correct, loss) in zip(SCORED[kind], rows, strict=True):
        where, ordered = f"scores of {point} models on {part} rows", sorted(size for size in sizes[part] if size)
        _check_range(f"number of clients with {where}", clients, 0, len(ordered))
        _check_range(f"number of rows with {where}", n, sum(ordered[:clients]), sum(ordered[len(ordered) - clients :]))
        _check_range(f"number of right predictions in the {where}", correct, 0, n)
        _check_range(f"sum of losses in the {where}, in units of 2^-{LOSS_BITS},", loss, 0, clients * MAX_LOSS_FIXED)


def unpack_scores(total: Fixed, kind: str, number: int) -> list[PointScores]:
    """Read the sums of scores, as the scores of one client that stands for all."""
    scores = []
    rows = total.reshape(-1, SCORE_NUMBERS).tolist()
    for (point, part), (clients, n, correct, loss) in zip(SCORED[kind], rows, strict=True):
        if clients > 0:
            columns = torch.tensor([n]), torch.tensor([correct])
            losses = torch.tensor([loss / 2**LOSS_BITS], dtype=torch.float64)
            scores.append(PointScores(point, part, torch.tensor([number]), Scores(*columns, losses)))
    return scores


def list_uploading(message: WorkerMessage) -> set[int]:
    """List the clients of a node that upload in answer to a training."""
    head = message.head
    return set(head["ids"]) & set(head["cohort"]) - set(head["dropouts"])


def plan_part(message: WorkerMessage) -> SessionPart:
    """Describe a message as a part of a session."""
    return SessionPart(kind=message.head["kind"], round=message.head["round"], digest=digest_model(message))
