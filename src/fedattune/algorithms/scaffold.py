"""SCAFFOLD. Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1.

client   y <- y - lr (g(y) - c_i + c), K steps from w                                            (3)
         c_i <- I: the gradient at w over all training samples,  II: c_i - c + (w - y) / (K lr)  (4)
server   w <- w + server_lr mean_S (y_i - w),  c <- c + (|S| / N) mean_S (change of c_i)         (5)
"""

from typing import Literal

from ..client import SGD, ControlVariates
from ..core import Algorithm
from ..registry import Positive
from ..server import Average, Controls
from ..server.average import Weighting


def scaffold(
    *, option: Literal["I", "II"] = "II", server_lr: Positive = 1.0, weighting: Weighting = "uniform"
) -> Algorithm:
    """One average; control variates take the clients' drift out of their steps."""
    return Algorithm(
        SGD((ControlVariates(option),)), Controls(Average(weighting, server_lr)), headline="received"
    )
