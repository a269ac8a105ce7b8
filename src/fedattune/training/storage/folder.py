"""The folder of one run: what it was asked to do, on what machine, and where its files are."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...core.errors import RunError
from ...core.io import read_json, unfinished_files, write_json
from ...core.settings import RAY_DEFAULTS
from .checkpoint import CheckpointFolder

RESUMABLE_SETTINGS = {"client_state", "device", "engine", *RAY_DEFAULTS}
"""Settings that do not change a result beyond rounding, so that a run may go on with others."""


@dataclass(frozen=True)
class RunFolder:
    """config.json, environment.json, metrics.sqlite, checkpoints; at the end models and result.json."""

    path: Path

    @classmethod
    def open(cls, path: Path, config: dict[str, Any], *, resume: bool) -> "RunFolder":
        """Make the folder, or check that it is one of the same run; a kill on the way leaves one or the other.

        Raises:
            RunError: the folder is in use without `resume`, or its run was another.

        """
        folder = cls(path)
        config = json.loads(json.dumps(config))
        if folder.config.exists():
            if not resume:
                raise RunError(f"{path} holds a run already; take another folder, or resume that run")
            folder._check(config)
        elif path.exists() and (not path.is_dir() or set(path.iterdir()) - set(unfinished_files(path))):
            raise RunError(f"{path} is not empty and holds no run; take a new folder")
        else:
            path.mkdir(parents=True, exist_ok=True)
            write_json(folder.config, config)
        for left in unfinished_files(path):
            left.unlink()
        if not folder.environment.exists():
            write_json(folder.environment, describe_environment())
        return folder

    @property
    def config(self) -> Path:
        """What was asked for."""
        return self.path / "config.json"

    @property
    def facts(self) -> Path:
        """What is known of the run from its beginning: clients, classes, the size of the model."""
        return self.path / "facts.json"

    @property
    def inputs(self) -> Path:
        """How inputs are prepared: the schema of the data, and what each client's numbers are standardised with."""
        return self.path / "inputs.safetensors"

    @property
    def environment(self) -> Path:
        """The versions and the machine that it was begun with."""
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
        """Files of what is kept of every client, where that is on disk."""
        return self.path / "rows"

    @property
    def models(self) -> Path:
        """Every client's model at the end."""
        return self.path / "models.safetensors"

    @property
    def result(self) -> Path:
        """What a finished run gave; its presence says that the run is finished."""
        return self.path / "result.json"

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.result.exists()

    def _check(self, config: dict[str, Any]) -> None:
        before = read_json(self.config)
        changed = [
            f"{key} was {_shorten(before.get(key))} and is {_shorten(config.get(key))}"
            for key in sorted(before.keys() | config.keys())
            if before.get(key) != config.get(key) and key not in RESUMABLE_SETTINGS
        ]
        if changed:
            raise RunError(
                f"{self.path} is of another run: {'; '.join(changed)}; take another folder, or remove this one"
            )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_environment() -> dict[str, Any]:
    """Versions, machine and git revision (if any) that a result was made with."""
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
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
