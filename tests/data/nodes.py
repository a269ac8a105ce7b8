"""Tables of wards, and the data of nodes, for tests."""

from pathlib import Path
from typing import Any

import torch

from fedattune import Federation
from fedattune.data import NodeData, Schema, load_node
from fedattune.data.client_index import PARTS

HEAD = "ward,age,sex,ill"


def rows(n: int, ward: str = "a", start: int = 0) -> list[str]:
    """Make n rows of a ward, whose ages begin at 20 + start."""
    return [f"{ward},{20 + 3 * i + start},{'mf'[i // 2 % 2]},{'yn'[i % 3 > 0]}" for i in range(n)]


def csv(path: Path, lines: list[str], head: str = HEAD) -> Path:
    """Write a CSV file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *lines, ""]))
    return path


def loaded(schema: Schema | None = None, *, seed: int = 0, **config: Any) -> NodeData:
    """Load a node's data; in the keys, underscores take the place of hyphens."""
    keys = {key.replace("_", "-"): str(v) if isinstance(v, Path) else v for key, v in config.items()}
    return load_node(keys, schema, test=0.25, validation=0.1, seed=seed)


def same_client(one: Federation, u: int, other: Federation, v: int) -> None:
    """Compare the samples, labels and features of two clients, part by part and in order."""
    a, b = one.clients[u], other.clients[v]
    assert a.name == b.name
    for part in PARTS:
        i, k = torch.from_numpy(getattr(a, part)), torch.from_numpy(getattr(b, part))
        assert torch.equal(one.x[i], other.x[k])
        assert one.x.dtype == other.x.dtype
        assert torch.equal(one.y[i], other.y[k])
        assert torch.equal(one.features(i), other.features(k))
