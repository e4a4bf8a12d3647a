"""Single steps: which steps and requests of a report are shown individually, and the section about one step."""

from collections.abc import Mapping
from dataclasses import dataclass

from forebay.telemetry.analysis.report import ProfileReport, StepSummary
from forebay.telemetry.analysis.robust import longest
from forebay.telemetry.numbers import counted, seconds_text
from forebay.telemetry.render import charts, timelines
from forebay.telemetry.render.blocks import Block, Cell, FigureBlock, PageSection, ParagraphBlock, RichCell, TableBlock
from forebay.telemetry.render.tails import curve_table, gap_table, phase_table
from forebay.telemetry.render.timelines import turn_text

MOST_PARTS = 200
"""Limit of parts shown of a critical path: the longest."""
MOST_WORKERS = 64
ALL_WORKERS = "all workers"
MOST_STEPS = 60
"""Limit of steps shown individually. Pictures and tables over all steps include the others."""
MOST_OUTLIERS = 60
"""Limit of requests shown individually."""


@dataclass(frozen=True, slots=True)
class ReportSelection:
    """The steps and requests of a report that are shown individually, with their anchors."""

    steps: dict[str, str]
    """Anchors by step name."""
    requests: dict[str, str]
    """Anchors by request id."""
    first_step: str = ""
    """The step that is shown first."""

    def link(self, text: str, *, step: str = "", request: str = "") -> Cell:
        """``text`` with a link to the request, else to the step, else without a link."""
        return RichCell(text, self.requests.get(request) or self.steps.get(step, ""))


def chosen(report: ProfileReport) -> ReportSelection:
    """Select the steps and requests of greatest interest."""
    named = [finding.path.step for finding in report.findings] + [each.step for each in report.outliers]
    slowest = sorted(report.steps, key=lambda step: (not step.is_outlier, -step.seconds))
    wanted = dict.fromkeys([*(name for name in named if name), *(step.name for step in slowest)])
    names = set(list(wanted)[:MOST_STEPS])
    in_order = [step.name for step in report.steps if step.name in names]
    costly = sorted(report.outliers, key=lambda each: -each.beyond_s)[:MOST_OUTLIERS]
    requests = {each.request: f"request-{index}" for index, each in enumerate(costly)}
    return ReportSelection(
        {name: f"step-{index}" for index, name in enumerate(in_order)}, requests, next(iter(wanted), "")
    )


def step_section(report: ProfileReport, step: StepSummary, shown: ReportSelection) -> PageSection:
    """The section with everything about one step."""
    anchor = shown.steps[step.name]
    blocks: list[Block] = [
        *_lanes(report, step, anchor),
        ParagraphBlock(_as_text(step)),
        *_critical_path(step, anchor, shown.requests),
        *_completion(report, step, anchor),
    ]
    if step.phase_seconds:
        blocks.append(phase_table(step.phase_seconds))
    return PageSection(anchor, f"Step {step.name}", blocks, is_step=True, is_first=step.name == shown.first_step)


def _lanes(report: ProfileReport, step: StepSummary, anchor: str) -> list[Block]:
    own = next((lanes for lanes in report.lanes if lanes.step == step.name), None)
    if own is None:
        return []
    title = "Its requests over time"
    if len(own.lanes) < own.num_requests:
        title += f": {len(own.lanes)} of {own.num_requests:,}, with the last and the slowest"
    return [FigureBlock(f"lanes-{anchor}", title, timelines.step_lanes(own, step))]


def _as_text(step: StepSummary) -> str:
    times = {"training": step.train_s, "waiting for rollouts": step.wait_s, "sending": step.send_s}
    parts = ", ".join(f"{name} {seconds_text(value)}" for name, value in times.items() if value is not None)
    known = f": {parts}" if parts else ""
    requests = f"{counted(step.num_requests, 'request')}, {step.num_used:,} used"
    beyond = step.beyond_next_s
    cost = f" Its last group cost {seconds_text(beyond)} beyond the one before it." if beyond is not None else ""
    return f"{seconds_text(step.seconds)}{known}; {requests}.{cost}"


def _critical_path(step: StepSummary, anchor: str, requests: Mapping[str, str]) -> list[Block]:
    parts = step.critical_path
    if not parts:
        return []
    kept = longest(parts, MOST_PARTS, lambda part: part.seconds)
    title = f"What the step waited for ({seconds_text(sum(part.seconds for part in parts))})"
    if len(kept) < len(parts):
        title += f": the {len(kept)} longest of {len(parts):,} stretches"
    figure = FigureBlock(f"critical_path-{anchor}", title, timelines.critical_path(kept))
    rows: list[list[Cell]] = [
        [
            *(seconds_text(part.begin_s - step.begin_s), seconds_text(part.seconds), part.path.event, part.path.group),
            *(RichCell(part.path.request, requests.get(part.path.request, "")), turn_text(part.path.turn) or "-"),
        ]
        for part in kept
    ]
    return [figure, TableBlock(("from", "lasted", "event", "group", "request", "turn"), rows)]


def _completion(report: ProfileReport, step: StepSummary, anchor: str) -> list[Block]:
    curves = {curve.worker or ALL_WORKERS: curve for curve in report.curves if curve.step == step.name}
    if not curves:
        return []
    gaps = [gap for gap in report.gaps if gap.step == step.name]
    chart = charts.completion(curves, gaps)
    blocks: list[Block] = [
        FigureBlock(f"req_analysis_and_cdf-{anchor}", "When its requests end, by worker", chart),
        curve_table(list(curves.items())[:MOST_WORKERS], "worker", step.barrier_s),
    ]
    return [*blocks, gap_table(gaps)] if gaps else blocks
