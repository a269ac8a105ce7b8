"""The round loop: mixing matrices are computed once, and nothing else is sent or recorded than before."""

import copy
from typing import Any

import pytest
import torch

import fedattune
from fedattune import Algorithm, Broadcast, ConfigError, Federation, Participation, Payload, RunError, Settings
from fedattune.algorithms.fedmcsa import Attention
from fedattune.client import SGD
from fedattune.models import make_model
from fedattune.server import Average
from fedattune.training.backends.base import TrainRequest, find_rows
from fedattune.training.loop import RoundLoop

RUN: dict[str, Any] = {"rounds": 3, "steps": 2, "batch_size": 8, "lr": 0.1}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The clients of every broadcast."""
    found: list[list[int]] = []
    real = Attention.broadcast

    def broadcast(self: Attention, state: Any, ids: torch.Tensor) -> Broadcast:
        found.append(ids.tolist())
        return real(self, state, ids)

    monkeypatch.setattr(Attention, "broadcast", broadcast)
    return found


def make_loop(algorithm: Algorithm, federation: Federation, **settings: Any) -> RoundLoop:
    mine = Settings(**(RUN | settings))
    model = make_model("mlr", federation)
    return RoundLoop(algorithm, federation, model, mine, {"algorithm": "mine", **mine.to_keywords()})


@pytest.mark.parametrize("receive", ["cohort", "all", "answer"])
def test_matrices_are_computed_once_a_round(receive: Any, ragged: Federation, calls: list[list[int]]) -> None:
    """Evaluation, record and next round share one broadcast if they are about the same clients."""
    algorithm = Algorithm(SGD(), Attention("layer"), participation=Participation("all", receive))
    loop = make_loop(algorithm, ragged)
    everybody = list(range(ragged.n_clients))
    loop.run_round(1, should_evaluate=True)
    calls.clear()
    for r in (2, 3):
        loop.run_round(r, should_evaluate=True)
        assert calls == [everybody] * (r - 1)
    assert sorted(loop.store.mixing(ragged.n_clients)) == [1, 2, 3]


@pytest.mark.parametrize("receive", ["cohort", "all", "answer"])
@pytest.mark.parametrize("settings", [{}, {"cohort": 3}, {"cohort": 4, "drop_out": 0.4}, {"eval_clients": 2}])
def test_recorded_matrices_are_those_of_the_clients_that_uploaded(
    receive: Any, settings: dict[str, Any], ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit the matrices of the round's last broadcast, which is about the state after aggregation."""
    algorithm = Algorithm(SGD(), Attention("layer"), participation=Participation("cohort", receive))
    loop = make_loop(algorithm, ragged, **settings)
    uploaded: list[torch.Tensor] = []
    sent: list[Broadcast] = []
    aggregate_really, broadcast_really = Attention.aggregate, Attention.broadcast

    def aggregate(self: Attention, state: Any, ids: torch.Tensor, *rest: Any) -> Any:
        uploaded.append(ids)
        sent.clear()
        return aggregate_really(self, state, ids, *rest)

    def broadcast(self: Attention, state: Any, ids: torch.Tensor) -> Broadcast:
        sent.append(broadcast_really(self, state, ids))
        return sent[-1]

    monkeypatch.setattr(Attention, "aggregate", aggregate)
    monkeypatch.setattr(Attention, "broadcast", broadcast)
    for r in (1, 2, 3):
        uploaded.clear()
        sent.clear()
        loop.run_round(r, should_evaluate=True)
        if not uploaded:
            continue
        ids = uploaded[0]
        if "eval_clients" not in settings:  # else clients upload that are not evaluated
            assert len(sent) == 1  # the state after aggregation is mixed once
        made = sent[-1].mixing
        alone = broadcast_really(algorithm.server, copy.deepcopy(loop.server.state), ids).mixing
        assert made
        assert alone
        found = loop.store.mixing(ragged.n_clients).among(r)
        assert list(found.rows) == ids.tolist()
        assert list(found.columns) == alone.columns.tolist()
        rows = [made.rows.tolist().index(i) for i in found.rows]
        columns = [made.columns.tolist().index(i) for i in found.columns]
        for component, weights in made.weights.items():
            recorded = torch.from_numpy(found.weights[component].copy())
            assert torch.equal(recorded, weights[rows][:, columns].float())
            # Products of other shapes round otherwise.
            assert torch.allclose(recorded, alone.weights[component].float(), atol=1e-6)


def test_a_server_rule_that_sends_a_payload_alone_is_told_what_to_return(ragged: Federation) -> None:
    class Old(Average):
        def broadcast(self, state: Any, ids: Any) -> Payload:  # type: ignore[override]
            return Payload(state["w"].repeat(len(ids)))

    with pytest.raises(ConfigError, match=r"Old.broadcast: got Payload, expected a Broadcast; return Broadcast\("):
        fedattune.fit(ragged, Algorithm(SGD(), Old()), rounds=1)


def test_a_round_with_uploads_has_not_diverged(ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of trained clients may be a claim; an upload shows that somebody trained."""
    loop = make_loop(Algorithm(SGD(), Average("samples")), ragged)
    request = TrainRequest.draw(loop.context, 1, update_server=True, should_evaluate=False)
    reply = loop._train(request)._replace(n_trained=0, diverged=[0])
    monkeypatch.setattr(loop, "_train_chunk", lambda _: reply)
    assert loop._train(request) is reply
    reply = reply._replace(ids=reply.ids[:0])
    with pytest.raises(RunError, match="round 1: training diverged on every client"):
        loop._train(request)


def test_a_long_list_of_others_is_no_full_cohort() -> None:
    everybody = torch.arange(6)
    assert find_rows(everybody, everybody, 6) is None
    rows = find_rows(torch.tensor([1, 2, 4]), torch.zeros(6, dtype=torch.int64), 6)
    assert rows is not None
    assert not len(rows)
