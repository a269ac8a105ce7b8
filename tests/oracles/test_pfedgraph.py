"""The collaboration graph and the cosine of pFedGraph, worked out by hand."""

import torch
from torch import Tensor

from fedattune import Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.pfedgraph import CollaborationGraph, CosinePull, project_to_simplex
from fedattune.client import SGD, LocalContext
from fedattune.core.payload import RoundContext
from oracles.quadratic import params, run, zero


def infer_graph(updates: list[list[float]], n: list[int], alpha: float, ids: list[int] | None = None) -> Tensor:
    """The graph after clients uploaded (5, 5) plus their updates, with (5, 5) as the initial model."""
    start = torch.full((2,), 5.0, dtype=torch.float64)
    theta = Params(w=start + torch.tensor(updates, dtype=torch.float64))
    rule = CollaborationGraph(alpha=alpha)
    who = torch.arange(len(n)) if ids is None else torch.tensor(ids)
    state = rule.aggregate(
        rule.init(params(start), len(n)), who, Payload(theta), Payload(theta.rows(who)), torch.tensor(n)[who]
    )
    broadcast = rule.broadcast(state, torch.arange(len(n)))
    graph = broadcast.mixing.weights["model"]
    torch.testing.assert_close(broadcast.payload.params["w"], graph @ state["theta"]["w"])
    return graph


def test_graph_by_hand():
    """Updates (2, 0), (1, 0) and (0, 3) with shares (1/2, 1/4, 1/4) and alpha = 1; cosines are 1, 1 and 0.

    Row 0 projects (1/2, 1/4, 1/4) + (1, 1, 0) / 2 = (1, 3/4, 1/4). To subtract 1/3 from each would leave -1/12 for the
    last; without the last, each of the others loses 3/8: (5/8, 3/8, 0). Row 1 projects the same. Row 2 projects
    (1/2, 1/4, 3/4), of which each loses 1/6: (1/3, 1/12, 7/12).
    """
    graph = infer_graph([[2, 0], [1, 0], [0, 3]], [20, 10, 10], 1.0)
    rows = [[5 / 8, 3 / 8, 0], [5 / 8, 3 / 8, 0], [1 / 3, 1 / 12, 7 / 12]]
    torch.testing.assert_close(graph, torch.tensor(rows, dtype=torch.float64))


def test_large_alpha_weighs_by_samples_and_small_alpha_by_likeness():
    """Weights are the shares 2/4, 1/4 and 1/4; or the client's own model, as no other update has its direction."""
    updates, n = [[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]], [20, 10, 10]
    shares = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(infer_graph(updates, n, 1e9), shares.expand(3, 3), atol=1e-8, rtol=0)
    torch.testing.assert_close(infer_graph(updates, n, 1e-3), torch.eye(3, dtype=torch.float64))


def test_only_the_cohort_is_shared():
    """Clients 0 and 1 have the shares 2/3 and 1/3 of their 30 samples; client 2, which never uploaded, has its own."""
    graph = infer_graph([[2, 0], [1, 0], [0, 3]], [20, 10, 10], 1e9, [0, 1])
    rows = [[2 / 3, 1 / 3, 0], [2 / 3, 1 / 3, 0], [0, 0, 1]]
    torch.testing.assert_close(graph, torch.tensor(rows, dtype=torch.float64), atol=1e-8, rtol=0)


def test_no_other_point_of_the_simplex_is_nearer():
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    points = torch.rand(5000, 6, generator=generator, dtype=torch.float64).log()
    points /= points.sum(1, keepdim=True)
    nearest = project_to_simplex(v)
    torch.testing.assert_close(nearest.sum(1), torch.ones(20, dtype=torch.float64))
    assert (nearest >= 0).all()
    assert ((v - nearest).norm(dim=1) <= torch.cdist(v, points).amin(1)).all()


def test_values_of_any_size_are_projected():
    """Far above 1, rounding would hide the sum of 1; a row of equal values has equal weights."""
    v = torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, -torch.inf]], dtype=torch.float64)
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    for scale in (1e3, 1e20, 1e300):
        torch.testing.assert_close(project_to_simplex(scale * v), rows, atol=0, rtol=0)


def test_cosine_pull_by_hand():
    """From (3, 4) with the mixture (1, 0), of cosine 3/5, and lam = 1/2; the loss has no gradient.

    The cosine's gradient is (1, 0) / 5 - 3/5 (3, 4) / 25 = (0.128, -0.096); one step of rate 1 adds half of it. From
    the mixture itself, and from zero, there is no pull.
    """
    rule = SGD((CosinePull(0.5),), start="own")
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for start, end in (([3.0, 4.0], [3.064, 3.952]), ([2.0, 0.0], [2.0, 0.0]), ([0.0, 0.0], [0.0, 0.0])):
        own = {"own": params(torch.tensor(start, dtype=torch.float64))}
        upload, _ = run(rule, zero, 1, 1.0, u, memory=own)
        torch.testing.assert_close(upload.params["w"], torch.tensor(end, dtype=torch.float64))


def test_personal_tensors_have_no_part_in_the_cosine():
    """The same as above, with a personal tensor beside: it would change the norms, and be pulled."""
    theta, u = params(torch.tensor([3.0, 4.0])), params(torch.tensor([1.0, 0.0]))
    theta["own"], u["own"] = torch.tensor([5.0]), torch.tensor([7.0])
    one = torch.tensor(1.0)
    context = RoundContext(1.0, one, one, 1, personal_names=("own",))
    g = CosinePull(0.5)(theta.zeros(), theta, LocalContext(theta, Payload(u), {}, Params(), context))
    torch.testing.assert_close(g["w"], torch.tensor([-0.064, 0.048]))
    assert g["own"].item() == 0


def test_options_reach_the_rules():
    made = ALGORITHMS["pfedgraph"](alpha=2.0, lam=0.3, weighting="uniform")
    assert made.server == CollaborationGraph(alpha=2.0, weighting="uniform")
    assert made.client == SGD((CosinePull(0.3),), start="newest")
