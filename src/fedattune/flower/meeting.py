"""Who takes part in a federation: nodes are asked for their clients once, and known by these from then on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..census import Census
from ..data import Schema
from ..deployment import Deployment
from ..errors import DataError, RunError
from ..wire import Parcel
from .nodes import Nodes


@dataclass
class SiteOfNode:
    """A node's clients: name -> number among all. A node is known by these, as Flower may number it anew."""

    label: str
    clients: dict[str, int]


@dataclass
class Meeting:
    """The nodes of a federation, and what the server knows of their clients."""

    deployment: Deployment
    sites: list[SiteOfNode]
    census: Census
    schema: Schema
    _where: dict[int, int] = field(default_factory=dict)  # Flower's number of a node -> site
    _strange: set[int] = field(default_factory=set)  # nodes that are none of these

    @classmethod
    def call(cls, nodes: Nodes, deployment: Deployment) -> "Meeting":
        """Wait for the nodes of a new federation, and ask them who they are.

        Raises:
            RunError: too few came in time.
            DataError: they do not fit together.

        """
        n = deployment.nodes
        online = nodes.wait(lambda ids: len(ids) >= n, f"waiting for {n} nodes")
        hellos = _ask(nodes, online)
        failed = [f"a node {why}" for why in hellos.values() if isinstance(why, str)]
        good = {node: hello for node, hello in hellos.items() if not isinstance(hello, str)}
        if len(good) < n:
            raise RunError(
                f"got answers of {len(good)} nodes, expected {n}: {'; '.join(failed) or 'some went offline'}"
            )
        meeting = cls._of(list(good.values()), deployment)
        meeting._where = dict(zip(good, range(len(good)), strict=True))
        return meeting

    @classmethod
    def _of(cls, hellos: Sequence[dict[str, Any]], deployment: Deployment) -> "Meeting":
        schemas = [Schema.from_json(hello["schema"]) for hello in hellos]
        labels = [_label(hello) for hello in hellos]
        schema = deployment.data_schema or schemas[0]
        for label, found in zip(labels, schemas, strict=True):
            schema.check(found, label)
        clients = [(one, site) for site, hello in enumerate(hellos) for one in hello["clients"]]
        seen: dict[str, int] = {}
        for one, site in clients:
            if one["name"] in seen:
                raise DataError(
                    f"the client {one['name']!r} is at {labels[seen[one['name']]]} and at {labels[site]}; names of "
                    "clients are those of all nodes, so give one of them another"
                )
            seen[one["name"]] = site
        numbered = all(isinstance(one["number"], int) for one, _ in clients)
        clients.sort(key=lambda pair: pair[0]["number"] if numbered else _natural(pair[0]["name"]))
        if len(clients) < 2:
            raise DataError("a federation needs at least two clients, but there is one; start more nodes")
        sites = [SiteOfNode(label, {}) for label in labels]
        for number, (one, site) in enumerate(clients):
            sites[site].clients[one["name"]] = number
        census = Census(
            name="federation",
            names=tuple(one["name"] for one, _ in clients),
            counts=tuple(tuple(one["sizes"]) for one, _ in clients),
            classes=schema.classes,
            input_shape=tuple(schema.input_shape),
        )
        return cls(deployment, sites, census, schema)

    def find(self, nodes: Nodes) -> dict[int, int]:
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

    def _find(self, nodes: Nodes, online: set[int]) -> dict[int, int]:
        new = online - self._where.keys() - self._strange
        for node, hello in (_ask(nodes, new) if new else {}).items():
            if isinstance(hello, str):
                continue  # it is asked again in the next round
            names = {one["name"] for one in hello["clients"]}
            site = next((i for i, one in enumerate(self.sites) if one.clients.keys() == names), None)
            if site is None:
                self._strange.add(node)
                nodes.say(
                    f"{_label(hello)} is none of this federation, for its clients are others than when it began; "
                    "if its data changed, start a new run in another run-folder"
                )
            else:
                self._where[node] = site
        return {self._where[node]: node for node in sorted(online & self._where.keys())}

    def to_json(self) -> dict[str, Any]:
        """The meeting as plain JSON values."""
        return {
            "sites": [{"label": site.label, "clients": site.clients} for site in self.sites],
            "names": list(self.census.names),
            "counts": [list(row) for row in self.census.counts],
            "schema": self.schema.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], deployment: Deployment) -> "Meeting":
        """The meeting that `to_json` wrote."""
        schema = Schema.from_json(content["schema"])
        census = Census(
            "federation",
            tuple(content["names"]),
            content["counts"],
            schema.classes,
            tuple(schema.input_shape),
        )
        return cls(deployment, [SiteOfNode(**site) for site in content["sites"]], census, schema)


def _ask(nodes: Nodes, ids: set[int]) -> dict[int, Any]:
    """What nodes say of themselves, or why they do not."""
    answers = nodes.exchange({node: Parcel({"kind": "hello"}) for node in sorted(ids)}, "hello")
    return {node: why if parcel is None else parcel.head for node, (parcel, why, _) in answers.items()}


def _label(hello: Mapping[str, Any]) -> str:
    """How a node is called: by its own name, or by its clients."""
    names = [one["name"] for one in hello["clients"]]
    name = hello.get("name") or ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"node {name!r}"


def _natural(name: str) -> list[str | int]:
    """A key by which client 4 comes before client 11; text and numbers alternate, text first."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
