"""Predict new rows with a client's model: a file of the model and a table are enough."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.errors import ConfigError, DataError, RunError, summarize_error
from ..core.io import replace_atomically
from ..core.metrics import compute_metrics
from ..core.task import limit_samples
from ..core.text import format_csv
from ..data import Schema
from ..data.federated import gather
from ..data.tables.new_rows import read_rows
from ..data.tables.scaling import constants_from_card, limit
from ..data.types import Array, TargetScale
from .export import LogitsFunction, open_onnx
from .files import CARD_KEY, ModelCard, check_preparation, parse_card, read_model

BATCH_ROWS, MAX_TEXTS = 4096, 256
"""Rows that the model predicts at once; fewer if they are texts of tokens, whose network may be large."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of a model for the rows of a table.

    Attributes:
        classes: names of the classes; empty if the target is a number.
        probabilities: (n, classes), of the model's type, or (n, L) that each of L labels is true; (n, 0) for numbers.
        target: index of each row's true class (n,), -1 if unknown, or its true number, NaN if unknown; of several
            labels or numbers (n, parts); None if the table has no such columns.
        notes: facts about the reading of the table.
        values: predicted numbers (n,) or (n, M), in the unit of the target; None for classes and labels.
        names: names of the labels or numbers of a target that has several.
        scale: mean and deviation of each of several numbers.
    """

    classes: tuple[str, ...]
    probabilities: Array
    target: Array | None
    notes: tuple[str, ...]
    values: Array | None = None
    names: tuple[str, ...] = ()
    scale: TargetScale | None = None

    @cached_property
    def class_indices(self) -> Array:
        """Index of the most probable class of each row, (n,)."""
        return np.asarray(self.probabilities.argmax(1))

    @property
    def labels(self) -> list[str]:
        """Name of the most probable class of each row; none if the target is a number."""
        return [self.classes[k] for k in self.class_indices.tolist()]

    @property
    def n_known(self) -> int:
        """Number of rows whose true class or number is in the table."""
        return 0 if self.target is None else int(self._is_known.sum())

    @property
    def _is_known(self) -> Array:
        """Mark the rows (n,) whose target is known."""
        assert self.target is not None
        if self.names:
            return np.asarray(np.isfinite(self.target).all(axis=1))
        return np.asarray(self.target >= 0 if self.classes else np.isfinite(self.target))

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Every metric of the rows whose target is in the table; empty if there are none."""
        if not self.n_known or self.target is None:
            return {}
        known = self._is_known
        if self.scale is not None and self.values is not None:  # several numbers are measured in deviations
            mean, deviation = (np.array(one) for one in self.scale)
            truth, values = ((one[known] - mean) / deviation for one in (self.target, self.values))
            return compute_metrics(truth, values)
        if self.names:
            from scipy.special import logit

            with np.errstate(divide="ignore"):
                logits = logit(self.probabilities[known].astype(np.float64))
            return compute_metrics(self.target[known].astype(bool), np.clip(logits, -1e3, 1e3))
        if self.values is not None:
            return compute_metrics(self.target[known].astype(np.float64), self.values[known, None])
        with np.errstate(divide="ignore"):
            logits = np.log(self.probabilities[known].astype(np.float64))
        return compute_metrics(self.target[known].astype(np.int64), np.maximum(logits, -1e3))

    @property
    def n_correct(self) -> int:
        """Number of rows whose true class is the most probable one."""
        return 0 if self.target is None or not self.classes else int((self.target == self.class_indices).sum())

    @property
    def accuracy(self) -> float | None:
        """Share of correct rows among the rows whose true class is in the table; None if there are none."""
        return self.n_correct / self.n_known if self.n_known and self.classes else None

    def save(self, file: Path | str) -> None:
        """Write one row per row of the table: its number from 1, its class, and the probability of each class;
        or its number and the predicted value. Several labels or numbers have a column each, a label 1 or 0.

        Raises:
            ConfigError: the file ends neither in .csv nor in .parquet.
        """
        file = Path(file)
        check_predictions_file(file)
        if file.suffix.lower() == ".csv":
            with replace_atomically(file) as new:
                new.write_text(self.to_csv(), encoding="utf-8", newline="\n")
            return
        import pyarrow as pa
        from pyarrow import parquet

        columns = [np.arange(1, len(self.probabilities) + 1), *self._columns]
        with replace_atomically(file) as new:
            parquet.write_table(pa.table([pa.array(column) for column in columns], names=self._header), new)

    def to_csv(self) -> str:
        """Return the content of `save` as CSV; classes that a spreadsheet would run get an apostrophe."""
        # The shortest decimals that give the same number.
        columns = (one if isinstance(one, list) else one.astype(str).tolist() for one in self._columns)
        return format_csv([self._header, *([row, *cells] for row, cells in enumerate(zip(*columns, strict=True), 1))])

    @property
    def _columns(self) -> list[Any]:
        """The columns of a file after the row's number."""
        if self.values is not None:
            return [*np.atleast_2d(self.values.T)]
        labels = [*(self.probabilities > 0.5).astype(np.int64).T] if self.names else [self.labels]
        return [*labels, *self.probabilities.T]

    @property
    def _header(self) -> list[str]:
        if self.names:
            return ["row", *self.names, *(f"p({name})" for name in self.names if self.values is None)]
        return ["row", "prediction", *(f"p({name})" for name in self.classes)]


