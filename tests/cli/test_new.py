"""`fedattune new`: the file works, and the printed command works as printed."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done, environment, refused

Cli = Callable[..., Done]


@pytest.mark.parametrize(
    ("template", "row"), [("algorithm", "my_algorithm"), ("model", "fedmcsa"), ("data", "fedavg_ft")]
)
def test_the_printed_command_works_as_printed(template: str, row: str, cli: Cli, work: Path) -> None:
    done = cli("new", template, f"my_{template}")
    assert done.code == 0, done.err
    assert f"my_{template}.py is a" in done.out
    command = done.out.splitlines()[-1]
    text = (work / f"my_{template}.py").read_text()
    assert "NAME" not in text
    program, *words = shlex.split(command)
    if program == "fedattune":
        ran = cli(*words)
    else:
        assert program == "python"
        process = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment(), check=False
        )
        ran = Done(process.returncode, process.stdout, process.stderr)
    assert ran.code == 0, ran.err
    assert any(line.split()[:1] == [row] for line in ran.out.splitlines())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("algorithm fedavg", "FedAttune uses this name itself"),
        ("algorithm all", "FedAttune uses this name itself"),
        ("model dnn", "FedAttune has a model of this name"),
        ("data json", "a Python module has this name"),
        ("data a-b", "expected a name of letters, digits and _, such as my_data"),
        ("data class", "expected a name of letters"),
        ("methd x", "unknown template 'methd'"),
        ("data taken", "taken.py exists, and no file is overwritten"),
        ("data taken.py", "taken.py exists, and no file is overwritten"),
        ("algorithm", "NAME"),
    ],
)
def test_what_cannot_be_is_one_sentence(argv: str, said: str, cli: Cli, work: Path) -> None:
    (work / "taken.py").write_text("mine")
    refused(cli("new", *argv.split()), said)
    assert (work / "taken.py").read_text() == "mine"
    assert [path.name for path in work.iterdir()] == ["taken.py"]
