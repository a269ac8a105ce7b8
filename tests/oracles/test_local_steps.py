"""Closed forms of the local steps (specification 10 B), on quadratics whose solution is known."""

import torch

from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.perfedavg import PerFedAvgClient
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.client import SGD, Proximal
from fedattune.engine.batches import LocalTraining
from oracles.quadratic import DIM, W0, A, H, M, curved, gradient, run, zero


def test_b1_a_moving_anchor_makes_lambda_inert() -> None:
    """The anchor that the public code uses equals the model at every step: lam has no effect, and it is said."""
    make = ALGORITHMS["fedmcsa"]
    ends = [run(make(profile="code", lam=lam).client, gradient, 7, 0.1)[0].params["w"] for lam in (0.0, 5.0, 80.0)]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert "no effect" in make(profile="code", lam=15.0).notes[0]
    assert not make(profile="code").notes  # nobody gave lam
    assert not make(profile="paper", lam=15.0).notes


def test_b3_fixed_anchor_on_a_quadratic() -> None:
    """Fixed point (m + lam A) / (1 + lam); the error shrinks by (1 - eta (1 + lam)) at each step.

    The client was not sent anything new: it starts from its own model, and the anchor is what it was last sent.
    """
    lam, eta, steps = 5.0, 0.02, 9
    rule = ALGORITHMS["fedmcsa"](profile="paper", lam=lam).client
    end = run(rule, gradient, steps, eta, sent=A, own=W0)[0].params["w"]
    target = (M + lam * A) / (1 + lam)
    assert torch.allclose(end - target, (1 - eta * (1 + lam)) ** steps * (W0 - target), atol=1e-14)


def test_b4_proximal_term_without_gradient_contracts_to_the_anchor() -> None:
    mu, eta, steps = 2.0, 0.1, 6
    rule = SGD((Proximal(mu),), start="newest")
    end = run(rule, zero, steps, eta, sent=A, own=W0)[0].params["w"]
    assert torch.allclose(end - A, (1 - eta * mu) ** steps * (W0 - A), atol=1e-14)


def test_b5_moreau_limits() -> None:
    assert torch.equal(run(PFedMeClient(0.0, 5, 0.1), gradient, 3, 0.1)[0].params["w"], W0)  # lam = 0
    upload, memory = run(PFedMeClient(4.0, 5, 0.1), gradient, 3, 0.25)  # eta lam = 1
    assert torch.allclose(upload.params["w"], memory["theta"]["w"], atol=1e-14)
    upload, memory = run(PFedMeClient(4.0, 0, 0.1), gradient, 3, 0.1)  # K = 0
    assert torch.equal(upload.params["w"], W0)
    assert torch.equal(memory["theta"]["w"], W0)


def test_b5_many_inner_steps_give_the_moreau_gradient() -> None:
    """theta*(w) = (m + lam w) / (1 + lam), so one outer step is w - eta lam / (1 + lam) (w - m)."""
    lam, eta = 3.0, 0.2
    upload, memory = run(PFedMeClient(lam, 200, 0.1), gradient, 1, eta)
    assert torch.allclose(memory["theta"]["w"], (M + lam * W0) / (1 + lam), atol=1e-12)
    assert torch.allclose(upload.params["w"], W0 - eta * lam / (1 + lam) * (W0 - M), atol=1e-12)


def test_b6_meta_steps_on_a_quadratic() -> None:
    """v - m = (I - alpha H)(w - m); first order H (I - alpha H)(w - m); exact (I - alpha H) H (I - alpha H)(w - m).

    A central difference of a linear gradient is exact, so the Hessian-free form is exact for every delta.
    """
    alpha, beta = 0.3, 0.05
    shrink = torch.eye(DIM, dtype=torch.float64) - alpha * H
    first = run(PerFedAvgClient(alpha, beta, "fo"), curved, 1, 9.9)[0].params["w"]
    assert torch.allclose(first, W0 - beta * H @ shrink @ (W0 - M), atol=1e-13)
    for delta in (1e-3, 0.5):
        hf = run(PerFedAvgClient(alpha, beta, "hf", delta), curved, 1, 9.9)[0].params["w"]
        assert torch.allclose(hf, W0 - beta * shrink @ H @ shrink @ (W0 - M), atol=1e-11)


def test_batches_are_drawn_without_replacement_and_do_not_depend_on_others() -> None:
    import numpy as np

    samples = np.arange(100, 150)
    work = LocalTraining(seed=1, stream=1, round=3, lr=0.1, batch_size=8, steps=12)
    batches = work.draw_batches(7, samples, 1)
    assert batches.shape == (12, 1, 8)
    flat = batches.reshape(-1)
    assert sorted(flat[:50]) == sorted(samples)  # the first pass
    assert len(set(flat[50:])) == 46  # the next pass, reshuffled
    assert (batches == work.draw_batches(7, samples, 1)).all()
    assert (batches != work.draw_batches(8, samples, 1)).any()
    epoch = LocalTraining(seed=1, stream=1, round=3, lr=0.1, batch_size=8, epochs=2).draw_batches(7, samples, 1)
    assert epoch.shape == (14, 1, 8)
    assert sorted(epoch[:7].reshape(-1)[:50]) == sorted(samples)
    assert (epoch[6, 0, 2:] == -1).all()
    whole = LocalTraining(seed=1, stream=1, round=3, lr=0.1, batch_size=8, epochs=2, drop_last=True)
    assert whole.draw_batches(7, samples, 1).shape == (12, 1, 8)
    few = work.draw_batches(7, samples[:5], 2)
    assert few.shape == (12, 2, 5)
    assert {len(set(b)) for b in few.reshape(-1, 5)} == {5}
