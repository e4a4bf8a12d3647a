"""The parts of a report about requests: when they end, which are outliers, and what if some ended earlier."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.telemetry.analysis.report import CompletionCurve, Gap, OutlierRequest, ProfileReport, WhatIf
from forebay.telemetry.analysis.robust import longest, thinned
from forebay.telemetry.numbers import number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render import charts
from forebay.telemetry.render.blocks import (
    Block,
    Cell,
    FigureBlock,
    FoldBlock,
    ParagraphBlock,
    RichCell,
    TableBlock,
    known_columns,
)
from forebay.telemetry.render.timelines import request_timeline

MOST_EVENTS = 240
"""Limit of events shown of a request: the longest."""
MOST_ROWS = 100


def completion_blocks(report: ProfileReport) -> list[Block]:
    """When the requests of each step end, and where nothing ended."""
    overall = [curve for curve in report.curves if not curve.worker]
    blocks: list[Block] = []
    if overall:
        blocks.append(ParagraphBlock(tail_sentence(overall)))
        kept = {f"step {each.step}": each for each in longest(overall, charts.MOST_LINES, lambda each: each.ends_s[-1])}
        blocks.append(FigureBlock("cdf_per_step", "When the requests of a step end", charts.completion(kept)))
        blocks.append(curve_table([(curve.step, curve) for curve in thinned(overall, MOST_ROWS)], "step"))
    if report.gaps:
        blocks.append(ParagraphBlock("Stretches in which no request of a worker ended:"))
        blocks.append(gap_table(report.gaps))
    return blocks


def tail_sentence(curves: Sequence[CompletionCurve]) -> str:
    """When 80 % of the requests of the median step end, and of the step with the longest tail; "" if unknown."""
    overall = sorted((curve for curve in curves if not curve.worker), key=lambda curve: curve.time_of_80)
    if not overall:
        return ""
    share = percent_text(overall[len(overall) // 2].time_of_80)
    worst = f"; in step {overall[0].step}, {percent_text(overall[0].time_of_80)}" if len(overall) > 1 else ""
    return f"80 % of the requests end in the first {share} of the time{worst}."


def curve_table(
    curves: Sequence[tuple[str, CompletionCurve]], what: str, barrier_s: Mapping[str, float] | None = None
) -> TableBlock:
    """A row for each curve, with the seconds at the barrier if ``what`` is a worker."""
    marks = list(dict.fromkeys(mark for _, curve in curves for mark in curve.percentiles))
    rows: list[list[Cell]] = []
    for name, curve in curves:
        at_marks = [curve.percentiles.get(mark) for mark in marks]
        times = (curve.mean_s, curve.std_s, curve.ends_s[0], *at_marks, curve.ends_s[-1])
        last = (percent_text(curve.time_of_80), seconds_text((barrier_s or {}).get(name)))
        rows.append([name, number_text(curve.num_requests), *map(seconds_text, times), *last])
    headers = (what, "requests", "mean", "std", "min", *(mark.upper() for mark in marks), "max")
    return known_columns((*headers, "80 % end in the first", "at the barrier"), rows)


def gap_table(gaps: Sequence[Gap]) -> TableBlock:
    """A row for each stretch in which nothing ended."""
    rows = []
    for gap in gaps[:MOST_ROWS]:
        times = [seconds_text(each) for each in (gap.begin_s, gap.end_s, gap.end_s - gap.begin_s)]
        rates = [f"{number_text(rate)} /s" for rate in (gap.rate_before, gap.rate_after)]
        verdict = "was stalled" if gap.is_standstill else "was slow"
        numbers = (number_text(gap.num_before), number_text(gap.num_after))
        rows.append([gap.step, gap.worker, *times, *numbers, *rates, verdict])
    headers = ("step", "worker", "from", "to", "lasted", "ended before", "after", "rate before", "after", "verdict")
    return TableBlock(headers, rows)


def outlier_blocks(outliers: Sequence[OutlierRequest], anchors: Mapping[str, str]) -> list[Block]:
    """The requests that steps waited for last, each with its cause, turns and timeline."""
    shown = [each for each in outliers if each.request in anchors]
    if not shown:
        return []
    headers = ("request", "step", "worker", "took", "excess", "cause", "what happened")
    rows: list[list[Cell]] = [
        [
            *(RichCell(each.request, anchors[each.request]), each.step, each.worker),
            *(seconds_text(each.seconds), seconds_text(each.beyond_s), each.cause.replace("_", " "), each.sentence),
        ]
        for each in shown
    ]
    return [TableBlock(headers, rows), *(_request(each, anchors[each.request]) for each in shown)]


def _request(outlier: OutlierRequest, anchor: str) -> FoldBlock:
    where = {"step": outlier.step, "worker": outlier.worker, "group": outlier.group}
    path = " → ".join(f"{name} {value}" for name, value in where.items() if value)
    blocks: list[Block] = [ParagraphBlock(f"{path}: {outlier.sentence}"), phase_table(outlier.phases)]
    if outlier.turns:
        blocks.append(_turn_table(outlier.turns))
    if outlier.events:
        kept = longest(outlier.events, MOST_EVENTS, lambda event: float(event["seconds"]))
        title = "Its turns and events"
        if len(kept) < len(outlier.events):
            title += f": the {len(kept)} longest of {len(outlier.events):,}; the export to Perfetto has all"
        blocks.append(FigureBlock(f"timeline-{anchor}", title, request_timeline(kept)))
    return FoldBlock(anchor, f"{outlier.request}: {seconds_text(outlier.seconds)}", blocks)


def phase_table(phases: Mapping[str, float]) -> TableBlock:
    """A row for each phase, the longest first."""
    total_s = sum(phases.values()) or 1.0
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    rows = [(name, seconds_text(spent), share_text(spent / total_s)) for name, spent in ordered]
    return TableBlock(("phase", "seconds", "share"), rows)


def _turn_table(turns: Sequence[Mapping[str, Any]]) -> TableBlock:
    """The recorded fields of each turn."""
    fields = list(dict.fromkeys(name for turn in turns for name in turn))
    rows = [[_turn_cell(name, turn.get(name)) for name in fields] for turn in turns]
    return TableBlock([name.removesuffix("_s").replace("_", " ") for name in fields], rows)


def _turn_cell(name: str, value: object) -> str:
    match value:
        case Mapping():
            return ", ".join(f"{key} {seconds_text(each)}" for key, each in value.items())
        case int() if name == "number":
            return str(value + 1)
        case int() | float():
            return seconds_text(value) if name.endswith(("_s", "seconds")) else number_text(value)
    return str(value or "-")


def what_if_blocks(choices: Sequence[WhatIf]) -> list[Block]:
    """What lower caps, or waiting for fewer requests, would have saved."""
    blocks: list[Block] = []
    kinds = (("cap", "max_tokens", number_text), ("wait_for", "share of the requests waited for", share_text))
    for what, unit, text in kinds:
        rows = [
            (text(each.value), seconds_text(each.saved_s), number_text(each.num_cut), number_text(each.reward_lost))
            for each in choices
            if each.what == what
        ]
        headers = (unit, "saved per step", "answers cut or thrown away", "rewards lost")
        blocks += [TableBlock(headers, rows)] if rows else []
    return blocks
