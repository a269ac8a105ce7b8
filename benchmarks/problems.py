"""Make the training problems: random data in the shape of the papers' data, divided over clients."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedattune import Federation, load_federation
from fedattune.core.task import Task
from fedattune.data import Client
from fedattune.data.build import partition_dataset
from fedattune.data.dataset import Dataset
from fedattune.engine.batches import LocalTraining
from fedattune.models import build_model

CLASSES = 10
TRAIN = 1  # stream of random numbers


@dataclass(frozen=True)
class Problem:
    """One round of local training: every client starts from the same model and does `steps` or `epochs`."""

    data: Federation
    model: str
    options: dict[str, int | str] = field(default_factory=dict)
    batch: int = 20
    steps: int | None = 20
    epochs: int | None = None
    lr: float = 0.02
    mixed_precision: bool = False

    @cached_property
    def task(self) -> Task:
        """The model, the same for all ways."""
        torch.manual_seed(0)
        model = build_model(self.model, self.data.input_shape, self.data.n_classes, self.options)
        return Task(model, self.mixed_precision).to(self.data.device, torch.float32)

    def work(self, round_: int) -> LocalTraining:
        """Return the round in the form of the package's engines."""
        return LocalTraining(
            seed=0, stream=TRAIN, round=round_, lr=self.lr, batch_size=self.batch,
            steps=self.steps, epochs=self.epochs, drop_last=self.task.has_batch_statistics,
        )  # fmt: skip

    @cached_property
    def own(self) -> list[tuple[Tensor, Tensor]]:
        """Each client's samples, normalized, float32 (n, *shape), and labels (n,): loaded before the clock starts."""
        return own_tensors(self.data, [c.train for c in self.data.clients])

    def size(self, client: int) -> int:
        """Return the samples in a full batch of a client."""
        return min(self.batch, len(self.data.clients[client].train))

    def used(self, client: int) -> int:
        """Return the number of samples that a client sees in a round."""
        n = len(self.data.clients[client].train)
        if self.steps is not None:
            return self.steps * self.size(client)
        assert self.epochs == 1, "the rivals do one epoch"
        return n - n % self.size(client) if self.task.has_batch_statistics else n

    @cached_property
    def draws(self) -> "list[tuple[int, int]]":
        """Each client's number of samples, and how many of them a round uses."""
        return [(len(c.train), self.used(i)) for i, c in enumerate(self.data.clients)]

    def orders(self, round_: int) -> list[Tensor]:
        """Draw positions (used,) of each client's samples in the order of training, for the rivals."""
        generator = torch.Generator().manual_seed(round_)
        orders = []
        for n, used in self.draws:
            order = torch.randperm(n, generator=generator)
            while len(order) < used:
                order = torch.cat([order, torch.randperm(n, generator=generator)])
            orders.append(order[:used].to(self.data.device))
        return orders

    def engine_orders(self, round_: int) -> list[Tensor]:
        """Return the same for the package's batches; with these, all ways must train the same models."""
        work, orders = self.work(round_), []
        for client, who in enumerate(self.data.clients):
            number = np.full(len(self.data.y), -1, dtype=np.int64)
            number[who.train] = np.arange(len(who.train))
            drawn = work.draw_batches(client, who.train, 1).reshape(-1)
            orders.append(torch.from_numpy(number[drawn[drawn >= 0]]).to(self.data.device))
        return orders

    @cached_property
    def flops(self) -> float:
        """Multiplications and additions of one round of training."""
        return self._flops(train=True) * sum(used for _, used in self.draws)

    @cached_property
    def sample_flops(self) -> float:
        """Multiplications and additions of one prediction."""
        return self._flops(train=False)

    def _flops(self, train: bool) -> float:
        index = torch.as_tensor(self.data.clients[0].train[:2], device=self.data.device)
        x, y = self.data.features(index), self.data.y[index]
        model = deepcopy(self.task.model).train(train)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if train:
                torch.autograd.backward(loss)
        return float(counter.get_total_flops()) / len(x)

    @property
    def nbytes(self) -> float:
        """Least bytes of one round: samples as stored, and each client's model in and out."""
        sample = self.data.x[0].nbytes
        models = 2 * self.task.params.nbytes() * self.data.n_clients
        return float(models + sample * sum(used for _, used in self.draws))


def own_tensors(data: Federation, parts: Sequence[np.typing.NDArray[np.int64]]) -> list[tuple[Tensor, Tensor]]:
    """Return the samples of each part, normalized, float32 (n, *shape), and their labels (n,)."""
    index = [torch.as_tensor(part, device=data.device) for part in parts]
    return [(data.features(i).contiguous(), data.y[i]) for i in index]


def images(n: int, shape: tuple[int, ...], seed: int = 0) -> Dataset:
    """Make byte images of ten separable classes: one pattern per class, and noise of the same strength."""
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, n)
    x = random.integers(0, 128, (n, *shape), dtype=np.uint8)
    x += random.integers(0, 128, (CLASSES, *shape), dtype=np.uint8)[y]
    # Zero mean, and a variance that leaves training stable at the papers' learning rates.
    shift = np.full((1,) * len(shape), 127.0, dtype=np.float32)
    scale = np.full((1,) * len(shape), 1 / 256, dtype=np.float32)
    return Dataset("images", x, y, tuple(map(str, range(CLASSES))), shift=shift, scale=scale)


def even(n_clients: int, each: int, shape: tuple[int, ...] = (1, 28, 28)) -> Federation:
    """Make clients with `each` training images, spread over the whole data set, as in real data."""
    n = n_clients * (each + 1)
    whole = images(n, shape)
    rows = np.random.default_rng(1).permutation(n).reshape(n_clients, each + 1)
    none = np.empty(0, dtype=np.int64)
    return as_federation(whole, [Client(str(u), row[1:], none, row[:1]) for u, row in enumerate(rows)])


def dirichlet(n_clients: int, n: int, test: float = 0.25) -> Federation:
    """Deal MNIST images by class, Dirichlet(0.1), so that clients have very unequal sizes."""
    return partition_dataset(
        images(n, (1, 28, 28)), partition="dirichlet", options={"beta": 0.1}, clients=n_clients, test=test,
        validation=0.0, seed=0, small_clients="drop",
    )  # fmt: skip


def synthetic(n_clients: int) -> Federation:
    """Make FedMCSA's Synthetic(0.5, 0.5): 60 features, clients of very unequal sizes."""
    return load_federation("synthetic", options={"clients": n_clients}, validation=0.0, small_clients="drop")


def as_federation(whole: Dataset, clients: Sequence[Client]) -> Federation:
    """Make a federation of these clients."""
    shift, scale = (None if a is None else torch.from_numpy(a) for a in (whole.shift, whole.scale))
    return Federation(
        whole.name, torch.from_numpy(whole.x), torch.from_numpy(whole.y), whole.classes, tuple(clients), shift, scale
    )
