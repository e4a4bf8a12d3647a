"""The contents and order of a report: findings first, then the run as a whole, then single steps."""

from collections.abc import Callable, Sequence
from typing import Any

from forebay.telemetry.analysis.report import Finding, ProfileReport, StepSummary
from forebay.telemetry.numbers import counted, number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render import charts
from forebay.telemetry.render.blocks import (
    Block,
    Cell,
    FigureBlock,
    PageSection,
    ParagraphBlock,
    TableBlock,
    known_columns,
)
from forebay.telemetry.render.engines import engine_section
from forebay.telemetry.render.panels import Panel, panel_figures
from forebay.telemetry.render.selection import ReportSelection, chosen
from forebay.telemetry.render.side_by_side import compared
from forebay.telemetry.render.steps import step_section
from forebay.telemetry.render.tails import completion_section, outlier_section, what_if_section
from forebay.telemetry.render.timelines import turn_text

MOST_ROWS = 400
"""Limit for tables with a row for each step."""
_Line = list[float | None]
NO_FINDING = "Nothing cost as much as 5 % of a step."


def facts_text(report: ProfileReport) -> str:
    """The size of the run, for the report's head."""
    facts = [counted(report.num_steps, "step"), counted(report.num_requests, "request"), seconds_text(report.total_s)]
    return " · ".join(facts)


def sections_of(report: ProfileReport, others: Sequence[ProfileReport] = ()) -> list[PageSection]:
    """All sections in reading order. ``others`` are reports to compare with."""
    shown = chosen(report)
    overall = [
        _findings(report, shown),
        compared([report, *others]) if others else None,
        _steps(report, shown),
        engine_section(report.engines),
        completion_section(report),
        _shares(report),
        outlier_section(report, shown.requests),
        what_if_section(report.whatifs),
    ]
    single = [step_section(report, step, shown) for step in report.steps if step.name in shown.steps]
    if single and len(single) < len(report.steps):
        note = f"{len(single)} of {counted(len(report.steps), 'step')}: those with findings, and the slowest."
        single[0].blocks.append(ParagraphBlock(f"Shown individually: {note}", is_note=True))
    last = _problems(report)
    return [section for section in (*overall, *single, last) if section is not None and section.blocks]


def _findings(report: ProfileReport, shown: ReportSelection) -> PageSection:
    blocks: list[Block] = [ParagraphBlock(NO_FINDING)]
    if report.findings:
        headers = ("lost", "share", "what happened", "where")
        blocks = [TableBlock(headers, [_finding_row(finding, shown) for finding in report.findings])]
    blocks += [ParagraphBlock(sentence) for sentence in report.sentences]
    blocks += [ParagraphBlock(note, is_note=True) for note in report.notes]
    return PageSection("findings", "Findings", blocks)


def _finding_row(finding: Finding, shown: ReportSelection) -> list[Cell]:
    path = finding.path
    link = shown.link(where_text(finding), step=path.step, request=path.request)
    return [seconds_text(finding.seconds), lost_share(finding), finding.sentence, link]


def lost_share(finding: Finding) -> str:
    """``31 % of step 67``, ``12 % of the run``."""
    whole = f"step {finding.path.step}" if finding.path.step else "a step"
    return f"{share_text(finding.share)} of {'the run' if finding.share_of == 'run' else whole}"


def where_text(finding: Finding) -> str:
    """The path from the step down to the event."""
    path = finding.path
    parts = {"step": path.step, "worker": path.worker, "group": path.group, "request": path.request}
    named = [f"{name} {value}" for name, value in parts.items() if value]
    return " → ".join([*named, *(text for text in (turn_text(path.turn), path.event) if text)]) or "all steps"


def _steps(report: ProfileReport, shown: ReportSelection) -> PageSection:
    steps = report.steps
    if not steps:
        return PageSection("steps", "Steps")
    slowest = {step.name for step in sorted(steps, key=lambda step: -step.seconds)[:MOST_ROWS]}
    blocks: list[Block] = [
        FigureBlock("overview_duration", "Duration of each step", charts.overview(steps, shown.steps)),
        known_columns(_STEP_HEADERS, [_step_row(step, shown) for step in steps if step.name in slowest]),
    ]
    if len(slowest) < len(steps):
        text = f"The table has the {MOST_ROWS} slowest of {len(steps):,} steps."
        blocks.append(ParagraphBlock(text, is_note=True))
    blocks += panel_figures("over_steps", "From step to step", [step.name for step in steps], _panels(steps))
    return PageSection("steps", "Steps", blocks)


