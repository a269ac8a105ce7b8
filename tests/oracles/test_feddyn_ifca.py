"""FedDyn on quadratics, and the choice and the averages of IFCA, worked out by hand."""

import torch

from fedattune import Params, Payload
from fedattune.algorithms import ALGORITHMS
from oracles.clients import Clients, pull, push, stack
from oracles.quadratic import params


def test_feddyn_by_hand():
    """One step of rate 0.1 with constant gradients 1 and 3, alpha = 0.5, m = 2.

    Round 1, from w = 0: theta = (-0.1, -0.3), g_k = -0.5 theta = (0.05, 0.15), z = (-0.1 - 0.3) / 2 = -0.2, and
    w = -0.2 - 0.2 = -0.4. Round 2, client 0 alone, whose step has no pull at its start: theta = -0.4 - 0.1 (1 - 0.05) =
    -0.495, g_0 = 0.05 + 0.5 * 0.095 = 0.0975, z = -0.2 - 0.095 / 2 = -0.2475, w = -0.495 - 0.2475 = -0.7425.
    """
    zero = torch.zeros(1, dtype=torch.float64)
    clients = Clients(ALGORITHMS["feddyn"](alpha=0.5), [push(zero + 1), push(zero + 3)], zero)
    torch.testing.assert_close(clients.play(0.1, 1), zero - 0.4)
    torch.testing.assert_close(clients.kept("g")[:, 0], torch.tensor([0.05, 0.15], dtype=torch.float64))
    torch.testing.assert_close(clients.play(0.1, 1, [0]), zero - 0.7425)
    torch.testing.assert_close(clients.kept("g")[:, 0], torch.tensor([0.0975, 0.15], dtype=torch.float64))


def test_feddyn_leaves_out_of_z_who_took_plain_steps_by_hand():
    """Updates 1 and 3 of two of four clients: z = 3 / 4 without the first one's, and w = 2 + 0.75; else z = 1."""
    rule, ids = ALGORITHMS["feddyn"]().server, torch.arange(2)
    state = rule.init(params(torch.zeros(1, dtype=torch.float64)), 4)
    sent = rule.broadcast(state, ids).payload
    models = Params(w=torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    for extra, w in (({"steps": Params(are_plain=torch.tensor([1.0, 0.0]))}, 2.75), ({}, 3.0)):
        new = rule.aggregate(state, ids, sent, Payload(models, extra), torch.ones(2, dtype=torch.int64))
        assert new["w"]["w"].item() == w


def test_feddyn_finds_the_optimum_of_all_where_fedavg_does_not():
    """Curvatures 1 and 9 at 0 and 1: the sum of the losses is least at 0.9; the mean of the optima is 0.5."""
    targets = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    gradients = [pull(1.0, targets[0]), pull(9.0, targets[1])]
    ends = {}
    for name, options in (("feddyn", {"alpha": 1.0}), ("fedavg", {"weighting": "uniform"})):
        clients = Clients(ALGORITHMS[name](**options), gradients, targets[0] + 0.3)
        for _ in range(60):
            w = clients.play(0.05, 200)
        ends[name] = float(w)
    assert abs(ends["feddyn"] - 0.9) < 1e-6  # the fixed point is exact; 60 rounds contract far below this
    assert abs(ends["fedavg"] - 0.5) < 1e-3


def ifca_round(best: list[int], uploads: list[float], n: list[int], **options):
    """One aggregation of IFCA with models 0 and 10 for two clusters."""
    rule = ALGORITHMS["ifca"](**options).server
    state = rule.init(params(torch.zeros(1, dtype=torch.float64)), len(best))
    state["models"] = Params(w=torch.tensor([[0.0], [10.0]], dtype=torch.float64))
    ids = torch.arange(len(best))
    sent = rule.broadcast(state, ids).payload
    chosen = Params(best=torch.eye(2, dtype=torch.float64)[best])
    received = Payload(stack([params(torch.tensor([u], dtype=torch.float64)) for u in uploads]), {"cluster": chosen})
    return rule, rule.aggregate(state, ids, sent, received, torch.tensor(n))


def test_ifca_averages_each_cluster_by_hand():
    """Cluster 0 gets (1 + 3) / 2 = 2, or (1 * 1 + 3 * 3) / 4 = 2.5 by samples; cluster 1 gets its one upload."""
    for weighting, mean in (("uniform", 2.0), ("samples", 2.5)):
        rule, state = ifca_round([0, 1, 0], [1.0, 7.0, 3.0], [1, 5, 3], weighting=weighting)
        assert state["models"]["w"].flatten().tolist() == [mean, 7.0]
        broadcast = rule.broadcast(state, torch.arange(3))
        assert broadcast.payload.params["w"].flatten().tolist() == [mean, 7.0, mean]
        matrix = broadcast.mixing.weights["model"]
        torch.testing.assert_close(matrix.sum(1), torch.ones(3, dtype=torch.float64))
        assert matrix[0, 1] == matrix[1, 0] == matrix[1, 2] == 0


def test_ifca_trains_the_model_with_the_lowest_loss():
    """Losses are the distance from 8, so model 10 is better than model 0; a step of 0.5 from it gives 9.5."""
    rule = ALGORITHMS["ifca"]().client
    sent = Payload(
        params(torch.zeros(1, dtype=torch.float64)),
        {"models": Params(w=torch.tensor([[0.0], [10.0]], dtype=torch.float64))},
    )
    one = torch.ones((), dtype=torch.float64)
    from fedattune.core.payload import RoundContext

    context = RoundContext(0.5, one, one, 1)
    carry = rule.begin(sent, {}, torch.tensor(True), context)
    batch = (torch.zeros(3, 2),) * 2
    carry = rule.probe(carry, batch, None, lambda w, batch: (w["w"] - 8).abs().sum(), context)
    carry = rule.step(carry, batch, lambda w, batch: w.map(torch.ones_like), context)
    upload, _ = rule.finish(carry, sent, {}, context)
    assert upload.params["w"].tolist() == [9.5]
    assert upload.extra["cluster"]["best"].tolist() == [0.0, 1.0]
