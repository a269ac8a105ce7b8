"""W6: evaluate every client's own model on its own test part, as in every evaluated round."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedattune import Federation, Params
from fedattune.engine import make_engine

from .floors import EVALUATED_AS, WRITTEN_OUT
from .measure import Case, Figures, Setting, Target, Way, Workload, lazily, measure
from .problems import Problem, dirichlet, own_tensors, synthetic
from .training import on

BATCH = 1000


def personal(problem: Problem) -> Params:
    """Make a different model for each client (C, ...)."""
    generator = torch.Generator().manual_seed(1)
    models = problem.task.params.copies(problem.data.n_clients)
    return models.map(lambda w: w + 0.05 * torch.randn(w.shape, generator=generator).to(w))


def plain(problem: Problem, models: Params) -> Way:
    """Evaluate client by client; samples are normalized and in memory already, and batches are views."""
    forward, flat = EVALUATED_AS[problem.model], problem.model in WRITTEN_OUT
    parts = own_tensors(problem.data, [c.test for c in problem.data.clients])
    own = [(x.flatten(1) if flat else x, y) for x, y in parts]

    @torch.no_grad()
    def run(_: int) -> tuple[Tensor, Tensor]:
        correct, losses = [], []
        for client, (x, y) in enumerate(own):
            w = [v[client] for v in models.values()]
            right, loss = (torch.zeros((), dtype=torch.int64, device=x.device), torch.zeros((), device=x.device))
            for xb, yb in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True):
                logits = forward(w, xb)
                right += (logits.argmax(1) == yb).sum()
                loss += cross_entropy(logits, yb, reduction="sum")
            correct.append(right)
            losses.append(loss)
        return torch.stack(correct), torch.stack(losses)

    return run


def engine(problem: Problem, models: Params, name: Literal["auto", "vectorized", "sequential"]) -> Way:
    """Evaluate by an engine."""
    runner = make_engine(name, problem.task, problem.data)
    ids = torch.arange(problem.data.n_clients, device=problem.data.device)

    def run(_: int) -> tuple[Tensor, Tensor]:
        (scores,) = runner.evaluate(models, Params(), ("test",), ids)
        return scores.correct, scores.loss

    return run


def agree(results: dict[str, Any]) -> None:
    """Check that all ways give the same scores, up to samples on the decision boundary.

    Raises:
        AssertionError: the scores differ.
    """
    correct, loss = results["floor"]
    for name, (right, losses) in results.items():
        if (right - correct).abs().max() > 2 or not torch.allclose(losses.float(), loss, rtol=1e-3):
            raise AssertionError(f"{name} scores differently: {right.tolist()}, the floor {correct.tolist()}")


def _images(quick: bool) -> Federation:
    """Make clients whose images are for tests."""
    return dirichlet(2, 120, test=0.8) if quick else dirichlet(20, 70_000, test=0.999)


def _fewer_images(quick: bool) -> Federation:
    return dirichlet(2, 120, test=0.8) if quick else dirichlet(20, 20_000, test=0.999)


def _synthetic(quick: bool) -> Federation:
    return synthetic(4 if quick else 100)


EVALUATED: dict[str, tuple[str, Callable[[bool], Federation], str, float]] = {
    "W6-mlr": ("Evaluation of 20 clients' own MLRs on 70,000 images", _images, "mlr", 0.6),
    "W6-dnn": ("Evaluation of 20 clients' own DNN-100s on 70,000 images", _images, "dnn", 0.8),
    "W6-synthetic": ("Evaluation of 100 ragged clients' own MLRs on Synthetic", _synthetic, "mlr", 0.6),
    "W6-lenet": ("Evaluation of 20 clients' own LeNets on 20,000 images", _fewer_images, "lenet", 0.6),
}
"""Name -> what it is, its data, its model, and the target."""


def evaluated(name: str, setting: Setting) -> Problem:
    """Make the problem of a workload."""
    _, make, model, _ = EVALUATED[name]
    return on(Problem(make(setting.quick), model), setting)


def _run(name: str, setting: Setting) -> Figures:
    about, _, _, at_most = EVALUATED[name]
    problem = evaluated(name, setting)
    models = personal(problem)
    images = sum(len(c.test) for c in problem.data.clients)
    ways = {"floor": lazily(lambda: plain(problem, models))}
    ways["auto"] = lazily(lambda: engine(problem, models, "auto"))
    workload = Workload(
        name, about, ways, targets=(Target("auto", "floor", at_most),), repeats=11, check=agree,
        flops=problem.sample_flops * images,
        bytes=problem.data.x[0].nbytes * images + models.nbytes(),
    )  # fmt: skip
    return measure(workload, setting)


CASES = tuple(Case(name, about, partial(_run, name)) for name, (about, *_) in EVALUATED.items())
