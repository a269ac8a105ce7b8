"""Sessions of secure aggregation as pure functions, without a network: the agreement, the node, and the server."""

import json
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
    count_threshold,
    keys,
)
from .ring import Fixed, Ring, expand_mask

MAX_TRIES = 100
"""Choices of shares that the server tries for one secret, if a node's shares do not fit each other."""

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
    weight of each. Blocks are summed in their order, and none is there twice: the difference of two sums of one round
    over different nodes would be the numbers of one node.
    """

    version: Literal[1] = 1
    token: Text
    algorithm: Text
    seed: int
    model: Text
    configuration: Digest
    round: int
    number: list[int]
    modulus: Literal[64] = 64
    bits: Annotated[int, Field(ge=1, le=40)]
    clip: Annotated[float, Field(gt=0, le=2.0**40, strict=False)]
    nodes: Annotated[int, Field(ge=2, le=MAX_NODES)]
    parts: Annotated[list[SessionPart], Field(min_length=1)]
    blocks: list[Block]

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        parts = [(part.kind, part.round) for part in self.parts]
        blocks = [(block.part, block.what) for block in self.blocks]
        if len(set(parts)) < len(parts) or len(set(blocks)) < len(blocks):
            raise ValueError("the parts or blocks repeat a kind and round, expected each once")
        return self

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
        key: its public key, so that a server without a roster can check what it signs.
        channel, mask: its ephemeral public keys: for encrypted shares, and for pairwise masks.
        commitment: SHA-256 of the seed of its own mask, by which the server finds wrong shares.
        contributes: for each block, whether numbers of the node's clients are in it.
    """

    key: bytes
    channel: bytes
    mask: bytes
    commitment: str
    contributes: tuple[bool, ...]
    signature: str = ""

    @property
    def id(self) -> str:
        return keys.hash_text(self.key)

    def content(self, session: Session) -> bytes:
        return canonical(["keys", session.digest, {**self.to_json(), "signature": ""}])

    def to_json(self) -> dict[str, Any]:
        encoded = {name: keys.encode(getattr(self, name)) for name in ("key", "channel", "mask")}
        return {**asdict(self), **encoded, "contributes": list(self.contributes)}

    @classmethod
    def read(cls, values: object, session: Session) -> "Advert":
        names = {"key", "channel", "mask", "commitment", "contributes", "signature"}
        if not isinstance(values, Mapping) or values.keys() != names:
            raise SessionMismatchError("a node's keys came without all their parts")
        flags = values["contributes"]
        if not isinstance(flags, list) or [type(one) for one in flags] != [bool] * len(session.blocks):
            raise SessionMismatchError("a node's keys are for other numbers than the session's")
        key = keys.decode(str(values["key"])[:1000])
        texts = {name: str(values[name])[:300] for name in ("commitment", "signature")}
        channel, mask = (keys.decode(values[name], keys.KEY_BYTES) for name in ("channel", "mask"))
        return cls(key, channel, mask, texts["commitment"], tuple(flags), texts["signature"])


def has_repeats(adverts: Collection[Advert]) -> bool:
    """Tell whether a node or an ephemeral key is there twice."""
    ephemeral = {key for advert in adverts for key in (advert.channel, advert.mask)}
    return len({advert.id for advert in adverts}) < len(adverts) or len(ephemeral) < 2 * len(adverts)


class Parcel(_Part):
    """A node's shares for one node of the session, itself included.

    Attributes:
        text: the shares of its seed and of its mask key, encrypted.
        seed, key: SHA-256 of each of the two, by which a wrong one is found.
        signature: by the sender's key, so that a parcel that its receiver cannot use is the sender's, or was changed.
    """

    text: Annotated[str, Field(max_length=1000)]
    seed: Digest
    key: Digest
    signature: Text = ""

    @classmethod
    def read(cls, values: object) -> "Parcel":
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise TamperedShareError("an encrypted share came without all its parts") from error

    def content(self, session: Session, sender: str, receiver: str) -> bytes:
        values = self.model_dump(exclude={"signature"})
        return canonical(["share", session.digest, sender, receiver, values])


def hash_share(session: Session, what: str, owner: str, holder: str, share: bytes) -> str:
    """Return the hash of a node's share, `seed` or `key`. A share is 32 bytes that nobody can guess."""
    return keys.hash_text(b"share", what.encode(), session.digest.encode(), owner.encode(), holder.encode(), share)


