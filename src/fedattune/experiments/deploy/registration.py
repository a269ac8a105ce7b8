"""The registry of a federation's nodes: the server asks each node for its clients, and later recognizes it by them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ...core.errors import DataError, RunError
from ...core.io import natural_key
from ...core.settings import MAX_CLIENTS
from ...data import Schema
from ...data.federated import FederationInfo
from ...training.backends.message import WorkerMessage
from .config import DeploymentOptions
from .grid import NodeGrid

HELLO_TIMEOUT_S = 60.0
"""Seconds that an unknown node has to introduce itself."""

SILENCE_S = 600.0
"""Seconds after which the server asks a silent node again."""

SampleCount = Annotated[int, Field(ge=0, le=2**40)]


class HelloClient(BaseModel):
    """A client as its node introduces it: name, number if known, and number of samples by part."""

    name: str = Field(min_length=1, max_length=300)
    number: int | None = Field(None, ge=0, le=MAX_CLIENTS)
    sizes: tuple[SampleCount, SampleCount, SampleCount]


class Hello(BaseModel):
    """A node's introduction of itself."""

    name: str = Field("", max_length=300)
    clients: tuple[HelloClient, ...] = Field(min_length=1)
    data_schema: str = Field(alias="schema")

    @property
    def label(self) -> str:
        """The node's own name, or the names of its clients."""
        names = [one.name for one in self.clients]
        text = self.name or ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"node {text!r:.100}"


@dataclass
class RegisteredNode:
    """A node of the federation. Its clients identify it, because Flower may give it a new number.

    Attributes:
        label: its name in messages.
        clients: name of each client -> number in the federation.

    """

    label: str
    clients: dict[str, int]


