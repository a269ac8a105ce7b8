"""The example notebook runs from its first cell to its last, and prints its results."""

import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # they would change with every run
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    printed = "".join(one["text"] for one in outputs if one["output_type"] == "stream" and one["name"] == "stdout")
    assert "fedmcsa  seed 1: mean 0." in printed
    assert "training alone" in printed
    assert "goes to clients with similar labels" in printed
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 3
    errors = [one["text"] for one in outputs if one["output_type"] == "stream" and one["name"] == "stderr"]
    assert not errors
