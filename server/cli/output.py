"""Output of the commands: tables for people, JSON for scripts, errors as a line and a hint.

All output passes through here, where ``telemetry/visible_text.py`` escapes control characters in text from others.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from forebay.telemetry.visible_text import visible, visible_json

WIDTH_OF_NO_TERMINAL = 160
WIDEST = 10_000


class VisibleConsole(Console):
    """A console on which only rich itself moves the cursor and chooses colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class VisibleTable(Table):
    """A table whose strings are plain text without markup before their widths are measured."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(visible(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def echo(text: str, *, err: bool = False, fg: str | None = None) -> None:
    """Print a line on standard output or error."""
    typer.secho(visible(text), err=err, fg=fg)


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output or error; outside a terminal, wide enough not to break paths."""
    console = VisibleConsole(stderr=stderr, highlight=False)
    # Without a terminal, rich assumes 80 columns and breaks paths in two.
    if not console.is_terminal:
        console = VisibleConsole(stderr=stderr, highlight=False, width=WIDTH_OF_NO_TERMINAL)
    return console


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    typer.echo(visible_json(value))


def show_error(error: Exception) -> None:
    """Print the error as one paragraph on standard error, and its hint, if any, on its own line."""
    echo(f"error: {error}", err=True, fg="red")
    hint = getattr(error, "hint", "")
    if hint:
        echo(f"hint: {hint}", err=True)


def columns_table(*headers: str) -> Table:
    """A table of several columns, without lines."""
    table = VisibleTable(box=None, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def show_table(console: Console, table: Table) -> None:
    """Print a table without truncation: lines may be longer than the terminal is wide."""
    options = console.options.update(max_width=WIDEST, markup=False)
    if table.show_header:
        # An id broken over two lines cannot be copied. Values of facts are prose and paths, and may fold.
        for column in table.columns:
            column.min_width = max(Measurement.get(console, options, cell).minimum for cell in _cells(column))
    needed = Measurement.get(console, options, table)
    width = needed.minimum if console.is_terminal else needed.maximum
    if width > console.width:
        table.width = width
    console.print(table, crop=False, markup=False)


def _cells(column: Column) -> Iterator[RenderableType]:
    yield column.header
    yield from column.cells


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Names and values in two columns, without lines. Values may be rich renderables; empty ones are left out."""
    table = VisibleTable.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in ("", None):
            table.add_row(name, value if hasattr(value, "__rich_console__") else str(value))
    return table


def counts_text(counts: Mapping[str, int]) -> str:
    """``a 1 · b 2``, zeros left out; a dash if all are zero."""
    return " · ".join(f"{name} {number}" for name, number in counts.items() if number) or "-"
