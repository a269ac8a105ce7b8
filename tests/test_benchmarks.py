"""The benchmark runs, on next to nothing, and what it says follows from what it measured; no times are tested."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command
from benchmarks import ablate, compiler, false_alarms, grid, in_jax, privacy, problems, robustness, show
from benchmarks.__main__ import all_cases, select_cases
from benchmarks.measure import Case, Figures, Setting, Skip, Target

from fedattune.engine.compiler.compile import PASSES

Said = pytest.CaptureFixture[str]


def start(*arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    # A process of its own: JAX forbids forks once it is imported, and other tests fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )


def run(*arguments: str) -> str:
    done = start("benchmarks", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_workload_runs_and_all_ways_of_training_agree(tmp_path: Path) -> None:
    """The cases check by themselves that all ways train the same models from the same batches."""
    file = tmp_path / "figures.json"
    # One process for all: to start one takes longer than most workloads.
    run("--quick", "--json", str(file), *(f"W{k}" for k in range(1, 8)), "W10", "W12-adam", "W12-images")
    said = json.loads(file.read_text("utf-8"))
    cases = {case["name"]: case for case in said["cases"]}
    names = {"W1", "W2", "W3-mlr", "W3-dnn", "W4-mlr", "W4-dnn", "W5-10", "W5-50", "W5-lenet"}
    names |= {"W6-mlr", "W6-dnn", "W6-synthetic", "W6-lenet"}
    assert names | {"W7-mcsa-dnn"} <= set(cases)
    assert all(s > 0 for case in cases.values() for samples in case["seconds"].values() for s in samples)
    for name in names:
        ways = {"floor", "auto"}
        if name < "W5":
            ways |= {"manual"} | (set() if in_jax.MISSING else {"jax scan", "jax vmap"})
            assert bool(in_jax.MISSING) == ("jax" in cases[name]["skipped"])
        assert ways <= set(cases[name]["seconds"]), name
        assert cases[name]["roofline"] > 0
        assert all(target["got"] is not None or "jax" in target["against"] for target in cases[name]["targets"])
    assert said["gflops"] > 0
    assert said["versions"]["torch"] == torch.__version__
    assert torch.cuda.is_available() != ("W10-W1" in said["skipped"])


def test_every_rule_can_be_switched_off() -> None:
    ways: set[str] = set()
    for name in ("W5-10", "pfedme-dnn", "W6-mlr"):
        ways |= set(ablate.measure_rules(name, "", Setting(quick=True)).seconds)
    lanes = "several clients in a lane"  # workloads with clients of unequal size
    assert {rule.name for rule in ablate.RULES} | {ablate.ALL} == ways | {lanes}
    assert not [case for case in select_cases(all_cases(), []) if case.name.startswith("ablate")]


def test_the_page_of_the_compiler_has_a_row_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "NETWORKS", {"DNN": compiler.NETWORKS["DNN"]})
    measured = compiler.measure_passes(quick=True)
    page = (ROOT / "docs" / "compiler.md").read_text("utf-8")
    assert list(measured) == re.findall(r"^\| ([\w ]+) \|", page.partition("---|\n")[2], re.MULTILINE)
    assert set(PASSES) < set(measured)


@pytest.mark.deployed
def test_workloads_that_start_processes_run(tmp_path: Path) -> None:
    """W8 and W11 do the same for every method and data set, so one is enough."""
    file = tmp_path / "figures.json"
    run("--quick", "--json", str(file), "W8-ditto", "W9", "W11-digits", "W12-lora", "ablate-W1")
    cases = {case["name"]: case for case in json.loads(file.read_text("utf-8"))["cases"]}
    assert {"W8-ditto", "W9-commands", "W11-digits"} <= set(cases)
    assert set(ablate.PROCESS_RULES) == set(cases["W1"]["values"])  # of ablate-W1
    run("--quick", "--json", str(file), "ray", "flower")
    said = json.loads(file.read_text("utf-8"))
    assert not said["skipped"]
    assert {"ray-cnn", "ray-10000"} <= {case["name"] for case in said["cases"]}
    assert all(s > 0 for case in said["cases"] for samples in case["seconds"].values() for s in samples)


def small(model: str = "dnn") -> problems.Problem:
    return problems.Problem(problems.even(2, 8), model, batch=4, steps=2)


def figures(**more: Any) -> Figures:
    seconds = {"floor": [1.0, 10.0, 2.0], "auto": [0.5, 4.0, 1.2]}
    targets = (Target("auto", "floor", 0.45), Target("auto", "roofline", 20.0), Target("auto", "jax", 1.0))
    return Figures("W2", "about", seconds, targets=targets, **{"roofline": 0.1, "paired": True, **more})


def test_the_table_in_the_docs_changes_only_where_something_was_measured(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n\n{show.BEGIN}\n{show.END}\n\nafter\n", "utf-8")
    facts = {"date": "2026-01-02T03:04:05", "threads": 2, "cpu": "A CPU", "device": "cpu", "load": [0.25]}
    show.write_docs(page, facts, [replace(figures(), name="no-number"), figures(), replace(figures(), name="W10-a")])
    first = page.read_text("utf-8")
    missed = "<= 0.45 x floor: 0.5; <= 1 x jax: not measured"
    row = f"| **auto 0.50** | {missed} | 2026-01-02 |"
    assert row in first
    show.write_docs(page, {**facts, "date": "2026-05-06"}, [replace(figures(), name="W1")])
    show.write_docs(page, {**facts, "cpu": "Another"}, [replace(figures(), name="W1")])
    second = page.read_text("utf-8")
    of_cpu, of_another = second.split("### ")[1:]
    assert re.findall(r"^\| ([\w-]+) \|", of_cpu, re.MULTILINE) == ["case", "W1", "W2", "W10-a", "no-number"]
    assert re.findall(r"^\| ([\w-]+) \|", of_another, re.MULTILINE) == ["case", "W1"]
    assert of_cpu.startswith("A CPU, 2 threads\n")
    assert (second.count("2026-01-02"), second.count("2026-05-06")) == (4, 1)
    assert second.startswith("before\n")
    assert second.endswith("\nafter\n")
    page.write_text("no marks", "utf-8")
    with pytest.raises(ValueError, match="lacks the lines"):
        show.write_docs(page, facts, [figures()])


def test_epsilon_against_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of docs/privacy.md: a row for each epsilon, and training alone, which needs no noise, is the same."""
    file = tmp_path / "cells.json"
    words = "--problems digits --epsilons inf,1 --seeds 1 --algorithms local,fedavg --json"
    assert privacy.main([*words.split(), str(file)]) == 0
    out = capsys.readouterr().out
    cells = json.loads(file.read_text("utf-8"))["cells"]["digits"]
    assert "| none |" in out
    assert cells["inf"]["local"] == cells["1"]["local"]
    assert cells["inf"]["fedavg"][0] > cells["1"]["fedavg"][0] + 0.2  # 53 points on average


