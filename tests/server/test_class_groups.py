"""Groups of clients whose classes look alike: likeness, linkage and places by hand."""

import pytest
import torch
from torch import Tensor

from fedattune import Params
from fedattune.server.class_groups import (
    MAX_CLASSES,
    MAX_FEATURES,
    assign_groups,
    compare_classes,
    find_class_rows,
    group_clients,
    join_small,
    place_groups,
)

U = [1.0, 0.0]
V = [-1.0, 0.0]
W = [-0.5, 0.75**0.5]  # at 120 degrees to U and to X
X = [-0.5, -(0.75**0.5)]
NONE = None

CONVERGED = 1e-8
"""Ten power iterations leave less than (1 / 9)^10 of a prototype in the shared direction."""


def make_rows(*prototypes: list[float] | None) -> Tensor:
    """Rows of a client (C, 3): 3 along the shared direction and a prototype for each class held, 0 for the others."""
    return torch.tensor([[3.0, *u] if u else [0.0] * 3 for u in prototypes], dtype=torch.float64)


def compare(*clients: Tensor, trust: list[float] | None = None) -> tuple[Tensor, Tensor]:
    return compare_classes(torch.stack(clients), None if trust is None else torch.tensor(trust))


def test_clients_with_the_same_prototypes_are_alike_however_long_their_updates() -> None:
    mine = make_rows(U, V, NONE)
    likeness, evidence = compare(mine, 7 * mine)
    assert likeness == pytest.approx(torch.ones(2, 2), abs=CONVERGED)
    assert evidence == pytest.approx(torch.ones(2, 2), abs=CONVERGED)


def test_only_common_classes_count() -> None:
    """Two clients share one of their two classes: half of the evidence. Other classes: none."""
    clients = make_rows(U, V, NONE, NONE), make_rows(NONE, V, U, NONE), make_rows(NONE, NONE, U, V)
    likeness, evidence = compare(*clients)
    expected = torch.tensor([[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]])
    assert likeness == pytest.approx(expected, abs=CONVERGED)
    assert evidence == pytest.approx(expected, abs=CONVERGED)


def test_class_rows_are_those_of_the_last_matrix() -> None:
    w = Params({"0.weight": torch.zeros(4, 5), "1.weight": torch.arange(12.0).view(3, 4), "1.bias": torch.ones(3)})
    rows = find_class_rows(w)
    assert rows is not None
    assert torch.equal(rows, w["1.weight"])
    stack = find_class_rows(w.copies(2), n_axes=1)
    assert stack is not None
    assert stack.shape == (2, 3, 4)
    for n_rows in (1, MAX_CLASSES + 1):
        assert find_class_rows(Params(weight=torch.zeros(n_rows, 4))) is None
    assert find_class_rows(Params(bias=torch.zeros(4))) is None
    wide = find_class_rows(Params(weight=torch.arange(2.0 * 2 * (MAX_FEATURES + 1)).view(2, -1)))
    assert wide is not None
    assert wide[0, :3].tolist() == [0, 3, 6]  # every third feature: of 1026, every second one is too many


def group(likeness: list[list[float]], evidence: list[list[float]] | float = 1.0, least: float = 0.1) -> list[int]:
    total = torch.tensor(likeness)
    weight = torch.full_like(total, evidence) if isinstance(evidence, float) else torch.tensor(evidence)
    return group_clients(total, weight, least).tolist()


def make_blocks(within: float, across: float) -> list[list[float]]:
    """Clients 0 and 2 in one block, 1 and 3 in the other."""
    return [[within if (i - j) % 2 == 0 else across for j in range(4)] for i in range(4)]


def test_blocks_are_groups() -> None:
    assert group(make_blocks(1, 0)) == [0, 1, 0, 1]
    assert group(make_blocks(1, 1)) == [0, 0, 0, 0]
    assert group(make_blocks(0, 0)) == [0, 1, 2, 3]
    assert group([[1.0]]) == [0]


def place(found: list[int], old: list[int], n_places: int) -> tuple[list[int], list[int]]:
    where, source = place_groups(torch.tensor(found), torch.tensor(old), n_places)
    return where.tolist(), source.tolist()


def test_the_larger_part_keeps_the_place_and_the_other_gets_a_copy() -> None:
    assert place([0, 0, 0, 1], [2, 2, 2, 2], 4) == ([2, 0], [2, 1, 2, 3])
    assert place([0, 1, 1], [1, 1, 1], 3) == ([0, 1], [1, 1, 2])


def test_small_groups_join_the_most_similar_larger_one() -> None:
    """Clients 4 and 5 are alone; 4 is likest to clients 2 and 3, 5 to 0 and 1."""
    found = torch.tensor([0, 0, 1, 1, 2, 3])
    likeness = torch.zeros(6, 6)
    likeness[4, 2:4] = likeness[5, :2] = 0.5
    assert join_small(likeness, torch.ones(6, 6), found).tolist() == [0, 0, 1, 1, 1, 0]
    alone = torch.arange(3)
    assert join_small(torch.eye(3), torch.ones(3, 3), alone).tolist() == [0, 0, 0]


def test_groups_that_explain_nothing_are_one_group() -> None:
    """Two meanings of the labels make two groups; if updates within a group differ nine times in length, F is small."""
    mine, theirs = make_rows(U, V, NONE), make_rows(V, U, NONE)
    n, new, old = torch.ones(4), torch.arange(4), torch.zeros(4, dtype=torch.int64)
    clients = torch.stack([mine, theirs, mine, theirs])
    group, source = assign_groups(clients, n, new, old, 4, 0.1)
    assert group[0] == group[2] != group[1] == group[3]
    assert source[group].tolist() == [0, 0, 0, 0]
    noisy = clients * torch.tensor([1.0, 9.0, 9.0, 1.0])[:, None, None]
    assert assign_groups(noisy, n, new, old, 4, 0.1)[0].unique().tolist() == [0]
