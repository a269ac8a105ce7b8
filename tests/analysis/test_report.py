"""The HTML report: what its page holds; `test_report_browser.py` has what it does in a browser."""

import base64
import gzip
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import fedattune
from crafted import ALL, EARLY, craft, craft_hostile, finish_comparison
from fedattune import Federation, read_runs
from fedattune.analysis.mixing import MixingAnalysis
from fedattune.analysis.output import report as frames
from fedattune.analysis.output.report import build_answer, render_report
from fedattune.cli import main
from fedattune.core.faults import Fault
from fedattune.runs.store import RoundRecord
from reports import METHODS, train, train_odd

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects text and what would be loaded, and checks that tags are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.loads: list[str] = []
        self.feed(re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "  # cells are words of their own


def part(html: str, name: str) -> bytes:
    """What is packed into a page."""
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', html)
    assert found
    return gzip.decompress(base64.b64decode(found[1]))


def test_the_report_of_a_comparison_is_the_one_of_its_folder(tmp_path: Path) -> None:
    """The command reports what it has in memory, and `fedattune report` what it reads."""
    options = {"partition": "dirichlet", "clients": 5, "rounds": 3, "seeds": 2, "processes": 1}
    fedattune.compare("digits", ["local", "fedavg", "fedmcsa"], out=tmp_path / "run", **options)
    pages = [(tmp_path / "run/report.html").read_text("utf-8"), render_report(read_runs([tmp_path / "run"]))]
    first, second = (re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "now", page) for page in pages)
    assert first == second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three methods with two seeds on clients with odd names."""
    return train_odd(tmp_path_factory.mktemp("runs"))


def test_the_page_is_one_file_that_asks_for_nothing(folder: Path, tmp_path: Path) -> None:
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    html = (tmp_path / "r.html").read_text("utf-8")
    page = Page(html)
    assert page.open == []
    assert page.loads == []
    assert "default-src 'none'" in html  # nor may a script ask
    assert html.count("</script>") == 5
    assert "<b>" not in html
    assert "Apache License" in html
    for words in ("Should these clients federate?", "Methods side by side", "Mean gain over local"):
        assert words in page.text


def test_the_data_of_the_pictures_are_those_of_the_runs(folder: Path) -> None:
    runs = read_runs([folder])
    html = render_report(runs)
    data = json.loads(part(html, "data"))
    assert data["methods"] == list(METHODS)
    assert data["clients"]["ids"][:2] == ["ward <b>7</b>", "</script>"]
    attention = [run for run in runs.results if run.algorithm == "fedmcsa"]
    alone = [run for run in runs.results if run.algorithm == "local"]
    curve = next(one for one in data["curves"] if one["method"] == "fedmcsa")["seeds"][1]
    assert curve["rounds"] == [e["round"] for e in attention[1].history]
    assert curve["mean"] == [round(100 * e["trained"]["acc_uniform"], 2) for e in attention[1].history]
    gain = data["clients"]["methods"]["fedmcsa"]["gain"]
    for i in range(6):
        with_method, without = (np.mean([run.clients[i].trained for run in one]) for one in (attention, alone))
        assert gain[i] == pytest.approx(100 * (with_method - without), abs=0.006)
    traffic = data["traffic"]["fedmcsa"]
    assert sum(traffic["up"]) == traffic["total"][0] == attention[0].bytes_up
    assert data["traffic"]["local"]["parts"] == []
    assert list(data["mixing"]["methods"]) == ["fedmcsa"]  # one model for all: nobody learns from anybody in particular


def test_the_matrices_of_the_pictures_are_those_of_the_run(folder: Path) -> None:
    html = render_report(read_runs([folder]))
    mixing = json.loads(part(html, "data"))["mixing"]
    about, raw = mixing["methods"]["fedmcsa"], np.frombuffer(part(html, "matrices"), dtype=np.uint8)
    result = fedattune.Result.load(folder / "fedmcsa" / "seed-0")
    assert about["rounds"] == list(result.mixing) == [1, 2, 3, 4]
    shape = (len(about["components"]), 4, 6, 6)
    levels = raw[about["start"] :][: int(np.prod(shape))].reshape(shape)
    for c, component in enumerate(about["components"]):
        stored = result.mixing[4][component["name"]]
        given = ~np.isnan(stored).any(1)
        assert given.sum() == 4  # the cohort
        got = component["largest"] * (levels[c, 3] / 254) ** 4
        assert np.abs(got - stored)[given].max() < 0.01
        assert (levels[c, 0] == frames.UNKNOWN_LEVEL).all(1).sum() == 2  # clients who were not asked in the first round
    labels = np.array(mixing["labels"])
    assert labels.sum(1).tolist() == [14, 20, 31, 41, 50, 60]


def test_warnings_name_harm_divergence_lost_uploads_and_failures(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    failed = [{"algorithm": "pfedme", "seed": 0, "error": "training diverged"}]
    finish_comparison(tmp_path / "runs", failed)
    runs = read_runs([tmp_path / "runs"])
    store = runs.results[-1].store
    store.add_round(RoundRecord(5, 1e3, 10**9, 10**9, 10**6, [0, 1], [2]))
    store.add_faults(5, {2: Fault("not_finite", "the answer is not finite")})
    text = Page(render_report(runs)).text
    assert "pfedme failed with seed 0: training diverged." in text
    assert "fedmcsa: training diverged 2 times" in text
    assert "fedmcsa: 1 uploads were lost (the clients did not answer, or the server rejected them; 1 of them" in text
    found = fedattune.analysis.verdict.reach_verdict(runs.results)
    assert found.gains is not None
    harmed = int((found.gains < 0).sum())
    assert harmed
    assert f"{found.method}: {harmed} of 6 clients would lose" in text


def test_the_headline_does_not_deny_a_clear_gain(folder: Path) -> None:
    """A comparison can be undecided for another reason, such as one split without tuning."""
    runs = read_runs([folder])
    cases = ((0.5, 3.0), "Undecided."), ((-0.5, 3.0), "Undecided: no clear gain"), (None, "Undecided: no clear gain")
    for interval, said in cases:
        undecided = replace(runs.verdict, answer="undecided", interval=interval)
        runs.__dict__["verdict"] = undecided
        assert build_answer(runs)["short"].startswith(said)
    assert build_answer(runs)["short"] != "Undecided."


def test_a_run_that_is_still_trained_is_shown_as_such(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    (tmp_path / "runs" / "fedmcsa" / "seed-1" / "result.json").unlink()
    text = Page(render_report(read_runs([tmp_path / "runs"], running=True))).text
    assert "Still training." in text
    assert "Not finished: fedmcsa (round 4 of 4)" in text
    assert "As it stands now:" in text
    assert "So far" in text.partition("Should these clients federate?")[2][:80]
    # One that was asked for, and has not begun.
    shutil.rmtree(tmp_path / "runs" / "fedmcsa" / "seed-1")
    (tmp_path / "runs" / "experiment.yaml").write_text("algorithms: local,fedavg,fedmcsa\nseeds: 2\n")
    runs = read_runs([tmp_path / "runs"])
    text = Page(render_report(runs)).text
    assert not runs.is_finished
    assert "Not finished: fedmcsa, seed-1 (no round yet)" in text
    assert "fedmcsa (seeds 0) and local (seeds 0, 1) are compared over seeds 0 alone" in text


def test_a_report_does_not_take_the_place_of_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    run = tmp_path / "runs" / "fedmcsa" / "seed-0"
    checkpoint = next((run / "checkpoints").iterdir())
    for file in (run / "metrics.sqlite", run / "config.json", run / "inputs.safetensors", checkpoint):
        if not file.exists():
            continue
        before = file.read_bytes()
        assert main(["report", str(tmp_path / "runs"), "-o", str(file)]) == 2
        assert "this is a file of the run in" in capsys.readouterr().err
        assert file.read_bytes() == before


def test_clients_that_joined_after_training_have_a_table(ragged: Federation, tmp_path: Path) -> None:
    train(tmp_path, ragged, held_out=2, cohort=1.0)
    runs = read_runs([tmp_path])
    page = Page(render_report(replace(runs, rounds_to=0.01)))
    assert "4 clients, 2 of them joining after training" in page.text
    section = page.text.partition("Clients that joined after training")[2].partition("Who learns from whom")[0]
    words = section.split()
    averaged = [run for run in runs.results if run.algorithm == "fedavg"]
    for number, newcomer in enumerate(averaged[0].newcomers):
        row = words.index("fedavg", words.index(newcomer.id)) + 1
        means = [
            np.mean([getattr(run.newcomers[number], way) for run in averaged])
            for way in ("received", "trained", "local")
        ]
        assert words[row : row + 3] == [f"{100 * mean:.1f}" for mean in means]
    for head in ("global", "arrived", "new", "last 10%", "rounds to 1%"):
        assert head in page.text


def test_compare_writes_the_same_report(tmp_path: Path) -> None:
    words = [
        "compare",
        "--data",
        "digits",
        "--clients",
        "5",
        "--rounds",
        "2",
        "--algorithms",
        "local,fedmcsa,fedprox",
        "--set",
        "fedprox.mu=0",
    ]
    assert main([*words, "--rounds-to", "0.1", "--quiet", "--out", str(tmp_path / "out")]) == 0
    report = tmp_path / "out" / "report.html"
    before = Page(report.read_text("utf-8")).text
    assert main(["report", str(tmp_path / "out")]) == 0
    made = re.compile(r"FedAttune [\d.]+, \S+ \S+ \S+\.")  # the time
    data = re.compile(r"[A-Za-z0-9+/=]{200,}")
    clean = [made.sub("", data.sub("", text)) for text in (before, Page(report.read_text("utf-8")).text)]
    assert clean[0] == clean[1]
    assert "rounds to 10%" in clean[0]
    assert "steps 0% (idle)" in clean[0]
    assert "fedprox: the steps stayed equal to steps without the proximal term: this run is one without" in clean[0]
    # Settings as a reader writes them; those that nobody gave are left out.
    assert "fractions: (test: 0.25, validation: 0.1)" in clean[0]
    assert "None" not in clean[0].partition("Configuration and environment")[2].partition("Algorithm(")[0]


def test_no_text_of_a_run_becomes_code_of_the_page(tmp_path: Path) -> None:
    page = render_report(read_runs([craft_hostile(tmp_path)]))
    assert "onerror=hit()" in page
    assert "<img" not in page.replace("&lt;img", "").split('<script type="text/plain" id="data">')[0]
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(hashes) == 3
    allowed = "script-src " + " ".join(f"'sha256-{one}'" for one in hashes) + ";"
    assert allowed in page  # a script or handler that got in all the same would not run


def test_curves_of_several_seeds_are_of_rounds_that_all_have(tmp_path: Path) -> None:
    """All nodes were absent from one round of the second seed; its fourth round is not the other's third."""
    for seed, rounds in ((0, (1, 2, 3, 4)), (1, (1, 2, 4))):
        craft(tmp_path, "fedavg", dict.fromkeys(rounds, (5, 10, 5, 20)) | {3 + seed: (9, 18, 9, 36)}, seed=seed)
    (curve,) = frames.build_curves({"fedavg": read_runs([tmp_path]).results})
    assert [seed["rounds"] for seed in curve["seeds"]] == [[1, 2, 4], [1, 2, 4]]
    assert [seed["mean"] for seed in curve["seeds"]] == [[50, 50, 50], [50, 50, 90]]


@pytest.mark.parametrize(("kind", "said"), [("labels", "several labels"), ("class", None)])
def test_it_knows_the_target_of_a_run_that_mixes(tmp_path: Path, kind: str, said: str | None) -> None:
    facts = {"classes": [], "target_kind": kind, "target_names": ["ill", "old"]}
    mixing = {1: (ALL, ALL, {"fc": EARLY})}
    craft(tmp_path, "fedmcsa", {1: (5, 10, 5, 20)}, mixing=mixing, facts=facts)
    mixed, _ = frames.build_mixing({"fedmcsa": MixingAnalysis(read_runs([tmp_path]).results[0])}, 1_000)
    assert mixed["target"] == said
