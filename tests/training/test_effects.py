"""Measuring mechanisms at the end of a run: on both engines, after resuming, and without a trace in the run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedattune
from fedattune import Algorithm, Federation, Result
from fedattune.client import SGD, Proximal
from fedattune.core.effect import Effect, Mechanism
from fedattune.core.params import Params
from fedattune.core.payload import Payload, RoundContext
from fedattune.server import Average
from fedattune.training.effects import MeasuredUpdate, average_effects
from federations import make_federation
from oracles.quadratic import FRESH, W0, M, gradient, params

RUN: dict[str, Any] = {"rounds": 3, "steps": 4, "batch_size": 16, "lr": 0.1, "dtype": "float64"}


def test_the_proximal_term_on_a_quadratic() -> None:
    """f = 1/2 ||w - m||^2 from the anchor w0: after one step of rate 0.5 with mu = 0, w - w0 = (m - w0) / 2."""
    rule = MeasuredUpdate(SGD((Proximal(0.4),)))
    context = RoundContext(0.5, torch.tensor(2.0, dtype=torch.float64), torch.tensor(1.0), 1)
    sent = Payload(params(W0))
    carry = rule.begin(sent, {}, FRESH, context)
    for _ in range(2):
        carry = rule.step(carry, (torch.zeros(3, 2),) * 2, gradient, context)
    upload, state = rule.finish(carry, sent, {}, context)
    assert upload.params["effects"].tolist() == pytest.approx([0.2 / 1.25**0.5])
    assert not state
    assert not torch.equal(W0, M)


@pytest.mark.parametrize("name", ["scaffold", "fedamp", "igfl", "perfedavg", "fedala", "fedam", "pfedla"])
def test_engines_agree(name: str, ragged: Federation) -> None:
    one, two = (
        fedattune.fit(ragged, name, "dnn", model_options={"hidden": 6}, engine=engine, **RUN)
        for engine in ("sequential", "vectorized")
    )
    assert one.effects
    assert [effect.mechanism for effect in one.effects] == [effect.mechanism for effect in two.effects]
    assert [effect.value for effect in one.effects] == pytest.approx([effect.value for effect in two.effects])


def test_a_term_of_strength_zero_is_idle_and_a_note_says_so(ragged: Federation) -> None:
    result = fedattune.fit(ragged, "fedprox", "mlr", options={"mu": 0.0}, **RUN)
    mechanism = Mechanism("steps", "steps without the proximal term", "one without the proximal term")
    assert result.effects == [Effect(mechanism, 0.0)]
    assert f"fedprox: {result.effects[0].sentence}" in result.notes
    assert result.to_json()["effects"] == [{**mechanism._asdict(), "value": 0.0}]


def test_stored_with_the_run_and_absent_before_its_end(ragged: Federation, tmp_path: Any) -> None:
    part = fedattune.fit(ragged, "fedprox", "mlr", out=tmp_path, callbacks=[fedattune.OnRound(lambda _: True)], **RUN)
    assert not part.effects
    whole = fedattune.fit(ragged, "fedprox", "mlr", out=tmp_path, resume=True, **RUN)
    assert whole.effects == fedattune.fit(ragged, "fedprox", "mlr", **RUN).effects
    assert Result.load(tmp_path).effects == whole.effects


def test_a_correction_of_ones_own_is_measured_by_its_name(ragged: Federation) -> None:
    class Shrink(Proximal):
        mechanism = fedattune.client.Correction.mechanism

        def __call__(self, g: Params, w: Params, local: Any) -> Params:
            return 2 * g

    result = fedattune.fit(ragged, Algorithm(SGD((Shrink(0.0),)), Average()), "mlr", **RUN)
    (effect,) = result.effects
    assert effect.mechanism.reference == "steps without Shrink"
    assert effect.value == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["fedprox", "fedam"])
def test_clients_without_training_samples_are_not_measured(name: str) -> None:
    """Nothing of the second client, which has none, enters the mean."""
    two = make_federation([40, 40])
    first, second = two.clients
    run = RUN | {"cohort": 1.0}
    alone, beside = (
        fedattune.fit(replace(two, clients=clients), name, "dnn", **run).effects
        for clients in ([first], [first, replace(second, train=second.train[:0])])
    )
    assert alone[0].value > 0
    assert [effect.value for effect in beside] == pytest.approx([effect.value for effect in alone])


@pytest.mark.parametrize("name", ["fedprox", "vrl_sgd", "igfl_c", "perfedavg"])
def test_the_measured_round_has_the_rate_of_the_last_round(name: str, ragged: Federation) -> None:
    """A rate that would fall after the last round changes nothing; a cosine would be zero there."""
    constant, falling, cosine = (
        fedattune.fit(ragged, name, "mlr", **RUN, **schedule)
        for schedule in ({}, {"lr_schedule": "step", "lr_step_size": 3}, {"lr_schedule": "cosine"})
    )
    assert falling.effects == constant.effects
    assert [effect.mechanism for effect in cosine.effects] == [effect.mechanism for effect in constant.effects]
    assert all(effect.value > 0.001 for effect in cosine.effects)


def test_clients_are_averaged_by_mechanism() -> None:
    a, b = Mechanism("steps", "a", "x"), Mechanism("models", "b", "y")
    assert average_effects([[Effect(a, 1.0), Effect(b, 0.5)], [Effect(a, 2.0)], [Effect(a, float("nan"))]]) == [
        Effect(a, 1.5),
        Effect(b, 0.5),
    ]
