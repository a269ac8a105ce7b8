"""The HTML report of a comparison."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import fedattune
from fedattune import Federation
from fedattune.report import write_report

VOID = {"meta", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """Collects text and what would be loaded, and checks that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "  # cells are words of their own


def test_report_is_one_self_contained_page(ragged: Federation, tmp_path: Path) -> None:
    names = ["ward <b>7</b>", *ragged.names[1:]]
    data = replace(
        ragged, clients=tuple(replace(c, name=n) for c, n in zip(ragged.clients, names, strict=True))
    )
    results = [
        fedattune.fit(name, data, rounds=3, cohort=3, steps=2, lr=0.1)
        for name in ("local", "fedavg", "fedmcsa")
    ]
    write_report(
        tmp_path / "report.html", data, results, verdict="Collaborating helps.", notes=["a note to read"]
    )
    html = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.loads == []
    assert "http" not in html
    assert "ward <b>7</b>" in page.text
    assert "<b>" not in html
    for words in ("ollaborating", "a note to read", "fedmcsa: 1.weight", "Labels of each client"):
        assert words in page.text
    assert "fedavg: model" not in page.text  # one model for all: nobody learns from anybody in particular
    accuracy = 100 * (results[2].clients[0].trained or 0)
    assert f"{accuracy:.1f}" in page.text


def test_report_of_clients_that_joined_after_training(ragged: Federation, tmp_path: Path) -> None:
    """Two of six clients are held out: they are in a table of their own, the mixing has the other four's names."""
    results = [
        fedattune.fit(name, ragged, rounds=3, steps=2, lr=0.1, held_out=2)
        for name in ("local", "fedavg", "fedmcsa")
    ]
    joined = results[1].newcomers
    write_report(tmp_path / "r.html", ragged, results, verdict="v", notes=[], rounds_to=0.01)
    page = Page()
    page.feed((tmp_path / "r.html").read_text())
    assert page.open == []
    assert "<strong>" not in (tmp_path / "r.html").read_text()  # both points count for those that joined
    assert len(joined) == 2
    assert "6 clients, 2 of them joining after training" in page.text
    section = page.text.partition("Clients that joined after training")[2].partition("Labels of each client")[
        0
    ]
    words = section.split()
    for newcomer in joined:
        row = words.index("fedavg", words.index(newcomer.id)) + 1
        expected = [newcomer.received, newcomer.trained, newcomer.local]
        assert words[row : row + 3] == [f"{100 * value:.1f}" for value in expected]
    mixing = page.text.partition("fedmcsa: 1.weight")[2].partition("Notes")[0]
    assert mixing.split() == [client.id for client in results[2].clients]
    assert "BMTA*: best mean test accuracy of any round, optimistic" in page.text
    for head in ("global %", "arrived %", "new %", "last 10%", "rounds to 1%"):
        assert head in page.text


def test_report_without_such_clients_does_not_mention_them(ragged: Federation, tmp_path: Path) -> None:
    results = [fedattune.fit(name, ragged, rounds=1, steps=1) for name in ("local", "pfedme")]
    write_report(tmp_path / "r.html", ragged, results, verdict="v", notes=[])
    text = (tmp_path / "r.html").read_text()
    assert "joined" not in text
    assert "rounds to" not in text
