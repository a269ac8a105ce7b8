"""One node's side of a session, without a network: pure steps, whose state JSON can hold between two messages."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from . import keys
from .errors import (
    ReplayedKeysError,
    SessionMismatchError,
    SurvivorsError,
    TamperedShareError,
    TooFewParticipantsError,
    UnknownKeyError,
)
from .ring import Fixed, Ring, expand_mask
from .session import (
    MAX_NODES,
    Advert,
    Session,
    check_members,
    check_signatures,
    commit,
    count_threshold,
    number_shares,
    survivors_content,
)

STEPS = ("keys", "shares", "masked", "survivors", "unmask")
"""The steps of a session in their order."""


@dataclass(frozen=True)
class SumRules:
    """A node's own rules, from its own configuration.

    Attributes:
        key: the node's private key.
        roster: id -> node, for all nodes of the federation.
        min_participants: nodes in every sum, at least.
        threshold: share of the nodes of a session; more of them are needed to take off masks. Above 1/2.

    """

    key: EllipticCurvePrivateKey
    roster: Mapping[str, keys.Member]
    min_participants: int
    threshold: float

    @property
    def id(self) -> str:
        """The node's id."""
        return keys.make_id(self.key.public_key())


@dataclass
class NodeSession:
    """A node in a session.

    Attributes:
        session: what all nodes agree on.
        step: the step that comes next.
        channel, mask: the ephemeral private keys.
        seed: seed of the node's own mask.
        adverts: id -> what each node said at the beginning.
        own_shares: the node's shares of its own secrets: seed, mask key.
        shares: id -> the shares of the seed and of the mask key of each other node.
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
    def begin(
        cls, session: Session, contributes: tuple[bool, ...], rules: SumRules
    ) -> "tuple[NodeSession, Advert]":
        """Round 0: make the ephemeral keys, and sign them.

        Args:
            session: what the server says that all nodes agree on; the signature binds it.
            contributes: for each block, whether numbers of the node's clients are in it.
            rules: the node's own rules.

        Raises:
            UnknownKeyError: the node's own key is not in its roster.

        """
        if rules.id not in rules.roster:
            raise UnknownKeyError(
                "the node's own key is not in its roster; add the line of its keys/node-N.pub"
            )
        (channel, channel_public), (mask, mask_public) = keys.make_pair(), keys.make_pair()
        state = cls(session, STEPS[1], channel, mask, os.urandom(keys.KEY_BYTES))
        commitment = commit(session, rules.id, state.seed)
        advert = Advert(rules.id, channel_public, mask_public, commitment, contributes)
        advert = replace(advert, signature=keys.sign(rules.key, advert.content(session)))
        state.adverts = {rules.id: advert}
        return state, advert

    def share(self, values: object, rules: SumRules) -> dict[str, Any]:
        """Round 1: check all nodes' keys, and encrypt shares of the own secrets for them.

        Args:
            values: the adverts of all nodes, as they came.
            rules: the node's own rules.

        Returns:
            `threshold`, the number of shares that are enough, and `shares`: id -> encrypted shares.

        Raises:
            ReplayedKeysError, UnknownKeyError, BadSignatureError, TooFewParticipantsError: see there.
            SessionMismatchError: these are no adverts of this session.

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
        numbers = number_shares(by_id)
        pairs = list(
            zip(
                keys.split_secret(self.seed, threshold, len(by_id)),
                keys.split_secret(self.mask, threshold, len(by_id)),
                strict=True,
            )
        )
        self.own_shares = pairs[numbers[rules.id] - 1]
        encrypted = {
            id_: keys.encrypt(
                self._channel_key(rules.id, id_), b"".join(pairs[number - 1]), self._about(rules.id, id_)
            )
            for id_, number in numbers.items()
            if id_ != rules.id
        }
        return {"threshold": threshold, "shares": encrypted}

    def open(self, values: object, rules: SumRules) -> None:
        """Round 2, before any training: open the shares of the other nodes.

        Args:
            values: id of the sender -> encrypted shares, as they came.
            rules: the node's own rules.

        Raises:
            TamperedShareError, TooFewParticipantsError: see there.

        """
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
        """Round 2, after the training: add the node's own mask, and one mask for each other node.

        Args:
            numbers: the numbers of the session's blocks, one after the other.
            me: the node's id.

        """
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
        """Round 3, the check: sign who is left. The node signs one list and no other.

        Args:
            survivors: ids of the nodes whose masked numbers arrived, as they came.
            dropped: ids of the others that had sent shares.
            rules: the node's own rules.

        Raises:
            SurvivorsError: a node is in both lists or in none, or the node itself is not among the survivors.
            TooFewParticipantsError: see there.

        """
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
        """Round 4: give the shares that take off masks; of each node either that of the seed or that of the mask key.

        Args:
            signatures: id -> signature over the survivors, as they came.
            rules: the node's own rules.

        Returns:
            `seeds`: survivor -> share of its seed; `keys`: dropped node -> share of its mask key.

        Raises:
            BadSignatureError, TooFewParticipantsError: too few nodes signed the survivors that this node signed.

        """
        self._expect("unmask")
        if not isinstance(signatures, Mapping):
            raise SurvivorsError("the signatures of the survivors are none")
        signed = check_signatures(rules.roster, signatures, self.survivors, self._survivors_content())
        threshold = count_threshold(rules.threshold, len(self.adverts))
        if len(signed) < threshold:
            raise TooFewParticipantsError(
                f"{len(signed)} nodes signed the survivors, and this node demands {threshold}"
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
        return survivors_content(self.session, self.adverts, {*self.shares, *self.survivors}, self.survivors)

    def _channel_key(self, me: str, other: str) -> bytes:
        secret = keys.agree(self.channel, self.adverts[other].channel)
        return keys.derive(secret, "channel", self.session.digest, *sorted((me, other)))

    def _about(self, sender: str, receiver: str) -> bytes:
        return f"share {self.session.digest} {sender} {receiver}".encode()

    def to_json(self) -> str:
        """Write the state, with its secrets, for the next message."""
        values = {
            "session": self.session.model_dump(),
            "step": self.step,
            "secrets": [keys.encode(one) for one in (self.channel, self.mask, self.seed, *self.own_shares)],
            "adverts": [advert.to_json() for advert in self.adverts.values()],
            "shares": {id_: [keys.encode(one) for one in pair] for id_, pair in self.shares.items()},
            "survivors": self.survivors,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> "NodeSession":
        """Read what `to_json` wrote."""
        values = json.loads(text)
        session = Session.read(values["session"])
        channel, mask, seed, own_seed, own_key = map(keys.decode, values["secrets"])
        adverts = [Advert.read(one, session) for one in values["adverts"]]
        shares = {id_: (keys.decode(a), keys.decode(b)) for id_, (a, b) in values["shares"].items()}
        by_id = {advert.id: advert for advert in adverts}
        return cls(
            session,
            values["step"],
            channel,
            mask,
            seed,
            by_id,
            (own_seed, own_key),
            shares,
            values["survivors"],
        )


def expand_own_mask(session: Session, id_: str, seed: bytes) -> Ring:
    """Expand the mask that a node adds for itself."""
    return expand_mask(keys.derive(seed, "own mask", session.digest, id_), session.length)


def expand_pair_mask(session: Session, me: str, other: str, private: bytes, public: bytes) -> Ring:
    """Expand the mask that two nodes share; the one with the smaller id adds it, the other one subtracts it.

    Args:
        session: the session.
        me: id of the node whose private key is given.
        other: id of the other node.
        private: private mask key of the one.
        public: public mask key of the other.

    """
    secret = keys.agree(private, public)
    return expand_mask(keys.derive(secret, "pair mask", session.digest, *sorted((me, other))), session.length)
