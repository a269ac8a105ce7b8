"""Parcels as Flower's records, and back: typed arrays and JSON, never pickle."""

import json

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ..wire import VERSION, Parcel


class WireError(ValueError):
    """A record that is no parcel of this version."""


def packed(parcel: Parcel) -> RecordDict:
    """The parcel as records: `arrays` (NumPy's own format, each with its type and shape) and `head` (JSON)."""
    arrays = {k: Array(v.detach().cpu().contiguous().numpy()) for k, v in parcel.tensors.items()}
    head = json.dumps(parcel.head | {"names": list(arrays)}, allow_nan=False)
    return RecordDict(
        {"arrays": ArrayRecord(arrays), "head": ConfigRecord({"version": VERSION, "json": head})}
    )


def unpacked(record: RecordDict) -> Parcel:
    """The parcel in a record.

    Raises:
        WireError: it holds none, or one of another version of the format.

    """
    try:
        head = record.config_records["head"]
        if (version := head["version"]) != VERSION:
            raise WireError(f"it speaks version {version!r:.40} of the format, not {VERSION}")
        content = json.loads(str(head["json"]))
        arrays = record.array_records["arrays"]
        # Flower's arrays cannot be written to, and PyTorch warns of such.
        tensors = {name: torch.from_numpy(np.array(arrays[name].numpy())) for name in content.pop("names")}
    except WireError:
        raise
    except Exception as error:  # bytes from outside can fail in any way
        raise WireError(f"it is damaged ({type(error).__name__})") from error
    return Parcel(content, tensors)
