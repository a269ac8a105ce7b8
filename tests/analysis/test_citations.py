"""Every method, data set, partition and model of a paper is cited, by an entry that is whole."""

import re
from pathlib import Path

import pytest

import fedattune
from crafted import seal
from fedattune import Federation
from fedattune.algorithms import ALGORITHMS
from fedattune.analysis import citations
from fedattune.analysis.citations import FEDATTUNE, UsedItem, format_bibtex, load_entries, load_tables
from fedattune.data import PARTITIONS, SOURCES
from fedattune.models import MODELS

VENUES = {"inproceedings": "booktitle", "article": "journal", "techreport": "institution"}


def parse(entry: str) -> tuple[str, str, dict[str, str]]:
    """Type, key and fields of one entry, braces matched one by one; fails where the text is not BibTeX."""
    head = re.match(r"@(\w+)\{(\w+),\n", entry)
    assert head, entry
    fields = {}
    rest = entry[head.end() :]
    while field := re.match(r"  (\w+) = \{", rest):
        depth, end = 1, field.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(rest[end], 0)
            end += 1
        assert field[1] not in fields, f"{head[2]}: {field[1]} twice"
        fields[field[1]] = " ".join(rest[field.end() : end - 1].split())
        rest = rest[end:].removeprefix(",").removeprefix("\n")
    assert rest == "}", f"{head[2]}: cannot read {rest!r}"
    return head[1], head[2], fields


def test_no_key_is_defined_twice() -> None:
    files = Path(citations.__file__).parents[1].rglob("*.py")
    keys = re.findall(
        r"^ *(?:\w+ = \"\"\")?@\w+\{(\w+),$", "\n".join(file.read_text("utf-8") for file in files), re.MULTILINE
    )
    assert sorted(keys) == sorted(load_entries())


@pytest.mark.parametrize("key", load_entries())
def test_every_entry_is_whole(key: str) -> None:
    kind, own, fields = parse(load_entries()[key])
    assert own == key
    assert {"author", "title", "year"} <= fields.keys()
    assert all(fields.values())
    assert VENUES.get(kind, "title") in fields
    if kind == "misc":
        assert fields.keys() & {"eprint", "howpublished"}
    if "eprint" in fields:
        assert re.fullmatch(r"\d{4}\.\d{5}", fields["eprint"])
        assert fields["archiveprefix"] == "arXiv"
        assert 2000 + int(fields["eprint"][:2]) <= int(fields["year"])  # published after it was written
    if key != FEDATTUNE:
        people = fields["author"].split(" and ")
        assert all(re.fullmatch(r"[^,]+, [^,]+", person) for person in people), people  # Family, Given
        family = re.sub(r"[^a-z]", "", people[0].split(",")[0].lower())
        assert key.startswith(family + fields["year"]), "a key begins with the family name and the year"


@pytest.mark.parametrize(
    ("kind", "table"), [("method", ALGORITHMS), ("data", SOURCES), ("partition", PARTITIONS), ("model", MODELS)]
)
def test_everything_there_is_to_choose_from_is_known(kind: str, table: dict[str, object]) -> None:
    assert table.keys() <= load_tables()[kind].keys()


def test_each_entry_once_with_what_it_is_cited_for() -> None:
    text = format_bibtex(
        [UsedItem("method", "fedavg"), UsedItem("method", "fedavg_ft"), UsedItem("method", "igfl")], "1.2.3"
    )
    assert re.findall(r"^@\w+\{(\w+),", text, re.MULTILINE) == [
        "fedattune",
        "mcmahan2017communication",
        "huang2021behavior",
    ]
    assert "% method fedavg, method fedavg_ft\n@inproceedings{mcmahan2017communication" in text
    assert "version = {1.2.3}" in text
    assert "VERSION" not in text


def test_what_has_no_entry_is_said() -> None:
    text = format_bibtex([UsedItem("method", "local"), UsedItem("model", "pkg:net"), UsedItem("data", "patients.csv")])
    assert "% Nothing to cite for method local." in text
    assert "% Not part of FedAttune; please cite the source of model pkg:net, data pat" in text
    assert text.count("@") == 1


def test_a_run_of_python(equal: Federation, tmp_path: Path) -> None:
    """Clients that were given have no partition to cite; the version is that of the run."""
    fedattune.fit(equal, "fedprox", "mlr", rounds=1, steps=1, out=tmp_path / "run")
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(environment.read_text().replace(fedattune.__version__, "0.0.7"))
    seal(tmp_path / "run")
    used, version = citations.collect_used_items([tmp_path / "run"])
    assert used == [UsedItem("method", "fedprox"), UsedItem("data", equal.name), UsedItem("model", "mlr")]
    assert version == "0.0.7"


def test_entries_are_read_without_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -OO` removes the docstrings of the papers' files."""
    from fedattune.algorithms import fedmcsa

    entries = dict(load_entries())
    monkeypatch.setattr(fedmcsa, "__doc__", None)
    load_entries.cache_clear()
    assert load_entries() == entries
