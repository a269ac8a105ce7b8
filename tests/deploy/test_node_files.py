"""Small files of a node: its errors, and the run that is current."""

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import RunError
from fedattune.deploy.node.files import mark_current, report_error, retire_errors


def test_errors_are_dated_and_kept_until_a_success(tmp_path: Path) -> None:
    for r in (1, 2):
        report_error(tmp_path, RunError(f"broken {r}"), {"kind": "train", "round": r})
    text = (tmp_path / "error.log").read_text()
    assert len(re.findall(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 message: kind train, round \d$", text, re.M)) == 2
    assert text.index("broken 1") < text.index("broken 2")
    retire_errors(tmp_path)
    assert not (tmp_path / "error.log").exists()
    assert (tmp_path / "error.old.log").read_text() == text
    retire_errors(tmp_path)  # without errors, the old ones stay
    assert (tmp_path / "error.old.log").exists()


def test_current_names_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("aaaa", "bbbb", "bbbb"):
        (tmp_path / token).mkdir(exist_ok=True)
        mark_current(tmp_path, token)
        assert (tmp_path / "current").resolve() == (tmp_path / token).resolve()
    assert os.readlink(tmp_path / "current") == "bbbb"  # relative, so that the folder can move
    monkeypatch.setattr(Path, "symlink_to", lambda *_, **__: (_ for _ in ()).throw(OSError("no links")))
    mark_current(tmp_path, "cccc")
    assert json.loads((tmp_path / "current.json").read_text()) == {"folder": "cccc"}
