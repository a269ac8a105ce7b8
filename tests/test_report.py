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
        self.text += data


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
