"""FedExP's step size, worked out by hand."""

import pytest
import torch

from fedattune.algorithms import ALGORITHMS
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from oracles.clients import Clients, push, stack
from oracles.quadratic import params


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_fedexp_by_hand() -> None:
    """One step of rate 0.1 on constant gradients (10, 0) and (0, 20), eps = 0.

    D_0 = (-1, 0), D_1 = (0, -2), D = (-0.5, -1): the squared norms are 1, 4 and 1.25. eta = (1 + 4) / (2 * 2 * 1.25) =
    1, no extrapolation: two orthogonal updates are the border. A third client with gradient 0 has D = (-1, -2) / 3,
    ||D||^2 = 5 / 9, eta = 5 / (2 * 3 * 5 / 9) = 1.5, and w = -1.5 (1, 2) / 3 = (-0.5, -1).
    """
    zero = vector(0, 0)
    two = Clients(ALGORITHMS["fedexp"](eps=0.0), [push(vector(10, 0)), push(vector(0, 20))], zero)
    torch.testing.assert_close(two.play(0.1, 1), vector(-0.5, -1))
    assert float(two.state["eta"]) == pytest.approx(1.0)
    three = Clients(ALGORITHMS["fedexp"](eps=0.0), [*two.gradients, push(zero)], zero)
    torch.testing.assert_close(three.play(0.1, 1), vector(-0.5, -1))
    assert float(three.state["eta"]) == pytest.approx(1.5)
    (effect,) = three.algorithm.server.measure_effects(three.state, None)  # type: ignore[attr-defined]
    assert effect.value == pytest.approx(0.5)


def test_eps_is_added_to_the_squared_norm_of_the_mean() -> None:
    """Updates (-1, 0), (0, -2), (0, 2): ||D||^2 = 1 / 9, and the squares sum to 9, so eta = 9 / (6 (1 / 9 + eps)).

    That is 13.5 with eps = 0 and 1.35 with eps = 1. With eps = 2 it is 0.71, so eta = 1: the step is FedAvg's.
    """
    gradients = [push(vector(10, 0)), push(vector(0, 20)), push(vector(0, -20))]
    for eps, eta in ((0.0, 13.5), (1.0, 1.35), (2.0, 1.0)):
        clients = Clients(ALGORITHMS["fedexp"](eps=eps), gradients, vector(0, 0))
        torch.testing.assert_close(clients.play(0.1, 1), vector(-eta / 3, 0))


def test_equal_updates_are_averaged_as_in_fedavg() -> None:
    """Equal updates give sum ||D_k||^2 / (2 M ||D||^2) = 1/2; no update at all is no division by zero."""
    for gradient, end in ((10.0, -1.0), (0.0, 0.0)):
        clients = Clients(ALGORITHMS["fedexp"](eps=0.0), [push(vector(gradient))] * 3, vector(0))
        torch.testing.assert_close(clients.play(0.1, 1), vector(end))
        assert float(clients.state["eta"]) == 1.0


def test_weights_by_samples_count_in_both_means() -> None:
    """Updates 1 and -1 with 3 and 1 samples: D = 1/2, the mean square is 1, eta = 1 / (2 / 4) = 2, and w = 1."""
    rule = ALGORITHMS["fedexp"](eps=0.0, weighting="samples").server
    state, ids = rule.init(params(vector(0)), 2), torch.arange(2)
    sent = rule.broadcast(state, ids).payload
    state = rule.aggregate(state, ids, sent, Payload(stack([params(vector(v)) for v in (1, -1)])), torch.tensor([3, 1]))
    torch.testing.assert_close(state["w"]["w"], vector(1))


def test_a_parameter_may_be_a_single_number() -> None:
    """Updates 1 and 3 of a number, and none of a vector: eta = max(1, (1 + 9) / (4 * 4)) = 1, and the mean is 2."""
    rule = ALGORITHMS["fedexp"](eps=0.0).server
    w, ids = Params(scale=torch.tensor(0.0), v=torch.zeros(2)), torch.arange(2)
    state = rule.init(w, 2)
    sent = rule.broadcast(state, ids).payload
    uploads = Params({**sent.params, "scale": torch.tensor([1.0, 3.0])})
    state = rule.aggregate(state, ids, sent, Payload(uploads), torch.ones(2, dtype=torch.int64))
    assert state["w"]["scale"].item() == 2.0
