"""A folder has one writer at a time: a second one gets one sentence, and a killed one leaves no lock behind."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedattune
from cli_helpers import Done
from fedattune import RunError
from fedattune.core.lock import lock_folder

HOLD = """
import sys, time
from pathlib import Path
from fedattune.core.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """A living process that holds the lock of `run` in this folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_writer_is_told_who_writes(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=rf"run is being written by process {holder.pid} on .* since 20.*; wait for"),
        lock_folder(tmp_path / "run"),
    ):
        raise AssertionError
    data = fedattune.load_federation("digits", partition="iid", clients=3)
    with pytest.raises(RunError, match=f"written by process {holder.pid}"):
        fedattune.fit(data, "fedavg", rounds=1, out=tmp_path / "run", resume=True)


def test_resume_beside_a_live_run_is_one_sentence(cli: Callable[..., Done], work: Path) -> None:
    argv = "compare --data digits --partition iid --clients 3 --rounds 1 --algorithms local,fedavg --quiet --out run"
    assert cli(*argv.split()).code == 0
    with subprocess.Popen([sys.executable, "-c", HOLD, "run"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        done = cli("compare", "--resume", "run", "--quiet")
        process.kill()
    assert done.code == 2
    assert f"is being written by process {process.pid}" in done.err
    assert done.err.count("\n") == 1
