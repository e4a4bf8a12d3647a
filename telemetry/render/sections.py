"""The contents and order of a report: findings first, then the run as a whole, then single steps."""

from collections.abc import Sequence

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
from forebay.telemetry.render.charts import turn_text
from forebay.telemetry.render.selection import ReportSelection, chosen, ranked
from forebay.telemetry.render.side_by_side import compared
from forebay.telemetry.render.steps import step_section
from forebay.telemetry.render.tails import completion_section, outlier_section, thrown_section

MOST_ROWS = 400
"""Limit for tables with a row for each step."""


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
        completion_section(report),
        _shares(report),
        outlier_section(report, shown.requests),
        _turns(report.steps),
        _lengths(report.steps),
        thrown_section(report),
    ]
    single = [step_section(report, step, shown) for step in report.steps if step.name in shown.steps]
    if single and len(single) < len(report.steps):
        note = f"{len(single)} of {counted(len(report.steps), 'step')}: those with findings, and the slowest."
        single[0].blocks.insert(0, ParagraphBlock(f"Shown individually: {note}", is_note=True))
    last = _problems(report)
    return [section for section in (*overall, *single, last) if section is not None and section.blocks]


def _findings(report: ProfileReport, shown: ReportSelection) -> PageSection:
    blocks: list[Block] = []
    if report.findings:
        headers = ("lost", "share", "what happened", "where")
        blocks.append(TableBlock(headers, [_finding_row(finding, shown) for finding in ranked(report)]))
    else:
        blocks.append(ParagraphBlock("Nothing cost as much as 5 % of a step."))
    blocks += [ParagraphBlock(sentence) for sentence in report.sentences]
    blocks += [ParagraphBlock(note, is_note=True) for note in report.notes]
    return PageSection("findings", "Findings", blocks)


def _finding_row(finding: Finding, shown: ReportSelection) -> list[Cell]:
    path = finding.path
    link = shown.link(where_text(finding), step=path.step, request=path.request)
    return [seconds_text(finding.seconds), share_text(finding.share), finding.sentence, link]


def where_text(finding: Finding) -> str:
    """The path from the step down to the event."""
    path = finding.path
    parts = {"step": path.step, "worker": path.worker, "group": path.group, "request": path.request}
    named = [f"{name} {value}" for name, value in parts.items() if value]
    return " → ".join([*named, *(text for text in (turn_text(path.turn), path.event) if text)]) or "all steps"


def _steps(report: ProfileReport, shown: ReportSelection) -> PageSection:
    if not report.steps:
        return PageSection("steps", "Steps")
    blocks: list[Block] = [
        FigureBlock("overview_duration", "Duration of each step", charts.overview(report.steps, shown.steps)),
        *_by_worker(report.steps),
        known_columns(_STEP_HEADERS, [_step_row(step, shown) for step in _slowest(report.steps)]),
        *_left_out(len(report.steps)),
    ]
    return PageSection("steps", "Steps", blocks)


_STEP_HEADERS = (
    "step",
    "seconds",
    "training",
    "waiting",
    "sending",
    "beyond the next group",
    "requests",
    "used",
    "released by",
)


def _slowest(steps: Sequence[StepSummary]) -> list[StepSummary]:
    if len(steps) <= MOST_ROWS:
        return list(steps)
    kept = {step.name for step in sorted(steps, key=lambda step: -step.seconds)[:MOST_ROWS]}
    return [step for step in steps if step.name in kept]


def _left_out(number: int) -> list[Block]:
    if number <= MOST_ROWS:
        return []
    return [ParagraphBlock(f"The table has the {MOST_ROWS} slowest of {number:,} steps.", is_note=True)]


def _step_row(step: StepSummary, shown: ReportSelection) -> list[Cell]:
    marks = [mark for mark, is_so in (("(outlier)", step.is_outlier), ("(open)", step.is_open)) if is_so]
    name = " ".join([step.name, *marks])
    times = (step.seconds, step.train_s, step.wait_s, step.send_s, step.beyond_next_s)
    last = step.critical_path[-1].path if step.critical_path else None
    released = " → ".join(each for each in (last.group, last.request) if each) if last else "-"
    used = number_text(step.num_used)
    return [shown.link(name, step=step.name), *map(seconds_text, times), number_text(step.num_requests), used, released]


def _by_worker(steps: Sequence[StepSummary]) -> list[Block]:
    names = list(dict.fromkeys(worker for step in steps for worker in (*step.requests_by_worker, *step.barrier_s)))
    if len(names) < 2:
        return []
    barrier = {name: [step.barrier_s.get(name) for step in steps] for name in names}
    requests = {name: [step.requests_by_worker.get(name) for step in steps] for name in names}
    chart = charts.over_steps(steps, barrier, "seconds at the barrier")
    return [
        FigureBlock("per_step_all_workers", "How long each worker waited at the barrier", chart),
        FigureBlock("requests_by_worker", "Requests by worker", charts.counts_over_steps(steps, requests, "requests")),
    ]


def _shares(report: ProfileReport) -> PageSection:
    phases = sorted(report.phase_shares, key=lambda name: -report.phase_shares[name])
    if not phases:
        return PageSection("shares", "Where the time goes")
    rows = [(name, *_both_shares(report, name), _mean_seconds(report.steps, name)) for name in phases]
    blocks: list[Block] = [
        TableBlock(("phase", "mean over steps", "by time", "mean seconds per step"), rows),
        FigureBlock("event_percentage_step", "Shares over steps", charts.shares_over_steps(report.steps, phases)),
        *(ParagraphBlock(phase.sentence) for phase in report.constant_phases),
    ]
    return PageSection("shares", "Where the time goes", blocks)


