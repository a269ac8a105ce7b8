"""How unlike two sets of features of the same samples are."""

import torch
from torch import Tensor

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Bandwidths of FedCP's kernels."""


def coral(a: Tensor, b: Tensor) -> Tensor:
    """||C_a - C_b||_F^2 / (4 f^2) for features a, b (B, f) and their covariances C with divisor B - 1.

    Source: Deep CORAL (Sun and Saenko, 2016), equation 1. It is 0 for one sample.
    """
    return (_covariance(a) - _covariance(b)).square().sum() / (4 * a.shape[1] ** 2)


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Mean over all pairs of k(a, a') + k(b, b') - 2 k(a, b'), k a sum of Gaussian kernels; a, b (B, f).

    k(x, y) = sum_s exp(-||x - y||^2 / (2 s)) over the bandwidths s of FedCP's public code.
    """
    return (_kernel(a, a) + _kernel(b, b) - 2 * _kernel(a, b)).mean()


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    return centred.T @ centred / max(1, len(features) - 1)


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return torch.stack([torch.exp(-squares / (2 * s)) for s in BANDWIDTHS]).sum(0)
