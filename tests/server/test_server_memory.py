"""Memory of server rules besides their state and payloads: one layer of the cohort, and matrices of clients."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedattune import Params, Payload, ServerUpdate
from fedattune.algorithms.fedamp import AttentiveMixing, CosineMixing
from fedattune.algorithms.fedfomo import FedFomoServer
from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.fedopt import AdaptiveOptimizer
from fedattune.algorithms.igfl import GlobalUpdateWrapper, UpdateAttention
from fedattune.algorithms.mocha import TaskRelationship
from fedattune.algorithms.pfedla import HeurPFedLAServer, PFedLAServer
from fedattune.core import dense
from fedattune.core.payload import ServerState
from fedattune.server import Average, mixing

pytestmark = pytest.mark.usefixtures("unmeasured")

C = 10
LAYERS = 6
LAYER = 4 * (60 * 160 + 60)  # bytes of one layer of one model in float32
SEVERAL = 6 * LAYERS * 8 * C * C  # bytes of (C, C) matrices; far less than a layer of the cohort
PIECE = 2000
"""Values that are copied at a time here, in float64 where sums are; beside SEVERAL, two of them may be alive."""


class Live(TorchDispatchMode):
    """Records, after every operation, which storages that came into being since the start are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.history: list[dict[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {key(t) for t in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.known = {k: v for k, v in self.known.items() if not v[0].expired()}
        for t in tensors(out):
            if key(t) not in inputs:
                self.known[key(t)] = (StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes())
        self.history.append({k: size for k, (_, size) in self.known.items()})
        return out

    def extra(self, result: Any) -> int:
        """The most bytes at any time, without those that `result` is made of."""
        kept = {key(t) for t in tensors(result)}
        return max(sum(size for k, size in live.items() if k not in kept) for live in self.history)


def tensors(nest: Any) -> list[torch.Tensor]:
    return [t for t in _pytree.tree_leaves(nest) if isinstance(t, torch.Tensor)]


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def during(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result, the extra bytes, and the number of operations."""
    with Live() as live:
        result = work()
    return result, live.extra(result), live.calls


def model() -> Params:
    """Layers of equal size; their bias makes every component two tensors."""
    names = [f"{i}.{k}" for i in range(LAYERS) for k in ("weight", "bias")]
    return Params({k: torch.randn((60, 160) if "weight" in k else (60,)) for k in names})


def models(n: int) -> Params:
    return model().map(lambda a: torch.randn(n, *a.shape))


def after_a_round(rule: ServerUpdate, n: int, ids: torch.Tensor) -> ServerState:
    torch.manual_seed(0)
    state = rule.init(model(), n)
    sent = rule.broadcast(state, ids).payload
    return rule.aggregate(state, ids, sent, uploads(sent, ids), torch.ones(len(ids), dtype=torch.int64))


def uploads(sent: Payload, ids: torch.Tensor) -> Payload:
    """New models, and what clients of `FedFomoServer` tell beside."""
    extra = {"affinity": Params(a=sent.extra["numbers"]["peer"].double())} if "numbers" in sent.extra else {}
    return Payload(models(len(ids)), extra)


RULES: list[ServerUpdate] = [
    Attention("layer"),
    Attention("model", pool="all"),
    Attention("tensor", size_weighted=True),
    AttentiveMixing(),
    AttentiveMixing(unit="layer", sigma=1e-12, distance="absolute"),
    CosineMixing("layer"),
    CosineMixing(),
    PFedLAServer(embedding=2, hidden=3),
    PFedLAServer(unit="model", norm="relu_sum", embedding=2, hidden=3),
    HeurPFedLAServer(embedding=2, hidden=3),
    HeurPFedLAServer(upload_retained=False, embedding=2, hidden=3),
    UpdateAttention(attention="self"),
    UpdateAttention(attention="global"),
    UpdateAttention(attention="time", form="T1"),
    UpdateAttention(attention="time", form="T3"),
    Average(),
    AdaptiveOptimizer(),
    GlobalUpdateWrapper(Attention("layer")),
    TaskRelationship(omega="learned"),
    FedFomoServer(models=3),
]
rules = pytest.mark.parametrize("rule", RULES, ids=str)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces that are copied are small beside these layers, as they are beside real ones."""
    monkeypatch.setattr(dense, "BLOCK_VALUES", PIECE)
    monkeypatch.setattr(dense, "MIN_BLOCK_COLUMNS", 8)
    monkeypatch.setattr(sys.modules[PFedLAServer.__module__], "BLOCK_WEIGHTS", 200)
    monkeypatch.setattr(mixing, "BLOCK_CLIENTS", C)


@rules
@pytest.mark.usefixtures("small_pieces")
def test_everybody_takes_part(rule: ServerUpdate) -> None:
    """A layer of all is a view of the bank, so what is left are matrices, and one tensor of differences."""
    ids = torch.arange(C)
    state = after_a_round(rule, C, ids)
    shared = {key(t) for t in tensors(state)}
    sent, extra, _ = during(lambda: rule.broadcast(state, ids).payload)
    assert extra <= SEVERAL + 16 * PIECE
    if not isinstance(rule, Average | AdaptiveOptimizer):
        assert not shared & {key(t) for t in tensors(sent.params)}
    received, n = uploads(sent, ids), torch.ones(C, dtype=torch.int64)
    _, extra, _ = during(lambda: rule.aggregate(state, ids, sent, received, n))
    one_model = LAYERS * LAYER  # of methods that have a global model
    assert (
        extra
        <= C * LAYER
        + 6 * one_model * isinstance(rule, Average | AdaptiveOptimizer | GlobalUpdateWrapper)
        + SEVERAL
        + 16 * PIECE
    )


@rules
def test_as_many_operations_for_twice_the_clients(rule: ServerUpdate) -> None:
    """Nobody goes through clients one by one, let alone pairs of them."""
    counts = []
    for n in (C, 2 * C):
        ids = torch.arange(n)
        state = after_a_round(rule, n, ids)
        sent, _, calls = during(lambda ids=ids, state=state: rule.broadcast(state, ids).payload)  # type: ignore[misc]
        received = uploads(sent, ids)
        ones = torch.ones(n, dtype=torch.int64)
        _, _, more = during(
            lambda ids=ids, state=state, sent=sent, received=received, ones=ones: rule.aggregate(  # type: ignore[misc]
                state, ids, sent, received, ones
            )
        )
        counts.append((calls, more))
    assert counts[0] == counts[1]
