"""Print for a terminal and for a pipe: tables are never cut, and a pipe gets plain lines of any length."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def said_bytes(count: float) -> str:
    """Bytes as people read them: 146.4 kB."""
    from rich.filesize import decimal

    return decimal(round(count)).replace(" bytes", " B").replace(" byte", " B")


def make_console() -> "Console":
    """A console on standard output that neither wraps nor colours text in a pipe."""
    import sys

    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def make_table(*columns: str, left: tuple[str, ...]) -> "Table":
    """An empty table; columns not named in `left` hold numbers and stand to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in columns:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    return table


def width_of(table: "Table", console: "Console") -> int:
    """Characters that the table needs when nothing is cut."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum


def print_whole(table: "Table", console: "Console") -> None:
    """Print a table at its own width, even where that is more than the terminal's."""
    before = console.width
    try:
        console.width = max(width_of(table, console), 1)
        with console.capture() as captured:
            console.print(table, crop=False)
    finally:
        console.width = before
    for line in captured.get().splitlines():
        print(line if console.is_terminal else line.rstrip(), file=console.file)


def print_indented(text: "Text", by: int, console: "Console") -> None:
    """Print a paragraph moved to the right, all its lines on a terminal."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, by)))
    else:
        console.print(Text(" " * by) + text)
