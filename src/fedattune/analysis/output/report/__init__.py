"""Reports: runs as one HTML file that needs no network, made from their stores alone."""

import base64
import gzip
import hashlib
import json
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...._version import __version__
from ....core.errors import RunError
from ....core.io import write_text
from ....core.metrics import METRICS
from ....runs.folder import RunFolder
from ...compare import build_rows, group_by_algorithm
from ...load import Runs
from ...mixing.mixing import MixingAnalysis
from ...verdict.verdict import describe_seed_differences, merge_notes
from ..tables import choose_columns, format_points, write_legend
from . import content

MAX_DATA_BYTES = 3_200_000
"""Bytes of data in a report; the page and its chart library take a million and a half."""


def write_report(path: Path | str, runs: Runs) -> None:
    """Write the report on some runs to `path`.

    The page holds its data and the chart library (Apache ECharts) and asks nothing from any network. It stays below
    5 MB: of many clients or rounds, it shows as many mixing matrices as fit.

    Raises:
        RunError: no run has finished a round.
    """
    write_text(Path(path), render_report(runs))


def render_report(runs: Runs) -> str:
    """Render the page as text.

    Raises:
        RunError: no run has finished a round.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    if not runs.results:
        raise RunError("there is nothing to report yet: no round is finished; look again later")
    environment = Environment(
        loader=PackageLoader("fedattune.analysis.output.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["percent"] = lambda share: format_points(share, 1)
    here = files("fedattune.analysis.output.report")
    scripts = [
        "".join((here / name).read_text("utf-8") for name in names)
        for names in (
            ["templates/theme.js"],
            ["vendor/echarts.min.js"],
            ["templates/look.js", "templates/report.js"],
        )
    ]
    results, rounds_to = runs.results, runs.rounds_to
    table = build_rows(results, rounds_to, metric=runs.metric, baselines=runs.baselines)
    groups = group_by_algorithm(results)
    data, matrices = _fit_data(runs)
    joined = content.summarize_newcomers(results)
    return environment.get_template("report.html").render(
        title=runs.title + (f", {len(joined)} of them joining after training" if joined else ""),
        head=content.build_answer(runs),
        live=not runs.is_finished,
        reference=runs.verdict.reference,
        warnings=content.list_warnings(runs),
        tables=[
            {
                "columns": list(group),
                "rows": [(row.algorithm, [cell(row) for cell in group.values()]) for row in table],
            }
            for group in choose_columns(table, rounds_to)
        ],
        legend=write_legend(table, rounds_to),
        metric=data["metric"],
        curve=data["curve"],
        newcomers=joined,
        methods=list(groups),
        mixes=bool(data["mixing"]),
        notes=_collect_notes(runs),
        config=content.describe_configuration(results),
        environments=_collect_environments(runs),
        version=__version__,
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        css=Markup((here / "templates" / "report.css").read_text("utf-8")),  # noqa: S704 (our own)
        scripts=[Markup(script) for script in scripts],  # noqa: S704
        hashes=Markup(" ".join(map(_hash_script, scripts))),  # noqa: S704
        data=_encode(json.dumps(data, separators=(",", ":"), allow_nan=False).encode()),
        matrices=matrices,
    )


def _hash_script(script: str) -> str:
    """Return the source of a Content Security Policy that lets this script run, and no other one in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _fit_data(runs: Runs) -> tuple[dict[str, Any], str]:
    """Build the data of the pictures, and pack as many mixing matrices as fit into the page."""
    groups = group_by_algorithm(runs.results)
    mixings = {name: MixingAnalysis(group[0]) for name, group in groups.items()}
    data: dict[str, Any] = {
        "method": runs.verdict.method,
        "methods": list(groups),
        "metric": content.describe_metric(METRICS[runs.metric]),
        "curve": content.describe_metric(runs.results[0].curve_metric),
        "curves": content.build_curves(groups),
        "clients": content.build_clients(groups, mixings, runs.metric),
        "traffic": content.build_traffic(groups),
        "seeds": {name: [run.settings.seed for run in group] for name, group in groups.items()},
    }
    n_bytes = content.MAX_MATRIX_BYTES
    while True:
        data["mixing"], matrices = content.build_mixing(mixings, n_bytes)
        packed = _encode(matrices)
        if len(packed) < MAX_DATA_BYTES or n_bytes < 1_000:
            return data, packed
        n_bytes = min(n_bytes, len(matrices)) // 2


def _encode(raw: bytes) -> str:
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def _collect_notes(runs: Runs) -> list[str]:
    """Collect the notes on the data and the methods that are not warnings."""
    data_notes = [note for run in runs.results for note in run.facts.get("data_notes", ())]
    warnings = describe_seed_differences(runs.results).values()
    notes = [*data_notes, *merge_notes(runs.results, runs.baselines, runs.metric), *runs.notes]
    return [note for note in dict.fromkeys(notes) if note not in warnings]


def _collect_environments(runs: Runs) -> list[dict[str, str]]:
    """Collect the versions and machines of the runs, each once."""
    environments: dict[str, dict[str, str]] = {}
    for folder in map(RunFolder, runs.folders):
        if values := folder.read_environment():
            packages = values.pop("packages", {})
            text = {key: str(value) for key, value in values.items() if value is not None}
            text["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
            environments.setdefault(str(text), text)
    return list(environments.values())
