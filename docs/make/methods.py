"""Make a page for every method: its docstring, the written page on its paper, and the committed results."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from fedattune import Algorithm
from fedattune.algorithms import ALGORITHMS, METHODS
from fedattune.algorithms.table import Family
from fedattune.analysis.citations import load_entries, load_tables
from fedattune.core.options import list_options, summarize
from fedattune.studies.outcome import Outcome, StudyResults
from fedattune.studies.records import Records
from fedattune.studies.study import STUDIES, load_study
from fedattune.studies.table import describe_measure, format_value

from . import links
from .reference import clean_docstring

POINTS = {
    "received": "`received`: the model that a client holds after communication, before local training",
    "trained": "`trained`: the model that a client holds after local training",
}


def make_pages() -> dict[str, str]:
    """Return the pages of all methods, their index, and the tables of all studies, by path on the site."""
    texts = {f"algorithms/{name}.md": make_page(name, factory) for name, factory in ALGORITHMS.items()}
    texts |= {"algorithms/index.md": _make_index(), "algorithms/SUMMARY.md": _make_navigation()}
    return texts | dict(_make_study_pages())


def make_page(name: str, factory: Callable[..., Algorithm]) -> str:
    """Return the page of one method."""
    first, _, more = describe_factory(factory).partition("\n\n")
    keywords = ", ".join(f"{option.name}={option.default!r}" for option in list_options(factory))
    facts = [
        f"| Paper | {'; '.join(map(_format_paper, _list_papers(name))) or 'none'} |",
        f"| Scored at | {POINTS[factory().evaluation_point]} |",
        f"| Command line | `fedattune compare --algorithms local,{name}` |",
        f'| Python | `fedattune.fit("{name}", data)`, or with the object of `fedattune.algorithms.{name}()` |',
    ]
    return "\n".join(
        [
            f"# `{name}`", "", " ".join(first.split()), "", *([more, ""] if more else []),
            "| | |", "|---|---|", *facts, "",
            "```text", _wrap_signature(f"{name}({'*, ' if keywords else ''}{keywords})"), "```", "",
            *_format_bibtex(name),
            _read_written_page(name), "",
            "## Results in the repository", "", *_format_results(name),
        ]
    )  # fmt: skip


def describe_factory(factory: Callable[..., Algorithm]) -> str:
    """Return the docstring without its sections: the page has a table of the options."""
    text, *_ = re.split(r"^(?:Args|Raises):$", clean_docstring(factory), maxsplit=1, flags=re.MULTILINE)
    return text.rstrip()


def _wrap_signature(signature: str) -> str:
    if len(signature) < 90:
        return signature
    head, _, rest = signature.partition("(")
    return f"{head}(\n    " + rest.removesuffix(")").replace(", ", ",\n    ") + ",\n)"


@cache
def find_written_pages() -> dict[str, Path]:
    """Return the written page of every method."""
    return {name: file for file in sorted(links.ALGORITHMS.glob("*.md")) for name in links.list_methods(file)}


def _read_written_page(name: str) -> str:
    """Read the page in docs/algorithms, without its title and without the options of its other methods."""
    file = find_written_pages()[name]
    text = links.rewrite_links(
        file.read_text(encoding="utf-8"), f"docs/algorithms/{file.name}", f"algorithms/{name}.md"
    )
    title, _, text = text.partition("\n")
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    chosen = []
    for section in sections:
        heading = links.HEADING.match(section)
        if heading is None:
            chosen.append(section)
        elif heading[1] == name:
            chosen.append(section.replace(f"## `{name}`", "## Options", 1))
    others = [f"[`{other}`]({other}.md)" for other in links.list_methods(file) if other != name]
    siblings = f"Methods of the same paper: {', '.join(others)}.\n\n" if others else ""
    return f"## {title.removeprefix('# ')}\n\n{siblings}{head.strip()}\n\n{''.join(chosen)}".rstrip()


def _list_papers(name: str) -> tuple[str, ...]:
    return load_tables()["method"][name]


def _read_field(entry: str, name: str) -> str:
    """Return a field of a BibTeX entry as plain text; empty if the entry lacks the field."""
    found = re.search(rf"^  {name} = \{{(.*?)\}},?$", entry, re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"[{}\\\"]", "", found[1]).split()) if found else ""


def _format_paper(key: str) -> str:
    entry = load_entries()[key]
    names = [name.partition(",")[0] for name in _read_field(entry, "author").split(" and ")]
    authors = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
    venue = _read_field(entry, "booktitle") or _read_field(entry, "journal")
    text = f"{authors}, *{_read_field(entry, 'title')}*, {venue + ', ' if venue else ''}{_read_field(entry, 'year')}"
    number = _read_field(entry, "eprint")
    return text + (f", [arXiv {number}](https://arxiv.org/abs/{number})" if number else "")


def _format_bibtex(name: str) -> list[str]:
    if not _list_papers(name):
        return []
    text = "\n\n".join(load_entries()[key] for key in _list_papers(name))
    block = "\n".join(f"    {line}".rstrip() for line in f"```text\n{text}\n```".splitlines())
    return ['??? note "BibTeX"', "", block, ""]


@cache
def load_studies() -> dict[str, StudyResults]:
    """Read the committed results of all studies, by name."""
    folders = {name: links.ROOT / "results" / name for name in STUDIES}
    return {name: StudyResults(load_study(name), Records(path)) for name, path in folders.items() if path.is_dir()}


def _format_results(name: str) -> list[str]:
    out = []
    short = False
    for results in load_studies().values():
        study = results.study
        outcomes = [one for cell, one in results.outcomes.items() if study.source_row(cell).algorithm == name]
        if not outcomes:
            continue
        short |= any(results.list_shortfalls(one) for one in outcomes)
        out += [f"### {study.title}", "", *_format_outcomes(results, outcomes), ""]
    if not out:
        return ["No study in the repository has a row of this method.", ""]
    note = [
        '!!! warning "Shortened runs"', "",
        "    The last column names missing rounds or seeds. A shortened run neither supports nor contradicts the",
        "    printed number.", "",
    ]  # fmt: skip
    head = [
        "Test accuracies in %, from the raw results under `results/`. `Local` is the same clients, each training",
        "alone. [The papers' numbers and ours](../papers.md) explains the tables.", "",
    ]  # fmt: skip
    return [*head, *(note if short else []), *out]


def _format_outcomes(results: StudyResults, outcomes: list[Outcome]) -> Iterator[str]:
    study = results.study
    printed = f"paper's gap to {study.gap_to}, ours" if study.gap_to else "paper's"
    yield f"{describe_measure(study)} [The whole table](../studies/{study.name}.md)."
    yield ""
    yield f"| data | row | point | {printed} | ours | Local | lacks |"
    yield "|---|---|---|---|---|---|---|"
    for one in outcomes:
        alone = next(
            (
                o
                for c, o in results.outcomes.items()
                if study.rows[c.row].algorithm == "local" and c.column == one.cell.column
            ),
            None,
        )
        cells = (
            one.cell.column, one.cell.row, one.point, _format_paper_value(results, one), format_value(one),
            format_value(alone) if alone else "–", "; ".join(results.list_shortfalls(one)) or "nothing",
        )  # fmt: skip
        yield f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |"


def _format_paper_value(results: StudyResults, one: Outcome) -> str:
    printed, _ = results.study.paper_value(one.cell)
    if printed is None:
        return "–"
    gap = results.compute_compared_value(one)
    if results.study.gap_to:
        return f"{printed:.2f}, {'–' if gap is None else f'{gap:.2f}'}"
    off = results.compute_difference(one)
    return f"{printed:.2f}" + ("" if off is None else f" ({off:+.2f})".replace("-", "−"))


def group_by_family() -> dict[Family, list[str]]:
    """Return the methods of every family, in the order of the table of methods."""
    return {family: [name for name, one in METHODS.items() if one.family == family] for family in Family}


def make_table() -> str:
    """Return the table of all methods that docs/concepts/methods.md holds."""
    lines = ["| method | the server sends | the client | scored at |", "|---|---|---|---|"]
    for name, one in METHODS.items():
        link = f"[`{name}`](../algorithms/{find_written_pages()[name].name})"
        lines.append(f"| {link} | {one.server} | {one.client} | {one.factory().evaluation_point} |")
    return "\n".join(lines)


def _make_index() -> str:
    lines = [
        "# Methods", "",
        f"`--algorithms` takes {len(ALGORITHMS)} names. [Which method when](../concepts/methods.md) helps to choose.",
        "Each page lists the paper, the equations, the traffic, all options, every deviation from the paper and its",
        "public code, and our results.", "",
    ]  # fmt: skip
    for family, names in group_by_family().items():
        lines += [f"## {family}", ""]
        lines += [f"- [`{name}`]({name}.md): {summarize(ALGORITHMS[name])}" for name in names]
        lines.append("")
    return "\n".join(lines)


def _make_navigation() -> str:
    lines = ["- [All methods](index.md)"]
    for family, names in group_by_family().items():
        lines += [f"- {family}", *(f"    - [{name}]({name}.md)" for name in names)]
    return "\n".join(lines) + "\n"


def _make_study_pages() -> Iterator[tuple[str, str]]:
    lines = [
        "# Results in the repository", "",
        "`fedattune reproduce` makes each page from the raw results under `results/`.",
        "[The papers' numbers and ours](../papers.md) discusses the results.",
        "[Reproducing](../reproduce.md) describes the runs.", "",
        "| study | missing |", "|---|---|",
    ]  # fmt: skip
    for results in load_studies().values():
        study = results.study
        page = f"studies/{study.name}.md"
        file = f"results/{study.name}/table.md"
        text = links.rewrite_links((links.ROOT / file).read_text(encoding="utf-8"), file, page)
        if find_figure(study.name).exists():
            text = f"{text.rstrip()}\n\n## Figure\n\n![{study.title}]({study.name}.svg)\n"
        yield page, text
        short = {phrase for one in results.outcomes.values() for phrase in results.list_shortfalls(one)}
        rounds = sorted((phrase for phrase in short if phrase.endswith("rounds")), key=lambda p: int(p.split()[0]))
        some = [p for p in ("no search", "bfloat16 products") if p in short]
        seeds = sorted(phrase for phrase in short if "seeds" in phrase)
        lack = "; ".join([*rounds, *seeds, *some]) or "nothing"
        lines.append(f"| [{study.title}]({study.name}.md) | {lack} |")
    yield "studies/index.md", "\n".join(lines) + "\n"
    names = ["- [All studies](index.md)"]
    names += [f"- [{s.study.title.split(' (')[0]}]({s.study.name}.md)" for s in load_studies().values()]
    yield "studies/SUMMARY.md", "\n".join(names) + "\n"


def find_figure(study: str) -> Path:
    """Return the path of a study's picture."""
    return links.ROOT / "results" / study / "figure.svg"


def load_figures() -> dict[str, bytes]:
    """Return the pictures of all studies by path on the site."""
    return {
        f"studies/{name}.svg": find_figure(name).read_bytes() for name in load_studies() if find_figure(name).exists()
    }
