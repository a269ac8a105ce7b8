"""Sessions of secure aggregation as pure functions, without a network: the agreement, the node, and the server."""

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import (
    MAX_NODES,
    BadSignatureError,
    ReplayedKeysError,
    SecureAggregationError,
    SessionMismatchError,
    SurvivorsError,
    TamperedShareError,
    TooFewParticipantsError,
    UnknownKeyError,
    keys,
)
from .ring import Fixed, Ring, expand_mask

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
    """A session: one sum over nodes, on which all of them agree.

    `number` grows, and a node takes part in each session once. `modulus` counts the binary digits of the ring; `bits`
    and `clip` are the binary places and the largest absolute value of what is summed. The number of nodes bounds the
    weight of each. Blocks are summed in their order.
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
        return keys.hash_text(canonical(self.model_dump()))

    @property
    def length(self) -> int:
        return sum(block.length for block in self.blocks)


def canonical(values: Any) -> bytes:
    """Write JSON values in the one form that is hashed and signed."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@dataclass(frozen=True)
class Advert:
    """A node's beginning of a session, signed by its key together with the session.

    Attributes:
        channel, mask: its ephemeral public keys: for encrypted shares, and for pairwise masks.
        commitment: SHA-256 of the seed of its own mask, by which the server finds a wrong share.
        contributes: for each block, whether numbers of the node's clients are in it.
    """

    id: str
    channel: bytes
    mask: bytes
    commitment: str
    contributes: tuple[bool, ...]
    signature: str = ""

    def content(self, session: Session) -> bytes:
        return canonical(["keys", session.digest, {**self.to_json(), "signature": ""}])

    def to_json(self) -> dict[str, Any]:
        values = {**asdict(self), "contributes": list(self.contributes)}
        return {**values, "channel": keys.encode(self.channel), "mask": keys.encode(self.mask)}

    @classmethod
    def read(cls, values: object, session: Session) -> "Advert":
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


def count_threshold(share: float, n: int) -> int:
    """Return the number of nodes whose shares are enough: more than `share` of n."""
    return min(n, math.floor(share * n) + 1)


def check_members(
    session: Session, adverts: Mapping[str, Advert], ids: Collection[str], min_nodes: int, threshold: int
) -> None:
    """Check that some nodes are enough for a sum that tells nothing about one of them."""
    needed = max(min_nodes, threshold)
    if len(ids) < needed:
        raise TooFewParticipantsError(f"{len(ids)} nodes are left, and this node demands {needed}")
    for number, block in enumerate(session.blocks):
        n = sum(adverts[id_].contributes[number] for id_ in ids)
        if 0 < n < min_nodes:
            raise TooFewParticipantsError(
                f"{n} nodes have clients in the {block.what} of round {session.parts[block.part].round}, and this node "
                f"demands {min_nodes} (`min-participants`); sample more clients (--cohort)"
            )


STEPS = ("keys", "shares", "masked", "survivors", "unmask")
"""The steps of a session in their order."""


@dataclass(frozen=True)
class SumRules:
    """A node's own rules, from its own configuration: its key, and the roster of all nodes by their ids.

    Every sum has at least `min_participants` nodes. To take off masks, more than the share `threshold` of a session's
    nodes are needed; it is at least 1/2.
    """

    key: EllipticCurvePrivateKey
    roster: Mapping[str, keys.Member]
    min_participants: int
    threshold: float

    @property
    def id(self) -> str:
        return keys.make_id(self.key.public_key())


