"""`fedattune list` and `cite`: what there is, what `--tune` tries, and the BibTeX of what runs used."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from cli_helpers import Done, refused

Cli = Callable[..., Done]
FAST = ("--rounds", 1, "--steps", 1, "--clients", 5, "--quiet")


def keys(text: str) -> list[str]:
    return re.findall(r"^@\w+\{(\w+),", text, re.MULTILINE)


def test_a_comparison_and_one_of_its_runs(cli: Cli, work: Path) -> None:
    methods = ("--algorithms", "fedavg,pfedme", "--partition", "dirichlet")
    assert cli("compare", *FAST, *methods, "--out", "o").code == 0
    done = cli("cite", "o")
    assert (done.code, done.err) == (0, "")
    data, partition = "alpaydin1998optical", "li2022federated"
    assert sorted(keys(done.out)) == sorted(
        ["fedattune", "mcmahan2017communication", "dinh2020personalized", data, partition]
    )
    assert "% Nothing to cite for model mlr, method local." in done.out
    one = cli("cite", "o/pfedme/seed-0").out
    assert sorted(keys(one)) == sorted(["fedattune", "dinh2020personalized", data, partition])
    assert keys(cli("cite", "o", "o/pfedme/seed-0").out) == keys(done.out)  # nothing twice


def test_what_cannot_be_cited(cli: Cli, work: Path) -> None:
    (work / "empty").mkdir()
    refused(cli("cite"), "cite needs the folders of runs, or --algorithms")
    refused(cli("cite", "--algorithms", "fedavgg"), "unknown algorithm 'fedavgg'; did you mean 'fedavg'?")
    refused(cli("cite", "empty"), "empty holds no run; give a folder")
    refused(cli("cite", "nowhere"), "nowhere holds no run; give a folder")
    refused(cli("cite", "--algoritms", "fedavg"), "unknown option --algoritms, did you mean '--algorithms'?")


def test_the_list_says_what_tuning_tries(cli: Cli) -> None:
    from fedattune.algorithms import METHODS
    from fedattune.experiments.tuning import LR_FACTORS

    methods = json.loads(cli("list", "algorithms", "--json").out)["algorithms"]
    for name, entry in METHODS.items():
        tuned = {key: list(values) for key, values in entry.tune.items()}
        assert {key: values for key, values in methods[name]["tune"].items() if key != "lr"} == tuned
        assert len(methods[name]["tune"]["lr"]) == len(LR_FACTORS)
    out = cli("list", "methods").out
    assert "      --tune: mu=0.01,0.1,1.0\n" in out
    assert "--tune N tries the learning rate of every method at 0.111, 0.192, " in out
    assert "--tune" not in cli("list", "models").out
