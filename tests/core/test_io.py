"""Files are the same on every system, and none stays open that another one has to replace."""

import sys
from pathlib import Path

import pytest
import torch

from fedattune.core.io import load_tensors, read_json, save_tensors, write_json, write_text


def test_text_has_the_line_ends_of_unix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.linesep", "\r\n")
    write_text(tmp_path / "a.sh", "#!/bin/sh\necho é\n")
    assert (tmp_path / "a.sh").read_bytes() == b"#!/bin/sh\necho \xc3\xa9\n"
    write_json(tmp_path / "a.json", {"client": "北京"})
    assert b"\r" not in (tmp_path / "a.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {"client": "北京"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the files that are mapped into memory")
def test_tensors_that_were_read_do_not_hold_their_file(tmp_path: Path) -> None:
    """Windows would not let a checkpoint be removed whose tensors are mapped from it."""
    file = tmp_path / "mapped.safetensors"
    save_tensors(file, {"w": torch.arange(100_000.0)}, {"round": "3"})
    tensors, meta = load_tensors(file)
    assert "mapped.safetensors" not in Path("/proc/self/maps").read_text("utf-8")
    assert torch.equal(tensors["w"], torch.arange(100_000.0))
    assert meta == {"round": "3"}
