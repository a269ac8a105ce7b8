"""Memory of server rules besides their state and payloads: one layer of the cohort, and matrices of clients."""

import sys
from collections.abc import Callable
from typing import Any, cast

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
@pytest.mark.usefixtures("small_pieces")
def test_some_take_part(rule: ServerUpdate) -> None:
    """A rule gathers one layer of the clients in the pool and of the receivers."""
    before, ids = torch.arange(0, 2 * C, 4), torch.tensor([0, 1, 3, 4, 7])
    state = after_a_round(rule, 2 * C, before)
    mixed = len(set(before.tolist()) | set(ids.tolist()))
    sent, extra, _ = during(lambda: rule.broadcast(state, ids).payload)
    assert extra <= mixed * LAYER + SEVERAL + 16 * PIECE
    received, n = uploads(sent, ids), torch.ones(len(ids), dtype=torch.int64)
    _, extra, _ = during(lambda: rule.aggregate(state, ids, sent, received, n))
    one_model = LAYERS * LAYER
    assert (
        extra
        <= 2 * len(ids) * LAYER
        + 6 * one_model * isinstance(rule, Average | AdaptiveOptimizer | GlobalUpdateWrapper)
        + SEVERAL
        + 16 * PIECE
    )


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("rule", [Attention("layer"), CosineMixing(), AttentiveMixing()], ids=str)
def test_clients_outside_the_pool_are_not_compared_with_each_other(rule: ServerUpdate) -> None:
    """Four times the clients: about as many operations more, not 16 times, and no larger ones."""
    most = 0
    for n in (2 * C, 8 * C):
        state = after_a_round(rule, n, torch.arange(C))
        _, extra, calls = during(lambda n=n, state=state: rule.broadcast(state, torch.arange(n)).payload)  # type: ignore[misc]
        assert extra <= 2 * C * LAYER + 4 * SEVERAL + 8 * 8 * n
        assert calls <= 5 * most or not most
        most = calls


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


def test_the_bank_is_read_by_rows_alone() -> None:
    """Stacks of clients can be kept elsewhere than in memory: rules use what such a stack has, and nothing else."""

    class Elsewhere:
        """Rows that can be asked for and given back."""

        def __init__(self, stack: Params) -> None:
            self.stack = stack

        def __iter__(self) -> Any:
            return iter(self.stack)

        def __len__(self) -> int:
            return len(self.stack)

        def __contains__(self, name: object) -> bool:
            return name in self.stack

        def only(self, names: Any) -> "Elsewhere":
            return Elsewhere(self.stack.only(names))

        def without(self, names: Any) -> "Elsewhere":
            return Elsewhere(self.stack.without(names))

        def rows(self, ids: Any) -> Params:
            return self.stack.rows(ids).map(torch.clone)

        def put_rows(self, ids: torch.Tensor, new: Params) -> "Elsewhere":
            self.stack.put_rows(ids, new)
            return self

    first, ids = torch.arange(C), torch.tensor([1, 2, 5])
    for rule in RULES:
        results = []
        for elsewhere in (False, True):
            state = after_a_round(rule, C, first)
            torch.manual_seed(1)
            for name in (*cast(Any, rule).per_client, "hypernetworks"):
                if elsewhere and isinstance(state.get(name), Params):
                    state[name] = cast(Params, Elsewhere(cast(Params, state[name])))
            for _ in range(2):
                sent = rule.broadcast(state, ids).payload
                state = rule.aggregate(state, ids, sent, uploads(sent, ids), torch.ones(3, dtype=torch.int64))
            rule.broadcast(state, ids)
            results.append((rule.broadcast(state, first).payload.params, rule.newcomer_model(state)))
        for ours, theirs in zip(*results, strict=True):
            assert all(torch.equal(ours[k], theirs[k]) for k in ours), rule


def test_rows_are_written_where_they_belong_and_nowhere_else() -> None:
    for ids in ([2, 3], [3, 0], [4]):
        stack, new = Params({"w": torch.zeros(5, 2)}), Params({"w": torch.rand(len(ids), 2)})
        stack.put_rows(torch.tensor(ids), new)
        assert torch.equal(stack["w"][ids], new["w"])
        assert int(stack["w"].any(1).sum()) == len(ids)
    stack, one = Params({"w": torch.zeros(5, 2)}), Params({"w": torch.ones(1, 2)})
    for wrong in (torch.tensor([0, 1]), torch.tensor([-1])):
        with pytest.raises((IndexError, RuntimeError)):
            stack.put_rows(wrong, one)
    assert not stack["w"].any()
