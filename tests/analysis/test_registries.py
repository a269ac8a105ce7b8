"""A custom metric and a custom table format: one file and one registration each, on the command line and in Python."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done
from fedattune import ConfigError, read_runs, register_metric
from fedattune.core.metrics import METRICS, check_metric

CODE = """
from fedattune import register_format, register_metric

@register_metric("errors", is_higher_better=False)
def errors(y, logits):
    return float((logits.argmax(axis=1) != y).sum())

@register_format(".tsv")
def tsv(runs, columns):
    return "".join(f"{row.algorithm}\\t{row.metric}\\n" for row in runs.rows)

def bare(y, logits):
    return 0.0
"""
FAST = ("--data", "digits", "--clients", 5, "--rounds", 1, "--steps", 1, "--quiet")


@pytest.fixture
def code(cli: Callable[..., Done]) -> Path:
    file = Path("custom.py")
    file.write_text(CODE)
    return file


def test_a_custom_metric_and_format(code: Path, cli: Callable[..., Done]) -> None:
    words = ("compare", *FAST, "--algorithms", "local,fedavg", "--metric", "custom.py:errors", "--out", "o")
    done = cli(*words)
    assert done.code == 0, done.err
    runs = read_runs(["o"])
    assert runs.metric == "errors"
    row = runs.rows[0]
    assert row.metrics["errors"] == row.mean.mean > 0
    assert cli("table", "o", "--format", "custom.py:tsv").out.startswith("local\terrors\n")
    assert cli("table", "o", "--format", "csv").out.splitlines()[0].endswith("log_loss,calibration_error,errors")
    assert cli("compare", "--resume", "o", "--quiet", "--allow-code", "custom.py:errors").code == 0
    del METRICS["errors"]
    runs = read_runs(["o"])
    assert runs.metric == "accuracy"
    assert "custom.py:errors, a custom metric that is not loaded here" in runs.notes[-1]


def test_what_is_no_metric_or_format_is_named(code: Path, cli: Callable[..., Done]) -> None:
    said = cli("compare", *FAST, "--metric", "custom.py:bare").err
    assert "custom.py:bare: expected a function with the decorator @register_metric(...)" in said
    assert "did you mean 'latex'" in cli("table", "o", "--format", "latx").err
    assert "or a custom metric as file.py:metric" in cli("compare", *FAST, "--metric", "acuracy").err
    with pytest.raises(ConfigError, match="as the target is a number"):
        check_metric("accuracy", "number")

    def accuracy(y: object, logits: object) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="'accuracy' is a metric of FedAttune; give your function another name"):
        register_metric("mine", is_higher_better=True)(accuracy)
