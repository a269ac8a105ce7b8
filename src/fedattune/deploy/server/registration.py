"""Nodes of a federation: introductions, versions that work together, and the registry that recognizes them."""

import hashlib
import json
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ..._version import __version__
from ...core.errors import DataError, FedAttuneError, RunError
from ...core.faults import Fault
from ...core.io import natural_key
from ...core.options import format_value
from ...core.settings import MAX_CLIENTS
from ...core.targets import NUMBER_KINDS
from ...data import Schema
from ...data.federated import FederationInfo
from ...training.backends.message import WorkerMessage
from ..config import DeploymentOptions
from ..grid import NodeGrid

LARGEST_MINOR_DISTANCE = 1
"""Minor versions that a node may be behind or ahead of the server."""


def check_versions(ours: str, theirs: str, where: str) -> str:
    """Compare the versions of FedAttune of the server and of a node, which `where` names; return a note if they differ.

    The same major version and at most one minor version apart is fine, so that nodes can be upgraded one by one.
    """
    found = [re.match(r"(\d{1,6})\.(\d{1,6})(?![0-9])", one, re.ASCII) for one in (ours, theirs)]
    numbers = [(int(one[1]), int(one[2])) for one in found if one]
    if len(numbers) < 2:
        raise RunError(
            f"{where} has FedAttune {theirs!r:.40}, expected a version such as {ours}; install FedAttune {ours} there"
        )
    (major, minor), (other_major, other_minor) = numbers
    if major != other_major or abs(minor - other_minor) > LARGEST_MINOR_DISTANCE:
        raise RunError(
            f"{where} has FedAttune {theirs:.40} and the server has {ours}, expected the same major version and at "
            f"most {LARGEST_MINOR_DISTANCE} minor version apart; install FedAttune {ours} there"
        )
    if theirs == ours:
        return ""
    return f"{where} has FedAttune {theirs:.40} and the server has {ours}; upgrade the older one soon"


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
    clients = sorted((one for hello in hellos for one in hello.clients), key=lambda one: natural_key(one.name))
    if all(one.number is not None for one in clients):
        clients.sort(key=lambda one: one.number or 0)
    return clients


def choose_schema(hellos: Sequence[Hello], deployment: DeploymentOptions) -> Schema:
    """Take the server's schema, or where it has none that of the first node whose schema can be used."""
    if deployment.data_schema:
        return _check_schema(deployment.data_schema, is_servers=True)
    errors: list[FedAttuneError] = []
    for hello in hellos:
        try:
            return _check_schema(Schema.from_json(hello.data_schema), is_servers=False)
        except FedAttuneError as error:  # `find_problems` tells of this node, if another one has a schema
            errors.append(error)
    raise errors[0]


def _check_schema(schema: Schema, *, is_servers: bool) -> Schema:
    if schema.positions:
        raise DataError(
            "the target is a class for each position, which is for simulations; give one class or several labels"
        )
    if schema.kind in NUMBER_KINDS and not is_servers:
        raise DataError(
            "the target is a number, and the server has no schema: nodes would each take their own mean and "
            "deviation; give the deployment a schema with target_mean and target_deviation"
        )
    return schema


def find_problems(hellos: Sequence[Hello], schema: Schema) -> list[list[str]]:
    """Find, for each node, why it does not fit into a federation: schema, names of clients, numbers of samples."""
    owners: dict[str, str] = {}
    problems: list[list[str]] = []
    for hello in hellos:
        mine: list[str] = []
        names: set[str] = set()
        try:
            schema.check(Schema.from_json(hello.data_schema), hello.label)
        except FedAttuneError as error:
            mine.append(str(error) if hello.label in str(error) else f"{hello.label}: {error}")
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
    """Ask nodes to introduce themselves; return each node's introduction, or why there is none."""
    messages = {number: WorkerMessage({"kind": "hello"}) for number in sorted(numbers)}
    introductions: dict[int, Hello | str] = {}
    for number, reply in grid.exchange(messages, "hello", timeout).items():
        if isinstance(reply, Fault):
            introductions[number] = f"a node {reply}"
            continue
        try:
            introductions[number] = Hello(**reply.head)
        except (ValidationError, TypeError) as error:
            introductions[number] = _describe_improper(reply.head.get("name"), error)
    return introductions


