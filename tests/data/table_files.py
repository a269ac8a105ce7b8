"""Table files for tests."""

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

N = 40


def columns():
    random = np.random.default_rng(0)
    return {
        "site": ["north"] * 20 + ["south"] * 20,
        "age": random.normal(50, 10, N).tolist(),
        "visits": random.integers(0, 9, N).tolist(),
        "smoker": [bool(i % 3) for i in range(N)],
        "ward": [("a", "b", "c")[i % 3] for i in range(N)],
        "ill": ["yes" if i % 2 else "no" for i in range(N)],
    }


def parquet(folder, content, name="t.parquet"):
    path = folder / name
    pq.write_table(pa.table(content), path)
    return path
