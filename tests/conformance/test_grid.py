"""Any server attention with any client rule: each cell of the grid is one line, and runs on both engines."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedattune
from conformance.test_conformance import RUN, distance
from fedattune import Algorithm, ClientUpdate, ConfigError, Federation, Participation, Result, ServerUpdate
from fedattune.algorithms.ditto import DittoClient
from fedattune.algorithms.fedamp import AttentiveMixing, CosineMixing
from fedattune.algorithms.fedfomo import FedFomoClient
from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.igfl import GlobalUpdateWrapper, UpdateAttention
from fedattune.algorithms.perfedavg import PerFedAvgClient
from fedattune.algorithms.pfedhn import PFedHNServer
from fedattune.algorithms.pfedla import PFedLAServer
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.algorithms.scaffold import ControlVariateCorrection, ControlVariateWrapper
from fedattune.client import SGD, Proximal
from fedattune.core.selectors import Head, NamedParameters, NoParameters, Selector
from fedattune.server import Average, Mixing, Pool
from federations import make_federation

pytestmark = pytest.mark.usefixtures("unmeasured")

SERVERS: dict[str, ServerUpdate] = {
    "mcsa": Attention("layer", sigma=5.0),
    "mcsa, everybody seen": Attention("tensor", pool="all", sigma=5.0),
    "fedamp": AttentiveMixing(alpha=0.3, sigma=4.0),
    "heurfedamp, layer by layer": CosineMixing("layer", sigma=3.0),
    "update attention": UpdateAttention(attention="self"),
    "update attention, time": UpdateAttention(attention="time"),
    "learned": PFedLAServer(hn_lr=0.5, embedding=4, hidden=4),
}
CLIENTS: dict[str, ClientUpdate] = {
    "sgd": SGD(),
    "sgd from newest": SGD(start="newest"),
    "prox": SGD((Proximal(0.5),)),
    "prox from newest": SGD((Proximal(0.5),), start="newest"),
    "pfedme": PFedMeClient(3.0, 2, 0.05),
    "pfedme from newest": PFedMeClient(3.0, 2, 0.05, start="newest"),
    "ditto": DittoClient(0.5),
    "scaffold": SGD((ControlVariateCorrection(),)),
    "scaffold and prox from newest": SGD((ControlVariateCorrection("I"), Proximal(0.5)), start="newest"),
    "ditto with scaffold": DittoClient(0.5, shared=SGD((ControlVariateCorrection(),))),
    "perfedavg": PerFedAvgClient(0.05, 0.05),
}
PERSONAL: dict[str, Selector] = {"all shared": NoParameters(), "own head": Head(), "own body": NamedParameters(("1",))}


def combined(client: str, server: str, personal: str) -> Algorithm:
    """One cell; rules that go on from their own model are answered, others are sent to."""
    rule = ControlVariateWrapper(SERVERS[server]) if "scaffold" in client else SERVERS[server]
    answered = Participation("all", "answer") if "newest" in client else Participation()
    return Algorithm(CLIENTS[client], rule, personal=PERSONAL[personal], participation=answered)


def run(algorithm: Algorithm, federation: Federation, engine: str, **settings: Any) -> Result:
    given = RUN | {"rounds": 2, "model_options": {"hidden": 4}, "engine": engine} | settings
    return fedattune.fit(federation, algorithm, "dnn", **given)


CELLS = [
    (server, client, [*PERSONAL][(i + j) % len(PERSONAL)])
    for i, server in enumerate(SERVERS)
    for j, client in enumerate(CLIENTS)
]
"""Every pair of rules, and each of them with every selector."""


@pytest.mark.parametrize(("server", "client", "personal"), CELLS)
def test_any_server_rule_composes_with_any_client_rule(
    server: str, client: str, personal: str, ragged: Federation
) -> None:
    algorithm = combined(client, server, personal)
    reference, together = (run(algorithm, ragged, engine) for engine in ("sequential", "vectorized"))
    assert distance(reference, together) < 1e-12
    assert all(v.isfinite().all() for v in reference.models.values())
    assert len(reference.mixing) == 2
    mixed = {component.partition(".")[0] for component in reference.mixing.last()}
    layers = {"1", "3"} - {"own head": {"3"}, "own body": {"1"}}.get(personal, set())
    assert mixed - {"attention"} in (layers, {"model"})


@pytest.mark.parametrize("around", [ControlVariateWrapper, GlobalUpdateWrapper])
def test_what_goes_around_generated_models_lets_clients_join(around: Any, ragged: Federation) -> None:
    client = SGD((ControlVariateCorrection(),)) if around is ControlVariateWrapper else SGD()
    algorithm = Algorithm(client, around(PFedHNServer(embedding=2, hidden=4)))
    joined = fedattune.personalize(run(algorithm, ragged, "vectorized"), make_federation([20, 30]), rounds=2)
    assert all(v.isfinite().all() for v in joined.models.values())


class Wide(Mixing):
    """A mixing rule that forgets who is to be given something."""

    def weights(self, pool: Pool) -> Tensor:
        return torch.eye(pool.allowed.shape[1])


def test_a_mixing_matrix_of_another_shape_is_named(ragged: Federation) -> None:
    with pytest.raises(
        ConfigError, match=r"Wide.weights: got a matrix \(\d, \d\), expected \(3, \d\): one row per client"
    ):
        fedattune.fit(ragged, Algorithm(SGD(), Wide()), rounds=4, cohort=3, steps=1)


def test_parts_that_do_not_go_together_are_named(ragged: Federation) -> None:
    for algorithm, said in (
        (
            Algorithm(SGD((ControlVariateCorrection(),)), Attention()),
            "SGD cannot go with Attention.*rule ControlVariateWrapper",
        ),
        (
            Algorithm(DittoClient(0.5, shared=SGD((ControlVariateCorrection(),))), Average()),
            "DittoClient cannot go with Average",
        ),
        (
            Algorithm(SGD(), ControlVariateWrapper(Average())),
            "ControlVariateWrapper goes with clients that use ControlVariateCorrection",
        ),
        (Algorithm(FedFomoClient(), Average()), "FedFomoClient cannot go with Average.*rule FedFomoServer"),
        (Algorithm(SGD(), Attention("leyer")), "unit: got 'leyer', expected model, layer, tensor"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(algorithm, ragged, "vectorized")
    with pytest.raises(ConfigError, match=r"Algorithm: evaluation_point: got 'last', expected 'received' or 'trained'"):
        Algorithm(SGD(), Average(), evaluation_point="last")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Algorithm: client: got Average.*, expected a ClientUpdate"):
        Algorithm(Average(), SGD())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"SGD: corrections: got Proximal.*, expected a tuple"):
        SGD(Proximal(0.1))  # type: ignore[arg-type]
