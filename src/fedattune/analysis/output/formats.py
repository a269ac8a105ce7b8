"""Formats of the table of runs, each by one function and one registration: text, LaTeX, Markdown, CSV, Parquet."""

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...core.errors import ConfigError, did_you_mean
from ...core.metrics import METRICS
from ...core.own_code import check_new_name, is_reference, load_registered
from ...core.text import format_csv
from ..compare import MethodRow
from .tables import TEXT_COLUMNS, Columns, make_console, pick_columns, print_methods, select_columns, write_legend

if TYPE_CHECKING:
    import pyarrow as pa

    from ..load import Runs

WriteTable = Callable[..., str | bytes]
"""Write a table of `Runs`; takes the columns, too: `all`, or names with commas between, or None for its own choice."""
AnyWriter = TypeVar("AnyWriter", bound=WriteTable)


class TableFormat(NamedTuple):
    """A format of the table of runs; see `register_format`."""

    name: str
    write: WriteTable
    ending: str
    has_clients: bool = False
    is_binary: bool = False


TABLE_FORMATS: dict[str, TableFormat] = {}
"""Name -> format, in the order of `--help`."""


def register_format(
    ending: str, *, has_clients: bool = False, is_binary: bool = False
) -> Callable[[AnyWriter], AnyWriter]:
    """Register a function of runs and columns as the table format of its name.

    The function takes `Runs` and the option `--columns` (None if it is not given), and returns the table.

    Args:
        ending: ending of its files, such as ".csv".
        has_clients: whether the function has a keyword `clients`, for a table with one row per client.
        is_binary: whether the function returns bytes, not text.

    Raises:
        ConfigError: the name is that of a format of FedAttune.
    """

    def register(write: AnyWriter) -> AnyWriter:
        name = write.__name__
        check_new_name("table format", write, TABLE_FORMATS[name].write if name in TABLE_FORMATS else None)
        TABLE_FORMATS[name] = TableFormat(name, write, ending, has_clients, is_binary)
        return write

    return register


def find_format(name: str | None, ending: str) -> TableFormat:
    """Find a format by its name, or by file.py:name, or else by the ending of a file; text if nothing fits."""
    if name is None:
        return next((one for one in TABLE_FORMATS.values() if one.ending == ending), TABLE_FORMATS["text"])
    if is_reference(name):
        return load_registered(name, "format", TABLE_FORMATS)
    if name not in TABLE_FORMATS:
        raise ConfigError(
            f"--format {name}: no such format; {did_you_mean(name, TABLE_FORMATS)}, or a custom one as file.py:format"
        )
    return TABLE_FORMATS[name]


@register_format(".txt")
def text(runs: "Runs", columns: str | None) -> str:
    """Write the table of methods as plain text."""
    file = io.StringIO()
    print_methods(runs.rows, make_console(file), runs.rounds_to, columns)
    return file.getvalue().lstrip("\n")


LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "±": r"$\pm$",
}  # fmt: skip
NUMBER = re.compile(r"(?P<mean>-?\d[\d.,]*(?:e[+-]?\d+)?)(?: ±(?P<std>[\d.]+(?:e[+-]?\d+)?))?(?P<unit>%?)")


def fill_cells(rows: Sequence[MethodRow], columns: Columns) -> list[tuple[MethodRow, list[tuple[str, bool]]]]:
    """Format the cells of all rows, and tell which are the best of their columns; baselines are not.

    Numbers that look equal are all best, unless all methods have the same.
    """
    texts = {title: [column.format(row) for row in rows] for title, column in columns.items()}
    best: dict[str, str] = {}
    for title, column in columns.items():
        if pick := column.pick:
            values = {i: value for i, row in enumerate(rows) if row.point != "-" and (value := pick(row)) is not None}
            metric = METRICS[rows[0].metric]
            is_rmse = column.is_curve and not metric.is_for_classes
            sign = metric.sign if column.is_metric else -1 if is_rmse else 1
            shown = {i: texts[title][i].partition(" ±")[0] for i in values}
            if len(set(shown.values())) > 1:  # else none is better than another
                best[title] = shown[max(values, key=lambda i: sign * values[i])]
    filled = []
    for i, row in enumerate(rows):
        cells = [(texts[title][i], best.get(title)) for title in columns]
        filled.append((row, [(cell, row.point != "-" and cell.partition(" ±")[0] == top) for cell, top in cells]))
    return filled


