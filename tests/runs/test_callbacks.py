"""Callbacks are called in order with what happened, can stop a run, and log to trackers, here to fakes of them."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

import fedattune
from fedattune import Callback, ConfigError, EarlyStop, Federation, MLflow, OnRound, WandB
from fedattune.cli import main
from fedattune.runs import callbacks as module

RUN: dict[str, Any] = {"rounds": 4, "steps": 1, "batch_size": 8, "lr": 0.1, "eval_every": 2}
SMALL = ("--clients", "4", "--rounds", "2", "--steps", "1", "--quiet")


class Recorder(Callback):
    """Note every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.scores: dict[int, Any] = {}

    def on_fit_start(self, run: module.StartedRun) -> None:
        self.calls.append(("start", run.title, run.folder))

    def on_evaluate(self, round_: int, scores: module.Scores) -> None:
        self.calls.append(("evaluate", round_))
        self.scores[round_] = scores

    def on_round_end(self, progress: fedattune.Progress, server_state: Any) -> None:
        assert server_state is not None
        self.calls.append(("round", progress.round))

    def on_fit_end(self, result: fedattune.Result) -> None:
        self.calls.append(("end", result.is_finished, result.rounds))

    def close(self) -> None:
        self.calls.append("close")


def test_all_methods_are_called_in_order(ragged: Federation, tmp_path: Path) -> None:
    seen = Recorder()
    out = tmp_path / "run"
    result = fedattune.fit(ragged, "fedavg", out=out, callbacks=[seen], **RUN)
    rounds = [call[:2] if isinstance(call, tuple) else call for call in seen.calls]
    assert rounds == [
        ("start", "fedavg, seed 0"),
        ("round", 1),
        ("evaluate", 2),
        ("round", 2),
        ("round", 3),
        ("evaluate", 4),
        ("round", 4),
        ("end", True),
        "close",
    ]
    assert seen.calls[0][2] == out
    for entry in result.history:
        assert seen.scores[entry["round"]]["test_trained"] == entry["trained"]
        assert seen.scores[entry["round"]]["test_received"] == entry["received"]
    again = Recorder()
    fedattune.fit(ragged, "fedavg", out=out, resume=True, callbacks=[again], **RUN)
    assert not again.calls


def test_the_title_names_the_split() -> None:
    seen = Recorder()
    data = fedattune.load_federation("digits", partition="dirichlet", clients=4, split_number=2)
    fedattune.fit(data, "local", callbacks=[seen], **RUN)
    assert seen.calls[0][1] == "local, seed 0, split 2"


def test_a_callback_stops_a_run_that_can_be_resumed(ragged: Federation, tmp_path: Path) -> None:
    seen, out = Recorder(), tmp_path / "run"
    stop = OnRound(lambda progress: progress.round == 2)
    stopped = fedattune.fit(ragged, "fedavg", out=out, callbacks=[stop, seen], **RUN)
    assert not stopped.is_finished
    assert seen.calls[-2:] == [("end", False, 2), "close"]
    resumed = fedattune.fit(ragged, "fedavg", out=out, resume=True, **RUN)
    assert resumed.metrics == fedattune.fit(ragged, "fedavg", **RUN).metrics


def test_an_error_in_a_callback_ends_the_run_and_closes_all(ragged: Federation) -> None:
    def fail(progress: fedattune.Progress) -> None:
        raise ValueError("mine")

    seen = Recorder()
    with pytest.raises(ValueError, match="mine"):
        fedattune.fit(ragged, "fedavg", callbacks=[seen, OnRound(fail)], **RUN)
    assert seen.calls[-1] == "close"
    assert not [call for call in seen.calls if call[0] == "end"]


class Unreachable(Recorder):
    """Cannot be closed."""

    def close(self) -> None:
        raise OSError("the server is gone")


def test_all_are_closed_and_the_first_error_is_raised(ragged: Federation) -> None:
    def fail(progress: fedattune.Progress) -> None:
        raise ValueError("mine")

    for others, first, notes in (
        ([], OSError, ["Unreachable.close: OSError: the server is gone"]),
        ([OnRound(fail)], ValueError, ["Unreachable.close: OSError: the server is gone"] * 2),
    ):
        seen = Recorder()
        with pytest.raises(first) as caught:
            fedattune.fit(ragged, "fedavg", callbacks=[Unreachable(), *others, Unreachable(), seen], **RUN)
        assert caught.value.__notes__ == notes
        assert seen.calls[-1] == "close"


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ([EarlyStop(), lambda _: None], "a function object"),
        ([object()], "an object object"),
        ([EarlyStop], "the class EarlyStop"),
        (EarlyStop(), "an EarlyStop object"),
        (None, "a NoneType object"),
    ],
)
def test_what_is_no_list_of_callbacks_is_refused_at_once(given: Any, got: str, ragged: Federation) -> None:
    said = rf"callbacks: got {got}, expected a list of .* derive from fedattune\.Callback; .*write OnRound\(function\)"
    for train in (fedattune.fit, fedattune.compare):
        with pytest.raises(ConfigError, match=said):
            train(ragged, "fedavg", callbacks=given, **RUN)