@dataclass
class NodeRegistry:
    """The nodes of a federation, and the server's facts about their clients.

    Attributes:
        deployment: the options of the server.
        nodes: the nodes.
        info: facts about the clients.
        schema: schema of the data.
        attempt: number of times that the server was started for this federation.

    """

    deployment: DeploymentOptions
    nodes: list[RegisteredNode]
    info: FederationInfo
    schema: Schema
    attempt: int = 1
    _index: dict[int, int] = field(default_factory=dict)  # Flower's number of a node -> its index in `nodes`
    _foreign: set[int] = field(default_factory=set)  # numbers of nodes of other federations
    _silent: dict[int, float] = field(default_factory=dict)  # number -> when it failed to introduce itself

    @classmethod
    def register(cls, grid: NodeGrid, deployment: DeploymentOptions) -> "NodeRegistry":
        """Wait for the nodes of a new federation, and ask them for their clients.

        Raises:
            RunError: too few nodes came in time.
            DataError: their data do not fit together.

        """
        n = deployment.nodes
        online = grid.wait(lambda numbers: len(numbers) >= n, f"waiting for {n} nodes")
        replies = _ask_hello(grid, online, deployment.round_timeout)
        hellos = {number: hello for number, hello in replies.items() if isinstance(hello, Hello)}
        if len(hellos) < n:
            failed = [f"a node {reason}" for reason in replies.values() if isinstance(reason, str)]
            raise RunError(
                f"got answers of {len(hellos)} nodes, expected {n}: {'; '.join(failed) or 'some went offline'}"
            )
        registry = cls._from_hellos(list(hellos.values()), deployment)
        registry._index = {number: i for i, number in enumerate(hellos)}
        return registry

    @classmethod
    def _from_hellos(cls, hellos: Sequence[Hello], deployment: DeploymentOptions) -> "NodeRegistry":
        schema = deployment.data_schema or Schema.from_json(hellos[0].data_schema)
        nodes = [RegisteredNode(hello.label, {}) for hello in hellos]
        clients: list[tuple[HelloClient, RegisteredNode]] = []
        seen: dict[str, str] = {}
        for hello, node in zip(hellos, nodes, strict=True):
            schema.check(Schema.from_json(hello.data_schema), node.label)
            for one in hello.clients:
                if one.name in seen:
                    raise DataError(
                        f"the client {one.name!r} is at {seen[one.name]} and at {node.label}; names of clients are "
                        "unique in the federation, so rename one of them"
                    )
                seen[one.name] = node.label
                if not one.sizes[0] or not one.sizes[2]:
                    raise DataError(
                        f"the client {one.name!r} at {node.label} has {one.sizes[0]} samples to train and "
                        f"{one.sizes[2]} to test, expected at least one of each"
                    )
                clients.append((one, node))
        if len(clients) < 2:
            raise DataError("a federation needs at least two clients, but there is one; start more nodes")
        if all(one.number is not None for one, _ in clients):
            clients.sort(key=lambda pair: pair[0].number or 0)
        else:
            clients.sort(key=lambda pair: natural_key(pair[0].name))
        for number, (one, node) in enumerate(clients):
            node.clients[one.name] = number
        names, counts = [one.name for one, _ in clients], [one.sizes for one, _ in clients]
        return cls(deployment, nodes, _make_info(names, counts, schema), schema)

    def with_seed(self, seed: int) -> "NodeRegistry":
        """Return the registry with the seed that draws the evaluated clients."""
        return replace(self, info=replace(self.info, partition={"name": "given", "seed": seed}))

    def locate(self, grid: NodeGrid) -> dict[int, int]:
        """Find the nodes that are online; wait if none is.

        Returns:
            Index of a node in `nodes` -> Flower's number of it.

        Raises:
            RunError: no node came in time.

        """
        found = self._locate(grid, grid.online())
        if not found:
            purpose = "no node of this federation is online, waiting"
            grid.wait(lambda online: bool(self._locate(grid, online)), purpose)
            found = self._locate(grid, grid.online())
        return found

    def _locate(self, grid: NodeGrid, online: set[int]) -> dict[int, int]:
        self._foreign &= online  # a node that comes back may have other data
        now = time.monotonic()
        resting = {number for number, since in self._silent.items() if now - since < SILENCE_S}
        new = online - self._index.keys() - self._foreign - resting
        timeout = min(HELLO_TIMEOUT_S, self.deployment.round_timeout)
        for number, hello in (_ask_hello(grid, new, timeout) if new else {}).items():
            if not isinstance(hello, Hello):
                self._silent[number] = time.monotonic()
                continue
            names = {one.name for one in hello.clients}
            index = next((i for i, node in enumerate(self.nodes) if node.clients.keys() == names), None)
            rivals = {other for other, its in self._index.items() if its == index} & online
            if index is not None and not rivals:
                self._index = {other: its for other, its in self._index.items() if its != index}
                self._index[number] = index
                continue
            self._foreign.add(number)
            grid.log(
                f"a second node says that it is {hello.label}, which is online: it is not asked"
                if rivals
                else f"{hello.label} does not belong to this federation: its clients differ from the clients at the "
                "start; if its data changed, start a new run in another run-folder"
            )
        return {self._index[number]: number for number in sorted(online & self._index.keys())}

    def to_json(self) -> dict[str, Any]:
        """Return the registry as plain JSON values."""
        return {
            "nodes": [{"label": node.label, "clients": node.clients} for node in self.nodes],
            "names": list(self.info.names),
            "counts": [list(row) for row in self.info.counts],
            "schema": self.schema.to_json(),
            "attempt": self.attempt,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], deployment: DeploymentOptions) -> "NodeRegistry":
        """Read the values of `to_json`; this start of the server is one more attempt."""
        schema = Schema.from_json(content["schema"])
        nodes = [RegisteredNode(**node) for node in content["nodes"]]
        info = _make_info(content["names"], content["counts"], schema)
        return cls(deployment, nodes, info, schema, content["attempt"] + 1)


def _make_info(names: Sequence[str], counts: Sequence[Sequence[int]], schema: Schema) -> FederationInfo:
    return FederationInfo(
        name="federation",
        names=tuple(names),
        counts=tuple(counts),
        classes=schema.classes,
        input_shape=tuple(schema.input_shape),
    )


def _ask_hello(grid: NodeGrid, numbers: set[int], timeout: float) -> dict[int, Hello | str]:
    """Ask nodes to introduce themselves; return each node's introduction, or why there is none."""
    messages = {number: WorkerMessage({"kind": "hello"}) for number in sorted(numbers)}
    found: dict[int, Hello | str] = {}
    for number, reply in grid.exchange(messages, "hello", timeout).items():
        try:
            found[number] = Hello(**reply.message.head) if reply.message else reply.reason
        except (ValidationError, TypeError):
            found[number] = "does not introduce itself properly"
    return found
