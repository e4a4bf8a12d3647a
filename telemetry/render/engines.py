"""The engines of a run side by side."""

from collections.abc import Callable, Sequence
from statistics import median

from forebay.telemetry.analysis.report import EngineFigures
from forebay.telemetry.numbers import number_text, seconds_text, share_text
from forebay.telemetry.render.blocks import Cell, PageSection, ParagraphBlock, RichCell, known_columns

_WORSE = 0.1
"""The worst value is marked if it is further than this share from the median of the others."""

_Figure = tuple[str, Callable[[EngineFigures], float | None], Callable[[float | None], str], Callable[..., float]]
_FIGURES: tuple[_Figure, ...] = (
    ("tokens/s of a call", lambda each: 1 / each.s_per_token if each.s_per_token else None, number_text, min),
    ("prefill of a call", lambda each: each.prefill_s, seconds_text, max),
    ("queue of a call", lambda each: each.queue_s, seconds_text, max),
    ("network of a call", lambda each: each.network_s, seconds_text, max),
    ("cached prompt tokens", lambda each: each.cached_share, share_text, min),
)
"""Header, value, its text, and which of the values is the worst."""


def engine_section(engines: Sequence[EngineFigures]) -> PageSection:
    """A row for each engine; the worst value of each column is marked."""
    rows: list[list[Cell]] = [
        [each.engine, number_text(each.num_requests), number_text(each.num_calls)] for each in engines
    ]
    for _, value_of, as_text, worst_of in _FIGURES:
        values = [value_of(each) for each in engines]
        worst = _worst([value for value in values if value is not None], worst_of)
        for row, value in zip(rows, values, strict=True):
            row.append(RichCell(as_text(value), is_worst=value is not None and value == worst))
    if not rows:
        return PageSection("engines", "Engines")
    note = "Medians over the calls. Marked is the worst of a column, if it differs from the others by over 10 %."
    headers = ("engine", "requests", "calls", *(header for header, *_ in _FIGURES))
    return PageSection("engines", "Engines", [known_columns(headers, rows), ParagraphBlock(note, is_note=True)])


def _worst(values: list[float], worst_of: Callable[..., float]) -> float | None:
    if len(values) < 2:
        return None
    worst = worst_of(values)
    values.remove(worst)
    usual = median(values)
    return worst if abs(worst - usual) > _WORSE * abs(usual) else None
