"""A node's answers to the steps of a session: its rules, its state on disk, and its numbers."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import SumWeighting
from ...core.errors import ConfigError
from ...core.io import write_text
from ...training.backends.local import LocalBackend
from ...training.backends.message import WorkerMessage, split_message
from ..logs import log_node
from ..node.policy import NodePolicy
from ..operate.audit import PURPOSES
from . import AlreadySummedError, SecureAggregationError, SessionMismatchError, keys
from .layout import COMMON_KEYS, digest_model, list_uploading, pack_scores, pack_upload
from .ring import Fixed
from .session import STEPS, NodeSession, Session, SumRules

KINDS = {f"secure-{step}" for step in STEPS}
"""Kinds of the messages of a session, and of their replies."""

TRAINING_KIND = "secure-masked"
"""The one kind for which a node trains or evaluates."""

STATE_NAME, SUMMED_NAME = "secure-session.json", "secure-summed.json"

Work = Callable[[WorkerMessage], tuple[LocalBackend, WorkerMessage]]
"""Trains and evaluates as a message says; returns the backend with the clients, and the reply."""

PURPOSES.update(
    {
        ("in", "secure-keys"): "The server begins a secure sum, and asks for keys that are new for it.",
        ("in", "secure-shares"): "The server passes on all nodes' keys, and asks for encrypted shares of the own "
        "secrets.",
        ("in", "secure-masked"): "The server sends a model and encrypted shares, and asks for masked sums.",
        ("in", "secure-survivors"): "The server says whose masked sums arrived, and asks to sign that.",
        ("in", "secure-unmask"): "The server shows what nodes signed, and asks for shares that take off masks.",
        ("out", "secure-keys"): "The node sends ephemeral public keys, signed.",
        ("out", "secure-shares"): "The node sends shares of its secrets, encrypted for the other nodes.",
        ("out", "secure-masked"): "The node sends the sum of what its clients learned and scored, behind masks.",
        ("out", "secure-survivors"): "The node signs whose masked sums arrived.",
        ("out", "secure-unmask"): "The node sends what takes masks off the sum of all: a share for each node, and the "
        "keys of masks in common with nodes that do not count.",
    }
)


def read_rules(policy: NodePolicy) -> SumRules:
    """Read the files that the node's own configuration names."""
    if policy.key is None or policy.roster is None:
        raise ConfigError(
            "secure aggregation needs `key` (the node's private key) and `roster` (the public keys of all nodes) in "
            "the node's configuration"
        )
    key, roster = keys.load_node_key(Path(policy.key)), keys.read_roster(Path(policy.roster))
    return SumRules(key, roster, policy.min_participants, policy.threshold)


