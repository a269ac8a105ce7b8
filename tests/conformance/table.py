"""The table of the conformance suite: a method joins by one line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest


class Sizes(NamedTuple):
    """Floats of the model that the conformance suite trains: all, and those of its classifier."""

    d: int
    head: int


def all_floats(sizes: Sizes) -> float:
    """The whole model."""
    return sizes.d


def twice(sizes: Sizes) -> float:
    """The whole model, and something of its size."""
    return 2 * sizes.d


def base_floats(sizes: Sizes) -> float:
    """All but the classifier."""
    return sizes.d - sizes.head


def head_floats(sizes: Sizes) -> float:
    """The classifier alone."""
    return sizes.head


def nothing(sizes: Sizes) -> float:
    """Nothing at all."""
    return 0


@dataclass(frozen=True)
class Case:
    name: str
    knobs: dict[str, Any] = field(default_factory=dict)  # option -> another value
    under: dict[str, dict[str, Any]] = field(default_factory=dict)  # option -> options it acts under
    on: dict[str, str] = field(default_factory=dict)  # option -> problem on which it acts, if another
    acts: dict[str, Any] = field(default_factory=dict)  # settings under which all options act
    up: Callable[[Sizes], float] | None = all_floats  # uploaded by a cohort member per round; None: it varies
    down: Callable[[Sizes], float] | None = all_floats  # sent per cohort member and round
    to_all: bool = False  # sent to all clients, not to the cohort alone
    same: dict[str, Any] = field(default_factory=dict)  # options under which engines agree (no random noise)
    learns: dict[str, Any] = field(default_factory=dict)  # settings and options under which the loss surely falls
    # Problem on which the mechanism acts and helps at its default, and the method without it; none without mechanism.
    helps: tuple[str, str, dict[str, Any]] | None = None


PAPER = {"profile": "paper"}
MCSA = {"sigma": 1.0, "unit": "model", "size_weighted": True}
UNDER_MCSA = {"unit": PAPER | {"sigma": 5.0}, "size_weighted": PAPER | {"sigma": 5.0}, "sigma": PAPER}

LEARNED = {"hn_lr": 1.0, "hn_step": "gradient", "embedding": 7, "hidden": 9, "norm": "relu_sum", "unit": "model"}

CASES = [
    Case("local", up=nothing, down=nothing),
    Case("fedavg", {"weighting": "uniform"}),
    Case("fedavg_ft", {"weighting": "uniform", "ft_steps": 1, "ft_lr": 0.3}),
    Case(
        "fedprox", {"mu": 2.0, "weighting": "uniform"}, helps=("drift, few clients", "fedprox", {"mu": 0.0})
    ),
    Case(
        "fedlc",
        {"tau": 3.0, "absent": "excluded", "weighting": "uniform"},
        on={"absent": "drift"},  # where clients lack classes
        helps=("rare classes", "fedlc", {"tau": 0.0}),
    ),
    Case(
        "moon",
        {"mu": 1.0, "tau": 0.1, "weighting": "uniform"},
        learns={"rounds": 25, "steps": 10},
        helps=("drift, scales, two layers", "moon", {"mu": 0.0}),
    ),
    Case(
        "perfedavg",
        {
            "alpha": 0.3, "beta": 0.3, "hessian": "hf", "delta": 0.5, "weighting": "uniform",
            "adapt_on": "test", "adapt_steps": 3,
        },
        {"delta": {"hessian": "hf", "alpha": 0.5}},
        helps=("groups, two layers", "fedavg_ft", {"ft_steps": 1}),
    ),
    Case(
        "pfedme",
        {"lam": 3.0, "K": 2, "personal_lr": 0.01, "beta": 0.5, "weighting": "uniform"},
        to_all=True,
        same={"K": 3},  # a recorded step has all K inner ones: the default of 5 takes longer and adds nothing
        helps=("related tasks", "local", {}),
    ),
    Case(
        "fedamp",
        {"alpha": 0.01, "sigma": 1.0, "lam": 0.0, "distance": "absolute", "unit": "layer"},
        down=lambda sizes: sizes.d + 1,  # and alpha_k
        helps=("groups", "local", {}),
    ),
    Case(
        "heurfedamp",
        {"sigma": 1.0, "self_weight": "attention", "lam": 0.0, "unit": "layer"},
        helps=("groups", "heurfedamp", {"sigma": 0.0}),
    ),
    Case(
        "fedmcsa",
        {"profile": "paper", "lam": 1.0, "anchor": "round", "weight_decay": 0.1} | MCSA,
        {"lam": PAPER} | UNDER_MCSA,
        helps=("groups", "fedmcsa", {"sigma": 0.0}),
    ),
    Case(
        "fedmcsa_no_mcsa",
        {"profile": "paper", "lam": 1.0, "anchor": "round", "weight_decay": 0.1, "evaluate": "trained"},
        {"lam": PAPER},
        to_all=True,
    ),
    Case(
        "fedavg_mcsa",
        {"profile": "paper"} | MCSA,
        UNDER_MCSA,
        helps=("groups", "fedavg_mcsa", {"sigma": 0.0}),
    ),
    Case(
        "pfedme_mcsa",
        {"profile": "paper", "lam": 3.0, "K": 2, "personal_lr": 0.01} | MCSA,
        UNDER_MCSA,
        same={"K": 3},
        helps=("groups", "pfedme_mcsa", {"sigma": 0.0}),
    ),
    Case(
        "pfedgraph",
        {"alpha": 3.0, "lam": 1.0, "weighting": "uniform"},
        helps=("permuted labels", "pfedgraph", {"alpha": 1e9}),
    ),
    Case("pfedla", LEARNED, helps=("groups, two layers", "pfedla", {"hn_lr": 1e-09})),
    Case(
        "heurpfedla",
        {"retain": 0, "upload_retained": False} | LEARNED,
        down=None,
        helps=("groups, two layers", "heurpfedla", {"hn_lr": 1e-09}),
    ),
    Case(
        "pfedhn",
        {
            "embedding": 5, "hidden": 9, "depth": 1, "hn_lr": 0.1, "hn_momentum": 0.0, "hn_weight_decay": 0.1,
            "hn_clip": 0.1, "momentum": 0.0, "clip": 0.1, "weight_decay": 0.1,
        },
        learns={"rounds": 25, "steps": 3},
        helps=("groups", "fedavg", {}),
    ),
    Case("fedbn", {"weighting": "samples"}),
    Case(
        "fedrep",
        {
            "head_epochs": 2, "base_epochs": 2, "momentum": 0.0, "weight_decay": 0.1, "weighting": "uniform",
            "head": "1",
        },
        up=base_floats,
        down=base_floats,
    ),
    Case(
        "fedpac",
        {"lam": 0.1, "head_epochs": 2, "base_epochs": 2, "weighting": "uniform"},
        # Mean features (six) and shares of three classes; the statistics h and V beside them.
        up=lambda sizes: sizes.d + 21 + 18 + 1,
        down=lambda sizes: sizes.d + 21,
        helps=("few digits", "fedrep", {"head_epochs": 1}),
    ),
    Case("fedper", {"layers": 0, "weighting": "uniform", "head": "1"}, up=base_floats, down=base_floats),
    Case(
        "lg_fedavg",
        {"layers": 2, "weighting": "uniform", "head": "1"},
        up=head_floats,
        down=head_floats,
        helps=("related tasks, two layers", "local", {}),
    ),
    Case(
        "fedgh",
        {"server_lr": 1.0, "server_epochs": 3},
        # A representation of six features and a flag for each of three classes.
        up=head_floats,
        down=head_floats,
        helps=("few digits", "local", {}),
    ),
    Case(
        "fedbabu",
        {"tuned": "all", "ft_steps": 1, "ft_lr": 0.3, "weighting": "uniform", "head": "1"},
        up=base_floats,
        down=base_floats,
        helps=("drift, two layers", "fedavg_ft", {}),
    ),
    Case(
        "ifca",
        {"clusters": 4, "spread": 0.1, "weighting": "samples"},
        on={"clusters": "groups", "spread": "groups"},
        acts={"rounds": 6},
        # Both models come; one model and a flag for each of the two goes.
        up=lambda sizes: sizes.d + 2,
        down=lambda sizes: 2 * sizes.d,
        helps=("groups", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "fednova",
        {"tau_eff": 1.0, "weighting": "uniform"},
        up=lambda sizes: sizes.d + 2,  # and the number of effective steps, with its inverse
        helps=("unequal work", "fedavg", {}),
    ),
    Case("feddyn", {"alpha": 1.0}, helps=("drift, few clients", "fedavg", {"weighting": "uniform"})),
    Case(
        "fedfomo",
        {
            "models": 2, "epsilon": 1.0, "epsilon_decay": 0.3, "validation": 0.5, "fallback": "previous",
            "affinity": "normalised",
        },
        {
            "epsilon_decay": {"epsilon": 1.0}, "fallback": {"models": 2, "validation": 0.9},
            "affinity": {"models": 3},
        },
        acts={"rounds": 8},
        # Four models of others with their numbers come, one model and a number for each of the four goes.
        up=lambda sizes: sizes.d + 4,
        down=lambda sizes: 4 * (sizes.d + 1),
        helps=("groups", "local", {}),
    ),
    Case(
        "igfl",
        {"attention": "self", "time_form": "T1", "stale_decay": 0.5, "weighting": "samples"},
        down=twice,
        helps=("rare pair", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "igfl_c",
        {"stale_decay": 0.0, "weighting": "samples"},
        down=twice,
        helps=("drift", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "igfl_s",
        {"attention": "global", "time_form": "T2", "weighting": "samples"},
        helps=("rare pair", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "fedavgm",
        {"beta": 0.5, "server_lr": 0.5, "weighting": "samples"},
        helps=("drift", "fedavgm", {"beta": 0.0}),
    ),
    Case(
        "fedexp",
        {"eps": 1.0, "weighting": "samples"},
        on={"eps": "drift"},  # where updates are alike, eta is 1 with every eps
        helps=("drift", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "scaffold",
        {"option": "I", "server_lr": 0.5, "weighting": "samples"},
        up=twice,
        down=twice,
        helps=("drift", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "fedadam",
        {"server_lr": 0.1, "beta1": 0.5, "beta2": 0.9, "tau": 0.1, "weighting": "samples"},
        helps=("drift, scales", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "fedyogi",
        {"server_lr": 0.1, "beta1": 0.5, "beta2": 0.9, "tau": 0.1, "weighting": "samples"},
        helps=("drift, scales", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "fedadagrad",
        {"server_lr": 0.01, "beta1": 0.5, "tau": 0.1, "weighting": "samples"},
        helps=("drift, scales", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "vrl_sgd",
        {"warmup": True, "weighting": "samples"},
        helps=("drift", "fedavg", {"weighting": "uniform"}),
    ),
    Case(
        "fedam",
        {
            "lam": 10.0, "alignment": "coral", "hidden": 3, "context": "concatenated", "normalize": False,
            "client_vector": "absolute", "per_feature": False, "combine": "probabilities", "head_mix": 0.9,
            "reset_personal_extractor": False, "weighting": "uniform",
        },
        # 6 features, 1 hidden unit: 7 values before it and 24 after.
        up=lambda sizes: sizes.d + 7 + 24,
        down=lambda sizes: sizes.d + 7 + 24,
        learns={"rounds": 25, "steps": 3},
        helps=("heads", "fedam", {"context": "client"}),
    ),
    Case(
        "fedcp",
        {
            "lam": 10.0, "noise": False, "context": "client", "first_context": "head",
            "client_vector": "absolute", "head_mix": 0.9, "reset_personal_extractor": False,
            "weighting": "uniform",
        },
        # 6 features: a linear layer to 12, and their scale and shift.
        up=lambda sizes: sizes.d + 7 * 12 + 24,
        down=lambda sizes: sizes.d + 7 * 12 + 24,
        same={"noise": False},
        learns={"rounds": 25, "steps": 3},
        helps=("heads", "fedcp", {"context": "client"}),
    ),
    Case("fedrod", {"personal_init": "zeros", "weighting": "uniform"}, helps=("groups", "fedavg", {})),
    Case(
        "apfl",
        {"alpha": 0.9, "adaptive": True, "weighting": "uniform"},
        helps=("related tasks", "apfl", {"alpha": 1.0}),
    ),
    Case(
        "ditto",
        {"lam": 0.1, "personal_lr": 0.01, "weighting": "uniform"},
        helps=("related tasks", "ditto", {"lam": 0.0}),
    ),
    Case(
        "fedproto",
        {"lam": 0.1, "distance": "classes", "predict": "head", "weighting": "uniform"},
        # A prototype of six features and a share for each of three classes.
        up=lambda sizes: sizes.head,
        down=lambda sizes: sizes.head,
        learns={"rounds": 25, "steps": 10},
        helps=("few digits", "fedproto", {"lam": 0.0}),
    ),
    Case(
        "l2gd",
        {"p": 0.9, "c": 0.1, "weighting": "samples"},
        {"c": {"p": 0.9}, "weighting": {"p": 0.9}},
        up=None,
        down=None,
        helps=("related tasks", "l2gd", {"p": 0.0}),
    ),
    Case(
        "mocha",
        {"lam1": 0.1, "lam2": 0.1, "omega": "learned"},
        down=lambda sizes: sizes.d + 1,  # and Omega_tt
        helps=("related tasks", "mocha", {"lam1": 0.0}),
    ),
    Case(
        "fedala",
        {"layers": 2, "eta": 10.0, "share": 0.3, "first_passes": 2, "weighting": "uniform"},
        helps=("groups", "fedala", {"eta": 0.0}),
    ),
    Case(
        "knn_per",
        {"k": 3, "lam": 0.9, "memory": 5, "weighting": "uniform"},
        helps=("groups", "knn_per", {"lam": 0.0}),
    ),
    Case(
        "feddbe",
        {"kappa": 10.0, "mu": 0.1, "weighting": "uniform"},
        up=lambda sizes: sizes.d + 7,  # and the mean of six features, with a flag
        down=lambda sizes: sizes.d + 7,
        learns={"rounds": 25, "steps": 10},
        helps=("drift, two layers", "fedavg", {}),
    ),
    Case(
        "attune",
        {
            "server_momentum": 0.0, "likeness": 1.0, "compare_groups": False, "own_head": True, "class_shares": False,
            "guard": "equal", "weighting": "uniform",
        },
        {"own_head": {"own_head": False}},  # in this order: the first models have no parameter that others lack
        on={"likeness": "groups", "compare_groups": "permuted labels"},
        acts={"rounds": 8},
        up=lambda sizes: sizes.d + 20,  # and the change of the weights of 19 experts, with the scale of the errors
        down=lambda sizes: sizes.d + 20,
        helps=("related tasks", "local", {}),
    ),
    Case(
        "combined",
        {
            "server": "average", "client": "prox", "personal": "head", "answer": True, "unit": "model",
            "sigma": 1.0, "alpha": 0.2, "self_weight": 0.1, "attention": "self", "hn_lr": 1.0,
            "weighting": "uniform", "lam": 3.0, "K": 2, "personal_lr": 0.01,
        },
        {
            "alpha": {"server": "fedamp"}, "self_weight": {"server": "heurfedamp"},
            "attention": {"server": "update_attention"}, "hn_lr": {"server": "learned"},
            "lam": {"client": "prox"}, "K": {"client": "pfedme"}, "personal_lr": {"client": "ditto"},
        },
        helps=("groups", "combined", {"sigma": 0.0}),
    ),
]  # fmt: skip

KINDS = (
    *("local", "fedmcsa", "pfedla", "pfedhn", "fedrep", "fedrod"),
    *("scaffold", "fedfomo", "fedam", "ifca", "mocha", "attune"),
)
"""A method of each kind of state and message, for what the package does with all methods alike."""

some_methods = pytest.mark.parametrize("case", [c for c in CASES if c.name in KINDS], ids=lambda case: case.name)
