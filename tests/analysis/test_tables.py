"""Numbers as text, tables that are filled from columns, and methods side by side."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from fake_results import LOCAL, Fake, results
from fedattune import ConfigError
from fedattune.analysis.output.tables import choose_columns, print_methods
from fedattune.analysis.rows import build_rows
from fedattune.core.effect import ONE_MIXTURE, Effect, Mechanism


def printed(
    fakes: Any, width: int = 60, *, terminal: bool = False, rounds_to: float | None = None, columns: str | None = "all"
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, soft_wrap=not terminal)
    print_methods(build_rows(fakes, rounds_to), console, rounds_to, columns)
    return out.getvalue()


def cells(fakes: Any, rounds_to: float | None = None) -> list[dict[str, str]]:
    """Of each line: head -> cell."""
    lines = build_rows(fakes, rounds_to)
    heads = {title: column.format for group in choose_columns(lines, rounds_to) for title, column in group.items()}
    return [{title: cell(line) for title, cell in heads.items()} for line in lines]


def test_columns_that_no_method_has_are_left_out() -> None:
    (line,) = cells(results(Fake("a", LOCAL)))
    assert not {"global", "arrived", "new", "rounds to 90%"} & line.keys()
    for words in ("global:", "arrived:", "new:", "rounds to"):
        assert words not in printed(results(Fake("a", LOCAL)))
    both = results(Fake("a", LOCAL, global_accuracy=0.4), Fake("b", LOCAL, joined=[0.2, 0.4]))
    first, second = cells(both)
    heads = ("global", "arrived", "new")
    assert [first[head] for head in heads] == ["40.00", "-", "-"]
    assert [second[head] for head in heads] == ["-", "15.00", "30.00"]  # 15: the mean of 0.1 and 0.2
    (other,) = cells(results(Fake("c", LOCAL, joined=[0.2, 0.4], evaluation_point="received")))
    assert (other["arrived"], other["new"]) == ("15.00", "30.00")  # at every evaluation point
    assert "global: the one global model" in printed(both)
    assert "arrived: mean over clients that joined after training" in printed(both)
    assert "new: the same after rounds of their own" in printed(both)


def test_idle_mechanisms_are_marked() -> None:
    other = Mechanism("steps", "steps without the term", "one without the term")
    fakes = results(
        Fake("a", LOCAL),
        Fake("b", LOCAL, effects=[Effect(ONE_MIXTURE, 0.476), Effect(other, 3.5)]),
        Fake("c", LOCAL, effects=[Effect(ONE_MIXTURE, 0.0004)]),
    )
    assert [line["effect"] for line in cells(fakes)] == ["-", "weights 48%, steps 350%", "weights 0.04% (idle)"]
    assert "effect: distance of what the method's mechanism changes" in printed(fakes)
    assert "effect" not in cells(results(Fake("a", LOCAL)))[0]


@pytest.mark.parametrize("rounds_to", [None, 0.9])
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("name", ["fedavg", "fedmcsa_no_mcsa", "a_method_of_my_own_with_a_long_name"])
def test_the_default_table_and_its_legend_fit_80_characters(name: str, seeds: int, rounds_to: float | None) -> None:
    fakes = [
        Fake(one, [0.1 * seed, *[0.99] * 7], seed=seed, reached=seed * 13 + 4)
        for one in ("local", name)
        for seed in range(seeds)
    ]
    text = printed(results(*fakes), 80, terminal=True, rounds_to=rounds_to, columns=None)
    lines = text.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines].count(" method") == 1  # one table, not several parts
    legend = lines[next(i for i, line in enumerate(lines) if line.startswith("accuracy %:")) :]
    assert len(legend) <= 4
    assert "--columns all: more" in " ".join(text.split())
    assert ("rounds to 90%" in text) == (rounds_to is not None)


def test_columns_by_name() -> None:
    fakes = results(Fake("local", LOCAL), Fake("a", LOCAL))
    text = printed(fakes, columns="std, accuracy,steps")
    assert text.splitlines()[1].split() == ["method", "std", "accuracy", "%", "steps"]
    with pytest.raises(ConfigError, match="--columns stp: no such column; did you mean 'steps'"):
        printed(fakes, columns="stp")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_parts_fit_the_terminal_and_have_every_column_once(width: int) -> None:
    fakes = results(
        *(Fake("fedmcsa_no_mcsa", LOCAL, reached=one, global_accuracy=0.5, joined=[0.5]) for one in (7, None))
    )
    text = printed(fakes, width, terminal=True, rounds_to=0.9)
    tables = text[: text.index("accuracy %: mean")]
    assert max(map(len, tables.splitlines())) <= width
    heads = [line.strip() for line in tables.splitlines() if line.strip().startswith("method ")]
    assert len(heads) == {60: 7, 80: 5, 100: 4, 120: 3, 160: 3}[width]
    for title in cells(fakes, 0.9)[0]:
        assert sum(re.split(r"\s{2,}", head).count(title) for head in heads) == 1, title
