"""`fedattune privacy`: the noise of a plan, without training."""

import json
from collections.abc import Callable

import pytest

import fedattune
from cli_helpers import Done, refused
from fedattune import Federation
from fedattune.privacy.accounting import epsilon_of
from fedattune.training.uploads.client_privacy import UploadAccounting

Cli = Callable[..., Done]


def plan(cli: Cli, *words: str) -> list[dict[str, float]]:
    done = cli("privacy", *words, "--json")
    assert done.code == 0, done.err
    plans: list[dict[str, float]] = json.loads(done.out)["plans"]
    return plans


def test_a_plan_for_clients_is_what_a_run_takes(cli: Cli, ragged: Federation) -> None:
    words = "--target-epsilon 5 --delta 0.01 --clients 6 --cohort 3 --rounds 4 --parameters 100"
    on_sums, on_uploads, *at_nodes = plan(cli, *words.split())
    for name, planned in (("fedavg", on_sums), ("fedmcsa", on_uploads)):
        run = fedattune.fit(ragged, name, "mlr", rounds=4, steps=1, cohort=3, dp_client=5.0, dp_delta=0.01)
        assert "client_privacy" in run.reports
        assert run.reports["client_privacy"]["noise_multiplier"] == planned["noise_multiplier"]
        assert run.epsilon == planned["epsilon"]
    settings = fedattune.Settings(rounds=4, cohort=3, dp_client=5.0, dp_delta=0.01)
    multiplier = UploadAccounting(settings, 6, is_sum=True, is_secret=True).multiplier
    assert [one["noise_multiplier"] for one in at_nodes] == [multiplier] * 2
    assert at_nodes[1]["noise_ratio"] == pytest.approx(10 * multiplier) == pytest.approx(3 * at_nodes[0]["noise_ratio"])
    assert multiplier > on_uploads["noise_multiplier"]
    assert on_uploads["noise_ratio"] == pytest.approx(10 * on_uploads["noise_multiplier"])
    assert on_sums["noise_ratio"] == pytest.approx(10 / 3 * on_sums["noise_multiplier"])


def test_noise_and_epsilon_are_each_others_reverse(cli: Cli) -> None:
    words = "--level record --delta 1e-5 --samples 1000 --batch-size 100 --steps 5 --rounds 10"
    (planned,) = plan(cli, *words.split(), "--target-epsilon", "12")
    (again,) = plan(cli, *words.split(), "--noise-multiplier", str(planned["noise_multiplier"]))
    assert again["epsilon"] == planned["epsilon"] == epsilon_of(planned["noise_multiplier"], 0.1, 50, 1e-5)
    assert 11.9 < planned["epsilon"] <= 12


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "give --target-epsilon, to learn the noise multiplier, or --noise-multiplier"),
        ("--target-epsilon 1 --noise-multiplier 1", "give --target-epsilon, to learn"),
        ("--target-epsilon 1 --level record", "needs --samples"),
        ("--target-epsilon 1 --clients 3 --cohort 5", "cohort: got 5 clients per round"),
        ("--target-epsilon 0", "target-epsilon"),
        ("--target-epsilon 1 --delta 2", "delta"),
    ],
)
def test_impossible_plans_are_one_sentence(cli: Cli, words: str, text: str) -> None:
    refused(cli("privacy", *words.split()), text)
