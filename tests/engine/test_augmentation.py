"""Images of training batches are cropped and flipped by chance, alike in both engines, and never elsewhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_rounds import EACH, NETWORKS, make_clients, train_round

import fedattune
from fedattune import Federation
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.pfedme import PFedMeClient
from fedattune.client import SGD
from fedattune.core.optimizers import GradientDescent
from fedattune.core.settings import Settings
from fedattune.core.task import Task
from fedattune.data.augmentation import add_moves, move_images, split_moves
from fedattune.deploy.config import DeploymentPlan
from fedattune.engine.batches import LocalTraining
from fedattune.engine.runner import BatchSequence
from fedattune.engine.sequential import SequentialEngine
from fedattune.engine.vectorized import VectorizedEngine

pytestmark = pytest.mark.usefixtures("unmeasured")


def encode(top: int, left: int, is_flipped: bool) -> int:
    return 1 + (is_flipped * 9 + top) * 9 + left


def test_a_crop_one_pixel_down_and_right_and_its_flip() -> None:
    image = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]], dtype=torch.uint8)
    moves = [encode(5, 5, False), encode(5, 5, True), encode(3, 4, False), encode(4, 4, False), encode(0, 0, False)]
    moved = move_images(image.expand(5, 1, 2, 3), torch.tensor(moves))
    assert moved.dtype == torch.uint8
    assert moved[:, 0].tolist() == [
        [[5, 6, 0], [0, 0, 0]],
        [[0, 6, 5], [0, 0, 0]],
        [[0, 0, 0], [1, 2, 3]],
        [[1, 2, 3], [4, 5, 6]],
        [[0, 0, 0], [0, 0, 0]],
    ]


def test_every_move_is_a_padded_image_that_is_cropped_then_flipped() -> None:
    images = torch.arange(1.0, 2 * 3 * 5 * 6 + 1).view(2, 3, 5, 6)
    padded = F.pad(images, (4, 4, 4, 4))
    for is_flipped in (False, True):
        for top in range(9):
            for left in range(9):
                want = padded[:, :, top : top + 5, left : left + 6]
                want = want.flip(-1) if is_flipped else want
                moves = torch.full((2,), encode(top, left, is_flipped))
                assert torch.equal(move_images(images, moves), want)


@pytest.mark.parametrize(("kinds", "n_kinds"), [(("crop",), 81), (("flip",), 2), (("crop", "flip"), 162)])
def test_moves_are_drawn_evenly_and_leave_the_sample_numbers(kinds: Any, n_kinds: int) -> None:
    samples = np.concatenate([np.arange(32_400), [-1] * 8])
    numbers = add_moves(samples, kinds, np.random.default_rng(0))
    assert (numbers[-8:] == -1).all()
    plain, moves = split_moves(torch.from_numpy(numbers[:-8]))
    assert moves is not None
    assert plain.tolist() == samples[:-8].tolist()
    found, counts = moves.unique(return_counts=True)
    expected = 32_400 / n_kinds
    assert len(found) == n_kinds
    assert (counts - expected).abs().max() < 5 * expected**0.5
    assert kinds != ("flip",) or found.tolist() == [encode(4, 4, False), encode(4, 4, True)]
    assert split_moves(plain) == (plain, None)


def plan(**changes: Any) -> LocalTraining:
    given = {"seed": 0, "stream": 2, "round": 1, "lr": 0.05, "batch_size": 8, "epochs": 1} | changes
    return LocalTraining(**given)


def draw(training: LocalTraining, client: int = 0) -> Any:
    return training.choose_batches(SGD(), client, np.arange(30), np.arange(30, 34), {})[0]


def test_moves_repeat_with_seed_stream_round_and_client_alone_and_keep_the_batches() -> None:
    plain, moved = draw(plan()), draw(plan(augment=("crop", "flip")))
    assert (moved == draw(plan(augment=("crop", "flip")))).all()
    assert (np.where(moved < 0, -1, moved & (1 << 40) - 1) == plain).all()
    moves = {tuple((moved >> 40).ravel()[:30])}
    for changes in ({"seed": 1}, {"stream": 3}, {"round": 2}):
        moves.add(tuple((draw(plan(augment=("crop", "flip"), **changes)) >> 40).ravel()[:30]))
    moves.add(tuple((draw(plan(augment=("crop", "flip")), client=1) >> 40).ravel()[:30]))
    assert len(moves) == 5


@pytest.mark.parametrize("method", ["attune", "fedfomo", "ifca"])
def test_probed_rows_stay_as_they_are(method: str) -> None:
    rule = ALGORITHMS[method]().client
    for training in (plan(), plan(augment=("crop",))):
        batches, probed = training.choose_batches(rule, 0, np.arange(30), np.arange(30, 34), {})
        assert probed is not None
        assert (batches.max() >= 1 << 40) == bool(training.augment)
        assert probed.max() < 1 << 40


def images_of(data: Federation, numbers: Any) -> torch.Tensor:
    """Crop and flip with PyTorch's own functions, for a reference."""
    samples, moves = numbers & (1 << 40) - 1, (numbers >> 40) - 1
    out = []
    for sample, move in zip(samples.ravel().tolist(), moves.ravel().tolist(), strict=True):
        top, left = move // 9 % 9, move % 9
        image = F.pad(data.x[sample], (4, 4, 4, 4))[:, top : top + 8, left : left + 8]
        out.append(image.flip(-1) if move >= 81 else image)
    return torch.stack(out).view(*numbers.shape, *data.input_shape)


