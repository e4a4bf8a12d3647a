"""A profile report on one screen: the costliest findings, then the slowest steps."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from forebay.server.cli.output import VisibleTable, columns_table, show_table
from forebay.telemetry.analysis.compare import compare
from forebay.telemetry.analysis.report import Finding, ProfileReport, StepSummary
from forebay.telemetry.numbers import counted, number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render.sections import NO_FINDING, facts_text, lost_share, where_text
from forebay.telemetry.render.tails import tail_sentence
from forebay.telemetry.render.timelines import turn_text
from forebay.telemetry.visible_text import visible

MOST_FINDINGS = 10
MOST_STEPS = 12
MOST_PHASES = 6
MOST_PROBLEMS = 3


def show_summary(console: Console, report: ProfileReport, others: Sequence[ProfileReport] = ()) -> None:
    """Print the summary of a report, and what differs in ``others``."""
    _line(console, report.source, style="bold")
    _line(console, facts_text(report), style="dim")
    console.print()
    _show_findings(console, report)
    console.print()
    for sentence in filter(None, (tail_sentence(report.curves), *report.sentences)):
        _line(console, sentence)
    if report.steps:
        console.print()
        _show_steps(console, report.steps)
    if report.phase_shares:
        console.print()
        _line(console, f"time: {_shares_text(report)}")
    if others:
        for sentence in compare([report, *others]).sentences:
            _line(console, sentence)
    _show_notes(console, report)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style), soft_wrap=False)


def _show_findings(console: Console, report: ProfileReport) -> None:
    if not report.findings:
        _line(console, NO_FINDING, style="green")
        return
    # The sentence and its location take the rest of the line, and fold within it.
    table = VisibleTable(box=None, padding=(0, 2, 0, 0))
    table.add_column("lost", justify="right", no_wrap=True, style="bold red")
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("what happened", overflow="fold")
    findings = report.findings
    for finding in findings[:MOST_FINDINGS]:
        table.add_row(seconds_text(finding.seconds), lost_share(finding), _sentence(finding))
    console.print(table, markup=False)
    if len(findings) > MOST_FINDINGS:
        _line(console, f"and {counted(len(findings) - MOST_FINDINGS, 'finding')} more", style="dim")


def _sentence(finding: Finding) -> Text:
    text = Text(visible(finding.sentence))
    return text.append(f"\n{visible(where_text(finding))}", style="dim")


def _show_steps(console: Console, steps: Sequence[StepSummary]) -> None:
    costly = sorted(steps, key=lambda step: (not step.is_outlier, -step.seconds))[:MOST_STEPS]
    names = {step.name for step in costly}
    rows = [_step_row(step) for step in steps if step.name in names]
    # A log may lack some of these values.
    known = [index for index in range(len(STEP_HEADERS)) if index == 0 or any(row[index] != "-" for row in rows)]
    table = columns_table(*(STEP_HEADERS[index] for index in known))
    for index, column in zip(known, table.columns, strict=True):
        column.justify = "left" if index in (0, len(STEP_HEADERS) - 1) else "right"
    for row in rows:
        table.add_row(*(row[index] for index in known))
    show_table(console, table)
    if len(steps) > len(names):
        _line(console, f"{len(names)} of {counted(len(steps), 'step')}: the slowest", style="dim")


STEP_HEADERS = ("step", "seconds", "training", "waiting", "sending", "requests", "at cap", "waited longest for")


def _step_row(step: StepSummary) -> list[str]:
    times = map(seconds_text, (step.seconds, step.train_s, step.wait_s, step.send_s))
    return [_name(step), *times, number_text(step.num_requests), share_text(step.share_at_cap), _longest_part(step)]


def _name(step: StepSummary) -> str:
    marks = [mark for mark, is_so in (("!", step.is_outlier), ("(open)", step.is_open)) if is_so]
    return " ".join([step.name, *marks])


def _longest_part(step: StepSummary) -> str:
    if not step.critical_path:
        return "-"
    part = max(step.critical_path, key=lambda part: part.seconds)
    where = " ".join(each for each in (part.path.request, turn_text(part.path.turn)) if each)
    return f"{part.path.event} {seconds_text(part.seconds)}{f', {where}' if where else ''}"


def _shares_text(report: ProfileReport) -> str:
    ordered = sorted(report.phase_shares.items(), key=lambda item: -item[1])
    return " · ".join(f"{name} {percent_text(share)}" for name, share in ordered[:MOST_PHASES])


def _show_notes(console: Console, report: ProfileReport) -> None:
    for note in report.notes:
        _line(console, f"note: {note}", style="yellow")
    if report.num_problems:
        first = "; ".join(report.problems[:MOST_PROBLEMS])
        more = "; …" if report.num_problems > MOST_PROBLEMS else ""
        _line(console, f"left out: {counted(report.num_problems, 'line')} ({first}{more})", style="yellow")
