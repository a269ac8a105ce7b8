"""Optimizers, schedules and clipping as settings of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedattune
from fedattune import Federation
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.own import build_method
from fedattune.core.errors import ConfigError, ModelError
from fedattune.core.settings import Settings
from fedattune.experiments.plan import find_unfit
from fedattune.runs.folder import RunFolder
from fedattune.training.setup import make_schedule

RUN: dict[str, Any] = {"rounds": 3, "steps": 4, "batch_size": 8, "dtype": "float64", "early_stopping": "off"}

OWN_STEPS = {
    "apfl", "fedamp", "fedrep", "igfl", "igfl_c", "perfedavg", "pfedhn", "pfedme", "pfedme_mcsa", "scaffold", "vrl_sgd",
}  # fmt: skip
"""Methods whose local steps are part of the method; all others take every optimizer."""


def predictions(result: fedattune.Result) -> torch.Tensor:
    """All parameters of the first client's model."""
    model = result.model(result.clients[0].id)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True, "optimizer_state": "keep"},
        {"optimizer": "adam", "weight_decay": 0.1, "optimizer_state": "keep", "lr_schedule": "cosine"},
        {"optimizer": "adamw", "lr": 0.01, "max_grad_norm": 0.5, "lr_warmup": 2, "lr_schedule": "step"},
    ],
    ids=lambda one: str(next(iter(one))),
)
@pytest.mark.parametrize("method", ["fedprox", "ditto", "fedam", "fedala", "ifca", "fedfomo", "attune"])
def test_engines_agree(equal: Federation, method: str, settings: dict[str, Any]) -> None:
    results = [fedattune.fit(equal, method, "dnn", engine=e, **RUN, **settings) for e in ("sequential", "vectorized")]
    one, other = map(predictions, results)
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    plain = fedattune.fit(equal, method, "dnn", **RUN)
    assert not torch.allclose(one, predictions(plain), rtol=1e-3)


def test_every_method_takes_an_optimizer_or_says_why_not(equal: Federation) -> None:
    work = RUN | {"optimizer": "adam", "rounds": 1, "steps": 1}
    for name in OWN_STEPS:
        with pytest.raises(ConfigError, match="the method has local steps of its own"):
            fedattune.fit(equal, name, **work)
    for name in ALGORITHMS.keys() - OWN_STEPS:
        assert np.isfinite(fedattune.fit(equal, name, **work).metrics["loss_uniform"]), name


def test_the_message_names_the_own_step(equal: Federation) -> None:
    with pytest.raises(ConfigError, match=r"local steps of its own \(ControlVariateCorrection\); leave optimizer and"):
        fedattune.fit(equal, "scaffold", momentum=0.9)
    with pytest.raises(ConfigError, match=r"\(momentum of its own\)"):
        fedattune.fit(equal, "pfedhn", optimizer="adamw")
    assert (
        set(find_unfit({name: build_method(name, {}) for name in ALGORITHMS}, Settings(momentum=0.5), equal))
        == OWN_STEPS
    )
    with pytest.raises(ModelError, match="scaffold: optimizer: the method has local steps of its own"):
        fedattune.compare(equal, ["local", "scaffold"], optimizer="adam", quiet=True)


