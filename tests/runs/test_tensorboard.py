"""Event files for TensorBoard say what the result says, each round once, wherever and however often a run trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedattune
from fedattune import ConfigError, Federation, OnRound, Result, TensorBoard
from fedattune.cli import main
from fedattune.runs import callbacks
from fedattune.runs.store import RoundMixing
from fedattune.runs.tensorboard import mean_entropy, mean_own_weight

RUN: dict[str, Any] = {"rounds": 6, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "eval_every": 2}


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    found = [(event.step, event.value) for event in events.Scalars(tag)]
    assert len(dict(found)) == len(found), "a step that is there twice"
    return dict(found)


def agree(folder: Path, result: Result) -> EventAccumulator:
    """Everything logged is what the result has, of every evaluated round."""
    events = read(folder)
    told = {tag: scalars(events, tag) for tag in events.Tags()["scalars"]}
    assert set(told) >= {"test/acc_uniform", "test_trained/acc_worst10", "cost/bytes_up", "cost/seconds"}
    for entry in result.history:
        r = entry["round"]
        groups = {f"test_{point}": entry[point] for point in ("received", "trained")}
        groups |= {f"validation_{point}": numbers for point, numbers in (entry["validation"] or {}).items()}
        groups["test"] = entry[result.evaluation_point]
        groups["cost"] = {"bytes_up": entry["bytes"]["up"], "bytes_down": entry["bytes"]["down"]}
        if "global" in entry:
            groups["test_global"] = entry["global"]
        for group, numbers in groups.items():
            for name, value in numbers.items():
                assert told[f"{group}/{name}"][r] == pytest.approx(value, rel=1e-6)
    rounds = [entry["round"] for entry in result.history]
    assert all(list(steps) == rounds for tag, steps in told.items() if not tag.startswith("mixing"))
    return events


@pytest.mark.parametrize("name", ["fedavg", "fedmcsa", "local"])
def test_what_is_logged_is_what_the_result_has(name: str, ragged: Federation, tmp_path: Path) -> None:
    result = fedattune.fit(ragged, name, callbacks=[TensorBoard(tmp_path)], **RUN)
    events = agree(tmp_path, result)
    final = [client.trained for client in result.clients]
    last = events.Histograms("clients/trained")[-1]
    assert last.step == 6
    assert last.histogram_value.num == len(final)
    assert last.histogram_value.sum == pytest.approx(sum(one for one in final if one is not None))
    mixing = [tag for tag in events.Tags()["scalars"] if tag.startswith("mixing")]
    assert bool(mixing) == bool(len(result.mixing))
    for r in result.mixing:
        mixed = result.mixing.among(r)
        for component, matrix in mixed.weights.items():
            own = np.mean([matrix[i, mixed.columns.index(client)] for i, client in enumerate(mixed.rows)])
            assert scalars(events, f"mixing_own/{component}")[r] == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_has_every_round_once(before: bool, ragged: Federation, tmp_path: Path) -> None:
    """Also rounds that were trained before it was asked for."""
    out, seen = tmp_path / "run", []
    fedattune.fit(
        ragged,
        "fedmcsa",
        out=out,
        callbacks=[*[TensorBoard(out)] * before, OnRound(lambda p: seen.append(p.round) or seen[-1] == 5)],
        **RUN,
    )
    result = fedattune.fit(ragged, "fedmcsa", out=out, resume=True, callbacks=[TensorBoard()], **RUN)
    assert len(list(out.glob("events.out.tfevents.*"))) == 1 + before
    agree(out, result)


def test_own_weight_and_entropy() -> None:
    matrix = np.array([[1, 0, 0], [0.2, 0.4, 0.4]], dtype=np.float32)
    mixed = RoundMixing([7, 9], [7, 8, 9], {"w": matrix})
    assert mean_own_weight(mixed, matrix) == pytest.approx((1 + 0.4) / 2)
    assert mean_own_weight(RoundMixing([1, 2], [7, 8, 9], {"w": matrix}), matrix) == 0
    assert mean_entropy(np.full((3, 4), 0.25, dtype=np.float32)) == pytest.approx(np.log(4))
    assert mean_entropy(np.eye(5, dtype=np.float32)) == 0
    assert mean_entropy(np.zeros((2, 3), dtype=np.float32)) == 0


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    return lambda *argv: main([str(one) for one in argv])


SMALL = ("--data", "digits", "--clients", 4, "--rounds", 6, "--steps", 2, "--eval-every", 2, "--quiet")


@pytest.mark.parametrize("processes", [1, 2])
def test_all_runs_of_a_comparison_are_in_its_folder(
    processes: int, command: Callable[..., int], tmp_path: Path
) -> None:
    more = ("--algorithms", "local,fedmcsa", "--seeds", 2, "--processes", processes, "--tensorboard")
    assert command("compare", *SMALL, *more, "-o", "out") == 0
    for name in ("local", "fedmcsa"):
        for seed in (0, 1):
            folder = tmp_path / "out" / name / f"seed-{seed}"
            agree(folder, Result.load(folder))


def test_without_it_installed_nothing_is_begun(
    command: Callable[..., int],
    ragged: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    assert command("run", *SMALL, "--tensorboard", "-o", "out") == 2
    assert "pip install 'fedattune[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="TensorBoard is not installed"):
        TensorBoard(tmp_path / "events")
