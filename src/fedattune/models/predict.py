"""What a client's model says of new data: a file of the model and a table are all that is needed."""

import csv
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.errors import ConfigError, DataError, RunError, summarize_error
from ..core.io import replace_atomically
from ..data import Schema
from ..data.federated import gather
from ..data.tables.new_rows import read_rows
from ..data.tables.scaling import constants_from_card
from ..data.types import Array
from .export import LogitsFunction, open_onnx
from .files import CARD_KEY, ModelCard, get_dtype, parse_card, read_model

BATCH_ROWS = 4096
"""Rows that are given to the model together."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of rows.

    Attributes:
        classes: the classes' names.
        probabilities: of each row and class, (n, classes), of the model's type.
        target: the number of each row's class (n,), -1 where it is not known; None where the table does not have it.
        notes: what to know about how the table was read.

    """

    classes: tuple[str, ...]
    probabilities: Array
    target: Array | None
    notes: tuple[str, ...]

    @cached_property
    def numbers(self) -> Array:
        """The number of the most probable class of each row, (n,)."""
        found: Array = self.probabilities.argmax(1)
        return found

    @property
    def labels(self) -> list[str]:
        """The name of the most probable class of each row."""
        return [self.classes[k] for k in self.numbers.tolist()]

    @property
    def known(self) -> int:
        """Rows whose class is in the table."""
        return 0 if self.target is None else int((self.target >= 0).sum())

    @property
    def correct(self) -> int:
        """Rows whose class is in the table and is the most probable one."""
        return 0 if self.target is None else int((self.target == self.numbers).sum())

    @property
    def accuracy(self) -> float | None:
        """Share of correct rows among those whose class is in the table; None if there are none."""
        return self.correct / self.known if self.known else None

    def save(self, file: Path | str) -> None:
        """Write a row per row of the table: its number from 1, its class, and the probability of each class.

        Raises:
            ConfigError: the file ends neither in .csv nor in .parquet.

        """
        file = Path(file)
        check_predictions_file(file)
        if file.suffix.lower() == ".csv":
            with replace_atomically(file) as new:
                new.write_text(self.to_csv(), encoding="utf-8")
            return
        import pyarrow as pa
        from pyarrow import parquet

        columns = [np.arange(1, len(self.probabilities) + 1), self.labels, *self.probabilities.T]
        with replace_atomically(file) as new:
            parquet.write_table(pa.table([pa.array(one) for one in columns], names=self._header), new)

    def to_csv(self) -> str:
        """The same as text."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self._header)
        # The shortest decimals that give the same number.
        shown = self.probabilities.astype(str).tolist()
        writer.writerows(
            [row, label, *its] for row, (label, its) in enumerate(zip(self.labels, shown, strict=True), 1)
        )
        return out.getvalue()

    @property
    def _header(self) -> list[str]:
        return ["row", "prediction", *(f"p({name})" for name in self.classes)]


def predict(
    file: Path | str, table: Path | str, module: nn.Module | None = None, factory: str | None = None
) -> Predictions:
    """What a client's model says of the rows of a table.

    The rows are prepared as the client's own were for training: columns are found by their names, missing numbers
    become the median of its training part, and numbers are standardised by its mean and deviation.

    Args:
        file: a model that `fedattune export` or `Result.save_models` wrote, as .safetensors or .onnx.
        table: a CSV or Parquet file with the columns of training. Of a model that was not trained on a table, it has
            one column of numbers for each value of a sample, or, in Parquet, a column of images.
        module: the user's own model to fill, where it was not trained by name.
        factory: "package.module:factory" of the user's own model, where it was trained by that name: no code is run
            because a file names it.

    Raises:
        ConfigError: packages are missing.
        DataError: the table does not have what the model needs.
        RunError: the model cannot be read.

    """
    logits, card, dtype = _open_model(Path(file), module, factory)
    schema, constants = _parse_inputs(Path(file), card)
    rows = read_rows(Path(table), schema, constants)
    shift, scale = (None if one is None else one.to(dtype) for one in schema.scaling())
    x = torch.from_numpy(rows.x)
    with torch.no_grad():
        found = [
            logits(gather(x, index, shift, scale, dtype)).softmax(1)
            for index in torch.split(torch.arange(len(x)), BATCH_ROWS)
        ]
    whose = f"the model is that of client {card.get('client')!r}: {card['algorithm']}, seed {card['seed']}"
    return Predictions(schema.classes, torch.cat(found).numpy(), rows.y, (whose, *rows.notes))


def check_predictions_file(file: Path) -> None:
    """Refuse early a file that predictions cannot be written to.

    Raises:
        ConfigError: it ends neither in .csv nor in .parquet.

    """
    if file.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"{file}: predictions are written as .csv or .parquet; name the file so")


def _open_model(
    file: Path, module: nn.Module | None, factory: str | None
) -> tuple[LogitsFunction, ModelCard, torch.dtype]:
    """The network of a file, its card, and the type of its inputs."""
    kind = file.suffix.lower()
    if kind == ".pt2":
        raise RunError(
            f"{file} is not opened: PyTorch unpickles parts of a .pt2 file, and a pickle can run any code; export the "
            "model with --format safetensors or onnx, or load a file that you trust yourself, by torch.export.load"
        )
    if kind not in (".safetensors", ".onnx"):
        raise RunError(f"{file} is no model; expected a file of fedattune export, .safetensors or .onnx")
    if not file.is_file():
        raise RunError(f"no such model file: {file}")
    if kind == ".onnx":
        logits, text = open_onnx(file)
        card = parse_card(text.get(CARD_KEY), file)
        return logits, card, _parse_input_dtype(card)
    model, card = read_model(file, module, factory)
    return model, card, get_dtype(model)


def _parse_input_dtype(card: ModelCard) -> torch.dtype:
    """The type of the inputs, as the card begins to say."""
    return torch.float64 if str(card.get("input")).startswith("float64") else torch.float32


def _parse_inputs(file: Path, card: ModelCard) -> tuple[Schema, Array | None]:
    """The schema of a model's data, and of a table the client's constants.

    Raises:
        RunError: the file does not have them.

    """
    given: dict[str, Any] | None = card.get("schema")
    if given is None or (given.get("numbers") and "preparation" not in card):
        raise RunError(
            f"{file} does not say how inputs are prepared, for it was made with an older FedAttune or with clients' "
            "files of one; train the model again"
        )
    try:
        schema = Schema.model_validate(given)
        if list(schema.input_shape) != card["input_shape"] or list(schema.classes) != card["classes"]:
            raise DataError("the schema is not of this model's inputs and classes")
        if not schema.columns:
            return schema, None
        return schema, constants_from_card(card.get("preparation") or {}, schema.numbers)
    except (ValueError, DataError) as error:  # a pydantic.ValidationError is a ValueError
        raise RunError(
            f"{file} has a broken description of its inputs: {summarize_error(error)}; export it again"
        ) from error
