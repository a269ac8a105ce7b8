"""Introductions of nodes: names and sizes of their clients, the schema of their data, and their version."""

import unicodedata
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ..core.errors import DataError, FedAttuneError
from ..core.faults import Fault
from ..core.io import natural_key
from ..core.settings import MAX_CLIENTS
from ..data import Schema
from ..training.backends.message import WorkerMessage
from .config import DeploymentOptions
from .grid import NodeGrid

MAX_CLIENTS_PER_NODE = 10_000
"""Clients in one introduction, at most: each takes memory of the server before anybody has looked at it."""


def _check_text(text: str) -> str:
    """Refuse invisible characters: names appear in logs and terminals."""
    if any(unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for one in text):
        raise ValueError("invisible characters")
    return text


Text = Annotated[str, AfterValidator(_check_text)]
"""Text from a node, without line breaks and control characters."""

SampleCount = Annotated[int, Field(ge=0, le=2**40)]


class HelloClient(BaseModel):
    """A client as its node introduces it: name, number if known, and number of samples by part."""

    name: Text = Field(min_length=1, max_length=300)
    number: int | None = Field(None, ge=0, le=MAX_CLIENTS)
    sizes: tuple[SampleCount, SampleCount, SampleCount]


class Hello(BaseModel):
    """A node's introduction of itself."""

    name: Text = Field("", max_length=300)
    clients: tuple[HelloClient, ...] = Field(min_length=1, max_length=MAX_CLIENTS_PER_NODE)
    data_schema: str = Field(alias="schema")
    fedattune: Text = Field("", max_length=100)

    @property
    def label(self) -> str:
        """The node's own name, or the names of its clients."""
        names = [one.name for one in self.clients]
        text = self.name or ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"node {text!r:.100}"


def sort_clients(hellos: Sequence[Hello]) -> list[HelloClient]:
    """Sort the clients of nodes by their numbers, if all have one, or else by their names."""
    clients = sorted(
        (one for hello in hellos for one in hello.clients), key=lambda one: natural_key(one.name)
    )
    if all(one.number is not None for one in clients):
        clients.sort(key=lambda one: one.number or 0)
    return clients


def choose_schema(hellos: Sequence[Hello], deployment: DeploymentOptions) -> Schema:
    """Take the server's schema, or the first node's where the server has none.

    Raises:
        DataError: the target is a number, and the server has no schema.

    """
    schema = deployment.data_schema or Schema.from_json(hellos[0].data_schema)
    if not schema.classes and deployment.data_schema is None:
        raise DataError(
            "the target is a number, and the server has no schema: nodes would each take their own mean and "
            "deviation; give the deployment a schema with target_mean and target_deviation"
        )
    return schema


def find_problems(hellos: Sequence[Hello], schema: Schema) -> list[list[str]]:
    """Find why nodes do not fit into a federation: schema, names of clients, numbers of samples.

    Args:
        hellos: the nodes' introductions. Of two nodes with the same client, the later one has the problem.
        schema: the schema of all nodes' data.

    Returns:
        Sentences with the cure for each node; none if the node fits.

    """
    owners: dict[str, str] = {}
    problems: list[list[str]] = []
    for hello in hellos:
        mine: list[str] = []
        try:
            schema.check(Schema.from_json(hello.data_schema), hello.label)
        except FedAttuneError as error:
            mine.append(str(error) if hello.label in str(error) else f"{hello.label}: {error}")
        names: set[str] = set()
        for one in hello.clients:
            if one.name in owners or one.name in names:
                mine.append(
                    f"the client {one.name!r} is at {owners.get(one.name, hello.label)} and at {hello.label}; names "
                    "of clients are unique in the federation, so rename one of them"
                )
            if not one.sizes[0] or not one.sizes[2]:
                mine.append(
                    f"the client {one.name!r} at {hello.label} has {one.sizes[0]} samples to train and "
                    f"{one.sizes[2]} to test, expected at least one of each; give the client more data"
                )
            names.add(one.name)
        if not mine:
            owners |= dict.fromkeys(names, hello.label)
        problems.append(mine)
    return problems


def ask_hello(grid: NodeGrid, numbers: set[int], timeout: float) -> dict[int, Hello | str]:
    """Ask nodes to introduce themselves; return each node's introduction, or why there is none.

    Args:
        grid: the connection to the nodes.
        numbers: Flower's numbers of the nodes.
        timeout: seconds to wait.

    """
    messages = {number: WorkerMessage({"kind": "hello"}) for number in sorted(numbers)}
    introductions: dict[int, Hello | str] = {}
    for number, reply in grid.exchange(messages, "hello", timeout).items():
        try:
            introductions[number] = str(reply) if isinstance(reply, Fault) else Hello(**reply.head)
        except (ValidationError, TypeError):
            introductions[number] = (
                "does not introduce itself properly: names have at most 300 characters, all of them visible"
            )
    return introductions
