"""Who takes part in a federation: nodes are asked for their clients once, and known by these from then on."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ...core.errors import DataError, RunError
from ...core.settings import MAX_CLIENTS
from ...data import Schema
from ...data.federated import FederationInfo
from ...training.backends.message import WorkerMessage
from .config import DeploymentOptions
from .grid import NodeGrid

HELLO_TIMEOUT_S, SILENCE_S = 60.0, 600.0
"""Seconds that a node has to say who it is, and after which one that did not is asked again."""


Size = Annotated[int, Field(ge=0, le=2**40)]


@dataclass
class RegisteredNode:
    """A node's clients: name -> number among all. A node is known by these, as Flower may number it anew."""

    label: str
    clients: dict[str, int]


@dataclass
class NodeRegistry:
    """The nodes of a federation, and what the server knows of their clients."""

    deployment: DeploymentOptions
    sites: list[RegisteredNode]
    census: FederationInfo
    schema: Schema
    attempt: int = 1  # how often the server was started for this federation
    _where: dict[int, int] = field(default_factory=dict)  # Flower's number of a node -> site
    _strange: set[int] = field(default_factory=set)  # nodes that are none of these
    _silent: dict[int, float] = field(default_factory=dict)  # nodes that did not say who they are, and when

    @classmethod
    def call(cls, nodes: NodeGrid, deployment: DeploymentOptions) -> "NodeRegistry":
        """Wait for the nodes of a new federation, and ask them who they are.

        Raises:
            RunError: too few came in time.
            DataError: they do not fit together.

        """
        n = deployment.nodes
        online = nodes.wait(lambda ids: len(ids) >= n, f"waiting for {n} nodes")
        hellos = _ask_nodes(nodes, online, deployment.round_timeout)
        failed = [f"a node {why}" for why in hellos.values() if isinstance(why, str)]
        good = {node: hello for node, hello in hellos.items() if isinstance(hello, Hello)}
        if len(good) < n:
            raise RunError(
                f"got answers of {len(good)} nodes, expected {n}: {'; '.join(failed) or 'some went offline'}"
            )
        meeting = cls._of(list(good.values()), deployment)
        meeting._where = dict(zip(good, range(len(good)), strict=True))
        return meeting

    @classmethod
    def _of(cls, hellos: "Sequence[Hello]", deployment: DeploymentOptions) -> "NodeRegistry":
        labels = [hello.label for hello in hellos]
        schema = deployment.data_schema or Schema.from_json(hellos[0].agreed)
        for label, hello in zip(labels, hellos, strict=True):
            schema.check(Schema.from_json(hello.agreed), label)
        clients = [(one, site) for site, hello in enumerate(hellos) for one in hello.clients]
        seen: dict[str, int] = {}
        for one, site in clients:
            if one.name in seen:
                raise DataError(
                    f"the client {one.name!r} is at {labels[seen[one.name]]} and at {labels[site]}; names of "
                    "clients are those of all nodes, so give one of them another"
                )
            seen[one.name] = site
            if not one.sizes[0] or not one.sizes[2]:
                raise DataError(
                    f"the client {one.name!r} at {labels[site]} has {one.sizes[0]} samples to train and "
                    f"{one.sizes[2]} to test, expected at least one of each"
                )
        if all(one.number is not None for one, _ in clients):
            clients.sort(key=lambda pair: pair[0].number or 0)
        else:
            clients.sort(key=lambda pair: _natural_key(pair[0].name))
        if len(clients) < 2:
            raise DataError("a federation needs at least two clients, but there is one; start more nodes")
        sites = [RegisteredNode(label, {}) for label in labels]
        for number, (one, site) in enumerate(clients):
            sites[site].clients[one.name] = number
        census = FederationInfo(
            name="federation",
            names=tuple(one.name for one, _ in clients),
            counts=tuple(one.sizes for one, _ in clients),
            classes=schema.classes,
            input_shape=tuple(schema.input_shape),
        )
        return cls(deployment, sites, census, schema)

    def seeded(self, seed: int) -> "NodeRegistry":
        """The same, with the seed by which the evaluated clients are drawn."""
        return replace(self, census=replace(self.census, partition={"name": "given", "seed": seed}))

    def find(self, nodes: NodeGrid) -> dict[int, int]:
        """Flower's number of the node of each site that is online; waits if none is.

        Raises:
            RunError: none came in time.

        """
        found = self._find(nodes, nodes.online())
        if not found:
            nodes.wait(
                lambda ids: bool(self._find(nodes, ids)), "no node of this federation is online, waiting"
            )
            found = self._find(nodes, nodes.online())
        return found

    def _find(self, nodes: NodeGrid, online: set[int]) -> dict[int, int]:
        self._strange &= online  # who comes back may have other data
        now = time.monotonic()
        resting = {node for node, since in self._silent.items() if now - since < SILENCE_S}
        new = online - self._where.keys() - self._strange - resting
        for node, hello in (
            _ask_nodes(nodes, new, min(HELLO_TIMEOUT_S, self.deployment.round_timeout)) if new else {}
        ).items():
            if not isinstance(hello, Hello):
                self._silent[node] = time.monotonic()
                continue
            names = {one.name for one in hello.clients}
            site = next((i for i, one in enumerate(self.sites) if one.clients.keys() == names), None)
            taken = {other for other, its in self._where.items() if its == site} & online
            if site is not None and not taken:
                self._where = {other: its for other, its in self._where.items() if its != site} | {node: site}
                continue
            self._strange.add(node)
            nodes.say(
                f"a second node says that it is {hello.label}, which is online: it is not asked"
                if taken
                else f"{hello.label} is none of this federation, for its clients are others than when it began; if its "
                "data changed, start a new run in another run-folder"
            )
        return {self._where[node]: node for node in sorted(online & self._where.keys())}

    def to_json(self) -> dict[str, Any]:
        """The meeting as plain JSON values."""
        return {
            "sites": [{"label": site.label, "clients": site.clients} for site in self.sites],
            "names": list(self.census.names),
            "counts": [list(row) for row in self.census.counts],
            "schema": self.schema.to_json(),
            "attempt": self.attempt,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], deployment: DeploymentOptions) -> "NodeRegistry":
        """The meeting that `to_json` wrote."""
        schema = Schema.from_json(content["schema"])
        census = FederationInfo(
            "federation",
            tuple(content["names"]),
            content["counts"],
            schema.classes,
            tuple(schema.input_shape),
        )
        sites = [RegisteredNode(**site) for site in content["sites"]]
        return cls(deployment, sites, census, schema, content["attempt"] + 1)


