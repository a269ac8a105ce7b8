"""Rows on disk are those of `Params`, wait in the background to be written, and survive a crash."""

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedattune import Params, RunError
from fedattune.runs.rows import DiskRows

FIRST = Params({"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "none": torch.zeros(0), "b": torch.ones(2)})


def changed(rows: Params, by: float) -> Params:
    return rows.map(lambda a: (a + by).to(a.dtype))


def test_disk_rows_are_those_of_params():
    rng = np.random.default_rng(0)
    disk, memory = DiskRows(FIRST, 20), FIRST.copies(20)
    assert list(disk) == list(memory)
    assert len(disk) == 4
    assert "w" in disk
    for step in range(60):
        ids = torch.from_numpy(rng.choice(20, rng.integers(0, 6), replace=False))
        names = ["b", "w"] if step % 3 == 0 else list(FIRST)
        new = changed(memory.only(names).rows(ids), step)
        disk.only(names).put_rows(ids, new)
        memory.only(names).put_rows(ids, new)
        some = torch.from_numpy(rng.integers(0, 20, (2, 3)))
        for mine, theirs in (
            (disk.rows(some), memory.rows(some)),
            (disk.only(["b", "n"]).rows(slice(2, 9)), memory.only(["b", "n"]).rows(slice(2, 9))),
            (disk.only(["n", "w"]).rows(step % 20), memory.only(["n", "w"]).rows(step % 20)),
        ):
            assert list(mine) == list(theirs)
            assert all(torch.equal(mine[k], theirs[k]) and mine[k].dtype == theirs[k].dtype for k in mine)


def test_rows_of_the_last_two_checkpoints_survive_a_crash_at_any_moment(tmp_path: Path):
    """After every write the file is copied, as a crash would leave it, and read with the slots that were saved."""
    rng = np.random.default_rng(1)
    path = tmp_path / "a.rows"
    disk, memory = DiskRows(FIRST, 12, path), FIRST.copies(12)
    saved = [(disk.slots.clone(), memory.rows(slice(None)).map(torch.clone))] * 2  # the last one first
    for step in range(60):
        ids = torch.from_numpy(rng.choice(12, 4, replace=False))
        new = changed(memory.rows(ids), step)
        disk.put_rows(ids, new)
        memory.put_rows(ids, new)
        left = tmp_path / f"{step}.rows"
        shutil.copy(path, left)
        for slots, rows in reversed(saved):
            found = DiskRows(FIRST, 12, left).restore(slots.clone(), [saved[1][0]])
            assert all(torch.equal(v, rows[k]) for k, v in found.rows(slice(None)).items())
        if step % 5 == 4:
            disk.sync()
            saved = [(disk.slots.clone(), memory.rows(slice(None)).map(torch.clone)), saved[0]]
            disk.commit()
        if step % 13 == 12:  # go on in the file that the crash left
            disk, memory, path = found, saved[0][1].map(torch.clone), left
    assert path.stat().st_size <= 3 * 12 * disk.row_bytes  # what was left is used again


def test_rows_that_are_gone_are_said(tmp_path: Path):
    disk = DiskRows(FIRST, 5, tmp_path / "a.rows")
    disk.put_rows(torch.arange(5), FIRST.copies(5))
    disk.sync()
    os.truncate(tmp_path / "a.rows", disk.row_bytes)
    with pytest.raises(RunError, match="the file was cut"):
        disk.rows(torch.tensor([3]))
    with pytest.raises(RunError, match="is missing or was cut"):
        DiskRows(FIRST, 5, tmp_path / "other.rows").restore(disk.slots)
    with pytest.raises(RunError, match="of 5 clients, expected 4"):
        DiskRows(FIRST, 4, tmp_path / "a.rows").restore(disk.slots)


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = DiskRows(FIRST, 5)
    monkeypatch.setattr(os, "pwrite", full)
    disk.put_rows(torch.arange(2), FIRST.copies(2))
    with pytest.raises(RunError, match="No space left on device; free some space"):
        disk.sync()


def test_rows_that_wait_to_be_written_are_read(monkeypatch: pytest.MonkeyPatch):
    """Writing is held up until all that waits was read; a batch is of two rows, so that some wait and some do not."""
    from fedattune.runs import rows as behind

    monkeypatch.setattr(behind, "QUEUE_BYTES", 2 * DiskRows(FIRST, 1).row_bytes)
    go, real = threading.Event(), os.pwrite
    disk, rows = DiskRows(FIRST, 9), changed(FIRST.copies(2), 5)
    disk.put_rows(torch.tensor([6, 1]), changed(rows, 1))
    disk.sync()
    monkeypatch.setattr(os, "pwrite", lambda *args: go.wait() and real(*args))
    disk.put_rows(torch.tensor([3, 1]), rows)
    rows["w"].zero_()  # what was handed over is no longer theirs
    found = disk.only(["w", "b"]).rows(torch.tensor([1, 3, 4, 1]))
    assert torch.equal(found["w"], FIRST["w"] + torch.tensor([5.0, 5, 0, 5])[:, None, None])
    assert torch.equal(disk.rows(6)["b"], FIRST["b"] + 6)
    go.set()
    assert torch.equal(disk.rows(torch.tensor([6, 3]))["n"], torch.tensor([13, 12]))


def test_rows_without_calls_that_read_and_write_at_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Windows has neither pwrite nor preadv."""
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.delattr(os, "preadv")
    for path in (None, tmp_path / "a.rows"):
        disk = DiskRows(FIRST, 5, path)
        disk.put_rows(torch.tensor([4, 1]), changed(FIRST.copies(2), 3))
        disk.sync()
        found = disk.rows(torch.tensor([1, 0, 4]))
        for name, tensor in FIRST.items():
            assert torch.equal(found[name], torch.stack([tensor + 3, tensor, tensor + 3]).to(tensor.dtype))
