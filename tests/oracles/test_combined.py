"""Where parts chosen by name make up a method that there is, they are that method to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedattune
from fedattune import Algorithm, ConfigError, Federation, Participation, Result
from fedattune.algorithms import combined
from fedattune.algorithms.ditto import DittoClient
from fedattune.algorithms.fedamp import AttentiveMixing, CosineMixing
from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.igfl import UpdateAttention
from fedattune.algorithms.pfedla import PFedLAServer
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.algorithms.scaffold import ControlVariateCorrection, ControlVariateWrapper
from fedattune.analysis.citations import UsedItem, collect_used_items
from fedattune.client import SGD, Proximal
from fedattune.core.selectors import Head
from fedattune.server import Average

RUN: dict[str, Any] = {"rounds": 3, "cohort": 4, "steps": 3, "batch_size": 16, "lr": 0.1, "dtype": "float64"}
PAPER = {"profile": "paper"}
METHODS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # method, its options, and the options of `combined` that are the same
    ("fedavg", {}, {"server": "average"}),
    ("fedavg", {"weighting": "uniform"}, {"server": "average", "weighting": "uniform"}),
    ("fedprox", {}, {"server": "average", "client": "prox"}),
    ("fedprox", {"mu": 2.0}, {"server": "average", "client": "prox", "lam": 2.0}),
    ("ditto", {}, {"server": "average", "client": "ditto"}),
    (
        "ditto",
        {"lam": 0.1, "personal_lr": 0.01},
        {"server": "average", "client": "ditto", "lam": 0.1, "personal_lr": 0.01},
    ),
    ("scaffold", {}, {"server": "average", "client": "scaffold", "weighting": "uniform"}),
    ("scaffold", {"weighting": "samples"}, {"server": "average", "client": "scaffold"}),
    ("fedper", {}, {"server": "average", "personal": "head"}),
    ("fedbn", {}, {"server": "average", "personal": "norms", "weighting": "uniform"}),
    ("igfl_s", {}, {"server": "update_attention"}),
    ("igfl_s", {"attention": "self"}, {"server": "update_attention", "attention": "self"}),
    ("fedavg_mcsa", {}, {"answer": True}),
    (
        "fedavg_mcsa",
        {"profile": "paper", "sigma": 5.0},
        {"answer": True, "unit": "layer", "weighting": "uniform", "sigma": 5.0},
    ),
    ("pfedme_mcsa", {}, {"client": "pfedme", "answer": True}),
    ("heurfedamp", {}, {"server": "heurfedamp", "client": "prox", "lam": 1.0, "answer": True}),
    (
        "heurfedamp",
        {"lam": 0.0, "self_weight": 0.2},
        {"server": "heurfedamp", "client": "prox", "lam": 0.0, "answer": True, "self_weight": 0.2},
    ),
    (
        "heurfedamp",
        {"self_weight": "attention", "sigma": 0.0},
        {
            "server": "heurfedamp",
            "client": "prox",
            "lam": 1.0,
            "answer": True,
            "self_weight": "attention",
            "sigma": 0.0,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("fedavg", {"server": "average"}),
        ("fedprox", {"server": "average", "client": "prox"}),
        ("ditto", {"server": "average", "client": "ditto"}),
        ("scaffold", {"server": "average", "client": "scaffold", "weighting": "uniform"}),
        ("fedavg_mcsa", {"answer": True}),
    ],
)
def test_what_is_a_known_method_runs_alike(name: str, mine: dict[str, Any], ragged: Federation) -> None:
    known = fedattune.fit(ragged, name, "mlr", **RUN)
    result = fedattune.fit(ragged, "combined", "mlr", options=mine, **RUN)
    assert same(known, result)


def same(a: Result, b: Result) -> bool:
    alike = all(torch.equal(v, b.models[k]) for k, v in a.models.items())
    return alike and a.metrics == b.metrics and (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)


BY_HAND: list[tuple[dict[str, Any], Algorithm]] = [
    ({}, Algorithm(SGD(), Attention("tensor", sigma=50.0, size_weighted=True))),
    (
        {"client": "scaffold", "personal": "head", "unit": "layer"},
        Algorithm(
            SGD((ControlVariateCorrection(),)),
            ControlVariateWrapper(Attention("layer", sigma=50.0, size_weighted=True)),
            personal=Head(),
        ),
    ),
    (
        {"server": "fedamp", "client": "ditto"},
        Algorithm(DittoClient(1.0), AttentiveMixing("model", alpha=1.0, sigma=0.25)),
    ),
    (
        {"server": "heurfedamp", "client": "prox", "unit": "tensor", "sigma": 3.0},
        Algorithm(SGD((Proximal(0.1),)), CosineMixing("tensor", sigma=3.0, self_weight=0.5)),
    ),
    (
        {"server": "update_attention", "client": "pfedme", "K": 2, "weighting": "samples"},
        Algorithm(PFedMeClient(15.0, 2, 0.05), UpdateAttention("samples", attention="time")),
    ),
    ({"server": "learned", "hn_lr": 0.1}, Algorithm(SGD(), PFedLAServer("layer", hn_lr=0.1))),
    (
        {"server": "average", "client": "ditto", "answer": True},
        Algorithm(DittoClient(1.0, None, SGD(start="newest")), Average(), participation=Participation("all", "answer")),
    ),
]


@pytest.mark.parametrize(("mine", "by_hand"), BY_HAND, ids=lambda value: str(value)[:40])
def test_it_is_the_algorithm_of_its_parts(mine: dict[str, Any], by_hand: Algorithm, ragged: Federation) -> None:
    assert replace(combined(**mine), notes=()) == by_hand
    result = fedattune.fit(ragged, "combined", "mlr", options=mine, **RUN)
    assert same(fedattune.fit(ragged, by_hand, "mlr", **RUN), result)


def test_an_option_that_no_part_has_is_refused(ragged: Federation) -> None:
    for options, said in (
        (
            {"server": "average", "sigma": 1.0},
            r"sigma: no part has .*server=average has weighting, client=sgd has none",
        ),
        ({"K": 2, "lam": 1.0}, "combined: K, lam: no part has"),
        ({"client": "prox", "personal_lr": 0.1}, "personal_lr: no part has .*client=prox has lam"),
        ({"server": "fedamp", "weighting": "uniform"}, "weighting: no part has"),
        ({"server": "learned", "self_weight": 0.0}, "self_weight: no part has"),
        ({"server": "fedamp", "sigma": 0}, "sigma: got 0, expected a number above 0 for server=fedamp"),
        ({"server": "median"}, "combined.server"),
    ):
        with pytest.raises(ConfigError, match=said):
            fedattune.fit(ragged, "combined", "mlr", options=options, **RUN)


def test_the_run_says_which_parts_it_had(ragged: Federation, tmp_path: Path) -> None:
    """With the values of all their options; and cites their papers alone."""
    options = {"server": "fedamp", "client": "prox", "lam": 0.5, "personal": "head"}
    result = fedattune.fit(ragged, "combined", "mlr", options=options, out=tmp_path / "run", **RUN)
    assert result.notes[0] == (
        "combined: server=fedamp, unit=model, sigma=0.25, alpha=1.0, client=prox, lam=0.5, personal=head"
    )
    assert collect_used_items([tmp_path / "run"])[0][:3] == [
        UsedItem("part", "fedamp"), UsedItem("part", "prox"), UsedItem("part", "head")
    ]  # fmt: skip
    (plain,) = combined().notes
    assert plain == "combined: server=mcsa, unit=tensor, sigma=50.0, weighting=samples, client=sgd, personal=none"
