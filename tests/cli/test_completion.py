"""`fedattune completion`: the scripts are valid, and complete what is typed."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done

Cli = Callable[..., Done]


@pytest.fixture(scope="module")
def scripts() -> dict[str, Path]:
    """Shell -> file of its script."""
    return {}


@pytest.fixture
def script(scripts: dict[str, Path], cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def write(shell: str) -> Path:
        if shell not in scripts:
            done = cli("completion", shell)
            assert done.code == 0, done.err
            scripts[shell] = tmp_path_factory.mktemp("scripts") / f"fedattune.{shell}"
            scripts[shell].write_text(done.out)
        return scripts[shell]

    return write


def complete_in_bash(file: Path, line: str, work: Path) -> list[str]:
    """Return what the tab key offers at the end of a line."""
    code = (
        f"source {file}; COMP_WORDS=({line.replace('|', ' ')}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); "
        "_shtab_fedattune; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=work, check=False)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected", "absent"),
    [
        ("fedattune comp", {"compare", "completion"}, {"run"}),
        ("fedattune compare --alg", {"--algorithm", "--algorithms"}, set()),
        ("fedattune compare --algorithms fedm", {"fedmcsa", "fedmcsa_no_mcsa"}, {"local"}),
        ("fedattune compare --algorithms local,fedm", {"local,fedmcsa", "local,fedmcsa_no_mcsa"}, {"fedmcsa"}),
        ("fedattune compare --model d", {"dnn", "digit_model"}, {"mlr"}),
        ("fedattune compare --data ./", {"./own.csv"}, {"./own.py"}),
        ("fedattune compare --model own", {"own.py"}, {"own.csv"}),
        ("fedattune compare --metric a", {"accuracy", "auc"}, {"f1"}),
        ("fedattune list mod", {"models"}, {"data"}),
        ("fedattune new a", {"algorithm"}, {"model"}),
    ],
)
def test_bash_completes(
    line: str, expected: set[str], absent: set[str], script: Callable[[str], Path], work: Path
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    for name in ("own.csv", "own.py"):
        (work / name).touch()
    found = set(complete_in_bash(script("bash"), line, work))
    assert expected <= found
    assert not absent & found
