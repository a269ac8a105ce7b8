"""The real MLflow and Weights & Biases log runs without a network; test_callbacks checks the calls with fakes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedattune
from fedattune import Federation, MLflow, OnRound, WandB

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the trackers are not ours

RUN: dict[str, Any] = {"rounds": 4, "steps": 1, "batch_size": 8, "lr": 0.1, "eval_every": 2}


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """MLflow with one database, which takes seconds to make."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'fedattune[mlflow]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/runs.db")
        yield mlflow


def test_mlflow_logs_into_a_file(mlflow: Any, ragged: Federation) -> None:
    result = fedattune.fit(ragged, "fedavg", callbacks=[MLflow("mine")], **RUN)
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "fedavg"
    assert run.data.metrics["final/acc_uniform"] == result.metrics["acc_uniform"]
    curve = mlflow.MlflowClient().get_metric_history(run.info.run_id, "test_received/acc_uniform")
    assert [(one.step, one.value) for one in curve] == [
        (entry["round"], entry["received"]["acc_uniform"]) for entry in result.history
    ]


def test_mlflow_continues_a_run(mlflow: Any, ragged: Federation, tmp_path: Path) -> None:
    def train(out: str, until: int = 4, *, resume: bool) -> None:
        stop = OnRound(lambda progress: progress.round == until)
        fedattune.fit(ragged, "fedavg", out=tmp_path / out, resume=resume, callbacks=[stop, MLflow("resumed")], **RUN)

    train("run", 2, resume=False)
    train("run", resume=True)
    (run,) = mlflow.search_runs(experiment_names=["resumed"], output_format="list")
    assert run.info.status == "FINISHED"
    curve = mlflow.MlflowClient().get_metric_history(run.info.run_id, "test_received/acc_uniform")
    assert [one.step for one in curve] == [2, 4]

    mlflow.delete_run(run.info.run_id)
    train("other", 2, resume=False)
    (tmp_path / "other" / "mlflow-run.txt").write_text(run.info.run_id)
    train("other", 3, resume=True)
    (tmp_path / "other" / "mlflow-run.txt").write_text("0" * 32)  # as of another server
    train("other", resume=True)
    runs = mlflow.search_runs(experiment_names=["resumed"], output_format="list")
    assert sorted(run.info.status for run in runs) == ["FINISHED", "KILLED", "KILLED"]


def test_wandb_logs_offline(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'fedattune[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = WandB("mine", mode="offline", dir=str(tmp_path))
    result = fedattune.fit(ragged, "fedavg", callbacks=[callback], **RUN)
    wandb.teardown()  # its process may write the end of the file after the run has finished
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    # Blocks of 32 kB, each with a header of seven bytes.
    written = b"".join(written[at + 7 * bool(at) : at + 32768] for at in range(0, len(written), 32768))
    assert b"test_received/acc_uniform" in written
    for value in (*(entry["received"]["acc_uniform"] for entry in result.history), result.metrics["acc_uniform"]):
        assert json.dumps(value).encode() in written


def test_wandb_leaves_the_users_run_open(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'fedattune[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="own", mode="offline", dir=str(tmp_path)) as own:
        callback = WandB("mine", mode="offline", dir=str(tmp_path))
        fedattune.fit(ragged, "fedavg", out=tmp_path / "run", callbacks=[callback], **RUN)
        assert wandb.run is own
        own.log({"a": 1})
    assert not (tmp_path / "run" / "wandb-run.txt").exists(), "W&B continues no run that is offline"
