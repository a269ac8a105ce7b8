"""Manage the folder of one run: its settings, its machine, the paths of its files, and their checksums."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..core.errors import RunError
from ..core.io import format_json, read_json, unfinished_files, write_json, write_text
from ..core.lock import LOCK_FILE, WRITER_FILE
from ..core.settings import RAY_DEFAULTS, Settings
from ..data.input_spec import InputSpec
from .checkpoint import CheckpointFolder

CHECKSUM_FILE = "SHA256SUMS"
"""The list: a line `HASH  NAME` for each file, its name relative to the folder."""
COMPLETE_WITH = "result.json"
"""A list with this name is complete: other files of the run do not belong to it."""
LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
_hashes: dict[Path, tuple[tuple[int, ...], str]] = {}
"""File -> its state when it was read, and its hash: `watch` reads the same files again and again."""


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Read the list of a folder: name -> hash; None if the folder has no list."""
    if folder.is_file():
        raise RunError(f"{folder} is a file, expected a folder; give the one that fedattune run or compare wrote")
    file = folder / CHECKSUM_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}; {_ADVICE_ON_LIST}") from error
    matches = [LINE.fullmatch(line) for line in lines]
    if not lines or None in matches:
        raise RunError(f"{file} is damaged: expected lines with a hash and a name; {_ADVICE_ON_LIST}")
    return {match[2]: match[1] for match in matches if match}


_ADVICE_ON_LIST = f"restore it from a copy; if you trust the files, write it again by sha256sum FILES > {CHECKSUM_FILE}"


