"""Image sets written small, in Parquet files as on the hub."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG", compress_level=0)  # of noise nothing can be compressed
    return out.getvalue()


def pictures(n, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def write(path, pixels, labels, *, image="image", features=None, plain=False, encoded=None):
    """A file as the hub has it; `labels` maps column to values, `features` column to class names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [png(p) for p in pixels] if encoded is None else encoded
    cells = encoded if plain else [{"bytes": b, "path": None} for b in encoded]
    kind = pa.binary() if plain else pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    content = pa.table({image: pa.array(cells, kind), **labels})
    if features is not None:
        about = {image: {"_type": "Image"}}
        about |= {k: {"_type": "ClassLabel", "names": names} for k, names in features.items()}
        content = content.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": about}})})
    pq.write_table(content, path)
    return path


DIGITS = [str(k) for k in range(10)]
LETTERS = list("abcdefghij")


def grey_set(folder, n=6, classes=DIGITS):
    x, y = pictures(2 * n, (28, 28)), np.arange(2 * n) % 3
    names = {"label": classes}
    write(folder / "test-0.parquet", x[n:], {"label": y[n:]}, features=names)
    write(folder / "train-0.parquet", x[:n], {"label": y[:n]}, features=names)
    return x, y


def colour_set(folder, classes=LETTERS):
    x = pictures(20, (32, 32, 3))
    y = {"label": np.arange(20) % 2}
    write(folder / "train-0.parquet", x, y, image="img", features={"label": classes})
    return x
