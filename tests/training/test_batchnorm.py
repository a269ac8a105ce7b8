"""What becomes of BatchNorm layers: scale and shift, and running statistics, each kept or averaged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedattune
from fedattune import Federation, Params, Result
from federations import make_federation

pytestmark = pytest.mark.usefixtures("unmeasured")

RUN: dict[str, Any] = {"rounds": 2, "cohort": 6, "steps": 3, "batch_size": 8, "lr": 0.1, "dtype": "float64"}
STATISTICS = {"0.1.running_mean", "0.1.running_var"}


def network() -> nn.Module:
    """BatchNorm hidden in a nested block and called 1: it can only be found by its type."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), nn.ReLU(), nn.Linear(6, 3))


def fit(federation: Federation, name: str = "fedavg", **settings: Any) -> Result:
    return fedattune.fit(federation, name, network(), **(RUN | settings))


def alike(stack: torch.Tensor) -> bool:
    return bool((stack == stack[:1]).all()) if len(stack) > 1 else True


@pytest.mark.parametrize("buffers", ["local", "average"])
@pytest.mark.parametrize("affine", ["average", "local"])
@pytest.mark.parametrize("name", ["fedavg", "fedmcsa", "pfedme"])
def test_policies_on_both_engines(name: str, affine: str, buffers: str, ragged: Federation) -> None:
    """Engines agree; what is local differs between clients, what is averaged does not."""
    given = {"bn_affine": affine, "bn_buffers": buffers, "cohort": 4}
    reference, together = (fit(ragged, name, engine=e, **given) for e in ("sequential", "vectorized"))
    for kind in ("models", "buffers"):
        for k, v in getattr(reference, kind).items():
            assert (v - getattr(together, kind)[k]).abs().max() < 1e-12, k
    if name == "fedavg":
        assert alike(reference.models["0.1.weight"]) is (affine == "average")
        assert alike(reference.models["2.weight"])
        assert all(alike(reference.buffers[k]) is (buffers == "average") for k in STATISTICS)
    plain = fit(ragged, name, cohort=4)
    floats = 12 * (buffers == "average") - 12 * (affine == "local")
    assert reference.bytes_up - plain.bytes_up == 8 * floats * 4 * RUN["rounds"]
    receivers = 6 if name == "pfedme" else 4
    assert reference.bytes_down - plain.bytes_down == 8 * floats * receivers * RUN["rounds"]


def test_averaged_statistics_are_the_weighted_mean_of_the_cohorts(ragged: Federation) -> None:
    """After one round of everybody: sum_k n_k s_k / sum_k n_k, s_k what training alone would have left."""
    own = fit(ragged, rounds=1, bn_buffers="local").buffers
    shared = fit(ragged, rounds=1, bn_buffers="average").buffers
    n = ragged.sizes("train").double()
    for k in STATISTICS:
        mean = (n[:, None] * own[k]).sum(0) / n.sum()
        assert torch.allclose(shared[k], mean.expand(6, 6), atol=1e-14)
        assert (own[k] - mean).abs().max() > 1e-3


def test_the_global_model_is_evaluated_on_all_test_parts(ragged: Federation) -> None:
    """Where all clients hold the same model, that is their pooled accuracy; where none is shared, there is none."""
    shared = fit(ragged, bn_buffers="average")
    assert shared.global_accuracy == shared.metrics["acc_pooled"]
    assert fit(ragged, "local").global_accuracy is None
    assert fit(ragged, "fedmcsa").global_accuracy is None
    assert fit(ragged, bn_affine="local").global_accuracy is None
    assert fit(ragged, "fedrod").global_accuracy is not None
    assert fit(ragged, "fedrod", bn_affine="local").global_accuracy is None
    moreau = fedattune.fit(ragged, "pfedme", "mlr", **RUN)
    assert moreau.final["received"]
    assert moreau.global_accuracy == moreau.final["received"]["acc_pooled"]
    assert moreau.global_accuracy != moreau.metrics["acc_pooled"]


def test_a_stopped_run_goes_on_with_its_shared_statistics(ragged: Federation, tmp_path: Any) -> None:
    given = {"bn_buffers": "average", "rounds": 4, "cohort": 3}
    whole = fit(ragged, **given)
    fit(ragged, out=tmp_path / "run", callbacks=[fedattune.OnRound(lambda _: True)], **given)
    rest = fit(ragged, out=tmp_path / "run", resume=True, **given)
    assert all(torch.equal(v, rest.buffers[k]) for k, v in whole.buffers.items())
    assert whole.metrics == rest.metrics


def test_a_newcomer_is_given_the_averaged_statistics(ragged: Federation, tmp_path: Any) -> None:
    """Training does not look at running statistics: three steps of momentum 0.1 leave 0.9^3 of what it was given."""
    result = fit(ragged, bn_buffers="average", rounds=6, out=tmp_path / "run")
    common = result.buffers["0.1.running_mean"][0]
    new = make_federation([30, 40])
    assert result.trained_server
    from_zero = replace(result, trained_server=replace(result.trained_server, statistics=Params()))
    given, zero, read = (
        fedattune.personalize(run, new, rounds=1, module=network()).buffers["0.1.running_mean"]
        for run in (result, from_zero, Result.load(tmp_path / "run"))
    )
    assert torch.allclose(given - zero, 0.9**3 * common, atol=1e-14)
    assert torch.equal(given, read)
    assert common.abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("name", "options"), [("ditto", {"lam": 0.0}), ("apfl", {"alpha": 1.0}), ("l2gd", {"p": 0.0})])
def test_a_model_trained_beside_the_clients_own_leaves_its_statistics_alone(
    name: str, options: dict[str, Any], engine: str, ragged: Federation
) -> None:
    """Without any pull these train the client's model as Local does: parameters and statistics are the same."""
    own = fit(ragged, name, options=options, engine=engine)
    local = fit(ragged, "local", engine=engine)
    for k, v in local.models.items():
        assert torch.allclose(own.models[k], v, atol=1e-14)
    for k in STATISTICS:
        assert torch.allclose(own.buffers[k], local.buffers[k], atol=1e-14)


def test_policies_without_effect_are_said(ragged: Federation) -> None:
    result = fedattune.fit(ragged, "fedavg", "mlr", bn_buffers="average", **RUN)
    assert result.notes == ["this model has no BatchNorm layers: --bn-affine and --bn-buffers change nothing"]
    assert not fit(ragged, bn_buffers="average").notes
