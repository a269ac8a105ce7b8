"""What a model's inputs are made of, kept with the run so that its models can be used on new data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import ConfigError
from ..core.io import copy_tensors, load_tensors, save_tensors
from .federated import Federation, FederationInfo, infer_schema
from .schema import Schema
from .tables.scaling import constants_to_card
from .types import Array

CONSTANTS_KEY = "constants"


@dataclass(frozen=True, eq=False)
class InputSpec:
    """The schema of a run's data and, of a table, the constants of each evaluated client, float64 (M, 3, K).

    There are no constants where features came without them, as in clients' files of older versions.
    """

    schema: Schema
    constants: Array | None = None

    @classmethod
    def from_federation(
        cls, federation: Federation | FederationInfo, clients: Sequence[int]
    ) -> "InputSpec | None":
        """Those of some clients by their numbers; None where the data are elsewhere, or no schema describes them."""
        if not isinstance(federation, Federation):
            return None
        try:
            schema = infer_schema(federation)
        except ConfigError:
            return None
        names = [federation.names[i] for i in clients]
        if not schema.columns or any(name not in federation.preparation for name in names):
            return cls(schema)
        return cls(schema, np.stack([federation.preparation[name] for name in names]))

    def save(self, file: Path) -> None:
        """Write them to a safetensors file: ten thousand clients of 50 columns are 12 MB."""
        tensors = {} if self.constants is None else {CONSTANTS_KEY: torch.from_numpy(self.constants)}
        save_tensors(file, copy_tensors(tensors), {"schema": self.schema.to_json()})

    @classmethod
    def load(cls, file: Path) -> "InputSpec | None":
        """Read them; None where there are none, as in runs of older versions.

        Raises:
            RunError: the file is damaged.

        """
        if not file.exists():
            return None
        tensors, meta = load_tensors(file)
        found = tensors.get(CONSTANTS_KEY)
        return cls(Schema.from_json(meta["schema"]), None if found is None else found.numpy())

    def card(self, row: int) -> dict[str, Any]:
        """What a client's model file says of its input: the schema, and of a table the client's constants.

        `row` is the client's place among those that were evaluated.
        """
        constants = None if self.constants is None else self.constants[row]
        return make_input_card(self.schema, constants)


def make_input_card(schema: Schema, constants: Array | None) -> dict[str, Any]:
    """The schema and a client's constants (3, K), for JSON."""
    said: dict[str, Any] = {"schema": schema.model_dump(mode="json", exclude_defaults=True)}
    if constants is not None:
        said["preparation"] = constants_to_card(constants, schema.numbers)
    return said