def test_the_table_of_attacks_has_a_row_per_attack_and_takes_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.json"
    words = (
        "--algorithms local,fedavg --attacks none,backdoor,scaled_model:1e9 --attackers 1 --clients 4 --splits 2 "
        "--rounds 2 --lr 0.1 --accept always --json"
    )
    assert robustness.main([*words.split(), str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| attack | local | fedavg |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| none", "| backdoor", "| scaled_model:1e9"]
    said = json.loads(file.read_text("utf-8"))
    assert said["settings"] == robustness.SETTINGS | {"rounds": 2, "lr": 0.1, "accept": "always"}
    assert len(said["cells"]["backdoor"]["fedavg"]) == 2
    assert 0 <= said["cells"]["backdoor"]["fedavg"][0]["success"] <= 1
    mean = sum(one["accuracy"] for one in said["cells"]["none"]["local"]) / 2
    assert lines[2].split(" | ")[1] == f"{100 * mean:.1f}"


def test_the_study_of_the_verdict_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two federations of each kind; every rule has a line."""
    from benchmarks.__main__ import main
    from benchmarks.verdict import LOOKED, RULES

    assert main(["verdict", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if "|" in line][1:] == [*RULES, LOOKED]


def test_false_alarms_are_counted_by_federation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(false_alarms, "SETTINGS", false_alarms.SETTINGS | {"rounds": 2, "eval_every": 2})
    assert false_alarms.main(["--federations", "inverted;skew", "--algorithms", "fedavg"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| inverted", "| its group", "| skew"]
    assert all(line.count("(0)") == (i != 1) for i, line in enumerate(lines[2:]))
    with pytest.raises(SystemExit, match="none is called 'x'"):
        false_alarms.main(["--federations", "x"])


@pytest.mark.parametrize("name", list(false_alarms.FEDERATIONS))
def test_every_federation_without_attackers_can_be_made(name: str) -> None:
    data, group, _ = false_alarms.load(name, 0)
    assert (data.n_clients, len(group)) == (20, false_alarms.FEDERATIONS[name][3])
    assert int(data.sizes("train").min()) > 1


@pytest.mark.parametrize("words", [["benchmarks.on_gpu", "--list"], ["benchmarks", "grid", "--list"]])
def test_a_reader_that_leaves_a_pipe_is_no_fault(words: list[str]) -> None:
    """As in `... --list | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = start(*words, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_every_command_is_named_by_help(capsys: Said) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert set(command.TABLES) <= set(re.split(r"[\s,:]+", capsys.readouterr().out))


def test_advice_to_install_an_extra_names_it(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "pip install 'fedattune[bench]'"

    def skip(_: Setting) -> Figures:
        raise Skip(advice)

    found = replace(figures(), name="W2 [no markup]", skipped={"jax": advice})
    cases = [Case("W1", "skipped", skip), Case("W2", "measured", lambda _: found)]
    monkeypatch.setattr(command, "all_cases", lambda: cases)
    assert command.main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert f"Skipped W1: {advice}" in said
    assert f"jax: {advice}" in said
    assert "W2 [no markup]: about" in said


COUNT = "a whole number of at least 1"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--repeats 0", f"--repeats: expected {COUNT}, got '0'"),
        pytest.param("--device cuda", "--device: expected cpu, or cuda where PyTorch finds a GPU", marks=NO_GPU),
        ("--device gpu", "--device: expected cpu, or cuda where PyTorch finds a GPU, got 'gpu'"),
        ("--json nowhere/x.json", "--json: file nowhere/x.json: there is no folder nowhere"),
        ("privacy --json nowhere/x.json", "there is no folder nowhere"),
        ("robustness --json nowhere/x.json", "there is no folder nowhere"),
        ("privacy --seeds 0", f"--seeds: expected {COUNT}"),
        ("privacy --epsilons x", "--epsilons: expected numbers above 0 with commas between"),
        ("privacy-attacks --seeds 0", COUNT),
        ("privacy-attacks --epsilons 1,nan", "--epsilons: expected numbers above 0"),
        ("robustness --splits 0", f"--splits: expected {COUNT}"),
        ("robustness --attackers 0", COUNT),
        ("robustness --clients 0", COUNT),
        ("false-alarms --splits 0", COUNT),
        ("verdict --federations 0", COUNT),
        ("verdict --clients 4 0", f"--clients: expected {COUNT}"),
        ("grid --seeds a", "--seeds: expected whole numbers of at least 0 with commas between, got 'a'"),
        ("grid --seeds 0,-1", "--seeds: expected whole numbers of at least 0"),
        ("grid --processes 0", COUNT),
        ("cost --repeats 0", COUNT),
        ("cost --rounds 0", COUNT),
        ("screening --rounds 0", COUNT),
    ],
)
def test_a_wrong_value_is_refused_in_a_sentence_before_anything_is_measured(
    words: str, said: str, capsys: Said
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(words.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_an_unknown_method_of_attacks_on_privacy_is_named() -> None:
    with pytest.raises(SystemExit, match="'fedavgg'"):
        command.main(["privacy-attacks", "--algorithms", "fedavgg"])


def test_examples_of_help_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(false_alarms, "measure", lambda *_: [(0.0, 0.0, 0.0, 0.0, 0)])
    monkeypatch.setattr(grid, "run_units", lambda units, *_: trained.extend(unit.name for unit in units) or 0)
    monkeypatch.setattr(grid, "show", lambda *_: None)
    monkeypatch.setattr(grid, "find_spec", lambda _: True)
    for module in (false_alarms, grid):
        examples = re.findall(r"^    python -m benchmarks (.+)$", module.__doc__ or "", re.MULTILINE)
        assert all(command.main(shlex.split(words)) == 0 for words in examples)
    assert "weak" in trained
