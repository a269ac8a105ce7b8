"""Commands of `fedattune deploy` on a written folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune.deploy.server.control import read_request
from flower.harness import ports

Cli = Callable[..., Done]


@pytest.fixture
def kit(cli: Cli, work: Path) -> Path:
    (work / "schema.yaml").write_text("classes: [a, b]\ninput_shape: [3]\n")
    words = [f"--{key.replace('_', '-')}={value}" for key, value in ports(2).items()]
    done = cli("deploy", "write", "--schema-file", "schema.yaml", "--nodes", 2, "--out", "d", *words)
    assert done.code == 0, done.err
    return work / "d"


def test_a_check_finds_what_is_missing_and_ends_with_code_1(cli: Cli, kit: Path) -> None:
    done = cli("deploy", "check", kit)
    assert done.code == 1
    assert "!!  certificates: ca.crt" in done.out
    assert "ok  schema: inputs of (3,), 2 classes" in done.out


@pytest.mark.parametrize("folder", ["d", "d/runs/deployment"])
def test_pause_abort_and_resume_write_and_take_back_a_request(cli: Cli, kit: Path, folder: str) -> None:
    run = kit / "runs" / "deployment"
    run.mkdir(parents=True)
    (run / "federation.json").write_text("{}")
    for action in ("pause", "abort"):
        assert cli("deploy", action, folder).code == 0
        assert read_request(run) == action
    assert cli("deploy", "resume", folder).code == 0
    assert read_request(run) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chek", "d"), "unknown command 'chek'; did you mean 'check'"),
        (("check",), "give FOLDER; see fedattune deploy check --help"),
        (("check", "none"), "none is no folder"),
        (("check", "."), "holds no deployment"),
        (("pause", "d"), "holds no run of a federation"),
        (("check", "d", "--rounds", 3), "unknown option --rounds; see fedattune deploy check --help"),
        (("nodes", "d"), "d/certificates/ca.crt: No such file or directory; run ./certificates.sh first"),
    ],
)
@pytest.mark.usefixtures("kit")
def test_what_cannot_be_is_one_sentence(cli: Cli, words: tuple[object, ...], message: str) -> None:
    done = cli("deploy", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err
