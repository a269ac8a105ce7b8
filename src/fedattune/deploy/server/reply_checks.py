"""Checks of the nodes' replies before the server uses them: structure, types, shapes, numbers and norms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.algorithm import ClientUpdate
from ...core.params import Params
from ...core.payload import Payload
from ...data import Federation
from ...data.federated import FederationInfo
from ...engine.base import Scores
from ...engine.batches import LocalTraining
from ...runs.context import RunContext
from ...training.backends.message import WorkerMessage, split_message
from ...training.clients.state import PayloadFactory
from ...training.uploads.pipeline import encode_example


class RefusedReplyError(ValueError):
    """A reply is not valid; the message is the reason."""


def make_expected_upload(context: RunContext, personal: Params, make_payload: PayloadFactory) -> Payload:
    """Make the upload of a client that does no local step, as it travels. All have its names, types and shapes."""
    sent = fill_personal(make_payload(context.all_ids[:1]).rows(0), context.task.params, personal)
    upload = make_stepless_upload(context.algorithm.client, sent, context.task.params, personal)
    return encode_example(context, sent, upload)


def fill_personal(sent: Payload, w: Params, personal: Params) -> Payload:
    """Return a payload with the personal tensors in its model, in the order of the model `w`."""
    return sent._replace(params=Params({k: personal[k] if k in personal else sent.params[k] for k in w}))


def make_stepless_upload(rule: ClientUpdate, sent: Payload, w: Params, personal: Params) -> Payload:
    """Make the upload of a client that does no local step, in a run that began with the model `w`."""
    example, local_state = next(iter(w.values())), rule.init_local_state(w)
    yes, one = torch.tensor(True, device=example.device), torch.ones((), dtype=example.dtype, device=example.device)
    names = tuple(personal)
    training = LocalTraining(seed=0, stream=0, round=1, lr=0.1, batch_size=1, cohort_size=1, personal_names=names)
    round_context = training.make_round_context(one, yes, one)
    with torch.no_grad():
        carry = rule.begin(sent, local_state, yes, round_context)
        upload, _ = rule.finish(carry, sent, local_state, round_context)
    return upload._replace(params=upload.params.without(personal))


def check_reply(
    reply: WorkerMessage,
    message: WorkerMessage,
    members: Sequence[int],
    upload: Payload,
    federation: Federation | FederationInfo,
    statistics: Params,
) -> None:
    """Check the reply of a node, or raise `RefusedReplyError`."""
    head = reply.head
    for key in ("token", "algorithm", "seed", "round"):
        if head.get(key) != message.head[key]:
            raise RefusedReplyError(f"replied for {key} {head.get(key)!r:.40}, not {message.head[key]!r}")
    kind = {"train": "trained", "evaluate": "evaluated"}[message.head["kind"]]
    if head.get("kind") != kind:
        raise RefusedReplyError(f"sent {head.get('kind')!r:.40} in place of {kind!r}")
    try:
        _check_scores(reply, kind, members, federation)
        if kind == "trained":
            _check_upload(reply, message, upload, statistics)
    except RefusedReplyError:
        raise
    except Exception as error:  # data from outside can fail in any way
        raise RefusedReplyError(f"sent no valid reply ({type(error).__name__})") from error


def split_reply(reply: WorkerMessage, message: WorkerMessage, n: int) -> list[WorkerMessage]:
    """Split the reply to n messages in one, or raise `RefusedReplyError`."""
    if message.head["kind"] != "several":
        return [reply]
    try:
        replies = split_message(reply)
    except Exception as error:  # data from outside can fail in any way
        raise RefusedReplyError(f"sent no valid reply ({type(error).__name__})") from error
    if reply.head.get("kind") != "several" or len(replies) != n:
        raise RefusedReplyError(f"sent {len(replies)} replies to {n} messages")
    for one in replies:
        one.head.update({key: reply.head.get(key) for key in ("token", "algorithm", "seed")})
    return replies


def _check_upload(reply: WorkerMessage, message: WorkerMessage, upload: Payload, statistics: Params) -> None:
    head, request = reply.head, message.head
    ids, diverged_ids = _check_ids(head["ids"]), _check_ids(head["diverged"])
    if not ids <= set(request["cohort"]) & set(request["ids"]) - set(request["dropouts"]):
        raise RefusedReplyError("uploads for clients outside the cohort")
    if not diverged_ids <= set(request["ids"]) or diverged_ids & ids:
        raise RefusedReplyError("names clients of other nodes")
    if not all(_check_ids(head.get(key, [])) <= set(request["ids"]) for key in ("refused", "alone")):
        raise RefusedReplyError("names clients of other nodes")
    for key, maximum in (("n_trained", len(request["ids"])), ("steps", 2**53)):
        if type(head[key]) is not int or not 0 <= head[key] <= maximum:
            raise RefusedReplyError(f"reports {key}={head[key]!r:.40}")
    if not ids:
        return
    payload, examples = reply.payload("upload"), {"": upload.params, **upload.extra}
    rows = {"": payload.params, **payload.extra}
    for part in examples.keys() | rows.keys():
        _check_tensors(rows.get(part, Params()), examples.get(part, Params()), len(ids), part)
    _check_tensors(reply.get("buffers"), statistics, len(ids), "buffers")


def _check_ids(ids: object) -> set[int]:
    """Check that `ids` is a sorted list of different numbers of clients; return them."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids) or ids != sorted(set(ids)):
        raise RefusedReplyError("sent no valid list of clients")
    return set(ids)


def _check_tensors(rows: Params, example: Params, n: int, part: str) -> None:
    """Check names, types and shapes of n rows against one example row."""
    where = f" of {part!r:.40}" if part else ""
    if rows.keys() != example.keys():
        odd = sorted(rows.keys() ^ example.keys())
        raise RefusedReplyError(f"tensors{where} that only one side has: {', '.join(odd)!r:.80}")
    for name, value in rows.items():
        like = example[name]
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
    scores = reply.scores()
    if len({(one.point, one.part) for one in scores}) < len(scores):
        raise RefusedReplyError("sends scores of one part twice")
    for one in scores:
        if one.point not in points or one.part not in ("test", "validation"):
            raise RefusedReplyError("sends scores of an unknown part")
        ids = one.ids.tolist()
        if not ids or not _check_ids(ids) <= set(members):
            raise RefusedReplyError("sends scores of other nodes' clients")
        n, correct, loss = one.scores
        sizes = federation.sizes(one.part)[one.ids]
        expected = Scores.zeros(sizes, federation.kind)
        if any(v.shape != like.shape or v.dtype != like.dtype for v, like in zip(one.scores, expected, strict=True)):
            raise RefusedReplyError("sends scores of other shapes or types")
        is_possible = (correct >= 0) & (correct <= n) & ~(loss < 0)
        if not torch.equal(n, sizes) or not is_possible.all():
            raise RefusedReplyError("sends impossible scores")
