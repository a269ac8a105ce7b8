"""Damaged and edited copies of a run folder: the same answer, or one sentence; never other numbers without a word."""

import random
import shutil
from pathlib import Path

import pytest

from cli_helpers import Done
from damage import DAMAGES, judge, run_command
from fedattune.cli import main

COMMANDS = {
    "report FOLDER --out FILE": "page.html",
    "explain FOLDER --algorithm fedmcsa --json FILE": "explanation.json",
    "plot FOLDER --kind clients --out FILE": "figure.svg",
    "plot FOLDER --kind heatmap --out FILE": "figure.svg",
    "watch FOLDER --once": "none",
    "cite FOLDER": "none",
    "export FOLDER --algorithm fedmcsa --client 0 --out FILE": "model.safetensors",
    "table FOLDER --format csv --columns all": "none",
    "compare --resume FOLDER --quiet --processes 1": "none",
}
COPIES = 36
"""Copies of the folder that are damaged; thousands were tried once, with other seeds."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small comparison by the command."""
    folder = tmp_path_factory.mktemp("damaged") / "whole"
    words = "compare --data digits --partition dirichlet --clients 5 --rounds 2 --steps 1 --lr 0.1 --quiet"
    more = ["--processes", "1", "--algorithms", "local,fedmcsa", "--out", str(folder)]
    assert main([*words.split(), *more]) == 0
    return folder


def copy(whole: Path) -> Path:
    folder = whole.with_name("run")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    return folder


def test_a_damaged_folder_gives_the_same_answer_or_one_sentence(whole: Path) -> None:
    before = {}
    for number in range(COPIES):
        words, name = list(COMMANDS.items())[number % len(COMMANDS)]
        target = whole.with_name(name)
        if words not in before:
            before[words] = run_command(words, copy(whole), target=target)
            assert before[words].code == 0, before[words].err
        folder, chance = copy(whole), random.Random(number)
        what = chance.choice(DAMAGES)(chance, folder)
        now = run_command(words, folder, target=target)
        assert judge(now, before[words]) in ("same", "refused"), (number, words, what, now[:3])


def test_a_folder_without_its_checksums_is_refused_in_one_sentence(whole: Path) -> None:
    for words, name in COMMANDS.items():
        folder = copy(whole)
        (folder / "fedmcsa/seed-0/SHA256SUMS").unlink()
        now = Done(*run_command(words, folder, target=whole.with_name(name))[:3])
        assert now.code == 2, words
        assert "fedmcsa/seed-0/SHA256SUMS is missing; restore it from a copy" in now.err
        assert now.err.count("\n") == 1, now.err
