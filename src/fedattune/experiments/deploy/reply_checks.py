"""Looking at what nodes send before anything is made of it: structure, types, shapes, numbers and lengths."""

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.params import Params
from ...core.payload import Payload
from ...data import Federation
from ...data.federated import FederationInfo
from ...training.backends.base import TrainReply
from ...training.backends.message import WorkerMessage
from ...training.client_state import Sender
from ...training.context import RunContext
from ...training.engine import LocalTraining


class RefusedReplyError(ValueError):
    """An answer that cannot be taken, with the reason."""


def make_expected_upload(context: RunContext, personal: Params, send: Sender) -> Payload:
    """Make the upload of a client that does no local step: its names, types and shapes are those of all uploads.

    Args:
        context: the run.
        personal: the tensors that never leave a client, of one client.
        send: gives the first payloads.

    """
    rule, yes = context.algorithm.client, torch.tensor(True, device=context.device)
    sent = send(context.all_ids[:1]).rows(0)
    whole = Params({k: personal[k] if k in personal else sent.params[k] for k in context.task.params})
    sent, local_state = sent._replace(params=whole), rule.init_local_state(context.task.params)
    one = torch.ones((), dtype=next(iter(whole.values())).dtype, device=context.device)
    training = LocalTraining(
        seed=0,
        stream=0,
        round=1,
        lr=context.settings.lr,
        batch_size=1,
        cohort=1,
        personal=tuple(personal),
    )
    round_context = training.make_context(one, yes, one)
    with torch.no_grad():
        carry = rule.begin(sent, local_state, yes, round_context)
        upload, _ = rule.finish(carry, sent, local_state, round_context)
    return upload._replace(params=upload.params.without(personal))


def check_reply(
    reply: WorkerMessage,
    asked: WorkerMessage,
    members: Sequence[int],
    upload: Payload,
    federation: Federation | FederationInfo,
    statistics: Params,
) -> None:
    """Check the answer of a node with clients `members` to what it was asked; `upload` is one client's.

    Raises:
        RefusedError: it is another round's or run's, or no answer to this.

    """
    head = reply.head
    for key in ("token", "algorithm", "seed", "round"):
        if head.get(key) != asked.head[key]:
            raise RefusedReplyError(f"answered for {key} {head.get(key)!r:.40}, not {asked.head[key]!r}")
    kind = {"train": "trained", "evaluate": "evaluated"}[asked.head["kind"]]
    if head.get("kind") != kind:
        raise RefusedReplyError(f"sent {head.get('kind')!r:.40} in place of {kind!r}")
    try:
        _check_scores(reply, kind, members, federation)
        if kind == "trained":
            _check_upload(reply, asked, upload, statistics)
    except RefusedReplyError:
        raise
    except Exception as error:  # what comes from outside can fail in any way
        raise RefusedReplyError(f"sent what is no answer ({type(error).__name__})") from error


def _check_upload(reply: WorkerMessage, asked: WorkerMessage, upload: Payload, common: Params) -> None:
    head, order = reply.head, asked.head
    ids, dropped = _clients(head["ids"]), _clients(head["diverged"])
    if not ids <= set(order["cohort"]) & set(order["ids"]) - set(order["dropouts"]):
        raise RefusedReplyError("uploads for clients that were not asked")
    if not dropped <= set(order["ids"]) or dropped & ids:
        raise RefusedReplyError("names clients that are not its own")
    for key, most in (("n_trained", len(order["ids"])), ("steps", 2**53)):
        if type(head[key]) is not int or not 0 <= head[key] <= most:
            raise RefusedReplyError(f"says {key}={head[key]!r:.40}")
    if not ids:
        return
    got, parts = reply.payload("upload"), {"": upload.params, **upload.extra}
    received = {"": got.params, **got.extra}
    for part in parts.keys() | received.keys():
        _check_tensors(received.get(part, Params()), parts.get(part, Params()), len(ids), part)
    _check_tensors(reply.get("buffers"), common, len(ids), "buffers")


