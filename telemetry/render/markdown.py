"""Renders the findings and tables of the page as Markdown, without pictures."""

import re
from collections.abc import Iterator, Sequence

from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.render.blocks import Block, Cell, FoldBlock, ParagraphBlock, RichCell, TableBlock
from forebay.telemetry.render.sections import facts_text, sections_of
from forebay.telemetry.visible_text import visible

_MEANS_SOMETHING = re.compile(r"([\\`*_\[\]<>|#~&!])")
"""Characters with a meaning in Markdown, or in HTML inside it."""


def markdown(report: ProfileReport, others: Sequence[ProfileReport] = ()) -> str:
    """The report as Markdown; ``others`` are compared with it."""
    return "\n".join(_lines(report, others))


def _lines(report: ProfileReport, others: Sequence[ProfileReport]) -> Iterator[str]:
    yield from (f"# {_text(report.source)}", "", facts_text(report), "")
    for section in sections_of(report, others):
        yield from (f"## {_text(section.title)}", "")
        for block in section.blocks:
            yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    match block:
        case ParagraphBlock():
            yield from (_text(block.text), "")
        case TableBlock():
            yield _row(block.headers)
            yield "|" + " --- |" * len(block.headers)
            yield from map(_row, block.rows)
            yield ""
        case FoldBlock():
            yield from (f"### {_text(block.title)}", "")
            for inner in block.blocks:
                yield from _block(inner)


def _row(cells: Sequence[Cell]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(cell: Cell) -> str:
    if isinstance(cell, RichCell):
        return f"**{_text(cell.text)}**" if cell.is_worst else _text(cell.text)
    return _text(cell)


def _text(text: str) -> str:
    """Text on one line, escaped so that it is not interpreted as Markdown."""
    return _MEANS_SOMETHING.sub(r"\\\1", visible(" ".join(text.splitlines())))
