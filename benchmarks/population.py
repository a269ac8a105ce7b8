"""W8: a thousand to a million registered clients with a personal model each; 100 clients train per round.

Every population trains in a process of its own, to measure its memory alone. Clients share 60,000 images of MNIST's
shape; their index lists overlap. The run has a folder, so checkpoints and rows on disk are measured. The evaluation
comes at the end and is not measured.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import fedattune
from fedattune.data import ClientIndex, RaggedIndex

from . import machine
from .measure import Case, Figures, Setting, Target

COHORT, BATCH, STEPS = 100, 20, 20
TRAIN, TEST = 40, 10
METHODS = ("pfedme", "ditto", "fedmcsa", "fedavg")
MEMORY = 2 << 30


def population(n: int, pool: int = 60_000) -> fedattune.Federation:
    """Make `n` clients with ranges of one pool of byte images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (pool, 1, 28, 28), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (pool,), generator=generator)
    starts = np.random.default_rng(0).integers(pool, size=n, dtype=np.int32)[:, None]

    def lists(first: int, size: int) -> RaggedIndex:
        taken = (starts + np.arange(first, first + size, dtype=np.int32)) % pool
        return RaggedIndex(taken.reshape(-1), np.arange(n + 1) * size)

    clients = ClientIndex(lists(0, TRAIN), lists(0, 0), lists(TRAIN, TEST))
    scale = torch.full((1, 28, 28), 1 / 255)
    return fedattune.Federation("population", x, y, tuple("0123456789"), clients, scale=scale, source="population")


def one(method: str, n: int, rounds: int) -> dict[str, object]:
    """Train `method` on `n` clients; return seconds per round and of the start, peak memory, and bytes on disk."""
    begun = time.perf_counter()
    data = population(n)
    moments = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        fedattune.fit(
            data,
            method,
            "mlr",
            out=Path(folder) / "run",
            callbacks=[fedattune.OnRound(lambda _: moments.append(time.perf_counter()))],
            rounds=rounds,
            cohort=min(COHORT, n),
            train="cohort",
            batch_size=BATCH,
            steps=STEPS,
            eval_every=rounds,
            eval_clients=COHORT,
        )
        disk = sum(f.stat().st_blocks * 512 for f in Path(folder).rglob("*") if f.is_file())
    seconds = np.diff(moments)
    warm = max(1, rounds // 5)
    # The last round evaluates, the first one begins when everything has been read and checked.
    return {
        "seconds": seconds[warm:-1].tolist(),
        "start": float(moments[1] - begun),
        "rss": machine.peak_rss(),
        "disk": disk,
    }


def case(method: str) -> Case:
    """Make the case of one method."""
    name, about = f"W8-{method}", f"{method}: MLR, {COHORT} of N registered clients per round, 20 steps of 20"

    def run(setting: Setting) -> Figures:
        sizes = [200, 1000] if setting.quick else [10**3, 10**4, 10**5, 10**6]
        rounds = 5 if setting.quick else setting.repeats or 60
        found = {f"{n:,}": machine.fresh("benchmarks.population", method, str(n), str(rounds)) for n in sizes}
        fewest, most = (f"{n:,}" for n in (sizes[0], sizes[-1]))
        return Figures(
            name,
            about,
            seconds={way: one["seconds"] for way, one in found.items()},
            floor=fewest,
            targets=(Target(most, fewest, 1.3), Target(most, "", MEMORY, "rss")),
            rss={way: one["rss"] for way, one in found.items()},
            values={
                way: {
                    "mean ms": 1e3 * statistics.fmean(one["seconds"]),
                    "start s": one["start"],
                    "disk MB": one["disk"] / 1e6,
                }
                for way, one in found.items()
            },
        )

    return Case(name, about, run)


CASES = tuple(case(method) for method in METHODS)

if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
