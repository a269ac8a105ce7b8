"""Lanes of clients, and the batches of a group of lanes."""

from typing import Any

import pytest
import torch
from engine_rounds import NETWORKS, make_clients, train_round
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedattune.client import SGD
from fedattune.core.hardware import use_threads
from fedattune.core.task import Task
from fedattune.data import federation_from
from fedattune.engine import vectorized
from fedattune.engine.runner import BatchSequence, batch_indices, pack_lanes
from fedattune.engine.vectorized import VectorizedEngine


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), st.integers(1, 4))
def test_lanes_train_every_client_once_and_finish_with_the_longest(counts: list[int], at_once: int) -> None:
    groups = pack_lanes(counts, at_once)
    every = [lane for lanes in groups for lane in lanes.clients]
    assert sorted(i for lane in every for i in lane) == [i for i, n in enumerate(counts) if n]
    for lanes in groups:
        assert lanes.steps == max(sum(counts[i] for i in lane) for lane in lanes.clients)
        assert lanes.steps < max(counts) + sum(counts) / len(every) + 1
        assert sum(len(at) for at in lanes.switches.values()) == sum(len(lane) for lane in lanes.clients)
    assert len(groups) == min(at_once, len(every))
    assert max(len(lanes.clients) for lanes in groups) - min(len(lanes.clients) for lanes in groups) <= 1


def test_a_short_batch_is_padded_and_a_lane_with_nothing_left_repeats_its_last_step() -> None:
    import numpy as np

    batches = [np.arange(6).reshape(3, 1, 2), np.array([[[7]], [[8]]])]
    index = batch_indices(pack_lanes([3, 2])[0], batches)
    assert index[:, 1, 0].tolist() == [[7, -1], [8, -1], [8, -1]]


def test_all_steps_of_a_group_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    run = BatchSequence.run

    def counted(self: BatchSequence, step: Any, ready: Any, moving: Any, first: int, last: int) -> Any:
        calls.append((first, last))
        return run(self, step, ready, moving, first, last)

    monkeypatch.setattr(BatchSequence, "run", counted)
    task, data = Task(NETWORKS["mlp"]()), make_clients([40] * 6)
    with use_threads(2):
        engine = VectorizedEngine(task, data)
        train_round(engine, task, 6, SGD(), steps=50)
    assert calls == [(0, 50)] * 2
    assert all(step.is_scripted for step in engine._compiler._steps.values())


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("kind", ["label", "number", "class"])
def test_steps_of_several_targets_are_recorded_and_can_be_tried(
    kind: Any, is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def choose(what: str, sizes: Any, try_steps: Any, cores: int) -> int:
        try_steps()
        tried.append(cores)
        return 1

    monkeypatch.setattr(vectorized, "choose_threads", choose)
    torch.manual_seed(0)
    z = torch.randn(60, 6)
    y = {"label": z[:, :3] > 0, "number": z[:, :3], "class": (z[:, :3] > 0).long()}[kind]
    data = federation_from([(z[rows], y[rows]) for rows in torch.arange(60).split(15)], target_type=kind)
    heads: dict[str, nn.Module] = {"class": nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)))}
    task = Task(nn.Sequential(nn.Dropout(0.5 * is_random), heads.get(kind, nn.Linear(6, 3))))
    with use_threads(2):
        engine = VectorizedEngine(task, data)
        train_round(engine, task, 4, SGD(), steps=6)
    assert tried == [2] * is_random  # random steps run as one group, whose threads are tried
    assert all(step.operations and step.is_scripted for step in engine._compiler._steps.values())
