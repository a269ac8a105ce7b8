"""Faults, edges and the files of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedattune
from fedattune import ConfigError, Federation, ModelError, Result, RunError
from fedattune.training.sampling import sample_cohort

RUN: dict[str, Any] = {"rounds": 3, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1}


def test_a_client_that_diverges_is_dropped_named_and_harms_nobody(ragged: Federation) -> None:
    """One client's data is scaled until its training overflows; the others' models do not notice."""
    x = ragged.x.clone()
    x[ragged.clients[2].train] *= 1e30
    from dataclasses import replace

    broken = replace(ragged, x=x)
    for engine in ("sequential", "vectorized"):
        result = fedattune.fit(broken, "fedavg", "mlr", **(RUN | {"cohort": 6, "engine": engine}))
        assert {name for entry in result.history for name in entry["diverged"]} == {ragged.names[2]}
        assert f"training diverged on clients ({ragged.names[2]})" in result.notes[0]
        assert all(v.isfinite().all() for v in result.models.values())
        without = fedattune.fit(ragged, "local", "mlr", **RUN)
        alone = fedattune.fit(broken, "local", "mlr", **RUN)
        for k, v in alone.models.items():
            assert torch.equal(v[[0, 1, 3, 4, 5]], without.models[k][[0, 1, 3, 4, 5]])
            assert torch.equal(v[2], alone.models[k][2])


def test_when_all_diverge_the_run_says_what_to_do_and_keeps_finished_rounds(ragged: Federation, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"round 1: training diverged on every client .*lower the learning rate"):
        fedattune.fit(ragged, "fedavg", "dnn", **(RUN | {"lr": 1e38, "out": tmp_path / "run"}))


def test_options_models_and_settings_are_checked(ragged: Federation) -> None:
    with pytest.raises(ConfigError, match=r"needs a Federation, got list.*fedattune\.federation"):
        fedattune.fit([], "fedavg")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        fedattune.fit(ragged, "fedavgg")
    with pytest.raises(ConfigError, match="no option 'sigm'; did you mean 'sigma'"):
        fedattune.fit(ragged, "fedmcsa", options={"sigm": 1})
    with pytest.raises(ConfigError, match=r"fedmcsa.sigma.*greater than or equal to 0.*-1"):
        fedattune.fit(ragged, "fedmcsa", options={"sigma": -1})
    with pytest.raises(ConfigError, match="unknown setting 'round'; did you mean 'rounds'"):
        fedattune.fit(ragged, "fedavg", round=3)
    with pytest.raises(ConfigError, match="unknown setting 'callback'; did you mean 'callbacks'"):
        fedattune.fit(ragged, "fedavg", callback=[])
    with pytest.raises(
        ConfigError, match=r'upload_steps: expected "file\.py:Step", or several with commas between, got'
    ):
        fedattune.fit(ragged, "fedavg", upload_steps=[fedattune.UploadStep])
    with pytest.raises(ConfigError, match="not both"):
        fedattune.fit(ragged, "fedavg", steps=3, epochs=1)
    with pytest.raises(ConfigError, match="at most the 6"):
        fedattune.fit(ragged, "fedavg", cohort=7)
    with pytest.raises(ModelError, match="does not fit the data"):
        fedattune.fit(ragged, "fedavg", nn.Linear(4, 3))
    with pytest.raises(ModelError, match="expected 3 scores"):
        fedattune.fit(ragged, "fedavg", nn.Linear(5, 2))
    with pytest.raises(ConfigError, match=r"package\.module:factory"):
        fedattune.fit(ragged, "fedavg", "resnet")


@pytest.mark.parametrize(
    ("settings", "n", "first"),
    [
        ({"rounds": 49}, 49, [1, 2, 3]),
        ({"rounds": 50}, 25, [2, 4, 6]),
        ({"rounds": 74}, 37, [2, 4, 6]),
        ({"rounds": 100}, 25, [4, 8, 12]),
        ({"rounds": 101}, 26, [4, 8, 12]),
        ({"rounds": 100, "eval_every": 1}, 100, [1, 2, 3]),
    ],
)
def test_long_runs_are_evaluated_25_times_or_more(settings: dict[str, int], n: int, first: list[int]) -> None:
    made = fedattune.Settings(**settings)
    evaluated = [r for r in range(1, made.rounds + 1) if made.is_evaluated(r)]
    assert (len(evaluated), evaluated[:3], evaluated[-1]) == (n, first, made.rounds)


def test_a_run_says_how_often_it_is_evaluated_and_resumes_if_that_stays(ragged: Federation, tmp_path: Path) -> None:
    """Up to November 2026, the default was 1."""
    out, run = tmp_path / "run", RUN | {"rounds": 50, "steps": 1}
    fedattune.fit(ragged, "local", out=out, callbacks=[fedattune.OnRound(lambda p: p.round == 4)], eval_every=1, **run)
    with pytest.raises(RunError, match="eval_every was 1 and is 2"):
        fedattune.fit(ragged, "local", out=out, resume=True, **run)
    whole = fedattune.fit(ragged, "local", out=out, resume=True, eval_every=1, **run)
    assert len(whole.history) == 50
    result = fedattune.fit(ragged, "local", **run)
    assert [entry["round"] for entry in result.history] == list(range(2, 51, 2))
    assert (result.config["eval_every"], result.settings.eval_every) == (2, 2)


@pytest.mark.parametrize(
    ("steps", "batch", "said"), [(1, 2, "1 step of 2 rows sees 2 of"), (2, 1, "2 steps of 1 row sees 2 of")]
)
def test_a_run_says_how_few_rows_a_round_sees(ragged: Federation, steps: int, batch: int, said: str) -> None:
    result = fedattune.fit(ragged, "local", rounds=1, steps=steps, batch_size=batch)
    assert any(note.startswith(f"a round of {said} the ") for note in result.notes)


def test_cohorts_are_drawn_from_the_seed() -> None:
    settings = fedattune.Settings(rounds=50, cohort=0.3, seed=5)
    plan = [sample_cohort(settings, 20, r) for r in range(1, 51)]
    assert all(len(ids) == 6 and len(set(ids.tolist())) == 6 for ids in plan)
    longer = settings.replace(rounds=60)
    assert all(torch.equal(ids, sample_cohort(longer, 20, r)) for r, ids in enumerate(plan, 1))
    assert len({tuple(ids.tolist()) for ids in plan}) > 40
    assert any(not torch.equal(ids, sample_cohort(settings.replace(seed=6), 20, r)) for r, ids in enumerate(plan, 1))
    share = np.bincount(torch.cat(plan).numpy(), minlength=20) / 50
    assert share.min() > 0.05


def test_a_run_folder_is_read_back_and_not_taken_twice(ragged: Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = fedattune.fit(ragged, "fedmcsa", "dnn", model_options={"hidden": 4}, out=out, **RUN)
    read = Result.load(out)
    assert read.to_json() == made.to_json()
    assert json.loads((out / "result.json").read_text())["final"] == made.final
    assert {"torch", "numpy"} <= set(json.loads((out / "environment.json").read_text())["packages"])
    for round_, matrices in made.mixing.items():
        for component, matrix in matrices.items():
            rows = ~np.isnan(matrix).any(1)
            assert rows.sum() == RUN["cohort"]
            assert np.allclose(matrix[rows].sum(1), 1, atol=1e-6)
            assert np.array_equal(matrix, read.mixing[round_][component], equal_nan=True)
    assert set(made.mixing.last()) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    with pytest.raises(KeyError, match="no mixing matrices of round 77"):
        made.mixing[77]
    with pytest.raises(RunError, match="holds a run already"):
        fedattune.fit(ragged, "fedmcsa", "dnn", model_options={"hidden": 4}, out=out, **RUN)
    with pytest.raises(RunError, match=r"lr was 0\.1 and is 0\.2"):
        fedattune.fit(
            ragged, "fedmcsa", "dnn", model_options={"hidden": 4}, out=out, resume=True, **(RUN | {"lr": 0.2})
        )
    other = fedattune.algorithms.fedmcsa(sigma=7.0)  # the text of its definition is cut around this value
    with pytest.raises(RunError, match=r"definition was \.\.\..*sigma=.* and is .*sigma=7\.0"):
        fedattune.fit(ragged, other, "dnn", model_options={"hidden": 4}, out=out, resume=True, **RUN)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        fedattune.fit(ragged, "local", out=tmp_path / "used", **RUN)
    with pytest.raises(RunError, match="no finished run"):
        Result.load(tmp_path)


def test_personal_models_are_saved_and_loaded(ragged: Federation, tmp_path: Path) -> None:
    result = fedattune.fit(ragged, "fedmcsa", "dnn", model_options={"hidden": 4}, **RUN)
    files = result.save_models(tmp_path / "models")
    assert len(files) == ragged.n_clients
    with pytest.raises(RunError, match="no file is overwritten"):
        result.save_models(tmp_path / "models")
    x = ragged.features(torch.arange(9))
    for number, file in enumerate(files):
        model = fedattune.load_model(file)
        assert torch.equal(model(x), result.model(number)(x))
        assert torch.equal(model(x), result.model(ragged.names[number])(x))
    with pytest.raises(RunError, match="no client 'nobody'"):
        result.model("nobody")
    with pytest.raises(RunError, match="no client 6 "):
        result.model(6)
    own = nn.Sequential(nn.Linear(5, 3))
    mine = fedattune.fit(ragged, "fedavg", own, out=tmp_path / "run", **RUN)
    file = mine.save_models(tmp_path / "own")[0]
    with pytest.raises(RunError, match="of your own; give one as `module`"):
        fedattune.load_model(file)
    assert torch.equal(fedattune.load_model(file, own)(x), mine.model(0)(x))
    assert torch.equal(Result.load(tmp_path / "run").model(0, own)(x), mine.model(0)(x))
    with pytest.raises(RunError, match="does not fit the saved one"):
        fedattune.load_model(file, nn.Linear(5, 3))
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="no model that FedAttune saved"):
        fedattune.load_model(tmp_path / "other.safetensors")


class Normed(nn.Module):
    """A network with batch normalisation and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.stack(x) * self.temperature
        return out


