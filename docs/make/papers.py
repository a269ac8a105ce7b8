"""Fill the generated parts of docs/papers.md from the committed results: `python -m docs.make.papers`.

Two kinds of parts end with `<!-- end -->`:

- `<!-- claims of all studies -->`: one line for each claim of a study with committed results.
- `<!-- from results/NAME/table.md: HEADING -->`: the section of the study's table with this heading.
"""

import re

from scipy.stats import false_discovery_control

from fedattune.analysis.verdict.statistics import adjust_by_holm
from fedattune.studies.claims import CONFIDENCE, Comparison, answer_claims, describe_correction, describe_range
from fedattune.studies.table import render_lines

from . import links, methods

PAGE = links.ROOT / "docs" / "papers.md"
CLAIMS = "<!-- claims of all studies -->"
PART = re.compile(rf"^({CLAIMS}|<!-- from results/(\S+)/table\.md: ([^\n]+) -->)\n.*?^(?=<!-- end -->$)", re.S | re.M)


def fill_page(page: str) -> str:
    """Return the page with its generated parts made anew."""

    def fill(part: re.Match[str]) -> str:
        marker, study, heading = part.groups()
        return f"{marker}\n{_make_claims() if marker == CLAIMS else _read_section(study, heading)}\n"

    return PART.sub(fill, page)


def _make_claims() -> str:
    """Make the table of all claims, with our answers and the differences behind them."""
    lines = [["paper", "claim", "our answer", "after Holm", "difference in points", "table"]]
    compared: list[Comparison] = []
    for results in methods.load_studies().values():
        study = results.study
        link = f"[{study.name}](../results/{study.name}/table.md)"
        for answer in answer_claims(results):
            differences = describe_range(answer)
            lines.append([study.source, answer.claim.text, answer.text, describe_correction(answer), differences, link])
            compared += answer.comparisons
    return "\n".join([*render_lines(lines), "", _describe_all(compared)])


def _describe_all(compared: list[Comparison]) -> str:
    """Say how many differences are sure within their claim, and how many after a correction for the whole page."""
    ps, level = [one.p for one in compared], 1 - CONFIDENCE
    by_holm = sum(p <= level for p in adjust_by_holm(ps))
    by_rate = sum(p <= level for p in false_discovery_control(ps))
    return (
        f"Of these {len(compared)} comparisons, {sum(one.is_sure for one in compared)} are sure after Holm's "
        f"correction within each claim, {by_holm} after one over all claims at once, and {by_rate} where one in twenty "
        "of those found may be wrong (Benjamini and Hochberg)."
    )


def _read_section(study: str, heading: str) -> str:
    """Read a section of a study's table, without its heading."""
    file = links.ROOT / "results" / study / "table.md"
    if not file.exists():
        return f"Not run yet: `fedattune reproduce {study}`."
    text = file.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n\n(.*?)(?=\n+## |\n*\Z)", text, re.S | re.M)
    if not section:
        raise ValueError(f"{file} has no section {heading!r}")
    return section[1]


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