def _describe_improper(name: object, error: ValidationError | TypeError) -> str:
    """Say which node introduces itself improperly, and its first wrong value."""
    node = f"the node that calls itself {name!r:.100}" if isinstance(name, str) and name else "a node without a name"
    sentence = f"{node} does not introduce itself properly"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        key, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        sentence += f": {key:.100}: {reason[:1].lower()}{reason[1:]}, got {format_value(first['input'])}"
    return f"{sentence}; correct its data or nodes/N.toml"


HELLO_TIMEOUT_S = 60.0
"""Seconds that an unknown node has to introduce itself."""

SILENCE_S, RETURN_SILENCE_S = 600.0, 120.0
"""Seconds after which the server asks a silent node again; the second for a node of the federation that came back."""


class RegisteredNode(NamedTuple):
    """A node of the federation: its name in messages, and name -> number of its clients.

    Its clients identify it, because Flower may give it a new number.
    """

    label: str
    clients: dict[str, int]


class NodeRegistry:
    """The nodes of a federation, and the server's facts about their clients.

    Args:
        seed: seed that draws the evaluated clients.
        attempt: number of times that the server began to send messages to this federation.
        n_founders: number of nodes at the start; the others joined during the run. By default, all of them.

    Attributes:
        notes: sentences about nodes that were left out, and about versions that differ.
        takes_newcomers: whether a node that comes during the run may join it.
    """

    def __init__(
        self,
        hellos: Sequence[Hello],
        deployment: DeploymentOptions,
        seed: int,
        attempt: int = 1,
        n_founders: int | None = None,
    ) -> None:
        self.hellos, self.deployment, self.attempt = list(hellos), deployment, attempt
        self.n_founders = len(hellos) if n_founders is None else n_founders
        self.notes: list[str] = []
        self.takes_newcomers = False
        self._seed = seed
        self._number_clients()
        # Flower's number of a node that waits to join -> its introduction.
        self._newcomers: dict[int, Hello] = {}
        self._index: dict[int, int] = {}  # Flower's number of a node -> its index in `nodes`
        self._away: set[int] = set()  # numbers in `_index` that went offline, and have not introduced themselves again
        # Numbers of nodes that are not asked, and for each the nodes that have its place.
        self._foreign: dict[int, set[int]] = {}
        self._silent: dict[int, float] = {}  # number of a node that failed to introduce itself -> when to ask it again

    def _number_clients(self) -> None:
        """Number the clients: first those of the founders, then those of each node that joined."""
        schema = choose_schema(self.hellos, self.deployment)
        if problems := [one for found in find_problems(self.hellos, schema) for one in found]:
            raise DataError("; ".join(problems))
        joined = self.hellos[self.n_founders :]
        clients = sort_clients(self.hellos[: self.n_founders])
        if len(clients) < 2:
            raise DataError("a federation needs at least two clients, but there is one; start more nodes")
        self._sizes = [len(clients)]  # clients at the start, and after each node that joined
        for hello in joined:
            clients += sort_clients([hello])
            self._sizes.append(len(clients))
        numbers = {one.name: number for number, one in enumerate(clients)}
        self.nodes = [
            RegisteredNode(hello.label, {one.name: numbers[one.name] for one in hello.clients}) for hello in self.hellos
        ]
        self.info = FederationInfo(
            name="federation",
            names=tuple(one.name for one in clients),
            counts=tuple(one.sizes for one in clients),
            classes=schema.classes,
            input_shape=tuple(schema.input_shape),
            partition={"name": "given", "seed": self._seed},
            target_scale=schema.target_scale,
            labels=schema.labels,
            outputs=schema.outputs,
        )

    @property
    def n_newcomers(self) -> int:
        return sum(len(hello.clients) for hello in self._newcomers.values())

    def refuse_newcomers(self, grid: NodeGrid, reason: str) -> None:
        """Ask the nodes that wait to join no more in this run; say why."""
        for number, hello in self._newcomers.items():
            self._foreign[number] = set()
            grid.log(f"{hello.label} cannot join, as the method does not take more clients: {reason}")
        self._newcomers = {}

    @property
    def splits(self) -> list[str]:
        """The digests of the clients' names and sizes: at the start, and after each node that joined."""
        names, counts = self.info.names, self.info.counts
        return [hashlib.sha256(json.dumps([names[:n], counts[:n]]).encode()).hexdigest() for n in self._sizes]

    def admit_newcomers(self) -> None:
        """Take the nodes that wait into the federation; their clients get the next numbers."""
        newcomers, self._newcomers = self._newcomers, {}
        for number, hello in newcomers.items():
            self._index[number] = len(self.hellos)
            self._away.discard(number)
            self.hellos.append(hello)
        self._number_clients()
        self.attempt += 1

    @classmethod
    def register(cls, grid: NodeGrid, deployment: DeploymentOptions, seed: int) -> "NodeRegistry":
        """Wait for the nodes of a new federation, and ask them for their clients.

        A node that does not fit is left out if enough others fit. The log and `notes` say why. If too few fit, the
        error's message has the problems of all nodes.
        """
        n = deployment.nodes
        online = grid.wait(lambda numbers: len(numbers) >= n, f"waiting for {n} nodes")
        replies = ask_hello(grid, online, deployment.round_timeout)
        notes: list[str] = []
        failed = [reason for reason in replies.values() if isinstance(reason, str)]
        hellos: dict[int, Hello] = {}
        for number, hello in replies.items():
            if isinstance(hello, Hello):
                try:
                    note = check_versions(__version__, hello.fedattune, hello.label)
                except RunError as error:
                    failed.append(str(error))
                    continue
                hellos[number] = hello
                notes += [note] if note else []
        if not hellos:
            raise RunError(_describe_shortage(0, n, failed))
        candidates = list(hellos.values())
        problems = dict(zip(hellos, find_problems(candidates, choose_schema(candidates, deployment)), strict=True))
        unfit = [one for found in problems.values() for one in found]
        hellos = {number: hello for number, hello in hellos.items() if not problems[number]}
        if len(hellos) < n:
            kind = RunError if failed or not unfit else DataError
            raise kind(_describe_shortage(len(hellos), n, [*failed, *unfit]))
        notes += [f"left out of the federation: {one}" for one in [*failed, *unfit]]
        for note in notes:
            grid.log(note)
        registry = cls(list(hellos.values()), deployment, seed)
        registry.notes = notes
        registry._index = {number: i for i, number in enumerate(hellos)}
        return registry

    def list_online(self, numbers: set[int]) -> set[int]:
        """Return the indexes in `nodes` of the nodes with some of Flower's numbers, without asking new ones."""
        return {self._index[number] for number in numbers & self._index.keys() - self._away}

    def is_removed(self, grid: NodeGrid, i: int) -> bool:
        """Tell whether the key with which node `i` was here last was removed."""
        return any(grid.is_removed(number) for number, index in self._index.items() if index == i)

    def locate(self, grid: NodeGrid) -> dict[int, int]:
        """Find the nodes that are online: index in `nodes` -> Flower's number; wait if none is."""
        numbers = self._locate(grid, grid.online())
        if not numbers:
            purpose = "no node of this federation is online, waiting"
            grid.wait(lambda online: bool(self._locate(grid, online)), purpose)
            numbers = self._locate(grid, grid.online())
        return numbers

    def _locate(self, grid: NodeGrid, online: set[int]) -> dict[int, int]:
        # A node that comes back may have other data or another version, and the node in its place may have left.
        stayed = online - grid.take_left()
        self._away |= self._index.keys() - stayed
        self._foreign = {
            number: rivals
            for number, rivals in self._foreign.items()
            if number in stayed and (not rivals or rivals & online)
        }
        self._newcomers = {number: hello for number, hello in self._newcomers.items() if number in stayed}
        resting = {number for number, end in self._silent.items() if time.monotonic() < end}
        known = self._index.keys() - self._away
        new = online - known - self._foreign.keys() - self._newcomers.keys() - resting
        timeout, answers = self.deployment.round_timeout, dict[int, Hello | str]()
        # To introduce itself, a node loads its data: strangers must not keep the others waiting.
        for some, limit in ((new & self._away, timeout), (new - self._away, min(HELLO_TIMEOUT_S, timeout))):
            answers |= ask_hello(grid, some, limit) if some else {}
        for number, hello in answers.items():
            if not isinstance(hello, Hello):
                silence = RETURN_SILENCE_S if number in self._index else SILENCE_S
                self._silent[number] = time.monotonic() + silence
                grid.log(f"{hello}; the server does not ask this node for {silence / 60:g} minutes")
                continue
            try:
                note = check_versions(__version__, hello.fedattune, hello.label)
            except RunError as error:
                self._silent[number] = time.monotonic() + SILENCE_S
                grid.log(f"{error}; the server does not ask this node")
                continue
            if note:
                grid.log(note)
            names = {one.name for one in hello.clients}
            index = next((i for i, node in enumerate(self.nodes) if node.clients.keys() == names), None)
            places = [other for other, its in self._index.items() if its == index]
            rivals = online.intersection(places) - {number}
            if index is not None and not rivals:
                if places and number not in places:
                    grid.log(
                        f"{hello.label} came back with another key (Flower's number {places[0]} before, {number} now); "
                        "if its operator did not change the key, another node has its name: ./nodes.sh lists the nodes"
                    )
                self._index = {other: its for other, its in self._index.items() if its != index} | {number: index}
                self._away.discard(number)
                # Another version may be there now.
                self.hellos[index] = self.hellos[index].model_copy(update={"fedattune": hello.fedattune})
                continue
            if rivals:
                obstacle = f"a second node says that it is {hello.label}, which is online: it is not asked"
            elif not (obstacle := self._find_obstacle(hello)):
                self._newcomers[number] = hello
                grid.log(f"{hello.label} joins: its clients take part from the next round on")
                continue
            self._foreign[number] = rivals
            grid.log(obstacle)
        return {self._index[number]: number for number in sorted(online & self._index.keys() - self._away)}

    def _find_obstacle(self, hello: Hello) -> str:
        """Return why a node that is not of this federation cannot join it; an empty text if it can."""
        present = {name for node in self.nodes for name in node.clients}
        if not present.isdisjoint(one.name for one in hello.clients):
            return (
                f"{hello.label} does not belong to this federation: its clients differ from the clients at the start; "
                "give it the same data as before, or take a new run-folder"
            )
        everybody = [*self.hellos, *self._newcomers.values(), hello]
        if problems := find_problems(everybody, choose_schema(self.hellos, self.deployment))[-1]:
            return f"{hello.label} does not belong to this federation, and cannot join it: {'; '.join(problems)}"
        if not self.takes_newcomers:
            return (
                f"{hello.label} does not belong to this federation; it takes part from the next run on, in another "
                "run-folder: this run compares methods on the same clients"
            )
        return ""

    def to_json(self) -> dict[str, Any]:
        hellos = [hello.model_dump(mode="json", by_alias=True) for hello in self.hellos]
        return {"hellos": hellos, "founders": self.n_founders, "attempt": self.attempt, "notes": self.notes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], deployment: DeploymentOptions, seed: int) -> "NodeRegistry":
        """Read the values of `to_json`; this start of the server is one more attempt."""
        hellos = [Hello(**hello) for hello in content["hellos"]]
        # Nodes refuse messages of an earlier attempt, and the folder may be an older copy.
        attempt = max(content["attempt"] + 1, int(1000 * time.time()))
        registry = cls(hellos, deployment, seed, attempt, content.get("founders"))
        registry.notes = [str(note) for note in content.get("notes", ())]
        return registry


def _describe_shortage(n_fit: int, n: int, problems: Sequence[str]) -> str:
    return (
        f"got answers of {n_fit} nodes, expected {n}: {'; '.join(problems) or 'some went offline'}; look at the logs "
        "of the nodes that failed, start these nodes again, then run again"
    )
