"""`fedattune explain`: whom clients learn from and what they gain, against what was put into the store by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

import fedattune
from crafted import ALL, EARLY, LABELS, LATE, SAME, compared, craft
from fedattune import Federation, read_runs
from fedattune.analysis.mixing.explain import RunExplanation
from fedattune.cli import main
from fedattune.core.effect import ONE_MIXTURE, OWN_MODEL

Said = pytest.CaptureFixture[str]


def explained(capsys: Said, *words: object) -> str:
    assert main(["explain", *map(str, words)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def refused(capsys: Said, *words: object) -> str:
    assert main(["explain", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.out == ""
    return said.err


def cells(text: str, first: str) -> list[str]:
    """The cells of the first table row that begins with a word."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [first])
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_one_client_by_hand(comparison: Path) -> None:
    """Client a: right in 5 of 10 alone, in 7 and 8 by the method; of what others gave it, 0.4 of 0.5 is b's."""
    subject = RunExplanation(read_runs([comparison]), client="a")
    assert (subject.method, subject.run.settings.seed, subject.choice_note, subject.sending_note) == (
        "fedmcsa",
        0,
        None,
        None,
    )
    gain = subject.summarize_client(0).gain
    assert gain is not None
    assert (gain.local, gain.method, gain.points, gain.samples) == pytest.approx((50, 75, 25, 2.5))
    assert gain.by_run == pytest.approx({"0": 20, "1": 30})
    assert gain.std == pytest.approx(5)
    bias, weight = subject.mixing.trace(0)
    assert (bias.name, weight.name) == ("fc.bias", "fc.weight")
    assert bias.last.is_even
    assert bias.stable_since is None
    assert weight.last.own == pytest.approx(0.5)
    assert weight.last.others == pytest.approx(0.5)
    assert [(one.client, round(one.weight, 6)) for one in weight.last.partners] == [("b", 0.4), ("c", 0.1)]
    assert [one.round for one in weight.before] == [2, 3]
    assert [one.client for one in weight.before[0].partners] == ["c", "b"]
    assert weight.stable_since == 2  # both are top partners from the start, though in another order
    assert weight.agreement is not None
    assert weight.agreement.share == pytest.approx(0.8)
    assert weight.agreement.chance == pytest.approx(1 / 3)


def test_one_client_in_words(comparison: Path, capsys: Said) -> None:
    text = explained(capsys, comparison, "--client", "a")
    assert "fedmcsa on made: 4 clients, seed 0, round 4 of 4; gains are means over 2 seeds" in text
    assert "Client a: 100 samples to train, 10 to test." in text
    assert (
        "fedmcsa 75.00%, local 50.00%: a gain of 25.00 points, which is 2.5 of its 10 test samples; "
        "by seed +20.00, +30.00 (std 5.00)." in text
    )
    assert cells(text, "fc.weight") == ["fc.weight", "50.0%", "50.0%", "b 40.0%, c 10.0%", "+0.87", "80%"]
    assert cells(text, "fc.bias") == ["fc.bias", "25.0%", "75.0%", "all 3 alike, 25.0% each", "-", "33%"]
    assert "33% would be chance" in text
    assert "own 70.0%; c 20.0%, b 10.0%" in text
    assert "round 2" in cells(text.partition("Change of its mixtures over the rounds")[2], "fc.weight")[-1]
    assert "is a correlation" in text
    loses = explained(capsys, comparison, "--client", "d")
    assert "a loss of 2.50 points, which is 1.0 of its 40 test samples" in loses


