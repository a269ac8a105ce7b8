"""The JSON files of a run: what is read back is checked, as somebody may have edited a file."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictInt, StrictStr, ValidationError

from ...core.errors import FedAttuneError, RunError, summarize_error
from ...core.settings import EarlyStopping, Settings

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
