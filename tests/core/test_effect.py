"""Effects of mechanisms: distances worked out by hand, and their sentences."""

import pytest
import torch

from fedattune.core.effect import ONE_MIXTURE, OWN_MODEL, Effect, Mechanism, measure_mixing
from fedattune.core.payload import MixingMatrices

CLIENTS = torch.tensor([3, 5])


def measure(*matrices: list[list[float]], rows: torch.Tensor = CLIENTS) -> dict[Mechanism, float]:
    weights = {str(i): torch.tensor(matrix) for i, matrix in enumerate(matrices)}
    return dict(measure_mixing(MixingMatrices(rows, CLIENTS, weights)))


def test_equal_rows_are_one_mixture_even_if_they_are_not_uniform() -> None:
    assert measure([[0.9, 0.1], [0.9, 0.1]]) == pytest.approx({ONE_MIXTURE: 0.0, OWN_MODEL: 0.5}, abs=1e-7)


def test_rows_of_the_own_model_are_training_alone() -> None:
    assert measure([[1.0, 0.0], [0.0, 1.0]]) == pytest.approx({ONE_MIXTURE: 0.5, OWN_MODEL: 0.0})


def test_one_row_is_compared_with_the_own_model_alone() -> None:
    assert measure([[0.5, 0.5]], rows=CLIENTS[:1]) == {OWN_MODEL: 0.5}
    assert measure_mixing(None) == ()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0.5, "the weights are 50% away from the client's own model alone"),
        (0.0096, "the weights stayed within 1% of the client's own model alone: this run is training alone"),
        (0.0004, "the weights stayed within 0.04% of the client's own model alone: this run is training alone"),
        (0.0, "the weights stayed equal to the client's own model alone: this run is training alone"),
    ],
)
def test_sentences(value: float, sentence: str) -> None:
    effect = Effect(OWN_MODEL, value)
    assert effect.sentence == sentence
    assert effect.is_idle == ("this run is" in sentence)
