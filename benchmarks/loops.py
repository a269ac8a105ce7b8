"""W12: whole runs of the examples of docs/pytorch.md, beside the loop with `torch.optim` that one would write by hand.

Both ways start from the same data in memory and the same model, train the same rounds of FedAvg with the same number
of batches, and evaluate all clients once at the end. `fit` draws other batches, so results are compared roughly. Its
time includes the recording of its steps, and all that it does for a result.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedattune
from fedattune.models import build_seeded_model

from .measure import Case, Figures, Setting, Skip, Target, Way, Workload, measure

LIMIT = 0.1
"""Difference of accuracies, or of what is measured instead, between the two ways."""


@dataclass(frozen=True)
class Example:
    """An example: its data, model and settings, and what its hand-written loop does.

    Attributes:
        loss: loss of outputs and targets, as in `torch.nn.functional`.
        optimizer: makes the optimizer of the trained parameters.
        find_right: tells which predictions of outputs are right.
        augment: changes the images of a batch.
        warmup: rounds in which the rate rises.
    """

    data: fedattune.Federation
    model: str
    settings: dict[str, Any]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    find_right: Callable[[Tensor, Tensor], Tensor] = lambda outputs, y: outputs.argmax(1) == y
    augment: Callable[[Tensor], Tensor] = lambda x: x
    warmup: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def crop(x: Tensor) -> Tensor:
    """Crop each image at random after padding by 4 pixels, as torchvision's `RandomCrop(size, padding=4)`."""
    n, _, height, width = x.shape
    padded = functional.pad(x, (4, 4, 4, 4))
    moves = torch.randint(0, 9, (n, 2)).tolist()
    return torch.stack([padded[i, :, a : a + height, b : b + width] for i, (a, b) in enumerate(moves)])


