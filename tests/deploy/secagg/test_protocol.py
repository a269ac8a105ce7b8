"""The protocol without a network: sums, drop-outs, and every way in which a malicious server or node is refused."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="a real federation needs Flower, and pycryptodome comes with it")

from fedattune.deploy.secagg import (
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
from fedattune.deploy.secagg.ring import Fixed
from fedattune.deploy.secagg.session import Advert, Block, NodeSession, ServerSession, Session, SessionPart, SumRules

KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(6)]
MEMBERS = {
    (id_ := keys.make_id(key.public_key())): keys.Member(id_, f"node-{i}", key.public_key())
    for i, key in enumerate(KEYS)
}


def make_session(length: int = 40, **changes: Any) -> Session:
    values: dict[str, Any] = {
        "token": "00", "algorithm": "fedavg", "seed": 0, "model": "m", "round": 3, "number": [1, 7],
        "bits": 24, "clip": 16.0, "nodes": 5,
        "parts": [SessionPart(kind="train", round=3, digest="0" * 64)],
        "blocks": [Block(part=0, what="upload", length=length)],
    }  # fmt: skip
    return Session(**{**values, **changes})


def make_rules(i: int, roster: Mapping[str, keys.Member] = MEMBERS, least: int = 3) -> SumRules:
    return SumRules(KEYS[i], roster, least, 2 / 3)


@dataclass
class Play:
    """A session of some nodes in this process; `lie` may change what the server hands to a node in a step."""

    session: Session = field(default_factory=make_session)
    rules: list[SumRules] = field(default_factory=lambda: [make_rules(i) for i in range(5)])
    lie: Callable[[str, int, Any], Any] = lambda step, node, content: content
    contributes: Callable[[int], tuple[bool, ...]] = lambda node: (True,)

    def __post_init__(self) -> None:
        self.server = ServerSession(self.session)
        self.nodes: dict[int, NodeSession] = {}

    def id(self, i: int) -> str:
        return self.rules[i].id

    def agree(self, who: Iterable[int]) -> None:
        for i in who:
            self.nodes[i], advert = NodeSession.begin(self.session, self.contributes(i), self.rules[i])
            self.server.add_advert(advert.to_json())

    def share(self, who: Iterable[int]) -> None:
        adverts = [advert.to_json() for advert in self.server.adverts.values()]
        for i in who:
            told = self.nodes[i].share(self.lie("shares", i, [dict(one) for one in adverts]), self.rules[i])
            self.server.add_shares(self.id(i), told["threshold"], told["shares"])

    def collect(self, who: Iterable[int], numbers: Mapping[int, Fixed]) -> None:
        for i in who:
            # Between two messages a node's state is on its disk.
            node = self.nodes[i] = NodeSession.from_json(self.nodes[i].to_json())
            node.open(self.lie("masked", i, self.server.select_shares(self.id(i))), self.rules[i])
            self.server.add_masked(self.id(i), node.hide(numbers[i], self.id(i)))

    def sign(self, who: Iterable[int]) -> None:
        for i in who:
            node = self.nodes[i] = NodeSession.from_json(self.nodes[i].to_json())
            lists = self.lie("survivors", i, [list(self.server.survivors), list(self.server.dropped)])
            self.server.signatures[self.id(i)] = node.sign_survivors(*lists, self.rules[i])

    def unmask(self, who: Iterable[int]) -> None:
        for i in who:
            node = NodeSession.from_json(self.nodes[i].to_json())
            told = node.reveal(self.lie("unmask", i, dict(self.server.signatures)), self.rules[i])
            assert not told["seeds"].keys() & told["keys"].keys()
            self.server.add_shares_of_masks(self.id(i), told["seeds"], told["keys"])

    def run(self, numbers: Mapping[int, Fixed], gone: tuple[set[int], ...] = ()) -> Fixed:
        """Go through all steps; `gone[k]` are the nodes that fall away before step k."""
        left = set(range(len(self.rules)))
        steps = [self.agree, self.share, lambda who: self.collect(who, numbers), self.sign, self.unmask]
        for k, step in enumerate(steps):
            left -= gone[k] if k < len(gone) else set()
            step(sorted(left))
        return self.server.finish()


def draw(n: int = 5, length: int = 40, seed: int = 0) -> dict[int, Fixed]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(-(2**40), 2**40, length) for i in range(n)}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(3, 6), st.lists(st.integers(-(2**50), 2**50), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_the_sum_of_any_numbers(n: int, first: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = {i: rng.permutation(np.array(first, dtype=np.int64)) * (i + 1) for i in range(n)}
    play = Play(make_session(len(first)), [make_rules(i) for i in range(n)])
    np.testing.assert_array_equal(play.run(numbers), sum(numbers.values()))


@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize("node", [0, 4])
def test_a_node_that_falls_away_at_any_step(step: int, node: int) -> None:
    numbers = draw()
    gone = tuple({node} if k == step else set[int]() for k in range(5))
    # Whose masked numbers arrived is in the sum, even if the node is gone afterwards.
    inside = [i for i in range(5) if i != node or step > 2]
    np.testing.assert_array_equal(Play().run(numbers, gone), sum(numbers[i] for i in inside))


@pytest.mark.parametrize("step", range(5))
def test_below_the_threshold_there_is_no_sum(step: int) -> None:
    gone = tuple({0, 1} if k == step else set[int]() for k in range(5))
    play = Play()
    if step == 0:  # three nodes are enough for a session of their own
        np.testing.assert_array_equal(play.run(draw(), gone), sum(draw()[i] for i in (2, 3, 4)))
        return
    with pytest.raises(TooFewParticipantsError, match=r"demands 4|4 are needed"):
        play.run(draw(), gone)


def test_the_server_sees_nothing_but_the_sum() -> None:
    length = 20_000
    numbers = {i: np.full(length, i + 1, dtype=np.int64) for i in range(5)}
    play = Play(make_session(length))
    play.run(numbers)
    for i in range(5):
        seen = play.server.masked[play.id(i)]
        bits = np.unpackbits(seen.view(np.uint8))
        # Of 1.28 million fair bits, the mean is within 5 deviations of 1/2.
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
        counts = np.bincount(seen.view(np.uint8), minlength=256)
        expected = 8 * length / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < 255 + 6 * np.sqrt(2 * 255)
        assert len(np.unique(seen)) == length  # equal numbers give different masked ones
    # The difference of two masked vectors tells nothing either: their masks differ.
    one, other = (play.server.masked[play.id(i)] for i in (0, 1))
    assert len(np.unique(one - other)) == length
    # Partial sums are still masked.
    part = sum((play.server.masked[play.id(i)] for i in range(4)), np.zeros(length, np.uint64))
    assert len(np.unique(part)) == length


# What a node refuses.


def expect(error: type[Exception], text: str, lie: Callable[[str, int, Any], Any], **parts: Any) -> None:
    play = Play(lie=lie, **parts)
    with pytest.raises(error, match=text):
        play.run(draw(len(play.rules)))
    assert issubclass(error, SecureAggregationError)


def only(step: str, change: Callable[[Any], Any]) -> Callable[[str, int, Any], Any]:
    """Change what one node is told in one step."""
    return lambda now, node, content: change(content) if (now, node) == (step, 1) else content


def test_too_few_participants() -> None:
    few = only("shares", lambda adverts: [a for a in adverts if a["id"] in {make_rules(i).id for i in (1, 2)}])
    expect(TooFewParticipantsError, "2 nodes are left, and this node demands 3", few)
    rules = [make_rules(i, least=5) for i in range(4)]
    expect(TooFewParticipantsError, "4 nodes are left, and this node demands 5", lambda *a: a[2], rules=rules)


def test_too_few_nodes_with_clients_in_a_sum() -> None:
    expect(
        TooFewParticipantsError,
        "1 nodes have clients in the upload of round 3",
        lambda *a: a[2],
        contributes=lambda node: (node == 2,),
    )


def change_advert(**changes: Any) -> Callable[[Any], Any]:
    return lambda adverts: [adverts[0], {**adverts[1], **changes}, *adverts[2:]]


def test_a_signature_that_does_not_fit() -> None:
    fresh = keys.encode(keys.make_pair()[1])
    # The man in the middle: a key of the server's own in place of another node's.
    own = lambda adverts: [{**adverts[0], "mask": fresh}, *adverts[1:]]  # noqa: E731
    expect(BadSignatureError, "the signature of node-0 does not fit", only("shares", own))


def test_keys_that_are_not_in_the_roster() -> None:
    stranger = make_rules(5)

    def join(adverts: list[Any]) -> list[Any]:
        _, advert = NodeSession.begin(make_session(), (True,), stranger)
        return [*adverts, advert.to_json()]

    known = {id_: one for id_, one in MEMBERS.items() if id_ != stranger.id}
    rules = [make_rules(i, known) for i in range(5)]
    expect(UnknownKeyError, "is not in this node's roster", only("shares", join), rules=rules)
    with pytest.raises(UnknownKeyError, match="own key is not in its roster"):
        NodeSession.begin(make_session(), (True,), make_rules(5, known))


@pytest.mark.parametrize("change", [{"number": [1, 6]}, {"round": 2}, {"clip": 8.0}, {"token": "11"}])
def test_keys_of_another_session(change: dict[str, Any]) -> None:
    _, old = NodeSession.begin(make_session(**change), (True,), make_rules(0))
    replay = only("shares", lambda adverts: [old.to_json(), *adverts[1:]])
    expect(BadSignatureError, "the signature of node-0 does not fit", replay)


def test_keys_twice_or_changed() -> None:
    twice = only("shares", lambda adverts: [*adverts, adverts[0]])
    expect(ReplayedKeysError, "there twice", twice)
    same = only("shares", lambda adverts: [{**adverts[0], "mask": adverts[2]["mask"]}, *adverts[1:]])
    expect(ReplayedKeysError, "there twice", same)
    fresh = keys.encode(keys.make_pair()[1])
    expect(ReplayedKeysError, "own keys came back changed", only("shares", change_advert(channel=fresh)))
    gone = only("shares", lambda adverts: [adverts[0], *adverts[2:]])
    expect(ReplayedKeysError, "own keys came back changed, or not at all", gone)


def test_a_share_that_was_changed_or_swapped() -> None:
    def flip(shares: dict[str, str]) -> dict[str, str]:
        sender = next(iter(shares))
        content = bytearray(keys.decode(shares[sender]))
        content[-1] ^= 1
        return {**shares, sender: keys.encode(bytes(content))}

    def swap(shares: dict[str, str]) -> dict[str, str]:
        one, other, *_ = shares
        return {**shares, one: shares[other], other: shares[one]}

    expect(TamperedShareError, "changed on its way", only("masked", flip))
    expect(TamperedShareError, "changed on its way", only("masked", swap))
    foreign = only("masked", lambda shares: {**shares, "0" * 64: "AAAA"})
    expect(TamperedShareError, "not in the session", foreign)


def test_survivors_that_contradict_each_other() -> None:
    me = make_rules(1).id
    both = only("survivors", lambda lists: [lists[0], [lists[0][0]]])
    expect(SurvivorsError, "twice in the lists", both)
    missing = only("survivors", lambda lists: [lists[0][:-1] if lists[0][-1] != me else lists[0][1:], lists[1]])
    expect(SurvivorsError, "other nodes than those that sent shares", missing)
    without = only("survivors", lambda lists: [[one for one in lists[0] if one != me], [me]])
    expect(SurvivorsError, "other nodes than those that sent shares", without)


def test_no_node_helps_with_two_lists_of_survivors() -> None:
    """The attack: half of the nodes hear that a node survived, half that it fell away; both masks would come off."""
    victim = 4
    play = Play(rules=[make_rules(i) for i in range(5)])
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(5), draw())
    everybody = sorted(play.id(i) for i in range(5))
    others = [id_ for id_ in everybody if id_ != play.id(victim)]
    signed = {play.id(i): play.nodes[i].sign_survivors(everybody, [], play.rules[i]) for i in (0, 1)}
    signed_others = {play.id(i): play.nodes[i].sign_survivors(others, [play.id(victim)], play.rules[i]) for i in (2, 3)}
    for signatures, i in ((signed, 0), (signed_others, 2)):
        with pytest.raises(TooFewParticipantsError, match="2 nodes signed the survivors"):
            play.nodes[i].reveal(signatures, play.rules[i])
        with pytest.raises(BadSignatureError):
            play.nodes[i].reveal(signed | signed_others, play.rules[i])
    with pytest.raises(SessionMismatchError, match="unmask comes next"):  # a second list
        play.nodes[0].sign_survivors(others, [play.id(victim)], play.rules[0])


def test_steps_come_once_and_in_order() -> None:
    play = Play()
    play.agree(range(5))
    with pytest.raises(SessionMismatchError, match="asks for unmask, and shares comes next"):
        play.nodes[0].reveal({}, play.rules[0])
    play.share(range(5))
    with pytest.raises(SessionMismatchError, match="asks for shares, and masked comes next"):
        play.nodes[0].share([], play.rules[0])


@pytest.mark.parametrize(
    "change",
    [{"modulus": 32}, {"bits": 0}, {"clip": float("nan")}, {"nodes": 50}, {"round": "3"}, {"version": 2}, {"more": 1}],
)
def test_sessions_that_no_node_knows(change: dict[str, Any]) -> None:
    with pytest.raises(SessionMismatchError, match="is none that this node knows"):
        Session.read(make_session().model_dump() | change)


@pytest.mark.parametrize(
    "change", [{"contributes": [True, True]}, {"contributes": [1]}, {"mask": "AAAA"}, {"mask": "?"}, {"more": 1}]
)
def test_adverts_that_are_none(change: dict[str, Any]) -> None:
    _, advert = NodeSession.begin(make_session(), (True,), make_rules(0))
    with pytest.raises(SessionMismatchError):
        Advert.read(advert.to_json() | change, make_session())


def test_a_key_of_low_order_is_refused() -> None:
    with pytest.raises(SessionMismatchError, match="no usable point"):
        keys.agree(keys.make_pair()[0], bytes(32))


# What the server refuses.


def test_the_server_finds_wrong_shares() -> None:
    play = Play()
    numbers = draw()
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(4), numbers)
    play.sign(range(4))
    wrong = NodeSession.from_json(play.nodes[0].to_json())
    wrong.shares = {id_: (seed[::-1], key) for id_, (seed, key) in wrong.shares.items()}
    play.nodes[0] = wrong
    play.unmask(range(4))
    with pytest.raises(SecureAggregationError, match="wrong share of a seed"):
        play.server.finish()


def test_the_server_takes_shares_for_all_others_only() -> None:
    play = Play()
    play.agree(range(5))
    told = play.nodes[0].share([a.to_json() for a in play.server.adverts.values()], play.rules[0])
    for threshold, shares in ((4, {}), (1, told["shares"]), (6, told["shares"]), ("4", told["shares"])):
        with pytest.raises(SessionMismatchError):
            play.server.add_shares(play.id(0), threshold, shares)
    with pytest.raises(SessionMismatchError, match="has sent its own"):
        play.server.add_advert(play.server.adverts[play.id(0)].to_json())
    with pytest.raises(SessionMismatchError, match="expected 40 of uint64"):
        play.server.add_masked(play.id(0), np.zeros(39, np.uint64))
