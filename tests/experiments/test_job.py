"""A run of an experiment whose folder is not as it was left."""

from pathlib import Path

import pytest

from fedattune.cli.main import main

FAST = ["--data", "digits", "--clients", "4", "--rounds", "2", "--steps", "1", "--quiet"]


def test_results_of_a_folder_without_its_settings_are_not_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "o", tmp_path / "o/fedavg/seed-0"
    assert main(["compare", *FAST, "--algorithms", "fedavg", "--out", str(out)]) == 0
    (run / "config.json").unlink()
    (run / "result.json").unlink()
    before = sorted(run.iterdir())
    assert main(["compare", "--resume", str(out)]) != 0
    assert f"{run} is not empty and holds no run; take a new folder" in capsys.readouterr().err
    assert sorted(run.iterdir()) == before
