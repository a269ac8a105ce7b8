"""The command for a lent GPU stops in time, goes on where it stopped, and packs what it has."""

import json
import os
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import on_gpu

from fedattune.studies import load_study
from fedattune.studies.study import Study

STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


def run(folder: Path, *arguments: str) -> int:
    places = ["--out", str(folder / "on-gpu"), "--results", str(folder / "studies")]
    return on_gpu.main(["--device", "cpu", "--processes", "1", *places, *arguments])


def read_state(folder: Path) -> on_gpu.State:
    state: on_gpu.State = json.loads((folder / "on-gpu" / "state.json").read_text("utf-8"))
    return state


def give_items(monkeypatch: pytest.MonkeyPatch, *items: on_gpu.Item) -> None:
    monkeypatch.setattr(on_gpu, "list_items", lambda given: list(items))


def list_packed(folder: Path) -> list[str]:
    return [name for file in sorted(folder.glob("on-gpu/*.zip")) for name in zipfile.ZipFile(file).namelist()]


def test_a_second_call_does_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--quick", "--minutes", "2") == 0
    first = read_state(tmp_path)
    assert [note["state"] for note in first.values()] == ["done"] * 3
    (measured,) = tmp_path.glob("on-gpu/W10-*.json")
    assert json.loads(measured.read_text("utf-8"))["cases"][0]["name"] == "W7-pfedla-100"
    packed = list_packed(tmp_path)
    assert {"on-gpu/state.json", "on-gpu/tests.log", f"on-gpu/{measured.name}"} < set(packed)
    assert {f"results/fedmcsa-table2/{name}" for name in ("table.md", "history.parquet", "runs.json")} < set(packed)
    capsys.readouterr()
    assert run(tmp_path, "--quick", "--minutes", "2") == 0
    assert read_state(tmp_path) == first
    assert "at most" not in capsys.readouterr().out
    assert run(tmp_path, "--quick", "--seeds", "2", "--list") == 0  # more seeds open the studies again
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["done", "done", "open"]


def test_a_piece_whose_time_is_over_is_interrupted_and_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    give_items(monkeypatch, on_gpu.Item("stubborn", ("-c", STUBBORN, str(pid))), on_gpu.Item("next", ("-c", "")))
    start = time.monotonic()
    assert run(tmp_path, "--minutes", "0.075", "--piece-minutes", "0.025") == 0
    assert time.monotonic() - start < 30  # the item takes a minute
    assert [note["state"] for note in read_state(tmp_path).values()] == ["open", "done"]
    assert "s, interrupted\nnext: at most" in capsys.readouterr().out
    child = int(pid.read_text("utf-8"))
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    give_items(monkeypatch, on_gpu.Item("stubborn", ("-c", "")))
    assert run(tmp_path) == 0
    assert read_state(tmp_path)["stubborn"]["state"] == "done"


def test_what_fails_is_noted_and_tried_again_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_items(
        monkeypatch, on_gpu.Item("bad", ("-c", "raise ValueError('no such card')")), on_gpu.Item("good", ("-c", ""))
    )
    assert run(tmp_path) == 1
    said = capsys.readouterr().out
    assert "failed with exit code 1\n" in said
    assert "ValueError: no such card\ngood: at most" in said
    state = read_state(tmp_path)
    assert "ValueError: no such card" in state["bad"]["tail"]
    assert state["good"]["state"] == "done"
    give_items(monkeypatch, on_gpu.Item("bad", ("-c", "")), on_gpu.Item("new", ("-c", "")))
    assert run(tmp_path) == 0
    said = capsys.readouterr().out
    assert said.index("new: at most") < said.index("bad: at most")


def test_only_cases_that_are_missing_are_measured(tmp_path: Path) -> None:
    item = on_gpu.Item("W10", ("-m", "benchmarks"), "cuda", ("a", "b", "c", "d"))
    (tmp_path / "W10-cuda-1.json").write_text(json.dumps({"cases": [{"name": "b"}], "skipped": {}}), "utf-8")
    (tmp_path / "W10-cuda-2.json").write_text('{"cases": [{"na', "utf-8")
    assert on_gpu.make_command(item, tmp_path, 0)[3:] == ["--json", str(tmp_path / "W10-cuda-3.json"), "a", "c", "d"]
    assert on_gpu.make_command(item, tmp_path, 1)[-3:] == ["c", "d", "a"]


def test_archives_are_split_by_file_and_have_no_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_items(monkeypatch, on_gpu.Item("a-study/a column", ("-c", "")))
    for name, size in (("table.md", 20), ("history.parquet", 6000), ("runs.json", 6000), ("figure.svg", 20000)):
        (tmp_path / "studies" / "a-study").mkdir(parents=True, exist_ok=True)
        (tmp_path / "studies" / "a-study" / name).write_bytes(os.urandom(size))
    for place in ("a-study/checkpoint.safetensors", "runs/0123/models.safetensors", "other/table.md"):
        (tmp_path / "studies" / place).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "studies" / place).write_bytes(b"1")
    assert run(tmp_path, "--max-mb", "0.01") == 0
    assert "left out: results/a-study/figure.svg is larger than 0.01 MB" in capsys.readouterr().out
    archives = sorted(tmp_path.glob("on-gpu/*.zip"))
    assert len(archives) == 2
    assert all(file.stat().st_size < 10_000 for file in archives)
    packed = list_packed(tmp_path)
    assert packed[:2] == ["on-gpu/state.json", "on-gpu/a-study-a-column.log"]
    assert packed[2:] == [f"results/a-study/{name}" for name in ("table.md", "history.parquet", "runs.json")]
    assert run(tmp_path) == 0
    assert len(list(tmp_path.glob("on-gpu/*.zip"))) == 1  # and none of before


def test_items_name_cells_that_exist() -> None:
    studies: dict[str, Study] = {}
    found: dict[tuple[str, str], list[str]] = {}
    for study, _, cells in on_gpu.list_columns():
        studies[study] = studies.get(study) or load_study(study)
        for cell in studies[study].cells(cells):
            found.setdefault((study, cell.column), []).append(cell.row)
    assert list(found)[:3] == [
        ("pfedla-table1", "CIFAR10 10 clients"),
        ("pfedla-table1", "FMNIST 10 clients"),
        ("igfl-table1", "E=1"),
    ]
    for (study, column), rows in found.items():  # every cell of the column once, wherever it stands in the list
        assert sorted(rows) == sorted(cell.row for cell in studies[study].cells(f"{column}/*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_gpu.main(["--out", str(tmp_path / "on-gpu")]) == 2
    assert "finds no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "on-gpu").exists()
    with pytest.raises(SystemExit, match="2"):
        on_gpu.main(["--only", "W99"])
