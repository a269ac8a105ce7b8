"""`fedattune explain`: whom clients learn from and what they gain, against what was put into the store by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from crafted import ALL, EARLY, LABELS, LATE, SAME, compared, craft
from fedattune import read_runs
from fedattune.analysis.mixing.explain import ClientGain, ClientSummary, RunExplanation
from fedattune.analysis.output.tables import make_console
from fedattune.cli import main
from fedattune.cli.explain import print_clients
from fedattune.core.effect import ONE_MIXTURE, OWN_MODEL
from fedattune.core.metrics import METRICS

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


def test_a_tie_is_no_gain(tmp_path: Path, capsys: Said) -> None:
    """Client a is right as often as alone with each seed, b only over both seeds."""
    for seed, right in enumerate(((5, 12, 5, 20), (5, 8, 5, 20))):
        craft(tmp_path, "local", {1: (5, 10, 5, 20)}, seed=seed)
        craft(tmp_path, "fedavg", {1: right}, seed=seed)
    text = explained(capsys, tmp_path, "--algorithm", "fedavg", "--client", "a")
    assert "fedavg 50.00%, local 50.00%: no difference; by seed +0.00, +0.00 (std 0.00).\n" in text
    text = " ".join(explained(capsys, tmp_path, "--algorithm", "fedavg", "--client", "b").split())
    assert "no difference; by seed +10.00, -10.00 (std 10.00). Seeds do not agree on whether it gains." in text


def test_the_verdicts_method_is_explained_even_if_it_does_not_mix(tmp_path: Path, capsys: Said) -> None:
    for name, right in (("local", 5), ("fedavg", 8), ("fedmcsa", 6)):
        matrix = {"local": None, "fedavg": SAME, "fedmcsa": LATE}[name]
        mixing = {4: (ALL, ALL, {"model": matrix})} if matrix else None
        craft(tmp_path, name, {4: (right, 10, 5, 20)}, mixing=mixing, moved=9)
    text = explained(capsys, tmp_path)
    assert text.startswith("fedavg on ")
    assert "fedavg sends one model to all" in text
    assert "fedmcsa mixes client by client: --algorithm fedmcsa explains it." in text
    assert "The label counts of the clients are not known here" in explained(capsys, tmp_path, "--algorithm", "fedmcsa")
    assert "Spearman" not in text
    only = explained(capsys, tmp_path / "fedavg" / "seed-0")
    assert "fedavg sends one model to all" in only


def test_the_effect_of_the_mechanism_is_said(tmp_path: Path, capsys: Said) -> None:
    effects = [[*OWN_MODEL, 0.004], [*ONE_MIXTURE, 0.87]]
    folder = craft(
        tmp_path, "m", {1: (5, 10, 5, 20)}, mixing={1: (ALL, ALL, {"model": EARLY})}, facts={"effects": effects}
    )
    text = explained(capsys, folder)
    assert "The weights are 87% away from one mixture for all clients." in text
    assert "The weights stayed within 0.4% of the client's own model alone: this run is training alone." in text


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--client", "e"], "no client 'e' in this run; known: a, b, c, d"),
        (["--client", "site 1"], "no client 'site 1' in this run; known: a, b, c, d"),
        (["--algorithm", "fedmcs"], "did you mean 'fedmcsa'?"),
        (["--seed", "7"], "no run with seed 7 here; give one of the seeds 0, 1"),
        (["--algorithm", "fedavg", "--seed", "2"], "no run of fedavg with seed 2 here; give one of the seeds 0, 1"),
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


def summarize(k: int, *, points: float | None) -> ClientSummary:
    gain = None if points is None else ClientGain(points, 0.0021, 0.0021 - points, 5, None, {}, 0.5 * abs(points))
    return ClientSummary(f"c{k}", 10, 5, 0.0021 - (points or 0.0), gain, None, None)


def explain_clients(clients: list[ClientSummary], capsys: Said) -> str:
    mixing = SimpleNamespace(has_mixtures=False, components=[], clusters=None)
    explanation = SimpleNamespace(
        clients=clients, gain_note=None, method="m", metric=METRICS["rmse"], mixing=mixing, decisions=None
    )
    print_clients(explanation, make_console())  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_numbers_of_a_small_target_are_shown(capsys: Said) -> None:
    text = explain_clients([summarize(0, points=0.0004), summarize(1, points=None)], capsys)
    assert cells(text, "c0") == ["c0", "10", "5", "0.0021", "0.0017", "+0.0004 ±0.0002"]
    assert cells(text, "c1") == ["c1", "10", "5", "-", "0.0021", "-"]


@pytest.mark.parametrize(
    ("n_gains", "said"),
    [
        (59, "The table shows the first 60 clients, of 70 in all"),
        (60, "shows the 30 clients that lose most or gain least, and the 30 clients that gain most, of 70 in all"),
    ],
)
def test_it_says_which_clients_the_table_shows(n_gains: int, said: str, capsys: Said) -> None:
    text = explain_clients([summarize(k, points=0.001 * k if k < n_gains else None) for k in range(70)], capsys)
    assert said in " ".join(text.split())


def test_a_client_without_test_rows_in_one_split_has_the_value_of_the_others(tmp_path: Path, capsys: Said) -> None:
    for number, n_a in ((0, 10), (1, 0)):
        for name, right in (("local", 4), ("fedavg", 6)):
            scores = {1: (min(right, n_a), 10, 5, 20)}
            craft(tmp_path, name, scores, n_test=(n_a, 20, 10, 40), number=number)
    one = RunExplanation(read_runs([tmp_path]), "fedavg").clients[0]
    assert one.gain
    assert (one.value, one.gain.method, one.gain.points) == (60, 60, 20)
    said = cells(explained(capsys, tmp_path, "--algorithm", "fedavg"), "a")
    assert said[-4:] == ["40.00", "60.00", "+20.00", "+2.0"]


def test_it_says_that_several_labels_have_no_classes_to_compare(tmp_path: Path, capsys: Said) -> None:
    facts = {"classes": [], "target_kind": "labels", "target_names": ["ill", "old"]}
    craft(tmp_path, "fedmcsa", {1: (5, 10, 5, 20)}, mixing={1: (ALL, ALL, {"fc": EARLY})}, facts=facts)
    said = explained(capsys, tmp_path)
    assert "The target is several labels, so there are no shares of classes to compare" in said
    assert "stay on their nodes" not in said