def train_by_hand(example: Example) -> float:
    """Train FedAvg in plain PyTorch; return the mean over clients of the share of right predictions on test rows."""
    data, settings = example.data, example.settings
    model = build_seeded_model(example.model, data, options=example.options, seed=0)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parts = [torch.as_tensor(rows) for rows in data.part("train")]
    inputs = [(data.features(rows), data.y[rows]) for rows in parts]
    shares = [len(rows) / sum(map(len, parts)) for rows in parts]
    shared = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    local = copy.deepcopy(model)
    trained = [p for p in local.parameters() if p.requires_grad]
    for r in range(settings["rounds"]):
        total = {name: torch.zeros_like(p) for name, p in shared.items()}
        for (x, y), share in zip(inputs, shares, strict=True):
            with torch.no_grad():
                for name, p in zip(names, trained, strict=True):
                    p.copy_(shared[name])
            optimizer = example.optimizer(trained)
            if example.warmup:
                optimizer.param_groups[0]["lr"] *= min(1.0, (r + 1) / example.warmup)
            local.train()
            size = min(settings["batch_size"], len(x))
            order = torch.cat([torch.randperm(len(x)) for _ in range(settings["steps"] * size // len(x) + 1)])
            for step in range(settings["steps"]):
                batch = order[step * size : (step + 1) * size]
                optimizer.zero_grad()
                example.loss(local(example.augment(x[batch])), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                for name, p in zip(names, trained, strict=True):
                    total[name] += share * p
        shared = total
    with torch.no_grad():
        for name, p in zip(names, trained, strict=True):
            p.copy_(shared[name])
        local.eval()
        tests = [torch.as_tensor(rows) for rows in data.part("test")]
        right = [example.find_right(local(data.features(rows)), data.y[rows]) for rows in tests if len(rows)]
    return float(np.mean([float(one.double().mean()) for one in right]))


def train_by_fit(example: Example) -> float:
    """Train the same by `fit`; return the same."""
    more = {"eval_every": example.settings["rounds"], "early_stopping": "off"}
    settings = {**example.settings, **more}
    result = fedattune.fit(example.data, "fedavg", example.model, model_options=example.options, **settings)
    return float(result.metrics["acc_uniform"])


def make_images(*, quick: bool) -> Example:
    """Handwritten digits as a folder of images of 32 pixels, with random crops."""
    from PIL import Image

    rounds = 1 if quick else 20
    digits = fedattune.load_federation("digits", partition="iid", clients=4)
    with tempfile.TemporaryDirectory() as folder:
        for client in digits.clients:
            for row in client.all[: 20 if quick else 80]:
                file = Path(folder) / client.name / digits.classes[int(digits.y[row])] / f"{row}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((digits.x[row, 0].numpy() * 15).astype(np.uint8)).save(file)
        data = fedattune.load_federation(folder, options={"image_size": 32})
    settings = {"rounds": rounds, "steps": 10, "batch_size": 20, "lr": 0.1, "augment": "crop"}
    return Example(data, "dnn", settings, partial(torch.optim.SGD, lr=0.1), augment=crop)


def make_texts(*, quick: bool) -> Example:
    """Made-up reviews and a tiny language model, trained by LoRA with AdamW and a warm-up."""
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise Skip("transformers and peft are not installed") from error
    import runpy

    folder = Path(tempfile.mkdtemp()) / "tiny-bert"
    example = Path(__file__).parent.parent / "examples" / "make_texts.py"
    runpy.run_path(str(example))["pretrain"](folder)
    options = {"tokens": str(folder), "max_tokens": 12}
    data = fedattune.load_federation(
        example.with_name("texts.csv"), client_column="source", target="mood", options=options
    )
    settings = {
        "rounds": 1 if quick else 5, "steps": 10, "batch_size": 20, "optimizer": "adamw", "lr": 3e-3, "lr_warmup": 2,
    }  # fmt: skip
    of_model = {"id": str(folder), "targets": "q_lin,v_lin"}
    return Example(data, "hf", settings, partial(torch.optim.AdamW, lr=3e-3), warmup=2, options=of_model)


def make_labels(*, quick: bool) -> Example:
    """Patients of six clinics with four diagnoses each, as a table of several labels, trained by Adam."""
    table = Path(__file__).parent.parent / "examples" / "symptoms.csv"
    targets = "infection,anaemia,diabetes,asthma"
    data = fedattune.load_federation(table, client_column="clinic", target=targets)
    settings = {"rounds": 1 if quick else 50, "steps": 20, "batch_size": 20, "optimizer": "adam", "lr": 1e-3}
    return Example(
        data,
        "dnn",
        settings,
        partial(torch.optim.Adam, lr=1e-3),
        loss=lambda outputs, y: functional.binary_cross_entropy_with_logits(outputs, y.float()),
        find_right=lambda outputs, y: (outputs > 0) == y,
    )


def make_digits(*, quick: bool) -> Example:
    """Handwritten digits of twenty clients and a network of 100 hidden units, trained by Adam."""
    data = fedattune.load_federation("digits", partition="dirichlet", clients=20)
    settings = {"rounds": 1 if quick else 50, "steps": 20, "batch_size": 20, "optimizer": "adam", "lr": 1e-3}
    return Example(data, "dnn", settings, partial(torch.optim.Adam, lr=1e-3))


EXAMPLES: dict[str, Callable[..., Example]] = {
    "adam": make_digits, "labels": make_labels, "lora": make_texts, "images": make_images,
}  # fmt: skip


def _check(results: dict[str, Any], *, quick: bool) -> None:
    values = list(results.values())
    assert quick or max(values) - min(values) < LIMIT, results


def _run(name: str, setting: Setting) -> Figures:
    example = EXAMPLES[name](quick=setting.quick)
    ways: dict[str, Way] = {"floor": lambda _: train_by_hand(example), "fit": lambda _: train_by_fit(example)}
    return measure(
        Workload(
            f"W12-{name}",
            str(EXAMPLES[name].__doc__).splitlines()[0],
            ways,
            targets=(Target("fit", "floor", 1.0),),
            repeats=5,
            warmup=1,
            check=partial(_check, quick=setting.quick),
        ),
        setting,
    )


CASES = tuple(
    Case(f"W12-{name}", f"the example {name} beside a loop with torch.optim", partial(_run, name)) for name in EXAMPLES
)
