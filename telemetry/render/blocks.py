"""The building blocks of a report, for the page and for Markdown. Texts are unescaped: each renderer escapes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Chart = dict[str, Any]
"""``data`` and ``layout`` of a picture, in plotly's format."""


@dataclass(frozen=True, slots=True)
class RichCell:
    """A table cell that links to a place on the page, or is marked as the worst of its column."""

    text: str
    anchor: str = ""
    """The target of the link; "" if it is not shown."""
    is_worst: bool = False


Cell = str | RichCell


def text_of(cell: Cell) -> str:
    """The text of a cell."""
    return cell.text if isinstance(cell, RichCell) else cell


@dataclass(frozen=True, slots=True)
class ParagraphBlock:
    """A paragraph."""

    text: str
    is_note: bool = False
    """Whether it is about the report rather than the run."""


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table: headers and rows."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def known_columns(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> TableBlock:
    """A table of the columns that have any value. A log need not contain them all."""
    known = [index for index in range(len(headers)) if index == 0 or any(text_of(row[index]) != "-" for row in rows)]
    return TableBlock([headers[index] for index in known], [[row[index] for index in known] for row in rows])


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """A picture, for the page only."""

    name: str
    """Unique on the page."""
    title: str
    chart: Chart


@dataclass(frozen=True, slots=True)
class FoldBlock:
    """Blocks that are shown when their title is clicked."""

    anchor: str
    title: str
    blocks: Sequence["Block"]


Block = ParagraphBlock | TableBlock | FigureBlock | FoldBlock


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the report."""

    anchor: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    is_step: bool = False
    """Whether the section is one of several of which the page shows one at a time."""
    is_first: bool = False
    """Whether it is the one that is shown first."""
