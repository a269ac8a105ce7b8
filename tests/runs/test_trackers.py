"""The real MLflow and Weights & Biases log runs without a network; test_callbacks checks the calls with fakes."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedattune
from fedattune import Federation, MLflow, WandB

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the trackers are not ours

RUN: dict[str, Any] = {"rounds": 4, "steps": 1, "batch_size": 8, "lr": 0.1, "eval_every": 2}


def test_mlflow_logs_into_a_file(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'fedattune[mlflow]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    result = fedattune.fit(ragged, "fedavg", callbacks=[MLflow("mine")], **RUN)
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "fedavg"
    assert run.data.metrics["final/acc_uniform"] == result.metrics["acc_uniform"]
    curve = mlflow.MlflowClient().get_metric_history(run.info.run_id, "test_received/acc_uniform")
    assert [(one.step, one.value) for one in curve] == [
        (entry["round"], entry["received"]["acc_uniform"]) for entry in result.history
    ]


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
