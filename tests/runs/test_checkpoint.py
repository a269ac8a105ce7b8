"""Checkpoints are whole or found out, the one before is used then, and a kill at any moment changes no number."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import CASES

import fedattune
from fedattune import Federation, Result, RunError
from fedattune.runs import checkpoint as checkpoints
from fedattune.runs.checkpoint import CheckpointFolder, restore_tree
from fedattune.training import loop as rounds

pytestmark = pytest.mark.usefixtures("unmeasured")

RUN = {"rounds": 6, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1}
TREE = {
    "server": {"w": torch.arange(20.0), "none": torch.zeros(0), "half": torch.ones(3, dtype=torch.bfloat16)},
    "clients": {"n": torch.tensor(7), "fresh": torch.tensor([True, False])},
}


@pytest.fixture(autouse=True)
def save_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "COMMIT_AFTER_S", 0.0)
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)


def same(a: Result, b: Result) -> None:
    """All numbers and models are the same to the last bit."""
    strip = [[{k: v for k, v in e.items() if k != "seconds"} for e in one.history] for one in (a, b)]
    assert strip[0] == strip[1]
    for mine, theirs in ((a.models, b.models), (a.buffers, b.buffers)):
        assert all((v == theirs[k]).all() for k, v in mine.items())  # a global model may be one row, or one per client
    assert list(a.mixing) == list(b.mixing)
    for r in a.mixing:
        for k, matrix in a.mixing.among(r).weights.items():
            assert (matrix == b.mixing.among(r).weights[k]).all()


def stopped(name: str, data: Federation, out: Path, after: int = 4, **more: Any) -> list[Path]:
    """A run that was stopped after a round; its checkpoints, the last one first."""
    seen: list[int] = []
    run = RUN | more
    fedattune.fit(
        data, name, out=out, callbacks=[fedattune.OnRound(lambda p: seen.append(p.round) or seen[-1] == after)], **run
    )
    return sorted((out / "checkpoints").iterdir(), reverse=True)


def truncated(share: float) -> Callable[[bytes], bytes]:
    return lambda raw: raw[: int(share * len(raw))]


def flipped(at: float) -> Callable[[bytes], bytes]:
    def flip(raw: bytes) -> bytes:
        place = int(at * (len(raw) - 1))
        return raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]

    return flip


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
    "zeros at the end": lambda raw: raw[:-8] + bytes([*raw[-8:-1], raw[-1] ^ 255]),
    **{f"cut at {share}": truncated(share) for share in (0.001, 0.1, 0.5, 0.999)},
    **{f"flipped at {at}": flipped(at) for at in (0, 0.01, 0.5, 0.9, 1)},
}


@pytest.fixture(scope="module")
def runs(ragged: Federation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Result]]:
    """Per place of clients' rows, a run that was stopped after round 4, and an undisturbed one."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "COMMIT_AFTER_S", 0.0)
        patch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)
        for state in ("memory", "disk"):
            out = tmp_path_factory.mktemp(state) / "run"
            stopped("fedmcsa", ragged, out, client_state=state)
            found[state] = out, fedattune.fit(ragged, "fedmcsa", client_state=state, **RUN)
    return found


@pytest.mark.parametrize("state", ["memory", "disk"])
@pytest.mark.parametrize("how", list(DAMAGE))
def test_a_damaged_one_is_said_and_the_one_before_used(
    how: str, state: str, runs: dict[str, tuple[Path, Result]], ragged: Federation, tmp_path: Path
) -> None:
    kept, whole = runs[state]
    out = tmp_path / "run"
    shutil.copytree(kept, out)
    last = out / "checkpoints" / "000004.safetensors"
    last.write_bytes(DAMAGE[how](last.read_bytes()))
    resumed = fedattune.fit(ragged, "fedmcsa", client_state=state, out=out, resume=True, **RUN)
    same(resumed, whole)
    (said,) = [note for note in resumed.notes if "damaged" in note]
    assert said.startswith(f"fedmcsa: the checkpoint {last} is damaged (")
    assert said.endswith("it is called 000004.damaged now; the run went on from round 3")
    assert sorted(p.name for p in last.parent.iterdir()) == [
        "000004.damaged",
        "000005.safetensors",
        "000006.safetensors",
    ]


