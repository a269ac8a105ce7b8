"""Attack models with and without differential privacy of rows: who was in the training data, and what a row was.

    python -m benchmarks privacy-attacks

Membership inference by the loss (Yeom et al., CSF 2018) on canaries, rows whose labels were drawn at random: a model
can only know them by heart. Gradient inversion by gradient matching (Zhu, Liu and Han, NeurIPS 2019) with the label
read from the last layer (Zhao, Mopuri and Bilen, 2020), on the upload of a client that takes one step with one row.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call

import fedattune
from fedattune import Federation, Params, Payload
from fedattune.client import SGD
from fedattune.core.task import Task
from fedattune.data import ClientIndex, RaggedIndex
from fedattune.engine.base import ClientInputs
from fedattune.engine.batches import LocalTraining
from fedattune.engine.sequential import SequentialEngine
from fedattune.privacy.accounting import noise_for
from fedattune.privacy.dp_sgd import GradientNoise

from .options import read_count, read_epsilons

EPSILONS = (inf, 50.0, 10.0, 1.0)
CANARY_SHARE = 0.3
DELTA = 1e-4
N_CLIENTS = 5
LR = 0.1


@dataclass(frozen=True)
class Canaries:
    """A federation in which some rows have labels drawn at random.

    Attributes:
        federation: the clients; half of their rows are to train, half to test.
        is_canary: (n,) rows with such labels.
    """

    federation: Federation
    is_canary: Tensor

    @classmethod
    def make(cls, seed: int = 0) -> "Canaries":
        """Deal the digits to equal clients, in random order."""
        images, labels = load_digits(return_X_y=True)
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(labels))
        x = torch.from_numpy(images[order] / 16).float()
        y = torch.from_numpy(labels[order]).long()
        is_canary = torch.from_numpy(rng.random(len(y)) < CANARY_SHARE)
        y = torch.where(is_canary, torch.from_numpy(rng.integers(0, 10, len(y))), y)
        parts = np.array_split(np.arange(len(y)), N_CLIENTS)
        train, test = ([part[i::2] for part in parts] for i in (0, 1))
        nothing = [part[:0] for part in parts]
        index = ClientIndex(*(RaggedIndex.from_lists(lists) for lists in (train, nothing, test)))
        classes = tuple(str(digit) for digit in range(10))
        return cls(Federation("canaries", x, y, classes, index, source="digits"), is_canary)


def measure_membership(method: str, epsilon: float, seed: int = 0) -> tuple[float, float]:
    """Train, and let an observer of the clients' models tell training canaries from others by their loss.

    Args:
        method: name of the method; the observer sees the model that each client uses.
        epsilon: of every row; infinite for plain training.
        seed: seed of data, model and noise.

    Returns:
        The attack's area under the ROC curve (0.5 is guessing, 1 is certainty), and the accuracy on test rows whose
        labels are true.

    """
    canaries = Canaries.make(seed)
    data = canaries.federation
    work = {"rounds": 40, "epochs": 6, "batch_size": 32, "lr": 0.4, "eval_every": 40, "early_stopping": "off"}
    privacy = {} if isinf(epsilon) else {"dp_record": epsilon, "dp_delta": DELTA}
    options = {"hidden": 64}
    result = fedattune.fit(data, method, "dnn", model_options=options, seed=seed, **work, **privacy)
    scores, members, right = [], [], []
    for client in range(data.n_clients):
        model = result.model(str(client)).eval()
        for is_member, part in ((1, "train"), (0, "test")):
            rows = torch.as_tensor(data.part(part)[client])
            with torch.no_grad():
                logits = model(data.x[rows])
            losses = nn.functional.cross_entropy(logits, data.y[rows], reduction="none")
            mask = canaries.is_canary[rows]
            scores += (-losses[mask]).tolist()
            members += [is_member] * int(mask.sum())
            if not is_member:
                right += (logits.argmax(1) == data.y[rows])[~mask].tolist()
    return float(roc_auc_score(members, scores)), float(np.mean(right))


def upload_one_row(model: nn.Module, x: Tensor, y: Tensor, epsilon: float, seed: int = 0) -> Params:
    """Let a client with one row train one step, by FedAttune's engine, and return what it uploads.

    Args:
        model: the model that the client is sent.
        x: (1, ...) its row.
        y: (1,) the label.
        epsilon: of the row; infinite for plain training.
        seed: seed of the noise.

    """
    one = [np.arange(1)]
    lists = [RaggedIndex.from_lists(rows) for rows in (one, [one[0][:0]], [one[0][:0]])]
    data = Federation("one row", x, y, tuple(map(str, range(10))), ClientIndex(*lists), source="digits")
    task, yes = Task(model), torch.ones(1, dtype=torch.bool)
    privacy = None
    if not isinf(epsilon):
        noise = noise_for(epsilon, DELTA, 1.0, 1)
        privacy = GradientNoise(1.0, (1,), lambda _: noise)
    inputs = ClientInputs(Payload(task.params.repeat(1)), {}, task.buffers.copies(1), yes, yes)
    training = LocalTraining(seed, 2, 1, LR, batch_size=1, steps=1, privacy=privacy)
    outputs = SequentialEngine(task, data).train(SGD(), torch.arange(1), inputs, training)
    return outputs.upload.params.rows(0)


def invert_upload(model: nn.Module, upload: Params, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Find a row whose gradient points where the upload went, by L-BFGS from random starts.

    Args:
        model: the model that the client was sent; its last layer has a bias.
        upload: the model that it sent back.
        shape: shape of a row.
        seed: seed of the starts.

    Returns:
        The row (1, ...) whose gradient matches best.

    """
    params = {k: v.detach() for k, v in model.named_parameters()}
    wanted = {k: (params[k] - upload[k]) / LR for k in params}
    bias = [k for k in params if k.endswith("bias")][-1]
    label = wanted[bias].argmin()[None]  # of one row, only its own class has a negative gradient
    squared_norm = torch.stack([v.square().sum() for v in wanted.values()]).sum().clamp_min(1e-12)
    generator = torch.Generator().manual_seed(seed)

    def distance(x: Tensor) -> Tensor:
        w = {k: v.clone().requires_grad_() for k, v in params.items()}
        loss = nn.functional.cross_entropy(functional_call(model, w, (x,)), label)
        g = torch.autograd.grad(loss, list(w.values()), create_graph=True)
        pairs = zip(g, wanted.values(), strict=True)
        return torch.stack([(a - b).square().sum() for a, b in pairs]).sum() / squared_norm

    best, best_distance = torch.zeros(1, *shape), inf
    for _ in range(3):
        x = torch.rand(1, *shape, generator=generator).requires_grad_()
        optimizer = torch.optim.LBFGS([x], lr=1.0, max_iter=200, line_search_fn="strong_wolfe")

        def close(x: Tensor = x, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            found = distance(x)
            (x.grad,) = torch.autograd.grad(found, [x])
            return found

        optimizer.step(close)  # type: ignore[arg-type]
        reached = float(distance(x).detach())
        if reached < best_distance:
            best, best_distance = x.detach(), reached
    return best


def measure_inversion(epsilon: float, rows: int = 10, seed: int = 0) -> float:
    """Invert the uploads of single digits; return the median relative error: 0 is the digit, above 1 is nothing."""
    images, labels = load_digits(return_X_y=True)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    errors = []
    for row in range(rows):
        x = torch.from_numpy(images[row : row + 1] / 16).float()
        y = torch.from_numpy(labels[row : row + 1]).long()
        found = invert_upload(model, upload_one_row(model, x, y, epsilon, seed + row), (64,), seed)
        errors.append(float((found - x).norm() / x.norm()))
    return float(np.median(errors))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks privacy-attacks",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--algorithms", default="fedavg,ditto,fedmcsa", help="methods (default: %(default)s)")
    epsilons = ",".join(f"{e:g}" for e in EPSILONS)
    add("--epsilons", type=read_epsilons, default=epsilons, help="rows (default: %(default)s)")
    add("--seeds", type=read_count, default=2, help="splits and seeds (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what both attacks find."""
    given, started = make_parser().parse_args(arguments), time.perf_counter()
    methods = given.algorithms.split(",")
    print("membership of canaries: AUC of the attack, and accuracy on true test rows in %\n")
    print(" | ".join(["| epsilon", *methods, "inversion: relative error"]) + " |")
    print("|---" * (len(methods) + 2) + "|")
    for epsilon in given.epsilons:
        cells = ["| none" if isinf(epsilon) else f"| {epsilon:g}"]
        for method in methods:
            found = np.mean([measure_membership(method, epsilon, seed) for seed in range(given.seeds)], 0)
            cells.append(f"{found[0]:.3f}, {100 * found[1]:.1f}")
        cells.append(f"{measure_inversion(epsilon):.3f}")
        print(" | ".join(cells) + " |", flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0
