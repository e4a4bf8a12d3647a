"""Renders the report as one HTML file that contains everything and loads nothing.

The chart library is embedded once, from the installed package. The content security policy lists the hashes of the
scripts: text from a log could not run as a script even if it were not escaped.
"""

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import chain, groupby

import msgspec

from forebay.core.lazy_names import require_extra
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.render.blocks import (
    Block,
    Cell,
    Chart,
    FigureBlock,
    FoldBlock,
    PageSection,
    ParagraphBlock,
    RichCell,
    TableBlock,
    text_of,
)
from forebay.telemetry.render.sections import facts_text, sections_of
from forebay.telemetry.visible_text import visible


def page(report: ProfileReport, others: Sequence[ProfileReport] = ()) -> str:
    """The report as a page; ``others`` are compared with it. Raises ``MissingExtra`` without plotly."""
    sections = sections_of(report, others)
    figures = {figure.name: figure.chart for section in sections for figure in _figures(section.blocks)}
    scripts = [_script(_plotly_script()), _script(_asset("page.js"))]
    parts = chain(
        ["<!doctype html>\n", '<html lang="en"><head><meta charset="utf-8">\n'],
        [f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'],
        ['<meta name="viewport" content="width=device-width, initial-scale=1">\n', '<link rel="icon" href="data:,">\n'],
        [f"<title>{_text(report.source)}: where the time goes</title>\n"],
        [f"<style>{_asset('page.css')}</style>\n"],
        ["<noscript><style>.step { display: block !important }</style></noscript></head>\n<body>\n"],
        _head(report, sections),
        (part for section in sections for part in _section(section)),
        [f'<script type="application/json" id="figures">{_data(figures)}</script>\n'],
        (f"<script>{script}</script>\n" for script in scripts),
        ["</body></html>\n"],
    )
    return "".join(parts)


def _plotly_script() -> str:
    require_extra("report", "plotly")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """A script that can be embedded: nothing in it ends the element. In JavaScript strings ``\\/`` is a slash."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Plotly writes style elements, and creates pictures to save from data.
    images = "img-src data: blob:"
    rest = "base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; {images}; {rest}"


def _data(figures: dict[str, Chart]) -> str:
    """JSON without characters that are special in HTML."""
    text = msgspec.json.encode(figures).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(text: str) -> str:
    return html.escape(visible(text))


def _head(report: ProfileReport, sections: Sequence[PageSection]) -> Iterator[str]:
    yield f"<header><h1>{_text(report.source)}</h1>\n<p>{facts_text(report)}</p>\n<nav>"
    yield from (f'<a href="#{each.anchor}">{_text(each.title)}</a>' for each in sections if not each.is_step)
    if steps := [section for section in sections if section.is_step]:
        yield '<label>Step <select id="steps">'
        for section in steps:
            selected = " selected" if section.is_first else ""
            name = _text(section.title.removeprefix("Step "))
            yield f'<option value="{section.anchor}"{selected}>{name}</option>'
        yield "</select></label>"
    yield "</nav></header>\n"


def _figures(blocks: Sequence[Block]) -> Iterator[FigureBlock]:
    for block in blocks:
        if isinstance(block, FigureBlock):
            yield block
        elif isinstance(block, FoldBlock):
            yield from _figures(block.blocks)


def _section(section: PageSection) -> Iterator[str]:
    kind = f' class="step{" is-shown" if section.is_first else ""}"' if section.is_step else ""
    yield f'<section id="{section.anchor}"{kind}><h2>{_text(section.title)}</h2>\n'
    yield from _blocks(section.blocks)
    yield "</section>\n"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for are_figures, run in groupby(blocks, key=lambda block: isinstance(block, FigureBlock)):
        # Consecutive figures are placed side by side if there is room.
        yield '<div class="figures">\n' if are_figures else ""
        yield from (part for block in run for part in _block(block))
        yield "</div>\n" if are_figures else ""


def _block(block: Block) -> Iterator[str]:
    match block:
        case ParagraphBlock():
            yield f'<p class="note">{_text(block.text)}</p>\n' if block.is_note else f"<p>{_text(block.text)}</p>\n"
        case TableBlock():
            yield from _table(block)
        case FigureBlock():
            title, height = _text(block.title), int(block.chart["layout"].get("height", 360))
            yield f'<figure><figcaption>{title}</figcaption><div class="chart" data-figure="{block.name}" '
            yield f'style="height:{height}px" role="img" aria-label="{title}"></div></figure>\n'
        case FoldBlock():
            yield f'<details id="{block.anchor}"><summary>{_text(block.title)}</summary>\n'
            yield from _blocks(block.blocks)
            yield "</details>\n"


def _table(table: TableBlock) -> Iterator[str]:
    columns = zip(*table.rows, strict=True)
    kinds = [' class="number"' if all(map(_is_number, column)) else "" for column in columns]
    kinds += [""] * (len(table.headers) - len(kinds))
    yield '<div class="table"><table><thead><tr>'
    yield from (f"<th{kind}>{_text(header)}</th>" for kind, header in zip(kinds, table.headers, strict=True))
    yield "</tr></thead><tbody>\n"
    for row in table.rows:
        yield f"<tr>{''.join(f'<td{kind}>{_cell(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>\n"
    yield "</tbody></table></div>\n"


def _is_number(cell: Cell) -> bool:
    text = text_of(cell)
    return len(text) <= 12 and (text[:1].isdigit() or text == "-")


def _cell(cell: Cell) -> str:
    text = _text(text_of(cell))
    if isinstance(cell, RichCell) and cell.is_worst:
        return f"<strong>{text}</strong>"
    return f'<a href="#{cell.anchor}">{text}</a>' if isinstance(cell, RichCell) and cell.anchor else text
