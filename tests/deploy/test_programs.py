"""Flower's programs with shorter pauses: the names that are replaced are those that Flower uses."""

import subprocess
import sys

import pytest

from fedattune import ConfigError
from fedattune.deploy.operate import programs

pytest.importorskip("flwr")


def run_python(code: str) -> str:
    """Run code in a process of its own: replaced names stay replaced."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_the_superlink_gives_an_upload_up_after_a_minute() -> None:
    assert programs.UPLOAD_TTL_S == 60
    found = run_python(
        "from fedattune.deploy.operate import programs\n"
        "programs._shorten_uploads()\n"
        "from flwr.supercore.corestate import sql_corestate, in_memory_corestate\n"
        "print([m.OBJECT_PUSH_SESSION_TTL_SECONDS for m in (sql_corestate, in_memory_corestate)])"
    )
    assert found == "[60, 60]"


def test_a_node_sleeps_as_long_as_it_is_told() -> None:
    found = run_python(
        "from fedattune.deploy.operate import programs\n"
        "import time; slept = []; time.sleep = slept.append\n"
        "programs._shorten_pauses(0.25)\n"
        "from flwr.supernode import start_client_internal as node\n"
        "node.time.sleep(3); node.time.sleep(1)\n"
        "print(slept == [0.25, programs.TASK_POLL_S], node.subprocess.Popen is programs._start_program)"
    )
    assert found == "True True"


@pytest.mark.parametrize("text", ["0", "soon", "1e9", "-1", "nan"])
def test_a_pause_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDATTUNE_POLL", text)
    with pytest.raises(ConfigError, match=r"FEDATTUNE_POLL: got .*, expected seconds between 0.01 and 60"):
        programs._read_seconds("FEDATTUNE_POLL", 0.5, 0.01, 60)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('no model')", 1, "ValueError: no model"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no key')", 1, ""),
        ("raise SystemExit", 0, ""),
        ("pass", 0, ""),
    ],
)
def test_a_fork_ends_with_the_code_of_its_app(end: str, code: int, said: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from fedattune.deploy.operate import programs\ndef main(*_):\n    {end}\nprograms.main = main\n"
            "programs._run_fork('flwr-clientapp', [], [])",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert said in done.stderr
