"""Clients that accept better models only: what they refuse, and what they go on with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.table import CASES, KINDS
from conformance.test_conformance import fit
from fedattune import Federation, Result
from fedattune.algorithms import ALGORITHMS
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from federations import make_federation
from remote_runs import Here, same_numbers, trained

pytestmark = pytest.mark.usefixtures("unmeasured")

BY_NAME = {case.name: case for case in CASES}
REMOTE = ["fedmcsa", "fedrep", "ditto", "fedala", "mocha"]
ACCEPT: dict[str, Any] = {"accept": "better", "cohort": 6}


@pytest.fixture(scope="module")
def judging() -> Federation:
    """Six clients with validation rows enough that noise is not better by chance."""
    data = make_federation([100, 110, 120, 130, 140, 150])
    assert int(data.sizes("validation").min()) >= 7
    return data


def same_models(one: Result, other: Result, tolerance: float = 0.0) -> None:
    for name, values in one.models.items():
        torch.testing.assert_close(other.models[name], values, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "vrl_sgd", "pfedla"])
def test_who_refuses_everything_trains_alone(name: str, judging: Federation) -> None:
    """Noise of a hundred times the norm is worse than anything: from round 2 on, all go on by themselves."""
    noise: dict[str, Any] = {"attack": "gaussian:100", "attackers": 2, "early_stopping": "off", "rounds": 4, "steps": 3}
    refusing = fit(judging, name, **ACCEPT, **noise)
    alone = fit(judging, "local", **noise)
    trained = [client.trained for client in refusing.clients]
    assert trained == pytest.approx([client.trained for client in alone.clients])
    for one, other in zip(refusing.history, alone.history, strict=True):
        assert one["trained"]["loss_uniform"] == pytest.approx(other["trained"]["loss_uniform"], abs=1e-9)
    refusals = refusing.facts["refusals"]
    honest = [client.id for client in refusing.clients]
    assert all(refusals["clients"][one] == 3 for one in honest)  # of four rounds; the first model is everybody's
    assert [r for r, _ in refusals["rounds"]] == [2, 3, 4]


def test_clients_without_validation_rows_accept_everything() -> None:
    data = make_federation([40, 6, 40])
    assert data.sizes("validation").tolist()[1] == 0
    result = fit(data, "fedavg", accept="better", cohort=3, attack="gaussian:100", attackers=1)
    assert "1" not in result.facts["refusals"]["clients"]
    assert any("clients have no validation rows and accept everything" in note for note in result.notes)


@pytest.mark.parametrize("name", KINDS)
def test_both_engines_give_the_same(name: str, judging: Federation) -> None:
    attacked: dict[str, Any] = {"attack": "negated_model", "attackers": 2, "options": BY_NAME[name].same}
    one, other = (
        fit(judging, name, **(ACCEPT | {"cohort": 4}), **attacked, engine=engine)
        for engine in ("sequential", "vectorized")
    )
    same_models(one, other, 1e-7)  # sums in another order, in float64, through three rounds
    assert one.facts.get("refusals") == other.facts.get("refusals")


@pytest.mark.parametrize("name", REMOTE)
def test_remote_clients_refuse_the_same(name: str, judging: Federation) -> None:
    settings: dict[str, Any] = {"accept": "better", "attack": "negated_model", "attackers": 2}
    runs = [trained(BY_NAME[name], judging, backend, **settings) for backend in (None, Here)]
    same_numbers(*runs)
    assert runs[0].facts["refusals"] == runs[1].facts["refusals"]


@pytest.mark.parametrize("before", [None, Here])
@pytest.mark.parametrize("name", ["fedavg", "fedmcsa"])
def test_a_resumed_run_refuses_the_same(name: str, before: Any, judging: Federation, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accept": "better", "attack": "negated_model", "attackers": 2}
    case, out, rounds = BY_NAME[name], tmp_path / "run", iter(range(1, 9))
    part = trained(case, judging, before, out=out, stop=lambda: next(rounds) == 2, **settings)
    assert not part.is_finished
    whole, resumed = (trained(case, judging, None, **settings), trained(case, judging, None, out=out, **settings))
    same_numbers(whole, resumed)
    assert whole.facts["refusals"] == resumed.facts["refusals"]


def test_mocha_goes_on_with_a_tie_to_the_own_model() -> None:
    """The gradient of the tie, lam1 (sent + Omega_tt w), is zero at the own model."""
    rule = ALGORITHMS["mocha"]().client
    sent = Payload(Params(w=torch.tensor([4.0])), {"omega": Params(own=torch.tensor(0.5))})
    assert rule.offered_model(sent)["w"].item() == -8.0
    own = Params(w=torch.tensor([3.0]))
    replaced = rule.substitute(sent, own)
    assert (replaced.params["w"] + 0.5 * own["w"]).item() == 0.0
