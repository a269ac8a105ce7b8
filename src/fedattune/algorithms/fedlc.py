"""FedLC.

    @inproceedings{zhang2022federated,
      author = {Zhang, Jie and Li, Zhiqi and Li, Bo and Xu, Jianghe and Wu, Shuang and Ding, Shouhong and Wu, Chao},
      title = {Federated Learning with Label Distribution Skew via Logits Calibration},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2022},
      eprint = {2209.00189},
      archiveprefix = {arXiv}
    }

Rules, with the logits f_c(x) and the client's numbers n_c of training samples of each class:

    client   theta <- w, then SGD on CE(f - tau n^(-1/4), y)
             = log sum_c exp(f_c(x) - tau n_c^(-1/4)) - (f_y(x) - tau n_y^(-1/4))
    server   as FedAvg

A rare class thus needs a larger margin. At n_c = 0 the margin is infinite: the class leaves the sum, and the client
learns nothing about it. By default, such a class counts as one sample.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..client import SGD
from ..core.algorithm import Algorithm
from ..core.effect import Effect, Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, to_input
from ..core.options import NonNegative
from ..core.params import Params
from ..core.payload import Batch
from ..server import Average
from ..server.average import Weighting
from .table import Family, method

Absent = Literal["one_sample", "excluded"]

CALIBRATION = Mechanism("predictions", "predictions without the calibration", "FedAvg")

INFINITE_MARGIN = 1e9
"""Margin of an excluded class: its probability is 0, and the loss stays finite for padding, which has weight 0."""


class CalibratedModule(MethodModule):
    """The user's model, trained on logits less a margin for each class; its predictions have no margins."""

    margins: Tensor

    def __init__(self, model: nn.Module, n_classes: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("margins", next(model.parameters()).new_zeros(n_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C); in training, less the margins."""
        logits: Tensor = self.model(x)
        return logits - self.margins if self.training else logits

    def objective(self, output: Tensor, batch: Batch, loss: LossFunction) -> Tensor:
        """Return the loss of the calibrated logits."""
        return loss(output, batch)

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        """Measure the change of the predicted probabilities by the margins."""
        logits = self.model(x)
        plain, calibrated = logits.softmax(1), (logits - self.margins).softmax(1)
        return (Effect(CALIBRATION, float((calibrated - plain).norm() / plain.norm())),)


@dataclass(frozen=True)
class FedLCNetwork(Network):
    """Subtracts tau n_c^(-1/4) from the logit of each class c in training. Options: see `fedlc`."""

    tau: float = 1.0
    absent: Absent = "one_sample"

    class_need = "FedLC's margins count the samples of each class"
    balance = "FedLC's logit calibration"

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        with torch.no_grad():
            n_classes = model.eval()(to_input(x, model)).shape[1]
        return CalibratedModule(model.train(), n_classes)

    def client_buffers(self, label_counts: Tensor) -> Params:
        margins = self.tau * label_counts.clamp_min(1) ** -0.25
        return Params(margins=margins.masked_fill((label_counts == 0) & (self.absent == "excluded"), INFINITE_MARGIN))


@method(Family.GLOBAL, "one average", "SGD with larger margins for its rare classes", tune={"tau": (1.0, 2.0, 4.0)})
def fedlc(*, tau: NonNegative = 1.0, absent: Absent = "one_sample", weighting: Weighting = "samples") -> Algorithm:
    """FedAvg whose clients train on logits that are calibrated by their class counts.

    Source: Zhang et al. (2022), the calibrated cross-entropy.

    Args:
        tau: strength tau of the margins tau n_c^(-1/4); with 0, no class is calibrated.
        absent: margin of a class of which a client has no samples: that of `one_sample`; or an infinite one, by which
            the class is `excluded` from the client's loss.
        weighting: weights p_k in the average: by training samples, or `uniform`.
    """
    return Algorithm(SGD(), Average(weighting), network=FedLCNetwork(tau, absent), evaluation_point="received")
