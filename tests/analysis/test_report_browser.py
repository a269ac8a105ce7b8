"""The HTML report in a real browser, without network."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedattune
from crafted import craft_hostile
from fedattune import read_runs, write_report
from fedattune.analysis.mixing import MixingAnalysis
from fedattune.analysis.output.plots import choose_scale
from reports import train, train_odd


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


def test_browser_prints_it(opened: Any) -> None:
    widths = "[...document.querySelectorAll('.chart svg, .chart canvas')].map((e) => e.getBoundingClientRect().width)"
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(opened.evaluate(widths)) <= 700  # pixels, less than the 190 mm between the margins of A4
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert max(opened.evaluate(widths)) > 1000
    pdf = opened.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 50_000


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` or `#rrggbb`, as WCAG defines it."""
    if colour.startswith("#"):
        parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        parts = [int(part) for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (p / 255 for p in parts))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


PAGE = "getComputedStyle(document.body).backgroundColor"


def set_system(page: Any, scheme: str, shown: str | None = None) -> None:
    """Let the system prefer light or dark, and wait until the page is shown so."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("(theme) => document.documentElement.dataset.theme === theme", arg=shown or scheme)


def test_browser_follows_the_system_and_the_switch(opened: Any) -> None:
    assert opened.evaluate(PAGE) == "rgb(255, 255, 255)"
    light = opened.evaluate("document.querySelector('#heat canvas').toDataURL()")
    set_system(opened, "dark")
    assert luminance(opened.evaluate(PAGE)) < 0.02
    assert opened.evaluate("document.querySelector('#heat canvas').toDataURL()") != light
    opened.click("#theme")
    assert opened.inner_text("#theme") == "Dark"
    assert opened.evaluate(PAGE) == "rgb(255, 255, 255)"
    set_system(opened, "light")
    set_system(opened, "dark", "light")  # whoever used the switch has decided
    opened.evaluate("localStorage.clear()")
    set_system(opened, "light")


def test_browser_has_the_scale_of_the_figure(opened: Any) -> None:
    """One outlier leaves three quarters of the colours to the others; the legend says so."""
    weights = [0.005] * 380
    for outlier in (0.005, 0.95):
        weights[0] = outlier
        scale = choose_scale(np.array(weights), 20)
        assert opened.evaluate("(w) => Scale.make(w, 20)", weights) == {"end": scale.end, "largest": scale.largest}
        for weight in (0.0, 0.001, 0.005):
            share = opened.evaluate("([w, x]) => Scale.share(Scale.make(w, 20), x)", [weights, weight])
            assert share == pytest.approx(float(scale.make_norm()(weight)))
    said = opened.inner_text("#heat-scale").split()
    assert said[0] == "0"
    assert 0 < float(said[1]) <= 1


@pytest.fixture(scope="module")
def numbers(opened: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of a comparison whose target is a number, in small units at one client and large ones at another."""
    random, lines = np.random.default_rng(0), ["site,a,b,y"]
    for i, unit in enumerate((0.01, 1.0, 1.0, 1.0, 10.0, 1000.0)):
        for a, b, noise in random.normal(size=(40, 3)):
            lines.append(f"plant {i},{a:.4f},{b:.4f},{unit * (a + 2 * b + noise):.6f}")
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "plants.csv").write_text("\n".join(lines), "utf-8")
    data = fedattune.load_federation(folder / "plants.csv", client_column="site", target="y")
    folder /= "runs"
    train(folder, data, cohort=1.0)
    runs = read_runs([folder])
    file = tmp_path_factory.mktemp("page") / "numbers.html"
    write_report(file, runs)
    page = opened.context.browser.new_context(offline=True).new_page()
    page.said, page.runs = [], runs
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    yield page
    assert page.said == []


def test_browser_shows_numbers_in_the_unit_of_the_target(numbers: Any) -> None:
    groups: dict[str, Any] = {}
    for run in numbers.runs.results:
        groups.setdefault(run.algorithm, []).append(run.measure_clients("rmse"))
    alone, shared = np.mean(groups["local"], axis=0), np.mean(groups["fedmcsa"], axis=0)
    numbers.select_option("#client-method", "fedmcsa")
    numbers.click("#clients button[data-key=client]")
    heads = [one.strip(" \u25b4") for one in numbers.locator("#clients th").all_inner_texts()]
    rows = [row.split("\t") for row in numbers.locator("#clients tbody tr").all_inner_texts()]
    for i, row in enumerate(rows):
        cells = dict(zip(heads, row, strict=True))
        assert float(cells["alone"]) == pytest.approx(alone[i], rel=0.01)
        assert float(cells["best round"]) == pytest.approx(shared[i], rel=0.01)
        gain = float(cells["gain"].replace("\u2212", "-"))
        assert gain == pytest.approx(alone[i] - shared[i], abs=0.006 * max(1, abs(alone[i])))
    text = numbers.inner_text("body")
    assert "its RMSE is lower" in text
    drawn = numbers.evaluate(
        "echarts.getInstanceByDom(document.getElementById('curves')).getOption().series"
        ".filter((s) => s.name === 'local' && s.lineStyle.opacity !== 0)[0].data.at(-1)[1]"
    )
    local = [run for run in numbers.runs.results if run.algorithm == "local"]
    assert drawn == pytest.approx(np.mean([run.metrics["rmse_uniform"] for run in local]), rel=0.001)
    assert "BMTA" not in text  # accuracies
    assert "%" not in numbers.inner_text("#clients thead").replace("own weight %", "")
    numbers.select_option("#y", "worst")  # the clients with the largest errors
    assert numbers.locator("#curves svg").count() == 1
    assert "The target is a number, so there are no shares of classes" in text


def test_browser_runs_nothing_that_a_crafted_folder_holds(opened: Any, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    write_report(file, read_runs([craft_hostile(tmp_path / "runs")]))
    page = opened.context.browser.new_context(offline=True).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.add_init_script("window.hits = 0; window.hit = () => { window.hits += 1; };")
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    for chart in ("gains", "curves", "spread", "network", "evolution", "traffic"):  # and all their tooltips
        box = page.locator(f"#{chart}").bounding_box()
        page.locator(f"#{chart}").scroll_into_view_if_needed()
        box = page.locator(f"#{chart}").bounding_box()
        for share in (0.2, 0.35, 0.5, 0.65, 0.8):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.5 * box["height"])
    for key in ("client", "partners", "gain"):
        page.click(f"#clients button[data-key={key}]")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hits") == 0
    # Even if text became a part of the page, its code would not run.
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hit()>')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hits") == 0
    assert all("Content Security Policy" in one for one in said), said  # of the last one alone
