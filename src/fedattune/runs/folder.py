"""Manage the folder of one run: its settings, its machine, the paths of its files, and their checksums."""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictInt, StrictStr, ValidationError

from .._version import __version__
from ..core.errors import FedAttuneError, RunError, summarize_error
from ..core.io import format_json, read_json, unfinished_files, write_json, write_text
from ..core.lock import LOCK_FILE, WRITER_FILE
from ..core.settings import RAY_DEFAULTS, EarlyStopping, Settings
from .checkpoint import CheckpointFolder

CHECKSUM_FILE = "SHA256SUMS"
"""The list: a line `HASH  NAME` for each file, its name relative to the folder."""

COMPLETE_WITH = "result.json"
"""A list with this name is complete: other files of the run do not belong to it."""

LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")

_hashes: dict[Path, tuple[tuple[int, ...], str]] = {}
"""File -> its state when it was read, and its hash: `watch` reads the same files again and again."""


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Read the list of a folder: name -> hash; None if the folder has no list.

    Raises:
        RunError: the list is damaged.

    """
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


_ADVICE_ON_LIST = "restore it from a copy, or remove it to read the other files without a check"


def set_checksums(folder: Path, files: Iterable[Path], contents: Mapping[Path, str] | None = None) -> None:
    """Write the list of a folder anew.

    Args:
        folder: the folder.
        files: finished files in it; missing ones are left out.
        contents: texts of files that are written after the list.

    """
    sums = {file.relative_to(folder).as_posix(): _hash_file(file) for file in files if file.is_file()}
    for file, text in (contents or {}).items():
        sums[file.relative_to(folder).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    write_text(folder / CHECKSUM_FILE, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def verify_file(file: Path, folder: Path, remedy: str) -> None:
    """Compare a file with the list of its folder before it is read.

    Args:
        file: the file; it may be missing if the list does not name it.
        folder: the folder with the list.
        remedy: what to do, for messages.

    Raises:
        RunError: the file is not the one that the run wrote.

    """
    sums = read_checksums(folder)
    if sums is None:
        return
    expected = sums.get(file.relative_to(folder).as_posix())
    if expected is None:
        if COMPLETE_WITH in sums and file.exists():
            raise RunError(
                f"{file} is no file that the run wrote: {CHECKSUM_FILE} does not name it; remove it"
            )
        return
    if not file.is_file():
        raise RunError(f"{file} is missing, and {CHECKSUM_FILE} names it; {remedy}")
    if (actual := _hash_file(file)) != expected:
        raise RunError(
            f"{file} is not as the run wrote it: somebody edited or replaced it, or it is damaged (its SHA-256 begins "
            f"with {actual[:8]}, and with {expected[:8]} in {CHECKSUM_FILE}); {remedy}"
        )


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, in hex digits.

    Raises:
        RunError: the file cannot be read.

    """
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


Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class _Stored(BaseModel):
    """Names and types of some entries; a newer FedAttune may have written more of them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StoredClient(_Stored):
    """A client in the facts, with its samples."""

    id: StrictStr
    n_train: Size
    n_validation: Size = 0
    n_test: Size


class StoredNewcomer(BaseModel):
    """A client that joined after training."""

    model_config = ConfigDict(extra="forbid")

    id: StrictStr
    n_train: Size
    n_test: Size
    received: FiniteFloat | None
    trained: FiniteFloat | None
    local: FiniteFloat | None


class StoredScale(_Stored):
    """The unit of a target that is a number."""

    mean: FiniteFloat
    deviation: Annotated[FiniteFloat, Field(gt=0)]


class StoredClientPrivacy(_Stored):
    """Differential privacy of whole clients; see `fedattune.training.uploads.client_privacy.ClientPrivacy.facts`."""

    where: Literal["central", "local"]
    mechanism: StrictStr
    epsilon: Annotated[float, Field(ge=0)] | None
    delta: Annotated[float, Field(gt=0, lt=1)]
    noise_multiplier: Annotated[float, Field(ge=0)]
    clip: Annotated[float, Field(gt=0)]
    sampling: StrictStr


class StoredRecordPrivacy(_Stored):
    """Differential privacy of training rows; see `fedattune.training.clients.record_privacy.RecordLedger.facts`."""

    mechanism: StrictStr
    epsilon: list[Annotated[float, Field(ge=0)] | None] = Field(min_length=1)
    delta: Annotated[float, Field(gt=0, lt=1)]
    noise_multiplier: list[Annotated[float, Field(ge=0)]]
    clip: Annotated[float, Field(gt=0)]


class StoredAttack(_Stored):
    """The attack of a simulation: its name, and the names of the attackers by number."""

    name: StrictStr
    attackers: dict[str, StrictStr]
    labels: list[list[Size]] | None = None
    success: Annotated[float, Field(ge=0, le=1)] | None = None


class StoredFacts(_Stored):
    """The facts of a run; see `fedattune.training.notes.collect_facts`. Older versions did not write all of them."""

    headline: Literal["received", "trained"]
    early_stopping: EarlyStopping = "off"
    clients: list[StoredClient] = Field(min_length=1)
    n_parameters: Size = 0
    input_shape: list[Size] = []
    classes: list[StrictStr] = []
    notes: list[StrictStr] = []
    data_notes: list[StrictStr] = []
    labels: list[list[Size]] | None = None
    numbers: list[Size] | None = None
    population: Size | None = None
    missing: dict[Annotated[str, Field(pattern=r"^\d{1,18}$")], StrictStr] = {}
    newcomers: list[StoredNewcomer] = []
    effects: list[tuple[StrictStr, StrictStr, StrictStr, FiniteFloat]] = []
    target_scale: StoredScale | None = None
    reference_logits: list[list[FiniteFloat]] | None = None
    client_privacy: StoredClientPrivacy | None = None
    record_privacy: StoredRecordPrivacy | None = None
    attack: StoredAttack | None = None
    refused: dict[str, dict[str, Size]] = {}
    separated: list[StrictStr] = []
    bounded_counts: list[StrictStr] = []
    client_scalars: dict[StrictStr, list[FiniteFloat | None]] = {}


class StoredConfig(_Stored):
    """All that defines a run, beside its settings."""

    algorithm: Annotated[StrictStr, Field(min_length=1)]
    algorithm_source: StrictStr = ""
    definition: StrictStr = ""
    options: dict[str, Any] = {}
    model: StrictStr = ""
    model_options: dict[str, Any] = {}
    data: StrictStr
    partition: dict[str, Any] = {}
    split: StrictStr = ""
    seed: Size
    rounds: Annotated[StrictInt, Field(ge=1)]


class StoredEnvironment(_Stored):
    """Versions and machine."""

    fedattune: StrictStr = ""
    python: StrictStr = ""
    platform: StrictStr = ""
    cpus: Size | None = None
    packages: dict[str, StrictStr] = {}
    git: StrictStr | None = None


def check_stored(file: Path, check: Callable[[Any], None], content: Any, advice: str = "") -> None:
    """Check the content of a file, and say in one sentence what is wrong with it.

    Args:
        file: the file, for the message.
        check: raises ValueError, TypeError or KeyError if something is wrong.
        content: the content.
        advice: what to do; by default, to restore the file or to train again.

    Raises:
        RunError: something is wrong.

    """
    try:
        check(content)
    except (KeyError, TypeError, ValueError, FedAttuneError) as error:
        raise RunError(
            f"{file} is damaged, or of another version of FedAttune: it lacks what belongs there "
            f"({summarize_error(error)}); {advice or 'restore it from a copy, or train the run again'}"
        ) from error


def _validate(schema: type[BaseModel], content: Any) -> Any:
    """Validate what was read from JSON.

    Raises:
        TypeError: an entry is missing or has another type.

    """
    if not isinstance(content, Mapping):
        raise TypeError(f"expected an object with keys, got {content!r:.80}")
    try:
        return schema.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TypeError(f"{where}: {first['msg'].lower()}, got {first['input']!r:.80}") from error


def check_facts(facts: Any) -> None:
    """Check the types and lengths of the facts of a run.

    Raises:
        TypeError: an entry is missing or has another type.
        ValueError: entries do not fit together.

    """
    known: StoredFacts = _validate(StoredFacts, facts)
    n = len(known.clients)
    population = n if known.population is None else known.population
    ids = range(n) if known.numbers is None else known.numbers
    if len({client.id for client in known.clients}) < n:
        raise ValueError("clients: two clients have the same id")
    is_merged = n == 1 and list(ids) == [population]  # one that stands for all: secure aggregation
    if len(ids) != n or sorted(set(ids)) != list(ids) or (n and max(ids) >= population and not is_merged):
        raise ValueError(f"numbers: expected {n} ascending numbers below {population}, got {ids!r:.80}")
    if known.labels is not None and (len(known.labels) != n or len({len(row) for row in known.labels}) > 1):
        raise ValueError(f"labels: expected {n} rows of the same length")
    if any(value < 0 for *_, value in known.effects):
        raise ValueError("effects: expected distances, got a negative number")
    if any(len(values) != n for values in known.client_scalars.values()):
        raise ValueError(f"client_scalars: expected {n} values each")


def check_config(config: Any) -> None:
    """Check what defines a run.

    Raises:
        TypeError: an entry is missing or has another type.
        ValueError: a setting is impossible.

    """
    known: StoredConfig = _validate(StoredConfig, config)
    settings = {key: value for key, value in config.items() if key in Settings.model_fields}
    checked = _validate(Settings, settings).model_dump(mode="json")
    for key, value in settings.items():
        # JSON keeps types, so a text or true in the place of a number is an edit.
        if checked[key] != value or isinstance(checked[key], bool) != isinstance(value, bool):
            raise TypeError(f"{key}: got {value!r:.80}, expected {checked[key]!r:.80}")
    split = known.partition.get("split", 0)
    if not isinstance(split, int) or isinstance(split, bool) or not 0 <= split < 2**31:
        raise TypeError(f"partition.split: expected a number, got {split!r:.80}")
    if not isinstance(known.partition.get("name", ""), str | None):
        raise TypeError(f"partition.name: expected text, got {known.partition['name']!r:.80}")


def check_environment(environment: Any) -> None:
    """Check versions and machine.

    Raises:
        TypeError: an entry has another type.

    """
    _validate(StoredEnvironment, environment)


def check_number(value: object, least: float = -math.inf) -> float:
    """Return a finite number that was read from a file.

    Raises:
        TypeError: it is none, or below the least.

    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise TypeError(f"expected a number, got {value!r:.80}")
    return float(value)


def check_whole(value: object, least: int = 0) -> int:
    """Return a whole number that was read from a file.

    Raises:
        TypeError: it is none, or below the least.

    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise TypeError(f"expected a whole number from {least}, got {value!r:.80}")
    return value


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