def test_early_stop_waits_for_its_patience() -> None:
    data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
    rounds = fedattune.fit(
        data, "fedavg", rounds=20, steps=1, lr=1e-9, eval_every=1, callbacks=[EarlyStop(2, min_decrease=0.1)]
    ).rounds
    assert rounds == 3  # the first one is the minimum
    with pytest.raises(ConfigError, match="patience 0, expected at least 1"):
        EarlyStop(0)


def test_early_stop_needs_validation_data() -> None:
    data = fedattune.load_federation("digits", partition="dirichlet", clients=4, validation=0)
    with pytest.raises(ConfigError, match="needs validation data"):
        fedattune.fit(data, "fedavg", callbacks=[EarlyStop()], **RUN)


def test_compare_gives_each_run_to_the_callbacks(ragged: Federation) -> None:
    seen = Recorder()
    fedattune.compare(ragged, ["fedavg"], callbacks=[seen], **RUN)
    starts = [call[1] for call in seen.calls if call[0] == "start"]
    assert starts == ["local, seed 0", "fedavg, seed 0"]


class FakeTracker(ModuleType):
    """A module that notes every call of its functions."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls = calls
        self.id, self.offline, self.info = "7", False, SimpleNamespace(run_id="7")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append((name, args, keywords))
            return self

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    def install(name: str) -> list[Any]:
        calls: list[Any] = []
        monkeypatch.setitem(sys.modules, name, FakeTracker(name, calls))
        return calls

    return install


def test_mlflow(fake: Callable[[str], list[Any]], ragged: Federation) -> None:
    calls = fake("mlflow")
    result = fedattune.fit(ragged, "fedavg", callbacks=[MLflow("mine", tags={"a": 1})], **RUN)
    assert [name for name, *_ in calls] == [
        "set_experiment",
        "start_run",
        "log_params",
        "log_metrics",
        "log_metrics",
        "log_metrics",
        "end_run",
    ]
    assert calls[1][2] == {"run_name": "fedavg, seed 0", "tags": {"a": 1}}
    assert calls[2][1][0]["algorithm"] == "fedavg"
    assert calls[4][2] == {"step": 4}
    assert calls[5][1][0]["final/acc_uniform"] == result.metrics["acc_uniform"]
    assert calls[6][1] == ("FINISHED",)


def test_wandb(fake: Callable[[str], list[Any]], ragged: Federation) -> None:
    calls = fake("wandb")

    class FakeRun(FakeTracker):
        summary: ClassVar[dict[str, Any]] = {}

    run = FakeRun("run", calls)
    sys.modules["wandb"].init = lambda **keywords: calls.append(("init", (), keywords)) or run  # type: ignore[attr-defined]
    fedattune.fit(ragged, "fedavg", callbacks=[WandB(mode="offline")], **RUN)
    assert calls[0][2]["reinit"] == "create_new"
    assert [name for name, *_ in calls] == ["init", "log", "log", "finish"]
    assert calls[0][2]["project"] == "fedattune"
    assert calls[0][2]["mode"] == "offline"
    assert calls[1][2] == {"step": 2}
    assert calls[3][2] == {"exit_code": 0}
    assert "acc_uniform" in run.summary


def train_in_two_parts(data: Federation, out: Path, callback: Callback) -> None:
    """Stop the run after its second round, and resume it."""
    stop = OnRound(lambda progress: progress.round == 2)
    fedattune.fit(data, "fedavg", out=out, callbacks=[stop, callback], **RUN)
    fedattune.fit(data, "fedavg", out=out, resume=True, callbacks=[callback], **RUN)


@pytest.mark.parametrize(
    ("kind", "package", "function", "known"),
    [(MLflow, "mlflow", "start_run", {"run_id": "7"}), (WandB, "wandb", "init", {"id": "7", "resume": "allow"})],
)
def test_a_resumed_run_continues_the_run_of_the_tracker(
    kind: Any,
    package: str,
    function: str,
    known: dict[str, str],
    fake: Callable[[str], list[Any]],
    ragged: Federation,
    tmp_path: Path,
) -> None:
    def list_starts() -> list[dict[str, Any]]:
        return [{key: keywords.get(key) for key in known} for name, _, keywords in calls if name == function]

    calls, nothing = fake(package), dict.fromkeys(known)
    sys.modules[package].summary = {}  # type: ignore[attr-defined]
    train_in_two_parts(ragged, tmp_path / "run", kind())
    assert list_starts() == [nothing, known]
    calls.clear()
    train_in_two_parts(ragged, tmp_path / "other", kind(**{next(iter(known)): "5"}))
    assert [one[next(iter(known))] for one in list_starts()] == ["5", "5"], "the user's own id counts"
    assert (tmp_path / "other" / f"{package}-run.txt").read_text() == "7"
    for run in (tmp_path / "run", tmp_path / "other"):
        assert fedattune.Result.load(run).is_finished


@pytest.mark.parametrize(("kind", "package", "function"), [(MLflow, "mlflow", "start_run"), (WandB, "wandb", "init")])
def test_a_run_that_the_tracker_does_not_know_starts_anew(
    kind: Any,
    package: str,
    function: str,
    fake: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    ragged: Federation,
    tmp_path: Path,
) -> None:
    calls = fake(package)
    tracker = sys.modules[package]

    def start(**keywords: Any) -> Any:
        if {"id", "run_id"} & keywords.keys():
            raise LookupError("no such run")
        calls.append((function, (), keywords))
        return tracker

    monkeypatch.setattr(tracker, function, start, raising=False)
    monkeypatch.setattr(tracker, "summary", {}, raising=False)
    train_in_two_parts(ragged, tmp_path / "run", kind())
    assert [name for name, *_ in calls].count(function) == 2


@pytest.mark.parametrize(
    ("kind", "package", "function", "advice"),
    [
        (
            MLflow,
            "mlflow",
            "set_experiment",
            "MLflow: OSError: refused; check MLFLOW_TRACKING_URI, or leave --mlflow out",
        ),
        (
            WandB,
            "wandb",
            "init",
            "Biases: OSError: refused; check the connection and wandb login, or leave --wandb out",
        ),
    ],
    ids=["mlflow", "wandb"],
)
def test_a_tracker_that_cannot_be_reached_is_one_sentence(
    kind: Any,
    package: str,
    function: str,
    advice: str,
    fake: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    ragged: Federation,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("refused")

    fake(package)
    monkeypatch.setattr(sys.modules[package], function, refuse, raising=False)
    with pytest.raises(ConfigError, match=advice):
        fedattune.fit(ragged, "fedavg", callbacks=[kind()], **RUN)


def test_trackers_learn_no_folder_of_the_machine(
    fake: Callable[[str], list[Any]], ragged: Federation, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from fedattune.algorithms.fedavg import fedavg\n"
        "from torch import nn\n"
        "def mine(): return fedavg()\n"
        "def net(shape, n_classes): return nn.Linear(*shape, n_classes)\n"
        "def loss(logits, y): return nn.functional.cross_entropy(logits, y, reduction='none')\n"
    )
    mlflow, wandb = fake("mlflow"), fake("wandb")
    sys.modules["wandb"].summary = {}  # type: ignore[attr-defined]
    seen = Recorder()
    result = fedattune.fit(
        ragged, f"{file}:mine", f"{file}:net", loss=f"{file}:loss", callbacks=[MLflow(), WandB(), seen], **RUN
    )
    sent = mlflow[2][1][0], wandb[0][2]["config"]
    for config in sent:
        assert (config["algorithm_source"], config["model"], config["loss"]) == (
            "own.py:mine",
            "own.py:net",
            "own.py:loss",
        )
        assert str(tmp_path) not in str(config)
    assert result.config["algorithm_source"] == f"{file}:mine"


def test_the_command_logs_every_run(
    fake: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = fake("mlflow")
    assert main(["compare", *SMALL, "--algorithms", "fedavg", "--mlflow", "--processes", "1", "-o", "o"]) == 0
    assert [args[0] for name, args, _ in calls if name == "end_run"] == ["FINISHED", "FINISHED"]


@pytest.mark.parametrize(("kind", "package"), [(MLflow, "mlflow"), (WandB, "wandb")])
def test_a_missing_tracker_is_one_sentence(
    kind: Any, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"is not installed; pip install 'fedattune\[{package}\]'"):
        kind()
    assert main(["run", *SMALL, f"--{package}"]) == 2
    assert f"pip install 'fedattune[{package}]'" in capsys.readouterr().err
