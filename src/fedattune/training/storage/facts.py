"""The facts of a run as its folder keeps them: what is read back is checked, as somebody may have edited the file."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from ...core.settings import EarlyStopping

Size = Annotated[StrictInt, Field(ge=0)]


class _Stored(BaseModel):
    """Names and types of some entries; a newer FedAttune may have written more of them."""

    model_config = ConfigDict(extra="allow")


class StoredClient(_Stored):
    """A client in the facts, with its samples."""

    id: StrictStr
    n_train: Size
    n_validation: Size = 0
    n_test: Size


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
    missing: dict[str, StrictStr] = {}
    attack: StoredAttack | None = None
    refused: dict[str, dict[str, Size]] = {}
    bounded_counts: list[StrictStr] = []


def check_facts(facts: Mapping[str, Any]) -> None:
    """Check the types of the facts of a run.

    Raises:
        TypeError: an entry is missing or has another type.

    """
    try:
        StoredFacts.model_validate(dict(facts))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TypeError(f"{where}: {first['msg'].lower()}, got {first['input']!r:.80}") from error