@dataclass
class NodeSession:
    """A node in a session, with the step that comes next.

    Attributes:
        channel, mask, seed: the ephemeral private keys, and the seed of the node's own mask.
        adverts: id -> what each node said at the beginning.
        own_shares, shares: the node's shares of its own seed and mask key, and id -> those of each other node.
        survivors: the nodes whose masked numbers arrived, once the node has signed that.
    """

    session: Session
    step: str
    channel: bytes
    mask: bytes
    seed: bytes
    adverts: dict[str, Advert] = field(default_factory=dict)
    own_shares: tuple[bytes, bytes] = (b"", b"")
    shares: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, session: Session, contributes: tuple[bool, ...], rules: SumRules) -> "tuple[NodeSession, Advert]":
        """Round 0: make the ephemeral keys, and sign them."""
        if rules.id not in rules.roster:
            raise UnknownKeyError("the node's own key is not in its roster; add the line of its keys/node-N.pub")
        (channel, channel_public), (mask, mask_public) = keys.make_pair(), keys.make_pair()
        state = cls(session, STEPS[1], channel, mask, os.urandom(keys.KEY_BYTES))
        commitment = commit(session, rules.id, state.seed)
        advert = Advert(rules.id, channel_public, mask_public, commitment, contributes)
        advert = replace(advert, signature=keys.sign(rules.key, advert.content(session)))
        state.adverts = {rules.id: advert}
        return state, advert

    def share(self, values: object, rules: SumRules) -> dict[str, Any]:
        """Round 1: check all nodes' keys, and encrypt shares of the own secrets for them.

        `threshold` is the number of shares that are enough; `shares` are by the id of the receiver.
        """
        self._expect("shares")
        if not isinstance(values, list) or len(values) > MAX_NODES:
            raise SessionMismatchError(f"a session has a list of {MAX_NODES} nodes at most")
        adverts = [Advert.read(one, self.session) for one in values]
        by_id = {advert.id: advert for advert in adverts}
        ephemeral = [key for advert in adverts for key in (advert.channel, advert.mask)]
        if len(by_id) < len(adverts) or len(set(ephemeral)) < len(ephemeral):
            raise ReplayedKeysError("a node or an ephemeral key is there twice")
        if by_id.get(rules.id) != self.adverts[rules.id]:
            raise ReplayedKeysError("the node's own keys came back changed, or not at all")
        for advert in adverts:
            if advert.id not in rules.roster:
                raise UnknownKeyError(
                    f"the key {advert.id[:16]} is not in this node's roster; add the line of its .pub, if the node "
                    "belongs to the federation"
                )
            keys.verify(rules.roster[advert.id], advert.signature, advert.content(self.session))
        threshold = count_threshold(rules.threshold, len(by_id))
        check_members(self.session, by_id, by_id, rules.min_participants, threshold)
        self.adverts, self.step = by_id, "masked"
        seeds, masks = (keys.split_secret(one, threshold, len(by_id)) for one in (self.seed, self.mask))
        pairs = dict(zip(sorted(by_id), zip(seeds, masks, strict=True), strict=True))
        self.own_shares = pairs.pop(rules.id)
        encrypted = {
            id_: keys.encrypt(self._channel_key(rules.id, id_), b"".join(pair), self._about(rules.id, id_))
            for id_, pair in pairs.items()
        }
        return {"threshold": threshold, "shares": encrypted}

    def open(self, values: object, rules: SumRules) -> None:
        """Round 2, before any training: open the shares of the other nodes."""
        self._expect("masked")
        if not isinstance(values, Mapping) or not values.keys() <= self.adverts.keys() - {rules.id}:
            raise TamperedShareError("shares came of nodes that are not in the session")
        ids = [*values, rules.id]
        threshold = count_threshold(rules.threshold, len(self.adverts))
        check_members(self.session, self.adverts, ids, rules.min_participants, threshold)
        for id_, text in values.items():
            plain = keys.decrypt(self._channel_key(rules.id, id_), text, self._about(id_, rules.id))
            if len(plain) != 2 * keys.KEY_BYTES:
                raise TamperedShareError("an encrypted share has another length")
            self.shares[id_] = plain[: keys.KEY_BYTES], plain[keys.KEY_BYTES :]

    def hide(self, numbers: Fixed, me: str) -> Ring:
        """Round 2, after the training: add the node's own mask, and one mask for each other node."""
        self._expect("masked")
        if numbers.shape != (self.session.length,):
            raise SessionMismatchError(
                f"the node has {numbers.size} numbers to sum, and the session {self.session.length}"
            )
        total = numbers.view(np.uint64) + expand_own_mask(self.session, me, self.seed)
        for other in self.shares:
            mask = expand_pair_mask(self.session, me, other, self.mask, self.adverts[other].mask)
            total = total + mask if me < other else total - mask
        self.step = "survivors"
        return total

    def sign_survivors(self, survivors: object, dropped: object, rules: SumRules) -> str:
        """Round 3, the check: sign who is left. The node signs one list and no other."""
        self._expect("survivors")
        if not isinstance(survivors, list) or not isinstance(dropped, list):
            raise SurvivorsError("the lists of survivors are none")
        listed = [str(id_) for id_ in (*survivors, *dropped)]
        if len(set(listed)) < len(listed):
            raise SurvivorsError("a node is twice in the lists of survivors")
        if set(listed) != {rules.id, *self.shares} or rules.id not in survivors:
            raise SurvivorsError("the lists of survivors are of other nodes than those that sent shares")
        threshold = count_threshold(rules.threshold, len(self.adverts))
        check_members(self.session, self.adverts, survivors, rules.min_participants, threshold)
        self.survivors, self.step = sorted(survivors), "unmask"
        return keys.sign(rules.key, self._survivors_content())

    def reveal(self, signatures: object, rules: SumRules) -> dict[str, dict[str, str]]:
        """Round 4: give the shares that take off masks: those of survivors' seeds, and of dropped nodes' mask keys."""
        self._expect("unmask")
        if not isinstance(signatures, Mapping):
            raise SurvivorsError("the signatures of the survivors are none")
        content = self._survivors_content()
        for id_, signature in signatures.items():
            if id_ not in self.survivors or id_ not in rules.roster:
                raise BadSignatureError("a signature is of a node that does not count")
            keys.verify(rules.roster[id_], signature, content)
        threshold = count_threshold(rules.threshold, len(self.adverts))
        if len(signatures) < threshold:
            raise TooFewParticipantsError(
                f"{len(signatures)} nodes signed the survivors, and this node demands {threshold}"
            )
        self.step = "done"
        shares = {rules.id: self.own_shares, **self.shares}
        return {
            "seeds": {id_: keys.encode(shares[id_][0]) for id_ in self.survivors},
            "keys": {id_: keys.encode(shares[id_][1]) for id_ in shares.keys() - set(self.survivors)},
        }

    def _expect(self, step: str) -> None:
        if self.step != step:
            raise SessionMismatchError(f"the server asks for {step}, and {self.step} comes next")

    def _survivors_content(self) -> bytes:
        """Return what the node signs about the survivors, with all that it saw before."""
        seen = keys.hash_text(*(canonical(self.adverts[id_].to_json()) for id_ in sorted(self.adverts)))
        shared = sorted({*self.shares, *self.survivors})
        return canonical(["survivors", self.session.digest, seen, shared, sorted(self.survivors)])

    def _channel_key(self, me: str, other: str) -> bytes:
        secret = keys.agree(self.channel, self.adverts[other].channel)
        return keys.derive(secret, "channel", self.session.digest, *sorted((me, other)))

    def _about(self, sender: str, receiver: str) -> bytes:
        return f"share {self.session.digest} {sender} {receiver}".encode()

    def to_json(self) -> str:
        """Write the state, with its secrets, for the next message."""
        return json.dumps(
            {
                "session": self.session.model_dump(),
                "step": self.step,
                "secrets": [keys.encode(one) for one in (self.channel, self.mask, self.seed, *self.own_shares)],
                "adverts": [advert.to_json() for advert in self.adverts.values()],
                "shares": {id_: [keys.encode(one) for one in pair] for id_, pair in self.shares.items()},
                "survivors": self.survivors,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "NodeSession":
        values = json.loads(text)
        session = Session.read(values["session"])
        channel, mask, seed, own_seed, own_key = map(keys.decode, values["secrets"])
        adverts = {one["id"]: Advert.read(one, session) for one in values["adverts"]}
        shares = {id_: (keys.decode(a), keys.decode(b)) for id_, (a, b) in values["shares"].items()}
        own, step, survivors = (own_seed, own_key), values["step"], values["survivors"]
        return cls(session, step, channel, mask, seed, adverts, own, shares, survivors)


def expand_own_mask(session: Session, id_: str, seed: bytes) -> Ring:
    """Expand the mask that a node adds for itself."""
    return expand_mask(keys.derive(seed, "own mask", session.digest, id_), session.length)


def expand_pair_mask(session: Session, me: str, other: str, private: bytes, public: bytes) -> Ring:
    """Expand the mask that two nodes share; the one with the smaller id adds it, the other one subtracts it."""
    secret = keys.agree(private, public)
    return expand_mask(keys.derive(secret, "pair mask", session.digest, *sorted((me, other))), session.length)


@dataclass
class ServerSession:
    """A session as the server sees it. A node whose reply is missing or wrong is left out from then on.

    Attributes:
        adverts: id -> the keys of each node of round 0.
        thresholds: id -> shares that are enough for a node's secrets; the nodes of round 1.
        encrypted: receiver -> sender -> encrypted shares.
        masked: id -> the masked numbers of each node of round 2.
        signatures: id -> signature over the survivors.
    """

    session: Session
    adverts: dict[str, Advert] = field(default_factory=dict)
    thresholds: dict[str, int] = field(default_factory=dict)
    encrypted: dict[str, dict[str, str]] = field(default_factory=dict)
    masked: dict[str, Ring] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    _revealed: dict[str, dict[str, dict[int, bytes]]] = field(default_factory=lambda: {"seeds": {}, "keys": {}})

    def add_advert(self, values: object) -> str:
        """Take a node's keys; return its id."""
        advert = Advert.read(values, self.session)
        if advert.id in self.adverts:
            raise SessionMismatchError("sent the keys of a node that has sent its own")
        self.adverts[advert.id] = advert
        return advert.id

    def add_shares(self, id_: str, threshold: object, shares: object) -> None:
        others = self.adverts.keys() - {id_}
        if type(threshold) is not int or not 1 < threshold <= len(self.adverts):
            raise SessionMismatchError(f"sent the threshold {threshold!r:.40}")
        if not isinstance(shares, Mapping) or shares.keys() != others:
            raise SessionMismatchError("sent shares for other nodes than those of the session")
        self.thresholds[id_] = threshold
        for receiver, text in shares.items():
            self.encrypted.setdefault(receiver, {})[id_] = str(text)[:1000]

    def select_shares(self, id_: str) -> dict[str, str]:
        """Return the encrypted shares for a node, by sender."""
        return {sender: text for sender, text in self.encrypted.get(id_, {}).items() if sender in self.thresholds}

    def add_masked(self, id_: str, numbers: Ring) -> None:
        if numbers.dtype != np.uint64 or numbers.shape != (self.session.length,):
            raise SessionMismatchError(
                f"sent {numbers.size} numbers of type {numbers.dtype}, expected {self.session.length} of uint64"
            )
        self.masked[id_] = numbers

    @property
    def survivors(self) -> list[str]:
        return sorted(self.masked)

    @property
    def dropped(self) -> list[str]:
        """The nodes that sent shares, and no masked numbers."""
        return sorted(self.thresholds.keys() - self.masked.keys())

    def add_shares_of_masks(self, id_: str, seeds: object, mask_keys: object) -> None:
        """Take the shares that a node gives of the survivors' seeds and of the dropped nodes' mask keys."""
        number = 1 + sorted(self.adverts).index(id_)
        expected = {"seeds": self.survivors, "keys": self.dropped}
        for what, values in (("seeds", seeds), ("keys", mask_keys)):
            if not isinstance(values, Mapping) or sorted(values) != expected[what]:
                raise SessionMismatchError(f"sent shares of {what} of other nodes")
            for owner, text in values.items():
                share = keys.decode(text, keys.KEY_BYTES)
                self._revealed[what].setdefault(owner, {})[number] = share

    def finish(self) -> Fixed:
        """Return the sum of the survivors' numbers."""
        total = np.zeros(self.session.length, dtype=np.uint64)
        for id_, numbers in self.masked.items():
            total += numbers
            seed = self._join("seeds", id_)
            if commit(self.session, id_, seed) != self.adverts[id_].commitment:
                raise SecureAggregationError("a node gave a wrong share of a seed")
            total -= expand_own_mask(self.session, id_, seed)
        for id_ in self.dropped:
            private = self._join("keys", id_)
            if keys.find_public(private) != self.adverts[id_].mask:
                raise SecureAggregationError("a node gave a wrong share of a mask key")
            for other in self.masked:
                mask = expand_pair_mask(self.session, id_, other, private, self.adverts[other].mask)
                # The survivor added the mask if its id is the smaller one.
                total = total - mask if other < id_ else total + mask
        return total.view(np.int64)

    def _join(self, what: str, id_: str) -> bytes:
        shares, needed = self._revealed[what].get(id_, {}), self.thresholds[id_]
        if len(shares) < needed:
            raise TooFewParticipantsError(
                f"{len(shares)} nodes gave their shares, and {needed} are needed to take off the masks"
            )
        return keys.join_shares(shares, needed)
