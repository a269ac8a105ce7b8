"""The facts of a run's folder are checked when they are read back."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedattune
from fedattune import RunError, read_runs
from fedattune.runs.result import Result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = fedattune.load_federation("digits", clients=3)
    folder = tmp_path_factory.mktemp("runs") / "run"
    fedattune.fit(data, "fedavg", rounds=1, out=folder)
    (folder / "SHA256SUMS").unlink()  # as a folder of an older version, or of somebody who removed it
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda facts: facts["clients"][1].update(n_train="<img src=x>"),
            "clients.1.n_train: .*'<img src=x>'",
        ),
        (lambda facts: facts["clients"][0].update(n_test=-1), "clients.0.n_test: .*-1"),
        (lambda facts: facts["clients"][0].update(id=7), "clients.0.id: .*7"),
        (lambda facts: facts.update(clients=[]), "clients: "),
        (lambda facts: facts.update(headline="best"), "headline: .*'best'"),
        (lambda facts: facts.update(notes="all is well"), "notes: "),
        (lambda facts: facts.update(classes=[0, 1]), "classes.0: "),
        (lambda facts: facts.update(input_shape="8x8"), "input_shape: "),
        (lambda facts: facts.pop("clients"), "clients: field required"),
    ],
)
def test_an_edited_entry_is_named(change: Any, said: str, run: Path) -> None:
    file = run / "result.json"
    before = file.read_text(encoding="utf-8")
    content = json.loads(before)
    change(content["facts"])
    file.write_text(json.dumps(content), encoding="utf-8")
    try:
        with pytest.raises(RunError, match=f"is damaged.*{said}"):
            Result.load(run)
        with pytest.raises(RunError, match=f"is damaged.*{said}"):
            read_runs([run])
    finally:
        file.write_text(before, encoding="utf-8")
    assert Result.load(run).metrics
