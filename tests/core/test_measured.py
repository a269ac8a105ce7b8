"""The fastest of several calls is measured once on a machine, and found again by later processes."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedattune.core import measured
from fedattune.core.measured import choices_path, choose, choose_threads, find_choices


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FEDATTUNE_MEASURE", "on")
    monkeypatch.setenv("FEDATTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(measured._load, "count_busy_cores", lambda: 0.0)
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    start_process()
    yield tmp_path
    start_process()


clock = [0.0]
"""Seconds that the calls of these tests took: nobody sleeps, so a busy machine changes nothing."""


def start_process() -> None:
    """Forget what this process knows, as a new process does."""
    measured._known.cache_clear()
    measured._measured_here.clear()


def sleeper(seconds: float, calls: list[float]) -> Callable[[], None]:
    def call() -> None:
        calls.append(seconds)
        clock[0] += seconds

    return call


def test_the_fastest_call_is_measured_once_and_kept_on_disk(cache_folder: Path) -> None:
    made: list[float] = []
    calls = {"plain": sleeper(0.02, made), "other": sleeper(0.001, made)}
    assert choose("work", (100, 20), calls) == "other"
    assert set(made) == {0.02, 0.001}
    made.clear()
    start_process()
    assert choose("work", (65, 32), calls) == "other"  # sizes between the same powers of two
    assert not made
    assert choose("work", (64, 32), calls) == "other"
    assert made
    assert choices_path() == cache_folder / "choices.json"
    ((key, choice), _) = find_choices().items()
    assert key.startswith("work 128x32, ")
    assert choice.seconds["other"] < choice.seconds["plain"]


def test_on_a_machine_that_is_always_busy_the_least_of_all_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured._load, "count_busy_cores", lambda: 1.0)
    delays = [0.02, 0.001, 0.02, 0.02, 0.02, 0.02]
    made: list[list[float]] = [[] for _ in delays]
    found = []
    for delay, mine in zip(delays, made, strict=True):
        start_process()
        calls = {"plain": sleeper(0.01, mine), "other": sleeper(delay, mine)}
        found.append(choose("work", (1,), calls))
    assert found == ["plain"] + ["other"] * 5
    assert [bool(mine) for mine in made] == [True] * 5 + [False]


def test_threads_are_chosen_by_measuring() -> None:
    seen: list[int] = []

    def work(fast: int) -> None:
        seen.append(torch.get_num_threads())
        clock[0] += 0.001 if torch.get_num_threads() == fast else 0.02

    before = torch.get_num_threads()
    assert choose_threads("first", (1,), partial(work, 1), 3) == 1
    assert choose_threads("second", (1,), partial(work, 3), 3) == 3
    assert set(seen) == {1, 3}
    assert torch.get_num_threads() == before
    seen.clear()
    assert choose_threads("third", (1,), partial(work, 3), 1) == 1
    assert not seen


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


@pytest.mark.parametrize("content", ["", "[]", '{"MACHINE": 3}', '{"MACHINE": {"work 1, 1 threads": ["other"]}}'])
def test_a_damaged_file_is_measured_anew(content: str, cache_folder: Path) -> None:
    path = cache_folder / "choices.json"
    path.write_text(content.replace("MACHINE", measured.describe_machine()), "utf-8")
    assert choose("work", (1,), {"plain": sleeper(0.02, []), "other": sleeper(0.0, [])}) == "other"
    assert measured.describe_machine() in json.loads(path.read_text("utf-8"))
