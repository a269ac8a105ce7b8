"""What the report's own script does with its data, under Node: a page of stubs keeps what it draws."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from crafted import ALL, EARLY, SAME, craft
from fedattune import read_runs
from fedattune.analysis.output.report import render_report

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node on this machine: install it")

PAGE = """
const found = {}, drawn = {}, charts = {};
function element(id) {
  const heard = {};
  return { id, value: "", textContent: "", innerHTML: "", style: {}, dataset: {}, hidden: false, children: [], heard,
    parentElement: {}, selectedIndex: 0, setAttribute() {}, replaceChildren() {}, append() {},
    querySelector: () => ({ remove() {} }), addEventListener: (name, call) => { heard[name] = call; },
    getContext: () => ({ createImageData: (w, h) => ({ data: new Uint8Array(4 * w * h) }), putImageData() {},
      drawImage() {} }) };
}
const document = { getElementById: (id) => (found[id] ??= element(id)), createElement: element,
  documentElement: element("html"), body: { ...element("body"), classList: { contains: () => false, toggle() {} } } };
document.getElementById("clients").children = [element("head"), element("body")];
document.getElementById("x").value = "rounds";
document.getElementById("y").value = "mean";
document.getElementById("only").value = "all";
document.getElementById("order").value = "order";
const window = globalThis, innerWidth = 1000, localStorage = { getItem: () => null };
const addEventListener = () => {}, matchMedia = () => ({ matches: false, addEventListener() {} });
const getComputedStyle = () => ({ getPropertyValue: () => "#808080" });
class ResizeObserver { observe() {} }
const echarts = { init: ({ id }) => (charts[id] = { setOption: (option) => { drawn[id] = option; }, on() {},
  resize() {}, clear() {}, getZr: () => ({ on() {}, flush() {} }) }) };
"""


@pytest.fixture
def run_script(tmp_path: Path) -> Any:
    """Run the script on the data of a page, then do something with it, and return what that prints."""

    def run(data: dict[str, Any], matrices: bytes, then: str) -> Any:
        folder = files("fedattune.analysis.output.report") / "templates"
        look, report = ((folder / name).read_text("utf-8") for name in ("look.js", "report.js"))
        packed = {"data": json.dumps(data).encode(), "matrices": matrices}
        texts = {name: base64.b64encode(gzip.compress(content)).decode() for name, content in packed.items()}
        fill = "".join(f'document.getElementById("{name}").textContent = "{text}";\n' for name, text in texts.items())
        for name in ("gain-method", "client-method", "traffic-method", "mix-method"):
            fill += f'document.getElementById("{name}").value = {json.dumps(data["method"])};\n'
        end = (
            f"function wait() {{ if (document.body.dataset.ready) {{ {then} }} else setTimeout(wait, 5); }}\nwait();\n"
        )
        file = tmp_path / "page.js"
        file.write_text(f"{PAGE}{fill}{look}\n{report}\n{end}", "utf-8")
        command = [str(NODE), str(file)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
        assert not done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page on local and ten methods, each with two seeds, the first of which mixes."""
    folder, facts = tmp_path_factory.mktemp("runs"), {"classes": ["no", "yes"]}
    scores = {1: (5, 10, 5, 20), 2: (6, 12, 5, 19)}
    for k, name in enumerate(("local", *(f"m{i}" for i in range(10)))):
        mixing: Any = {r: (ALL, ALL, {"fc": EARLY, "conv": SAME}) for r in (1, 2)} if name == "m0" else None
        for seed in (0, 1):
            craft(folder, name, scores, seed=seed, facts=facts, mixing=mixing, moved=k, definition="")
    return render_report(read_runs([folder]))


@pytest.fixture
def packed(page: str) -> tuple[dict[str, Any], bytes]:
    """The data of the page and its matrices."""
    texts = re.findall(r'<script type="text/plain" id="(?:data|matrices)">([^<]*)</script>', page)
    data, matrices = (gzip.decompress(base64.b64decode(text)) for text in texts)
    return json.loads(data), matrices


