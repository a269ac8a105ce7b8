"""Groups of clients whose classes look alike: likeness, linkage and places by hand."""

import pytest
import torch
from torch import Tensor

from fedattune import Params
from fedattune.server.class_groups import (
    F_OF_FEW,
    MAX_CLASSES,
    MAX_FEATURES,
    MAX_GROUPS,
    MIN_F,
    assign_groups,
    compare_classes,
    draw_f,
    find_class_rows,
    find_groups,
    group_clients,
    measure_f,
    place_groups,
    refine_groups,
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


@pytest.mark.parametrize("n_rows", [1, 2])
def test_one_row_is_compared_by_its_cosine(n_rows: int) -> None:
    """Two rows are opposite: a client that says yes says no, too. Evidence is the trust in both clients."""
    vectors = [torch.tensor(v, dtype=torch.float64) for v in ([3.0, 4.0], [6.0, 8.0], [4.0, -3.0], [-5.0, 0.0])]
    clients = [torch.stack([v] if n_rows == 1 else [-v, v]) for v in vectors]
    expected = torch.tensor([[1, 1, 0, -0.6], [1, 1, 0, -0.6], [0, 0, 1, -0.8], [-0.6, -0.6, -0.8, 1]]).double()
    likeness, evidence = compare(*clients)
    assert likeness == pytest.approx(expected, abs=1e-7)
    assert (evidence == 1).all()
    trust = torch.tensor([1.0, 0.5, 0.5, 0.75])
    likeness, evidence = compare(*clients, trust=trust.tolist())
    assert evidence == pytest.approx(torch.outer(trust, trust), abs=1e-12)
    assert likeness == pytest.approx(expected * torch.outer(trust, trust), abs=1e-7)


def test_class_rows_are_those_of_the_last_matrix() -> None:
    w = Params({"0.weight": torch.zeros(4, 5), "1.weight": torch.arange(12.0).view(3, 4), "1.bias": torch.ones(3)})
    rows = find_class_rows(w)
    assert rows is not None
    assert torch.equal(rows, w["1.weight"])
    stack = find_class_rows(w.copies(2), n_axes=1)
    assert stack is not None
    assert stack.shape == (2, 3, 4)
    number = find_class_rows(Params(weight=torch.ones(1, 4)))
    assert number is not None
    assert number.shape == (1, 4)
    assert find_class_rows(Params(weight=torch.zeros(MAX_CLASSES + 1, 4))) is None
    assert find_class_rows(Params(bias=torch.zeros(4))) is None
    wide = find_class_rows(Params(weight=torch.arange(2.0 * 2 * (MAX_FEATURES + 1)).view(2, -1)))
    assert wide is not None
    assert wide[0, :3].tolist() == [0, 3, 6]  # every third feature: of 1026, every second one is too many


def group(likeness: list[list[float]], evidence: list[list[float]] | float = 1.0, least: float = 0.1) -> list[int]:
    total = torch.tensor(likeness)
    weight = torch.full_like(total, evidence) if isinstance(evidence, float) else torch.tensor(evidence)
    return group_clients(total, weight, least)[-1].tolist()


def make_blocks(within: float, across: float) -> list[list[float]]:
    """Clients 0 and 2 in one block, 1 and 3 in the other."""
    return [[within if (i - j) % 2 == 0 else across for j in range(4)] for i in range(4)]


def test_blocks_are_groups() -> None:
    assert group(make_blocks(1, 0)) == [0, 1, 0, 1]
    assert group(make_blocks(1, 1)) == [0, 0, 0, 0]
    assert group(make_blocks(0, 0)) == [0, 1, 2, 3]
    assert group([[1.0]]) == [0]


def test_divisions_on_the_way_come_before_the_result() -> None:
    found = group_clients(torch.tensor(make_blocks(1, 0)), torch.ones(4, 4), 0.1)
    assert [one.tolist() for one in found] == [[0, 1, 2, 3], [0, 1, 0, 2], [0, 1, 0, 1]]
    many = group_clients(torch.ones(9, 9), torch.ones(9, 9), 0.1)
    assert [int(one.max()) + 1 for one in many] == list(range(MAX_GROUPS, 0, -1))
    assert all(one[0] == 0 for one in many)


def place(found: list[int], old: list[int], n_places: int) -> tuple[list[int], list[int]]:
    where, source = place_groups(torch.tensor(found), torch.tensor(old), n_places)
    return where.tolist(), source.tolist()


def test_the_larger_part_keeps_the_place_and_the_other_gets_a_copy() -> None:
    assert place([0, 0, 0, 1], [2, 2, 2, 2], 4) == ([2, 0], [2, 1, 2, 3])
    assert place([0, 1, 1], [1, 1, 1], 3) == ([0, 1], [1, 1, 2])


def refine(found: list[int], likeness: Tensor) -> list[int]:
    return refine_groups(likeness, torch.ones_like(likeness), torch.tensor(found)).tolist()


def test_a_client_in_the_wrong_group_joins_the_right_one() -> None:
    """Even clients are alike. Client 4 is in the group of the odd ones; what it is to itself does not count."""
    likeness = torch.tensor([[0.8 if (i - j) % 2 == 0 else 0.1 for j in range(8)] for i in range(8)])
    assert refine([0, 1, 0, 1, 1, 1, 0, 1], likeness.fill_diagonal_(100.0)) == [0, 1] * 4
    assert refine([0, 1] * 4, likeness) == [0, 1] * 4


def test_a_client_alone_joins_the_most_similar_group() -> None:
    """Likeness 0.3 is less than that of clients without a common class, so client 4 first stays alone."""
    likeness = torch.tensor([[0.9 if i // 2 == j // 2 else 0.0 for j in range(5)] for i in range(5)])
    likeness[4, 2:4] = likeness[2:4, 4] = 0.3
    assert refine([0, 0, 1, 1, 2], likeness) == [0, 0, 1, 1, 1]
    assert refine([0, 1, 2], torch.eye(3)) == [0, 0, 0]  # nobody has a group


def test_the_ratio_of_variances_by_hand() -> None:
    """Means -1 and 1, so 4 between and 1/4 + 1/4 in all within: 4 / (1/2 / 2)."""
    rows = torch.tensor([[1.5], [0.5], [-1.0], [-1.0]])
    assert measure_f(rows, torch.tensor([0, 0, 1, 1])) == pytest.approx(16)
    assert measure_f(rows, torch.zeros(4, dtype=torch.int64)) == 0
    assert measure_f(rows, torch.arange(4)) == 0


def find(rows: Tensor, old: list[int] | None = None, new: list[int] | None = None, least: float = 0.1) -> list[int]:
    """The groups of clients that have no group yet, but for those `old`, of whom only the clients `new` have none."""
    n = len(rows)
    is_new = torch.ones(n, dtype=torch.bool)
    if old is not None:
        is_new = torch.isin(torch.arange(n), torch.tensor(new or [], dtype=torch.int64))
    before = torch.tensor(old or [0] * n)
    return find_groups(rows, torch.full((n,), 0.5), before, is_new, least).tolist()


@pytest.mark.parametrize(("excess", "expected"), [(1.01, [0, 0, 1, 1]), (0.99, [0, 0, 0, 0])])
def test_few_clients_need_a_larger_ratio_of_variances(excess: float, expected: list[int]) -> None:
    """Two meanings of the labels, and lengths 1 - s and 1 + s: 4 x 8 / 4 between, 4 x 20 s^2 / 2 within."""
    limit = excess * (MIN_F + F_OF_FEW / 4)
    s = (1 / (5 * limit)) ** 0.5
    mine, theirs = make_rows(U, V, NONE), make_rows(V, U, NONE)
    rows = torch.stack([(1 - s) * mine, (1 + s) * mine, (1 - s) * theirs, (1 + s) * theirs])
    assert measure_f(rows, torch.tensor([0, 0, 1, 1])) == pytest.approx(limit)
    assert find(rows) == expected


def draw_rows(n: int, n_features: int, seed: int, noise: float, groups: int = 1) -> Tensor:
    """One row per client: common coefficients of length sqrt(F), or opposite ones of two groups in turn, and noise."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n_features, generator=generator)
    common = common / common.norm() * n_features**0.5
    signs = torch.tensor([1.0, -1.0 if groups == 2 else 1.0]).repeat(n)[:n, None, None]
    return signs * common + noise * torch.randn(n, 1, n_features, generator=generator)


@pytest.mark.parametrize("n", [4, 12, 30])
@pytest.mark.parametrize("n_features", [8, 30])
def test_noise_of_one_row_is_seldom_a_group(n_features: int, n: int) -> None:
    """With noise twice as large as the coefficients; nearly all draws of 30 clients were groups once."""
    assert sum(any(find(draw_rows(n, n_features, seed, 2.0))) for seed in range(8)) <= 2


@pytest.mark.parametrize(("n", "n_features"), [(4, 8), (4, 200), (12, 8), (30, 8), (30, 30)])
def test_two_groups_of_one_row_are_mostly_found(n: int, n_features: int) -> None:
    found = [find(draw_rows(n, n_features, seed, 0.4, groups=2)) for seed in range(8)]
    assert sum(one == [0, 1] * (n // 2) for one in found) >= 7


def test_draws_without_groups_repeat_and_follow_the_spread_within_groups() -> None:
    """Draws of rows that all lie on one line are divided at their middle, so they explain much."""
    trust, two = torch.full((12,), 0.5), torch.tensor([0, 1] * 6)
    rows = draw_rows(12, 8, 0, 1.0, groups=2)
    drawn = list(draw_f(rows, trust, two, 0.1))
    assert drawn == list(draw_f(rows, trust, two, 0.1))
    assert len(set(drawn)) > 10
    line = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(1))
    on_line = line * torch.randn(12, 1, 1, generator=torch.Generator().manual_seed(2))
    assert max(draw_f(on_line, trust, two, 0.1)) > 3 * max(drawn)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_one_group(value: float) -> None:
    rows = draw_rows(6, 5, 0, 0.1, groups=2)
    rows[2] = value
    assert find(rows) == [0] * 6
    assert find(rows, [0, 1] * 3) == [0] * 6


FAR_AND_NEAR = torch.tensor(
    [[[10.0, 1]], [[0.1, 1]], [[10, -1]], [[0.1, -1]], [[10, 1]], [[0.1, 1]], [[10, -1]], [[0.1, -1]]]
)
"""Rows of one number. By their cosine, the far ones are alike, and the near ones of two kinds."""


def test_the_old_division_stays_where_it_explains_more() -> None:
    """Far and near: 196 between, 8 / 6 within. The three groups by cosine: 200 / 2 between, 4 / 5 within."""
    by_cosine = [0, 1, 0, 2] * 2
    assert find(FAR_AND_NEAR, least=0.3) == by_cosine
    assert find(FAR_AND_NEAR, [5, 3] * 4, least=0.3) == [1, 0] * 4
    assert find(FAR_AND_NEAR, [0, 0, 1, 1] * 2, least=0.3) == by_cosine
    # Clients that are new join the most similar of the old groups.
    assert find(FAR_AND_NEAR, [0, 3, 5, 3, 5, 3, 5, 3], [0], least=0.3) == [1, 0] * 4


def make_clients(kinds: list[int], n_classes: int = 4, noise: float = 0.5, seed: int = 0) -> Tensor:
    """Rows with a shared direction, prototypes whose classes are moved by a client's kind, and noise."""
    generator = torch.Generator().manual_seed(seed)
    prototypes, shared = torch.randn(n_classes, 20, generator=generator), 3 * torch.randn(20, generator=generator)
    clean = torch.stack([shared + prototypes.roll(kind, 0) for kind in kinds])
    return clean + noise * torch.randn(clean.shape, generator=generator)


@pytest.mark.parametrize("seed", range(5))
def test_two_clients_of_twelve_are_a_group(seed: int) -> None:
    kinds = [int(i in (3, 8)) for i in range(12)]
    assert find(make_clients(kinds, seed=seed)) == kinds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [6, 12, 30])
def test_noise_is_no_group(n: int, seed: int) -> None:
    """The same task with noise as large as the prototypes, and noise alone."""
    assert find(make_clients([0] * n, noise=1.0, seed=seed)) == [0] * n
    assert find(torch.randn(n, 4, 20, generator=torch.Generator().manual_seed(seed))) == [0] * n


def test_opposite_coefficients_of_a_number_are_two_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1.0, -1.0] * 5)[:, None, None]
    rows = signs * torch.randn(1, 1, 8, generator=generator) + 0.3 * torch.randn(10, 1, 8, generator=generator)
    assert find(rows) == [0, 1] * 5
    n, new, old = torch.ones(10), torch.arange(10), torch.zeros(10, dtype=torch.int64)
    group, source = assign_groups(rows, n, new, old, 6, 0.1)
    assert len(set(group.tolist())) == 2
    assert (group[::2] == group[0]).all()
    assert source[group].tolist() == [0] * 10


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
