"""The table of the conformance suite: a method joins by one line.

A case names the algorithm, for every one of its options another value that must change the result, and, where the
option acts only under others, those others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Floats of the model that the conformance suite trains: all, and those of its classifier."""

    d: int
    head: int


def all_floats(sizes: Sizes) -> float:
    """The whole model."""
    return sizes.d


def nothing(sizes: Sizes) -> float:
    """Nothing at all."""
    return 0


@dataclass(frozen=True)
class Case:
    name: str
    knobs: dict[str, Any] = field(default_factory=dict)  # option -> another value
    under: dict[str, dict[str, Any]] = field(default_factory=dict)  # option -> options it acts under
    up: Callable[[Sizes], float] | None = all_floats  # uploaded by a cohort member per round; None: it varies
    down: Callable[[Sizes], float] | None = all_floats  # sent per cohort member and round
    to_all: bool = False  # sent to all clients, not to the cohort alone
    same: dict[str, Any] = field(default_factory=dict)  # options under which engines agree (no random noise)
    learns: dict[str, Any] = field(
        default_factory=dict
    )  # settings and options under which the loss surely falls


PAPER = {"profile": "paper"}
MCSA = {"sigma": 1.0, "unit": "model", "size_weighted": True}
UNDER_MCSA = {"unit": PAPER | {"sigma": 5.0}, "size_weighted": PAPER | {"sigma": 5.0}, "sigma": PAPER}

CASES = [
    Case("local", up=nothing, down=nothing),
    Case("fedavg", {"weighting": "uniform"}),
    Case("fedavg_ft", {"weighting": "uniform", "ft_steps": 1, "ft_lr": 0.3}),
    Case("fedprox", {"mu": 2.0, "weighting": "uniform"}),
    Case(
        "perfedavg",
        {
            "alpha": 0.3,
            "beta": 0.3,
            "hessian": "hf",
            "delta": 0.5,
            "weighting": "uniform",
            "adapt_on": "test",
        },
        {"delta": {"hessian": "hf", "alpha": 0.5}},
    ),
    Case(
        "pfedme",
        {"lam": 3.0, "K": 2, "personal_lr": 0.01, "beta": 0.5, "weighting": "uniform"},
        to_all=True,
    ),
    Case(
        "fedamp",
        {"alpha": 0.2, "sigma": 0.2, "lam": 0.0, "unit": "layer"},
        {"unit": {"alpha": 0.1}},
    ),
    Case("heurfedamp", {"sigma": 1.0, "self_weight": "attention", "lam": 0.0, "unit": "layer"}),
    Case(
        "fedmcsa",
        {"profile": "paper", "lam": 1.0, "anchor": "round", "weight_decay": 0.1} | MCSA,
        {"lam": PAPER} | UNDER_MCSA,
    ),
    Case(
        "fedmcsa_no_mcsa",
        {"profile": "paper", "lam": 1.0, "anchor": "round", "weight_decay": 0.1, "evaluate": "trained"},
        {"lam": PAPER},
        to_all=True,
    ),
    Case("fedavg_mcsa", {"profile": "paper"} | MCSA, UNDER_MCSA),
    Case("pfedme_mcsa", {"profile": "paper", "lam": 3.0, "K": 2, "personal_lr": 0.01} | MCSA, UNDER_MCSA),
]