def commit(session: Session, id_: str, seed: bytes) -> str:
    """Return the commitment of a node to the seed of its own mask."""
    return keys.hash_text(b"seed", session.digest.encode(), id_.encode(), seed)


def count_tolerated(share: float, n: int, min_nodes: int) -> int:
    """Return how many of n nodes may help a lying server, and it still learns nothing but sums over the others.

    The server chooses the nodes of a session, from `min_nodes` to n. Who knows all numbers of a sum but one knows that
    one, and 2t - n colluding nodes are enough to have two lists of survivors signed.
    """
    sizes = range(min_nodes, n + 1)
    return min([min_nodes - 2, *(2 * max(min_nodes, count_threshold(share, size)) - size - 1 for size in sizes)])


STEPS = ("keys", "shares", "masked", "survivors", "unmask")
"""The steps of a session in their order."""


@dataclass(frozen=True)
class SumRules:
    """A node's own rules, from its own configuration: its key, and the roster of all nodes by their ids.

    Every sum has at least `min_participants` nodes, and so many are needed to take off masks. These are also more than
    the share `threshold` of a session's nodes, which is at least 2/3.
    """

    key: EllipticCurvePrivateKey
    roster: Mapping[str, keys.Member]
    min_participants: int
    threshold: float

    @property
    def id(self) -> str:
        return keys.make_id(self.key.public_key())

    def count_needed(self, n: int) -> int:
        """Return how many of a session's n nodes are needed to take off masks, and in its sum."""
        return max(self.min_participants, count_threshold(self.threshold, n))

    def check_members(self, session: Session, adverts: Mapping[str, Advert], ids: Collection[str]) -> None:
        """Check that some of a session's nodes are enough for a sum that tells nothing about one of them."""
        needed, least = self.count_needed(len(adverts)), self.min_participants
        if len(ids) < needed:
            raise TooFewParticipantsError(f"{len(ids)} nodes are left, and this node demands {needed}")
        for number, block in enumerate(session.blocks):
            n = sum(adverts[id_].contributes[number] for id_ in ids)
            if 0 < n < least:
                raise TooFewParticipantsError(
                    f"{n} nodes have clients in the {block.what} of round {session.parts[block.part].round}, and this "
                    f"node demands {least} (`min-participants`); sample more clients (--cohort)"
                )


