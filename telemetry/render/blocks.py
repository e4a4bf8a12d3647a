"""What a report is put together from, whether it becomes a page or Markdown. All texts are as they came: a face of the
report escapes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Chart = dict[str, Any]
"""``data`` and ``layout`` of a picture, as plotly takes them."""


@dataclass(frozen=True, slots=True)
class LinkCell:
    """A cell of a table that leads somewhere on the page."""

    text: str
    anchor: str = ""
    """Of what it leads to; "" where that is not shown."""


Cell = str | LinkCell


@dataclass(frozen=True, slots=True)
class ParagraphBlock:
    """A paragraph."""

    text: str
    is_note: bool = False
    """Whether it is about the report and not about the run."""


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows below headers."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def known_columns(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> TableBlock:
    """A table of those columns of which a log tells anything: it need not tell all."""
    known = [index for index in range(len(headers)) if index == 0 or any(row[index] != "-" for row in rows)]
    return TableBlock([headers[index] for index in known], [[row[index] for index in known] for row in rows])


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """A picture, for the page only."""

    name: str
    """Of its own on the page."""
    title: str
    chart: Chart


@dataclass(frozen=True, slots=True)
class FoldBlock:
    """What is shown once its title is clicked at."""

    anchor: str
    title: str
    blocks: Sequence["Block"]


Block = ParagraphBlock | TableBlock | FigureBlock | FoldBlock


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of the report."""

    anchor: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    is_step: bool = False
    """Whether it is one of several of which a page shows one at a time."""
    is_first: bool = False
    """Whether it is the one of them that is shown first."""
