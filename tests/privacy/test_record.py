"""Record-level privacy of whole runs: which methods, what it costs, and that it is counted."""

from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from torch import nn

import fedattune
from conformance.table import CASES, KINDS, Case
from fedattune import ConfigError, Federation, Result, Settings
from fedattune.algorithms import ALGORITHMS
from fedattune.core.options import build
from fedattune.deploy.node.policy import NodePolicy, PrivacyBudgetError
from fedattune.models import make_model
from fedattune.privacy.accounting import format_epsilon
from fedattune.training.clients.record_privacy import RecordPlan, count_gradients
from fedattune.training.sampling import sample_cohort
from fedattune.training.setup import make_run_context
from federations import make_federation
from remote_runs import Here, same_numbers, trained

pytestmark = pytest.mark.usefixtures("unmeasured")

RUN: dict[str, Any] = {"rounds": 2, "steps": 3, "batch_size": 8, "lr": 0.1, "dtype": "float64"}

REFUSED = {
    "fedfomo": "reads rows before its local steps",
    "fedala": "reads rows before its local steps",
    "knn_per": "reads rows before its local steps",
    "ifca": "reads rows before its local steps",
    "fedrod": "number of rows of each class",
    "fedlc": "number of rows of each class",
    "attune": "number of rows of each class",
    "fedam": "compares the rows of a batch",
    "fedcp": "compares the rows of a batch",
    "feddbe": "compares the rows of a batch",
    "fedpac": "compares the rows of a batch",
    "fedgh": "compares the rows of a batch",
    "fedproto": "compares the rows of a batch",
}


def fit(name: str, federation: Federation, **settings: Any) -> Result:
    return fedattune.fit(federation, name, "dnn", model_options={"hidden": 6}, **(RUN | settings))


def fit_case(case: Case, federation: Federation, **settings: Any) -> Result:
    return fit(case.name, federation, options=case.same, **settings)


def make_plan(name: str, federation: Federation, *, is_secret: bool = False, **settings: Any) -> RecordPlan:
    options = settings.pop("options", {})
    given = Settings(**(RUN | settings))
    module = make_model("dnn", federation, options={"hidden": 6})
    context = make_run_context(build(name, ALGORITHMS[name], options), federation, module, given)
    plan = RecordPlan.make(context, is_secret=is_secret)
    assert plan is not None
    return plan


def account(events: list[tuple[float, float, int]], delta: float) -> float:
    """The epsilon of (noise multiplier, sampling rate, times), from dp-accounting itself."""
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3)
    for noise, rate, times in events:
        one = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
        accountant.compose(dp.SelfComposedDpEvent(one, times))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_trains_with_private_gradients_or_says_why_not(case: Case, ragged: Federation) -> None:
    if case.name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[case.name]):
            fit_case(case, ragged, dp_record_noise=0.5)
        return
    result = fit_case(case, ragged, dp_record_noise=0.5, engine="vectorized")
    facts = result.reports["record_privacy"]
    assert len(facts["epsilon"]) == len(result.clients)
    assert all(0 < epsilon < 1e3 for epsilon in facts["epsilon"])
    assert all(v.isfinite().all() for v in result.models.values())
    if case.name not in KINDS:
        return
    again, other = (
        fit_case(case, ragged, dp_record_noise=noise, engine=engine)
        for noise, engine in ((0.5, "sequential"), (0.6, "vectorized"))
    )
    for k, v in result.models.items():
        torch.testing.assert_close(again.models[k], v, rtol=1e-9, atol=1e-9)
    assert any(not torch.equal(other.models[k], v) for k, v in result.models.items())


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("scaffold", {"option": "I"}, "reads rows before its local steps"),
        ("perfedavg", {"adapt_on": "test"}, "test rows"),
    ],
)
def test_options_that_take_more_from_rows_are_refused(
    name: str, options: dict[str, Any], what: str, ragged: Federation
) -> None:
    with pytest.raises(ConfigError, match=what):
        fit(name, ragged, options=options, dp_record=3.0)


