"""Runs whose clients are at workers in this process, and the comparison of two runs."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conformance.table import Case
from conformance.test_conformance import RUN
from fedattune import Federation, Result, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.core.options import build
from fedattune.data.federated import select_samples
from fedattune.models import make_model
from fedattune.models.files import wrap_model
from fedattune.runs.callbacks import OnRound
from fedattune.runs.context import RunContext
from fedattune.runs.folder import RunFolder
from fedattune.training.backends.remote import Group, Outcome, RemoteBackend
from fedattune.training.backends.worker import handle_message, open_backend
from fedattune.training.clients.state import PayloadFactory
from fedattune.training.loop import RoundLoop

WORKERS = ([0, 3], [1, 2, 4], [5])


class HereTransport:
    """Workers in this process, each with its own data, which see nothing but messages."""

    def __init__(self, context: RunContext) -> None:
        self.worker_clients = [torch.tensor(ids) for ids in WORKERS]
        self.backends = [
            open_backend(
                context.algorithm,
                select_samples(context.federation, np.array(ids)),
                context.task.model,
                context.settings,
                ids,
            )
            for ids in WORKERS
        ]

    def exchange(self, groups: Sequence[Group]) -> list[Outcome]:
        return [
            Outcome({worker: handle_message(self.backends[worker], one) for worker, one in group.items()})
            for group in groups
        ]


class Here(RemoteBackend):
    """A backend whose workers are in this process."""

    def __init__(self, context: RunContext, make_payload: PayloadFactory) -> None:
        super().__init__(context, make_payload, HereTransport(context))


class Normed(nn.Sequential):
    """A model with BatchNorm layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def trained(
    case: Case,
    federation: Federation,
    make_backend: Any,
    *,
    module: nn.Module | None = None,
    out: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Result:
    algorithm = build(case.name, ALGORITHMS[case.name], case.same)
    mine = Settings(**(RUN | settings))
    module = copy.deepcopy(module) or make_model("dnn", federation, options={"hidden": 6}, seed=mine.seed)
    if algorithm.network:
        module = wrap_model(algorithm.network, module, torch.zeros(2, *federation.input_shape), mine.seed)
    config = {"algorithm": case.name, "data": federation.name, **mine.to_keywords()}
    folder = RunFolder.open(out, config, resume=out.exists()) if out else None
    loop = RoundLoop(algorithm, federation, module, mine, config, folder, make_backend)
    return loop.run([OnRound(lambda _: stop())])


def same_numbers(
    one: Result, other: Result, points: tuple[str, ...] = ("received", "trained", "global"), *, measured: bool = True
) -> None:
    """The same numbers and notes; `measured`: the clients of both runs measured their mechanisms."""
    for a, b in zip(one.history, other.history, strict=True):
        for point in points:
            assert (a.get(point) is None) == (b.get(point) is None), point
            if a.get(point):
                assert b[point] == pytest.approx(a[point], abs=1e-12)
        for point, metrics in a["validation"].items():
            assert b["validation"][point] == pytest.approx(metrics, abs=1e-12)
        assert a["bytes"] == b["bytes"]
    assert list(one.mixing) == list(other.mixing)
    for r in one.mixing:
        for component, matrix in one.mixing[r].items():
            np.testing.assert_allclose(other.mixing[r][component], matrix, atol=1e-6)
    assert one.local_steps == other.local_steps
    if measured:
        assert [effect.mechanism for effect in one.effects] == [effect.mechanism for effect in other.effects]
        assert [e.value for e in one.effects] == pytest.approx([e.value for e in other.effects])
    notes = [[note for note in run.notes if measured or "this run is" not in note] for run in (one, other)]
    assert notes[0] == notes[1]
