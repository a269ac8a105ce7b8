"""Whole runs with one lying node: what it can spoil, who is named, and what the server refuses to take as a sum."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import Federation, Result
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.deploy.secagg import ClipRangeError, ImpossibleSumError, keys
from fedattune.deploy.secagg.layout import COUNTS, SCORE_NUMBERS, SCORED, check_scores, check_upload, pack_upload
from fedattune.deploy.secagg.ring import Fixed, quantize
from fedattune.deploy.secagg.runtime import SecureSteps
from fedattune.deploy.secagg.session import Block, NodeSession, Parcel, Session, SessionPart, SumRules
from fedattune.training.backends.message import WorkerMessage
from flower.runs import read_log, run_secure

FIVE = ([0, 3], [1], [2], [4], [5])
"""Clients of five nodes, of which four are enough for a sum; node-4 is malicious."""

RUN: dict[str, Any] = {"cohort": 1.0, "rounds": 2, "eval_every": 2, "algorithms": "fedavg", "groups": FIVE}

SIZES = [10, 20, 30]
TENSORS = {"params/w": torch.zeros(2), "params/b": torch.zeros(1)}


def find_malicious(folder: Path) -> str:
    """Return the id of node-4."""
    return next(id_ for id_, one in keys.read_roster(folder / "keys/roster.pub").items() if one.name == "node-4")


def run_with_malicious_node(ragged: Federation, folder: Path) -> Result:
    (result,) = run_secure(ragged, folder, **RUN)
    return result


# Numbers that no honest nodes have.


def lie_by(change: Callable[[Fixed], None], folder: Path) -> Callable[[NodeSession, Fixed, str], Any]:
    """Let node-4 change what it adds to the sum of round 1."""
    honest = NodeSession.hide

    def hide(self: NodeSession, numbers: Fixed, me: str) -> Any:
        if me == find_malicious(folder) and self.session.round == 1:
            change(numbers)
        return honest(self, numbers, me)

    return hide


def make_large(numbers: Fixed) -> None:
    numbers[len(COUNTS)] += round(2e7 * numbers[:2].max() * 2**24)


def make_few(numbers: Fixed) -> None:
    numbers[1] = -1000


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (make_large, r"the mean of params/\S+ over 6 clients has the absolute value .*e\+0\d, expected 4096 at most"),
        (make_few, "the number of training samples is -?[0-9]+ in the sum, expected "),
    ],
)
def test_a_sum_that_is_impossible_is_rejected(
    change: Callable[[Fixed], None], text: str, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeSession, "hide", lie_by(change, tmp_path))
    result = run_with_malicious_node(ragged, tmp_path)
    faults = result.store.faults()
    assert {(r, client) for r, client, _ in faults} == {(1, client) for client in range(6)}
    assert all("a sum does not tell which" in why for _, _, why in faults)
    (line,) = [note for note in result.notes if "round 1: the sum is rejected" in note]
    assert re.search(text, line), line
    assert result.history[-1]["received"]["acc_uniform"] > 0  # round 2 goes on as if nobody had answered


def test_a_lie_within_the_clip_passes(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says: one node can move the mean anywhere from -secure-clip to secure-clip."""

    def shift(numbers: Fixed) -> None:
        numbers[len(COUNTS)] += round(1000 * sum(ragged.sizes("train").tolist()) * 2**24)

    monkeypatch.setattr(NodeSession, "hide", lie_by(shift, tmp_path))
    assert not run_with_malicious_node(ragged, tmp_path).store.faults()


