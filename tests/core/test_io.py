"""Files are the same on every system, and none stays open that another one has to replace."""

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from fedattune import ConfigError, RunError
from fedattune.core.io import load_tensors, read_json, read_scalar, read_yaml, save_tensors, write_json


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the files that are mapped into memory")
def test_tensors_that_were_read_do_not_hold_their_file(tmp_path: Path) -> None:
    """Windows would not let a checkpoint be removed whose tensors are mapped from it."""
    file = tmp_path / "mapped.safetensors"
    save_tensors(file, {"w": torch.arange(100_000.0)}, {"round": "3"})
    tensors, meta = load_tensors(file)
    assert "mapped.safetensors" not in Path("/proc/self/maps").read_text("utf-8")
    assert torch.equal(tensors["w"], torch.arange(100_000.0))
    assert meta == {"round": "3"}


def alias_bomb(text: str, n: int = 20) -> str:
    names = [chr(ord("a") + i) for i in range(n)]
    lines = [f"a: &a {text}"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise(names)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        alias_bomb("[x,x,x,x,x,x,x,x,x]"),
        alias_bomb("{x: 1}").replace("[*", "{<<: [*").replace("]\n", "]}\n") + "}",
        "a: &a [*a]",
        "a: &a {b: *a}",
        f"a: &a {'x' * 100_000}\nb: [{','.join(['*a'] * 30)}]",
    ],
)
def test_an_alias_bomb_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(ConfigError, match="aliases stand for more than 2 MiB"):
        read_yaml(tmp_path / "bomb.yaml")
    assert read_scalar(text) == text


@pytest.mark.parametrize("text", ["1e-3", "2E5", "-1.5e-3", ".5e1", " 1e+2 "])
def test_numbers_with_an_exponent_are_numbers(text: str) -> None:
    """PyYAML takes 1e-3 for text, which reaches custom models and methods whose options have no type."""
    value = read_scalar(text)
    assert isinstance(value, float)
    assert value == float(text)
    assert [read_scalar(other) for other in ("3", "0.5", "e3", "'1e-3'", "1e", "0x1e3")] == [
        3, 0.5, "e3", "1e-3", "1e", 0x1E3,
    ]  # fmt: skip
    assert read_scalar("12e4567") == "12e4567"  # a commit, not infinity


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match=r"large\.yaml is not valid YAML: it has more than 1 MiB"):
        read_yaml(tmp_path / "large.yaml")
    monkeypatch.setattr("fedattune.core.io.MAX_JSON_BYTES", 1 << 20)
    (tmp_path / "large.json").write_text(json.dumps("x" * (1 << 20)))
    with pytest.raises(RunError, match=r"large\.json: it has more than 1 MiB"):
        read_json(tmp_path / "large.json")


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": [math.inf, (1.5, math.nan)], "b": {"c": -math.inf, "d": "Infinity"}})
    assert read_json(file) == {"a": [None, [1.5, None]], "b": {"c": None, "d": "Infinity"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a":' * 100_000, "it is nested too deeply"),
        ("[NaN]", "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[1e999]", "1e999 is no number"),
        ("9" * 5_000, "integer string conversion"),
    ],
)
def test_json_that_nobody_wrote_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunError, match=said):
        read_json(tmp_path / "a.json")


def test_a_full_disk_is_said_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(5)}, {})
    monkeypatch.setattr("fedattune.core.io.save_file", fail)
    with pytest.raises(RunError, match=r"cannot write .*No space left.*; free some space, or make the folder writable"):
        save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(5)}, {})
    assert not load_tensors(tmp_path / "a.safetensors")[0]["a"].any()  # the file before is intact
