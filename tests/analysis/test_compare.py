"""The table and the verdict, on made-up results."""

import io
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedattune import Settings
from fedattune.analysis.compare import build_rows, rows_to_json
from fedattune.analysis.tables import choose_columns, print_methods
from fedattune.analysis.verdict import bootstrap_interval, merge_notes, reach_verdict, write_fairness_notes


@dataclass
class Fake:
    """A result with these test accuracies per client."""

    algorithm: str
    accuracy: list[float]
    validation: float | None = 0.5
    headline: str = "trained"
    bytes_up: int = 260_000
    bytes_down: int = 0
    seconds: float = 12.34
    local_steps: float = 2000.0
    notes: list[str] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    facts: dict[str, float] = field(default_factory=lambda: {"weight_decay": 0.0})
    best: float = 0.75
    reached: int | None = None
    generalised: float | None = None
    joined: list[float] = field(default_factory=list)

    @property
    def n_clients(self) -> int:
        return len(self.accuracy)

    @property
    def clients(self) -> list[Any]:
        return [SimpleNamespace(id=f"c{i}", trained=a, received=0.0) for i, a in enumerate(self.accuracy)]

    @property
    def metrics(self) -> dict[str, float]:
        mean = float(np.mean(self.accuracy))
        keys = ("acc_uniform", "acc_pooled", "acc_std", "acc_worst10", "loss_uniform")
        return dict.fromkeys(keys, mean)

    @property
    def best_validation(self) -> dict[str, float] | None:
        return None if self.validation is None else {"acc_uniform": 0.7}

    @property
    def bmta(self) -> dict[str, dict[str, float]]:
        return {"uniform": {"accuracy": self.best, "round": 3}, "pooled": {"accuracy": 0.77, "round": 4}}

    @property
    def mean_last_10pct(self) -> dict[str, float]:
        return {"acc_uniform": 0.66}

    @property
    def newcomers(self) -> list[Any]:
        return [SimpleNamespace(trained=a, received=a / 2) for a in self.joined]

    def rounds_to(self, accuracy: float) -> int | None:
        assert accuracy == 0.9
        return self.reached


def results(*fakes: Fake) -> Any:
    return list(fakes)


LOCAL = [0.5, 0.6, 0.7, 0.8]
EIGHT = LOCAL * 2


def test_rows_over_seeds() -> None:
    table = build_rows(
        results(
            Fake("local", LOCAL),
            Fake("local", LOCAL),
            Fake("m", [0.6, 0.6, 0.9, 0.7]),
            Fake("m", [0.6, 0.6, 0.7, 0.7]),
        )
    )
    assert [row.algorithm for row in table] == ["local", "m"]
    assert table[0].better_than_local is None
    assert table[1].better_than_local == 0.5  # strictly better: clients 0 and 2
    assert table[1].mean == pytest.approx((0.675, 0.025))
    assert rows_to_json(table)[1]["mean"] == pytest.approx({"mean": 0.675, "std": 0.025})


def test_interval_is_repeatable_and_covers_the_mean() -> None:
    gains = np.random.default_rng(1).normal(2, 1, 50)
    low, high = bootstrap_interval(gains)
    assert bootstrap_interval(gains) == (low, high)
    assert low < gains.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * gains.std() / 50**0.5, rel=0.1)
    assert bootstrap_interval(np.ones(3000)) == (1.0, 1.0)


def test_verdict_helps() -> None:
    said = reach_verdict(
        results(Fake("local", EIGHT), Fake("a", [0.6, 0.7, 0.8, 0.79] * 2, 0.6), Fake("b", [0.9] * 8, 0.55))
    ).text
    assert said.startswith(
        "Collaborating helps here: use a (chosen by validation accuracy), which is 7.25 points above"
    )
    assert "72.25% against 65.00%; 95% interval" in said
    assert said.endswith("2 of 8 clients would lose, most of all client c3 with -1.00 points.")
    assert said.count(". ") == 0


def test_verdict_without_validation_says_so() -> None:
    said = reach_verdict(results(Fake("local", EIGHT, None), Fake("a", [0.6, 0.7, 0.8, 0.9] * 2, None))).text
    assert "chosen by test accuracy, there being no validation data" in said
    assert "none of the 8 clients would lose" in said


def test_verdict_no_clear_gain() -> None:
    said = reach_verdict(results(Fake("local", EIGHT), Fake("a", [0.9, 0.3, 0.8, 0.75] * 2, 0.6))).text
    assert said.startswith("No clear gain from collaborating is shown here: a, the best method by validation")
    assert "4 of 8 clients would lose, most of all client c1 with -30.00 points" in said