def predict(
    file: Path | str, table: Path | str, module: nn.Module | None = None, factory: str | None = None
) -> Predictions:
    """Predict the rows of a table with a client's model.

    The rows are prepared like the client's own training rows. Columns are found by name, and the constants in the
    model's file fill missing numbers and standardise all. Notes name columns with numbers far from training.

    Args:
        file: a model that `fedattune export` or `Result.save_models` wrote, as .safetensors or .onnx.
        table: a CSV or Parquet file with the columns of training. If the model was not trained on a table, the file
            needs a column of numbers for each value of a sample. A Parquet file may have one column of images instead.
        module: your own model to fill, if the run's model had no name.
        factory: "file.py:factory" or "package.module:factory" of your own model, if the run named it. FedAttune runs
            the factory only if you name it here; the name in the file is not enough.

    Returns:
        Probabilities and classes of all rows, or predicted numbers.

    Raises:
        ConfigError: packages are missing.
        DataError: the table lacks a column or value that the model needs.
        RunError: the model cannot be read.
    """
    logits, card = _open_model(Path(file), module, factory)
    schema, constants = _parse_inputs(Path(file), card)
    rows = read_rows(Path(table), schema, constants)
    dtype: torch.dtype = getattr(torch, card["dtype"])
    shift, scale = (None if one is None else one.to(dtype) for one in schema.scaling())
    n_numbers = len(schema.numbers) if constants is not None else 0
    x = torch.from_numpy(np.hstack([limit(rows.x[:, :n_numbers]), rows.x[:, n_numbers:]]) if n_numbers else rows.x)
    at_once = MAX_TEXTS if schema.tokens else BATCH_ROWS
    if isinstance(logits, nn.Module):
        at_once = limit_samples(logits, at_once, x[:1].numel())
    batches = torch.split(torch.arange(len(x)), at_once)
    with torch.no_grad():
        outputs = torch.cat([logits(gather(x, index, shift, scale, dtype)) for index in batches])
    owner = f"the model belongs to client {card.get('client')!r}: {card['algorithm']}, seed {card['seed']}"
    notes = (owner, *rows.notes)
    if constants is not None:
        notes += _describe_far(rows.x[:, : len(schema.numbers)], schema, constants)
    if schema.positions:
        raise RunError(f"{file} predicts a class for each position, and a table has no place for them; call the model")
    if schema.classes:
        return Predictions(schema.classes, outputs.softmax(1).numpy(), rows.y, notes)
    if schema.labels:
        return Predictions((), outputs.sigmoid().numpy(), rows.y, notes, names=schema.labels)
    if (target := schema.target_scale) is None:
        raise RunError(f"{file} does not say the unit of its target: target_mean or target_deviation is missing")
    if schema.outputs:
        values = target.restore(outputs.double().numpy())
        none = np.zeros((len(values), 0))
        return Predictions((), none, rows.y, notes, values, names=schema.outputs, scale=target)
    values = target.restore(outputs[:, 0].double().numpy())
    return Predictions((), np.zeros((len(values), 0)), rows.y, notes, values)


FAR_DEVIATIONS = 8.0
"""Deviations from the mean beyond which a number is far from training: at most 1 training row in 64 has such a one."""


def _describe_far(x: Array, schema: Schema, constants: Array) -> tuple[str, ...]:
    """Name the columns with numbers far from those of training, by standardised numbers x (n, K)."""
    notes = []
    for name, z, (_, mean, deviation) in zip(schema.numbers, x.T, constants.T, strict=True):
        far = np.flatnonzero(np.abs(z) > FAR_DEVIATIONS)
        if not len(far):
            continue
        row = int(far[np.abs(z[far]).argmax()])
        value, low, high = (mean + k * deviation for k in (float(z[row]), -2, 2))
        if name in schema.dates:
            value, low, high = (np.datetime64(int(day), "D") for day in (value, low, high))
        else:
            value, low, high = (f"{number:.6g}" for number in (value, low, high))
        notes.append(
            f"column {name!r} is far from training in {len(far)} of {len(z)} rows, such as {value} in data row "
            f"{row + 1}, where most training rows have {low} to {high}: do not trust these predictions, or correct "
            "the cells"
        )
    return tuple(notes)


def check_predictions_file(file: Path) -> None:
    """Refuse a file to which predictions cannot be written."""
    if file.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"{file}: predictions are written as .csv or .parquet; name the file so")


def _open_model(file: Path, module: nn.Module | None, factory: str | None) -> tuple[LogitsFunction, ModelCard]:
    """Return the network of a file and its card."""
    suffix = file.suffix.lower()
    if suffix == ".pt2":
        raise RunError(
            f"{file} is not opened: PyTorch unpickles parts of a .pt2 file, and a pickle can run any code; export the "
            "model with --format safetensors or onnx, or load a file that you trust with torch.export.load"
        )
    if suffix not in (".safetensors", ".onnx"):
        raise RunError(f"{file} is no model; expected a file of fedattune export, .safetensors or .onnx")
    if not file.is_file():
        raise RunError(f"no such model file: {file}")
    if suffix == ".safetensors":
        return read_model(file, module, factory)
    logits, metadata = open_onnx(file)
    return logits, parse_card(metadata.get(CARD_KEY), file)


def _parse_inputs(file: Path, card: ModelCard) -> tuple[Schema, Array | None]:
    """Return the schema of a model's data and, for a table, the client's constants (3, K)."""
    check_preparation(card, str(file))
    try:
        schema = Schema.model_validate(card["schema"])
        if list(schema.input_shape) != card["input_shape"] or list(schema.classes) != card["classes"]:
            raise DataError("the schema is not of this model's inputs and classes")
        if not schema.columns:
            return schema, None
        return schema, constants_from_card(card.get("preparation") or {}, schema.numbers)
    except (ValueError, DataError) as error:  # a pydantic.ValidationError is a ValueError
        raise RunError(
            f"{file} has a broken description of its inputs: {summarize_error(error)}; export it again"
        ) from error