def test_if_all_are_damaged_the_run_is_left_as_it_is(ragged: Federation, tmp_path: Path) -> None:
    files = stopped("fedavg", ragged, tmp_path / "run")
    for file in files:
        file.write_bytes(b"\0" * 50)
    for _ in range(2):
        with pytest.raises(RunError, match=r"000004.* is damaged .*000003.* is damaged .*; remove .*run, and start"):
            fedattune.fit(ragged, "fedavg", out=tmp_path / "run", resume=True, **RUN)
    assert all(file.exists() for file in files)


def test_a_newer_format_is_no_damage(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(checkpoints, "CHECKPOINT_FORMAT", 2)
        stopped("fedavg", ragged, tmp_path / "run")
    with pytest.raises(
        RunError, match="was written by a newer FedAttune: got format 2, expected at most 1; continue with"
    ):
        fedattune.fit(ragged, "fedavg", out=tmp_path / "run", resume=True, **RUN)


def test_no_single_bit_can_be_wrong(tmp_path: Path) -> None:
    kept = CheckpointFolder(tmp_path / "checkpoints")
    kept.save(3, TREE, {"record": "[1, 2]"})
    (file,) = kept.folder.iterdir()
    raw = file.read_bytes()
    whole = kept.load_latest()
    assert whole.meta == {"record": "[1, 2]", "format": "1"}
    tree = restore_tree(TREE, whole.flat)
    assert all(torch.equal(v, tree[part][k]) for part in TREE for k, v in TREE[part].items())
    assert all(v.data_ptr() % 64 == 0 for v in tree["server"].values())  # what products give may depend on it
    for place in range(len(raw)):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])
        with pytest.raises(RunError, match="is damaged"):
            kept.load_latest()
        if place % 8 == 0:
            file.write_bytes(raw[:place])
            with pytest.raises(RunError, match="is damaged"):
                kept.load_latest()
    file.unlink()
    with pytest.raises(RunError, match="holds no checkpoint"):
        kept.load_latest()


def test_old_ones_and_what_a_kill_left_are_removed(ragged: Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert [p.name for p in stopped("fedavg", ragged, out)] == ["000004.safetensors", "000003.safetensors"]
    left = [out / "checkpoints" / ".000005.77.tmp.safetensors", out / ".models.77.tmp.safetensors"]
    for file in left:
        file.write_bytes(b"half")
    shutil.copy(out / "checkpoints" / "000003.safetensors", out / "checkpoints" / "000002.safetensors")
    fedattune.fit(ragged, "fedavg", out=out, resume=True, **RUN)
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"000005.safetensors", "000006.safetensors"}
    assert not [file for file in left if file.exists()]


@pytest.mark.parametrize("what", ["config.json", "environment.json", "checkpoint", "result.json"])
def test_a_kill_while_a_file_is_first_written(
    what: str, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of that moment are enough to resume, or to start again."""
    out, real = tmp_path / "run", Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == what or (what == "checkpoint" and target.parent.name == "checkpoints"):
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process removes nothing
        with pytest.raises(KeyboardInterrupt):
            fedattune.fit(ragged, "fedavg", out=out, **RUN)
    assert list(out.rglob(".*.tmp*"))
    resumed = fedattune.fit(ragged, "fedavg", out=out, resume=True, **RUN)
    same(resumed, fedattune.fit(ragged, "fedavg", **RUN))
    files = (
        "SHA256SUMS",
        "config.json",
        "environment.json",
        "facts.json",
        "inputs.safetensors",
        "metrics.sqlite",
        "models.safetensors",
        "predictions.safetensors",
        "result.json",
    )
    assert {p.name for p in out.iterdir()} == {*files, "checkpoints"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.deployed
def test_killed_at_any_moment_every_run_ends_with_the_same_numbers(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    for number in range(len(CASES)):
        folder = tmp_path / str(number)
        same(Result.load(folder / "killed"), Result.load(folder / "whole"))