class HelloClient(BaseModel):
    """What a node says of a client: its name, maybe its number, and its samples to train, validate and test."""

    name: str = Field(min_length=1, max_length=300)
    number: int | None = Field(None, ge=0, le=MAX_CLIENTS)
    sizes: tuple[Size, Size, Size]


class Hello(BaseModel):
    """What a node says of itself."""

    name: str = Field("", max_length=300)
    clients: tuple[HelloClient, ...] = Field(min_length=1)
    agreed: str = Field(alias="schema")

    @property
    def label(self) -> str:
        """How the node is called: by its own name, or by its clients."""
        names = [one.name for one in self.clients]
        said = self.name or ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"node {said!r:.100}"


def _ask_nodes(nodes: NodeGrid, ids: set[int], timeout: float) -> dict[int, Hello | str]:
    """What nodes say of themselves, or why they do not."""
    answers = nodes.exchange(
        {node: WorkerMessage({"kind": "hello"}) for node in sorted(ids)}, "hello", timeout
    )
    found: dict[int, Hello | str] = {}
    for node, answer in answers.items():
        try:
            found[node] = Hello(**answer.parcel.head) if answer.parcel else answer.why
        except (ValidationError, TypeError):
            found[node] = "does not say properly who it is"
    return found


def _natural_key(name: str) -> list[str | int]:
    """A key by which client 4 comes before client 11; text and numbers alternate, text first."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