_STEP_HEADERS = (
    *("step", "seconds", "training", "waiting", "sending", "beyond the next group", "requests", "used"),
    *("shortest answer", "mean", "longest", "at the cap", "tokens/s", "cache hits"),
    *("reward", "of the slowest 20 %", "of the rest", "released by"),
)


def _step_row(step: StepSummary, shown: ReportSelection) -> list[Cell]:
    marks = [mark for mark, is_so in (("(outlier)", step.is_outlier), ("(open)", step.is_open)) if is_so]
    name = " ".join([step.name, *marks])
    times = (step.seconds, step.train_s, step.wait_s, step.send_s, step.beyond_next_s)
    last = step.critical_path[-1].path if step.critical_path else None
    released = " → ".join(each for each in (last.group, last.request) if each) if last else "-"
    return [
        shown.link(name, step=step.name),
        *map(seconds_text, times),
        *map(number_text, (step.num_requests, step.num_used, step.length_min, step.length_mean, step.length_max)),
        *(share_text(step.share_at_cap), number_text(step.tokens_per_s), share_text(step.cache_hit_rate)),
        *map(number_text, (step.reward_mean, step.reward_of_slowest, step.reward_of_rest)),
        released,
    ]


def _panels(steps: Sequence[StepSummary]) -> list[Panel]:
    def of(field: str) -> _Line:
        return [getattr(step, field) for step in steps]

    lengths = {name: of(f"length_{name}") for name in ("min", "median", "mean", "p95", "max")}
    rewards = {"all": of("reward_mean"), "slowest 20 %": of("reward_of_slowest"), "rest": of("reward_of_rest")}
    thrown: _Line = [step.thrown_requests or None for step in steps]
    discarded: _Line = [sum(step.discarded_requests.values()) or None for step in steps]
    return [
        Panel("Waiting at the barrier, by worker", "seconds", _by_key(steps, "barrier_s")),
        Panel("Requests, by worker", "requests", _by_key(steps, "requests_by_worker")),
        Panel("Time in the engine, by turn", "mean seconds", _by_key(steps, "engine_seconds_by_turn", turn_text)),
        Panel("Requests, by turns", "requests", _by_key(steps, "requests_by_turns", _turns)),
        Panel("Duration, by turns", "mean seconds", _by_key(steps, "mean_seconds_by_turns", _turns)),
        Panel("Throughput", "tokens/s", {"": of("tokens_per_s")}),
        Panel("Prompt tokens from the cache", "%", {"": of("cache_hit_rate")}),
        Panel("Answers at the cap", "%", {"": of("share_at_cap")}),
        Panel("Length of answers", "tokens", lengths),
        Panel("Rewards", "mean", rewards),
        Panel("Time from first to last end of a group", "mean seconds", {"": of("group_skew")}),
        Panel("Not used", "requests", {"thrown away": thrown, "discarded": discarded}),
    ]


def _by_key(steps: Sequence[StepSummary], field: str, name: Callable[[Any], str] = str) -> dict[str, _Line]:
    keys = sorted({key for step in steps for key in getattr(step, field)})
    return {name(key): [getattr(step, field).get(key) for step in steps] for key in keys}


def _turns(number: int) -> str:
    return counted(number, "turn")


def _shares(report: ProfileReport) -> PageSection:
    phases = sorted(report.phase_shares, key=lambda name: -report.phase_shares[name])
    if not phases:
        return PageSection("shares", "Where the time goes")
    rows = []
    for name in phases:
        shares = percent_text(report.phase_shares[name]), percent_text(report.phase_shares_by_time.get(name))
        seconds = sum(step.phase_seconds.get(name, 0.0) for step in report.steps) / max(1, len(report.steps))
        rows.append((name, *shares, seconds_text(seconds)))
    blocks: list[Block] = [
        TableBlock(("phase", "mean over steps", "by time", "mean seconds per step"), rows),
        FigureBlock("event_percentage_step", "Shares over steps", charts.shares_over_steps(report.steps, phases)),
    ]
    return PageSection("shares", "Where the time goes", blocks)


def _problems(report: ProfileReport) -> PageSection:
    blocks: list[Block] = []
    if report.num_problems or report.problems:
        number = max(report.num_problems, len(report.problems))
        blocks.append(ParagraphBlock(f"{counted(number, 'line')} could not be used and were skipped."))
        blocks.append(TableBlock(("where",), [[each] for each in report.problems]))
        if number > len(report.problems):
            blocks.append(ParagraphBlock(f"The first {len(report.problems)} are listed.", is_note=True))
    return PageSection("problems", "Skipped lines", blocks)