def test_verdict_local_best() -> None:
    said = reach_verdict(results(Fake("local", EIGHT, 0.7), Fake("a", [0.4, 0.5, 0.6, 0.7] * 2, 0.6))).text
    assert said.startswith("Collaborating does not help here: local is the best method")
    assert "the next one, a, is 10.00 points below" in said


def test_verdict_where_validation_and_test_do_not_agree() -> None:
    """Local is best by validation, or as good; test data alone does not make a recommendation."""
    better = Fake("a", [0.7, 0.8, 0.9, 0.95] * 2, 0.6)
    said = reach_verdict(results(Fake("local", EIGHT, 0.7), better)).text
    assert said.startswith("No clear gain from collaborating is shown here: local is the best method by val")
    said = reach_verdict(results(Fake("local", EIGHT, 0.6), better)).text
    assert "local and a are equally good by validation accuracy; a is 18.75 points above" in said


def test_verdict_chosen_but_worse() -> None:
    said = reach_verdict(results(Fake("local", EIGHT, 0.4), Fake("a", [0.4, 0.5, 0.6, 0.7] * 2, 0.6))).text
    assert said.startswith(
        "Collaborating does not help here: a, the best method by validation accuracy, is 10.00"
    )


def test_verdict_on_a_handful_of_clients_draws_no_conclusion() -> None:
    said = reach_verdict(results(Fake("local", [0.5, 0.6], 0.4), Fake("a", [0.6, 0.7], 0.6))).text
    assert said.startswith("2 clients are too few to say whether collaborating helps: a, the best method")
    assert "interval" not in said


def test_verdict_leaves_out_what_cannot_show_a_gain() -> None:
    """More training and sharing nothing are no collaboration, however good the accuracy."""
    longer = Fake("longer", [0.95] * 8, 0.9, local_steps=22_000)
    alone = Fake("alone", [0.9] * 8, 0.8, bytes_up=0)
    fair = Fake("fair", [0.6, 0.7, 0.8, 0.9] * 2, 0.6)
    said = reach_verdict(results(Fake("local", EIGHT), longer, alone, fair)).text
    assert said.startswith("Collaborating helps here: use fair (chosen by validation accuracy)")
    notes = write_fairness_notes(results(Fake("local", EIGHT), longer, alone, fair))
    assert notes[0] == (
        "left out of the conclusion on collaborating: longer did 22,000 local steps per client where local did 2,000; "
        "alone shared nothing"
    )
    said = reach_verdict(results(Fake("local", EIGHT), longer, alone)).text
    assert said.startswith("Nothing can be compared fairly: longer did 22,000 local steps")


def test_verdict_needs_two() -> None:
    assert "Nothing to compare" in reach_verdict(results(Fake("local", LOCAL))).text


def test_many_methods_that_are_alike_are_not_listed() -> None:
    many = [Fake(name, LOCAL) for name in "abcdef"]
    (note,) = write_fairness_notes(results(Fake("local", LOCAL), *many, Fake("g", LOCAL, local_steps=1000)))
    assert "(g: 1,000; the others: 2,000)" in note


def test_what_the_methods_were_not_given_alike_is_said() -> None:
    assert write_fairness_notes(results(Fake("local", LOCAL), Fake("a", LOCAL))) == []
    fewer = Fake("a", LOCAL, local_steps=1000)
    (note,) = write_fairness_notes(results(Fake("local", LOCAL, settings=Settings(cohort=2)), fewer))
    assert "local: 2,000; a: 1,000" in note
    assert "--train" in note
    (note,) = write_fairness_notes(results(Fake("local", LOCAL, settings=Settings(epochs=1)), fewer))
    assert "--train" not in note
    assert "--epochs" in note
    (note,) = write_fairness_notes(
        results(Fake("local", LOCAL), Fake("a", LOCAL, facts={"weight_decay": 0.001}))
    )
    assert "(local: 0; a: 0.001)" in note


def test_a_note_that_several_runs_have_is_said_once() -> None:
    """Of its own method a note begins with the name; one without a name is of all."""
    every = "clients that were asked dropped out"
    fakes = results(
        Fake("a", LOCAL, notes=["a: made for all clients", every]),
        Fake("a", LOCAL, notes=["a: made for all clients", "a: only with this seed", every]),
        Fake("b", LOCAL, notes=["b: made for all clients", every]),
    )
    assert merge_notes(fakes) == ["a, b: made for all clients", every, "a: only with this seed"]