class SecureSteps:
    """The steps of the sessions of one method and seed, at one node.

    Args:
        configuration: digest of the run configuration that the node got. With another learning rate, for instance, the
            others could be made to add nothing to a sum.
    """

    def __init__(
        self,
        folder: Path,
        rules: SumRules,
        sums: Mapping[str, SumWeighting],
        bits: int,
        clip: float,
        configuration: str,
    ) -> None:
        self._folder, self._rules, self._sums = folder, rules, sums
        self._bits, self._clip, self._configuration = bits, clip, configuration

    def answer(self, message: WorkerMessage, work: Work) -> WorkerMessage:
        """Answer one step. Any error ends the session at this node, and its secrets are deleted."""
        head, step = message.head, message.head["kind"].removeprefix("secure-")
        try:
            if step == "keys":
                return WorkerMessage({"kind": head["kind"], "advert": self._begin(head)})
            state = self._load()
            if state.session.digest != head.get("session"):
                raise SessionMismatchError("the message belongs to another session")
            told: dict[str, Any] = {"kind": head["kind"]}
            tensors: dict[str, Tensor] = {}
            if step == "shares":
                told |= state.share(head.get("adverts"), self._rules)
            elif step == "masked":
                told["unfit"] = state.open(head.get("shares"), self._rules)
                for id_ in told["unfit"]:
                    log_node(
                        f"the share that {self._rules.roster[id_].name} signed for this node does not fit", head=head
                    )
                numbers = self._compute(message, state, work)
                # PyTorch and safetensors have no sums of uint64; the bits are the same.
                tensors["masked"] = torch.from_numpy(state.hide(numbers, self._rules.id).view(np.int64))
            elif step == "survivors":
                told["signature"] = state.sign_survivors(head.get("survivors"), head.get("dropped"), self._rules)
                self._mark_summed(state)
            else:
                told["masks"] = state.reveal(head.get("signatures"), self._rules)
            if state.step == "done":
                self._delete()
            else:
                self._save(state)
        except Exception:
            self._delete()
            raise
        return WorkerMessage(told, tensors)

    def _begin(self, head: Mapping[str, Any]) -> dict[str, Any]:
        session = Session.read(head.get("session"))
        for key in ("token", "algorithm", "seed", "round", "model", "configuration", "number"):
            if getattr(session, key) != head.get(key):
                raise SessionMismatchError(f"the session has another {key} than its message")
        if session.configuration != self._configuration:
            raise SessionMismatchError(
                "the session is of a run configuration that this node did not get; the server must give all nodes the "
                "same"
            )
        if (session.bits, session.clip) != (self._bits, self._clip):
            raise SessionMismatchError("the session rounds otherwise than the run's configuration says")
        if session.nodes > len(self._rules.roster):
            raise SessionMismatchError(
                f"the session is of {session.nodes} nodes, and the roster has {len(self._rules.roster)}"
            )
        flags = head.get("contributes")
        if not isinstance(flags, list) or [type(one) for one in flags] != [bool] * len(session.blocks):
            raise SessionMismatchError("the server does not say in which sums the node's clients are")
        self._check_not_summed(session)
        state, advert = NodeSession.begin(session, tuple(flags), self._rules)
        self._save(state)
        return advert.to_json()

    def _compute(self, message: WorkerMessage, state: NodeSession, work: Work) -> Fixed:
        """Train and evaluate, and sum the numbers of the node's own clients."""
        session = state.session
        inner = WorkerMessage(dict(message.head["inner"]), message.tensors)
        for key in ("token", "algorithm", "seed", "model", "configuration"):
            if inner.head.get(key) != getattr(session, key):
                raise SessionMismatchError(f"the work has another {key} than the session")
        orders = split_message(inner)
        parts: dict[int, WorkerMessage] = {part.head["part"]: part for part in orders}
        is_known = len(parts) == len(orders) and parts.keys() <= set(range(len(session.parts)))
        if not is_known or inner.head.get("pending"):
            raise SessionMismatchError("the work has other parts than the session")
        for number, part in parts.items():
            planned = session.parts[number]
            if (part.head["kind"], part.head["round"]) != (planned.kind, planned.round):
                raise SessionMismatchError("the work is of another round than the session")
            if digest_model(part) != planned.digest:
                raise SessionMismatchError(
                    "the server sends this node another model, or other orders, than it told all nodes of the session: "
                    f"{', '.join(COMMON_KEYS)} and the model must be the same"
                )
        backend, reply = work(inner)
        replies = dict(zip(parts, split_message(reply), strict=True))
        flags = state.adverts[self._rules.id].contributes
        pieces: list[Fixed] = []
        for block, contributes in zip(session.blocks, flags, strict=True):
            mine, answer = parts.get(block.part), replies.get(block.part)
            is_evaluated = len(backend.evaluation.eval_ids) > 0
            is_in = mine is not None and (is_evaluated if block.what == "scores" else bool(list_uploading(mine)))
            if contributes != is_in:
                raise SessionMismatchError("the server counted the node's clients in another sum")
            if mine is None or answer is None or not contributes:
                pieces.append(np.zeros(block.length, dtype=np.int64))
            elif block.what == "upload":
                _check_uploaded(mine, answer)
                pieces.append(pack_upload(answer, backend.context.n_train, self._sums, session, block.length))
            else:
                pieces.append(pack_scores(answer, session.parts[block.part].kind))
        return np.concatenate(pieces)

    def _check_not_summed(self, session: Session) -> None:
        done = self._read_summed()
        for block in session.blocks:
            part = session.parts[block.part]
            if part.round <= done.get(f"{part.kind}/{block.what}", -1):
                raise AlreadySummedError(
                    f"the {block.what} of round {part.round} was summed before, and a second sum over other nodes "
                    "would tell the difference; the server goes on with the next round"
                )

    def _mark_summed(self, state: NodeSession) -> None:
        """Write down that the server may learn the sums of this session; before the node helps it to."""
        done = self._read_summed()
        for block in state.session.blocks:
            part = state.session.parts[block.part]
            key = f"{part.kind}/{block.what}"
            done[key] = max(part.round, done.get(key, -1))
        write_text(self._folder / SUMMED_NAME, json.dumps(done) + "\n")

    def _read_summed(self) -> dict[str, int]:
        file = self._folder / SUMMED_NAME
        try:
            return {str(key): int(value) for key, value in json.loads(file.read_text(encoding="utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise SecureAggregationError(
                f"{file} is damaged, so the node cannot know which rounds were summed; take a new run-folder"
            ) from error

    def _load(self) -> NodeSession:
        try:
            return NodeSession.from_json((self._folder / STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SessionMismatchError("the node is in no session, or has lost its state of it") from error

    def _save(self, state: NodeSession) -> None:
        file = self._folder / STATE_NAME
        new = file.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(state.to_json())
        new.replace(file)

    def _delete(self) -> None:
        (self._folder / STATE_NAME).unlink(missing_ok=True)


def _check_uploaded(order: WorkerMessage, reply: WorkerMessage) -> None:
    """Check that the clients whose numbers are in a sum are those that the node signed for."""
    uploaded, expected = set(reply.head["ids"]), list_uploading(order) - set(reply.head["diverged"])
    if uploaded != expected:
        raise SessionMismatchError(
            f"round {order.head['round']}: clients {sorted(uploaded)} of this node uploaded, expected "
            f"{sorted(expected)}; the node adds nothing to this sum"
        )
