"""A page for every method: what its code says of itself, the page on its paper, and the committed results."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from fedattune import Algorithm
from fedattune.algorithms import ALGORITHMS, METHODS
from fedattune.algorithms.table import Family
from fedattune.analysis.citations import load_entries, load_tables
from fedattune.core.options import list_options, summarize
from fedattune.experiments.studies.outcome import Outcome, StudyResults
from fedattune.experiments.studies.records import Records
from fedattune.experiments.studies.study import STUDIES, load_study
from fedattune.experiments.studies.table import describe_measure

from . import links
from .reference import clean_docstring

POINTS = {
    "received": "`received`: the model that a client holds after communication, before it trains on it",
    "trained": "`trained`: the model that a client holds after local training",
}


def pages() -> dict[str, str]:
    """Path on the site -> text: the page of every method, their list, and the tables of all studies."""
    made = {f"algorithms/{name}.md": page(name, factory) for name, factory in ALGORITHMS.items()}
    made |= {"algorithms/index.md": _index(), "algorithms/SUMMARY.md": _navigation()}
    return made | dict(_studies())


def page(name: str, factory: Callable[..., Algorithm]) -> str:
    """The page of one method."""
    first, _, more = clean_docstring(factory).partition("\n\n")
    said = ", ".join(f"{option.name}={option.default!r}" for option in list_options(factory))
    written = _written(name)
    facts = [
        f"| Paper | {'; '.join(map(_paper, _keys(name))) or 'none'} |",
        f"| Scored at | {POINTS[factory().headline]} |",
        f"| Command line | `fedattune compare --algorithms local,{name}` |",
        f'| Python | `fedattune.fit("{name}", data)`, or with the object that `fedattune.algorithms.{name}()` makes |',
    ]
    return "\n".join(
        [
            f"# `{name}`", "", " ".join(first.split()), "", *([more, ""] if more else []),
            "| | |", "|---|---|", *facts, "",
            "```text", _wrapped(f"{name}({'*, ' if said else ''}{said})"), "```", "",
            *_bibtex(name),
            written, "",
            "## Results in the repository", "", *_results(name),
        ]
    )  # fmt: skip


def _wrapped(signature: str) -> str:
    if len(signature) < 90:
        return signature
    head, _, rest = signature.partition("(")
    return f"{head}(\n    " + rest.removesuffix(")").replace(", ", ",\n    ") + ",\n)"


@cache
def _page_of() -> dict[str, Path]:
    return {name: file for file in sorted(links.ALGORITHMS.glob("*.md")) for name in links.list_methods(file)}


def _written(name: str) -> str:
    """The page in docs/algorithms without its title and without the options of its other methods."""
    file = _page_of()[name]
    text = links.rewrite_links(
        file.read_text(encoding="utf-8"), f"docs/algorithms/{file.name}", f"algorithms/{name}.md"
    )
    title, _, text = text.partition("\n")
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = []
    for section in sections:
        found = links.HEADING.match(section)
        if found is None:
            kept.append(section)
        elif found[1] == name:
            kept.append(section.replace(f"## `{name}`", "## Options", 1))
    others = [f"[`{one}`]({one}.md)" for one in links.list_methods(file) if one != name]
    beside = f"Of the same page: {', '.join(others)}.\n\n" if others else ""
    return f"## {title.removeprefix('# ')}\n\n{beside}{head.strip()}\n\n{''.join(kept)}".rstrip()


def _keys(name: str) -> tuple[str, ...]:
    return load_tables()["method"][name]


def _field(entry: str, name: str) -> str:
    found = re.search(rf"^  {name} = \{{(.*?)\}},?$", entry, re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"[{}\\\"]", "", found[1]).split()) if found else ""


def _paper(key: str) -> str:
    entry = load_entries()[key]
    first = _field(entry, "author").split(" and ")
    authors = first[0].partition(",")[0] + (" et al." if len(first) > 2 else "")
    if len(first) == 2:
        authors += " and " + first[1].partition(",")[0]
    where = _field(entry, "booktitle") or _field(entry, "journal")
    printed = f"{authors}, *{_field(entry, 'title')}*, {where + ', ' if where else ''}{_field(entry, 'year')}"
    number = _field(entry, "eprint")
    return printed + (f", [arXiv {number}](https://arxiv.org/abs/{number})" if number else "")


def _bibtex(name: str) -> list[str]:
    if not _keys(name):
        return []
    text = "\n\n".join(load_entries()[key] for key in _keys(name))
    block = "\n".join(f"    {line}".rstrip() for line in f"```text\n{text}\n```".splitlines())
    return ['??? note "BibTeX"', "", block, ""]


@cache
def studies() -> tuple[StudyResults, ...]:
    """Read the committed results of all studies."""
    found = []
    for name in STUDIES:
        folder = links.ROOT / "results" / name
        if folder.is_dir():
            found.append(StudyResults(load_study(name), Records(folder)))
    return tuple(found)


def _results(name: str) -> list[str]:
    out = []
    short = False
    for results in studies():
        study = results.study
        mine = [one for cell, one in results.outcomes.items() if study.source_row(cell).algorithm == name]
        if not mine:
            continue
        short |= any(results.shortfalls(one) for one in mine)
        out += [f"### {study.title}", "", *_of_study(results, mine), ""]
    if not out:
        return ["No study in the repository has a row of this method.", ""]
    note = [
        '!!! warning "Shortened runs"', "",
        "    Where the last column names fewer rounds or seeds than the paper has, a number tells how the",
        "    method starts, not where it ends, and says nothing for or against the printed one.", "",
    ]  # fmt: skip
    head = [
        "Test accuracies in %, made from the raw results under `results/` when this site is built. `Local` is the same",
        "clients, each training alone. How to read them: [The papers' numbers and ours](../papers.md).", "",
    ]  # fmt: skip
    return [*head, *(note if short else []), *out]


def _of_study(results: StudyResults, mine: list[Outcome]) -> Iterator[str]:
    study = results.study
    printed = f"paper's gap to {study.gap_to}, ours" if study.gap_to else "paper's"
    yield f"{describe_measure(study)} [The whole table](../studies/{study.name}.md)."
    yield ""
    yield f"| data | row | point | {printed} | ours | Local | lacks |"
    yield "|---|---|---|---|---|---|---|"
    for one in mine:
        alone = next(
            (
                o
                for c, o in results.outcomes.items()
                if study.rows[c.row].algorithm == "local" and c.column == one.cell.column
            ),
            None,
        )
        cells = (
            one.cell.column, one.cell.row, one.point, _beside(results, one), _number(one),
            _number(alone) if alone else "–", "; ".join(results.shortfalls(one)) or "nothing",
        )  # fmt: skip
        yield f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |"


def _beside(results: StudyResults, one: Outcome) -> str:
    printed, _ = results.study.paper_value(one.cell)
    if printed is None:
        return "–"
    gap = results.compared_value(one)
    if results.study.gap_to:
        return f"{printed:.2f}, {'–' if gap is None else f'{gap:.2f}'}"
    off = results.difference(one)
    return f"{printed:.2f}" + ("" if off is None else f" ({off:+.2f})".replace("-", "−"))


def _number(one: Outcome) -> str:
    if one.value is None:
        return "diverged"
    return f"{one.value.mean:.2f}" + (f" ±{one.value.std:.2f}" if one.n_seeds > 1 else "")


def families() -> dict[Family, list[str]]:
    """Return family -> its methods, in the order of the table of methods."""
    return {family: [name for name, one in METHODS.items() if one.family == family] for family in Family}


def table() -> str:
    """Write the table of all methods that docs/concepts/methods.md holds."""
    lines = ["| method | the server sends | the client | scored at |", "|---|---|---|---|"]
    for name, one in METHODS.items():
        link = f"[`{name}`](../algorithms/{_page_of()[name].name})"
        lines.append(f"| {link} | {one.server} | {one.client} | {one.factory().headline} |")
    return "\n".join(lines)


def _index() -> str:
    lines = [
        "# Methods", "",
        f"`--algorithms` takes {len(ALGORITHMS)} names. [Which method when](../concepts/methods.md) helps to choose.",
        "Each page lists the paper, the equations, the traffic, all options, every deviation from the paper and its",
        "public code, and our results.", "",
    ]  # fmt: skip
    for family, names in families().items():
        lines += [f"## {family}", ""]
        lines += [f"- [`{name}`]({name}.md): {summarize(ALGORITHMS[name])}" for name in names]
        lines.append("")
    return "\n".join(lines)


def _navigation() -> str:
    lines = ["- [All methods](index.md)"]
    for family, names in families().items():
        lines += [f"- {family}", *(f"    - [{name}]({name}.md)" for name in names)]
    return "\n".join(lines) + "\n"


def _studies() -> Iterator[tuple[str, str]]:
    lines = [
        "# Results in the repository", "",
        "Each page is printed by `fedattune reproduce` from the raw results beside it under `results/`. What they say:",
        "[The papers' numbers and ours](../papers.md). How to make them: [Reproducing](../reproduce.md).", "",
        "| study | what it lacks |", "|---|---|",
    ]  # fmt: skip
    for results in studies():
        study = results.study
        page = f"studies/{study.name}.md"
        file = f"results/{study.name}/table.md"
        text = links.rewrite_links((links.ROOT / file).read_text(encoding="utf-8"), file, page)
        if figure(study.name).exists():
            text = f"{text.rstrip()}\n\n## Figure\n\n![{study.title}]({study.name}.svg)\n"
        yield page, text
        short = {phrase for one in results.outcomes.values() for phrase in results.shortfalls(one)}
        rounds = sorted(
            (phrase for phrase in short if phrase.endswith("rounds")), key=lambda p: int(p.split()[0])
        )
        some = [p for p in ("no search", "bfloat16 products") if p in short]
        seeds = sorted(phrase for phrase in short if "seeds" in phrase)
        lack = "; ".join([*rounds, *seeds, *some]) or "nothing"
        lines.append(f"| [{study.title}]({study.name}.md) | {lack} |")
    yield "studies/index.md", "\n".join(lines) + "\n"
    names = ["- [All studies](index.md)"]
    names += [f"- [{s.study.title.split(' (')[0]}]({s.study.name}.md)" for s in studies()]
    yield "studies/SUMMARY.md", "\n".join(names) + "\n"


def figure(study: str) -> Path:
    """The picture of a study."""
    return links.ROOT / "results" / study / "figure.svg"


def figures() -> dict[str, bytes]:
    """Path on the site -> the pictures of all studies."""
    return {
        f"studies/{name}.svg": figure(name).read_bytes()
        for name in (results.study.name for results in studies())
        if figure(name).exists()
    }