def printed(fakes: Any, width: int = 60, *, terminal: bool = False, rounds_to: float | None = None) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=terminal, color_system=None, soft_wrap=not terminal
    )
    print_methods(build_rows(fakes, rounds_to), console, rounds_to)
    return out.getvalue()


def cells(fakes: Any, rounds_to: float | None = None) -> list[dict[str, str]]:
    """Of each line: head -> cell."""
    lines = build_rows(fakes, rounds_to)
    heads = {title: cell for group in choose_columns(lines, rounds_to) for title, cell in group.items()}
    return [{title: cell(line) for title, cell in heads.items()} for line in lines]


def test_bmta_is_said_to_be_optimistic_and_spread_over_seeds() -> None:
    """Population deviation: the maxima 0.7 and 0.8 lie 0.05 from their mean."""
    fakes = results(Fake("a", LOCAL, best=0.7), Fake("a", LOCAL, best=0.8))
    (line,) = cells(fakes)
    assert line["BMTA*"] == "75.00 ±5.0"
    assert line["pooled BMTA*"] == "77.00 ±0.0"
    assert line["last 10%"] == "66.00 ±0.0"
    assert rows_to_json(build_rows(fakes))[0]["bmta"] == pytest.approx({"mean": 0.75, "std": 0.05})
    assert "BMTA*: best mean test accuracy of any round, optimistic" in printed(fakes)


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        ([40], "40"),
        ([None], "never"),
        ([40, 60], "50.0 ±10.0"),
        ([40, 40], "40 ±0.0"),
        ([40, None, 60], "50.0 in 2 of 3"),
        ([None, 7], "7 in 1 of 2"),
        ([None, None], "never"),
    ],
)
def test_rounds_to_says_how_many_seeds_got_there(reached: list[int | None], said: str) -> None:
    fakes = results(*(Fake("a", LOCAL, reached=one) for one in reached))
    assert cells(fakes, 0.9)[0]["rounds to 90%"] == said
    assert rows_to_json(build_rows(fakes, 0.9))[0]["rounds_to"] == reached
    assert "; rounds to 90%: the first evaluated round" in printed(fakes, rounds_to=0.9)


def test_columns_that_no_method_has_are_left_out() -> None:
    (line,) = cells(results(Fake("a", LOCAL)))
    assert not {"global %", "arrived %", "new %", "rounds to 90%"} & line.keys()
    for words in ("global:", "arrived:", "new:", "rounds to"):
        assert words not in printed(results(Fake("a", LOCAL)))
    both = results(Fake("a", LOCAL, generalised=0.4), Fake("b", LOCAL, joined=[0.2, 0.4]))
    first, second = cells(both)
    heads = ("global %", "arrived %", "new %")
    assert [first[head] for head in heads] == ["40.00", "-", "-"]
    assert [second[head] for head in heads] == ["-", "15.00", "30.00"]  # 15: the mean of 0.1 and 0.2
    (other,) = cells(results(Fake("c", LOCAL, joined=[0.2, 0.4], headline="received")))
    assert (other["arrived %"], other["new %"]) == ("15.00", "30.00")  # whatever the headline is
    assert "global: the one global model" in printed(both)
    assert "arrived: mean over clients that joined after training" in printed(both)
    assert "new: the same after rounds of their own" in printed(both)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_parts_fit_the_terminal_and_have_every_column_once(width: int) -> None:
    fakes = results(
        *(Fake("fedmcsa_no_mcsa", LOCAL, reached=one, generalised=0.5, joined=[0.5]) for one in (7, None))
    )
    text = printed(fakes, width, terminal=True, rounds_to=0.9)
    tables = text[: text.index("mean, pooled")]
    assert max(map(len, tables.splitlines())) <= width
    heads = [line.strip() for line in tables.splitlines() if line.strip().startswith("method ")]
    assert len(heads) == {60: 6, 80: 4, 100: 3, 120: 3, 160: 2}[width]
    for title in cells(fakes, 0.9)[0]:
        assert sum(re.split(r"\s{2,}", head).count(title) for head in heads) == 1, title


@pytest.mark.parametrize(("width", "terminal", "tables"), [(60, False, 1), (100, True, 2), (200, True, 1)])
def test_no_number_is_cut(width: int, terminal: bool, tables: int) -> None:
    both = [Fake(name, LOCAL) for name in ("local", "fedmcsa_no_mcsa") for _ in range(2)]
    text = printed(results(*both), width, terminal=terminal)
    assert text.count("method ") == tables
    for value in ("65.00 ±0.0", "260.0 kB", "0 B", "2,000", "fedmcsa_no_mcsa", "12.3"):
        assert value in text
    assert "…" not in text
