"""Runs from their folders: one, a comparison, several, unfinished ones, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from crafted import compared, craft, experiment, finish_comparison, going
from fedattune import RunError, Runs, read_runs
from fedattune.analysis.folder import seal_experiment
from fedattune.analysis.load import is_growing
from fedattune.analysis.monitor import read_statuses
from fedattune.runs.folder import RunFolder

SCORES = {1: (5, 10, 5, 20)}


def names(runs: Runs) -> list[tuple[str, int]]:
    return [(run.algorithm, run.settings.seed) for run in runs.results]


def test_one_run_by_its_own_folder_or_the_one_around_it(tmp_path: Path) -> None:
    craft(tmp_path, "fedavg", SCORES, seed=3)
    own = tmp_path / "fedavg" / "seed-3"
    for path in (tmp_path, own):
        runs = read_runs([path])
        assert names(runs) == [("fedavg", 3)]
        assert runs.folders == [own]
        assert runs.is_finished
    assert [client.trained for client in runs.results[0].clients] == [0.5, 0.5, 0.5, 0.5]
    assert runs.title == "made: 4 clients"


def test_a_comparison_is_in_the_order_asked_for_with_local_first(tmp_path: Path) -> None:
    compared(tmp_path)
    for seed in (2, 10):
        craft(tmp_path, "fedmcsa", {4: SCORES[1]}, seed=seed)
    (tmp_path / "experiment.yaml").write_text("algorithms: [fedmcsa, fedavg, local]\n")
    failed = [{"algorithm": "ditto", "seed": 1, "error": "it diverged"}]
    finish_comparison(tmp_path, failed)
    runs = read_runs([tmp_path, tmp_path])
    mixing = [("fedmcsa", seed) for seed in (0, 1, 2, 10)]
    assert names(runs) == [("local", 0), ("local", 1), *mixing, ("fedavg", 0), ("fedavg", 1)]
    assert runs.failed == ["ditto failed with seed 1: it diverged"]
    assert [run.settings.seed for run, _ in runs.select("fedavg", None)] == [0, 1]
    assert [folder.name for _, folder in runs.select("fedmcsa", 10)] == ["seed-10"]


def test_the_same_run_in_two_folders_counts_once_and_further_seeds_join(tmp_path: Path) -> None:
    craft(tmp_path / "one", "fedavg", SCORES)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    config = tmp_path / "copy" / "fedavg" / "seed-0" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"device": "cuda"}))  # changes no result
    RunFolder(config.parent).finish(json.loads(config.with_name("result.json").read_text()))
    craft(tmp_path / "more", "fedavg", SCORES, seed=1)
    paths = [tmp_path / name for name in ("one", "copy", "more")]
    assert names(read_runs(paths)) == [("fedavg", 0), ("fedavg", 1)]


def test_other_options_are_named_apart_by_their_folder_whatever_the_seed(tmp_path: Path) -> None:
    craft(tmp_path / "slow", "fedavg", SCORES, lr=0.1)
    for seed in (0, 1):
        craft(tmp_path / "fast", "fedavg", SCORES, lr=0.5, seed=seed)
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    runs = read_runs([slow, fast, fast / "fedavg" / "seed-1", fast])
    assert names(runs) == [("fedavg", 0), ("fedavg (fast)", 0), ("fedavg (fast)", 1)]
    assert [run.settings.training.lr for run in runs.results] == [0.1, 0.5, 0.5]
    (tmp_path / "again").mkdir()
    craft(tmp_path / "again" / "fast", "fedavg", SCORES, lr=0.9)
    third = names(read_runs([slow, fast, tmp_path / "again" / "fast"]))[-1]
    assert third == (f"fedavg ({tmp_path / 'again' / 'fast'})", 0)


def test_runs_of_other_clients_are_refused(tmp_path: Path) -> None:
    craft(tmp_path / "one", "fedavg", SCORES)
    craft(tmp_path / "two", "local", SCORES, split="another")
    craft(tmp_path / "three", "local", {1: (5, 10)}, n_test=(10, 20))
    with pytest.raises(RunError, match=r"not of the same clients .*other clients were evaluated: --eval-clients"):
        read_runs([tmp_path / "one", str(tmp_path / "three")])
    with pytest.raises(RunError, match=r"are not of the same clients .* look at them one by one"):
        read_runs([tmp_path / "one", tmp_path / "two"])


def test_unfinished_runs_are_taken_only_when_asked_for(tmp_path: Path) -> None:
    craft(tmp_path, "local", SCORES, finished=False, rounds=9)
    with pytest.raises(RunError, match="no run is finished yet; look at it with fedattune watch"):
        read_runs([tmp_path])
    begun = tmp_path / "fedavg" / "seed-0"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text((tmp_path / "local" / "seed-0" / "config.json").read_text())
    runs = read_runs([tmp_path], running=True)
    assert (names(runs), runs.waiting, runs.is_finished) == ([("local", 0)], [begun], False)
    assert "round 1 of 9, not finished" in repr(runs.results[0])
    craft(tmp_path, "fedmcsa", SCORES)
    runs = read_runs([tmp_path])
    assert names(runs) == [("fedmcsa", 0)]
    assert len(runs.waiting) == 2


def test_the_verdict_knows_of_failed_and_unfinished_runs(tmp_path: Path) -> None:
    craft(tmp_path, "local", SCORES)
    failed = [{"algorithm": "fedavg", "seed": 0, "error": "it diverged"}]
    finish_comparison(tmp_path, failed)
    assert read_runs([tmp_path]).verdict.text == "Nothing to compare: only local finished."
    for name in ("result.json", "SHA256SUMS"):
        (tmp_path / name).unlink()
    assert "give at least one method beside local" in read_runs([tmp_path]).verdict.text
    craft(tmp_path, "fedavg", SCORES, finished=False, moved=1, rounds=9)
    runs = read_runs([tmp_path], running=True)
    assert runs.verdict.text.startswith("As it stands now: No clear gain from collaborating")
    assert runs.verdict.method == "fedavg"


def test_a_failed_run_counts_for_the_method_of_its_folder(tmp_path: Path) -> None:
    """Both folders have fedavg, with other options: the run failed in the second one."""
    for name, options in (("first", {}), ("second", {"options": {"weighting": "uniform"}})):
        out = tmp_path / name
        for seed in (0, 1):
            craft(out, "local", SCORES, seed=seed, moved=seed)
            if (name, seed) != ("second", 1):
                craft(out, "fedavg", SCORES, seed=seed, moved=seed + 2, **options)
    finish_comparison(out, [{"algorithm": "fedavg", "seed": 1, "error": "it diverged"}])
    runs = read_runs([tmp_path / "first", out])
    assert runs.failed == ["fedavg failed with seed 1: it diverged"]
    assert runs.failed_methods == ["fedavg (second)"]


def test_a_comparison_with_a_budget_is_not_finished_before_its_end(tmp_path: Path) -> None:
    """Its plan has one split, and it adds others while there is time."""
    out = experiment(tmp_path / "out", "local, fedavg", budget="5m")
    craft(out, "local", SCORES)
    craft(out, "fedavg", SCORES, moved=1)
    runs = read_runs([out])
    assert not runs.is_finished
    assert runs.verdict.text.startswith("As it stands now")
    assert [status.state for status in read_statuses(out)] == ["finished"] * 2
    going(out, "local", SCORES, number=1)
    assert [(status.method, status.state) for status in read_statuses(out)][-1] == ("local", "running")
    RunFolder(out / "local" / "seed-0-split-1").finish({"facts": {}})
    finish_comparison(out)
    assert not is_growing(out)
    seal_experiment(out)  # it was stopped, and goes on
    assert is_growing(out)
