"""The HTML report in a real browser, without network."""

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fedattune import read_runs, write_report
from fedattune.analysis.mixing import MixingAnalysis
from reports import train_odd


def browser_path() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return os.environ.get("FEDATTUNE_BROWSER") or next((p for p in map(shutil.which, names) if p), None)


pytestmark = pytest.mark.skipif(
    browser_path() is None, reason="no Chromium on this machine: install it, or name one by FEDATTUNE_BROWSER"
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The report in a browser without network; what it logs and asks for is kept in `said` and `asked`."""
    from playwright.sync_api import sync_playwright

    file = tmp_path_factory.mktemp("page") / "report.html"
    runs = read_runs([train_odd(tmp_path_factory.mktemp("runs"))])
    write_report(file, runs)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_context(offline=True, viewport={"width": 1200, "height": 900}).new_page()
        page.said, page.asked, page.runs = [], [], runs
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        yield page
        assert page.said == []
        assert page.asked == [file.as_uri()]
        browser.close()


def column(page: Any, number: int) -> list[str]:
    return [cell.strip() for cell in page.locator(f"#clients tbody td:nth-child({number})").all_inner_texts()]


def test_browser_sorts_the_client_table(opened: Any) -> None:
    for falling in (False, True):
        opened.click("#clients button[data-key=train]")
        got = [int(cell) for cell in column(opened, 2)]
        assert len(set(got)) == 6
        assert got == sorted(got, reverse=falling)
    assert opened.get_attribute("#clients th:nth-child(2)", "aria-sort") == "descending"
    opened.click("#clients button[data-key=client]")
    assert column(opened, 1)[0] == "</script>"  # names are text


def test_browser_filters_clients(opened: Any) -> None:
    opened.fill("#filter", "WARD")
    assert column(opened, 1) == ["ward <b>7</b>"]
    assert opened.inner_text("#count") == "1 of 6 clients"
    opened.fill("#filter", "")
    opened.select_option("#client-method", "fedavg")
    opened.select_option("#only", "lose")
    losing = opened.locator("#clients tbody tr").count()
    assert opened.locator("#clients td .minus").count() == losing > 0
    opened.select_option("#only", "all")
    opened.select_option("#client-method", "fedmcsa")
    assert opened.locator("#clients tbody tr").count() == 6


def test_browser_shows_first_the_component_in_which_clients_choose_and_how_it_agrees(opened: Any) -> None:
    mixing = MixingAnalysis(next(run for run in opened.runs.results if run.algorithm == "fedmcsa"))
    others = ~np.eye(6, dtype=bool)
    choosing = {name: m[others].max() / m[others].mean() for name, m in mixing.last.weights.items()}
    assert len(choosing) == 2
    shown = opened.input_value("#component")
    assert shown == max((name for name in choosing if not name.endswith("bias")), key=choosing.__getitem__)
    agreement = {one.name: one.agreement for one in mixing.components}
    said = [f"{100 * agreement[name].share:.0f}% from the alike" for name in choosing]
    assert opened.locator("#thumbs small").all_inner_texts() == said
    own = np.diag(mixing.last.weights[shown]).mean()
    assert f"own weight was {100 * own:.0f}% on average" in opened.inner_text("#agreement")


def test_browser_slides_through_the_rounds(opened: Any) -> None:
    from playwright.sync_api import expect

    picture = "document.querySelector('#heat canvas').toDataURL()"
    assert opened.inner_text("#round-said") == "round 4"
    last = opened.evaluate(picture)
    opened.locator("#round").evaluate("(e) => { e.value = 0; e.dispatchEvent(new Event('input')); }")
    assert opened.inner_text("#round-said") == "round 1"
    assert opened.evaluate(picture) != last
    opened.focus("#round")
    opened.keyboard.press("ArrowRight")
    assert opened.inner_text("#round-said") == "round 2"
    opened.click("#play")
    expect(opened.locator("#round-said")).to_have_text("round 4")
    assert opened.evaluate(picture) == last


def test_browser_reads_a_cell_chooses_a_layer_and_marks_a_client(opened: Any) -> None:
    opened.locator("#heat").scroll_into_view_if_needed()
    box = opened.locator("#heat").bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert re.match(r"client .* was given .* of client ", opened.inner_text("#heat-said"))
    assert opened.locator("#thumbs button").count() == opened.locator("#component option").count() == 2
    opened.click("#thumbs button:nth-child(1)")
    assert opened.evaluate("document.getElementById('component').selectedIndex") == 0
    opened.select_option("#order", "names")
    opened.check("#own")
    opened.click("#clients tbody tr:nth-child(3)")
    marked = opened.inner_text("#clients tr.marked td:nth-child(1)").strip()
    assert opened.input_value("#client") == marked
    for select, value in (("#x", "bytes"), ("#x", "seconds"), ("#y", "worst"), ("#traffic-method", "fedavg")):
        opened.select_option(select, value)
    opened.select_option("#gain-method", "fedavg")
    assert opened.locator("#gains svg").count() == opened.locator("#curves svg").count() == 1


def test_browser_on_a_phone_has_nothing_wider_than_the_screen(opened: Any) -> None:
    opened.set_viewport_size({"width": 360, "height": 740})
    opened.wait_for_timeout(300)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    opened.set_viewport_size({"width": 1200, "height": 900})


def test_browser_prints_it(opened: Any) -> None:
    widths = "[...document.querySelectorAll('.chart svg, .chart canvas')].map((e) => e.getBoundingClientRect().width)"
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(opened.evaluate(widths)) <= 700  # pixels, less than the 190 mm between the margins of A4
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert max(opened.evaluate(widths)) > 1000
    pdf = opened.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 50_000
