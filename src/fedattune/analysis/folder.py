"""The files in a comparison's folder: their names, their checksums, and which of them no result may replace."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.io import read_json
from ..runs.folder import CHECKSUM_FILE, read_checksums, set_checksums, verify_file

EXPERIMENT_FILE, COMMAND_FILE = "experiment.yaml", "command.txt"
PARTITION_FILE, RESULT_FILE = "partition.json", "result.json"
NOTES_FILE = "notes.json"
"""List of sentences on the tuning of a comparison's methods, or on its absence."""
BUDGET_FILE = "budget.json"
"""The time that a comparison has spent, and what it has chosen."""
FROM_THE_START = (EXPERIMENT_FILE, COMMAND_FILE, PARTITION_FILE)
"""Files that stay as they are from the start of a comparison."""
RUN_FOLDERS = "*/seed-*"
"""Pattern of the folders of single runs in the folder of an experiment."""
DEPLOYMENT_FILES = ("federation.json", "nodes.json", "control.json")
EXPERIMENT_FILES = {*FROM_THE_START, RESULT_FILE, NOTES_FILE, BUDGET_FILE, CHECKSUM_FILE, *DEPLOYMENT_FILES}
EXPERIMENT_FOLDERS = {"tuning", "baselines"}
RUN_FILES = {
    "config.json", "environment.json", "facts.json", "inputs.safetensors", "metrics.sqlite", "metrics.sqlite-journal",
    "mlflow-run.txt", "models.safetensors", "predictions.safetensors", RESULT_FILE, CHECKSUM_FILE, "wandb-run.txt",
}  # fmt: skip
RUN_SUBFOLDERS = {"checkpoints", "rows"}
MARKS = ("metrics.sqlite", "environment.json", "facts.json")
"""Files of which a run's folder has one, beside config.json."""


def make_run_name(method: str, split: int, seed: int) -> str:
    """Return the folder of a run in the folder of its experiment; the first split has none in its name."""
    return f"{method}/seed-{seed}" + (f"-split-{split}" if split else "")


def list_parts(path: Path) -> list[Path]:
    """List the files of baselines and tuning in a comparison's folder, those that are missing too."""
    found = {*path.glob("tuning/*.json"), *path.glob("baselines/*/*/*")}
    named = {path / name for name in read_checksums(path) or () if Path(name).parts[0] in EXPERIMENT_FOLDERS}
    return sorted(found | named)


def seal_experiment(path: Path, contents: Mapping[Path, str] | None = None, *, is_finished: bool = False) -> None:
    """List the checksums of the files in a comparison's own folder; each of its runs has a list of its own."""
    files = [path / name for name in FROM_THE_START if path / name not in (contents or {})]
    files += list_parts(path) + ([path / RESULT_FILE, path / NOTES_FILE] if is_finished else [])
    set_checksums(path, files, contents)


def verify_experiment(path: Path, *files: Path) -> None:
    """Compare files in a comparison's own folder with their checksums before they are read."""
    for file in files:
        remedy = "restore it from a copy, or start a new run; its single runs can still be read"
        if file.name in (RESULT_FILE, NOTES_FILE):
            remedy = "restore it from a copy, or resume the comparison, which writes it again"
        elif file.parent != path:
            remedy = f"restore it from a copy, or remove {file.parent} and resume the comparison, which makes it again"
        verify_file(file, path, remedy)


def read_experiment_file(path: Path, name: str) -> Any:
    """Read a JSON file of a comparison's own folder; None if there is none."""
    verify_experiment(path, path / name)
    return read_json(path / name) if (path / name).is_file() else None


def find_run_folder(path: Path) -> Path | None:
    """Find the run folder or comparison whose own file a path is; None if it is none of theirs.

    A report in such a folder is no such file, and neither is a figure.
    """
    file = Path(os.path.realpath(path))
    for folder in list(file.parents)[:4]:
        first, *more = file.relative_to(folder).parts
        is_run = (folder / "config.json").is_file() and any((folder / name).is_file() for name in MARKS)
        is_experiment = (folder / EXPERIMENT_FILE).is_file()
        if is_run and (first in RUN_SUBFOLDERS if more else first in RUN_FILES):
            return folder
        if is_experiment and (first in EXPERIMENT_FOLDERS if more else first in EXPERIMENT_FILES):
            return folder
    return None