def test_masked_numbers_of_another_type_cost_their_node_only(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SecureSteps.answer

    def answer(self: SecureSteps, message: WorkerMessage, work: Any) -> WorkerMessage:
        reply = honest(self, message, work)
        if "masked" in reply.tensors and self._rules.id == find_malicious(tmp_path):
            reply.tensors["masked"] = reply.tensors["masked"].bfloat16()  # which NumPy does not know
        return reply

    monkeypatch.setattr(SecureSteps, "answer", answer)
    result = run_with_malicious_node(ragged, tmp_path)
    assert result.is_finished
    faults = result.store.faults()
    assert {client for _, client, _ in faults} == {5}
    assert all("sent masked numbers of type torch.bfloat16, expected" in why for _, _, why in faults)


# Shares that do not fit.


def test_a_node_with_wrong_shares_is_named_and_the_sum_is_opened(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = NodeSession.reveal

    def reveal(self: NodeSession, signatures: object, rules: SumRules) -> Any:
        told = honest(self, signatures, rules)
        if rules.id == find_malicious(tmp_path):
            told["seed"] = dict.fromkeys(told["seed"], keys.encode(bytes(32)))
        return told

    monkeypatch.setattr(NodeSession, "reveal", reveal)
    result = run_with_malicious_node(ragged, tmp_path)
    assert not result.store.faults()
    named = [note for note in result.notes if "gave a wrong share of the seed of node 'node-" in note]
    assert named
    assert all(": node 'node-4' gave" in note for note in named)


@pytest.mark.parametrize("is_all", [False, True])
def test_a_node_with_bad_encrypted_shares_is_left_out(
    is_all: bool, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = NodeSession._pack

    def pack(self: NodeSession, seed: bytes, key: bytes, receiver: str, rules: SumRules) -> Parcel:
        malicious = find_malicious(tmp_path)
        chosen = sorted(set(rules.roster) - {malicious})
        if rules.id == malicious and receiver in (chosen if is_all else chosen[:1]):
            parcel = honest(self, seed, key, receiver, rules).model_copy(update={"text": "AAAA"})
            content = parcel.content(self.session, rules.id, receiver)
            return parcel.model_copy(update={"signature": keys.sign(rules.key, content)})
        return honest(self, seed, key, receiver, rules)

    monkeypatch.setattr(NodeSession, "_pack", pack)
    result = run_with_malicious_node(ragged, tmp_path)
    faults = result.store.faults()
    assert {client for _, client, _ in faults} == {5}
    assert all("node 'node-4' is left out of the sum: node 'node-" in why for _, _, why in faults)
    assert not any("no sum" in line for line in read_log(tmp_path))


# The checks by themselves.


def make_session(nodes: int = 3, clip: float = 4.0) -> Session:
    return Session(
        token="00", algorithm="fedavg", seed=0, model="m", configuration="c" * 64, round=1, number=[1, 1], bits=24,
        clip=clip, nodes=nodes,
        parts=[SessionPart(kind="train", round=1, digest="0" * 64)],
        blocks=[Block(part=0, what="upload", length=len(COUNTS) + 3)],
    )  # fmt: skip


def add_up(rows: list[list[float]], sizes: list[int], weighting: str) -> Fixed:
    weights = np.array(sizes if weighting == "samples" else [1] * len(sizes))
    values = weights @ quantize(np.array(rows).reshape(len(sizes), -1), 24, 4.0)
    return np.concatenate([np.array([len(sizes), sum(sizes), len(sizes), 9, 3 - len(sizes)]), values])


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["samples", "uniform", "sum"]), st.integers(1, 3))
def test_every_sum_of_honest_nodes_passes(data: st.DataObject, weighting: Any, n: int) -> None:
    value = st.one_of(st.floats(-4, 4), st.sampled_from([-4.0, 4.0]))
    rows = data.draw(st.lists(st.lists(value, min_size=3, max_size=3), min_size=n, max_size=n))
    sizes = data.draw(st.permutations(SIZES))[:n]
    check_upload(add_up(rows, sizes, weighting), {"params": weighting}, make_session(), TENSORS, SIZES, 3)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 4, "number of clients is 4 in the sum, expected 0 to 3"),
        (0, -1, "number of clients is -1"),
        (1, 59, "number of training samples is 59 in the sum, expected 60 to 60"),
        (1, -60, "number of training samples is -60"),
        (2, 4, "clients that trained is 4"),
        (2, 0, "clients that trained is 0 in the sum, expected 3 to 3"),
        (3, -1, "number of steps is -1"),
        (4, -1, "clients that diverged is -1"),
        (4, 1, "clients that diverged is 1 in the sum, expected 0 to 0"),
        (5, 60 * 4 * 2**24 + 1, r"mean of params/w over 3 clients has the absolute value 4, expected 4 at most"),
        (6, -(2**63), "absolute value 9.163e"),
        (7, 60 * round(2e7) * 2**24, r"mean of params/b over 3 clients has the absolute value 2e\+07, expected 4 at"),
    ],
)
def test_sums_that_no_honest_nodes_have(place: int, value: int, text: str) -> None:
    total = add_up([[1.0, 2.0, -4.0]] * 3, SIZES, "samples")
    check_upload(total, {"params": "samples"}, make_session(), TENSORS, SIZES, 3)
    total[place] = value
    with pytest.raises(ImpossibleSumError, match=text):
        check_upload(total, {"params": "samples"}, make_session(), TENSORS, SIZES, 3)


def test_no_clients_no_values() -> None:
    total = np.zeros(len(COUNTS) + 3, dtype=np.int64)
    check_upload(total, {"params": "samples"}, make_session(), TENSORS, SIZES, 3)
    total[-1] = 1
    with pytest.raises(ImpossibleSumError, match="over 0 clients"):
        check_upload(total, {"params": "samples"}, make_session(), TENSORS, SIZES, 3)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [(0, 4, "clients with scores"), (1, 5, "rows with scores"), (2, 61, "right predictions"), (3, -1, "sum of losses")],
)
def test_scores_that_no_honest_nodes_have(place: int, value: int, text: str) -> None:
    sizes: dict[Any, list[int]] = {"test": SIZES, "validation": [0, 0, 0]}
    total = np.zeros(SCORE_NUMBERS * len(SCORED["train"]), dtype=np.int64)
    total[:SCORE_NUMBERS] = 3, 60, 50, 7 << 24
    check_scores(total, "train", sizes)
    total[place] = value
    with pytest.raises(ImpossibleSumError, match=f"{text}.*: at least one node departs from the protocol"):
        check_scores(total, "train", sizes)
    total[:] = 0
    total[SCORE_NUMBERS] = 1  # no client has validation rows
    with pytest.raises(ImpossibleSumError, match="expected 0 to 0"):
        check_scores(total, "train", sizes)


@pytest.mark.parametrize(("n_train", "steps"), [([5, -3], 4), ([0, 5], 4), ([5, 3], -4)])
def test_a_node_does_not_send_counts_that_none_has(n_train: list[int], steps: int) -> None:
    reply = WorkerMessage({"ids": [0, 1], "n_trained": 2, "steps": steps, "diverged": []})
    reply.put("upload", Payload(Params(w=torch.ones(2, 2), b=torch.ones(2, 1))))
    with pytest.raises(ClipRangeError, match="expected none below 0"):
        pack_upload(reply, torch.tensor(n_train), {"params": "samples"}, make_session(), len(COUNTS) + 3)
