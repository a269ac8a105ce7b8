"""FedLC's margins and its calibrated loss, worked out by hand."""

from math import exp, inf, log

import pytest
import torch
from torch import Tensor, nn

from fedattune import Params
from fedattune.algorithms.fedlc import CalibratedModule, FedLCNetwork
from fedattune.core.losses import compute_loss

COUNTS = torch.tensor([[16, 81, 0]], dtype=torch.float64)


class Logits(nn.Module):
    """Logits 0, 1 and 2 for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.arange(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.z.expand(len(x), 3)


def calibrate(network: FedLCNetwork) -> CalibratedModule:
    module = network.wrap(Logits(), torch.zeros(2, 1))
    assert isinstance(module, CalibratedModule)
    margins: Params = network.client_buffers(COUNTS).rows(0)
    assert module.margins.shape == margins["margins"].shape
    module.margins.copy_(margins["margins"])
    return module


@pytest.mark.parametrize(("tau", "last"), [(1.0, 1.0), (6.0, 6.0)])
def test_margins_by_hand(tau: float, last: float) -> None:
    """16^(-1/4) = 1/2 and 81^(-1/4) = 1/3; a class without samples counts as one, 1^(-1/4) = 1, or it is excluded."""
    margins = FedLCNetwork(tau).client_buffers(COUNTS)["margins"][0]
    assert margins.tolist() == pytest.approx([tau / 2, tau / 3, last])
    excluded = FedLCNetwork(tau, "excluded").client_buffers(COUNTS)["margins"][0]
    assert excluded[:2].tolist() == pytest.approx([tau / 2, tau / 3])
    assert excluded[2] == 1e9


@pytest.mark.parametrize(("network", "margin"), [(FedLCNetwork(6.0), 6.0), (FedLCNetwork(6.0, "excluded"), inf)])
def test_calibrated_loss_by_hand(network: FedLCNetwork, margin: float) -> None:
    """With tau = 6 and logits 0, 1, 2: calibrated logits -3, -1 and 2 - 6 = -4, or minus infinity if excluded.

    The loss of class 0 is log(e^-3 + e^-1 + e^-4) + 3, and its slope is the calibrated probability less the label.
    """
    module = calibrate(network).train()
    parts = [exp(-3), exp(-1), exp(2 - margin)]
    y = torch.tensor([0, 0])
    x = torch.zeros(2, 1)
    loss = module.objective(module(x), (x, y), compute_loss)
    assert loss.item() == pytest.approx(log(sum(parts)) + 3)
    (slope,) = torch.autograd.grad(loss, [*module.parameters()])
    assert slope.tolist() == pytest.approx([part / sum(parts) - (i == 0) for i, part in enumerate(parts)])


def test_predictions_have_no_margins() -> None:
    """In evaluation the logits are those of the user's model."""
    assert calibrate(FedLCNetwork(6.0)).eval()(torch.zeros(1, 1)).tolist() == [[0.0, 1.0, 2.0]]


def test_the_effect_compares_probabilities() -> None:
    """softmax(0, 1, 2) and softmax(-3, -1, -4): the norm of their difference over the norm of the first."""
    plain, calibrated = (
        torch.tensor(z, dtype=torch.float64).exp() / sum(map(exp, z)) for z in ([0.0, 1.0, 2.0], [-3.0, -1.0, -4.0])
    )
    with torch.no_grad():
        (effect,) = calibrate(FedLCNetwork(6.0)).eval().measure_effects(torch.zeros(1, 1))
    assert effect.value == pytest.approx(float((calibrated - plain).norm() / plain.norm()))
