"""The parts that `combined` puts together, each with the options and defaults of the method that it comes from."""

from collections.abc import Callable
from typing import Literal

from ..client import SGD, ControlVariates, Ditto, Moreau, Proximal
from ..core import ClientUpdate, ServerUpdate
from ..select import Unit
from ..server import AMP, Attention, Average, HeurAMP, Learned, UpdateAttention
from ..server.average import Weighting
from ..server.update_attention import Query

Start = Literal["sent", "newest"]


def _mcsa(*, unit: Unit = "tensor", sigma: float = 50.0, weighting: Weighting = "samples") -> ServerUpdate:
    return Attention(unit, sigma=sigma, size_weighted=weighting == "samples")


def _fedamp(*, unit: Unit = "model", sigma: float = 1.0, alpha: float = 1.0) -> ServerUpdate:
    return AMP(unit, alpha=alpha, sigma=sigma)


def _heurfedamp(*, unit: Unit = "model", sigma: float = 25.0, self_weight: float = 0.5) -> ServerUpdate:
    return HeurAMP(unit, sigma=sigma, self_weight=self_weight)


def _update_attention(*, query: Query = "time", weighting: Weighting = "uniform") -> ServerUpdate:
    return UpdateAttention(weighting, query=query)


def _learned(*, unit: Unit = "layer", hn_lr: float = 5e-3) -> ServerUpdate:
    return Learned(unit, hn_lr)


def _average(*, weighting: Weighting = "samples") -> ServerUpdate:
    return Average(weighting)


def _sgd(start: Start) -> ClientUpdate:
    return SGD(start=start)


def _prox(start: Start, *, lam: float = 0.01) -> ClientUpdate:
    return SGD((Proximal(lam),), start=start)


def _pfedme(start: Start, *, lam: float = 15.0, K: int = 5, personal_lr: float = 0.05) -> ClientUpdate:
    return Moreau(lam, K, personal_lr, start)


def _ditto(start: Start, *, lam: float = 1.0, personal_lr: float | None = None) -> ClientUpdate:
    return Ditto(lam, personal_lr, SGD(start=start))


def _scaffold(start: Start) -> ClientUpdate:
    return SGD((ControlVariates(),), start=start)


SERVERS: dict[str, Callable[..., ServerUpdate]] = {
    "mcsa": _mcsa,
    "fedamp": _fedamp,
    "heurfedamp": _heurfedamp,
    "update_attention": _update_attention,
    "learned": _learned,
    "average": _average,
}
CLIENTS: dict[str, Callable[..., ClientUpdate]] = {
    "sgd": _sgd,
    "prox": _prox,
    "pfedme": _pfedme,
    "ditto": _ditto,
    "scaffold": _scaffold,
}
"""name -> factory of keyword options."""
