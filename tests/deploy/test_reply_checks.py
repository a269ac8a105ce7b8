"""Replies that are wrong: each is dropped, named, and changes nothing else."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from safetensors.torch import load_file

from fedattune import Federation, Result
from fedattune.training.backends.message import WorkerMessage
from flower.runs import find_models, read_log, run_deployed
from flower.spoiling import Spoil, changed, first, head, spoiling, whole


def move(parcel: WorkerMessage) -> None:
    parcel.tensors["upload/params/secret"] = parcel.tensors[first(parcel)]


def garbage(reply: Message) -> Message:
    reply.content = RecordDict({"head": ConfigRecord({"version": 1, "json": "{"})})
    return reply


def other_format(reply: Message) -> Message:
    reply.content["head"]["version"] = 99
    return reply


def error(reply: Message) -> Message:
    return Message(Error(2, "patient 17 is ill"), metadata=reply.metadata)


def scores(parcel: WorkerMessage) -> None:
    name = next(name for name in parcel.tensors if name.endswith("/correct"))
    parcel.tensors[name] = parcel.tensors[name] + 1000


def other_point(parcel: WorkerMessage) -> None:
    parcel.head["scores"][0][0] = "received"


def zipped(reply: Message) -> Message:
    """Bytes that NumPy takes for an archive."""
    arrays = reply.content.array_records["arrays"]
    name = next(iter(arrays))
    arrays[name] = Array(arrays[name].dtype, arrays[name].shape, arrays[name].stype, b"PK\x03\x04" + b"0" * 40)
    return reply


def deep(reply: Message) -> Message:
    reply.content["head"]["json"] = "[" * 100_000
    return reply


FAULTS: dict[str, tuple[Spoil, str]] = {
    "nan": (changed(whole(lambda v: v * float("nan"))), "uploaded values that are not finite"),
    "infinite": (changed(whole(lambda v: v / 0)), "uploaded values that are not finite"),
    "huge": (changed(whole(lambda v: v * 1e9)), "more than 5 times the usual norm"),
    "shape": (changed(whole(lambda v: v[:, :1])), "expected float64 of shape (3, 6, 5)"),
    "rows": (changed(whole(lambda v: v[:1])), "expected float64 of shape"),
    "type": (changed(whole(lambda v: v.float())), "is float32 of shape"),
    "name": (changed(move), "that only one side has: 'secret'"),
    "stale": (changed(head(round=1)), "replied for round 1, not {round}"),
    "other run": (changed(head(token="0" * 16)), "replied for token"),
    "clients": (changed(head(ids=[0, 1, 2])), "uploads for clients outside the cohort"),
    "others": (changed(head(refused=[99])), "names clients of other nodes"),
    "others alone": (changed(head(alone=[99])), "names clients of other nodes"),
    "steps": (changed(head(steps=-1)), "reports steps=-1"),
    "more steps": (changed(head(steps=2**70)), "reports steps=1180591620717411303424"),
    "fractions": (changed(head(diverged=[1.0])), "sent no valid list of clients"),
    "point": (changed(other_point), "sends scores of an unknown part"),
    "archive": (zipped, "sent no valid reply: its message is damaged"),
    "deep": (deep, "sent no valid reply: its message is damaged"),
    "nothing": (changed(head(ids=None)), "sent no valid list of clients"),
    "scores": (changed(scores), "sends impossible scores"),
    "garbage": (garbage, "sent no valid reply: its message is damaged"),
    "format": (other_format, "its message has version 99 of the format, expected 1;"),
    "error": (error, "failed (Flower's error code 2)"),
}


N_RUNS = 3
PER_RUN = -(-len(FAULTS) // N_RUNS)
"""Faults in a run, one in each round after the first; like ones are in different runs."""


@pytest.fixture(scope="module")
def lost(ragged: Federation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run in which these answers of the node do not arrive at all."""
    folder = tmp_path_factory.mktemp("lost")
    return spoil_rounds([], ragged, folder), folder


def spoil_rounds(spoils: Sequence[Spoil], federation: Federation, folder: Path) -> Result:
    """Train with one wrong answer in each round after the first; after these the answer does not arrive."""
    rounds = PER_RUN + 2
    grid = spoiling({r: lambda _: None for r in range(2, rounds)} | dict(enumerate(spoils, 2)))
    (result,) = run_deployed(federation, folder, algorithms="fedmcsa", make_grid=grid, cohort=1.0, rounds=rounds)
    assert result.rounds == rounds
    return result


@pytest.mark.parametrize("names", [tuple(FAULTS)[i::N_RUNS] for i in range(N_RUNS)], ids=", ".join)
def test_a_bad_answer_is_dropped_and_named(
    names: tuple[str, ...], ragged: Federation, tmp_path: Path, lost: tuple[Result, Path]
) -> None:
    """It changes nothing but what would miss without it: all other clients' models are as if it had not come."""
    result = spoil_rounds([FAULTS[name][0] for name in names], ragged, tmp_path)
    found = result.store.faults()
    assert [(r, client) for r, client, _ in found] == [(r, i) for r in range(2, PER_RUN + 2) for i in (1, 2, 4)]
    log = read_log(tmp_path)
    for r, name in enumerate(names, 2):
        reason = FAULTS[name][1].format(round=r)
        assert all(reason in why for at, _, why in found if at == r), name
        assert any(reason in sentence and f"round {r}" in sentence for sentence in log), name
        assert any(reason in note and "1, 2, 4" in note for note in result.notes), name
        assert result.history[r - 1]["absent"] == ["1", "2", "4"]
    assert "patient" not in (tmp_path / "log.txt").read_text() + str(result.notes)
    expected, folder = lost
    for client, file in find_models(tmp_path, "fedmcsa").items():
        other = load_file(find_models(folder, "fedmcsa")[client])
        assert all(torch.equal(v, other[k]) for k, v in load_file(file).items())
    assert result.metrics == expected.metrics


def test_one_bad_client_of_a_node_is_dropped_alone(ragged: Federation, tmp_path: Path) -> None:
    def poison(parcel: WorkerMessage) -> None:
        parcel.tensors[first(parcel)][1] = float("nan")

    (result,) = run_deployed(
        ragged, tmp_path, algorithms="fedavg", make_grid=spoiling({2: changed(poison)}), cohort=1.0
    )
    assert result.store.faults() == [(2, 2, "uploaded values that are not finite")]
    assert "round 2: client '2' uploaded values that are not finite; its upload is dropped" in read_log(tmp_path)