@dataclass
class NodeSession:
    """A node in a session, with the step that comes next.

    Attributes:
        channel, mask, seed: the ephemeral private keys, and the seed of the node's own mask.
        adverts: id -> what each node said at the beginning.
        shares: sender -> its shares of its seed and mask key for this node; None if they do not fit what it signed.
        survivors: the nodes whose masked numbers arrived, once the node has signed that.
    """

    session: Session
    step: str
    channel: bytes
    mask: bytes
    seed: bytes
    adverts: dict[str, Advert] = field(default_factory=dict)
    shares: dict[str, tuple[bytes, bytes] | None] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, session: Session, contributes: tuple[bool, ...], rules: SumRules) -> "tuple[NodeSession, Advert]":
        """Round 0: make the ephemeral keys, and sign them."""
        if rules.id not in rules.roster:
            raise UnknownKeyError("the node's own key is not in its roster; add the line of its keys/node-N.pub")
        (channel, channel_public), (mask, mask_public) = keys.make_pair(), keys.make_pair()
        state = cls(session, STEPS[1], channel, mask, os.urandom(keys.KEY_BYTES))
        own, commitment = keys.write_public(rules.key.public_key()), commit(session, rules.id, state.seed)
        advert = Advert(own, channel_public, mask_public, commitment, contributes)
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
        if has_repeats(adverts):
            raise ReplayedKeysError("a node or an ephemeral key is there twice")
        by_id = {advert.id: advert for advert in adverts}
        if by_id.get(rules.id) != self.adverts[rules.id]:
            raise ReplayedKeysError("the node's own keys came back changed, or not at all")
        for advert in adverts:
            if advert.id not in rules.roster:
                raise UnknownKeyError(
                    f"the key {advert.id[:16]} is not in this node's roster; add the line of its .pub, if the node "
                    "belongs to the federation"
                )
            keys.verify(rules.roster[advert.id], advert.signature, advert.content(self.session))
        rules.check_members(self.session, by_id, by_id)
        threshold = rules.count_needed(len(by_id))
        self.adverts, self.step = by_id, "masked"
        seeds, masks = (keys.split_secret(one, threshold, len(by_id)) for one in (self.seed, self.mask))
        pairs = zip(sorted(by_id), seeds, masks, strict=True)
        parcels = {id_: self._pack(seed, key, id_, rules) for id_, seed, key in pairs}
        return {"threshold": threshold, "shares": {id_: parcel.model_dump() for id_, parcel in parcels.items()}}

    def _pack(self, seed: bytes, key: bytes, receiver: str, rules: SumRules) -> Parcel:
        me = rules.id
        text = keys.encrypt(self._channel_key(me, receiver), seed + key, self._about(me, receiver))
        hashes = {
            what: hash_share(self.session, what, me, receiver, one) for what, one in (("seed", seed), ("key", key))
        }
        parcel = Parcel(text=text, **hashes)
        signature = keys.sign(rules.key, parcel.content(self.session, me, receiver))
        return parcel.model_copy(update={"signature": signature})

    def open(self, values: object, rules: SumRules) -> list[str]:
        """Round 2, before any training: open the shares; return the nodes whose shares do not fit what they signed.

        The node stays in the session with them: who is left out is the same for all, and the server's to say.
        """
        self._expect("masked")
        if not isinstance(values, Mapping) or not {rules.id} <= values.keys() <= self.adverts.keys():
            raise TamperedShareError("shares came of nodes that are not in the session, or not the node's own")
        rules.check_members(self.session, self.adverts, values)
        self.shares = {id_: self._unpack(Parcel.read(value), id_, rules) for id_, value in values.items()}
        return sorted(id_ for id_, pair in self.shares.items() if pair is None)

    def _unpack(self, parcel: Parcel, sender: str, rules: SumRules) -> tuple[bytes, bytes] | None:
        me, session = rules.id, self.session
        try:
            keys.verify(rules.roster[sender], parcel.signature, parcel.content(session, sender, me))
        except BadSignatureError as error:
            raise TamperedShareError(
                f"an encrypted share of {rules.roster[sender].name} was changed on its way, or is for another node: "
                "the server or somebody on the way did it, as the server takes no shares that their sender did not sign"
            ) from error
        plain = keys.decrypt(self._channel_key(me, sender), parcel.text, self._about(sender, me))
        if plain is None or len(plain) != 2 * keys.KEY_BYTES:
            return None
        seed, key = plain[: keys.KEY_BYTES], plain[keys.KEY_BYTES :]
        hashes = hash_share(session, "seed", sender, me, seed), hash_share(session, "key", sender, me, key)
        return (seed, key) if hashes == (parcel.seed, parcel.key) else None

    def hide(self, numbers: Fixed, me: str) -> Ring:
        """Round 2, after the training: add the node's own mask, and one mask for each other node."""
        self._expect("masked")
        if numbers.shape != (self.session.length,):
            raise SessionMismatchError(
                f"the node has {numbers.size} numbers to sum, and the session {self.session.length}"
            )
        total = numbers.view(np.uint64) + expand_own_mask(self.session, me, self.seed)
        for other in self.shares.keys() - {me}:
            mask = expand_mask(make_pair_key(self.session, me, other, self.mask, self.adverts[other].mask), total.size)
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
        if set(listed) != self.shares.keys() or rules.id not in survivors:
            raise SurvivorsError("the lists of survivors are of other nodes than those that sent shares")
        rules.check_members(self.session, self.adverts, survivors)
        self.survivors, self.step = sorted(survivors), "unmask"
        return keys.sign(rules.key, self._survivors_content())

    def reveal(self, signatures: object, rules: SumRules) -> dict[str, dict[str, str]]:
        """Round 4: give what takes off masks.

        These are the shares of survivors' seeds, those of dropped nodes' mask keys, and the own keys of the masks in
        common with dropped nodes. Their mask keys tell these, too; they serve if too few shares of a mask key fit.
        """
        self._expect("unmask")
        if not isinstance(signatures, Mapping):
            raise SurvivorsError("the signatures of the survivors are none")
        content = self._survivors_content()
        for id_, signature in signatures.items():
            if id_ not in self.survivors or id_ not in rules.roster:
                raise BadSignatureError("a signature is of a node that does not count")
            keys.verify(rules.roster[id_], signature, content)
        threshold = rules.count_needed(len(self.adverts))
        if len(signatures) < threshold:
            raise TooFewParticipantsError(
                f"{len(signatures)} nodes signed the survivors, and this node demands {threshold}"
            )
        self.step = "done"
        me, dropped = rules.id, self.shares.keys() - set(self.survivors)
        fitting = {id_: pair for id_, pair in self.shares.items() if pair is not None}
        others = {id_: self.adverts[id_].mask for id_ in dropped}
        given = {
            "seed": {id_: fitting[id_][0] for id_ in fitting.keys() - dropped},
            "key": {id_: fitting[id_][1] for id_ in fitting.keys() & dropped},
            "pair": {id_: make_pair_key(self.session, me, id_, self.mask, key) for id_, key in others.items()},
        }
        return {what: {id_: keys.encode(one) for id_, one in values.items()} for what, values in given.items()}

    def _expect(self, step: str) -> None:
        if self.step != step:
            raise SessionMismatchError(f"the server asks for {step}, and {self.step} comes next")

    def _survivors_content(self) -> bytes:
        return describe_survivors(self.session, self.adverts, self.shares, self.survivors)

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
                "secrets": [keys.encode(one) for one in (self.channel, self.mask, self.seed)],
                "adverts": [advert.to_json() for advert in self.adverts.values()],
                "shares": {id_: pair and [keys.encode(one) for one in pair] for id_, pair in self.shares.items()},
                "survivors": self.survivors,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "NodeSession":
        values = json.loads(text)
        session = Session.read(values["session"])
        channel, mask, seed = map(keys.decode, values["secrets"])
        adverts = {(advert := Advert.read(one, session)).id: advert for one in values["adverts"]}
        shares = {id_: pair and (keys.decode(pair[0]), keys.decode(pair[1])) for id_, pair in values["shares"].items()}
        return cls(session, values["step"], channel, mask, seed, adverts, shares, values["survivors"])


