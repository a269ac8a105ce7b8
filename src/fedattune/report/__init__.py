"""A report: runs as one HTML file that needs no network, made from their stores alone."""

import base64
import gzip
import json
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from .._version import __version__
from ..compare import by_algorithm, columns, legend, rows
from ..errors import RunError
from ..files import write_text
from ..reading import Runs
from ..relations import Relations
from ..runs.folder import RunFolder, read_json
from ..verdict import Verdict, fairness_notes, seed_gaps
from . import content, findings

MOST_BYTES = 3_200_000
"""Bytes of data in a report; the page and its chart library take a million and a half."""


def write_report(path: Path | str, runs: Runs) -> None:
    """Write the report on some runs to `path`.

    The page holds all it shows and the chart library (Apache ECharts), asks for nothing from any network, and stays
    below 5 MB: of many clients or rounds, as many mixing matrices are shown as fit.
    """
    write_text(Path(path), render(runs))


def render(runs: Runs) -> str:
    """The page as text.

    Raises:
        RunError: no run has finished a round.

    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    if not runs.results:
        raise RunError("there is nothing to report yet: no round is finished; look again later")
    environment = Environment(
        loader=PackageLoader("fedattune.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.1f}"
    here = files("fedattune.report")
    found = findings.judged(runs)
    results, rounds_to = runs.results, runs.rounds_to
    table = rows(results, rounds_to)
    groups = by_algorithm(results)
    data, matrices = _fitting(runs, found)
    joined = findings.newcomers(results)
    return environment.get_template("report.html").render(
        title=runs.title + (f", {len(joined)} of them joining after training" if joined else ""),
        head=findings.headline(runs, found),
        live=not runs.finished,
        warnings=findings.warnings(runs, found),
        tables=[
            {
                "columns": list(group),
                "rows": [(row.algorithm, [cell(row) for cell in group.values()]) for row in table],
            }
            for group in columns(table, rounds_to)
        ],
        legend=legend(table, rounds_to),
        newcomers=joined,
        methods=list(groups),
        mixes=bool(data["mixing"]),
        notes=_notes(runs),
        config=findings.configuration(results),
        environments=_environments(runs),
        version=__version__,
        made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        css=Markup((here / "templates" / "report.css").read_text("utf-8")),  # noqa: S704 (our own)
        script=Markup((here / "templates" / "report.js").read_text("utf-8")),  # noqa: S704
        library=Markup((here / "vendor" / "echarts.min.js").read_text("utf-8")),  # noqa: S704
        data=_packed(json.dumps(data, separators=(",", ":"), allow_nan=False).encode()),
        matrices=matrices,
    )


def _fitting(runs: Runs, found: Verdict) -> tuple[dict[str, Any], str]:
    """The data of the pictures, and as many mixing matrices, packed, as the page has room for."""
    groups = by_algorithm(runs.results)
    relations = {name: Relations(of_one[0]) for name, of_one in groups.items()}
    data: dict[str, Any] = {
        "method": found.method,
        "methods": list(groups),
        "curves": content.curves(groups),
        "clients": content.clients(groups, relations),
        "traffic": content.traffic(groups),
        "seeds": {name: [run.settings.seed for run in of_one] for name, of_one in groups.items()},
    }
    cells = content.MOST_CELLS
    while True:
        data["mixing"], matrices = content.mixing(relations, cells)
        packed = _packed(matrices)
        if len(packed) < MOST_BYTES or cells < 1_000:
            return data, packed
        cells = min(cells, len(matrices)) // 2


def _packed(raw: bytes) -> str:
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def _notes(runs: Runs) -> list[str]:
    """What the data and the methods have to say."""
    said = [note for run in runs.results for note in (*run.facts.get("data_notes", ()), *run.notes)]
    warned = seed_gaps(runs.results).values()
    return [note for note in dict.fromkeys([*said, *fairness_notes(runs.results)]) if note not in warned]


def _environments(runs: Runs) -> list[dict[str, str]]:
    """The versions and machines that the runs were made with, each once."""
    found: dict[str, dict[str, str]] = {}
    for folder in runs.folders:
        file = RunFolder(folder).environment
        if file.is_file():
            said = read_json(file)
            packages = ", ".join(f"{name} {version}" for name, version in said.pop("packages", {}).items())
            text = {key: str(value) for key, value in said.items() if value is not None} | {
                "packages": packages
            }
            found.setdefault(json.dumps(text, sort_keys=True), text)
    return list(found.values())
