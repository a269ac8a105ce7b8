"""Find out who sees what of a client, by running every method on three clients and looking at what travels."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fedattune
from fedattune import Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.core.options import build
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.core.task import Task
from fedattune.deploy.secagg.methods import find_sums
from fedattune.models.files import wrap_model
from fedattune.runs.context import RunContext
from fedattune.runs.rows import RowStorage
from fedattune.training.backends.base import TrainReply, TrainRequest
from fedattune.training.backends.local import LocalBackend
from fedattune.training.clients.state import PayloadFactory
from fedattune.training.loop import RoundLoop

EXTRAS = {
    "dc": "the change of its control variate",
    "steps": "its number of effective local steps",
    "cluster": "which of the models fits its rows best",
    "representations": "its mean features of each class that it has",
    "features": "its mean features and share of rows of each class",
    "statistics": "means and variance of its features before training",
    "affinity": "how much each other model helped it",
    "guard": "how its weights of predictions differ from the mean",
    "candidate": "how well another group's model predicts its validation rows",
}
"""Extras of uploads -> what the server sees by them."""

PROTOTYPES = "prototypes"
"""Name of the tensor with which FedProto sends features in place of a model."""

CONSENSUS = "consensus"
"""Name of the tensor with which FedDBE sends mean features in the first round, beside the model."""

ROUNDS = 3


class Sight(NamedTuple):
    """What others see of a client under one method.

    Attributes:
        server: what the server sees of each client.
        others: what other clients receive.
        secure: what the server sees with secure aggregation.

    """

    server: str
    others: str
    secure: str


class Watcher(LocalBackend):
    """Keep what travels."""

    def __init__(self, context: RunContext, make_payload: PayloadFactory) -> None:
        super().__init__(context, RowStorage(context.n_clients), make_payload=make_payload)
        self.uploads: list[Payload] = []
        self.sent: list[Payload] = []
        self.trained: list[Params] = []

    def train(self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory) -> TrainReply:
        """Train, and keep uploads and models."""
        if payload is not None:
            self.sent.append(payload)
        reply = super().train(request, payload, make_payload)
        upload = reply.upload
        if payload is not None and all(torch.equal(v, payload.params[k]) for k, v in upload.params.items()):
            upload = upload._replace(params=Params())  # what comes back as it was sent tells nothing
        self.uploads.append(upload)
        self.trained += [Params(models.params) for models in self._trained_models]
        return reply

    def receive(self, ids: Tensor, payload: Payload) -> None:
        """Keep the answers of the server."""
        self.sent.append(payload)
        super().receive(ids, payload)


@cache
def look_at(name: str) -> Sight:
    """Run a method, and say who sees what of a client.

    Args:
        name: name of the method, with its default options.

    """
    torch.manual_seed(0)
    # Two groups of clients with other meanings of the labels: some methods send one model where there are none.
    inputs = [torch.randn(60, 5) for _ in range(4)]
    federation = fedattune.federation_from([(x, (x[:, :3].argmax(1) + i % 2) % 3) for i, x in enumerate(inputs)])
    algorithm = build(name, ALGORITHMS[name], {"p": 0.9} if name == "l2gd" else {})
    module: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    if name == "fedbn":
        module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    if algorithm.network:
        module = wrap_model(algorithm.network, module, torch.zeros(2, 5), 0)
    settings = Settings(
        rounds=ROUNDS, cohort=1.0, steps=2, batch_size=8, lr=0.1, engine="sequential", early_stopping="off",
        dtype="float64",
    )  # fmt: skip
    watchers: list[Watcher] = []

    def make_backend(context: RunContext, make_payload: PayloadFactory) -> Watcher:
        watchers.append(Watcher(context, make_payload))
        return watchers[0]

    config: dict[str, Any] = {"algorithm": name, "model": "made up"}
    loop = RoundLoop(algorithm, federation, module, settings, config, None, make_backend)
    loop.run()
    watcher = watchers[0]
    secure = "sums over nodes"
    if find_sums(algorithm) is None:
        secure = "refused"
    sees = _describe_upload(watcher, _find_predicting(loop.context.task))
    return Sight(sees, _describe_broadcast(watcher), secure if sees != "nothing" else "nothing")


def _find_predicting(task: Task) -> set[str]:
    """Find the tensors that predictions depend on."""
    x = torch.randn(20, 5, dtype=torch.float64)
    before = task.predict(task.params, task.buffers, x)
    changed = {name: Params({**task.params, name: value + 1}) for name, value in task.params.items()}
    return {name for name, w in changed.items() if not torch.equal(task.predict(w, task.buffers, x), before)}


def _describe_upload(watcher: Watcher, names: set[str]) -> str:
    upload = watcher.uploads[-1]
    parts = [EXTRAS[key] for key in upload.extra]
    if upload.params:
        trained = watcher.trained[-1] if watcher.trained else Params()
        # Whether what arrives predicts for the client, or a model beside it that stays.
        is_own = bool(trained) and all(torch.equal(v, trained[k]) for k, v in upload.params.items())
        if PROTOTYPES in upload.params:
            parts.insert(0, "its mean features of each class and their shares of its rows")
        elif not names <= upload.params.keys():
            parts.insert(0, "its trained model without the personal layers")
        elif "steps" in upload.extra:  # the update times this number is that of the trained model
            parts.insert(0, "its whole update per local step")
        elif is_own or not trained:
            parts.insert(0, "its whole trained model")
        else:
            parts.insert(0, "a whole model that it trained; its personal model stays")
        if CONSENSUS in upload.params:
            parts.append("its mean features, in the first round")
    *most, last = parts or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


def _describe_broadcast(watcher: Watcher) -> str:
    sent = watcher.sent[-1]
    parts = [sent.params, *sent.extra.values()]
    if not any(parts):
        return "nothing"
    uploads = [row for upload in watcher.uploads for row in _flat_rows(upload.params)]
    if any(torch.equal(row, upload) for row in _find_models(sent) for upload in uploads):
        return "uploads of single clients, as they are"
    is_same = all(torch.equal(v, v[:1].expand_as(v)) for part in parts for v in part.values())
    return (
        "one model made of all uploads" if is_same else "a model made of several uploads, another one for each client"
    )


def _flat_rows(params: Params) -> Iterator[Tensor]:
    """Give each client's tensors as one vector."""
    rows = [value.reshape(len(value), -1) for value in params.values()]
    yield from torch.cat(rows, 1) if rows else ()


def _find_models(sent: Payload) -> Iterator[Tensor]:
    """Give every whole model in the payloads of clients, also those of a list of models for one client."""
    yield from _flat_rows(sent.params)
    for part in sent.extra.values():
        if part.keys() == sent.params.keys():
            yield from _flat_rows(part.map(lambda v: v.flatten(0, 1)) if _has_lists(part, sent) else part)


def _has_lists(part: Params, sent: Payload) -> bool:
    return all(value.dim() > sent.params[key].dim() for key, value in part.items())


def make_table() -> str:
    """Return the table of docs/deployment.md: who sees what of a client, and with which methods."""
    groups: dict[Sight, list[str]] = {}
    for name in ALGORITHMS:
        groups.setdefault(look_at(name), []).append(name)
    lines = [
        "| methods | the server sees of each client | with secure aggregation | other clients are sent |",
        "|---|---|---|---|",
    ]
    for sight, names in groups.items():
        methods = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {methods} | {sight.server} | {sight.secure} | {sight.others} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_table())
