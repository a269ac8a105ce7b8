"""Finished files of a run are compared with their checksums: an edited, swapped or lost one is named."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import fedattune
from cli_helpers import Done, numbers
from fedattune import Federation, RunError, read_runs
from fedattune.runs.folder import CHECKSUM_FILE, RunFolder, read_checksums
from fedattune.runs.result import Result

RUN = {"rounds": 3, "lr": 0.1, "steps": 2}
SEALED = {
    "config.json", "environment.json", "facts.json", "inputs.safetensors", "metrics.sqlite", "models.safetensors",
    "predictions.safetensors", "result.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    fedattune.fit(fedattune.load_federation("digits", clients=3), "fedmcsa", out=folder, **RUN)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("name", sorted(SEALED - {"facts.json", "environment.json"}))
def test_an_edited_file_is_named_with_what_to_do(name: str, run: Path) -> None:
    content = bytearray((run / name).read_bytes())
    content[-9] ^= 1
    (run / name).write_bytes(content)
    advice = (
        "train the run again" if name in ("config.json", "metrics.sqlite") else "resume the run, which writes it again"
    )
    with pytest.raises(RunError, match=rf"{name} is not as the run wrote it: .*restore it from a copy, or .*{advice}"):
        Result.load(run)
    (run / name).unlink()
    with pytest.raises(RunError, match=f"{name} is missing|holds no finished run"):
        Result.load(run)


def test_a_foreign_file_and_a_broken_list_are_named(run: Path) -> None:
    lines = (run / CHECKSUM_FILE).read_text().splitlines(keepends=True)
    (run / CHECKSUM_FILE).write_text("".join(line for line in lines if "predictions" not in line))
    with pytest.raises(RunError, match=r"predictions\.safetensors is no file that the run wrote"):
        read_runs([run])
    (run / CHECKSUM_FILE).write_text("x")
    with pytest.raises(RunError, match=r"SHA256SUMS is damaged: expected lines .* write it again by sha256sum"):
        read_runs([run])
    (run / CHECKSUM_FILE).unlink()
    with pytest.raises(RunError, match="SHA256SUMS is missing; restore it from a copy"):
        Result.load(run)


def test_what_a_run_can_write_again_is_the_same_again(finished: Path, run: Path) -> None:
    data = fedattune.load_federation("digits", clients=3)
    for name in ("models.safetensors", "predictions.safetensors", "inputs.safetensors", "facts.json"):
        (run / name).write_bytes(b"")
    (run / "result.json").unlink()
    fedattune.fit(data, "fedmcsa", out=run, resume=True, **RUN)
    assert numbers(run / "result.json") == numbers(finished / "result.json")
    for name in ("models.safetensors", "predictions.safetensors", "facts.json"):
        assert (run / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "damage"), [("fedmcsa", None), ("fedavg", None), ("fedavg", b""), ("perfedavg", b""), ("fedavg", b"swap")]
)
def test_models_that_no_checkpoint_holds_are_the_same_again(
    name: str, damage: bytes | None, ragged: Federation, tmp_path: Path
) -> None:
    """Without early stopping, none are kept: they come from their file, or from another evaluation."""
    out = tmp_path / "run"
    given = RUN | {"early_stopping": "off", "out": out}
    whole = fedattune.fit(ragged, name, **given)
    files = {file: (out / file).read_bytes() for file in ("models.safetensors", "predictions.safetensors")}
    before = numbers(out / "result.json")
    if damage is not None:
        content = bytearray(files["models.safetensors"])
        content[-1] ^= 64  # a file that can be read, with another model
        (out / "models.safetensors").write_bytes(content if damage else damage)
    (out / "result.json").unlink()
    (out / "predictions.safetensors").unlink()
    again = fedattune.fit(ragged, name, resume=True, **given)
    assert {file: (out / file).read_bytes() for file in files} == files
    assert numbers(out / "result.json") == before
    assert again.predictions.keys() == whole.predictions.keys()


def test_models_that_nothing_can_make_again_are_said_to_be_lost(ragged: Federation, tmp_path: Path) -> None:
    """The models of `fedmcsa` after local training are in no checkpoint: the clients hold mixtures already."""
    given = RUN | {"early_stopping": "off", "out": tmp_path}
    whole = fedattune.fit(ragged, "fedmcsa", **given)
    (tmp_path / "models.safetensors").write_bytes(b"")
    (tmp_path / "result.json").unlink()
    (tmp_path / "predictions.safetensors").unlink()
    again = fedattune.fit(ragged, "fedmcsa", resume=True, **given)
    assert again.metrics == whole.metrics
    assert not again.predictions
    assert any("fedmcsa: the models of the last round are lost" in note for note in again.notes)
    assert not (tmp_path / "models.safetensors").exists()


def test_edited_numbers_are_not_signed_again(run: Path) -> None:
    """Who removes the result to have it written again gets no new checksum for a store that somebody edited."""
    data = fedattune.load_federation("digits", clients=3)
    (run / "result.json").unlink()
    db = sqlite3.connect(run / "metrics.sqlite")
    db.execute("UPDATE evaluations SET scores = (SELECT scores FROM evaluations WHERE round = 2) WHERE round = 1")
    db.commit()
    db.close()
    with pytest.raises(RunError, match=r"metrics\.sqlite is not as the run wrote it"):
        fedattune.fit(data, "fedmcsa", out=run, resume=True, **RUN)


def test_a_folder_of_another_version_says_what_it_lacks(run: Path) -> None:
    content = json.loads((run / "result.json").read_text("utf-8"))
    del content["facts"]["clients"]
    RunFolder(run).finish(content)
    with pytest.raises(RunError, match=r"result\.json is of another version of FedAttune: it lacks clients"):
        Result.load(run)


def test_a_comparison_has_a_list_of_its_own(cli: Callable[..., Done]) -> None:
    fast = ("--data", "digits", "--clients", 5, "--rounds", 1, "--steps", 1, "--quiet")
    assert cli("compare", *fast, "--algorithms", "fedavg", "--out", "o").code == 0
    names = {"experiment.yaml", "command.txt", "partition.json", "result.json", "notes.json"}
    assert names < set(read_checksums(Path("o")) or ())
    first = numbers(Path("o/result.json"))
    baseline = Path("o/baselines/majority/split-0/baseline.json")
    baseline.write_text(baseline.read_text().replace('"seconds": 0', '"seconds": 9'))
    for words in ("report o", "table o", "compare --resume o"):
        done = cli(*words.split())
        assert done.code == 2
        assert f"{baseline} is not as the run wrote it" in done.err
        assert "remove o/baselines/majority/split-0 and resume the comparison, which makes it again" in done.err
    shutil.rmtree(baseline.parent)
    assert cli("compare", "--resume", "o", "--quiet").code == 0
    assert numbers(Path("o/result.json")) == first
    notes = Path("o/notes.json")
    notes.write_text(json.dumps(["all is well"]))
    assert "notes.json is not as the run wrote it" in cli("report", "o").err
    assert cli("compare", "--resume", "o", "--quiet").code == 0
    assert cli("report", "o").code == 0
