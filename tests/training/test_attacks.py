"""What each attack uploads or trains on, by hand; and the same attack wherever clients are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedattune
from conformance.table import CASES, Case, some_methods
from conformance.test_conformance import RUN, fit
from fedattune import ConfigError, Federation, Params, Result
from fedattune.core.settings import Settings
from fedattune.data.types import TargetScale
from fedattune.training.sampling import sample_eval_ids
from fedattune.training.uploads.adversary import check_attack, sample_attackers
from fedattune.training.uploads.attacks import ATTACKS, View, compute_z_max, parse_attack
from fedattune.training.uploads.poisoning import Rows, flip_labels, poison_rows, shift_labels, stamp_trigger
from federations import make_federation, many
from remote_runs import Here, same_numbers, trained

pytestmark = pytest.mark.usefixtures("unmeasured")

BY_NAME = {case.name: case for case in CASES}
SOME = ["fedavg", "fedmcsa", "scaffold", "pfedla", "fedrep"]


def make_view(strength: float = 0.0) -> View:
    """One attacker, which was sent (1, 1) and trained to (2, 3); two honest clients; two layers of one weight each."""

    def stack(body: list[float], head: list[float]) -> Params:
        return Params({"0.weight": torch.tensor(body), "1.weight": torch.tensor(head)})

    return View(
        received=stack([1.0], [1.0]),
        trained=stack([2.0], [3.0]),
        honest=stack([4.0, 8.0], [5.0, 5.0]),
        honest_received=stack([2.0, 2.0], [1.0, 3.0]),
        head=frozenset(["1.weight"]),
        victim=1,
        strength=strength,
        rng=np.random.default_rng(0),
        run_rng=np.random.default_rng(0),
    )


MIN_MAX = (-3 + 84**0.5) / 5
"""Factor of "Min-Max": the updates (2, 4) and (6, 2) are 20^0.5 apart, with the mean (4, 3) and deviation (2, 1). The
squared distance of mean - g (2, 1) from (6, 2) is (-2 - 2 g)^2 + (1 - g)^2 = 5 + 6 g + 5 g^2, which is 20 at this g."""


@pytest.mark.parametrize(
    ("attack", "strength", "body", "head"),
    [
        ("negated_model", 0.0, -2.0, -3.0),
        ("negated_update", 0.0, 0.0, -1.0),  # 1 - (2 - 1), 1 - (3 - 1)
        ("scaled_model", 10.0, 20.0, 30.0),
        ("scaled_update", 10.0, 11.0, 21.0),  # 1 + 10 (2 - 1), 1 + 10 (3 - 1)
        ("victim_head", 0.0, 8.0, -5.0),
        ("collusion", 0.0, 8.0, -5.0),
        ("alie", 1.5, 6 - 1.5 * 2, 5.0),  # mean 6, deviation 2; mean 5, deviation 0
        ("ipm", 0.5, 1 - 0.5 * 4, 1 - 0.5 * 3),  # mean updates (2 + 6) / 2 and (4 + 2) / 2
        ("free_rider", 0.0, 1.0, 1.0),
        # Updates (2, 4) and (6, 2) have norms 20^0.5 and 40^0.5; the lower one is the median. Their mean is (4, 3).
        ("against_mean", 1.0, 1 - 20**0.5 * 4 / 5, 1 - 20**0.5 * 3 / 5),
        ("head_against_mean", 1.0, 1 + 4, 1 - 2),  # 20 = 4^2 + 2^2
        ("min_max", 0.0, 1 + 4 - 2 * MIN_MAX, 1 + 3 - MIN_MAX),
        ("mimic", 0.0, 1 + 6, 1 + 2),  # the stream of the run draws the second client
    ],
)
def test_uploads_by_hand(attack: str, strength: float, body: float, head: float) -> None:
    corrupt = ATTACKS[attack].corrupt
    assert corrupt
    uploads = corrupt(make_view(strength))
    assert (uploads["0.weight"].item(), uploads["1.weight"].item()) == pytest.approx((body, head))


@pytest.mark.parametrize("attack", ["drift", "steer"])
def test_a_direction_stays(attack: str) -> None:
    """The norm is twice the lower median 20^0.5; another round draws other noise, but no other direction."""
    corrupt = ATTACKS[attack].corrupt
    assert corrupt
    uploads = [torch.cat([*corrupt(make_view(2.0)._replace(rng=np.random.default_rng(r))).values()]) for r in range(2)]
    assert (uploads[0] - 1).norm().item() == pytest.approx(2 * 20**0.5)
    assert torch.equal(*uploads)


@pytest.mark.parametrize(
    ("schedule", "rounds"),
    [("", [1, 2, 3, 4, 5, 6]), ("@4", [5, 6]), ("@-2", [5, 6]), ("@/2", [2, 4, 6]), ("@/4", [4])],
)
def test_when_attackers_attack(schedule: str, rounds: list[int]) -> None:
    chosen = parse_attack(f"ipm:2{schedule}")
    assert (chosen.name, chosen.strength) == ("ipm", 2.0)
    assert [r for r in range(1, 7) if chosen.acts_in(r, 6)] == rounds


@pytest.mark.parametrize("text", ["ipm@", "ipm@0", "ipm@1.5", "ipm@/0", "ipm@x", "ipm:2@//2"])
def test_a_wrong_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="honest for 20 rounds"):
        parse_attack(text)


def test_poisoned_rows_have_no_schedule() -> None:
    with pytest.raises(ConfigError, match="label_flip poisons rows before the first round"):
        parse_attack("label_flip@20")


def test_honest_until_the_schedule_begins(equal: Federation) -> None:
    """Until then, the run is the run without an attack."""
    attacked = fit(equal, "fedavg", attack="negated_model@2", attackers=2, rounds=3, screening="off", accept="always")
    plain = fit(equal, "fedavg", attack="free_rider@3", attackers=2, rounds=3, screening="off", accept="always")
    losses = [[row["received"]["loss_uniform"] for row in run.history] for run in (attacked, plain)]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]


def test_noise_has_the_norm_of_the_model() -> None:
    corrupt = ATTACKS["gaussian"].corrupt
    assert corrupt
    noise = torch.cat([*corrupt(make_view(1.0)).values()])
    assert noise.norm().item() == pytest.approx(13**0.5)
    assert noise.tolist() != [2.0, 3.0]


def test_z_max_is_the_papers() -> None:
    """Baruch et al., section 3: n = 50, m = 24: s = 2, Phi(z) = 24 / 26."""
    assert compute_z_max(26, 24) == pytest.approx(1.4261, abs=1e-4)


@pytest.mark.parametrize(
    ("poison", "labels"), [(flip_labels, [2, 1, 0]), (shift_labels, [1, 2, 0])], ids=["flip", "shift"]
)
def test_labels_by_hand(poison: Any, labels: list[int]) -> None:
    data = make_federation([9, 9])
    x, y = torch.zeros(3, 5), torch.tensor([0, 1, 2])
    new_x, new_y = poison(Rows(x, y, data, 0.0))
    assert new_y.tolist() == labels
    assert torch.equal(new_x, x)


def test_a_target_that_is_a_number_is_negated() -> None:
    data = make_federation([20, 20])
    data = replace(data, y=data.y.float() - 1, classes=(), target_scale=TargetScale(5.0, 2.0))
    poisoned = poison_rows(data, [1], flip_labels, 0.0)
    new = poisoned.y[torch.as_tensor(poisoned.part("train")[1])]
    assert torch.equal(new, -data.y[torch.as_tensor(data.part("train")[1])])
    for attack in ("label_shift", "backdoor"):
        with pytest.raises(ConfigError, match="needs classes"):
            check_attack(Settings(attack=attack, attackers=1), data)


def test_poisoned_rows_are_copies() -> None:
    """Clients share samples: those of honest clients, and all test rows, stay as they are."""
    data = many(10)
    poisoned = poison_rows(data, [3, 7], flip_labels, 0.0)
    for part in ("train", "validation", "test"):
        for i in range(10):
            rows, before = (torch.as_tensor(one.part(part)[i]) for one in (poisoned, data))  # type: ignore[arg-type]
            expected = 2 - data.y[before] if part == "train" and i in (3, 7) else data.y[before]
            assert torch.equal(poisoned.y[rows], expected)
            assert torch.equal(poisoned.x[rows], data.x[before])
    assert torch.equal(poisoned.x[: len(data.x)], data.x)


def test_the_trigger_is_a_white_corner() -> None:
    data = fedattune.load_federation("digits", partition="iid", clients=4)
    x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    stamped = stamp_trigger(data, x)
    assert stamped.sum(dim=(1, 2, 3)).tolist() == [4 * 16, 4 * 16]  # white is 16 here
    assert (stamped[:, :, -2:, -2:] == 16).all()
    columns = stamp_trigger(make_federation([9, 9]), torch.zeros(1, 16))
    assert columns.tolist() == [[0.0] * 14 + [3.0] * 2]


def test_a_backdoor_opens_for_the_average_and_not_for_those_who_train_alone() -> None:
    data = fedattune.load_federation("digits", partition="iid", clients=5)
    success = {}
    for name in ("fedavg", "local"):
        result = fedattune.fit(data, name, "mlr", attack="backdoor", attackers=2, rounds=15, lr=0.2)
        success[name] = result.reports["attack"]["success"]
    assert success["fedavg"] > 0.5
    assert success["local"] < 0.2


# --- who attacks -----------------------------------------------------------------------------------------


def test_attackers_are_the_same_for_every_method_and_seed_and_are_not_judged(ragged: Federation) -> None:
    settings = [Settings(attack="ipm", attackers=2, seed=seed) for seed in (0, 1)]
    first, second = (sample_attackers(one, ragged) for one in settings)
    assert first == second
    assert len(first) == 2
    assert not set(sample_eval_ids(settings[0], ragged, first).tolist()) & set(first)
    result = fit(ragged, "fedavg", attack="ipm", attackers=2)
    assert list(result.facts["attack"]["attackers"]) == [str(i) for i in first]
    assert len(result.clients) == 4
    assert result.n_clients == 6
    assert any("2 of the 6 clients attack (--attack ipm" in note for note in result.notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attack": "negatedmodel"}, "did you mean 'negated_model'"),
        ({"attack": "ipm:much"}, "got 'ipm:much', expected ipm:NUMBER"),
        ({"attack": "label_flip:2"}, "takes no number"),
        ({"attack": "backdoor:1.5"}, "from 0 to 1"),
        ({"attack": "ipm", "attackers": 6}, "fewer than the 6 clients"),
        ({"attackers": 2}, "it needs an attack"),
        ({"attack": "ipm", "attackers": 0}, "whole number|number of clients"),
    ],
)
def test_an_impossible_attack_is_refused(settings: dict[str, Any], message: str, ragged: Federation) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(ragged, "fedavg", **settings)


# --- the same attack everywhere --------------------------------------------------------------------------


def same_models(one: Result, other: Result, tolerance: float) -> None:
    for name, values in one.models.items():
        torch.testing.assert_close(other.models[name], values, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "attack"),
    [("fedavg", a) for a in ATTACKS] + [(n, a) for n in SOME[1:] for a in ("collusion", "label_flip_count")],
)
def test_engines_agree(name: str, attack: str, ragged: Federation) -> None:
    one, other = (
        fit(ragged, name, attack=attack, attackers=2, rounds=2, engine=engine, options=BY_NAME[name].same)
        for engine in ("sequential", "vectorized")
    )
    same_models(one, other, 1e-8)  # sums in another order, in float64


@pytest.mark.parametrize(
    ("name", "attack"), [*(("fedavg", a) for a in ATTACKS), ("pfedla", "alie"), ("pfedla", "victim_head")]
)
def test_remote_clients_give_the_same(name: str, attack: str, ragged: Federation) -> None:
    runs = [trained(BY_NAME[name], ragged, make_backend, attack=attack, attackers=2) for make_backend in (None, Here)]
    for run in runs:  # where the models are with the workers, nobody can measure a back door
        run.facts["notes"] = [note for note in run.facts["notes"] if "with the trigger" not in note]
    same_numbers(*runs)


@some_methods
def test_methods_run_under_attack(case: Case, ragged: Federation) -> None:
    """Honest clients that share nothing train as without the attack."""
    one = fit(ragged, case.name, attack="label_flip_count", attackers=2, rounds=2)
    if case.name == "local":
        honest = fit(ragged, case.name, rounds=2)
        kept = [i for i in range(6) if str(i) not in one.facts["attack"]["attackers"]]
        for name, values in one.models.items():
            assert torch.equal(values, honest.models[name][kept])


@pytest.mark.parametrize("attack", ["gaussian", "label_flip"])
@pytest.mark.parametrize("name", ["fedavg", "fedmcsa"])
def test_a_resumed_run_is_the_same(name: str, attack: str, ragged: Federation, tmp_path: Path) -> None:
    case, attacked = BY_NAME[name], {"attack": attack, "attackers": 2}
    rounds = iter(range(1, 9))
    out = tmp_path / "run"
    part = trained(case, ragged, None, out=out, stop=lambda: next(rounds) == 2, **attacked)
    assert not part.is_finished
    same_numbers(trained(case, ragged, None, **attacked), trained(case, ragged, None, out=out, **attacked))


def test_a_false_count_outweighs_all_others(ragged: Federation) -> None:
    """FedAvg weighs by samples; equal weights do not see what clients claim."""
    attacked: dict[str, Any] = {"attackers": 1, "rounds": 1, "cohort": 6, "max_weight": 1e9}
    weights, models = {}, {}
    for weighting in ("samples", "uniform"):
        for attack in ("label_flip", "label_flip_count"):
            run = fit(ragged, "fedavg", attack=attack, options={"weighting": weighting}, **attacked)
            (attacker,) = map(int, run.facts["attack"]["attackers"])
            assert run.trained_server
            p = run.trained_server.state["p"]
            assert isinstance(p, torch.Tensor)
            weights[weighting, attack] = p[attacker].item()
            models[weighting, attack] = run
    n = ragged.sizes("train").double()
    assert weights["samples", "label_flip"] == pytest.approx((n[attacker] / n.sum()).item())
    others = n.sum().item() - n[attacker].item()
    assert weights["samples", "label_flip_count"] == pytest.approx(1e6 / (1e6 + others))
    assert weights["uniform", "label_flip_count"] == pytest.approx(1 / 6)
    same_models(models["uniform", "label_flip"], models["uniform", "label_flip_count"], 0.0)


assert RUN["rounds"] > 2  # tests above stop after round 2 of a run
