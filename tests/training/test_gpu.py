"""On a GPU, every method gives what it gives on the CPU. Skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedattune
from conformance.table import Case
from conformance.test_conformance import distance, every_method, fit, fit_once
from fedattune import Federation
from fedattune import engine as engines

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")


def picture_clients(n: int = 3, samples: int = 24) -> Federation:
    """Clients with small pictures of two shades."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(n):
        y = torch.randint(2, (samples,), generator=generator)
        x = torch.randn(samples, 3, 16, 16, generator=generator) + y[:, None, None, None]
        half = samples // 2
        clients.append({"train": (x[:half], y[:half]), "test": (x[half:], y[half:])})
    return fedattune.federation_from(clients)


@every_method
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_methods_agree_with_the_cpu(
    case: Case, engine: str, ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are captured as graphs, however few they are."""
    monkeypatch.setattr(engines, "MIN_COMPILED_STEPS", 0)
    on_cpu = fit_once(ragged, case.name, engine="sequential", options=case.same, device="cpu")
    on_gpu = fit(ragged, case.name, engine=engine, options=case.same, device="cuda")
    assert distance(on_cpu, on_gpu) < 1e-9
    assert on_cpu.bytes_up == on_gpu.bytes_up
    assert distance(on_gpu, fit(ragged, case.name, engine=engine, options=case.same, device="cuda")) < 1e-12


@every_method
def test_every_method_trains_everybody(case: Case, ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MIN_COMPILED_STEPS", 0)
    runs: dict[str, Any] = {"train": "all", "steps": None, "epochs": 2, "options": case.same}
    on_cpu = fit_once(ragged, case.name, engine="sequential", device="cpu", **runs)
    assert distance(on_cpu, fit(ragged, case.name, device="cuda", **runs)) < 1e-9


@pytest.mark.parametrize("attention", ["self", "time"])
def test_the_attention_of_igfl_is_kept_where_it_is_computed(attention: str, ragged: Federation) -> None:
    options = {"attention": attention}
    on_cpu, on_gpu = (fit(ragged, "igfl", device=device, options=options) for device in ("cpu", "cuda"))
    assert distance(on_cpu, on_gpu) < 1e-9


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedbn", "pfedla", "attune"])
@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_convolutions_and_batch_normalisation(method: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MIN_COMPILED_STEPS", 0)
    options = {"batch_norm": True} if model == "lenet" else {"width": 2, "stem": "3x3"}
    runs: dict[str, Any] = {"rounds": 2, "steps": 2, "batch_size": 6, "lr": 0.05, "dtype": "float64"}
    federation = picture_clients()
    on_cpu, on_gpu = (
        fedattune.fit(federation, method, model, model_options=options, cohort=1.0, device=device, **runs)
        for device in ("cpu", "cuda")
    )
    assert distance(on_cpu, on_gpu) < 1e-8


@pytest.mark.parametrize("work", [{"steps": 3}, {"steps": None, "epochs": 2}], ids=["steps", "epochs"])
def test_images_are_augmented_as_on_the_cpu(work: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MIN_COMPILED_STEPS", 0)
    runs: dict[str, Any] = {
        "rounds": 2,
        "batch_size": 5,
        "lr": 0.05,
        "dtype": "float64",
        "augment": "crop,flip",
        **work,
    }
    on_cpu, on_gpu = (fedattune.fit(picture_clients(), "fedavg", "mlr", device=d, **runs) for d in ("cpu", "cuda"))
    assert distance(on_cpu, on_gpu) < 1e-9


def test_steps_are_one_launch(ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(1), replay(graph)))
    fit(ragged, "pfedme", device="cuda", rounds=30, steps=3)
    assert len(replayed) >= 30 * 3


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "pfedla", "attune"])
def test_a_stopped_run_goes_on(method: str, ragged: Federation, tmp_path: Path) -> None:
    whole = fit(ragged, method, device="cuda")
    fit(ragged, method, device="cuda", out=tmp_path / "run", callbacks=[fedattune.OnRound(lambda _: True)])
    rest = fit(ragged, method, device="cuda", out=tmp_path / "run", resume=True)
    assert distance(whole, rest) == 0


def test_mixed_precision_learns(ragged: Federation) -> None:
    result = fit(ragged, "fedavg", device="cuda", dtype="float32", mixed_precision="bfloat16", rounds=20)
    start = fit(ragged, "fedavg", device="cuda", dtype="float32", rounds=1)
    assert result.metrics["loss_uniform"] < start.metrics["loss_uniform"]


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "attune"])
def test_models_come_back_to_the_cpu(method: str, ragged: Federation) -> None:
    """As those of a run that was read from its folder."""
    result = fit(ragged, method, device="cuda")
    index = torch.as_tensor(ragged.clients[0].test)
    with torch.no_grad():
        right = result.model(0)(ragged.features(index, torch.float64)).argmax(1) == ragged.y[index]
    assert right.double().mean().item() == result.measure_clients("accuracy")[0]