class Frozen(nn.Module):
    """A frozen layer, tied weights, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5).requires_grad_(False)
        self.a = nn.Linear(5, 5, bias=False)
        self.b = nn.Linear(5, 5, bias=False)
        self.b.weight = self.a.weight
        self.head = nn.Linear(5, 3)
        self.register_buffer("shift", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.b(torch.relu(self.a(self.body(x))))) + self.shift
        return out


def test_frozen_layers_stay_and_tied_ones_stay_tied(ragged: Federation, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Frozen()
    before = net.body.weight.clone()
    net.eval()
    for name in ("local", "fedmcsa"):
        result = fedattune.fit(ragged, name, net, **RUN)
        assert result.n_parameters == 25 + 18
        assert set(result.models) == {"a.weight", "head.weight", "head.bias"}
        model = result.model(1)
        assert torch.equal(model.body.weight, before)  # type: ignore[union-attr]
        assert model.b.weight is model.a.weight  # type: ignore[union-attr]
        assert not torch.equal(model.a.weight, net.a.weight)  # type: ignore[union-attr,arg-type]
        file = result.save_models(tmp_path / name)[1]
        x = ragged.features(torch.arange(4))
        assert torch.equal(fedattune.load_model(file, Frozen())(x), model(x))
    assert not net.training


class Recurrent(nn.Module):
    """What cannot run as one batch of models."""

    def __init__(self, layer: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.net = layer(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.net(x[:, None])[0][:, 0])
        return out


def test_models_that_cannot_be_batched_run_one_by_one(ragged: Federation) -> None:
    assert fedattune.fit(ragged, "fedavg", Recurrent(), **RUN).is_finished
    # A GRU trains as one batch, but does not predict so.
    assert fedattune.fit(ragged, "local", Recurrent(nn.GRU), **RUN).is_finished
    with pytest.raises(ModelError, match=r"cannot be trained by the vectorized engine.*--engine auto"):
        fedattune.fit(ragged, "fedavg", Recurrent(), **(RUN | {"engine": "vectorized"}))
    with pytest.raises(ModelError, match="cannot be trained on batches of 1 samples"):
        fedattune.fit(ragged, "fedavg", Normed(), **(RUN | {"batch_size": 1}))
