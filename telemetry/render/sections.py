"""The contents and order of a report: findings first, then the run as a whole, then single steps."""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from forebay.telemetry.analysis.report import EngineFigures, Finding, ProfileReport, StepSummary
from forebay.telemetry.numbers import counted, number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render import charts
from forebay.telemetry.render.blocks import (
    Block,
    Cell,
    FigureBlock,
    PageSection,
    ParagraphBlock,
    RichCell,
    TableBlock,
    known_columns,
)
from forebay.telemetry.render.charts import Panel, panel_figures
from forebay.telemetry.render.side_by_side import compared
from forebay.telemetry.render.steps import ReportSelection, chosen, step_section
from forebay.telemetry.render.tails import completion_blocks, outlier_blocks, what_if_blocks
from forebay.telemetry.render.timelines import turn_text

MOST_ROWS = 400
"""Limit for tables with a row for each step."""
_Line = list[float | None]
_OUTLIERS = "Requests that steps waited for last"
NO_FINDING = "Nothing cost as much as 5 % of a step."


def facts_text(report: ProfileReport) -> str:
    """The size of the run, for the report's head."""
    facts = [counted(report.num_steps, "step"), counted(report.num_requests, "request"), seconds_text(report.total_s)]
    return " · ".join(facts)


def sections_of(report: ProfileReport, others: Sequence[ProfileReport] = ()) -> list[PageSection]:
    """All sections in reading order. ``others`` are reports to compare with."""
    shown = chosen(report)
    overall = [
        PageSection("findings", "Findings", _findings(report, shown)),
        PageSection("compare", "Compared", compared([report, *others]) if others else []),
        PageSection("steps", "Steps", _steps(report.steps, shown)),
        PageSection("engines", "Engines", _engines(report.engines)),
        PageSection("completion", "When requests end", completion_blocks(report)),
        PageSection("shares", "Where the time goes", _shares(report)),
        PageSection("outliers", _OUTLIERS, outlier_blocks(report.outliers, shown.requests)),
        PageSection("what_if", "What if", what_if_blocks(report.whatifs)),
    ]
    single = [step_section(report, step, shown) for step in report.steps if step.name in shown.steps]
    if single and len(single) < len(report.steps):
        note = f"{len(single)} of {counted(len(report.steps), 'step')}: those with findings, and the slowest."
        single[0].blocks.append(ParagraphBlock(f"Shown individually: {note}", is_note=True))
    last = PageSection("problems", "Skipped lines", _problems(report))
    return [section for section in (*overall, *single, last) if section.blocks]


def _findings(report: ProfileReport, shown: ReportSelection) -> list[Block]:
    blocks: list[Block] = [ParagraphBlock(NO_FINDING)]
    if report.findings:
        rows = [_finding_row(finding, shown) for finding in report.findings]
        blocks = [TableBlock(("lost", "share", "what happened", "where"), rows)]
    blocks += [ParagraphBlock(sentence) for sentence in report.sentences]
    blocks += [ParagraphBlock(note, is_note=True) for note in report.notes]
    return blocks


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


def _steps(steps: Sequence[StepSummary], shown: ReportSelection) -> list[Block]:
    if not steps:
        return []
    slowest = {step.name for step in sorted(steps, key=lambda step: -step.seconds)[:MOST_ROWS]}
    blocks: list[Block] = [
        FigureBlock("overview_duration", "Duration of each step", charts.overview(steps, shown.steps)),
        known_columns(_STEP_HEADERS, [_step_row(step, shown) for step in steps if step.name in slowest]),
    ]
    if len(slowest) < len(steps):
        text = f"The table has the {MOST_ROWS} slowest of {len(steps):,} steps."
        blocks.append(ParagraphBlock(text, is_note=True))
    return blocks + panel_figures("over_steps", "From step to step", [step.name for step in steps], _panels(steps))


_STEP_HEADERS = (
    *("step", "seconds", "training", "waiting", "sending", "beyond the next group", "requests", "used"),
    *("shortest answer", "mean", "longest", "at the cap", "tokens/s", "cache hits"),
    *("reward", "of the slowest 20 %", "of the rest", "its parts", "released by"),
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
        ", ".join(f"{name} {number_text(part)}" for name, part in step.reward_parts.items()) or "-",
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
        Panel("Parts of rewards", "mean", _by_key(steps, "reward_parts")),
        Panel("Time from first to last end of a group", "mean seconds", {"": of("group_skew")}),
        Panel("Not used", "requests", {"thrown away": thrown, "discarded": discarded}),
    ]


def _by_key(steps: Sequence[StepSummary], field: str, name: Callable[[Any], str] = str) -> dict[str, _Line]:
    keys = sorted({key for step in steps for key in getattr(step, field)})
    return {name(key): [getattr(step, field).get(key) for step in steps] for key in keys}


def _turns(number: int) -> str:
    return counted(number, "turn")


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


def _engines(engines: Sequence[EngineFigures]) -> list[Block]:
    """A row for each engine; the worst value of each column is marked."""
    if not engines:
        return []
    rows: list[list[Cell]] = [
        [each.engine, number_text(each.num_requests), number_text(each.num_calls)] for each in engines
    ]
    for _, value_of, as_text, worst_of in _FIGURES:
        values = [value_of(each) for each in engines]
        worst = _worst([value for value in values if value is not None], worst_of)
        for row, value in zip(rows, values, strict=True):
            row.append(RichCell(as_text(value), is_worst=value is not None and value == worst))
    note = "Medians over the calls. Marked is the worst of a column, if it differs from the others by over 10 %."
    headers = ("engine", "requests", "calls", *(header for header, *_ in _FIGURES))
    return [known_columns(headers, rows), ParagraphBlock(note, is_note=True)]


def _worst(values: list[float], worst_of: Callable[..., float]) -> float | None:
    if len(values) < 2:
        return None
    worst = worst_of(values)
    values.remove(worst)
    usual = median(values)
    return worst if abs(worst - usual) > _WORSE * abs(usual) else None


def _shares(report: ProfileReport) -> list[Block]:
    if not report.phase_shares:
        return []
    rows = []
    for name, share in report.phase_shares.items():
        seconds = fmean(step.phase_seconds.get(name, 0.0) for step in report.steps)
        by_time = report.phase_shares_by_time.get(name)
        rows.append((name, percent_text(share), percent_text(by_time), seconds_text(seconds)))
    chart = charts.shares_over_steps(report.steps, report.phase_shares)
    return [
        TableBlock(("phase", "mean over steps", "by time", "mean seconds per step"), rows),
        FigureBlock("event_percentage_step", "Shares over steps", chart),
    ]


def _problems(report: ProfileReport) -> list[Block]:
    if not report.num_problems:
        return []
    skipped = f"{counted(report.num_problems, 'line')} could not be used and were skipped"
    return [
        ParagraphBlock(f"{skipped}; listed: {len(report.problems)}."),
        TableBlock(("where",), [[each] for each in report.problems]),
    ]
