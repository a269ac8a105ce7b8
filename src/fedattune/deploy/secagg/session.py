"""Describe a session: the facts that all nodes must agree on, and the message of each at its beginning."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import keys
from .errors import BadSignatureError, SessionMismatchError, TooFewParticipantsError

MAX_NODES = 49
"""Nodes of a session at most: each makes a share for every other one."""

MAX_LENGTH = 1 << 31
"""Numbers of one node at most; larger than any model that travels in one message."""

Text = Annotated[str, Field(max_length=200)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SessionPart(_Part):
    """One message in a session: what the nodes do, and the digest of the model that all of them get for it."""

    kind: Literal["train", "evaluate"]
    round: Annotated[int, Field(ge=0)]
    digest: Digest


class Block(_Part):
    """Numbers that are summed together: `upload` or `scores` of one part of a session, and how many numbers."""

    part: Annotated[int, Field(ge=0)]
    what: Literal["upload", "scores"]
    length: Annotated[int, Field(ge=1, le=MAX_LENGTH)]


class Session(_Part):
    """A session: one sum over nodes.

    Attributes:
        token, algorithm, seed, model: the run, as its messages name it.
        round: number of the round.
        number: number of the session, which grows; a node takes part in each once.
        modulus: binary digits of the ring.
        bits, clip: binary places and largest absolute value of what is summed.
        nodes: number of nodes of the federation, which bounds the weight of each.
        parts: the messages.
        blocks: the numbers, in the order in which they are summed.

    """

    version: Literal[1] = 1
    token: Text
    algorithm: Text
    seed: int
    model: Text
    round: int
    number: list[int]
    modulus: Literal[64] = 64
    bits: Annotated[int, Field(ge=1, le=40)]
    clip: Annotated[float, Field(gt=0, le=2.0**40, strict=False)]
    nodes: Annotated[int, Field(ge=2, le=MAX_NODES)]
    parts: Annotated[list[SessionPart], Field(min_length=1)]
    blocks: list[Block]

    @classmethod
    def read(cls, values: object) -> "Session":
        """Read a session as it came in a message.

        Raises:
            SessionMismatchError: it is none, such as one with another modulus.

        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "session"
            raise SessionMismatchError(
                f"the server's session is none that this node knows: {where}: {first['msg'].lower()}"
            ) from error

    @property
    def digest(self) -> str:
        """The SHA-256 of everything in the session."""
        return keys.hash_text(canonical(self.model_dump()))

    @property
    def length(self) -> int:
        """Numbers of one node in all."""
        return sum(block.length for block in self.blocks)


def canonical(values: Any) -> bytes:
    """Write JSON values in the one form that is hashed and signed."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@dataclass(frozen=True)
class Advert:
    """A node's beginning of a session.

    Attributes:
        id: id of the node.
        channel, mask: its ephemeral public keys: for encrypted shares, and for pairwise masks.
        commitment: SHA-256 of the seed of its own mask, by which the server finds a wrong share.
        contributes: for each block, whether numbers of the node's clients are in it.
        signature: by the node's key, over all of this and the session.

    """

    id: str
    channel: bytes
    mask: bytes
    commitment: str
    contributes: tuple[bool, ...]
    signature: str = ""

    def content(self, session: Session) -> bytes:
        """Return what is signed."""
        return canonical(["keys", session.digest, {**self.to_json(), "signature": ""}])

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        values = {**asdict(self), "contributes": list(self.contributes)}
        return {**values, "channel": keys.encode(self.channel), "mask": keys.encode(self.mask)}

    @classmethod
    def read(cls, values: object, session: Session) -> "Advert":
        """Read an advert as it came in a message.

        Raises:
            SessionMismatchError: it is none of this session.

        """
        names = {"id", "channel", "mask", "commitment", "contributes", "signature"}
        if not isinstance(values, Mapping) or values.keys() != names:
            raise SessionMismatchError("a node's keys came without all their parts")
        flags = values["contributes"]
        if not isinstance(flags, list) or [type(one) for one in flags] != [bool] * len(session.blocks):
            raise SessionMismatchError("a node's keys are for other numbers than the session's")
        texts = {name: str(values[name])[:300] for name in ("id", "commitment", "signature")}
        channel, mask = (keys.decode(values[name], keys.KEY_BYTES) for name in ("channel", "mask"))
        return cls(texts["id"], channel, mask, texts["commitment"], tuple(flags), texts["signature"])


def commit(session: Session, id_: str, seed: bytes) -> str:
    """Return the commitment of a node to the seed of its own mask."""
    return keys.hash_text(b"seed", session.digest.encode(), id_.encode(), seed)


def number_shares(ids: Collection[str]) -> dict[str, int]:
    """Return the number of the share of each node, from 1, in the order of the ids."""
    return {id_: number for number, id_ in enumerate(sorted(ids), start=1)}


def count_threshold(share: float, n: int) -> int:
    """Return the number of nodes whose shares are enough: more than `share` of n."""
    return min(n, math.floor(share * n) + 1)


def survivors_content(
    session: Session, adverts: Mapping[str, Advert], shared: Collection[str], survivors: Collection[str]
) -> bytes:
    """Return what a node signs about the survivors, with all that it saw before."""
    seen = keys.hash_text(*(canonical(adverts[id_].to_json()) for id_ in sorted(adverts)))
    return canonical(["survivors", session.digest, seen, sorted(shared), sorted(survivors)])


def check_members(
    session: Session, adverts: Mapping[str, Advert], ids: Collection[str], least: int, threshold: int
) -> None:
    """Check that a sum over some nodes tells nothing about one of them.

    Args:
        session: the session.
        adverts: what the nodes said at the beginning.
        ids: the nodes.
        least: nodes that each block needs, if it has any.
        threshold: nodes whose shares are enough.

    Raises:
        TooFewParticipantsError: these are too few.

    """
    needed = max(least, threshold)
    if len(ids) < needed:
        raise TooFewParticipantsError(f"{len(ids)} nodes are left, and this node demands {needed}")
    for number, block in enumerate(session.blocks):
        n = sum(adverts[id_].contributes[number] for id_ in ids)
        if 0 < n < least:
            raise TooFewParticipantsError(
                f"{n} nodes have clients in the {block.what} of round {session.parts[block.part].round}, and this node "
                f"demands {least} (`min-participants`); sample more clients (--cohort)"
            )


def check_signatures(
    members: Mapping[str, keys.Member], signatures: Mapping[str, object], ids: Sequence[str], content: bytes
) -> set[str]:
    """Check the signatures of some nodes over the same content; return the nodes that signed it.

    Args:
        members: the nodes of the roster.
        signatures: id -> signature, as they came.
        ids: nodes whose signatures count.
        content: what was signed.

    Raises:
        BadSignatureError: a signature does not fit, or is of another node.

    """
    for id_, signature in signatures.items():
        if id_ not in ids or id_ not in members:
            raise BadSignatureError("a signature is of a node that does not count")
        keys.verify(members[id_], signature, content)
    return set(signatures)