def test_both_engines_gather_the_same_images_bit_for_bit() -> None:
    data = make_clients([40, 13, 25])
    task = Task(NETWORKS["conv"]())
    training = plan(augment=("crop", "flip"), epochs=2)
    for client in range(3):
        rows = data.part("train")[client]
        numbers = training.choose_batches(SGD(), client, rows, rows[:0], {})[0]
        in_lanes = BatchSequence(numbers, data, task.params["0.weight"].dtype)
        for t, index in enumerate(numbers):
            one_by_one = SequentialEngine(task, data)._at(index)
            together = in_lanes.gather(t)
            assert len(one_by_one) == len(together)
            assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))
            real = index[0] >= 0
            assert torch.equal(one_by_one[0][torch.from_numpy(real)], images_of(data, index[0][real]))


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("work", [{"steps": 5}, {"epochs": 2}], ids=["steps", "epochs"])
def test_recorded_steps_give_what_the_reference_gives(kind: str, name: str, work: dict[str, int]) -> None:
    torch.manual_seed(0)
    data, task = make_clients([40, 13, 90]), Task(NETWORKS[name]().double())
    more = {**work, "drop_last": task.has_batch_statistics, "augment": ("crop", "flip")}
    for rule in (
        (SGD(optimizer=GradientDescent(momentum=0.9)), PFedMeClient(0.5, 2, 0.02)) if name == "mlp" else (SGD(),)
    ):
        engine = VectorizedEngine(task, data, **EACH[kind])
        want, got = (train_round(e, task, 3, rule, **more) for e in (SequentialEngine(task, data), engine))
        plain = train_round(engine, task, 3, rule, **{**more, "augment": ()})
        assert all(step.operations for step in engine._compiler._steps.values())
        for k in want.upload.params:
            torch.testing.assert_close(want.upload.params[k], got.upload.params[k], rtol=1e-10, atol=1e-12)
        assert any(not torch.equal(plain.upload.params[k], got.upload.params[k]) for k in plain.upload.params)


@pytest.mark.parametrize("more", [{}, {"dp_record_noise": 1.0}], ids=["plain", "private records"])
def test_runs_agree_and_evaluate_images_as_they_are(more: dict[str, Any]) -> None:
    data = make_clients([40, 24])
    runs: dict[str, Any] = {"rounds": 2, "steps": 3, "augment": "flip, crop", "dtype": "float64", **more}
    one, two = (fedattune.fit(data, "perfedavg", "mlr", engine=e, **runs) for e in ("sequential", "vectorized"))
    assert one.settings.training.augment == "crop,flip"
    for client in range(2):
        index = torch.as_tensor(data.clients[client].test)
        outputs = [run.model(client)(data.features(index, torch.float64)) for run in (one, two)]
        torch.testing.assert_close(*outputs)
        right = (outputs[0].argmax(1) == data.y[index]).double().mean().item()
        assert right == one.measure_clients("accuracy")[client]


@pytest.mark.parametrize("text", ["on", "crop,turn", "off,crop", ""])
def test_an_unknown_augmentation_is_refused(text: str) -> None:
    with pytest.raises(fedattune.ConfigError, match="augment: expected off, crop, flip or crop,flip, got"):
        Settings.from_keywords(augment=text)


@pytest.mark.parametrize(("text", "kinds"), [(False, ()), ("flip", ("flip",)), ("flip,crop", ("crop", "flip"))])
def test_augmentations_are_read(text: Any, kinds: Sequence[str]) -> None:
    assert Settings(augment=text).training.augmentations == kinds


def test_nodes_of_a_deployment_augment_their_images() -> None:
    plan = DeploymentPlan({"algorithms": "fedavg", "augment": "flip"})
    assert plan.settings(0).training.augmentations == ("flip",)


def test_inputs_that_are_no_images_are_refused() -> None:
    x, y = torch.rand(24, 5), torch.arange(24) % 2
    data = fedattune.federation_from([(x, y), (x + 1, y)])
    with pytest.raises(fedattune.ConfigError, match=r"augment: flip is for images .* have the shape \(5,\)"):
        fedattune.fit(data, "fedavg", augment="flip", rounds=1)