def set_checksums(folder: Path, files: Iterable[Path], contents: Mapping[Path, str] | None = None) -> None:
    """Write the list of a folder anew; files that are missing are left out."""
    sums = {file.relative_to(folder).as_posix(): _hash_file(file) for file in files if file.is_file()}
    for file, text in (contents or {}).items():
        sums[file.relative_to(folder).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    write_text(folder / CHECKSUM_FILE, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def verify_file(file: Path, folder: Path, remedy: str) -> None:
    """Compare a file with the list of its folder before it is read; it may be missing if the list lacks it, too."""
    sums = read_checksums(folder)
    if sums is None:
        if (folder / COMPLETE_WITH).exists():
            raise RunError(f"{folder / CHECKSUM_FILE} is missing; {_ADVICE_ON_LIST}")
        return  # a run that was killed at its very start
    expected = sums.get(file.relative_to(folder).as_posix())
    if expected is None:
        if COMPLETE_WITH in sums and file.exists():
            raise RunError(f"{file} is no file that the run wrote: {CHECKSUM_FILE} does not name it; remove it")
        return
    if not file.is_file():
        raise RunError(f"{file} is missing, and {CHECKSUM_FILE} names it; {remedy}")
    if (actual := _hash_file(file)) != expected:
        raise RunError(
            f"{file} is not as the run wrote it: somebody edited or replaced it, or it is damaged (its SHA-256 begins "
            f"with {actual[:8]}, and with {expected[:8]} in {CHECKSUM_FILE}); {remedy}"
        )


def _hash_file(file: Path) -> str:
    try:
        about = file.stat()
        state = (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        known = _hashes.get(file)
        if known is None or known[0] != state:
            with file.open("rb") as content:
                known = _hashes[file] = (state, hashlib.file_digest(content, "sha256").hexdigest())
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error
    return known[1]


CONFIG_FILE = "config.json"
"""The file that makes a folder the folder of a run."""
CONFIG_KEYS, FACT_KEYS = ("algorithm", "data", "seed", "rounds"), ("evaluation_point", "clients")
"""Keys that the settings and the facts of every run have."""
RESUMABLE_SETTINGS = {"client_state", "device", "engine", *RAY_DEFAULTS}
"""Settings that change results by rounding at most, so that a run may resume with others."""


class _File:
    """A file in the folder of a run, as an attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, and its files. Models and result.json appear at the end of the run."""

    path: Path

    @classmethod
    def open(cls, path: Path, config: dict[str, Any], *, resume: bool) -> "RunFolder":
        """Make the folder, or check that it holds the same run; a kill at any moment leaves one or the other."""
        folder = cls(path)
        config = json.loads(json.dumps(config))
        if folder.config.exists():
            if not resume:
                raise RunError(f"{path} holds a run already; take another folder, or resume that run")
            # A setting that is newer than the folder had its default.
            defaults = {name: info.default for name, info in Settings.flat_fields().items() if name in config}
            before = {**defaults, **folder.read_config()}
            changed = "; ".join(
                "{} was {} and is {}".format(key, *_shorten_pair(before.get(key), config.get(key)))
                for key in sorted(before.keys() | config.keys())
                if before.get(key) != config.get(key) and key not in RESUMABLE_SETTINGS
            )
            if changed:
                raise RunError(f"{path} is of another run: {changed}; take another folder, or remove this one")
            folder.verify(folder.environment, folder.metrics)
        else:
            # Files of the beginning of a run that was killed.
            own = {*unfinished_files(path), path / LOCK_FILE, path / WRITER_FILE, folder.environment}
            is_other = path.exists() and not path.is_dir()
            if is_other or any(file.is_file() and file not in own for file in path.rglob("*")):
                raise RunError(f"{path} is not empty and holds no run; take a new folder")
            path.mkdir(parents=True, exist_ok=True)
            write_json(folder.config, config)
        for unfinished in unfinished_files(path):
            unfinished.unlink()
        if not folder.environment.exists():
            write_json(folder.environment, describe_environment())
        if not folder.is_finished:  # the other files will change
            folder.drop_damaged(folder.models, folder.predictions)
            folder.seal_start()
        return folder

    def drop_damaged(self, *files: Path) -> None:
        """Remove files that are not as the run wrote them, before their checksums are forgotten."""
        for file in files:
            try:
                self.verify(file)
            except RunError:
                file.unlink(missing_ok=True)

    def seal_start(self) -> None:
        """List the checksums of the files that stay as they are from the start."""
        set_checksums(self.path, [self.config, self.environment])

    def write_start(self, facts: Mapping[str, Any], inputs: InputSpec | None) -> None:
        """Write the facts that are known before the first round, and list the checksums of all files so far."""
        write_json(self.facts, facts)
        if inputs:
            inputs.save(self.inputs)
        set_checksums(self.path, [self.config, self.environment, self.facts, self.inputs])

    def finish(self, result: Any) -> None:
        """Write `result.json`, which makes the run a finished one, after the checksums of all files."""
        text = format_json(result)
        files = [self.config, self.environment, self.facts, self.inputs, self.metrics, self.models]
        set_checksums(self.path, [*files, self.predictions], {self.result: text})
        write_text(self.result, text)

    def verify(self, *files: Path) -> None:
        """Compare files with their checksums before they are read."""
        for file in files:
            remedy = "train the run again"
            if file in (self.facts, self.inputs, self.models, self.predictions, self.result):
                remedy = f"remove {COMPLETE_WITH} from that folder and resume the run, which writes it again"
            verify_file(file, self.path, f"restore it from a copy, or {remedy}")

    def read(self, file: Path) -> Any:
        """Read one of the JSON files of the folder, and compare it with its checksum before."""
        self.verify(file)
        return read_json(file)

    def read_config(self) -> dict[str, Any]:
        return _require(self.config, self.read(self.config), CONFIG_KEYS)

    def read_facts(self, *, is_finished: bool) -> dict[str, Any]:
        """Read the facts: of the result if the run is finished, else those from its start."""
        file = self.result if is_finished else self.facts
        content = self.read(file)
        return {"notes": [], **_require(file, content["facts"] if is_finished else content, FACT_KEYS)}

    def read_environment(self) -> dict[str, Any]:
        """Read versions and machine; nothing if the run has none."""
        self.verify(self.environment)
        return dict(read_json(self.environment)) if self.environment.is_file() else {}

    config = _File(CONFIG_FILE)
    facts = _File("facts.json")  # known from the start: clients, classes, the size of the model
    inputs = _File("inputs.safetensors")  # the schema of the data, and each client's constants of standardization
    environment = _File("environment.json")  # versions and machine at the start of the run
    metrics = _File("metrics.sqlite")  # scores, traffic and mixing matrices of every round
    rows = _File("rows")  # files of client rows on disk
    models = _File("models.safetensors")  # every client's model at the end
    predictions = _File("predictions.safetensors")  # outputs of the judged models for test and validation rows
    result = _File(COMPLETE_WITH)  # its presence says that the run is finished

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def is_finished(self) -> bool:
        return self.result.exists()


def _require(file: Path, content: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    if missing := [key for key in keys if key not in content]:
        raise RunError(
            f"{file} is of another version of FedAttune: it lacks {', '.join(missing)}; read it with that version, or "
            "train the run again"
        )
    return content


def _shorten_pair(before: Any, after: Any) -> tuple[str, str]:
    """Write two values that differ; of long ones, the part around the first difference."""
    texts = repr(before), repr(after)
    first = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start, end = max(0, first - 30), max(0, first - 30) + 74
    short = [f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}" for text in texts]
    was, now = (text if len(text) <= 80 else part for text, part in zip(texts, short, strict=True))
    return was, now


def describe_environment() -> dict[str, Any]:
    """Collect the versions, the machine and the git revision (if any) of a run."""
    packages = ["torch", "numpy", "pydantic", "scikit-learn", "pyarrow", "safetensors"]
    revision, command = "", ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    with suppress(OSError, subprocess.TimeoutExpired):
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
        revision = process.stdout.strip()
    return {
        "fedattune": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "git": revision or None,
    }
