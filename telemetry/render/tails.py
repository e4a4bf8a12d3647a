"""The parts of a report about single requests: when they end, which are outliers, and which are thrown away."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.telemetry.analysis.report import CompletionCurve, Gap, OutlierRequest, ProfileReport, WhatIf
from forebay.telemetry.analysis.robust import longest, thinned
from forebay.telemetry.numbers import MOST_POINTS, counted, number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render import charts
from forebay.telemetry.render.blocks import (
    Block,
    Cell,
    FigureBlock,
    FoldBlock,
    PageSection,
    ParagraphBlock,
    RichCell,
    TableBlock,
    known_columns,
    text_of,
)
from forebay.telemetry.render.panels import Panel, panel_figures
from forebay.telemetry.render.timelines import request_timeline, turn_text

MOST_POINTS_TOGETHER = 40_000
"""Limit for all curves of a page. Without it, the curves of many steps and workers would be as large as the log."""
MOST_EVENTS = 240
"""Limit of events shown of a request: the longest."""
MOST_CURVE_ROWS = 100
MOST_TABLE_ROWS = 100


def points_per_curve(report: ProfileReport) -> int:
    """The number of points in each curve."""
    return max(40, min(MOST_POINTS, MOST_POINTS_TOGETHER // max(1, 2 * len(report.curves))))


def completion_section(report: ProfileReport) -> PageSection:
    """When the requests of each step end, and where nothing ended."""
    overall = [curve for curve in report.curves if not curve.worker]
    blocks: list[Block] = []
    if overall:
        blocks.append(ParagraphBlock(tail_sentence(overall)))
        kept = {f"step {curve.step}": curve for curve in _distinct(report, overall)}
        chart = charts.completion(kept, most=points_per_curve(report))
        blocks.append(FigureBlock("cdf_per_step", "When the requests of a step end", chart))
        blocks.append(curve_table([(curve.step, curve) for curve in thinned(overall, MOST_CURVE_ROWS)], "step"))
    if report.gaps:
        blocks.append(ParagraphBlock("Stretches in which no request of a worker ended:"))
        blocks.append(gap_table(report.gaps))
    return PageSection("completion", "When requests end", blocks)


def tail_sentence(curves: Sequence[CompletionCurve]) -> str:
    """When 80 % of the requests of the median step end, and of the step with the longest tail; "" if unknown."""
    overall = sorted((curve for curve in curves if not curve.worker), key=lambda curve: curve.time_of_80)
    if not overall:
        return ""
    share = percent_text(overall[len(overall) // 2].time_of_80)
    worst = f"; in step {overall[0].step}, {percent_text(overall[0].time_of_80)}" if len(overall) > 1 else ""
    return f"80 % of the requests end in the first {share} of the time{worst}."


def _distinct(report: ProfileReport, overall: Sequence[CompletionCurve]) -> list[CompletionCurve]:
    """As many curves as can be told apart: outlier steps, and others evenly spread."""
    marked = {step.name for step in report.steps if step.is_outlier}
    outliers = [curve for curve in overall if curve.step in marked][: charts.MOST_LINES // 2]
    others = [curve for curve in overall if curve.step not in marked]
    kept = {curve.step for curve in [*outliers, *thinned(others, charts.MOST_LINES - len(outliers))]}
    return [curve for curve in overall if curve.step in kept]


def curve_table(
    curves: Sequence[tuple[str, CompletionCurve]], what: str, barrier_s: Mapping[str, float] | None = None
) -> TableBlock:
    """A row for each curve, with the seconds at the barrier if ``what`` is a worker."""
    marks = list(dict.fromkeys(mark for _, curve in curves for mark in curve.percentiles))
    rows: list[list[Cell]] = []
    for name, curve in curves:
        times = (curve.mean_s, curve.std_s, curve.min_s, *(curve.percentiles.get(mark) for mark in marks), curve.max_s)
        waited = seconds_text((barrier_s or {}).get(name))
        rows.append([name, number_text(curve.num_requests), *map(seconds_text, times), waited, curve.sentence])
    headers = (what, "requests", "mean", "std", "min", *(mark.upper() for mark in marks), "max", "at the barrier")
    return known_columns((*headers, "summary"), rows)


def gap_table(gaps: Sequence[Gap]) -> TableBlock:
    """A row for each stretch in which nothing ended, longest first."""
    longest = sorted(gaps, key=lambda gap: gap.begin_s - gap.end_s)[:MOST_TABLE_ROWS]
    headers = ("step", "worker", "from", "to", "lasted", "ended before", "after", "rate before", "after", "verdict")
    return TableBlock(headers, [_gap_row(gap) for gap in longest])


def _gap_row(gap: Gap) -> list[Cell]:
    times = [seconds_text(each) for each in (gap.begin_s, gap.end_s, gap.end_s - gap.begin_s)]
    rates = [f"{number_text(rate)} /s" for rate in (gap.rate_before, gap.rate_after)]
    verdict = "was stalled" if gap.is_standstill else "was slow"
    return [gap.step, gap.worker, *times, number_text(gap.num_before), number_text(gap.num_after), *rates, verdict]


def outlier_section(report: ProfileReport, anchors: Mapping[str, str]) -> PageSection:
    """The requests that took longer than comparable ones, each with its cause, turns and timeline."""
    shown = [each for each in report.outliers if each.request in anchors]
    blocks: list[Block] = [outlier_table(shown, anchors)] if shown else []
    blocks += [_request(each, anchors[each.request]) for each in shown]
    return PageSection("outliers", "Requests that took longer than comparable ones", blocks)


def outlier_table(outliers: Sequence[OutlierRequest], anchors: Mapping[str, str]) -> TableBlock:
    """A row for each outlier."""
    rows: list[list[Cell]] = [
        [
            RichCell(each.request, anchors.get(each.request, "")),
            each.step,
            each.worker,
            seconds_text(each.seconds),
            seconds_text(each.beyond_s),
            each.cause.replace("_", " "),
            turn_text(each.turn) or "-",
            each.sentence,
        ]
        for each in outliers
    ]
    headers = ("request", "step", "worker", "took", "excess", "cause", "turn", "what happened")
    return TableBlock(headers, rows)


def _request(outlier: OutlierRequest, anchor: str) -> FoldBlock:
    title = f"{outlier.request}: {seconds_text(outlier.seconds)}, {outlier.cause.replace('_', ' ')}"
    where = {"step": outlier.step, "worker": outlier.worker, "group": outlier.group}
    blocks: list[Block] = [
        ParagraphBlock(" → ".join(f"{name} {value}" for name, value in where.items() if value)),
        ParagraphBlock(outlier.sentence),
        _phase_table(outlier.phases, outlier.seconds),
    ]
    if outlier.turns:
        blocks.append(_turn_table(outlier.turns))
    if outlier.events:
        kept = longest(outlier.events, MOST_EVENTS, lambda event: float(event.get("seconds", 0.0)))
        chart = request_timeline(kept)
        blocks.append(FigureBlock(f"timeline-{anchor}", "Its turns and events", chart))
        if len(kept) < len(outlier.events):
            text = (
                f"The {len(kept)} longest of {len(outlier.events):,} events are shown; the export to Perfetto has all."
            )
            blocks.append(ParagraphBlock(text, is_note=True))
    return FoldBlock(anchor, title, blocks)


def _phase_table(phases: Mapping[str, float], seconds: float) -> TableBlock:
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    rows = [(name, seconds_text(spent), share_text(spent / seconds if seconds else None)) for name, spent in ordered]
    return TableBlock(("phase", "seconds", "share"), rows)


def _turn_table(turns: Sequence[Mapping[str, Any]]) -> TableBlock:
    """The recorded fields of each turn."""
    fields = list(dict.fromkeys(name for turn in turns for name in turn))
    return TableBlock(
        [name.replace("_", " ") for name in fields], [[_turn_cell(name, turn) for name in fields] for turn in turns]
    )


def _turn_cell(name: str, turn: Mapping[str, Any]) -> str:
    value = turn.get(name)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_number(each)}" for key, each in value.items())
    if name in ("turn", "number") and isinstance(value, int):
        return str(value + 1)
    if name.endswith(("_s", "seconds", "duration")) and isinstance(value, int | float):
        return seconds_text(value)
    return _number(value)


def _number(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return number_text(value) if isinstance(value, int | float) else str(value)


def thrown_section(report: ProfileReport) -> PageSection:
    """What over-sampling threw away, and what other choices would have saved."""
    blocks: list[Block] = []
    steps = report.steps
    thrown = [step.thrown_requests for step in steps]
    discarded = [sum(step.discarded_requests.values()) for step in steps]
    broken = sum(step.broken_attempts for step in steps)
    for title, number, seconds, tokens in (
        ("Thrown away", sum(thrown), [each.thrown_s for each in steps], [each.thrown_tokens for each in steps]),
        ("Stopped at their cap", broken, [each.broken_s for each in steps], [each.broken_tokens for each in steps]),
        ("Discarded", sum(discarded), [each.discarded_s for each in steps], [each.discarded_tokens for each in steps]),
    ):
        if number:
            what = "attempt" if title.startswith("Stopped") else "request"
            cost = f"{seconds_text(sum(seconds))} of generation, {number_text(sum(tokens))} tokens"
            blocks.append(ParagraphBlock(f"{title}: {counted(number, what)}, {cost}."))
    for what, (title, unit) in CHOICES.items():
        blocks += _what_if(what, title, unit, [each for each in report.whatifs if each.what == what])
    return PageSection("thrown", "Thrown away, and what if", blocks)


CHOICES = {
    "cap": ("What if answers ended earlier (max_tokens)?", "max_tokens"),
    "wait_for": ("What if a step waited for fewer?", "share of the requests waited for"),
}


def _what_if(what: str, title: str, unit: str, choices: Sequence[WhatIf]) -> list[Block]:
    rows = [_choice_row(what, each) for each in choices]
    panels = [
        Panel("Saved per step", "seconds", {"": [each.saved_s for each in choices]}),
        Panel("Answers cut or thrown away", "in total", {"": [each.num_cut for each in choices]}),
        Panel("Rewards lost", "sum", {"": [each.reward_lost for each in choices]}),
    ]
    headers = (unit, "saved per step", "answers cut or thrown away", "rewards lost")
    figures = panel_figures(f"what_if_{what}", title, [text_of(row[0]) for row in rows], panels)
    return [*figures, TableBlock(headers, rows)] if rows else []


def _choice_row(what: str, choice: WhatIf) -> list[Cell]:
    value = number_text(choice.value) if what == "cap" else share_text(choice.value)
    return [value, seconds_text(choice.saved_s), number_text(choice.num_cut), number_text(choice.reward_lost)]
