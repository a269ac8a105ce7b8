"""Index lists laid end to end, and the manifest and hash of many clients."""

import numpy as np
import pytest

from fedattune import DataError, Federation
from fedattune.data import ClientIndex, RaggedIndex
from fedattune.data.client_index import hash_manifest
from federations import many


def test_clients_over_flat_lists():
    data = many(40)
    assert data.digest == hash_manifest(data.manifest()) == data.manifest()["hash"]
    assert (data.names[3], data.names[-1], len(data.names)) == ("3", "39", 40)
    assert data.clients[2].train.tolist() == [(14 + i) % 500 for i in range(6)]
    assert [c.name for c in data.clients[1:3]] == ["1", "2"]
    some = data.index.take(np.array([5, 1]))
    assert [c.test.tolist() for c in some] == [data.clients[5].test.tolist(), data.clients[1].test.tolist()]
    assert data.sizes("train").data_ptr() == data.sizes("train").data_ptr()
    again = ClientIndex.from_clients([data.clients[0], data.clients[1]])
    assert np.array_equal(again[1].all, data.clients[1].all)
    twice = RaggedIndex(np.array([1, 2, 3, 3]), np.array([0, 2, 4]))
    none = RaggedIndex(np.array([], dtype=int), np.zeros(3, dtype=int))
    with pytest.raises(DataError, match="client '1' holds a sample twice"):
        Federation("x", data.x, data.y, data.classes, ClientIndex(twice, none, none))
    with pytest.raises(DataError, match=r"client '1' has indices outside \[0, 500\)"):
        Federation(
            "x", data.x, data.y, data.classes, ClientIndex(RaggedIndex(np.array([1, 700]), np.arange(3)), none, none)
        )
    with pytest.raises(DataError, match="bounds must go from 0 to 2"):
        RaggedIndex(np.array([1, 2]), np.array([0, 1]))
    with pytest.raises(DataError, match="the same number of each"):
        ClientIndex(twice, none, none, names=["a"])
