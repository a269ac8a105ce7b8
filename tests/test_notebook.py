"""The example notebook runs from its first cell to its last, and prints its results."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its cells are plain Python, so they need no kernel, which takes longer to start than they run."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    plt.close("all")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells)  # they would change with every run
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    said = capsys.readouterr()
    assert "fedmcsa  seed 1: mean 0." in said.out
    assert "the best alone" in said.out
    assert "goes to clients with similar labels" in said.out
    assert len(plt.get_fignums()) == 3
    assert not said.err
    plt.close("all")
