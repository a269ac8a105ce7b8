"""Evaluation: the same scores whichever way was measured as the fastest, and blocks cut where a call costs less."""

from collections.abc import Callable, Mapping

import pytest
import torch
from engine_rounds import NETWORKS, make_clients

from fedattune.core.hardware import use_threads
from fedattune.core.params import Params
from fedattune.core.task import Task
from fedattune.engine import evaluator
from fedattune.engine.compiler.compile import Compiler
from fedattune.engine.evaluator import Evaluator, _group_by_size

SIZES = [900, 60, 500, 20, 61]


def _make(is_serial: bool = False) -> tuple[Evaluator, Params]:
    task = Task(NETWORKS["mlp"]())
    generator = torch.Generator().manual_seed(1)
    models = task.params.repeat(len(SIZES)).map(lambda a: torch.randn(a.shape, generator=generator))
    recorder = Compiler()
    return Evaluator(task, make_clients(SIZES), torch.float32, recorder, is_serial=is_serial), models


def _choose(wanted: str, asked: list[list[str]]) -> Callable[..., str]:
    def choose(what: str, sizes: tuple[int, ...], calls: Mapping[str, Callable[[], object]], min_gain: float) -> str:
        for call in calls.values():  # as if measured
            call()
        assert min_gain == 1.0
        assert what == f"evaluation {len(calls)} ways"  # cohorts with other ways make a choice of their own
        asked.append(list(calls))
        return wanted

    return choose


WAYS = [
    f"{way}, {threads}"
    for way in ("large parts alone", "blocks", "large parts in small batches")
    for threads in ("one thread", "all threads")
]


@pytest.mark.parametrize("limit", [0, 16])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_scores_of_one_model_after_the_other(
    way: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(len(SIZES))
    serial, models = _make(is_serial=True)
    (expected,) = serial.evaluate(models, Params(), ("test",), ids)
    asked: list[list[str]] = []
    monkeypatch.setattr(evaluator, "choose", _choose(way, asked))
    monkeypatch.setattr(Evaluator, "_samples_per_call", 5)
    with use_threads(2):
        quick, _ = _make()
    monkeypatch.setattr(evaluator, "MAX_COMPILED_BLOCKS", limit)
    monkeypatch.setattr(evaluator, "PLAIN_BATCH", 400)
    for _ in range(2):  # the second time, the samples are in memory
        (scores,) = quick.evaluate(models, Params(), ("test",), ids)
        assert torch.equal(scores.n, expected.n)
        assert torch.equal(scores.correct, expected.correct)
        torch.testing.assert_close(scores.loss, expected.loss, rtol=1e-5, atol=0)
        assert bool(quick._compiler._calls) == (limit > 0)
    assert asked == [WAYS]
    gathered = quick._cache["test",]
    assert bool(gathered.large_parts) == way.startswith("large parts")
    assert gathered.is_plain == way.startswith("large parts in small batches")
    assert gathered.threads == (1 if way.endswith("one thread") else 2)


def test_a_block_ends_where_its_padding_costs_more_than_a_call() -> None:
    sizes = [100, 96, 90, 50, 0, 49]
    assert _group_by_size(sizes, max_samples=1000, max_padding=20) == [[0, 1, 2], [3, 5]]
    assert _group_by_size(sizes, max_samples=1000, max_padding=0) == [[0], [1], [2], [3], [5]]
    assert _group_by_size(sizes, max_samples=200, max_padding=20) == [[0, 1], [2], [3, 5]]