def _both_shares(report: ProfileReport, name: str) -> tuple[str, str]:
    return percent_text(report.phase_shares[name]), percent_text(report.phase_shares_by_time.get(name))


def _mean_seconds(steps: Sequence[StepSummary], phase: str) -> str:
    return seconds_text(sum(step.phase_seconds.get(phase, 0.0) for step in steps) / len(steps)) if steps else "-"


def _turns(steps: Sequence[StepSummary]) -> PageSection:
    turns = sorted({turn for step in steps for turn in step.engine_seconds_by_turn})
    numbers = sorted({number for step in steps for number in step.requests_by_turns})
    by_turn = {turn_text(turn): [step.engine_seconds_by_turn.get(turn) for step in steps] for turn in turns}
    counts = {counted(each, "turn"): [step.requests_by_turns.get(each) for step in steps] for each in numbers}
    means = {counted(each, "turn"): [step.mean_seconds_by_turns.get(each) for step in steps] for each in numbers}
    skew = {"group skew": [step.group_skew for step in steps]}
    blocks: list[Block] = []
    if numbers:
        blocks.append(TableBlock(("turns", "requests", "of all", "mean duration"), _turn_rows(steps, numbers)))
    if turns:
        chart = charts.over_steps(steps, by_turn, "mean seconds in the engine")
        blocks.append(FigureBlock("turn_difference", "Time in the engine, by turn", chart))
    if numbers:
        chart = charts.counts_over_steps(steps, counts, "requests")
        blocks.append(FigureBlock("turn_distribution", "Requests by number of turns", chart))
        chart = charts.over_steps(steps, means, "mean seconds of a request")
        blocks.append(FigureBlock("duration_by_turns", "Mean duration by number of turns", chart))
    if any(step.group_skew is not None for step in steps):
        chart = charts.over_steps(steps, skew, "seconds from first to last")
        blocks.append(FigureBlock("group_skew", "Time between the first and last end in a group", chart))
    return PageSection("turns", "Turns and groups", blocks)


def _turn_rows(steps: Sequence[StepSummary], numbers: Sequence[int]) -> list[list[Cell]]:
    counts = {each: sum(step.requests_by_turns.get(each, 0) for step in steps) for each in numbers}
    total = sum(counts.values()) or 1
    spent = {
        each: sum(step.mean_seconds_by_turns.get(each, 0.0) * step.requests_by_turns.get(each, 0) for step in steps)
        for each in numbers
    }
    return [
        [str(each), number_text(counts[each]), share_text(counts[each] / total), _mean(spent[each], counts[each])]
        for each in numbers
    ]


def _mean(total: float, number: int) -> str:
    return seconds_text(total / number) if number else "-"


def _lengths(steps: Sequence[StepSummary]) -> PageSection:
    pictures = {
        "lengths": (
            "Length of answers",
            "tokens",
            ("length_min", "length_median", "length_mean", "length_p95", "length_max"),
        ),
        "share_at_cap": ("Answers that end at the cap", "%", ("share_at_cap",)),
        "throughput": ("Throughput", "tokens per second", ("tokens_per_s",)),
        "cache_hits": ("Prompt tokens from the engine's cache", "%", ("cache_hit_rate",)),
        "rewards": (
            "Reward of the slowest 20 % and of the rest",
            "reward",
            ("reward_mean", "reward_of_slowest", "reward_of_rest"),
        ),
    }
    blocks: list[Block] = []
    for name, (title, unit, fields) in pictures.items():
        factor = 100 if unit == "%" else 1
        lines = {each.replace("_", " "): [_times(getattr(step, each), factor) for step in steps] for each in fields}
        if any(value is not None for values in lines.values() for value in values):
            blocks.append(FigureBlock(name, title, charts.over_steps(steps, lines, unit)))
    if blocks:
        blocks.insert(0, known_columns(_LENGTH_HEADERS, [_length_row(step) for step in _slowest(steps)]))
        blocks[1:1] = _left_out(len(steps))
    return PageSection("lengths", "Length, throughput and reward", blocks)


_LENGTH_HEADERS = (
    "step",
    "min",
    "mean",
    "max",
    "at the cap",
    "tokens/s",
    "cache hits",
    "reward",
    "of the slowest 20 %",
    "of the rest",
)


def _length_row(step: StepSummary) -> list[Cell]:
    lengths = [number_text(each) for each in (step.length_min, step.length_mean, step.length_max)]
    rewards = [number_text(each) for each in (step.reward_mean, step.reward_of_slowest, step.reward_of_rest)]
    cached = share_text(step.cache_hit_rate)
    return [step.name, *lengths, share_text(step.share_at_cap), number_text(step.tokens_per_s), cached, *rewards]


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _problems(report: ProfileReport) -> PageSection:
    blocks: list[Block] = []
    if report.num_problems or report.problems:
        number = max(report.num_problems, len(report.problems))
        blocks.append(ParagraphBlock(f"{counted(number, 'line')} could not be used and were skipped."))
        blocks.append(TableBlock(("where",), [[each] for each in report.problems]))
        if number > len(report.problems):
            blocks.append(ParagraphBlock(f"The first {len(report.problems)} are listed.", is_note=True))
    return PageSection("problems", "Skipped lines", blocks)
