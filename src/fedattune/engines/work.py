"""Which samples a client sees in which local step: a pure function of seed, stream, round and client."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """What every client does in one round.

    Attributes:
        seed, stream, round: key the batches together with the client's number, so that a result depends neither
            on the engine, nor on the order of clients, nor on who else trained.
        steps, epochs: local steps, or passes over the client's data; one of them is None.
        drop_last: leave out an epoch's last incomplete batch (for models that normalise over the batch).

    """

    seed: int
    stream: int
    round: int
    lr: float
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    weight_decay: float = 0.0
    part: Literal["train", "test"] = "train"
    drop_last: bool = False

    def noise_seed(self, client: int = 0) -> int:
        """Seed of what modules draw by themselves (dropout) in this round."""
        return int(np.random.SeedSequence([self.seed, self.stream, self.round, client]).generate_state(1)[0])

    def count(self, n_samples: Tensor, per_step: int) -> int:
        """Local steps of one round, over clients with n_samples (C,)."""
        if self.steps is not None:
            return self.steps * len(n_samples)
        size = n_samples.clamp_max(self.batch_size)
        per_epoch = n_samples // size if self.drop_last else -(-n_samples // size)
        return int((per_epoch * (self.epochs or 0) // per_step).clamp_min(1).sum())

    def batches(self, client: int, samples: NDArray[np.int64], per_step: int) -> NDArray[np.int64]:
        """Sample numbers (steps, per_step, batch) of one client; -1 fills an incomplete batch.

        Samples are drawn without replacement and reshuffled after each pass. With `steps`, batches are full and
        may span two passes; with `epochs`, the last batch of a pass may be incomplete. A client with fewer
        samples than the batch size takes all of them in every batch.
        """
        n = len(samples)
        size = min(self.batch_size, n)
        rng = np.random.default_rng([self.seed, self.stream, self.round, client])
        if self.steps is not None:
            needed = self.steps * per_step * size
            passes = [rng.permutation(n) for _ in range(ceil(needed / n))]
            return samples[np.concatenate(passes)[:needed]].reshape(self.steps, per_step, size)
        if self.epochs is None:
            raise ValueError("work needs steps or epochs")
        per_epoch = n // size if self.drop_last else ceil(n / size)
        rows = np.full((self.epochs, per_epoch * size), -1, dtype=np.int64)
        for row in rows:
            order = rng.permutation(n)[: per_epoch * size]
            row[: len(order)] = samples[order]
        rows = rows.reshape(-1, size)
        steps = max(1, len(rows) // per_step)
        # Too few batches for one step of a method that needs several: go round once more.
        return np.resize(rows, (steps * per_step, size)).reshape(steps, per_step, size)