def test_batch_norm_is_refused_and_group_norm_trains(ragged: Federation, tmp_path: Path) -> None:
    def net(norm: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), norm, nn.ReLU(), nn.Linear(6, 3))

    run = partial(fedattune.fit, ragged, "fedavg", dp_record_noise=1.0, **RUN)
    with pytest.raises(ConfigError, match="GroupNorm"):
        run(net(nn.BatchNorm1d(6)), out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
    assert run(net(nn.GroupNorm(2, 6))).reports["record_privacy"]["noise_multiplier"][0] == 1.0


class Recurrent(nn.Module):
    """A model with a recurrent layer of PyTorch, which `vmap` cannot run on the CPU in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.recurrent(x[:, None])[0][:, -1])
        return out


def test_models_without_gradients_of_single_rows_are_refused(ragged: Federation) -> None:
    with pytest.raises(ConfigError, match="Recurrent gives no gradients of single rows"):
        fedattune.fit(ragged, "fedavg", Recurrent(), dp_record=3.0, **RUN)


@pytest.mark.parametrize(
    ("name", "options", "calls"),
    [
        ("fedavg", {}, (1,)),
        ("ditto", {}, (2,)),
        ("apfl", {}, (2,)),
        ("pfedme", {"K": 3}, (3,)),
        ("perfedavg", {}, (1, 1)),
        ("perfedavg", {"hessian": "hf"}, (1, 1, 2)),
        ("scaffold", {}, (1,)),
        ("pfedhn", {}, (1,)),
    ],
)
def test_gradients_of_a_step_are_counted_by_batch(
    name: str, options: dict[str, Any], calls: tuple[int, ...], ragged: Federation
) -> None:
    assert count_gradients(make_plan(name, ragged, options=options, dp_record_noise=1.0).context) == calls


def test_epsilon_is_that_of_dp_accounting(ragged: Federation) -> None:
    """One Gaussian mechanism per step; with k gradients of one batch, of the noise over sqrt(k)."""
    for name, options, k, rounds in (
        ("fedavg", {}, 1, 3),
        ("ditto", {}, 2, 3),
        ("pfedme", {"K": 4}, 4, 3),
        ("fedmcsa", {}, 1, 2),
    ):
        result = fit(name, ragged, options=options, rounds=rounds, steps=5, dp_record_noise=1.5)
        for client, found in list(zip(result.clients, result.reports["record_privacy"]["epsilon"], strict=True))[::3]:
            rate = min(1.0, 8 / client.n_train)
            want = account([(1.5 / sqrt(k), rate, rounds * 5)], 1e-5)
            # Rows are rounded down by up to 5%, and losses up to the next interval: never below, a little above.
            assert want * 0.999 <= found <= want * 1.12


def test_no_client_exceeds_the_target_and_small_clients_get_more_noise() -> None:
    federation = make_federation([40, 80, 400])
    result = fit("ditto", federation, rounds=4, steps=5, dp_record=2.0, dp_delta=1e-6)
    facts = result.reports["record_privacy"]
    assert facts["target"] == 2.0
    assert all(1.9 < epsilon <= 2.0 for epsilon in facts["epsilon"])
    small, middle, large = facts["noise_multiplier"]
    assert small > middle > large
    note = next(note for note in result.notes if "record-level" in note)
    assert "at most 2" in note
    assert "validation and test rows" in note


def test_the_largest_epsilon_is_that_of_all_clients(ragged: Federation) -> None:
    """Also where few are evaluated, and the others have fewer rows."""
    settings = {"rounds": 2, "steps": 5, "dp_record_noise": 1.0}
    everybody = fit("fedavg", ragged, **settings)
    some = fit("fedavg", ragged, eval_clients=2, **settings)
    spent = everybody.reports["record_privacy"]["epsilon"]
    assert max(some.reports["record_privacy"]["epsilon"]) < max(spent)
    assert some.epsilon == everybody.epsilon == some.reports["record_privacy"]["largest"] == max(spent)
    notes = [next(note for note in one.notes if "at most" in note) for one in (some, everybody)]
    assert all(f"at most {format_epsilon(max(spent))}, at" in note for note in notes)


def test_rounds_in_which_a_client_trains_are_counted(ragged: Federation) -> None:
    """The cohort of a method whose clients train only then; all rounds where everybody trains."""
    cohorts = [sample_cohort(Settings(**RUN | {"cohort": 2, "rounds": 6}), 6, r).tolist() for r in range(1, 7)]
    counts = [sum(client in cohort for cohort in cohorts) for client in range(6)]
    assert len(set(counts)) > 1
    plan = make_plan("fedavg", ragged, cohort=2, rounds=6, dp_record=3.0)
    assert plan.planned_rounds.tolist() == counts
    assert make_plan("pfedme", ragged, cohort=2, rounds=6, dp_record=3.0).planned_rounds.tolist() == [6] * 6
    nodes = make_plan("fedavg", ragged, cohort=2, rounds=6, dp_record=3.0, is_secret=True)
    assert nodes.planned_rounds.tolist() == [6] * 6
    result = fit("fedavg", ragged, cohort=2, rounds=6, dp_record=3.0)
    for epsilon, count in zip(result.reports["record_privacy"]["epsilon"], counts, strict=True):
        assert epsilon <= 3.0
        assert (epsilon > 2.8) == (count > 0)


def test_a_resumed_run_ends_with_the_same_models_and_the_same_epsilon(ragged: Federation, tmp_path: Path) -> None:
    run = partial(fit, "ditto", ragged, cohort=4, rounds=5, dp_record=4.0)
    whole, rounds = run(), []

    def stop() -> bool:
        rounds.append(1)
        return len(rounds) == 2

    part = run(out=tmp_path / "run", callbacks=[fedattune.OnRound(lambda _: stop())])
    spent = part.reports["record_privacy"]["epsilon"]
    assert not part.is_finished
    end = run(out=tmp_path / "run", resume=True)
    assert end.reports["record_privacy"] == whole.reports["record_privacy"]
    assert all(a <= b for a, b in zip(spent, end.reports["record_privacy"]["epsilon"], strict=True))
    assert max(spent) < max(end.reports["record_privacy"]["epsilon"])
    for k, v in whole.models.items():
        assert torch.equal(end.models[k], v)


def test_remote_clients_train_as_here(ragged: Federation) -> None:
    case = next(case for case in CASES if case.name == "fedmcsa")
    settings = {"dp_record": 4.0, "early_stopping": "off", "engine": "sequential"}
    same_numbers(trained(case, ragged, None, **settings), trained(case, ragged, Here, **settings))


def test_a_node_does_not_train_more_often_than_its_noise_is_made_for(tmp_path: Path) -> None:
    policy = NodePolicy.read({})
    for _ in range(3):
        policy.count_trained(tmp_path, 1, 3)
    with pytest.raises(PrivacyBudgetError, match="privacy budget is spent"):
        policy.count_trained(tmp_path, 1, 3)
    policy.count_trained(tmp_path, 1)


def test_the_settings_are_checked(ragged: Federation) -> None:
    for wrong, what in (
        ({"dp_record": 1.0, "dp_record_noise": 1.0}, "not both"),
        ({"dp_record": 0}, "greater than 0"),
        ({"dp_record_clip": 2.0}, "it needs dp_record"),
    ):
        with pytest.raises(ConfigError, match=what):
            Settings.from_keywords(**wrong)
    notes = fit("fedavg", ragged, dp_record_noise=1.0, dp_delta=0.2).notes
    assert any("is no promise for a client" in note for note in notes)
