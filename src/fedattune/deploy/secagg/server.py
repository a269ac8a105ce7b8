"""The server's side of a session, without a network: it collects each step's replies, and takes masks off the sum."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from . import keys
from .errors import SecureAggregationError, SessionMismatchError, TooFewParticipantsError
from .node import expand_own_mask, expand_pair_mask
from .ring import Fixed, Ring
from .session import Advert, Session, commit, number_shares


@dataclass
class ServerSession:
    """A session as the server sees it. A node whose reply is missing or wrong is left out from then on.

    Attributes:
        session: what all nodes agree on.
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
    _revealed: dict[str, dict[str, dict[int, bytes]]] = field(
        default_factory=lambda: {"seeds": {}, "keys": {}}
    )

    def add_advert(self, values: object) -> str:
        """Take a node's keys; return its id.

        Raises:
            SessionMismatchError: they are none, or another node has this id.

        """
        advert = Advert.read(values, self.session)
        if advert.id in self.adverts:
            raise SessionMismatchError("sent the keys of a node that has sent its own")
        self.adverts[advert.id] = advert
        return advert.id

    def add_shares(self, id_: str, threshold: object, shares: object) -> None:
        """Take the encrypted shares of a node.

        Raises:
            SessionMismatchError: they are not for all other nodes.

        """
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
        return {
            sender: text for sender, text in self.encrypted.get(id_, {}).items() if sender in self.thresholds
        }

    def add_masked(self, id_: str, numbers: Ring) -> None:
        """Take the masked numbers of a node.

        Raises:
            SessionMismatchError: they have another type or length.

        """
        if numbers.dtype != np.uint64 or numbers.shape != (self.session.length,):
            raise SessionMismatchError(
                f"sent {numbers.size} numbers of type {numbers.dtype}, expected {self.session.length} of uint64"
            )
        self.masked[id_] = numbers

    @property
    def survivors(self) -> list[str]:
        """The nodes whose masked numbers arrived."""
        return sorted(self.masked)

    @property
    def dropped(self) -> list[str]:
        """The nodes that sent shares, and no masked numbers."""
        return sorted(self.thresholds.keys() - self.masked.keys())

    def add_shares_of_masks(self, id_: str, seeds: object, mask_keys: object) -> None:
        """Take the shares that a node gives of the survivors' seeds and of the dropped nodes' mask keys.

        Raises:
            SessionMismatchError: they are of other nodes.

        """
        number = number_shares(self.adverts)[id_]
        expected = {"seeds": self.survivors, "keys": self.dropped}
        for what, values in (("seeds", seeds), ("keys", mask_keys)):
            if not isinstance(values, Mapping) or sorted(values) != expected[what]:
                raise SessionMismatchError(f"sent shares of {what} of other nodes")
            for owner, text in values.items():
                share = keys.decode(text, keys.KEY_BYTES)
                self._revealed[what].setdefault(owner, {})[number] = share

    def finish(self) -> Fixed:
        """Return the sum of the survivors' numbers.

        Raises:
            TooFewParticipantsError: there are too few shares of a secret; nothing can be computed then.
            SecureAggregationError: a node gave a wrong share.

        """
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