def describe_survivors(
    session: Session, adverts: Mapping[str, Advert], shared: Collection[str], survivors: Collection[str]
) -> bytes:
    """Return what nodes sign about the survivors: all that they saw before, who sent shares, and who is left."""
    seen = keys.hash_text(*(canonical(adverts[id_].to_json()) for id_ in sorted(adverts)))
    return canonical(["survivors", session.digest, seen, sorted(shared), sorted(survivors)])


def expand_own_mask(session: Session, id_: str, seed: bytes) -> Ring:
    """Expand the mask that a node adds for itself."""
    return expand_mask(keys.derive(seed, "own mask", session.digest, id_), session.length)


def make_pair_key(session: Session, me: str, other: str, private: bytes, public: bytes) -> bytes:
    """Make the key of the mask that two nodes share: the one with the smaller id adds it, the other one subtracts."""
    return keys.derive(keys.agree(private, public), "pair mask", session.digest, *sorted((me, other)))


@dataclass
class ServerSession:
    """A session as the server sees it. A node whose reply is missing or wrong is left out from then on.

    Attributes:
        members: id -> name and public key of each node.
        adverts: id -> the keys of each node of round 0.
        thresholds: id -> shares that are enough for a node's secrets; the nodes of round 1.
        parcels: receiver -> sender -> encrypted shares.
        masked: id -> the masked numbers of each node of round 2.
        unfit: receiver -> senders whose shares do not fit what they signed, as the receiver says.
        signatures: id -> signature over the survivors.
        findings: what was found of nodes that depart from the protocol without harm to the sum.
    """

    session: Session
    members: dict[str, keys.Member] = field(default_factory=dict)
    adverts: dict[str, Advert] = field(default_factory=dict)
    thresholds: dict[str, int] = field(default_factory=dict)
    parcels: dict[str, dict[str, Parcel]] = field(default_factory=dict)
    masked: dict[str, Ring] = field(default_factory=dict)
    unfit: dict[str, set[str]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    _shares: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)  # kind and owner -> number -> share
    _pairs: dict[tuple[str, str], bytes] = field(default_factory=dict)  # dropped node and survivor -> key of their mask

    def add_advert(self, values: object, contributes: Sequence[bool], name: str) -> str:
        """Take a node's keys, with all that other nodes would leave the session for; return its id."""
        advert = Advert.read(values, self.session)
        member = keys.read_member(advert.key, name)
        _verify(member, advert.signature, advert.content(self.session))
        if advert.id in self.adverts:
            raise SessionMismatchError("sent the keys of a node that has sent its own")
        if has_repeats([*self.adverts.values(), advert]):
            raise ReplayedKeysError("sent an ephemeral key that is there twice")
        for public in (advert.channel, advert.mask):
            keys.agree(keys.make_pair()[0], public)
        if advert.contributes != tuple(contributes):
            raise SessionMismatchError("signed that its clients are in other sums than the server told it")
        self.adverts[advert.id], self.members[advert.id] = advert, member
        return advert.id

    def add_shares(self, id_: str, threshold: object, shares: object) -> None:
        n, least = len(self.adverts), count_threshold(0, len(self.adverts))
        if type(threshold) is not int or not least <= threshold <= n:
            raise SessionMismatchError(f"sent the threshold {threshold!r:.40}, expected {least} to {n}")
        if not isinstance(shares, Mapping) or shares.keys() != self.adverts.keys():
            raise SessionMismatchError("sent shares for other nodes than those of the session")
        parcels = {receiver: Parcel.read(one) for receiver, one in shares.items()}
        for receiver, parcel in parcels.items():
            _verify(self.members[id_], parcel.signature, parcel.content(self.session, id_, receiver))
        self.thresholds[id_] = threshold
        for receiver, parcel in parcels.items():
            self.parcels.setdefault(receiver, {})[id_] = parcel

    def select_shares(self, id_: str) -> dict[str, Any]:
        """Return the encrypted shares for a node, by sender."""
        return {sender: parcel.model_dump() for sender, parcel in self.parcels.get(id_, {}).items()}

    def add_masked(self, id_: str, numbers: Ring, unfit: object) -> None:
        if numbers.dtype != np.uint64 or numbers.shape != (self.session.length,):
            raise SessionMismatchError(
                f"sent {numbers.size} numbers of type {numbers.dtype}, expected {self.session.length} of uint64"
            )
        if not isinstance(unfit, list) or not set(map(str, unfit)) <= self.thresholds.keys() - {id_}:
            raise SessionMismatchError("sent no valid list of nodes whose shares do not fit")
        self.masked[id_], self.unfit[id_] = numbers, set(map(str, unfit))

    def leave_out_conflicts(self) -> dict[str, str]:
        """Leave out nodes until nobody says of another one that its shares do not fit; return id -> why.

        Of two such nodes at least one departs from the protocol. Who is in most conflicts goes first, and of two nodes
        the sender; so a malicious node costs its own numbers, or those of one other node.
        """
        left_out: dict[str, str] = {}
        while pairs := [
            (sender, one) for one in sorted(self.masked) for sender in self.unfit[one] & self.masked.keys()
        ]:
            partners: dict[str, set[str]] = {}
            for sender, receiver in pairs:
                partners.setdefault(sender, set()).add(receiver)
                partners.setdefault(receiver, set()).add(sender)
            senders = {sender for sender, _ in pairs}
            worst = max(sorted(partners), key=lambda id_: (len(partners[id_]), id_ in senders))
            told = "; ".join(
                f"{self.members[receiver].name} says that the share which {self.members[sender].name} signed for it "
                "does not fit"
                for sender, receiver in pairs
                if worst in (sender, receiver)
            )
            name, others = self.members[worst].name, [self.members[id_].name for id_ in sorted(partners[worst])]
            left_out[worst] = (
                f"is left out of the sum: {told}; either {name} departs from the protocol, or "
                f"{' and '.join(others)} {'does' if len(others) == 1 else 'do'}, and nothing tells which"
            )
            del self.masked[worst]
        return left_out

    @property
    def survivors(self) -> list[str]:
        return sorted(self.masked)

    @property
    def dropped(self) -> list[str]:
        """The nodes that sent shares, and whose masked numbers are not there or do not count."""
        return sorted(self.thresholds.keys() - self.masked.keys())

    def add_signature(self, id_: str, signature: object) -> None:
        """Take a node's signature of the survivors."""
        content = describe_survivors(self.session, self.adverts, self.thresholds, self.masked)
        _verify(self.members[id_], signature, content)
        self.signatures[id_] = str(signature)

    def add_shares_of_masks(self, id_: str, told: object) -> None:
        """Take what a node gives to take off masks: all that fits. An error says what does not."""
        given = told if isinstance(told, Mapping) else {}
        number = 1 + sorted(self.adverts).index(id_)
        wrong: list[str] = []
        for what, owners in (("seed", self.survivors), ("key", self.dropped), ("pair", self.dropped)):
            values = given.get(what)
            for owner in owners:
                if what != "pair" and owner in self.unfit[id_]:
                    continue
                try:
                    share = keys.decode(values.get(owner) if isinstance(values, Mapping) else None, keys.KEY_BYTES)
                except SessionMismatchError:
                    wrong.append(f"no share of the {what} of {self.members[owner].name}")
                    continue
                if what == "pair":
                    self._pairs[owner, id_] = share
                elif hash_share(self.session, what, owner, id_, share) == getattr(self.parcels[id_][owner], what):
                    self._shares.setdefault((what, owner), {})[number] = share
                else:
                    wrong.append(f"a wrong share of the {what} of {self.members[owner].name}")
        if wrong:
            rest = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise SessionMismatchError(f"gave {wrong[0]}{rest}: it departs from the protocol")

    def finish(self) -> Fixed:
        """Return the sum of the survivors' numbers."""
        total = np.zeros(self.session.length, dtype=np.uint64)
        for id_, numbers in self.masked.items():
            total += numbers
            total -= expand_own_mask(self.session, id_, self._find_seed(id_))
        for id_ in self.dropped:
            for other, key in self._find_pair_keys(id_).items():
                mask = expand_mask(key, self.session.length)
                # The survivor added the mask if its id is the smaller one.
                total = total - mask if other < id_ else total + mask
        return total.view(np.int64)

    def _find_seed(self, id_: str) -> bytes:
        commitment = self.adverts[id_].commitment
        n, needed = len(self._shares.get(("seed", id_), {})), self.thresholds[id_]
        if n < needed:
            raise TooFewParticipantsError(f"{n} nodes gave their shares, and {needed} are needed to take off the masks")
        seed = self._join("seed", id_, lambda secret: commit(self.session, id_, secret) == commitment)
        if seed is None:
            raise SecureAggregationError(self.findings[-1])
        return seed

    def _find_pair_keys(self, dropped: str) -> dict[str, bytes]:
        """Return the key of the mask that each survivor shares with a node that does not count."""
        public = self.adverts[dropped].mask
        private = self._join("key", dropped, lambda secret: keys.find_public(secret) == public)
        if private is not None:
            others = {id_: self.adverts[id_].mask for id_ in self.masked}
            return {id_: make_pair_key(self.session, dropped, id_, private, key) for id_, key in others.items()}
        if missing := [id_ for id_ in self.survivors if (dropped, id_) not in self._pairs]:
            raise TooFewParticipantsError(
                f"too few nodes gave a fitting share of the mask key of {self.members[dropped].name}, and "
                f"{self.members[missing[0]].name} did not tell the key that it has in common with it"
            )
        return {id_: self._pairs[dropped, id_] for id_ in self.masked}

    def _join(self, what: str, owner: str, fits: Callable[[bytes], bool]) -> bytes | None:
        """Join a node's shares; None if they are too few, or do not fit each other."""
        shares, needed = self._shares.get((what, owner), {}), self.thresholds[owner]
        if len(shares) < needed:
            return None
        choices, draw = [sorted(shares)[:needed]], random.Random(0)
        if len(shares) > needed:
            choices += [draw.sample(sorted(shares), needed) for _ in range(MAX_TRIES)]
        for tried, numbers in enumerate(choices):
            if fits(secret := keys.join_shares({number: shares[number] for number in numbers})):
                return secret
            if not tried:  # these are the shares that the owner signed
                self.findings.append(
                    f"{self.members[owner].name} signed shares of its {what} that do not fit each other: it departs "
                    "from the protocol"
                )
        return None


def _verify(member: keys.Member, signature: object, content: bytes) -> None:
    try:
        keys.verify(member, signature, content)
    except BadSignatureError as error:
        raise BadSignatureError("sent a signature that does not fit its key and what it signed") from error