def test_training_alone_is_a_loop_of_pytorch(equal: Federation) -> None:
    """AdamW with a warm-up, a cosine and clipping, its state kept: the loop that a user of PyTorch writes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(equal.input_shape)), equal.n_outputs)).double()
    rows = torch.as_tensor(equal.part("train")[0])
    x, y = equal.features(rows, torch.float64), equal.y[rows]
    settings: dict[str, Any] = {
        "rounds": 6, "steps": 1, "batch_size": len(rows), "optimizer": "adamw", "lr": 0.05, "weight_decay": 0.2,
        "optimizer_state": "keep", "lr_schedule": "cosine", "lr_warmup": 2, "max_grad_norm": 0.3,
    }  # fmt: skip
    result = fedattune.fit(equal, "local", model, dtype="float64", early_stopping="off", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    schedule = make_schedule(Settings(**settings))
    assert schedule is not None
    for r in range(1, 7):
        optimizer.param_groups[0]["lr"] = 0.05 * float(schedule.factor(torch.tensor(float(r), dtype=torch.float64)))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3  # so that clipping acts
        optimizer.step()
    want = torch.cat([p.detach().flatten() for p in model.parameters()])
    # PyTorch adds 1e-6 to the norm by which it clips.
    torch.testing.assert_close(predictions(result), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_moved_in_the_round_before_moved_at_its_rate(equal: Federation, engine: str) -> None:
    """With all clients, VRL-SGD is SCAFFOLD, which divides by the rate within a round; schedules do not change that."""
    work = RUN | {"rounds": 5, "engine": engine, "lr_schedule": "step", "lr_step_size": 1, "lr_warmup": 2}
    one, other = (fedattune.fit(equal, name, "mlr", lr_gamma=0.3, lr=0.1, **work) for name in ("vrl_sgd", "scaffold"))
    torch.testing.assert_close(predictions(one), predictions(other), rtol=1e-9, atol=1e-11)


def test_a_kept_state_survives_a_resumed_run(equal: Federation, tmp_path: Path) -> None:
    settings = RUN | {"optimizer": "adam", "optimizer_state": "keep", "rounds": 4}
    whole = fedattune.fit(equal, "fedavg", **settings)
    stop = fedattune.OnRound(lambda progress: progress.round == 2)
    fedattune.fit(equal, "fedavg", out=tmp_path / "run", callbacks=[stop], **settings)
    resumed = fedattune.fit(equal, "fedavg", out=tmp_path / "run", resume=True, **settings)
    assert torch.equal(predictions(whole), predictions(resumed))
    restarted = fedattune.fit(equal, "fedavg", **settings | {"optimizer_state": "restart"})
    assert not torch.allclose(predictions(whole), predictions(restarted))


def test_clients_that_join_have_the_optimizer_of_the_run(equal: Federation) -> None:
    for method in ("ditto", "fedmcsa"):
        settings = RUN | {"optimizer": "adam", "optimizer_state": "keep", "lr_schedule": "cosine", "held_out": 1}
        result = fedattune.fit(equal, method, join_rounds=2, **settings)
        (joined,) = result.facts["newcomers"]
        assert 0 <= joined["trained"] <= 1


def test_a_folder_that_is_older_than_an_option_had_its_default(equal: Federation, tmp_path: Path) -> None:
    config = {"algorithm": "fedavg", "data": "digits", **Settings().to_keywords(mode="json")}
    older = {key: value for key, value in config.items() if key not in {"optimizer", "lr_schedule"}}
    RunFolder.open(tmp_path / "run", older, resume=False)
    RunFolder.open(tmp_path / "run", config, resume=True)
    with pytest.raises(fedattune.FedAttuneError, match="optimizer was 'sgd' and is 'adam'"):
        RunFolder.open(tmp_path / "run", {**config, "optimizer": "adam"}, resume=True)


def test_fine_tuning_uses_the_optimizer_at_its_full_rate(equal: Federation) -> None:
    """A cosine ends near zero; what adapts after training must not."""
    work = RUN | {"optimizer": "adam", "lr": 0.01, "lr_schedule": "step", "lr_step_size": 1, "lr_gamma": 1e-6}
    received, tuned = (predictions(fedattune.fit(equal, name, **work)) for name in ("fedavg", "fedavg_ft"))
    # A step of Adam moves a weight by nearly the rate.
    assert 0.01 < (tuned - received).abs().max() < 0.041


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"momentum": 0.9, "optimizer": "adam"}, "momentum: it needs optimizer sgd"),
        ({"nesterov": True}, "nesterov: it needs momentum"),
        ({"beta1": 0.5}, "beta1: it needs optimizer adam or adamw"),
        ({"eps": 1e-6}, "eps: it needs optimizer adam or adamw"),
        ({"lr_gamma": 0.5}, "lr_gamma: it needs lr_schedule step"),
        ({"optimizer_state": "keep"}, "optimizer_state: SGD without momentum has no state to keep; add momentum"),
        ({"optimizer": "rmsprop"}, "optimizer: input should be 'sgd', 'adam' or 'adamw', got 'rmsprop'"),
        ({"max_grad_norm": 0}, "max_grad_norm: input should be greater than 0"),
        ({"max_grad_norm": 1.0, "dp_record": 8.0}, "clipped to dp_record_clip already; leave max_grad_norm out"),
    ],
)
def test_options_without_use_are_refused(equal: Federation, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fedattune.fit(equal, "fedavg", **given)


def test_settings_and_keywords_choose_the_rate_together(equal: Federation) -> None:
    """Only what is given in the settings counts as given."""
    for settings, rate in ((Settings(rounds=1), 0.001), (Settings(rounds=1, lr=0.02), 0.02)):
        result = fedattune.fit(equal, "fedavg", settings=settings, optimizer="adam")
        assert result.settings.training.lr == rate


def test_adam_has_the_default_rate_of_torch() -> None:
    assert Settings(optimizer="adam").training.lr == 0.001 == Settings(optimizer="adamw").replace(rounds=3).training.lr
    assert Settings(optimizer="adam", lr=0.5).training.lr == 0.5
    assert Settings().training.lr == 0.02
