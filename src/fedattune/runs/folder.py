"""Manage the folder of one run: its settings, its machine, and the paths of its files."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..core.errors import RunError
from ..core.io import format_json, read_json, unfinished_files, write_json, write_text
from ..core.lock import LOCK_FILE, WRITER_FILE
from ..core.settings import RAY_DEFAULTS
from .storage.checkpoint import CheckpointFolder
from .storage.checksums import set_checksums, verify_file
from .storage.facts import check_config, check_environment, check_facts, check_stored

CONFIG_FILE = "config.json"
"""The file that makes a folder the folder of a run."""

RESUMABLE_SETTINGS = {"client_state", "device", "engine", *RAY_DEFAULTS}
"""Settings that change results by rounding at most, so that a run may resume with others."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; see the properties for its files. Models and result.json appear at the end of the run."""

    path: Path

    @classmethod
    def open(cls, path: Path, config: dict[str, Any], *, resume: bool) -> "RunFolder":
        """Make the folder, or check that it holds the same run; a kill at any moment leaves one or the other.

        Args:
            path: the folder.
            config: settings of the run.
            resume: whether the folder may hold this run already.

        Returns:
            The folder.

        Raises:
            RunError: the folder is in use without `resume`, or holds a run with other settings.
        """
        folder = cls(path)
        config = json.loads(json.dumps(config))
        if folder.config.exists():
            if not resume:
                raise RunError(f"{path} holds a run already; take another folder, or resume that run")
            folder._check(config)
            folder.verify(folder.environment, folder.metrics)
        elif path.exists() and (not path.is_dir() or _list_foreign_files(path)):
            raise RunError(f"{path} is not empty and holds no run; take a new folder")
        else:
            path.mkdir(parents=True, exist_ok=True)
            write_json(folder.config, config)
        for unfinished in unfinished_files(path):
            unfinished.unlink()
        if not folder.environment.exists():
            write_json(folder.environment, describe_environment())
        if not folder.is_finished:  # the other files will change
            folder.seal_start()
        return folder

    def seal_start(self) -> None:
        """List the checksums of the files that stay as they are from the start."""
        set_checksums(self.path, [self.config, self.environment])

    def finish(self, result: Any) -> None:
        """Write `result.json`, which makes the run a finished one, after the checksums of all files."""
        text = format_json(result)
        files = [self.config, self.environment, self.facts, self.inputs, self.metrics, self.models]
        set_checksums(self.path, [*files, self.predictions], {self.result: text})
        write_text(self.result, text)

    def verify(self, *files: Path) -> None:
        """Compare files with their checksums before they are read.

        Raises:
            RunError: a file is not as the run wrote it.
        """
        for file in files:
            again = file in (self.facts, self.inputs, self.models, self.predictions, self.result)
            # A run that goes on may lack its result, which was removed to have it written again.
            if file in (self.facts, self.inputs) and not self.is_finished:
                continue
            remedy = "restore it from a copy, or train the run again"
            if again:
                remedy = (
                    f"restore it from a copy, or remove {self.result.name} from that folder and resume the run, which "
                    "writes it again"
                )
            verify_file(file, self.path, remedy)

    def read(self, file: Path) -> Any:
        """Read one of the JSON files of the folder, and compare it with its checksum before.

        Raises:
            RunError: the file is missing, damaged, or not as the run wrote it.
        """
        self.verify(file)
        return read_json(file)

    def read_config(self) -> dict[str, Any]:
        """Read and check the settings of the run.

        Raises:
            RunError: the file is missing or damaged.
        """
        config = self.read(self.config)
        check_stored(self.config, check_config, config)
        return dict(config)

    def read_facts(self, *, is_finished: bool) -> dict[str, Any]:
        """Read and check the facts: of the result if the run is finished, else those from its start.

        Args:
            is_finished: whether to read the result, which may appear at any moment.

        Raises:
            RunError: the file is missing or damaged.
        """
        file = self.result if is_finished else self.facts
        content = self.read(file)

        def check(content: Any) -> None:
            check_facts(content["facts"] if is_finished else content)

        check_stored(file, check, content)
        return {"notes": [], **(content["facts"] if is_finished else content)}

    def read_environment(self) -> dict[str, Any]:
        """Read versions and machine; nothing if the run has none.

        Raises:
            RunError: the file is damaged.
        """
        self.verify(self.environment)
        if not self.environment.is_file():
            return {}
        environment = read_json(self.environment)
        check_stored(self.environment, check_environment, environment)
        return dict(environment)

    @property
    def config(self) -> Path:
        """Settings of the run."""
        return self.path / CONFIG_FILE

    @property
    def facts(self) -> Path:
        """Facts known from the start: clients, classes, the size of the model."""
        return self.path / "facts.json"

    @property
    def inputs(self) -> Path:
        """The preparation of inputs: the schema of the data, and each client's constants of standardization."""
        return self.path / "inputs.safetensors"

    @property
    def environment(self) -> Path:
        """Versions and machine at the start of the run."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """Scores, traffic and mixing matrices of every round."""
        return self.path / "metrics.sqlite"

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The last saved states."""
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def rows(self) -> Path:
        """Files of client rows on disk."""
        return self.path / "rows"

    @property
    def models(self) -> Path:
        """Every client's model at the end."""
        return self.path / "models.safetensors"

    @property
    def predictions(self) -> Path:
        """Outputs of the judged models for the rows of the test and validation parts."""
        return self.path / "predictions.safetensors"

    @property
    def result(self) -> Path:
        """Result of the run; its presence says that the run is finished."""
        return self.path / "result.json"

    @property
    def is_finished(self) -> bool:
        """True if the run has a result."""
        return self.result.exists()

    def _check(self, config: dict[str, Any]) -> None:
        before = self.read_config()
        changed = [
            "{} was {} and is {}".format(key, *_shorten_pair(before.get(key), config.get(key)))
            for key in sorted(before.keys() | config.keys())
            if before.get(key) != config.get(key) and key not in RESUMABLE_SETTINGS
        ]
        if changed:
            raise RunError(
                f"{self.path} is of another run: {'; '.join(changed)}; take another folder, or remove this one"
            )


def _list_foreign_files(path: Path) -> list[Path]:
    """List the files of a folder without a run that do not belong to the beginning of one."""
    own = {*unfinished_files(path), path / LOCK_FILE, path / WRITER_FILE, RunFolder(path).environment}
    return [file for file in path.rglob("*") if file.is_file() and file not in own]


def _shorten_pair(before: Any, after: Any) -> tuple[str, str]:
    """Write two values that differ; of long ones, the part around the first difference."""
    texts = repr(before), repr(after)
    first = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, first - 30)
    was, now = (
        f"{'...' if start else ''}{text[start : start + 74]}{'...' if len(text) > start + 74 else ''}"
        if len(text) > 80
        else text
        for text in texts
    )
    return was, now


def describe_environment() -> dict[str, Any]:
    """Collect the versions, the machine and the git revision (if any) of a run."""
    packages = ["torch", "numpy", "pydantic", "scikit-learn", "pyarrow", "safetensors"]
    return {
        "fedattune": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "git": _git_revision(),
    }


def _git_revision() -> str | None:
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None
