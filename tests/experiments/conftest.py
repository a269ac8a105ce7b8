"""Fixtures of the tests of experiments."""

from typing import Any

import pytest

from cli_helpers import SLOW, numbers
from fedattune.cli import main


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Numbers of the slow comparison, without an interruption, in one process."""
    out = tmp_path_factory.mktemp("whole") / "o"
    assert main([*SLOW, "--processes", "1", "--out", str(out), "--quiet"]) == 0
    return numbers(out / "result.json")
