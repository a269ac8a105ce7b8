"""One step of DP-SGD by hand, on every engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import ConfigError, Federation, Params, Payload
from fedattune.algorithms.perfedavg import PerFedAvgClient
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.client import SGD
from fedattune.core.algorithm import ClientUpdate
from fedattune.core.optimizers import GradientDescent
from fedattune.core.task import Task
from fedattune.engine.base import ClientInputs, ClientOutputs, Engine
from fedattune.engine.batches import LocalTraining
from fedattune.engine.sequential import SequentialEngine
from fedattune.engine.vectorized import VectorizedEngine
from fedattune.privacy.dp_sgd import GradientNoise, draw_poisson_batches, make_generator

SIZES = [40, 13, 90, 25, 9]
ENGINES: dict[str, Callable[[Task, Federation], Engine]] = {
    "sequential": SequentialEngine,
    "wide": VectorizedEngine,
    "serial": lambda task, data: VectorizedEngine(task, data, is_serial=True),
    "eager": lambda task, data: VectorizedEngine(task, data, should_compile=False),
}
every_engine = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)


def quiet(_: int) -> float:
    return 0.0


def make_clients(sizes: list[int], scale: float = 1.0) -> Federation:
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation_from(
        [
            (scale * torch.randn(n, 6, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator))
            for n in sizes
        ]
    )


def make_task(*layers: nn.Module) -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(*(layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))).double())


def train(engine: Engine, rule: ClientUpdate, privacy: GradientNoise | None, **work: Any) -> ClientOutputs:
    n = engine.federation.n_clients
    yes, task = torch.ones(n, dtype=torch.bool), engine.task
    inputs = ClientInputs(
        Payload(task.params.repeat(n)),
        {k: v.repeat(n) for k, v in rule.init_local_state(task.params).items()},
        task.buffers.copies(n),
        yes,
        yes,
    )
    todo = {"seed": 3, "stream": 2, "round": 1, "lr": 0.05, "batch_size": 8, "steps": 1}
    training = LocalTraining(**{**todo, **work}, privacy=privacy)  # type: ignore[arg-type]
    return engine.train(rule, torch.arange(n), inputs, training)


def find_sample_gradients(task: Task, x: Tensor, y: Tensor) -> list[Params]:
    """Differentiate the loss of each sample alone, by plain autograd."""
    found = []
    for one_x, one_y in zip(x, y, strict=True):
        task.model.zero_grad()
        nn.functional.cross_entropy(task.model(one_x[None]), one_y[None]).backward()
        found.append(Params({k: v.grad.clone() for k, v in task.model.named_parameters()}))  # type: ignore[union-attr]
    return found


def length(g: Params) -> float:
    return float(sum(v.square().sum() for v in g.values()) ** 0.5)


@every_engine
def test_a_step_without_noise_is_the_sum_of_clipped_gradients_over_the_expected_size(make: Any) -> None:
    task, data = make_task(), make_clients(SIZES)
    clip, decay = 1.5, 0.1
    engine = make(task, data)
    got = train(engine, SGD(), GradientNoise(clip, (1,), quiet), weight_decay=decay).upload.params
    plan = LocalTraining(3, 2, 1, 0.05, 8, steps=1, privacy=GradientNoise(clip, (1,), quiet))
    was_clipped = []
    for client, samples in enumerate(data.part("train")):
        batch = plan.draw_batches(client, samples, 1)[0, 0]
        index = torch.as_tensor(batch[batch >= 0])
        total = task.params.zeros()
        for g in find_sample_gradients(task, data.x[index].double(), data.y[index]):
            was_clipped.append(length(g) > clip)
            total = total + g * min(1.0, clip / length(g))
        want = task.params - 0.05 * (total / min(8, len(samples)) + decay * task.params)
        for k, v in want.items():
            torch.testing.assert_close(got[k][client], v, rtol=1e-10, atol=1e-12)
    assert any(was_clipped)
    assert not all(was_clipped)


@every_engine
def test_the_noise_has_its_deviation_and_mean(make: Any) -> None:
    task, data = make_task(nn.Linear(6, 900), nn.Linear(900, 3)), make_clients([40, 5])
    clip, noise = 2.0, 3.0
    with_noise, without = (
        train(make(task, data), SGD(), GradientNoise(clip, (1,), multiplier)).upload.params
        for multiplier in (lambda client: noise * (1 + client), quiet)
    )
    for client, expected_size in enumerate((8, 3)):  # the second client has 3 training rows: all of them are drawn
        parts = [(with_noise[k][client] - without[k][client]).flatten() / -0.05 * expected_size for k in without]
        drawn = torch.cat(parts) / (clip * noise * (1 + client))
        # 9,003 normal numbers: their deviation is off by 0.75% in the mean, their mean by 0.0105.
        assert float(drawn.std()) == pytest.approx(1.0, abs=0.04)
        assert float(drawn.mean()) == pytest.approx(0.0, abs=0.055)


STEPS: dict[str, Any] = {"steps": 7}
EPOCHS: dict[str, Any] = {"steps": None, "epochs": 2}


@pytest.mark.parametrize(
    ("rule", "calls", "work", "name"),
    [
        *(
            (SGD(clip=1.0, optimizer=GradientDescent(momentum=0.9)), (1,), EPOCHS, name)
            for name in ENGINES
            if name != "sequential"
        ),
        # Further inner steps are recorded like the second one.
        *((PFedMeClient(0.5, 2, 0.02), (2,), STEPS, name) for name in ("wide", "serial")),
        (PerFedAvgClient(0.1, 0.1, "hf"), (1, 1, 2), EPOCHS, "wide"),
    ],
    ids=["sgd-wide", "sgd-serial", "sgd-eager", "pfedme-wide", "pfedme-serial", "perfedavg-wide"],
)
def test_engines_agree(
    rule: ClientUpdate, calls: tuple[int, ...], work: dict[str, Any], name: str, monkeypatch: Any
) -> None:
    """To rounding in float64; the recorded step too, in spans of a few steps and samples."""
    monkeypatch.setattr("fedattune.privacy.dp_sgd.NOISE_BYTES", 3 * 8 * 83 * 5 * 8)
    monkeypatch.setattr("fedattune.core.task.SAMPLE_GRADIENT_BYTES", 5 * 8 * 83)
    task, data = make_task(), make_clients(SIZES)
    privacy = GradientNoise(0.5, calls, lambda client: 1.0 + client)
    engine = ENGINES[name](task, data)
    want, got = (train(one, rule, privacy, **work) for one in (SequentialEngine(task, data), engine))
    assert isinstance(engine, VectorizedEngine)
    if name != "eager":
        assert all(step.operations for step in engine._compiler._steps.values())
    for k, v in want.upload.params.items():
        torch.testing.assert_close(got.upload.params[k], v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_no_row_moves_the_sum_by_more_than_the_clipping_length(value: float) -> None:
    task = make_task()
    x, y = torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 0, 1])
    weight = torch.full((5,), 0.25).double()
    normal = task.clipped_gradient(task.params, Params(), (x[:4], y[:4], weight[:4]), 0.5)
    x[4] = value
    odd = task.clipped_gradient(task.params, Params(), (x, y, weight), 0.5)
    assert length(odd - normal) <= 0.25 * 0.5 + 1e-12


def test_poisson_batches_draw_every_row_by_itself() -> None:
    samples = np.arange(100, 150)
    batches = draw_poisson_batches(samples, 10, 2000, 2, make_generator((1, 2, 3), is_secret=False))
    assert batches.shape[:2] == (2000, 2)
    flat = batches.reshape(4000, -1)
    for row in flat:
        real = row[row >= 0]
        assert len(set(real.tolist())) == len(real)
    counts = np.array([(flat == sample).sum() for sample in samples])
    # Binomial (4000, 0.2): deviation 25, so 130 is far out for 50 rows.
    assert np.abs(counts - 800).max() < 130
    sizes = (flat >= 0).sum(1)
    # The sizes vary as 50 independent draws of 0.2 do: variance 8 (with a deviation of 0.18 here).
    assert float(sizes.var()) == pytest.approx(8.0, abs=1.0)
    everything = draw_poisson_batches(samples, 50, 3, 1, make_generator((1,), is_secret=False))
    assert everything.shape == (3, 1, 50)
    assert (np.sort(everything, 2) == samples).all()


def test_real_nodes_draw_other_noise_and_other_batches_each_time() -> None:
    task, data = make_task(nn.Linear(6, 900), nn.Linear(900, 3)), make_clients([40, 20])
    seeded = GradientNoise(1.0, (1,), lambda _: 1.0)
    engine = SequentialEngine(task, data)
    first, again = (train(engine, SGD(), seeded).upload.params for _ in range(2))
    assert all(torch.equal(first[k], again[k]) for k in first)
    secret = replace(seeded, is_secret=True)
    one, other = (train(engine, SGD(), secret).upload.params for _ in range(2))
    apart = torch.cat([(one[k] - other[k])[0].flatten() for k in one]) / (0.05 / 8)
    # The difference of two noises has the deviation sqrt(2); gradients add a little.
    assert float(apart.std()) == pytest.approx(2**0.5, abs=0.1)
    plans = [LocalTraining(3, 2, 1, 0.05, 8, steps=4, privacy=secret) for _ in range(2)]
    drawn = [plan.draw_batches(0, data.part("train")[0], 1) for plan in plans]
    assert drawn[0].shape != drawn[1].shape or (drawn[0] != drawn[1]).any()


class Greedy(SGD):
    """Takes two gradients where it said one."""

    def step(self, carry: Any, batch: Any, grad: Any, context: Any) -> Any:
        grad(carry.w, batch)
        return super().step(carry, batch, grad, context)


@every_engine
def test_a_rule_with_more_gradients_than_accounted_for_is_stopped(make: Any) -> None:
    engine = make(make_task(), make_clients([40, 13]))
    with pytest.raises(ConfigError, match="takes more gradients in a step than the 1 that are accounted for"):
        train(engine, Greedy(), GradientNoise(1.0, (1,), lambda _: 1.0))
