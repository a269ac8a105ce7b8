"""FedNova: weights of gradients by hand and by unrolled steps, and the optimum that it finds where FedAvg does not."""

import pytest
import torch

from fedattune import Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fednova import count_effective_steps
from fedattune.core.optimizers import Adam, GradientDescent
from fedattune.core.payload import RoundContext
from oracles.clients import stack
from oracles.quadratic import FRESH, params, run


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("nesterov", [False, True])
def test_effective_steps_are_the_weights_of_the_gradients(nesterov: bool, steps: int) -> None:
    """With a gradient of 1 everywhere and rate 1, the update is minus the sum of the weights of all gradients.

    Two steps with momentum 0.5 are 1 + (1 + 0.5) = 2.5; with Nesterov's (1 + 0.5) + (1 + 0.5 * 1.5) = 3.25.
    """
    optimizer = GradientDescent(momentum=0.5, nesterov=nesterov)
    w, state = Params(w=number(0)), optimizer.init(Params(w=number(0)))
    for _ in range(steps):
        w, state = optimizer.step(w, Params(w=number(1)), state, 1.0)
    a = count_effective_steps(optimizer, number(steps)).item()
    assert a == pytest.approx(-w["w"].item())
    if steps == 2:
        assert a == (3.25 if nesterov else 2.5)


def test_effective_steps_without_momentum_are_the_steps() -> None:
    assert count_effective_steps(GradientDescent(), number(7)) == 7
    assert count_effective_steps(Adam(), number(7)) == 7


def play(w: torch.Tensor, work: list[int], targets: list[float], n: list[int], **options: object) -> Params:
    """One round of FedNova on 1/2 (w - target)^2 with rate 0.1; the model after it."""
    algorithm = ALGORITHMS["fednova"](**options)
    state = algorithm.server.init(params(w), len(work))
    ids = torch.arange(len(work))
    sent = algorithm.server.broadcast(state, ids).payload
    uploads = []
    for steps, target in zip(work, targets, strict=True):
        gradient = lambda w, batch, target=target: w - target  # noqa: E731
        uploads.append(run(algorithm.client, gradient, steps, 0.1, w)[0])
    received = Payload(stack([u.params for u in uploads]), {"steps": stack([u.extra["steps"] for u in uploads])})
    return algorithm.server.aggregate(state, ids, sent, received, torch.tensor(n))


def test_a_round_by_hand() -> None:
    """From w = 0, client 0 takes one step to 1 and client 1 two steps to -1, with 1 and 3 samples.

    theta = 0.1 and -0.19, d = 0.1 and -0.095, the mean of d is 0.025 - 0.07125 = -0.04625, tau_eff = 0.25 + 1.5 = 1.75,
    and w = -0.0809375. FedAvg's is 0.025 - 0.1425 = -0.1175. The mean of 1 / tau is 0.25 + 0.375 = 0.625, so the effect
    is the root of 1.75 * 0.625 - 1 = 0.09375. With tau_eff = 4, w = -0.185.
    """
    start = torch.zeros(1, dtype=torch.float64)
    state = play(start, [1, 2], [1.0, -1.0], [1, 3])
    assert state["w"]["w"].item() == pytest.approx(-0.0809375)  # type: ignore[index]
    assert state["effect"].item() == pytest.approx(0.09375**0.5)
    assert play(start, [1, 2], [1.0, -1.0], [1, 3], tau_eff=4.0)["w"]["w"].item() == pytest.approx(-0.185)  # type: ignore[index]


def test_the_fixed_point_is_that_of_all_losses_and_not_of_the_busiest_client() -> None:
    """Clients at 0 and 1, with equal samples, take 1 and 9 steps of rate 0.1; the optimum of both losses is 0.5.

    Their updates are -0.1 w and (1 - w) (1 - 0.9^9). So FedNova's fixed point solves 0.1 w = (1 - w) (1 - 0.9^9) / 9,
    which gives w = 0.405; FedAvg's solves 0.1 w = (1 - w) (1 - 0.9^9), which gives w = 0.860.
    """
    w = torch.zeros(1, dtype=torch.float64)
    for _ in range(200):
        w = play(w, [1, 9], [0.0, 1.0], [5, 5])["w"]["w"]
    pull = 1 - 0.9**9
    assert w.item() == pytest.approx(pull / 9 / (0.1 + pull / 9))
    assert abs(w.item() - 0.5) < 0.1 < abs(pull / (0.1 + pull) - 0.5)


def test_the_client_keeps_the_trained_model_and_personal_tensors_travel_nowhere_changed() -> None:
    """Three steps of 0.5 on gradients of 1 go from 3 to 1.5; the upload is 3 - 1.5 / 3 = 2.5, and personal 1.5."""
    rule = ALGORITHMS["fednova"]().client
    sent = Payload(Params(w=number(3), own=number(3)))
    context = RoundContext(0.5, number(3), number(1), 1, ("own",))
    carry = rule.begin(sent, rule.init_local_state(sent.params), FRESH, context)
    for _ in range(3):
        carry = rule.step(carry, (), lambda w, _: w.map(torch.ones_like), context)
    upload, kept = rule.finish(carry, sent, {}, context)
    assert (upload.params["w"].item(), upload.params["own"].item()) == (2.5, 1.5)
    assert (upload.extra["steps"]["a"].item(), upload.extra["steps"]["inverse"].item()) == (3, pytest.approx(1 / 3))
    assert all(v.item() == 1.5 for v in rule.trained_model(upload, kept).values())
