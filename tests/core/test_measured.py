"""The fastest of several calls is measured once on a machine, and found again by later processes."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedattune.core import measured
from fedattune.core.measured import choices_path, choose, find_choices


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FEDATTUNE_MEASURE", "on")
    monkeypatch.setenv("FEDATTUNE_CACHE", str(tmp_path))
    measured._known.cache_clear()
    yield tmp_path
    measured._known.cache_clear()


def sleeper(seconds: float, calls: list[float]) -> Callable[[], None]:
    def call() -> None:
        calls.append(seconds)
        time.sleep(seconds)

    return call


def test_the_fastest_call_is_measured_once_and_kept_on_disk(cache_folder: Path) -> None:
    made: list[float] = []
    calls = {"plain": sleeper(0.02, made), "other": sleeper(0.001, made)}
    assert choose("work", (100, 20), calls) == "other"
    assert set(made) == {0.02, 0.001}
    made.clear()
    measured._known.cache_clear()  # as a new process
    assert choose("work", (65, 32), calls) == "other"  # sizes between the same powers of two
    assert not made
    assert choose("work", (64, 32), calls) == "other"
    assert made
    assert choices_path() == cache_folder / "choices.json"
    ((key, choice), _) = find_choices().items()
    assert key.startswith("work 128x32, ")
    assert choice.seconds["other"] < choice.seconds["plain"]


@pytest.mark.timeout(60)
def test_a_measured_call_may_itself_choose() -> None:
    def inner() -> None:
        choose("inner work", (1,), {"plain": sleeper(0.004, []), "other": sleeper(0.0, [])})

    assert choose("work", (1,), {"plain": inner, "other": sleeper(0.02, [])}) == "plain"
    assert find_choices()[f"inner work 1, {torch.get_num_threads()} threads"].name == "other"


def test_the_plain_call_stays_unless_another_is_clearly_faster() -> None:
    assert choose("work", (1,), {"plain": sleeper(0.004, []), "other": sleeper(0.004, [])}) == "plain"
    assert choose("work", (2,), {"plain": sleeper(0.001, []), "other": sleeper(0.02, [])}) == "plain"


def test_nothing_is_measured_if_the_user_does_not_want_that(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDATTUNE_MEASURE", "off")
    made: list[float] = []
    assert choose("work", (1,), {"plain": sleeper(0.02, made), "other": sleeper(0.0, made)}) == "plain"
    assert not made
    assert not list(cache_folder.iterdir())
    assert not find_choices()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"MACHINE": 3}', '{"MACHINE": {"work 1, 1 threads": ["other"]}}']
)
def test_a_damaged_file_is_measured_anew(content: str, cache_folder: Path) -> None:
    path = cache_folder / "choices.json"
    path.write_text(content.replace("MACHINE", measured.describe_machine()), "utf-8")
    assert choose("work", (1,), {"plain": sleeper(0.02, []), "other": sleeper(0.0, [])}) == "other"
    assert measured.describe_machine() in json.loads(path.read_text("utf-8"))


def test_choices_of_other_machines_stay(cache_folder: Path) -> None:
    path = cache_folder / "choices.json"
    path.write_text('{"another": {"work 1, 1 threads": ["x", {}]}}', "utf-8")
    choose("work", (1,), {"plain": sleeper(0.001, [])})
    assert set(json.loads(path.read_text("utf-8"))) == {"another", measured.describe_machine()}


def test_a_folder_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file" / "below"), "off"):
        monkeypatch.setenv("FEDATTUNE_CACHE", folder)
        measured._known.cache_clear()
        assert choose("work", (1,), {"plain": sleeper(0.02, []), "other": sleeper(0.0, [])}) == "other"
        assert find_choices()
