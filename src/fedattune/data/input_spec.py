"""The description of a model's inputs, kept with a run so that its models can be used on new data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import ConfigError, FedAttuneError, RunError, summarize_error
from ..core.io import copy_tensors, load_tensors, save_tensors
from .federated import Federation, FederationInfo, infer_schema
from .schema import Schema
from .tables.scaling import constants_to_card
from .types import Array

CONSTANTS_KEY = "constants"


@dataclass(frozen=True, eq=False)
class InputSpec:
    """The schema of a run's data and, for a table whose features came with them, the constants of each client."""

    schema: Schema
    constants: Array | None = None  # of the evaluated clients, float64 (M, 3, K)

    @classmethod
    def from_federation(cls, federation: Federation | FederationInfo, clients: Sequence[int]) -> "InputSpec | None":
        """Describe the inputs of some clients; None where the data are elsewhere, or no schema can describe them."""
        if not isinstance(federation, Federation):
            return None
        try:
            schema = infer_schema(federation)
        except ConfigError:
            return None
        names = [federation.names[i] for i in clients]
        has_constants = schema.columns and federation.preparation.keys() >= set(names)
        return cls(schema, np.stack([federation.preparation[name] for name in names]) if has_constants else None)

    def save(self, file: Path) -> None:
        """Write the description to a safetensors file: ten thousand clients of 50 columns are 12 MB."""
        tensors = {} if self.constants is None else {CONSTANTS_KEY: torch.from_numpy(self.constants)}
        save_tensors(file, copy_tensors(tensors), {"schema": self.schema.to_json()})

    @classmethod
    def load(cls, file: Path, n_clients: int) -> "InputSpec | None":
        """Read the description of the inputs of M clients; None where a run has none, as the data were elsewhere."""
        if not file.exists():
            return None
        tensors, meta = load_tensors(file)
        try:
            schema = Schema.from_json(meta["schema"])
            constants = tensors[CONSTANTS_KEY].numpy() if CONSTANTS_KEY in tensors else None
            expected = (n_clients, 3, len(schema.numbers))
            if constants is not None and (constants.shape != expected or constants.dtype != np.float64):
                raise ValueError(f"got constants {constants.shape} of {constants.dtype}, expected {expected}")
        except (KeyError, TypeError, ValueError, FedAttuneError) as error:
            raise RunError(
                f"{file} is damaged ({summarize_error(error)}); restore it from a copy, or train the run again"
            ) from error
        return cls(schema, constants)

    def card(self, row: int) -> dict[str, Any]:
        """Return the schema and the constants of the evaluated client number `row`, for the client's model file."""
        return make_input_card(self.schema, None if self.constants is None else self.constants[row])


def make_input_card(schema: Schema, constants: Array | None) -> dict[str, Any]:
    """Return the schema and a client's constants (3, K) for JSON."""
    card: dict[str, Any] = {"schema": schema.model_dump(mode="json", exclude_defaults=True)}
    if constants is not None:
        card["preparation"] = constants_to_card(constants, schema.numbers)
    return card
