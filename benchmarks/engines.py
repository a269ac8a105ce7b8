"""Seconds per round of both engines beside a hand-written loop, on MNIST shapes: `python -m benchmarks.engines`.

The floor is the plain PyTorch loop over clients that a good engineer writes: batches gathered by index from tensors
in memory, one working copy of the model, `torch.autograd.grad` and an in-place update. All three do the same local
steps; evaluation is not in the time. Rounds are interleaved so that a busy machine harms all alike, and medians and
ratios are printed: only the ratios mean something on a shared machine.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch.func import functional_call

import fedattune
from fedattune.client import SGD
from fedattune.core import Payload
from fedattune.engines import Inputs, Work, make_engine
from fedattune.models import build_model
from fedattune.params import Params
from fedattune.task import Task

CLIENTS, SAMPLES, STEPS, BATCH, LR, REPEATS = 20, 2000, 20, 20, 0.02, 7


def federation() -> fedattune.Federation:
    """Twenty clients of random images in the shape of MNIST."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (CLIENTS, SAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (CLIENTS, SAMPLES), generator=generator)
    return fedattune.federation(
        [(x.float() / 255, y) for x, y in zip(images, labels, strict=True)], name="MNIST shapes"
    )


def floor(task: Task, data: fedattune.Federation, round_: int) -> None:
    """One round of plain PyTorch."""
    generator = torch.Generator().manual_seed(round_)
    for client in data.clients:
        samples = torch.as_tensor(client.train)
        order = samples[torch.randperm(len(samples), generator=generator)[: STEPS * BATCH]].view(STEPS, BATCH)
        weights = {k: v.clone().requires_grad_() for k, v in task.params.items()}
        tensors = list(weights.values())
        for index in order:
            x, y = data.x[index], data.y[index]
            loss = torch.nn.functional.cross_entropy(functional_call(task.model, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, tensors)
            with torch.no_grad():
                torch._foreach_add_(tensors, gradients, alpha=-LR)


def engine_round(name: str, task: Task, data: fedattune.Federation) -> Callable[[int], None]:
    """One round of an engine: all clients train from one model."""
    engine = make_engine(name, task, data)  # type: ignore[arg-type]
    ids = torch.arange(CLIENTS)
    sent = Payload(task.params.repeat(CLIENTS))
    yes = torch.ones(CLIENTS, dtype=torch.bool)
    inputs = Inputs(sent, {}, Params(), yes, yes)

    def run(round_: int) -> None:
        work = Work(seed=0, stream=1, round=round_, lr=LR, batch_size=BATCH, steps=STEPS)
        engine.train(SGD(), ids, inputs, work)

    return run


def main() -> None:
    """Print one line per model."""
    data = federation()
    print(
        f"{CLIENTS} clients x {STEPS} steps of {BATCH}, {torch.get_num_threads()} threads, median of {REPEATS}"
    )
    print(
        f"{'model':<6}{'floor s':>10}{'loop s':>10}{'batched s':>11}{'loop/floor':>12}{'batched/floor':>15}"
    )
    for name in ("mlr", "dnn", "cnn"):
        torch.manual_seed(0)
        task = Task(build_model(name, data.input_shape, data.n_classes, {}))
        runs: dict[str, Callable[[int], None]] = {
            "floor": lambda r, t=task: floor(t, data, r),  # type: ignore[misc]
            "loop": engine_round("loop", task, data),
            "batched": engine_round("batched", task, data),
        }
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        repeats = REPEATS if name != "cnn" else 3
        for r in range(repeats + 1):
            for key, run in runs.items():
                start = time.perf_counter()
                run(r)
                if r:  # the first round warms up
                    seconds[key].append(time.perf_counter() - start)
        base, loop, batched = (statistics.median(seconds[key]) for key in ("floor", "loop", "batched"))
        print(
            f"{name:<6}{base:>10.4f}{loop:>10.4f}{batched:>11.4f}{loop / base:>12.2f}{batched / base:>15.2f}"
        )


if __name__ == "__main__":
    main()
