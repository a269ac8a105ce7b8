"""The protocol without a network: sums, drop-outs, and every way in which a malicious server or node is refused."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="a real federation needs Flower, and pycryptodome comes with it")

from fedattune.deploy.secagg import (
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
from fedattune.deploy.secagg.ring import Fixed, expand_mask
from fedattune.deploy.secagg.session import (
    Advert,
    Block,
    NodeSession,
    ServerSession,
    Session,
    SessionPart,
    SumRules,
    count_tolerated,
    expand_own_mask,
    hash_share,
    make_pair_key,
)

KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(10)]
MEMBERS = {
    (id_ := keys.make_id(key.public_key())): keys.Member(id_, f"node-{i}", key.public_key())
    for i, key in enumerate(KEYS)
}


def make_session(length: int = 40, **changes: Any) -> Session:
    values: dict[str, Any] = {
        "token": "00", "algorithm": "fedavg", "seed": 0, "model": "m", "configuration": "c" * 64,
        "round": 3, "number": [1, 7],
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
    accuse: Callable[[int, list[str]], list[str]] = lambda node, unfit: unfit

    def __post_init__(self) -> None:
        self.server = ServerSession(self.session)
        self.nodes: dict[int, NodeSession] = {}

    def id(self, i: int) -> str:
        return self.rules[i].id

    def agree(self, who: Iterable[int]) -> None:
        for i in who:
            self.nodes[i], advert = NodeSession.begin(self.session, self.contributes(i), self.rules[i])
            self.server.add_advert(advert.to_json(), self.contributes(i), f"node-{i}")

    def share(self, who: Iterable[int]) -> None:
        adverts = [advert.to_json() for advert in self.server.adverts.values()]
        for i in who:
            told = self.nodes[i].share(self.lie("shares", i, [dict(one) for one in adverts]), self.rules[i])
            self.server.add_shares(self.id(i), told["threshold"], told["shares"])

    def collect(self, who: Iterable[int], numbers: Mapping[int, Fixed]) -> None:
        for i in who:
            # Between two messages a node's state is on its disk.
            node = self.nodes[i] = NodeSession.from_json(self.nodes[i].to_json())
            unfit = node.open(self.lie("masked", i, self.server.select_shares(self.id(i))), self.rules[i])
            self.server.add_masked(self.id(i), node.hide(numbers[i], self.id(i)), self.accuse(i, unfit))

    def sign(self, who: Iterable[int]) -> None:
        for i in who:
            node = self.nodes[i] = NodeSession.from_json(self.nodes[i].to_json())
            lists = self.lie("survivors", i, [list(self.server.survivors), list(self.server.dropped)])
            self.server.add_signature(self.id(i), node.sign_survivors(*lists, self.rules[i]))

    def unmask(self, who: Iterable[int]) -> None:
        for i in who:
            node = NodeSession.from_json(self.nodes[i].to_json())
            told = node.reveal(self.lie("unmask", i, dict(self.server.signatures)), self.rules[i])
            assert not told["seed"].keys() & {*told["key"], *told["pair"]}
            self.server.add_shares_of_masks(self.id(i), told)

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
    few = only("shares", lambda adverts: [adverts[i] for i in (1, 2)])
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
    def flip(shares: dict[str, Any]) -> dict[str, Any]:
        sender = next(iter(shares))
        content = bytearray(keys.decode(shares[sender]["text"]))
        content[-1] ^= 1
        return {**shares, sender: shares[sender] | {"text": keys.encode(bytes(content))}}

    def swap(shares: dict[str, Any]) -> dict[str, Any]:
        one, other, *_ = shares
        return {**shares, one: shares[other], other: shares[one]}

    def other_hash(shares: dict[str, Any]) -> dict[str, Any]:
        return {id_: parcel | {"seed": "0" * 64} for id_, parcel in shares.items()}

    expect(TamperedShareError, "changed on its way", only("masked", flip))
    expect(TamperedShareError, "changed on its way", only("masked", swap))
    expect(TamperedShareError, "changed on its way", only("masked", other_hash))
    expect(TamperedShareError, "without all its parts", only("masked", lambda shares: dict.fromkeys(shares, "AAAA")))
    foreign = only("masked", lambda shares: {**shares, "0" * 64: "AAAA"})
    expect(TamperedShareError, "not in the session", foreign)
    own = make_rules(1).id
    without = only("masked", lambda shares: {id_: parcel for id_, parcel in shares.items() if id_ != own})
    expect(TamperedShareError, "or not the node's own", without)


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


def attack(n: int, colluding: int, groups: tuple[int, int]) -> bool:
    """Let a lying server and its nodes open one honest node's numbers by two lists of survivors; tell if they do.

    Args:
        groups: how many of the honest nodes hear that the victim survived, itself among them, and that it fell away.
    """
    play = Play(make_session(nodes=n), [make_rules(i) for i in range(n)])
    numbers = draw(n)
    play.agree(range(n))
    play.share(range(n))
    play.collect(range(n), numbers)
    victim, honest, bad = 0, range(n - colluding), range(n - colluding, n)
    everybody = sorted(map(play.id, range(n)))
    lists = {
        "seed": (everybody, list[str](), honest[: groups[0]]),
        "key": (
            [id_ for id_ in everybody if id_ != play.id(victim)],
            [play.id(victim)],
            honest[groups[0] : sum(groups)],
        ),
    }
    spoils: dict[str, dict[int, bytes]] = {"seed": {}, "key": {}}
    for what, (survivors, dropped, asked) in lists.items():
        signed = {play.id(i): play.nodes[i].sign_survivors(survivors, dropped, play.rules[i]) for i in asked}
        for i in bad:  # they sign each list, and give all that they hold
            copy = NodeSession.from_json(play.nodes[i].to_json())
            signed[play.id(i)] = copy.sign_survivors(survivors, dropped, play.rules[i])
        for i in (*asked, *bad):
            number = 1 + everybody.index(play.id(i))
            if i in bad:
                pair = play.nodes[i].shares[play.id(victim)]
                assert pair
                spoils[what][number] = pair[what == "key"]
                continue
            with suppress(TooFewParticipantsError):
                told = play.nodes[i].reveal(signed, play.rules[i])
                spoils[what][number] = keys.decode(told[what][play.id(victim)])
    threshold = play.server.thresholds[play.id(victim)]
    if min(map(len, spoils.values())) < threshold:
        return False
    seed, private = (keys.join_shares(dict(list(spoils[what].items())[:threshold])) for what in ("seed", "key"))
    me, found = play.id(victim), play.server.masked[play.id(victim)]
    found = found - expand_own_mask(play.session, me, seed)
    for other in everybody:
        if other != me:
            key = make_pair_key(play.session, me, other, private, play.server.adverts[other].mask)
            mask = expand_mask(key, found.size)
            found = found - mask if me < other else found + mask
    np.testing.assert_array_equal(found.view(np.int64), numbers[victim])
    return True


@pytest.mark.parametrize("n", [4, 5, 6, 7, 10])
def test_two_lists_open_a_node_with_one_more_colluding_node_than_the_page_says(n: int) -> None:
    tolerated = 2 * count_threshold(2 / 3, n) - n - 1
    first = count_threshold(2 / 3, n) - tolerated  # honest nodes that the first list needs; too few are left
    assert not attack(n, tolerated, (first, n - tolerated - first))
    assert not attack(n, tolerated, (first - 1, n - tolerated - first + 1))
    first -= 1
    assert attack(n, tolerated + 1, (first, n - tolerated - 1 - first))


def test_how_many_colluding_nodes_are_tolerated() -> None:
    """Two lists need t signatures each, of which the colluding nodes make all of theirs twice."""
    for n in range(3, MAX_NODES + 1):
        for share in (2 / 3, 0.8, 0.99):
            t = count_threshold(share, n)
            opens = [c for c in range(n) if any(a + c >= t and n - a >= t for a in range(1, n - c + 1))]
            assert min(opens, default=n) == max(2 * t - n, 0)
            # No more than n - 2: the sum of all but one honest node tells its numbers.
            assert count_tolerated(share, n, max(3, t)) == min(2 * t - n - 1, t - 2)
        assert count_tolerated(2 / 3, n, 3) == 1  # the server can make a session of three


def test_the_table_of_the_page() -> None:
    text = (Path(__file__).parents[3] / "docs/secure-aggregation.md").read_text(encoding="utf-8")
    table = text.partition("## Colluding nodes")[2].partition("\n## ")[0]
    rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", table, re.M)]
    assert len(rows) == 7
    for n, t, tolerated, may_drop in rows:
        assert (t, tolerated, may_drop) == (count_threshold(2 / 3, n), 2 * t - n - 1, n - t)
        assert count_tolerated(2 / 3, n, t) == tolerated  # with `min-participants` as the page says


def test_less_than_two_thirds_is_never_enough() -> None:
    """Half of 49 nodes were 25, and one colluding node was enough for the attack."""
    rules = [SumRules(KEYS[i], MEMBERS, 3, 0.5) for i in range(5)]
    play = Play(rules=rules)
    play.agree(range(5))
    play.share(range(5))
    assert set(play.server.thresholds.values()) == {4}
    assert count_threshold(0.5, 49) == 33


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


def unmask_all_but(play: Play, who: Iterable[int], malicious: Mapping[int, str]) -> None:
    """Take off the masks; of each malicious node, the server finds what the text says."""
    for i in who:
        if i not in malicious:
            play.unmask([i])
            continue
        with pytest.raises(SessionMismatchError, match=malicious[i]):
            play.unmask([i])


def reverse_shares(node: NodeSession) -> None:
    node.shares = {id_: pair and (pair[0][::-1], pair[1][::-1]) for id_, pair in node.shares.items()}


def test_wrong_shares_are_found_and_the_others_open_the_sum() -> None:
    play, numbers = Play(), draw()
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(5), numbers)
    play.sign(range(5))
    reverse_shares(play.nodes[3])
    # Four right shares of each seed are enough; node-3 is named, and its own numbers are in the sum.
    text = r"gave a wrong share of the seed of node-\d, and 4 more: it departs from the protocol"
    unmask_all_but(play, range(5), {3: text})
    np.testing.assert_array_equal(play.server.finish(), sum(numbers.values()))
    assert not play.server.findings


def test_one_wrong_share_of_many_costs_that_share_only() -> None:
    play, numbers = Play(), draw()
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(4), numbers)  # node-4 falls away, so that all other shares are needed for some secrets
    play.sign(range(4))
    victim = play.id(4)
    seed, _ = play.nodes[0].shares[victim] or (b"", b"")
    play.nodes[0].shares[victim] = (seed, bytes(32))
    unmask_all_but(play, range(4), {0: "gave a wrong share of the key of node-4: it departs"})
    # Three shares of the mask key of node-4 are too few: the survivors' own keys in common with it open the sum.
    np.testing.assert_array_equal(play.server.finish(), sum(numbers[i] for i in range(4)))


def test_too_many_wrong_shares_open_nothing_and_are_named() -> None:
    play = Play()
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(5), draw())
    play.sign(range(5))
    reverse_shares(play.nodes[0])
    reverse_shares(play.nodes[2])
    unmask_all_but(play, range(5), {0: "gave a wrong share", 2: "gave a wrong share"})
    with pytest.raises(TooFewParticipantsError, match="3 nodes gave their shares, and 4 are needed"):
        play.server.finish()


def test_a_node_without_its_shares_is_named() -> None:
    play, numbers = Play(), draw()
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(5), numbers)
    play.sign(range(5))
    play.nodes[1].shares = dict.fromkeys(play.nodes[1].shares)
    unmask_all_but(play, range(5), {1: "gave no share of the seed of node-"})
    np.testing.assert_array_equal(play.server.finish(), sum(numbers.values()))


def deal_wrongly(play: Play, dealer: int, receivers: Iterable[int], *, is_hashed: bool) -> None:
    """Let a node sign wrong shares for some nodes: with their own hashes, or behind those of the right ones."""
    rules, node, server = play.rules[dealer], play.nodes[dealer], play.server
    me = rules.id
    for receiver in map(play.id, receivers):
        right = server.parcels[receiver][me]
        text = keys.encrypt(node._channel_key(me, receiver), bytes(64), node._about(me, receiver))
        hashes = {what: hash_share(play.session, what, me, receiver, bytes(32)) for what in ("seed", "key")}
        wrong = right.model_copy(update={"text": text, **(hashes if is_hashed else {})})
        signature = keys.sign(rules.key, wrong.content(play.session, me, receiver))
        server.parcels[receiver][me] = wrong.model_copy(update={"signature": signature})


def test_a_node_whose_signed_shares_do_not_fit_each_other() -> None:
    play, numbers = Play(), draw()
    play.agree(range(5))
    play.share(range(5))
    deal_wrongly(play, 2, [min((0, 1, 3, 4), key=play.id)], is_hashed=True)
    play.collect(range(5), numbers)
    assert not play.server.leave_out_conflicts()
    play.sign(range(5))
    play.unmask(range(5))
    # Other choices of four shares do fit; whose shares they are is certain, as each one is signed.
    np.testing.assert_array_equal(play.server.finish(), sum(numbers.values()))
    (finding,) = play.server.findings
    assert finding == "node-2 signed shares of its seed that do not fit each other: it departs from the protocol"


def test_signed_shares_of_which_too_few_fit() -> None:
    play = Play()
    play.agree(range(5))
    play.share(range(5))
    deal_wrongly(play, 2, [0, 1], is_hashed=True)
    play.collect(range(5), draw())
    play.sign(range(5))
    play.unmask(range(5))
    with pytest.raises(SecureAggregationError, match="node-2 signed shares of its seed that do not fit each other"):
        play.server.finish()


@pytest.mark.parametrize("receivers", [(0,), (0, 1), (0, 1, 3, 4)])
def test_a_bad_encrypted_share_costs_its_sender(receivers: tuple[int, ...]) -> None:
    play, numbers = Play(), draw()
    play.agree(range(5))
    play.share(range(5))
    deal_wrongly(play, 2, receivers, is_hashed=False)
    play.collect(range(5), numbers)  # nobody leaves
    ((id_, why),) = play.server.leave_out_conflicts().items()
    assert id_ == play.id(2)
    for i in receivers:
        assert f"node-{i} says that the share which node-2 signed for it does not fit" in why
    assert "either node-2 departs from the protocol, or " in why
    left = [0, 1, 3, 4]
    play.sign(left)
    play.unmask(left)
    np.testing.assert_array_equal(play.server.finish(), sum(numbers[i] for i in left))


def test_a_node_that_accuses_all_others_is_left_out_itself() -> None:
    ids = [make_rules(i).id for i in range(5)]
    play = Play(accuse=lambda node, unfit: [id_ for id_ in ids if id_ != ids[3]] if node == 3 else unfit)
    numbers = draw()
    play.agree(range(5))
    play.share(range(5))
    play.collect(range(5), numbers)
    assert play.server.leave_out_conflicts().keys() == {ids[3]}
    left = [0, 1, 2, 4]
    play.sign(left)
    play.unmask(left)
    np.testing.assert_array_equal(play.server.finish(), sum(numbers[i] for i in left))


def test_the_server_refuses_what_other_nodes_would_leave_for() -> None:
    play = Play()
    play.agree(range(1, 5))
    _, advert = NodeSession.begin(play.session, (True,), play.rules[0])
    right = advert.to_json()

    def sign(**changes: Any) -> dict[str, Any]:
        forged = Advert.read({**right, **changes}, play.session)
        return {**forged.to_json(), "signature": keys.sign(KEYS[0], forged.content(play.session))}

    other = play.server.adverts[play.id(1)]
    for values, error, text in (
        ({**right, "signature": "AAAA"}, BadSignatureError, "sent a signature that does not fit"),
        ({**right, "key": keys.encode(other.key)}, BadSignatureError, "sent a signature that does not fit"),
        ({**right, "key": "AAAA"}, SessionMismatchError, "node-0 sent no public key"),
        (sign(mask=right["channel"]), ReplayedKeysError, "an ephemeral key that is there twice"),
        (sign(mask=keys.encode(other.mask)), ReplayedKeysError, "an ephemeral key that is there twice"),
        (sign(mask=keys.encode(bytes(32))), SessionMismatchError, "no usable point"),
        (sign(contributes=[False]), SessionMismatchError, "in other sums than the server told it"),
    ):
        with pytest.raises(error, match=text):
            play.server.add_advert(values, (True,), "node-0")
    play.server.add_advert(right, (True,), "node-0")
    play.nodes[0], advert = NodeSession.begin(play.session, (True,), play.rules[0])
    play.server.adverts[play.id(0)] = advert
    adverts = [one.to_json() for one in play.server.adverts.values()]
    told = play.nodes[0].share(adverts, play.rules[0])
    unsigned = {id_: parcel | {"signature": ""} for id_, parcel in told["shares"].items()}
    with pytest.raises(BadSignatureError, match="sent a signature that does not fit"):
        play.server.add_shares(play.id(0), told["threshold"], unsigned)
    assert not play.server.thresholds
    play.share(range(1, 5))
    play.collect(range(1, 5), draw())
    with pytest.raises(BadSignatureError, match="sent a signature that does not fit"):
        play.server.add_signature(play.id(1), "AAAA")


def test_the_server_takes_shares_for_all_nodes_only() -> None:
    play = Play()
    play.agree(range(5))
    told = play.nodes[0].share([a.to_json() for a in play.server.adverts.values()], play.rules[0])
    for threshold, shares in ((4, {}), (3, told["shares"]), (6, told["shares"]), ("4", told["shares"])):
        with pytest.raises(SessionMismatchError):
            play.server.add_shares(play.id(0), threshold, shares)
    with pytest.raises(SessionMismatchError, match="has sent its own"):
        play.server.add_advert(play.server.adverts[play.id(0)].to_json(), (True,), "node-0")
    with pytest.raises(SessionMismatchError, match="expected 40 of uint64"):
        play.server.add_masked(play.id(0), np.zeros(39, np.uint64), [])
    for unfit in (None, [play.id(0)], ["somebody"]):
        with pytest.raises(SessionMismatchError, match="no valid list of nodes"):
            play.server.add_masked(play.id(0), np.zeros(40, np.uint64), unfit)