def test_all_clients_in_short(comparison: Path, tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "said.json"
    text = explained(capsys, comparison, "--json", file)
    assert cells(text, "a")[:7] == ["a", "100", "10", "50.00", "75.00", "+25.00 ±5.0", "+2.5"]
    assert "b 32.5%, c 17.5%" in text  # the mean of 0.4 and 0.25, of 0.1 and 0.25
    assert "No clusters" in text  # of four clients, weights in any order would seem to have some
    content = json.loads(file.read_text())
    assert content["method"] == "fedmcsa"
    assert content["seeds"] == [0, 1]
    assert [one["client"] for one in content["clients"]] == ["a", "b", "c", "d"]
    assert content["clients"][0]["gain"]["by_run"] == pytest.approx({"0": 20, "1": 30})
    assert content["clients"][0]["shares"]["partners"][0] == {"client": "b", "weight": pytest.approx(0.325)}
    assert content["clusters"] is None
    weight = next(one for one in content["components"] if one["name"] == "fc.weight")
    assert weight["own"] == pytest.approx(0.5)
    assert weight["agreement"]["share"] == pytest.approx(0.8)


def test_clusters_by_hand(tmp_path: Path, capsys: Said) -> None:
    """Every second client is of one group: it is given 0.2 of each of its own, and 0.025 of each of the other four."""
    odd = np.arange(8) % 2
    weights = np.where(odd[:, None] == odd, 0.2, 0.025) + 0.1 * np.eye(8)
    every = range(8)
    for method, mixing in (("local", None), ("fedmcsa", {1: (every, every, {"fc": weights.tolist()})})):
        labels = [[10, 0], [0, 10]] * 4
        craft(tmp_path, method, {1: [5] * 8}, n_test=[10] * 8, labels=labels, mixing=mixing, moved=1)
    file = tmp_path / "said.json"
    text = explained(capsys, tmp_path, "--json", file)
    assert "  1: a, c, e, g\n" in text
    assert "  2: b, d, f, h\n" in text
    assert "alike by 1.00, of two clusters by 0.00" in text
    found = json.loads(file.read_text())["clusters"]
    assert found["share"] == pytest.approx(0.6 / 0.7)
    assert found["chance"] == pytest.approx(3 / 7)


def test_the_file_of_one_client_has_what_is_printed(comparison: Path, tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "a.json"
    explained(capsys, comparison, "--client", "a", "--seed", "1", "--json", file)
    content = json.loads(file.read_text())
    assert (content["seed"], content["round"], content["mixes"]) == (1, 4, True)
    assert content["client"]["n_test"] == 10
    assert [one["name"] for one in content["client"]["components"]] == ["fc.bias", "fc.weight"]
    assert content["client"]["components"][1]["last"]["others"] == pytest.approx(0.5)


def test_a_method_with_one_model_for_all(comparison: Path, capsys: Said) -> None:
    text = explained(capsys, comparison, "--algorithm", "fedavg", "--client", "a")
    assert "fedavg sends one model to all" in text
    assert "nobody learns from anybody in particular" in text
    assert "a loss of 10.00 points, which is 1.0 of its 10 test samples" in text
    assert "given" not in text
    every = explained(capsys, comparison, "--algorithm", "fedavg")
    assert cells(every, "a")[-4:] == ["50.00", "40.00", "-10.00 ±0.0", "-1.0"]
    assert "Clusters" not in every
    assert "local sends nothing" in explained(capsys, comparison, "--algorithm", "local")


def test_the_verdicts_method_is_passed_over_where_it_does_not_mix(tmp_path: Path, capsys: Said) -> None:
    for name, right in (("local", 5), ("fedavg", 8), ("fedmcsa", 6)):
        matrix = {"local": None, "fedavg": SAME, "fedmcsa": LATE}[name]
        mixing = {4: (ALL, ALL, {"model": matrix})} if matrix else None
        craft(tmp_path, name, {4: (right, 10, 5, 20)}, mixing=mixing, moved=9)
    text = explained(capsys, tmp_path)
    assert "The verdict is about fedavg, which does not mix client by client; fedmcsa does." in text
    assert "The label counts of the clients are not known here" in text
    assert "Spearman" not in text
    only = explained(capsys, tmp_path / "fedavg" / "seed-0")
    assert "fedavg sends one model to all" in only


def test_without_local_it_says_how_to_get_gains(tmp_path: Path, capsys: Said) -> None:
    craft(tmp_path, "fedmcsa", {4: (6, 10, 5, 20)}, mixing={4: (ALL, ALL, {"model": LATE})}, labels=LABELS)
    text = explained(capsys, tmp_path, "--client", "a")
    assert "fedattune compare --algorithms local,fedmcsa and the same options" in text
    assert "fedmcsa reaches 60.00%." in text
    assert "b 40.0%, c 10.0%" in text
    assert "a" in explained(capsys, tmp_path)


def test_methods_that_store_no_matrices(tmp_path: Path, capsys: Said) -> None:
    craft(tmp_path, "pfedhn", {4: (6, 10, 5, 20)}, moved=10)
    assert "pfedhn has no mixing matrices" in explained(capsys, tmp_path)
    craft(tmp_path / "other", "fedper", {4: (6, 10, 5, 20)})
    assert "fedper shared nothing here" in explained(capsys, tmp_path / "other")


def test_the_effect_of_the_mechanism_is_said(tmp_path: Path, capsys: Said) -> None:
    effects = [[*OWN_MODEL, 0.004], [*ONE_MIXTURE, 0.87]]
    folder = craft(
        tmp_path,
        "m",
        {1: (5, 10, 5, 20)},
        mixing={1: (ALL, ALL, {"model": EARLY})},
        facts={"effects": effects},
    )
    text = explained(capsys, folder)
    assert "The weights are 87% away from one mixture for all clients." in text
    assert (
        "The weights stayed within 0.4% of the client's own model alone: this run is training alone." in text
    )


def test_clients_that_were_not_in_the_last_round(tmp_path: Path, capsys: Said) -> None:
    mixing = {
        1: ((0, 1), (0, 1), {"l": [[0.9, 0.1], [0.2, 0.8]]}),
        2: ((1, 3), (1, 2, 3), {"l": [[0.5, 0.3, 0.2], [0.0, 0.6, 0.4]]}),
    }
    craft(tmp_path, "m", {1: (1, 1, 1, 1), 2: (1, 1, 1, 1)}, mixing=mixing, labels=LABELS)
    assert "at round 1, the last one that it took part in" in explained(capsys, tmp_path, "--client", "a")
    assert "Its mixture at round 2, in" in explained(capsys, tmp_path, "--client", "b")
    assert "It took part in no round with stored mixtures" in explained(capsys, tmp_path, "--client", "c")
    assert cells(explained(capsys, tmp_path), "c")[-5:] == ["10.00", "-", "-", "-", "-"]


def test_what_came_from_clients_that_are_not_evaluated_is_counted(tmp_path: Path, capsys: Said) -> None:
    mixing = {1: ((7, 9), (3, 5, 7), {"l": [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]]})}
    facts = {"numbers": [3, 7, 9], "population": 10}
    craft(tmp_path, "m", {1: (1, 1, 1)}, n_test=(5, 5, 5), mixing=mixing, facts=facts)
    text = explained(capsys, tmp_path, "--client", "b")
    assert cells(text, "l") == ["l", "50.0%", "20.0%", "30.0%", "a 20.0%"]
    brief = RunExplanation(read_runs([tmp_path])).summarize_client(1)
    assert brief.shares is not None
    assert brief.shares.unseen == pytest.approx(0.3)


def test_of_many_clients_those_at_both_ends_are_shown(tmp_path: Path, capsys: Said) -> None:
    n = 90
    facts = {"clients": [{"id": f"site{i}", "n_train": 9, "n_test": 100} for i in range(n)]}
    for name, right in (("local", [50] * n), ("fedavg", [5 + i for i in range(n)])):
        craft(tmp_path, name, {1: right}, n_test=[100] * n, facts=facts, moved=1)
    text = explained(capsys, tmp_path)
    assert (
        "the 30 clients that lose most or gain least, and the 30 clients that gain most, of 90 in all" in text
    )
    for i, shown in ((0, True), (29, True), (30, False), (59, False), (60, True), (89, True)):
        assert (f"site{i} " in text) == shown, i


def test_a_gain_of_less_than_a_sample_is_called_so(tmp_path: Path, capsys: Said) -> None:
    for seed in (0, 1, 2):
        craft(tmp_path, "local", {1: (5, 10, 5, 20)}, seed=seed)
        craft(tmp_path, "fedavg", {1: (5 + (seed == 0), 10 - 4 + 5 * seed, 5, 20)}, seed=seed, moved=1)
    assert "less than one sample: too little to tell from chance." in explained(
        capsys, tmp_path, "--client", "a"
    )
    assert "Seeds do not agree on whether it gains." in explained(capsys, tmp_path, "--client", "b")


def test_a_trained_run(ragged: Federation, tmp_path: Path, capsys: Said) -> None:
    for name in ("local", "fedmcsa"):
        fedattune.fit(ragged, name, rounds=3, cohort=3, steps=1, out=tmp_path / name / "seed-0")
    text = explained(capsys, tmp_path)
    for client in ragged.names:
        assert cells(text, client)
        explained(capsys, tmp_path, "--client", client)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--client", "e"], "no client 'e' in this run; known: a, b, c, d"),
        (["--client", "site 1"], "no client 'site 1' in this run; known: a, b, c, d"),
        (["--algorithm", "fedmcs"], "did you mean 'fedmcsa'?"),
        (["--seed", "7"], "no run with seed 7 here; give one of the seeds 0, 1"),
        (
            ["--algorithm", "fedavg", "--seed", "2"],
            "no run of fedavg with seed 2 here; give one of the seeds 0, 1",
        ),
        (["--clients", "a"], "unknown option --clients, did you mean '--client'?"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, capsys: Said, words: list[str], said: str) -> None:
    compared(tmp_path)
    craft(tmp_path, "local", {4: (5, 10, 5, 20)}, seed=2)
    if "7" in words:
        said += ", 2"
    assert said in refused(capsys, tmp_path, *words)


def test_files_of_the_run_are_not_written_over(tmp_path: Path, capsys: Said) -> None:
    compared(tmp_path)
    file = tmp_path / "local" / "seed-0" / "result.json"
    before = file.read_bytes()
    assert "this is a file of the run" in refused(capsys, tmp_path, "--json", file)
    assert file.read_bytes() == before
    explained(capsys, tmp_path, "--json", tmp_path / "said.json")
    explained(capsys, tmp_path, "--json", tmp_path / "said.json")  # its own it may
    assert "holds no run" in refused(capsys, tmp_path / "local")
