"""Messages between the server and remote workers: named tensors and plain values, never code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.io import flatten_tree
from ...core.params import Params
from ...core.payload import Payload
from ...engine.base import Scores
from ..clients.evaluation import PointScores

FORMAT_VERSION = 1
"""Version of the format of messages; messages of another version are refused."""


@dataclass(frozen=True)
class WorkerMessage:
    """Named tensors, and a head of values that JSON can hold.

    A stack whose rows are all one model travels as one row.
    """

    head: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, rows: Params | Payload) -> None:
        for key, value in (flatten_payload(rows) if isinstance(rows, Payload) else rows).items():
            same = value.dim() > 0 and len(value) > 1 and value.stride(0) == 0
            if same:
                self.head.setdefault("same", {})[f"{name}/{key}"] = len(value)
            self.tensors[f"{name}/{key}"] = value[:1] if same else value

    def get(self, name: str) -> Params:
        """Return the rows under a name; empty if there are none."""
        same = self.head.get("same", {})
        params = Params()
        for key, value in self.tensors.items():
            if key.startswith(f"{name}/"):
                rows = value.expand(same[key], *value.shape[1:]) if key in same else value
                params[key[len(name) + 1 :]] = rows
        return params

    def payload(self, name: str) -> Payload:
        return unflatten_payload(self.get(name))

    def put_scores(self, scores: list[PointScores]) -> None:
        self.head["scores"] = [[one.point, one.part, one.ids.tolist()] for one in scores]
        for i, one in enumerate(scores):
            self.put(f"scores/{i}", Params(one.scores._asdict()))

    def scores(self) -> list[PointScores]:
        return [
            PointScores(point, part, torch.tensor(ids), Scores(**self.get(f"scores/{i}")))
            for i, (point, part, ids) in enumerate(self.head.get("scores", ()))
        ]

    def nbytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.tensors.values())

    def to(self, device: torch.device) -> "WorkerMessage":
        return WorkerMessage(self.head, {k: v.to(device) for k, v in self.tensors.items()})


def join_messages(parts: Sequence[WorkerMessage]) -> WorkerMessage:
    """Join messages into one, whose parts a worker handles in order; a single message stays as it is."""
    if len(parts) == 1:
        return parts[0]
    head = {
        "kind": "several",
        "round": parts[-1].head["round"],
        "parts": [part.head for part in parts],
        "replies_immediately": any(part.head.get("replies_immediately") for part in parts),
        "pending": parts[0].head.get("pending", []),
    }
    tensors = {f"{i}/{name}": value for i, part in enumerate(parts) for name, value in part.tensors.items()}
    return WorkerMessage(head, tensors)


def split_message(message: WorkerMessage) -> list[WorkerMessage]:
    """Split a message into its parts: the reverse of `join_messages`."""
    if message.head["kind"] != "several":
        return [message]
    parts = [WorkerMessage(dict(head)) for head in message.head["parts"]]
    for key, value in message.tensors.items():
        i, _, name = key.partition("/")
        parts[int(i)].tensors[name] = value
    return parts


def flatten_payload(payload: Payload) -> dict[str, Tensor]:
    """Return the tensors of payloads, called `params/...` and `extra/.../...`."""
    return flatten_tree(payload._asdict())


def unflatten_payload(tensors: Mapping[str, Tensor]) -> Payload:
    """Make payloads from such tensors: the reverse of `flatten_payload`."""
    payload = Payload(Params(), {})
    for name, value in tensors.items():
        part, _, rest = name.partition("/")
        if part == "extra":
            key, _, rest = rest.partition("/")
            payload.extra.setdefault(key, Params())[rest] = value
        else:
            payload.params[rest] = value
    return payload
