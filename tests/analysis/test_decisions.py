"""What a method decided for each client: groups from its mixtures, and the weight of the shared model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import fedattune
from crafted import ALL, LABELS, craft
from fake_results import Fake, results
from fedattune import Federation, read_runs
from fedattune.analysis.load import read_run
from fedattune.analysis.mixing.decisions import Decisions, find_groups, read_decisions
from fedattune.analysis.verdict import reach_verdict
from fedattune.cli import main

PAIRS = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.2, 0.8], [0, 0, 0.2, 0.8]]
ONE = [[0.1, 0.2, 0.3, 0.4]] * 4
Rounds = Mapping[int, tuple[Sequence[int], Sequence[int], Mapping[str, Sequence[Sequence[float]]]]]


def decide(folder: Path, mixing: Rounds, shares: list[float | None] | None = None) -> Decisions | None:
    facts = {} if shares is None else {"client_scalars": {"shared": shares}}
    craft(folder, "mine", {4: [7, 15, 6, 30]}, labels=LABELS, mixing=mixing, facts=facts)
    run = read_run(folder / "mine" / "seed-0")
    assert run is not None
    return read_decisions(run)


def test_groups_and_shares(tmp_path: Path) -> None:
    found = decide(tmp_path, {4: (ALL, ALL, {"model": PAIRS})}, [0.05, 0.5, 0.95, None])
    assert found is not None
    assert found.groups == [["a", "b"], ["c", "d"]]
    assert found.is_whole_model
    assert found.describe() == (
        "mine found 2 groups of clients; predictions come from their own model for 1 of 3 clients (a), "
        "from their group's model for 1, from both for 1."
    )
    assert found.describe(3).startswith("In the first of 3 runs, mine found 2 groups")
    assert "  group 2: c 95%, d -" in found.write_paragraphs()
    assert found.describe_client("a") == ("Its predictions come to 5% from its group's model, which it shares with b.")
    assert found.describe_client("d") is None


@pytest.mark.parametrize(
    "weights",
    [
        {"model": [[0.4, 0.6, 0, 0], [0.5, 0.5, 0, 0], *PAIRS[2:]]},  # another mixture for each client
        {"model": [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], *PAIRS[2:]]},  # overlapping ones
        {"fc.weight": PAIRS, "fc.bias": ONE},  # another one for each layer
    ],
)
def test_other_mixtures_are_not_groups(tmp_path: Path, weights: Mapping[str, Sequence[Sequence[float]]]) -> None:
    found = decide(tmp_path, {4: (ALL, ALL, weights)}, [0.5] * 4)
    assert found is not None
    assert found.groups is None
    assert found.describe() == (
        "With mine, predictions come from a mixture of their own and the shared model for all 4 clients."
    )


def test_cohorts_join_the_groups_of_which_their_mixtures_are_made(tmp_path: Path) -> None:
    """a and c have the last round; b took part before, beside a; d in no round with a stored mixture."""
    mixing = {3: ([0, 1], [0, 1], {"model": [[0.5, 0.5]] * 2}), 4: ([0, 2], [0, 2], {"model": [[1, 0], [0, 1]]})}
    found = decide(tmp_path, mixing, [0.5] * 4)
    assert found is not None
    assert found.groups == [["a", "b"], ["c"]]
    assert "Clients without a stored mixture, whose group is not known: 1." in found.write_paragraphs()


def test_the_verdict_tells_it(tmp_path: Path) -> None:
    facts = {"client_scalars": {"shared": [0.5, 0.5, 0.0, 1.0]}}
    craft(tmp_path, "local", {4: [5, 10, 5, 20]})
    mixing = {4: (ALL, ALL, {"model": PAIRS})}
    craft(tmp_path, "mine", {4: [7, 15, 6, 30]}, mixing=mixing, facts=facts, moved=100)
    (text,) = read_runs([tmp_path]).verdict.details
    assert text == (
        "mine found 2 groups of clients; predictions come from their own model for 1 of 4 clients (c), "
        "from their group's model for 1, from both for 2."
    )
    plain = results(Fake("local", [0.5] * 4), Fake("mine", [0.6] * 4))
    assert "predictions come" not in reach_verdict(plain).text


def test_attune_from_training_to_words(ragged: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The facts are the scalars of the exported models, and `explain` prints them."""
    result = fedattune.fit(ragged, "attune", rounds=2, steps=2, lr=0.1, out=tmp_path / "run")
    shares = result.facts["client_scalars"]["shared"]
    first = dict(result.model(0).named_parameters())["guard.share"]
    assert shares[0] == pytest.approx(first.item())
    assert len(shares) == len(result.clients)
    groups, _ = find_groups(result)
    assert groups.keys() == set(range(len(shares)))
    assert main(["explain", str(tmp_path / "run"), "--json", str(tmp_path / "e.json")]) == 0
    assert "attune found " in capsys.readouterr().out
    content = json.loads((tmp_path / "e.json").read_text())
    assert [*content["shared"].values()] == pytest.approx(shares)
    name = result.clients[0].id
    assert main(["explain", str(tmp_path / "run"), "--client", name]) == 0
    assert "Its predictions come to " in capsys.readouterr().out
