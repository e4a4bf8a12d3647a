"""How the commands write: tables for people, JSON for scripts, errors as a line and a hint."""

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

WIDTH_OF_NO_TERMINAL = 160


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output (or error); where that is no terminal, wide enough not to break paths."""
    console = Console(stderr=stderr, highlight=False)
    # Where there is no terminal, rich assumes 80 columns and breaks paths in two.
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=WIDTH_OF_NO_TERMINAL)
    return console


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_error(error: Exception) -> None:
    """The error as one paragraph on standard error, and its hint, if it has one, on a line of its own."""
    typer.secho(f"error: {error}", err=True, fg="red")
    hint = getattr(error, "hint", "")
    if hint:
        typer.echo(f"hint: {hint}", err=True)


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Names and values in two columns, without lines. Values may be rich renderables; empty ones are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in ("", None):
            table.add_row(name, value if hasattr(value, "__rich_console__") else str(value))
    return table


def counts_text(counts: Mapping[str, int]) -> str:
    """``a 1 · b 2``, zeros left out; a dash for nothing at all."""
    return " · ".join(f"{name} {number}" for name, number in counts.items() if number) or "-"
