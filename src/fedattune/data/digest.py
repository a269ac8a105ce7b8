"""The hash of a manifest, without making the manifest: that of a million clients is larger than all their data."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .dataset import Array, Index
from .members import PARTS, Clients


def manifest_hash(body: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its `hash`, in hexadecimal digits."""
    return hashlib.sha256(_json({key: value for key, value in body.items() if key != "hash"})).hexdigest()


def manifest_digest(data: Mapping[str, Any], partition: Mapping[str, Any], clients: Clients) -> str:
    """`manifest_hash` of the manifest with these entries."""
    found = hashlib.sha256(b'{"clients":[')
    parts = sorted(PARTS)
    decimals = _Decimals(1 + max(int(lists.flat.max(initial=-1)) for lists in clients.parts.values()))
    entry = b'{"name":%b,' + b",".join(b'"%b":[%%b]' % part.encode() for part in parts) + b"}"
    for start, stop in clients.stretches():
        texts = []
        for part in parts:
            lists = clients.parts[part]
            text, begins = decimals.of(lists.between(start, stop))
            cuts = begins[lists.bounds[start : stop + 1] - lists.bounds[start]]
            # What stands between two cuts ends with a comma, unless it is nothing.
            ends = np.maximum(cuts[:-1], cuts[1:] - 1)
            texts.append([text[a:b] for a, b in zip(cuts.tolist(), ends.tolist(), strict=False)])
        names = [json.dumps(name).encode() for name in clients.names[start:stop]]
        entries = map(entry.__mod__, zip(names, *texts, strict=True))
        found.update((b"," if start else b"") + b",".join(entries))
    found.update(b'],"data":' + _json(data) + b',"partition":' + _json(partition) + b"}")
    return found.hexdigest()


def manifest_pieces(head: Mapping[str, Any], clients: Clients) -> Iterator[str]:
    """The JSON of a manifest of `clients` piece by piece; `head` is all of it but them."""
    yield json.dumps(dict(head)).removesuffix("}") + ', "clients": ['
    for i, client in enumerate(clients):
        lists: dict[str, list[int]] = {part: getattr(client, part).tolist() for part in PARTS}
        yield ", " * (i > 0) + json.dumps({"name": client.name, **lists})
    yield "]}"


class _Decimals:
    """The numbers 0 to n - 1 as text, a comma after each."""

    def __init__(self, n: int) -> None:
        width = len(str(max(0, n - 1)))
        numbers = np.arange(n)
        self._cells = np.full((n, width + 1), ord(","), dtype=np.uint8)
        self._real = np.ones((n, width + 1), dtype=bool)
        for column in range(width):
            place = 10 ** (width - 1 - column)
            self._cells[:, column] = numbers // place % 10 + ord("0")
            self._real[:, column] = (numbers >= place) | (place == 1)
        self._lengths = self._real.sum(1)

    def of(self, values: Array) -> tuple[bytes, Index]:
        """The text of some numbers, and where each begins (m + 1,), the last being the end."""
        text = self._cells.take(values, 0)[self._real.take(values, 0)].tobytes()
        return text, np.concatenate([[0], self._lengths.take(values).cumsum()])


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