def _join_columns(runs: "Runs", columns: str | None) -> Columns:
    groups = select_columns(runs.rows, runs.rounds_to, columns)
    return {title: cell for group in groups for title, cell in group.items()}


@register_format(".tex")
def latex(runs: "Runs", columns: str | None) -> str:
    """Write the table of methods as a LaTeX tabular for the package booktabs."""
    rows, chosen = runs.rows, _join_columns(runs, columns)
    alignment = "".join("l" if title in TEXT_COLUMNS else "r" for title in chosen)
    titles = [escape_latex(re.sub(r" %$", " (%)", title)) for title in chosen]
    lines = [
        r"% needs \usepackage{booktabs}; bold: best method",
        f"% {write_legend(rows, runs.rounds_to, [chosen])}",
        rf"\begin{{tabular}}{{l{alignment}}}",
        r"\toprule",
        " & ".join(["method", *titles]) + r" \\",
        r"\midrule",
    ]
    for row, cells in fill_cells(rows, chosen):
        texts = [_format_latex_cell(*cell) for cell in cells]
        lines.append(" & ".join([escape_latex(row.algorithm), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escape_latex(text: str) -> str:
    r"""Escape the characters that LaTeX reads as commands.

    Examples:
        >>> print(escape_latex("fedavg_mcsa & 10%"))
        fedavg\_mcsa \& 10\%
    """
    return "".join(LATEX_ESCAPES.get(letter, letter) for letter in text)


def _format_latex_cell(text: str, is_best: bool) -> str:
    if text == "-":
        return "--"
    match = NUMBER.fullmatch(text)
    if match and (match["std"] or match["mean"].startswith("-")):
        mean = rf"\mathbf{{{match['mean']}}}" if is_best else match["mean"]
        std = rf" \pm {match['std']}" if match["std"] else ""
        return f"${mean}{std}${escape_latex(match['unit'])}"
    return rf"\textbf{{{escape_latex(text)}}}" if is_best else escape_latex(text)


@register_format(".md")
def markdown(runs: "Runs", columns: str | None) -> str:
    """Write the table of methods as Markdown, with its legend below."""
    rows, chosen = runs.rows, _join_columns(runs, columns)
    lines = ["| " + " | ".join(["method", *(_escape_markdown(title) for title in chosen)]) + " |"]
    lines.append("|---|" + "".join("---|" if title in TEXT_COLUMNS else "---:|" for title in chosen))
    for row, cells in fill_cells(rows, chosen):
        texts = [f"**{_escape_markdown(text)}**" if is_best else _escape_markdown(text) for text, is_best in cells]
        lines.append("| " + " | ".join([_escape_markdown(row.algorithm), *texts]) + " |")
    legend = _escape_markdown(write_legend(rows, runs.rounds_to, [chosen]))
    return "\n".join([*lines, "", f"{legend}. Bold: best method."]) + "\n"


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>])", r"\\\1", text)


def select_table_columns(table: "pa.Table", names: str | None) -> "pa.Table":
    """Select columns of a tidy table by their names, with commas between; None or `all` keeps all."""
    return table if names in (None, "all") else table.select(pick_columns(str(names), table.column_names))


@register_format(".csv", has_clients=True)
def csv(runs: "Runs", columns: str | None, *, clients: bool = False) -> str:
    """Write one row per method, seed and split, or per client of each, as CSV; text is guarded against spreadsheets."""
    table = select_table_columns(runs.to_table(clients=clients), columns)
    # Not PyArrow's writer, which quotes every text.
    columns_of_cells = (column.to_pylist() for column in table.columns)
    return format_csv([table.column_names, *zip(*columns_of_cells, strict=True)])


@register_format(".parquet", has_clients=True, is_binary=True)
def parquet(runs: "Runs", columns: str | None, *, clients: bool = False) -> bytes:
    """Write one row per method, seed and split, or per client of each, as Parquet."""
    from pyarrow.parquet import write_table

    content = io.BytesIO()
    write_table(select_table_columns(runs.to_table(clients=clients), columns), content)
    return content.getvalue()
