"""Samples that stay in .npy files: the same results as in memory, and more data than a process may hold."""

import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedattune
from fedattune import ConfigError, DataError, Federation
from fedattune.data import on_disk
from fedattune.data.client_files import export_clients, read_client
from fedattune.data.federated import combine_federations, select_clients
from fedattune.data.on_disk import RowsOnDisk
from fedattune.data.types import Array

N = 40


def save(folder: Path, dtype: str) -> tuple[Path, Array, Array]:
    """Write the rows of three clients to one file."""
    rng = np.random.default_rng(0)
    x, y = (100 * rng.random((3 * N, 4))).astype(dtype), rng.integers(0, 3, 3 * N)
    path = folder / f"{dtype}.npy"
    np.save(path, x)
    return path, x, y


def divide(x: Array, y: Array) -> Federation:
    return fedattune.federation_from({str(i): (x[i * N : i * N + N], y[i * N : i * N + N]) for i in range(3)})


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int32"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_same_result_as_in_memory(dtype: str, engine: str, tmp_path: Path) -> None:
    path, x, y = save(tmp_path, dtype)
    mapped = divide(np.load(path, mmap_mode="r"), y)
    assert isinstance(mapped.x, RowsOnDisk)
    assert mapped.x.shape == (3 * N, 4)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    first, second = (
        fedattune.fit(data, "fedavg", model, rounds=1, steps=64, lr=1e-4, engine=engine)  # type: ignore[arg-type]
        for data in (divide(x, y), mapped)
    )
    assert torch.equal(first.model("1").weight, second.model("1").weight)
    assert first.metrics == second.metrics


def test_whole_numbers_stay_whole(tmp_path: Path) -> None:
    path, x, y = save(tmp_path, "int32")
    data = divide(np.load(path, mmap_mode="r"), y)
    model = nn.Sequential(nn.Embedding(100, 2), nn.Flatten(), nn.Linear(8, 3))
    assert data.features(torch.tensor([N + 1])).equal(torch.from_numpy(x[N + 1 : N + 2].astype(np.int64)))
    assert fedattune.fit(data, "fedavg", model, rounds=1, steps=2).is_finished


def test_one_file_per_client_by_its_path(tmp_path: Path) -> None:
    _, x, y = save(tmp_path, "float32")
    clients = {}
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", x[i * N : i * N + N])
        clients[str(i)] = (tmp_path / f"{i}.npy", y[i * N : i * N + N])
    data = fedattune.federation_from(clients)
    index = torch.tensor([[0, N], [3 * N - 1, 1]])
    assert data.features(index).equal(torch.from_numpy(x)[index])


def test_rows_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of many steps is cut so that its rows fit into memory; private noise does not shift by that."""
    path, x, y = save(tmp_path, "float32")
    results = []
    for data, limit in ((divide(x, y), 1 << 28), (divide(np.load(path, mmap_mode="r"), y), 1)):
        monkeypatch.setattr("fedattune.engine.runner.DISK_CHUNK_BYTES", limit)
        torch.manual_seed(0)
        results.append(fedattune.fit(data, "fedavg", nn.Linear(4, 3), rounds=1, steps=64, lr=1e-4, dp_record=8.0))
    assert torch.equal(*(result.model("2").weight for result in results))


def test_other_uses_of_a_federation(tmp_path: Path) -> None:
    path, x, y = save(tmp_path, "float32")
    memory, disk = divide(x, y), divide(np.load(path, mmap_mode="r"), y)
    copied = pickle.loads(pickle.dumps(disk))
    assert len(pickle.dumps(disk.x)) < 1000
    assert copied.features(torch.tensor([5])).equal(memory.features(torch.tensor([5])))
    some = select_clients(disk, np.array([2, 0]))
    assert isinstance(some.x, RowsOnDisk)
    assert some.features(torch.arange(len(some.y))).equal(select_clients(memory, np.array([2, 0])).x)
    export_clients(disk, tmp_path / "nodes", [[0], [1, 2]])
    (file,) = (tmp_path / "nodes/node-0").iterdir()
    client = read_client(file).federation
    assert isinstance(client.x, torch.Tensor)
    assert client.x.equal(memory.x[torch.from_numpy(memory.clients[0].all)])
    with pytest.raises(ConfigError, match="needs all samples in memory, and they stay in files"):
        combine_federations("both", [disk, disk])
    with pytest.raises(ConfigError, match="an attack on rows needs all samples in memory"):
        fedattune.fit(disk, "fedavg", rounds=1, attack="label_flip", attackers=1)


def test_the_fingerprint_is_of_name_size_and_time(tmp_path: Path) -> None:
    path, _, y = save(tmp_path, "float32")
    digests = [divide(np.load(path, mmap_mode="r"), y).digest for _ in range(2)]
    assert digests[0] == digests[1]
    path.touch()
    assert divide(np.load(path, mmap_mode="r"), y).digest != digests[0]
    data = divide(np.load(path, mmap_mode="r"), y)
    assert select_clients(data, np.array([0, 1])).digest != select_clients(data, np.array([0, 2])).digest


def test_mistakes(tmp_path: Path) -> None:
    path, x, y = save(tmp_path, "float32")
    mapped = np.load(path, mmap_mode="r")
    with pytest.raises(DataError, match=r"client '0': x is a part of .* expected consecutive rows"):
        fedattune.federation_from({"0": (mapped[::2], y[::2]), "1": (mapped[1::2], y[1::2])})
    with pytest.raises(DataError, match="has its samples in a file, the other one in memory"):
        fedattune.federation_from({"0": (mapped[:N], y[:N]), "1": (x[N:], y[N:])})
    with pytest.raises(DataError, match=r"client '0': x is '.*none\.npy', expected the path of a \.npy file"):
        fedattune.federation_from({"0": (tmp_path / "none.npy", y[:N]), "1": (x[N:], y[N:])})
    x[2 * N - 1, 0] = np.nan
    np.save(path, x)
    with pytest.raises(DataError, match="client '1': sample 39 holds NaN"):
        divide(np.load(path, mmap_mode="r"), y)
    other = tmp_path / "gone.npy"
    np.save(other, x[:N])
    data = fedattune.federation_from({c: (np.load(other, mmap_mode="r"), y[:N]) for c in "ab"})
    np.save(other, x[:N] + 1)
    on_disk._open.cache_clear()
    with pytest.raises(DataError, match=r"gone\.npy cannot be read \(it has changed\)"):
        data.features(torch.tensor([0]))
    other.unlink()
    on_disk._open.cache_clear()
    with pytest.raises(DataError, match=r"gone\.npy cannot be read .* leave the file as it was"):
        data.features(torch.tensor([0]))


LARGE = """
import resource, sys
import numpy as np
import torch
from torch import nn
import fedattune

resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
x = np.load(sys.argv[1], mmap_mode="r")
n = len(x) // 4
y = np.tile(np.arange(2), n // 2)
data = fedattune.federation_from({str(i): (x[i * n : i * n + n], y) for i in range(4)}, test=0.001, validation=0)
model = nn.Sequential(nn.Flatten(), nn.Linear(100_000, 2))
result = fedattune.fit(data, "fedavg", model, rounds=1, steps=3, batch_size=4)
print(result.rounds, x.nbytes >> 30)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_more_data_than_memory(tmp_path: Path) -> None:
    """A sparse file of 14 GB, and a process that may have 2 GB."""
    path = tmp_path / "large.npy"
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (40_000, 100_000)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * 40_000 * 100_000)
    done = subprocess.run([sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == "1 14\n", done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 << 20