def _clients(ids: object) -> set[int]:
    """The numbers of clients, which are sorted and named once each."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids) or ids != sorted(set(ids)):
        raise RefusedReplyError("sent what is no list of clients")
    return set(ids)


def _check_tensors(got: Params, expected: Params, n: int, part: str) -> None:
    """Check names, types and shapes of n clients' rows."""
    where = f" of {part:.40}" if part else ""
    if got.keys() != expected.keys():
        odd = sorted(got.keys() ^ expected.keys())
        raise RefusedReplyError(f"tensors{where} that only one side has: {', '.join(odd)!r:.80}")
    for name, value in got.items():
        like = expected[name]
        if value.shape != (n, *like.shape) or value.dtype != like.dtype:
            raise RefusedReplyError(
                f"{name}{where} is {_type(value)} of shape {tuple(value.shape)}, expected {_type(like)} of shape "
                f"{(n, *like.shape)}"
            )


def _type(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _check_scores(
    reply: WorkerMessage, kind: str, members: Sequence[int], federation: Federation | FederationInfo
) -> None:
    points = ("trained",) if kind == "trained" else ("received", "trained", "global")
    found = reply.scores()
    if len({(one.point, one.part) for one in found}) < len(found):
        raise RefusedReplyError("scores something twice")
    for one in found:
        if one.point not in points or one.part not in ("test", "validation"):
            raise RefusedReplyError("scores something unknown")
        ids = one.ids.tolist()
        if not ids or not _clients(ids) <= set(members):
            raise RefusedReplyError("scores clients that are not its own")
        n, correct, loss = one.scores
        types = (torch.int64, torch.int64, torch.float64)
        if any(v.shape != (len(ids),) or v.dtype != t for v, t in zip(one.scores, types, strict=True)):
            raise RefusedReplyError("sends scores of another form")
        sizes = federation.sizes(one.part)[one.ids]
        if not torch.equal(n, sizes) or (correct < 0).any() or (correct > n).any() or (loss < 0).any():
            raise RefusedReplyError("sends scores that cannot be")


def drop_bad_uploads(
    report: TrainReply, largest: float, usual: float | None
) -> tuple[TrainReply, float | None]:
    """The report without uploads that are not finite or far too large, and the length that is usual now.

    An upload's length is that of its difference to what was sent. It is compared with what was `usual` in the rounds
    before, at first with the round's median if three or more upload. What is usual shrinks by a tenth a round at most:
    a client that comes late makes longer steps than others do by then.
    """
    if not len(report.ids):
        return report, usual
    lengths = _lengths(report)
    found = [length for length in lengths.tolist() if math.isfinite(length)]
    reference = usual or (statistics.median_low(found) if len(found) > 2 else None)
    limit = largest * reference if reference else math.inf
    lost = dict(report.faults)
    for number, length in zip(report.ids.tolist(), lengths.tolist(), strict=True):
        if not math.isfinite(length):
            lost[number] = "uploaded what is not finite"
        elif length > limit:
            lost[number] = f"uploaded an update more than {largest:g} times as long as is usual"
    rows = torch.tensor([i for i, n in enumerate(report.ids.tolist()) if n not in lost], dtype=torch.int64)
    rows = rows.to(report.ids.device)
    if len(rows):
        usual = max(statistics.median_low(lengths[rows].tolist()), 0.9 * (usual or 0.0))
    if len(rows) == len(report.ids):
        return report, usual
    return report._replace(
        ids=report.ids[rows],
        sent=report.sent.rows(rows),
        upload=report.upload.rows(rows),
        buffers=report.buffers.rows(rows),
        faults=lost,
    ), usual


def _lengths(report: TrainReply) -> Tensor:
    """(C,) the lengths of the updates, and of all that comes with them."""
    total = torch.zeros(len(report.ids), dtype=torch.float64, device=report.ids.device)
    sent, upload = report.sent, report.upload
    parts = [
        upload.params.map(lambda a, b: a - b, sent.params.only(upload.params))
        if upload.params.keys() <= sent.params.keys()
        else upload.params,
        *upload.extra.values(),
        report.buffers,
    ]
    for part in parts:
        for value in part.values():
            total += value.double().reshape(len(total), -1).square().sum(1)
    return total.sqrt()