def test_a_round_whose_error_is_not_finite_is_a_gap_in_the_curve(run_script: Any, packed: Any) -> None:
    data, matrices = packed
    data["curves"][1]["seeds"][0]["mean"][0] = None
    then = """
      const { series, tooltip } = drawn.curves, mine = series.filter((one) => one.name === "m0");
      const at = series.map(({ name, data }, k) => ({ seriesIndex: k, seriesName: name, value: data[0], marker: "" }));
      const said = tooltip.formatter(at);
      console.log(JSON.stringify([mine.map((one) => one.data), said.includes("m0"), said.includes("m1 ")]));
    """
    (line, low, band), has_mine, has_other = run_script(data, matrices, then)
    assert [value for _, value in line] == [None, 54.37]  # not half of the other seed's
    assert (low[0][1], band[0][1]) == (None, None)
    assert (has_mine, has_other) == (False, True)


def test_no_two_of_many_methods_look_alike(run_script: Any, packed: Any) -> None:
    then = """
      const lines = drawn.curves.series.filter((one) => one.lineStyle.opacity !== 0);
      const looks = lines.map(({ lineStyle: { color, type }, symbol }) => JSON.stringify([color, type, symbol]));
      console.log(JSON.stringify(looks));
    """
    looks = run_script(*packed, then)
    assert len(set(looks)) == len(looks) == 11


def test_clients_without_a_number_are_last_however_the_table_is_sorted(run_script: Any, packed: Any) -> None:
    data, matrices = packed
    data["clients"]["methods"][data["method"]]["gain"] = [-2.5, None, 10.0, -0.004]
    then = """
      const body = found.clients.children[1];
      const orders = ["samples", "samples", "client", "gain", "gain"].map((key) => {
        found.clients.heard.click({ target: { closest: (what) => (what === "button" ? { dataset: { key } } : null) } });
        return [...body.innerHTML.matchAll(/data-client="(\\d)"/g)].map((one) => one[1]).join("");
      });
      console.log(JSON.stringify([orders, body.innerHTML]));
    """
    orders, html = run_script(data, matrices, then)
    assert orders == ["0321", "2301", "0123", "0321", "2301"]
    assert "\u22120.004<" in html  # not a loss of 0.00


def test_shares_of_nearly_all_are_not_called_all(run_script: Any, packed: Any) -> None:
    data, matrices = packed
    mixing = data["mixing"]
    mixing["labels"] = [[399, 1], [10, 0], [0, 10], [0, 10]]
    for method in mixing["methods"].values():
        for name in method["own"]:
            method["agreement"][name] = {"correlation": None, "share": 0.997, "chance": 0.003}
    then = """
      const small = [], make = document.createElement;
      document.createElement = (kind) => { const one = make(kind); if (kind === "small") small.push(one); return one; };
      found.round.heard.input();
      const labels = [0, 1, 2, 3].map((y) => charts.labels.about(0, y));
      console.log(JSON.stringify([found.agreement.textContent, small.map((one) => one.textContent), labels]));
    """
    agreement, thumbs, labels = run_script(data, matrices, then)
    assert "99.70% of what came from others" in agreement
    assert "; 0.30% would be chance" in agreement
    assert thumbs == ["99.70% from the alike"] * 2
    assert "client a, class no: 399 samples, 99.75% of its own" in labels


def test_names_with_several_spaces_can_be_chosen(run_script: Any, packed: Any) -> None:
    data, matrices = packed
    data["clients"]["ids"][1] = data["mixing"]["names"][1] = 'Ward  "7" '
    html = run_script(data, matrices, "console.log(JSON.stringify(found.client.innerHTML));")
    assert '<option value="Ward  &#34;7&#34; ">' in html  # the text of an option loses spaces


@pytest.mark.parametrize(
    ("target", "said"), [("several labels", "The target is several labels, so"), (None, "Label counts are not in")]
)
def test_it_says_why_there_are_no_labels(run_script: Any, packed: Any, target: str | None, said: str) -> None:
    data, matrices = packed
    assert data["mixing"]["target"] is None
    data["mixing"]["target"] = target
    assert said in run_script(data, matrices, 'console.log(JSON.stringify(found["label-part"].innerHTML));')
